"""One AdamW step (arXiv 1711.05101) over flat buffers.

Must never change: moments and master weights are fp32 (fp64 in fp64); the compute-type copy is rounded from the new master.
"""

from __future__ import annotations

import math

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.words import phase_of, reference_word_sum
from phalanx.kernels.device import AdamRule, fused_adamw, has_adamw

CHUNK = 1 << 18
"""Elements that go through memory once: gradient, master and moments of a chunk stay in a core's cache between the three passes."""

PIECE = 1 << 20
"""Elements of a piece of work of the compiled kernel, which goes through memory once whatever the size."""


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: float | torch.Tensor = 1.0,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
    sums: torch.Tensor | None = None,
) -> None:
    """Update 1-d `master`, `exp_avg`, `exp_avg_sq` in place from `scale * grad` (any float type) and round `master` into `out`.

    `step` counts from 1. `scale` (a number or a 0-d tensor) is the clipping factor. All tensors have the same length.
    `sums` (7,) int64: the word sums (`kernels/cpu/words.py`) of the state before and after, and of `out`, are added to it.
    """
    native = lanes.rows if impl == "fast" else None
    if native is not None and not native.has_adamw((master, exp_avg, exp_avg_sq), grad, out):
        native = None
    if sums is not None and native is None:
        sums[:3] += _word_sums((master, exp_avg, exp_avg_sq))
    rule = AdamRule(lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=weight_decay, step=step)
    if native is not None:
        corrections = (1 - beta1**step, 1 - beta2**step)
        numbers = (float(scale), lr, beta1, beta2, eps, weight_decay, *corrections)
        sums_n7 = None if sums is None else torch.zeros(-(-master.numel() // PIECE), 7, dtype=torch.int32)

        def run_native(start: int, lane: int) -> None:
            part = slice(start, start + PIECE)
            state, own = (
                (master[part], exp_avg[part], exp_avg_sq[part]),
                None if sums_n7 is None else sums_n7[start // PIECE],
            )
            native.adamw(state, grad[part], None if out is None else out[part], numbers=numbers, sums=own)

        lanes.run(run_native, range(0, master.numel(), PIECE))
        if sums is not None and sums_n7 is not None:
            sums += sums_n7.sum(0)
        return
    if impl == "reference":
        _reference(master, grad.to(master.dtype) * scale, exp_avg, exp_avg_sq, rule)
        if out is not None:
            out.copy_(master)
    elif has_adamw(master):
        fused_adamw((master, exp_avg, exp_avg_sq), grad, out, rule, scale=scale)
    else:
        _by_chunks((master, exp_avg, exp_avg_sq), grad, out, rule, scale=scale, lanes=lanes)
    if sums is not None:
        sums[3:6] += _word_sums((master, exp_avg, exp_avg_sq))
        if out is not None:
            sums[6] += reference_word_sum(out, phase_of(out))


def _word_sums(state: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.stack([reference_word_sum(x) for x in state])


def _by_chunks(
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad: torch.Tensor,
    out: torch.Tensor | None,
    rule: AdamRule,
    *,
    scale: float | torch.Tensor,
    lanes: Lanes,
) -> None:
    """By torch's one-pass kernel, the one behind `torch.optim.AdamW(fused=True)`."""
    master, exp_avg, exp_avg_sq = state
    size = min(CHUNK, master.numel()) if master.device.type == "cpu" else master.numel()
    factor = _there(scale, master)
    in_kernel = master.dtype == torch.float32  # the fused kernel divides by an fp32 number: too coarse for fp64
    step = _there(rule.step, master, dtype=torch.float32)
    divisor = 1.0 / factor if in_kernel else None
    scratch = [torch.empty(size, dtype=master.dtype, device=master.device) for _ in range(lanes.count)]

    def run(start: int, lane: int) -> None:
        part = slice(start, start + size)
        target = master[part]
        wide = scratch[lane][: len(target)].copy_(grad[part])
        if not in_kernel:
            wide.mul_(factor)
        torch._fused_adamw_(  # overwrites `wide`, and counts no steps
            [target], [wide], [exp_avg[part]], [exp_avg_sq[part]], [], [step],
            lr=rule.lr, beta1=rule.beta1, beta2=rule.beta2, weight_decay=rule.weight_decay, eps=rule.eps,
            amsgrad=False, maximize=False, grad_scale=divisor,
        )  # fmt: skip
        if out is not None:
            out[part].copy_(target)

    lanes.run(run, range(0, master.numel(), max(1, size)))


def _there(number: float | torch.Tensor, like: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """0-d, where `like` is; a number is written by the device, for which the host need not wait as for a copy."""
    if isinstance(number, torch.Tensor):
        return number.to(like.device, dtype or like.dtype, non_blocking=True)
    return torch.full((), number, dtype=dtype or like.dtype, device=like.device)


def _reference(
    master: torch.Tensor, grad: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, rule: AdamRule
) -> None:
    exp_avg.lerp_(grad, 1 - rule.beta1)
    exp_avg_sq.mul_(rule.beta2).addcmul_(grad, grad, value=1 - rule.beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - rule.beta2**rule.step)).add_(rule.eps)
    master.mul_(1 - rule.lr * rule.weight_decay)
    master.addcdiv_(exp_avg, denominator, value=-rule.lr / (1 - rule.beta1**rule.step))
