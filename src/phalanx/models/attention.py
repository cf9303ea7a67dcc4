"""Grouped-query attention of one block: projections, optional query/key norms, rotary embedding, the causal core, the way back.

Legend: B sequences, S sequence length, T = B*S, H hidden, A/G query and key/value heads of this rank, D head dim.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.kernels.attention import Segments, causal_attention
from phalanx.kernels.choice import Impl
from phalanx.kernels.linear import projections
from phalanx.kernels.rope import RopeTable, apply_rope
from phalanx.models.context import ModelContext
from phalanx.models.layers import Linear, RMSNorm


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
        self.wo = Linear(ctx, at + "wo")
        if spec.qk_norm != "none":
            self.q_norm = RMSNorm(ctx, at + "q_norm")
            self.k_norm = RMSNorm(ctx, at + "k_norm")
        self.impl: Impl = ctx.kernels
        self.lanes = ctx.lanes
        self.recompute_core = ctx.recompute == "selective"

    def forward(self, x_TH: torch.Tensor, *, table: RopeTable, segments: Segments) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        inputs = (self.wq, self.wk, self.wv)
        weights, biases = [p.weight for p in inputs], [p.bias for p in inputs]
        q, k, v = projections(x_TH, weights, biases, impl=self.impl, lanes=self.lanes)
        if self.recompute_core and torch.is_grad_enabled():
            out_TO: torch.Tensor = checkpoint(
                self._core, q, k, v, table, segments, use_reentrant=False, preserve_rng_state=False
            )
        else:
            out_TO = self._core(q, k, v, table, segments)
        y_TH: torch.Tensor = self.wo(out_TO)
        return y_TH

    def _core(
        self, q_TO: torch.Tensor, k_TO: torch.Tensor, v_TO: torch.Tensor, table: RopeTable, segments: Segments
    ) -> torch.Tensor:
        """Norms, rotation and attention: no parameters but the norms', cheap to do again in the backward pass."""
        if self.norm_over == "hidden":
            q_TO, k_TO = self.q_norm(q_TO), self.k_norm(k_TO)
        num_sequences, length = table.cos_BSN.shape[:2]
        q, k, v = (x.view(num_sequences, length, -1, self.head_dim) for x in (q_TO, k_TO, v_TO))
        if self.norm_over == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, k, table=table, impl=self.impl, lanes=self.lanes)
        return causal_attention(q, k, v, segments, impl=self.impl, lanes=self.lanes).reshape(q_TO.shape)
