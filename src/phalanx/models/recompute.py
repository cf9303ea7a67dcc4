"""Activations computed again in the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from phalanx.models.context import ForwardInfo
from phalanx.models.parallel import SequenceParallel


def again(run: Callable[..., torch.Tensor], info: ForwardInfo, *inputs: torch.Tensor) -> torch.Tensor:
    """`run(*inputs, info)`, of which nothing but the inputs is kept; the second run's collectives have ids of the phase `re`."""
    infos = chain((info,), repeat(replace(info, phase="re")))

    def once(*inputs: torch.Tensor) -> torch.Tensor:
        return run(*inputs, next(infos))

    out: torch.Tensor = checkpoint(once, *inputs, use_reentrant=False, preserve_rng_state=False)
    return out


class Needed(torch.autograd.Function):
    """The identity, whose gradient needs a tensor that it kept, as that of a layer would: what is computed again then is so before the gradient of what comes before this, and up to here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (_,) = ctx.saved_tensors
        return grad


@contextmanager
def normed_again(
    y_TH: torch.Tensor, norm: Callable[[torch.Tensor], torch.Tensor], x_TH: torch.Tensor
) -> Iterator[None]:
    """Whatever is kept of `y = norm(x)` in here for a backward pass is made again there, of `x`, which the norm itself keeps: one pass over memory for half of what a layer keeps
    of the residual stream."""
    storage, size, kept_TH = y_TH.untyped_storage()._cdata, y_TH.numel(), x_TH.detach()
    made: list[weakref.ref[torch.Tensor]] = []

    def pack(saved: torch.Tensor) -> torch.Tensor | torch.Size:
        is_all = saved.untyped_storage()._cdata == storage and saved.numel() == size and saved.is_contiguous()
        return saved.shape if is_all else saved

    def unpack(packed: torch.Tensor | torch.Size) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        again_TH = made[-1]() if made else None  # one for all who need it at a time
        if again_TH is None:
            with torch.no_grad():
                again_TH = norm(kept_TH)
            made[:] = [weakref.ref(again_TH)]
        return again_TH.view(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def attend(
    core: Callable[..., torch.Tensor],
    out: Callable[[torch.Tensor], torch.Tensor],
    inputs: tuple[torch.Tensor, ...],
    info: ForwardInfo,
    *,
    sequence: SequenceParallel,
    in_steps: bool,
    recompute: bool,
) -> torch.Tensor:
    """Attention itself, `core(*inputs, info=info)`, and the projection `out` of what it gives: reported as one operation each unless the core reports its steps. If
    `recompute` the core is computed again.

    On a device that is from the projection's input on, which then need not be kept either: a second run ends where the last tensor that is needed is there, so
    before torch's own product. On a CPU products are operations of ours, which would run again.
    """

    def told(*given: Any) -> torch.Tensor:
        *tensors, info = given
        run = partial(core, info=info)
        return run(*tensors) if in_steps else sequence.told("core", info, run, *tensors)

    def both(*given: Any) -> torch.Tensor:
        attended = told(*given)
        return sequence.told("out", info, out, attended) if given[-1] is info else out(attended)  # of the second run

    if not (recompute and torch.is_grad_enabled()):
        return both(*inputs, info)
    if inputs[0].device.type != "cpu":
        return again(both, info, *inputs)
    return sequence.told("out", info, out, again(told, info, *inputs))
