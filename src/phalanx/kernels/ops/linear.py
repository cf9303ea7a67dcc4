"""`x weight^T + bias`, for one projection or several of the same input at once.

On a CPU the output columns are cut into pieces for the lanes: a piece sees all rows, because oneDNN rearranges the weight at every call and
that cost is shared by the rows. With `later` the gradients of the weights are put off (`kernels/ops/deferred.py`).

Legend: T rows, H inputs, O outputs of one projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.products import checked_linear
from phalanx.kernels.device import WeightSum, WeightSums, sums_of
from phalanx.kernels.ops.deferred import DeferredGradients, Target, later_linear, target_of

COLUMNS = 256
"""Width of a piece."""
ROWS = 4096
"""Most rows of a piece."""
WEIGHT_ROWS = 512
"""Rows of a weight's gradient that are one piece: all rows of `x` are rearranged for each."""
INPUT_ROWS = 1024
"""Rows of the input's gradient that are one piece: all weights are rearranged for each."""


def linear(
    x: torch.Tensor,
    weight_OH: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
    later: DeferredGradients | None = None,
    weight_sums: WeightSums | None = None,
) -> torch.Tensor:
    """One projection; any leading dims."""
    (y,) = projections(x, [weight_OH], [bias_O], impl=impl, lanes=lanes, later=later, weight_sums=weight_sums)
    return y


def projections(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    *,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
    later: DeferredGradients | None = None,
    weight_sums: WeightSums | None = None,
) -> tuple[torch.Tensor, ...]:
    """`x` through each weight (and bias, or None), in the type of `x`; any leading dims. Gradients of weights that have one in `weight_sums` are added there, by their products."""
    target = target_of(weights, x, later)
    if impl == "reference" or x.device.type != "cpu" or weight_sums is not None:
        if lanes.sums is not None and target is None:
            return tuple(checked_linear(lanes.sums, x, w, b) for w, b in zip(weights, biases, strict=True))
        into = sums_of(weight_sums, weights)
        if (later is None or target is None) and (len(weights) > 1 or into) and impl != "reference":
            several: tuple[torch.Tensor, ...] = _Projections.apply(len(weights), into, x, *weights, *biases)
            return several
        if later is None or target is None:
            return tuple(F.linear(x, w, b) for w, b in zip(weights, biases, strict=True))
        return tuple(later_linear(x, w, b, later) for w, b in zip(weights, biases, strict=True))
    x_TH = x.reshape(-1, x.shape[-1])
    constant = weights if target is None else [w.detach() for w in weights]
    out: tuple[torch.Tensor, ...] = _CpuLinear.apply(lanes, target, len(weights), x_TH, *constant, *biases)
    return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in out)


