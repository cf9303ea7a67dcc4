"""Parts that every block is made of: parameters with their local shapes, their initial values, RMSNorm, linear.

Must never change: the initial value of an element of a logical tensor depends on (seed, logical name, expert) and on nothing
else, so that every mapping starts from the same model. Whole logical tensors (one per expert) are drawn and cut to the local boxes.

Legend: T tokens, H hidden, O output width.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

from phalanx.kernels.choice import Impl
from phalanx.kernels.ops.linear import linear
from phalanx.kernels.ops.norm import residual_norm, rms_norm
from phalanx.models.context import ModelContext
from phalanx.plan.layout import LocalParam, Piece, local_param
from phalanx.plan.model import ModelSpec, ParamSpec, parameters


@lru_cache(maxsize=8)
def _table(spec: ModelSpec) -> Mapping[str, ParamSpec]:
    return {p.name: p for p in parameters(spec)}


def local_of(ctx: ModelContext, name: str) -> LocalParam:
    """What this rank holds of the logical parameter `name`."""
    return local_param(_table(ctx.spec)[name], ctx.groups.folding, ctx.placement, ctx.groups.rank)


def new_parameter(ctx: ModelContext, name: str) -> nn.Parameter:
    """An uninitialised parameter with this rank's shape of the logical parameter `name`."""
    return nn.Parameter(torch.empty(local_of(ctx, name).shape, dtype=ctx.dtype, device=ctx.device))


class _Draw(NamedTuple):
    """A logical tensor (of experts, that of one) to be drawn, and the box of it that fills `target`."""

    target: torch.Tensor
    box: tuple[slice, ...]
    key: str
    shape: tuple[int, ...]
    std: float


def initialise(named: Iterable[tuple[str, torch.Tensor]], ctx: ModelContext) -> None:
    """Fill parameters, given with their logical names, with their initial values."""
    draws: list[_Draw] = []
    for name, tensor in named:
        local = local_of(ctx, name)
        for piece in local.pieces:
            target = tensor.detach()[piece.local.slices()]
            if local.param.init == "normal":
                draws += _draws_of(local.param, piece, target, ctx)
            else:
                target.fill_(1.0 if local.param.init == "ones" else 0.0)
    # torch draws with one thread: as many at once as together have the elements of the largest
    threads, most = torch.get_num_threads(), max((math.prod(d.shape) for d in draws), default=0)
    large = [d for d in draws if math.prod(d.shape) * threads > most]
    small = [d for d in draws if math.prod(d.shape) * threads <= most]
    with ThreadPoolExecutor(threads) as pool:
        for some in (*((d,) for d in large), *(small[i : i + threads] for i in range(0, len(small), threads))):
            for draw, whole in zip(some, pool.map(_drawn, some), strict=True):
                draw.target.copy_(whole.mul_(draw.std)[draw.box])


def _draws_of(param: ParamSpec, piece: Piece, target: torch.Tensor, ctx: ModelContext) -> Iterator[_Draw]:
    key, std = f"{ctx.seed}/{param.name}", ctx.spec.init_std / param.init_over
    if param.ep_dim is None:
        yield _Draw(target, piece.box.slices(), key, param.shape, std)
        return
    dim, inner = param.ep_dim, list(piece.box.slices())
    first = inner.pop(dim).start
    shape = param.shape[:dim] + param.shape[dim + 1 :]
    for i in range(piece.box.sizes[dim]):
        yield _Draw(target.select(dim, i), tuple(inner), f"{key}/{first + i}", shape, std)


def _drawn(draw: _Draw) -> torch.Tensor:
    """Normal numbers in fp32 on the CPU, whatever the type and device of the model."""
    number = int.from_bytes(hashlib.sha256(draw.key.encode()).digest()[:8], "big", signed=True)
    return torch.randn(draw.shape, generator=torch.Generator().manual_seed(number))


class RMSNorm(nn.Module):
    """`weight` is replicated; the gradient is the sum over this rank's tokens only."""

    def __init__(self, ctx: ModelContext, name: str) -> None:
        super().__init__()
        self.weight = new_parameter(ctx, f"{name}.weight")
        self.eps = ctx.spec.norm_eps
        self.impl: Impl = ctx.kernels
        self.lanes = ctx.lanes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, impl=self.impl, lanes=self.lanes)

    def after(self, x_TH: torch.Tensor, delta_TH: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream with `delta_TH` added (if any), and its norm."""
        return residual_norm(x_TH, delta_TH, self.weight, self.eps, impl=self.impl, lanes=self.lanes)


class Linear(nn.Module):
    """`x weight^T + bias` with this rank's part of a logical projection. `last`: of what a backward pass runs again, which ends before a product of torch's own, but not before one that adds up
    the gradient of its weight."""

    def __init__(self, ctx: ModelContext, name: str, *, bias: bool = False, last: bool = False) -> None:
        super().__init__()
        self.weight = new_parameter(ctx, f"{name}.weight")
        self.bias = new_parameter(ctx, f"{name}.bias") if bias else None
        self.impl: Impl = ctx.kernels
        self.lanes, self.later, self.weight_sums = ctx.lanes, ctx.later, None if last else ctx.weight_sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(
            x, self.weight, self.bias, impl=self.impl, lanes=self.lanes, later=self.later, weight_sums=self.weight_sums
        )
