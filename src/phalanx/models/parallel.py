"""Tensor parallelism with sequence parallelism: who holds which rows, and how a layer gets the ones that it lacks.

Between the layers each tp rank has its own part of the sequence (arXiv 2205.05198): norms, router and residual stream touch every token once.
A layer whose weights are split gathers the rows of its cp part, computes with its share of the heads or of the width, and scatters the
partial sums back to the parts. Gathering and scattering carry each other's gradients, so a split weight meets all rows, and the gradient
of a replicated weight (a norm, the router) is a partial sum over tp (`plan/mapping/folding.py: dense_replicated`).

Must never change: rows are sequences one after the other, also after a gather (part after part inside each sequence); with tp = 1
everything here is the identity and communicates nothing.

Legend: B sequences, T rows of this rank, N = tp * T rows of its cp part, H hidden, C columns, D head dim, V rows of the vocabulary here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from phalanx.kernels.choice import Impl
from phalanx.kernels.ops.embedding import embed
from phalanx.kernels.ops.norm import rms_norm
from phalanx.models.context import ForwardInfo, ModelContext
from phalanx.models.layers import RMSNorm, new_parameter
from phalanx.plan.program import op_id
from phalanx.runtime.comm import Axis, Collectives, ContextParallel, traced

T = TypeVar("T")


class SequenceParallel:
    """Rows between the tp ranks of one cp part; `name` and `layer` name the operations (`attention.gather`)."""

    def __init__(self, ctx: ModelContext, name: str, layer: int | None) -> None:
        self.axis, self.comms = ctx.groups.axis("tp"), ctx.comms
        self.name, self.layer = name, layer

    def gather(self, x_TH: torch.Tensor, info: ForwardInfo, *, num_sequences: int) -> torch.Tensor:
        """(T, H) of each rank -> (N, H) on all of them. Backward: the sum of their gradients, scattered."""
        size = self.axis.size
        if size == 1:
            return x_TH
        sizes = (x_TH.shape[0],) * size
        rows = self.comms.all_gather_rows(x_TH, sizes=sizes, axis=self.axis, op_id=self.id("gather", info))
        return _swap(rows, size, num_sequences)

    def scatter(self, x_NH: torch.Tensor, info: ForwardInfo, *, num_sequences: int) -> torch.Tensor:
        """(N, H) partial sums of each rank -> this rank's (T, H) of the sum. Backward: a gather."""
        size = self.axis.size
        if size == 1:
            return x_NH
        sizes = (x_NH.shape[0] // size,) * size
        rows = _swap(x_NH, num_sequences, size)
        return self.comms.reduce_scatter_rows(rows, sizes=sizes, axis=self.axis, op_id=self.id("scatter", info))

    def id(self, what: str, info: ForwardInfo) -> str:
        name = f"{self.name}.{what}" if what else self.name
        return op_id(name, microbatch=info.microbatch, layer=self.layer, phase=info.phase)

    def told(self, what: str, info: ForwardInfo, section: Callable[..., T], *inputs: Any) -> T:
        """`section(*inputs)`, which a recorded step shows under this name (empty: that of the operations alone)."""
        return traced(self.comms, self.id(what, info), section, *inputs) if self.comms.trace else section(*inputs)


def _swap(x: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """Rows ordered (outer, inner, run) become (inner, outer, run)."""
    if outer == 1 or inner == 1:
        return x
    return x.view(outer, inner, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def context_parallel(ctx: ModelContext) -> ContextParallel:
    """The way of an attention layer over the ranks that share its sequences."""
    axis = ctx.groups.axis("cp")
    return ContextParallel(axis=axis, comms=ctx.comms, method=ctx.cp_method, impl=ctx.kernels, lanes=ctx.lanes)


class ShardedRMSNorm(RMSNorm):
    """RMSNorm over columns that the tp ranks share (OLMoE normalises all heads at once); `weight` is split like the columns."""

    def __init__(self, ctx: ModelContext, name: str) -> None:
        super().__init__(ctx, name)
        self.axis, self.comms = ctx.groups.axis("tp"), ctx.comms

    def over(self, x_NC: torch.Tensor, *, op_id: str) -> torch.Tensor:
        """(N, C) of each rank, normalised by the mean square of all `tp * C` columns."""
        if self.axis.size == 1:
            return rms_norm(x_NC, self.weight, self.eps, impl=self.impl, lanes=self.lanes)
        x = x_NC.to(torch.promote_types(x_NC.dtype, torch.float32))
        squares_N1 = self.comms.all_reduce_sum(x.square().sum(-1, keepdim=True), self.axis, op_id=op_id)
        scale_N1 = torch.rsqrt(squares_N1 / (x.shape[1] * self.axis.size) + self.eps)
        return (x * scale_N1 * self.weight.to(x.dtype)).to(x_NC.dtype)


class KvHeads:
    """Whole key/value heads where tp is a multiple of their number.

    Each rank stores and computes `1 / copies` of the columns of one head (so storage and gradient rules stay those of a split
    weight) and gets the rest from the ranks that work on the same head.
    """

    def __init__(self, axis: Axis, comms: Collectives, *, num_kv_heads: int) -> None:
        self.axis, self.comms = axis, comms
        self.copies = max(1, axis.size // num_kv_heads)

    def whole(self, k_NC: torch.Tensor, v_NC: torch.Tensor, *, op_id: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, D / copies) each -> (N, D) each. Backward: the sum over the ranks that used the head."""
        copies, rows = self.copies, k_NC.shape[0]
        if copies == 1:
            return k_NC, v_NC
        first = self.axis.index // copies * copies
        splits = [rows if first <= i < first + copies else 0 for i in range(self.axis.size)]
        both = torch.stack((k_NC, v_NC), dim=1).repeat(copies, 1, 1)
        parts = self.comms.all_to_all_rows(both, in_splits=splits, out_splits=splits, axis=self.axis, op_id=op_id)
        k, v = parts.view(copies, rows, 2, -1).unbind(2)
        return tuple(x.transpose(0, 1).reshape(rows, -1) for x in (k, v))  # type: ignore[return-value]


class Embedding(nn.Module):
    """Rows of the vocabulary, split over tp: every rank looks up the tokens that it has rows for; the sum is scattered."""

    def __init__(self, ctx: ModelContext, name: str) -> None:
        super().__init__()
        self.weight = new_parameter(ctx, f"{name}.weight")
        self.sequence = SequenceParallel(ctx, name, None)
        self.impl: Impl = ctx.kernels
        self.lanes = ctx.lanes

    def forward(
        self, tokens_BS: torch.Tensor, info: ForwardInfo, *, sequence: SequenceParallel | None = None
    ) -> torch.Tensor:
        """(B, N / B) tokens -> (T, H). `sequence` names the operations of another look-up than the first."""
        sequence = sequence if sequence is not None else self.sequence
        tokens_N, axis = tokens_BS.flatten(), sequence.axis
        look_up = partial(sequence.told, "", info, partial(embed, impl=self.impl, lanes=self.lanes))
        if axis.size == 1:
            return look_up(tokens_N, self.weight)
        local_N = tokens_N - axis.index * self.weight.shape[0]
        here_N1 = ((local_N >= 0) & (local_N < self.weight.shape[0])).unsqueeze(1)
        x_NH = look_up(local_N.clamp(0, self.weight.shape[0] - 1), self.weight) * here_N1
        return sequence.scatter(x_NH, info, num_sequences=tokens_BS.shape[0])
