"""Multi-head latent attention of one block (arXiv 2405.04434 section 2.1): queries, keys and values grow out of narrow latents.

    c = norm(first columns of x wkv_a^T)     keys without position and values of all heads = c wkv_b^T
    r = last columns of x wkv_a^T            one rotated key part that all heads share
    queries = norm(x wq_a^T) wq_b^T          or x wq^T where q_rank = 0

Tensor parallel ranks hold A heads each of `wq_b`, `wkv_b` and `wo`. The way down (`wq_a`, `wkv_a` and the norms) is replicated and works on a
rank's own rows, before these are gathered: it is computed once, the narrow latents travel in place of H columns, and its gradients are partial
sums over tp, as those of every replicated weight (`plan/mapping/folding.py: dense_replicated`). Gathering sums what the heads of all ranks send back.

Must never change: each query head has keys and values of its own; the norms of the latents add LATENT_EPS, whatever the model's `norm_eps`.

Legend: B sequences, S positions of this cp rank in each, N = B*S rows of its cp part, T rows of this rank, H hidden, A heads of this rank,
C columns, D = nope + rope dims of a query or key, R rope dims, V value dims, W = max(D, V).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from phalanx.kernels.choice import Impl
from phalanx.kernels.device import padded
from phalanx.kernels.ops.rope import RopeTable, apply_rope
from phalanx.models.context import ForwardInfo, ModelContext, TokenBatch
from phalanx.models.layers import Linear, RMSNorm
from phalanx.models.parallel import SequenceParallel, context_parallel
from phalanx.models.recompute import attend
from phalanx.plan.model import softmax_factor

LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """Takes the place of `models/attention.py: Attention` where the model has an `MlaSpec`."""

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        at, mla = f"layers.{layer}.attention.", ctx.spec.mla
        assert mla is not None  # decided by the block
        self.mla = mla
        self.wkv_a = Linear(ctx, at + "wkv_a")
        self.kv_norm = _latent_norm(ctx, at + "kv_norm")
        self.wkv_b = Linear(ctx, at + "wkv_b")
        self.wq: Linear | None = None
        if mla.q_rank:
            self.wq_a = Linear(ctx, at + "wq_a")
            self.q_norm = _latent_norm(ctx, at + "q_norm")
            self.wq_b = Linear(ctx, at + "wq_b")
        else:
            self.wq = Linear(ctx, at + "wq")
        self.wo = Linear(ctx, at + "wo", last=ctx.recompute == "selective")
        self.query_factor = softmax_factor(ctx.spec.yarn)
        self.sequence = SequenceParallel(ctx, "attention", layer)
        self.context = context_parallel(ctx)
        self.impl: Impl = ctx.kernels
        self.lanes = ctx.lanes
        self.recompute_core = ctx.recompute == "selective"

    def forward(self, x_TH: torch.Tensor, *, table: RopeTable, info: ForwardInfo, batch: TokenBatch) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        project = partial(self._project, info=info, num_sequences=batch.num_sequences)
        q_NO, kv_NO, key_NR = self.sequence.told("projections", info, project, x_TH)
        y_NH = attend(
            partial(self._core, table, batch),
            self.wo,
            (q_NO, kv_NO, key_NR),
            info,
            sequence=self.sequence,
            in_steps=self.context.in_steps,
            recompute=self.recompute_core,
        )
        return self.sequence.scatter(y_NH, info, num_sequences=batch.num_sequences)

    def _project(
        self, x_TH: torch.Tensor, info: ForwardInfo, *, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (N, A*D), keys without position next to values (N, A*(nope+V)), and the shared key part (N, R), not yet rotated."""
        query_TC = x_TH if self.wq is not None else self.q_norm(self.wq_a(x_TH))
        latent_TC, key_TR = self.wkv_a(x_TH).split((self.mla.kv_rank, self.mla.rope_dim), dim=-1)
        parts = (query_TC, self.kv_norm(latent_TC), key_TR)
        if self.sequence.axis.size > 1:
            together = self.sequence.gather(torch.cat(parts, dim=-1), info, num_sequences=num_sequences)
            parts = together.split([p.shape[-1] for p in parts], dim=-1)
        query_NC, latent_NC, key_NR = parts
        up = self.wq if self.wq is not None else self.wq_b
        return up(query_NC), self.wkv_b(latent_NC), key_NR

    def _core(
        self,
        table: RopeTable,
        batch: TokenBatch,
        q_NO: torch.Tensor,
        kv_NO: torch.Tensor,
        key_NR: torch.Tensor,
        info: ForwardInfo,
    ) -> torch.Tensor:
        """Rotation and attention, (N, A*V): no parameters, cheap to do again in the backward pass."""
        q, k, v = self._heads(q_NO, kv_NO, key_NR, table)
        name = partial(self.sequence.id, info=info)
        attention = partial(self.context.attention, segments=batch.segments, name=name)
        out_BSAV = attention(q, k, v) if self.context.takes_widths(q) else padded(q, k, v, attention)
        return out_BSAV.reshape(q_NO.shape[0], -1)

    def _heads(
        self, q_NO: torch.Tensor, kv_NO: torch.Tensor, key_NR: torch.Tensor, table: RopeTable
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, S, A, D) twice and (B, S, A, V)."""
        mla, (num_sequences, length) = self.mla, table.cos_BSN.shape[:2]
        q_BSAD, kv_BSAC, key_BS1R = (
            x.view(num_sequences, length, -1, width)
            for x, width in (
                (q_NO, mla.nope_dim + mla.rope_dim),
                (kv_NO, mla.nope_dim + mla.value_dim),
                (key_NR, mla.rope_dim),
            )
        )
        q_still, q_turned = q_BSAD.split((mla.nope_dim, mla.rope_dim), dim=-1)
        k_still, v_BSAV = kv_BSAC.split((mla.nope_dim, mla.value_dim), dim=-1)
        if mla.rope_interleaved:
            q_turned, key_BS1R = _halves(q_turned), _halves(key_BS1R)
        q_turned, key_BS1R = apply_rope(q_turned, key_BS1R, table=table, impl=self.impl, lanes=self.lanes)
        q = torch.cat((q_still, q_turned), dim=-1)
        k = torch.cat((k_still, key_BS1R.expand(-1, -1, k_still.shape[2], -1)), dim=-1)
        return q if self.query_factor == 1.0 else q * self.query_factor, k, v_BSAV


def _latent_norm(ctx: ModelContext, name: str) -> RMSNorm:
    norm = RMSNorm(ctx, name)
    norm.eps = LATENT_EPS
    return norm


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Neighbours (2j, 2j+1) of the last dim become j and j + half: the pairs that the rotation expects."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
