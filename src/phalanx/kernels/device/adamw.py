"""AdamW (arXiv 1711.05101) of all runs of a gradient in one launch, whose numbers travel with the launch: nothing is copied to the device.

Must never change: an element's result depends on its own numbers alone, not on the run or the launch it is in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from phalanx.kernels.device.launch import launch, runs_programs, warps_of

BLOCK = 1024
"""Elements that a program takes at once."""


@dataclass(frozen=True, kw_only=True)
class AdamRule:
    """Numbers of one step of AdamW; `step` counts from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


def rounding_seed(step: int) -> int:
    """What the rounding of moments to bf16 gets of a step: 32 bits, far from those of the steps around it (by the golden ratio). Never 1 or a multiple of 16, for which a device would compile other versions."""
    bits = step * 0x9E3779B1 & 0xFFFFFFFF
    return (bits | 3) - ((bits >> 31) << 32)


@dataclass(frozen=True, kw_only=True, eq=False)
class RunTable:
    """Runs of elements that a launch may update, none of which overlap."""

    runs_R4: torch.Tensor
    """int64, ascending, on the device: first element, end, 1 where weights decay (else 0), place in the rounded parameters less place in the state."""
    start: int
    """Element of the state to which the first element of the gradient belongs."""


def has_adamw(master: torch.Tensor) -> bool:
    """The program can update state of this type and place: fp32 (its numbers are)."""
    return runs_programs(master) and master.dtype == torch.float32


def fused_adamw(
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad: torch.Tensor,
    out: torch.Tensor | None,
    rule: AdamRule,
    *,
    scale: float | torch.Tensor,
    table: RunTable | None = None,
) -> None:
    """Update fp32 masters and both moments (fp32, or bf16 as of `kernels/ops/narrow_moments.py`) in place from `scale * grad`, and round the masters into `out`. All are contiguous; a `scale` that is a tensor is 0-d.

    Without a `table` all have the same elements, which all decay. With one, `state` and `out` may have more, and what no run has stays as it is.
    """
    size = grad.numel()
    if not size:
        return
    from phalanx.kernels.device.programs import adamw as programs

    master = state[0]
    launch(
        programs.adamw, (-(-size // BLOCK),),
        *state, grad, master if out is None else out, scale,
        master if table is None else table.runs_R4, 0 if table is None else len(table.runs_R4),
        0 if table is None else table.start, size,
        rule.lr / (1 - rule.beta1**rule.step), rule.lr * rule.weight_decay, 1 - rule.beta1, 1 - rule.beta2,
        1 / math.sqrt(1 - rule.beta2**rule.step), rule.eps, rounding_seed(rule.step),
        HAS_RUNS=table is not None, ROUNDS=out is not None, SCALE_IN_MEMORY=isinstance(scale, torch.Tensor), BLOCK=BLOCK,
        num_warps=warps_of(BLOCK),
    )  # fmt: skip
