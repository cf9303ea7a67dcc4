"""Weight gradients that a backward pass defers, so that the pipeline can compute them in a bubble (arXiv 2401.10241).

A layer with a `DeferredGradients` gives its weights to autograd as constants and leaves, in the backward pass, a job for each: the gradient is then
computed, by the same products on the same numbers, when `run` takes it. What the job needs (the layer's input and the gradient of its
output) stays in memory until then; nothing is computed twice. Matrices of layers are put off; vectors, the router, the embedding and
the head (whose gradient is made with the loss) come with the input gradient: nobody waits for less than they cost.

Must never change: a job reaches the parameter through the weight's own graph, so views of a parameter and the hooks on it work as ever.

Legend: T rows, H inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True, eq=False)
class DeferredProduct:
    """`compute` makes the gradients of `weights`."""

    weights: tuple[torch.Tensor, ...]
    compute: Callable[[], tuple[torch.Tensor, ...]]


class DeferredGradients:
    """The jobs that backward passes have left since they were last taken, in order."""

    def __init__(self) -> None:
        self._jobs: list[DeferredProduct] = []

    def put(self, weights: Sequence[torch.Tensor], compute: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        """Leave a job. Called by backward passes."""
        self._jobs.append(DeferredProduct(tuple(weights), compute))

    def take(self) -> list[DeferredProduct]:
        """All jobs left so far, for one who runs them when it is time."""
        jobs, self._jobs = self._jobs, []
        return jobs


def run(jobs: list[DeferredProduct], *, between: Callable[[], None] = lambda: None) -> None:
    """Run jobs, each freed as soon as it is done. A parameter gets one gradient, also where several jobs have parts of it.

    `between` is called after each.
    """
    groups: dict[tuple[int, ...], list[DeferredProduct]] = {}
    for job in jobs:
        groups.setdefault(tuple(id(_parameter(w)) for w in job.weights), []).append(job)
    jobs.clear()
    for key in list(groups):
        together = groups.pop(key)
        weights = [w for job in together for w in job.weights]
        with torch.no_grad():  # what a layer kept may have a gradient of its own
            grads = [grad for job in together for grad in job.compute()]
        with torch.autograd.set_multithreading_enabled(False):  # hooks may post messages, which this thread alone does
            torch.autograd.backward(weights, grads)
        del together, weights, grads
        between()


def _parameter(weight: torch.Tensor) -> torch.Tensor:
    """What `weight` is, or is a view of."""
    return weight if weight._base is None else weight._base


@dataclass(frozen=True, eq=False)
class Target:
    """Weights, hidden from autograd's bookkeeping, and where their gradient is left for later."""

    weights: tuple[torch.Tensor, ...]
    later: DeferredGradients

    def put(self, compute: Callable[[], tuple[torch.Tensor, ...]]) -> None:
        self.later.put(self.weights, compute)


def target_of(weights: Sequence[torch.Tensor], x: torch.Tensor, later: DeferredGradients | None) -> Target | None:
    """What to give to an operation on `x` in place of the weights' gradients; None where they are not put off.

    Raises `ValueError` where no gradient flows to `x`: no backward pass would come by to leave the job.
    """
    if later is None or not torch.is_grad_enabled():
        return None
    if not x.requires_grad:
        raise ValueError("weight gradients can be deferred only where the layer's input has a gradient too")
    return Target(tuple(weights), later)


def later_linear(
    x: torch.Tensor, weight_OH: torch.Tensor, bias_O: torch.Tensor | None, later: DeferredGradients
) -> torch.Tensor:
    """`F.linear` whose weight gradient is put off; any leading dims."""
    out: torch.Tensor = _Linear.apply(x, bias_O, weight_OH.detach(), target_of([weight_OH], x, later))
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias_O: torch.Tensor | None, weight_OH: torch.Tensor, target: Target | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_OH)
        ctx.target = target
        return F.linear(x, weight_OH, bias_O)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight_OH = ctx.saved_tensors
        dy_TO, x_TH = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
        ctx.target.put(lambda: (dy_TO.T @ x_TH,))
        dx = dy @ weight_OH if ctx.needs_input_grad[0] else None
        return dx, dy_TO.sum(0) if ctx.needs_input_grad[1] else None, None, None
