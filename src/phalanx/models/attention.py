"""Grouped-query attention of one block: projections, optional query/key norms, rotary embedding, the causal core, the way back.

Legend: B sequences, S positions of this cp rank in each, N = B*S rows of its cp part, T rows of this rank, H hidden, A/G query and key/value
heads of this rank, D head dim, O = A*D or G*D.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from phalanx.kernels.choice import Impl
from phalanx.kernels.ops.linear import projections
from phalanx.kernels.ops.rope import HeadNorms, RopeTable, apply_rope
from phalanx.models.context import ForwardInfo, ModelContext, TokenBatch
from phalanx.models.layers import Linear, RMSNorm
from phalanx.models.parallel import KvHeads, SequenceParallel, ShardedRMSNorm, context_parallel
from phalanx.models.recompute import attend


class Attention(nn.Module):
    """Tensor-parallel ranks hold A and G heads each (their share); `wo` is split along its input."""

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        at, spec = f"layers.{layer}.attention.", ctx.spec
        self.head_dim = spec.head_dim
        self.norm_over: str = spec.qk_norm
        self.wq = Linear(ctx, at + "wq", bias=spec.attention_bias)
        self.wk = Linear(ctx, at + "wk", bias=spec.attention_bias)
        self.wv = Linear(ctx, at + "wv", bias=spec.attention_bias)
        self.wo = Linear(ctx, at + "wo", last=ctx.recompute == "selective")
        if spec.qk_norm != "none":
            norm = RMSNorm if spec.qk_norm == "head" else ShardedRMSNorm
            self.q_norm = norm(ctx, at + "q_norm")
            self.k_norm = norm(ctx, at + "k_norm")
        self.sequence = SequenceParallel(ctx, "attention", layer)
        self.kv_heads = KvHeads(self.sequence.axis, ctx.comms, num_kv_heads=spec.num_kv_heads)
        self.context = context_parallel(ctx)
        self.impl: Impl = ctx.kernels
        self.lanes = ctx.lanes
        self.recompute_core = ctx.recompute == "selective"

    def forward(self, x_TH: torch.Tensor, *, table: RopeTable, info: ForwardInfo, batch: TokenBatch) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        x_NH = self.sequence.gather(x_TH, info, num_sequences=batch.num_sequences)
        q, k, v = self.sequence.told("projections", info, partial(self._project, info=info), x_NH)
        y_NH = attend(
            partial(self._core, table, batch),
            self.wo,
            (q, k, v),
            info,
            sequence=self.sequence,
            in_steps=self.context.in_steps,
            recompute=self.recompute_core,
        )
        return self.sequence.scatter(y_NH, info, num_sequences=batch.num_sequences)

    def _project(self, x_NH: torch.Tensor, info: ForwardInfo) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(N, A*D) and twice (N, G*D), normalised where the norm is over all heads."""
        inputs = (self.wq, self.wk, self.wv)
        weights, biases = [p.weight for p in inputs], [p.bias for p in inputs]
        q, k, v = projections(
            x_NH,
            weights,
            biases,
            impl=self.impl,
            lanes=self.lanes,
            later=self.wq.later,
            weight_sums=self.wq.weight_sums,
        )
        if self.norm_over == "hidden":
            assert isinstance(self.q_norm, ShardedRMSNorm) and isinstance(self.k_norm, ShardedRMSNorm)
            q = self.q_norm.over(q, op_id=self.sequence.id("q_norm", info))
            k = self.k_norm.over(k, op_id=self.sequence.id("k_norm", info))
        k, v = self.kv_heads.whole(k, v, op_id=self.sequence.id("kv", info))
        return q, k, v

    def _core(
        self,
        table: RopeTable,
        batch: TokenBatch,
        q_NO: torch.Tensor,
        k_NO: torch.Tensor,
        v_NO: torch.Tensor,
        info: ForwardInfo,
    ) -> torch.Tensor:
        """Applies per-head norms, rotation and attention: no parameters but the norms', cheap to do again in the backward pass."""
        num_sequences, length = table.cos_BSN.shape[:2]
        q, k, v = (x.view(num_sequences, length, -1, self.head_dim) for x in (q_NO, k_NO, v_NO))
        norms = None
        if self.norm_over == "head":
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q, k = apply_rope(q, k, table=table, norms=norms, impl=self.impl, lanes=self.lanes)
        name = partial(self.sequence.id, info=info)
        return self.context.attention(q, k, v, batch.segments, name=name).reshape(q_NO.shape)
