"""The shape of any decoder, as far as time and memory depend on it, and its FLOPs by a named convention.

`plan/model/model.py` describes the models that Phalanx trains; published measurements are of others too (feed-forward layers of two matrices, no
experts at all), so the simulator has a shape of its own. For every preset of `plan/model/model.py` its FLOPs are those of
`plan.model.flops_per_token` (a test). Must never change: FLOPs name their convention, because published figures use several.

    causal    attention counts the lower half of the scores (Megatron-LM since core 0.12)
    full      attention counts all scores (Megatron-LM before, PaLM's appendix B)

H hidden, a query heads, g key/value heads, d head dim, F width of an expert, S sequence length, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from phalanx.plan.model import MlaSpec, ModelSpec

Convention = Literal["causal", "full"]


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Widths of multi-head latent attention."""

    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What time and memory depend on. `ffn_matrices` is 3 for gated feed-forward layers, else 2."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    top_k: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    ffn_matrices: int = 3
    mtp: int = 0
    latent: Latent | None = None
    tied: bool = False
    groups: int = 1
    """Group-limited routing: the groups of experts ..."""
    group_top_k: int = 1
    """... of which a token may choose so many."""

    @property
    def moe_layers(self) -> int:
        return max(0, self.layers - self.dense_layers) if self.experts else 0

    def is_moe(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    # ---- parameters

    @property
    def attention_params(self) -> int:
        """Weights of one attention layer."""
        h, m = self.hidden, self.latent
        if m is None:
            return h * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        q_dim = m.nope_dim + m.rope_dim
        query = m.q_rank * (h + self.heads * q_dim) if m.q_rank else h * self.heads * q_dim
        return query + m.kv_rank * (h + self.heads * (m.nope_dim + m.value_dim)) + h * m.rope_dim + self.value_width * h

    @property
    def value_width(self) -> int:
        """Columns that attention hands to its output projection."""
        return self.heads * (self.latent.value_dim if self.latent else self.head_dim)

    @property
    def expert_params(self) -> int:
        """Weights of one routed expert."""
        return self.ffn_matrices * self.hidden * self.expert_ffn

    @property
    def shared_params(self) -> int:
        return self.ffn_matrices * self.hidden * self.shared_ffn

    @property
    def dense_params(self) -> int:
        """Weights of the feed-forward part of a layer without experts."""
        return self.ffn_matrices * self.hidden * self.dense_ffn

    @property
    def table_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """All matrices; norms and biases are less than a thousandth."""
        moe = self.moe_layers * (self.experts * self.expert_params + self.shared_params + self.experts * self.hidden)
        dense = (self.layers - self.moe_layers) * self.dense_params
        tables = (1 if self.tied else 2) * self.table_params
        further = self.mtp * (self.attention_params + self._ffn_of_last(all_experts=True) + 2 * self.hidden**2)
        return self.layers * self.attention_params + moe + dense + tables + further

    def _ffn_of_last(self, *, all_experts: bool) -> int:
        if not self.experts:
            return self.dense_params
        return (self.experts if all_experts else self.top_k) * self.expert_params + self.shared_params


def core_flops(shape: Shape, seq: int, *, convention: Convention) -> float:
    """Multiply-adds per token of scores and values of one layer, forward."""
    share = 0.5 if convention == "causal" else 1.0
    qk = shape.head_dim if shape.latent is None else shape.latent.nope_dim + shape.latent.rope_dim
    value = shape.head_dim if shape.latent is None else shape.latent.value_dim
    return share * seq * shape.heads * (qk + value)


def flops_per_token(shape: Shape, seq: int, *, convention: Convention = "causal") -> float:
    """FLOPs of forward and backward of one token: 2 for a multiply-add, 3 passes; the router's product is not counted (Megatron-LM)."""
    blocks = (shape.layers + shape.mtp) * (shape.attention_params + core_flops(shape, seq, convention=convention))
    active = shape.top_k * shape.expert_params + shape.shared_params
    feed = shape.moe_layers * active + (shape.layers - shape.moe_layers) * shape.dense_params
    feed += shape.mtp * shape._ffn_of_last(all_experts=False)
    head = (1 + shape.mtp) * shape.table_params + shape.mtp * 2 * shape.hidden**2
    return 6.0 * (blocks + feed + head)


def shape_of(spec: ModelSpec) -> Shape:
    """The shape of a model that Phalanx trains."""
    m = spec.mla
    latent = None
    if m is not None:
        latent = Latent(
            q_rank=m.q_rank, kv_rank=m.kv_rank, nope_dim=m.nope_dim, rope_dim=m.rope_dim, value_dim=m.value_dim
        )
    has_experts = bool(spec.moe_layers)
    return Shape(
        name=spec.name,
        layers=spec.num_layers,
        hidden=spec.hidden,
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab=spec.vocab,
        experts=spec.num_experts if has_experts else 0,
        top_k=spec.top_k if has_experts else 0,
        expert_ffn=spec.expert_ffn,
        shared_ffn=spec.shared_ffn if has_experts else 0,
        dense_layers=spec.dense_layers,
        dense_ffn=spec.dense_ffn,
        mtp=spec.mtp_layers,
        latent=latent,
        tied=spec.tied_embeddings,
        groups=spec.router.num_groups,
        group_top_k=spec.router.group_topk,
    )


def spec_of(shape: Shape) -> ModelSpec:
    """The shape as a model of `plan/model/model.py`, for rules and costs that are asked there; what they do not read is left at its default."""
    m = shape.latent
    mla = None
    if m is not None:
        mla = MlaSpec(
            q_rank=m.q_rank, kv_rank=m.kv_rank, nope_dim=m.nope_dim, rope_dim=m.rope_dim, value_dim=m.value_dim
        )
    dense = not shape.experts
    return ModelSpec(
        name=shape.name,
        num_layers=shape.layers,
        hidden=shape.hidden,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab=shape.vocab,
        num_experts=max(1, shape.experts),
        top_k=max(1, shape.top_k),
        expert_ffn=max(1, shape.expert_ffn),
        shared_ffn=shape.shared_ffn,
        dense_layers=shape.layers if dense else shape.dense_layers,
        dense_ffn=shape.dense_ffn,
        mtp_layers=shape.mtp,
        tied_embeddings=shape.tied,
        mla=mla,
    )
