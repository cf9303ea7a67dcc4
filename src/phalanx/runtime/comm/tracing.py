"""Events of what a rank computes, forward and backward, in steps that are recorded.

A backward pass has no code of ours around it, so a section of the forward pass is put between two identities: autograd runs the gradient of
the one behind it before, and of the one before it after everything in between. They copy nothing and change no number.

Must never change: without `trace` a section is called as if it stood there alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.row_collectives import backward_id

T = TypeVar("T")


def traced(comms: Collectives, op_id: str, section: Callable[..., T], *inputs: Any) -> T:
    """`section(*inputs)`, recorded as a `core.events.Operation` when it runs and once more when its gradient does.

    `section` returns a tensor, a tuple or a dataclass of tensors. Its gradient is recorded only where an input has one, tensors that it has
    otherwise (weights) do not count. Times are the host's: on a device those of launching.
    """
    if not comms.trace:
        return section(*inputs)
    clock = _Clock(comms, backward_id(op_id)) if torch.is_grad_enabled() else None
    if clock is not None:
        inputs = tuple(_marked(inputs, clock.end))
    with comms.doing(op_id):
        out = section(*inputs)
    return out if clock is None else _mark_result(out, clock)


class _Clock:
    """When the gradient of a section began."""

    def __init__(self, comms: Collectives, op_id: str) -> None:
        self.comms, self.op_id = comms, op_id
        self._begin_s: float | None = None

    def begin(self) -> None:
        self._begin_s = time.monotonic()

    def end(self) -> None:
        begin_s, self._begin_s = self._begin_s, None
        if begin_s is not None and self.comms.trace:
            self.comms.did(self.op_id, "compute", begin_s)


def _mark_result(out: Any, clock: _Clock) -> Any:
    if isinstance(out, torch.Tensor):
        return _marked((out,), clock.begin)[0]
    if isinstance(out, tuple):
        return tuple(_marked(out, clock.begin))
    names = [field.name for field in dataclasses.fields(out)]
    values = _marked([getattr(out, name) for name in names], clock.begin)
    return dataclasses.replace(out, **dict(zip(names, values, strict=True)))


def _marked(values: Any, passed: Callable[[], None]) -> list[Any]:
    """`values`, those with a gradient passed through one mark together."""
    marked = list(values)
    places = [i for i, x in enumerate(marked) if isinstance(x, torch.Tensor) and x.requires_grad]
    if places:
        through = _Mark.apply(passed, *(marked[i] for i in places))
        for i, x in zip(places, through, strict=True):
            marked[i] = x
    return marked


class _Mark(torch.autograd.Function):
    """Calls `passed` when the gradients of `xs` pass by."""

    @staticmethod
    def forward(ctx: Any, passed: Callable[[], None], *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.passed = passed
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in xs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.passed()
        return None, *grads