def _ranges(total: int, size: int) -> list[slice]:
    """Equal cuts of at most `size`."""
    num = -(-total // size)
    return [slice(total * i // num, total * (i + 1) // num) for i in range(num)]


@dataclass(frozen=True)
class _Part:
    """A piece of work on projection `which` (all of them where it does not matter)."""

    which: int
    rows: slice
    columns: slice


def _parts(rows: int, widths: Sequence[int]) -> list[_Part]:
    return [
        _Part(i, r, c) for i, width in enumerate(widths) for r in _ranges(rows, ROWS) for c in _ranges(width, COLUMNS)
    ]


class _Projections(torch.autograd.Function):
    """Projections of one input on a device: its gradient is added up by the products themselves, not by passes over memory between them, and so are those of weights that have a sum."""

    @staticmethod
    def forward(
        ctx: Any, num: int, into: tuple[WeightSum | None, ...], x: torch.Tensor, *operands: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = operands[:num], operands[num:]
        ctx.save_for_backward(x, *weights)
        ctx.into = into or (None,) * num
        ctx.has_bias = [bias is not None for bias in biases]
        pairs = zip(weights, biases, strict=True)
        return tuple(F.linear(x, weight, bias) for weight, bias in pairs if weight is not None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x_TH, flat = x.reshape(-1, x.shape[-1]), [grad.reshape(-1, grad.shape[-1]) for grad in grads]
        dx_TH = None
        if ctx.needs_input_grad[2]:
            dx_TH = flat[0] @ weights[0]
            for dy_TO, weight_OH in zip(flat[1:], weights[1:], strict=True):
                dx_TH.addmm_(dy_TO, weight_OH)
        d_weights: list[torch.Tensor | None] = []
        for dy_TO, total in zip(flat, ctx.into, strict=True):
            d_weights.append(dy_TO.T @ x_TH if total is None else total.add(dy_TO, x_TH))
        d_biases = [dy_TO.sum(0) if has else None for dy_TO, has in zip(flat, ctx.has_bias, strict=True)]
        return None, None, None if dx_TH is None else dx_TH.view(x.shape), *d_weights, *d_biases


class _CpuLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, lanes: Lanes, target: Target | None, num: int, x_TH: torch.Tensor, *operands: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = operands[:num], operands[num:]
        out = tuple(x_TH.new_empty(x_TH.shape[0], w.shape[0]) for w in weights if w is not None)

        def run(part: _Part, lane: int) -> None:
            weight_OH, bias_O = weights[part.which], biases[part.which]
            assert weight_OH is not None
            y_to = out[part.which][part.rows, part.columns]
            factors = x_TH[part.rows], weight_OH[part.columns].T
            torch.mm(*factors, out=y_to)
            lanes.check("linear forward", y_to, factors)
            if bias_O is not None:
                y_to.add_(bias_O[part.columns])

        lanes.run(run, _parts(x_TH.shape[0], [y.shape[1] for y in out]))
        ctx.save_for_backward(x_TH, *weights)
        ctx.lanes, ctx.target, ctx.has_bias = lanes, target, [b is not None for b in biases]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TH, *weights = ctx.saved_tensors
        lanes, num = ctx.lanes, len(weights)
        needs_x, needs_w, needs_b = (
            ctx.needs_input_grad[3],
            ctx.needs_input_grad[4 : 4 + num],
            ctx.needs_input_grad[4 + num :],
        )
        later = ctx.target is not None
        dx_TH = grads[0].new_empty(x_TH.shape) if needs_x else None
        d_weights = [
            w.new_empty(w.shape) if need and not later else None for w, need in zip(weights, needs_w, strict=True)
        ]
        _gradients(grads, x_TH, weights, dx_TH, d_weights, lanes)
        if later:
            ctx.target.put(lambda: _weight_gradients(grads, x_TH, weights, lanes))
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        d_biases = [
            g.sum(0, dtype=wide).to(g.dtype) if has and needs else None
            for g, has, needs in zip(grads, ctx.has_bias, needs_b, strict=True)
        ]
        return None, None, None, dx_TH, *d_weights, *d_biases


def _gradients(
    grads: Sequence[torch.Tensor],
    x_TH: torch.Tensor,
    weights: Sequence[torch.Tensor],
    dx_TH: torch.Tensor | None,
    d_weights: Sequence[torch.Tensor | None],
    lanes: Lanes,
) -> None:
    """`dx`, the sum over projections of `dy weight`, and each `d_weight = dy^T x`, all in one run of the lanes."""

    def input_gradient(rows: slice) -> None:
        assert dx_TH is not None
        dx_tH, factors = dx_TH[rows], [(dy_TO[rows], w) for dy_TO, w in zip(grads, weights, strict=True)]
        torch.mm(*factors[0], out=dx_tH)
        for dy_tO, weight_OH in factors[1:]:
            dx_tH.addmm_(dy_tO, weight_OH)
        lanes.check("linear input gradient", dx_tH, *factors)

    def weight_gradient(which: int, columns: slice) -> None:
        target = d_weights[which]
        assert target is not None
        factors, d_weight_oH = (grads[which][:, columns].T, x_TH), target[columns]
        torch.mm(*factors, out=d_weight_oH)
        lanes.check("linear weight gradient", d_weight_oH, factors)

    work: list[Callable[[], None]] = []
    if dx_TH is not None:
        work += [partial(input_gradient, r) for r in _ranges(dx_TH.shape[0], INPUT_ROWS)]
    for i, target in enumerate(d_weights):
        if target is not None:
            work += [partial(weight_gradient, i, c) for c in _ranges(target.shape[0], WEIGHT_ROWS)]
    lanes.run(lambda piece, _: piece(), work)


def _weight_gradients(
    grads: Sequence[torch.Tensor], x_TH: torch.Tensor, weights: Sequence[torch.Tensor], lanes: Lanes
) -> tuple[torch.Tensor, ...]:
    """The weight gradients alone: the very products of a backward pass that does all at once."""
    out = tuple(w.new_empty(w.shape) for w in weights)
    _gradients(grads, x_TH, weights, None, out, lanes)
    return out
