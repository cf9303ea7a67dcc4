"""The shape of a model: its parameters as a table, its FLOPs, its presets.

Decides what exists (names, logical shapes, which dim each axis splits, which gradient family); everything downstream (modules, layout,
gradient rules, checkpoints, verification, memory) reads this table. A test holds the modules of `models/` against it.

Shapes: V vocabulary, H hidden, A query heads, G key/value heads, D head dim, E experts, F expert ffn, S shared ffn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from phalanx.core.config import ModelConfig, RouterConfig
from phalanx.core.errors import ConfigError, PlanError, Problem, nearest, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.rules import LIMITS, MOST_EXPERTS, plain
from phalanx.plan.model.rope import YarnSpec

Convention = Literal["causal", "full"]
"""How FLOPs of attention are counted, and a figure names its own: the lower half of the scores (Megatron-LM since core 0.12), or all of them (Megatron-LM before, PaLM's appendix B)."""


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """How tokens choose experts, fully resolved (see `core.config.RouterConfig` for the words)."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    softmax_order: Literal["before_topk", "after_topk"] = "before_topk"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    group_topk: int = 1
    group_score: Literal["sum_topk", "top2", "max"] = "sum_topk"
    z_loss: float = 0.0
    aux_loss: float = 0.0
    aux_scope: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    bias_rate: float = 0.0
    force: Literal["none", "balanced", "imbalanced"] = "none"
    force_skew: float = 1.0


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention of DeepSeek-V2/V3 (arXiv 2405.04434): ranks and head dims of the compressed projections."""

    q_rank: int
    """0: queries are projected directly."""
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope_interleaved: bool = True
    """Neighbouring dims form a pair, as in the published weights; else dim j and j + rope_dim / 2."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec(Hashed):
    """A decoder: `num_layers` blocks of attention and experts (the first `dense_layers` with a dense MLP instead)."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    num_experts: int
    top_k: int
    expert_ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    """The shared expert's output is multiplied by sigmoid(x . w), one weight vector per layer (Qwen2-MoE)."""
    dense_layers: int = 0
    dense_ffn: int = 0
    ffn_matrices: Literal[2, 3] = 3
    """Matrices of a feed-forward layer: 3 with a gate, as all models here that are trained; 2 without, as some published ones whose time is predicted."""
    qk_norm: Literal["none", "head", "hidden"] = "none"
    """RMSNorm on queries and keys: per head (Qwen3), or over all heads at once (OLMoE)."""
    attention_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    tied_embeddings: bool = False
    mtp_layers: int = 0
    """Blocks after the last one, each of which predicts one token further ahead in training (arXiv 2412.19437 section 2.2)."""
    mtp_weight: float = 0.3
    rope_theta: float = 10000.0
    yarn: YarnSpec | None = None
    norm_eps: float = 1e-5
    init_std: float = 0.02
    """Standard deviation of initial matrices."""
    mla: MlaSpec | None = None
    router: RouterSpec = field(default_factory=RouterSpec)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts, blocks of multi-token prediction included."""
        main = range(self.dense_layers, self.num_layers)
        return (*main, *self.mtp_blocks) if main else ()

    @property
    def mtp_blocks(self) -> range:
        """Layer numbers of the blocks of multi-token prediction: they follow the last layer, as on disk. Like it, they have experts or not."""
        return range(self.num_layers, self.num_layers + self.mtp_layers)

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts, blocks of multi-token prediction not counted; 0 in a model without experts."""
        return max(0, self.num_layers - self.dense_layers)

    @property
    def table_at_both_ends(self) -> bool:
        """The last stage needs the embedding too: as its head, or for the tokens that multi-token prediction looks up."""
        return self.tied_embeddings or self.mtp_layers > 0

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that the rotary embedding turns."""
        return self.head_dim if self.mla is None else self.mla.rope_dim

    def to_dict(self) -> dict[str, Any]:
        """All numbers but those of initial values, which a run has once it has begun; what checkpoints are older than only where it is another."""
        table = dataclasses.asdict(self)
        del table["init_std"]
        if self.ffn_matrices == 3:
            del table["ffn_matrices"]
        return table

    def check(self) -> None:
        """Raise `PlanError` with everything that is wrong with the shape."""
        raise_if(model_problems(self), PlanError, subject=f"model {self.name}")

    def explain(self) -> str:
        """The shape in a few lines that a person reads."""
        kind = "latent attention" if self.mla else f"{self.num_kv_heads} key/value heads of {self.head_dim}"
        experts = f"{len(self.moe_layers)} x {self.num_experts} experts, top-{self.top_k}, ffn {self.expert_ffn}"
        extra = f", shared {self.shared_ffn}" if self.shared_ffn else ""
        extra += f", {self.dense_layers} dense layers of {self.dense_ffn}" if self.dense_layers else ""
        extra += f", {self.mtp_layers} more tokens predicted" if self.mtp_layers else ""
        return (
            f"{self.name}: {self.num_layers} layers, hidden {self.hidden}, {self.num_heads} heads, {kind}, vocab {self.vocab}\n"
            f"  {experts}{extra}, {self.router.score} router\n"
            f"  {self.num_params:,} parameters, {self.active_params:,} active per token"
        )

    @property
    def num_params(self) -> int:
        return sum(p.num_elements for p in parameters(self))

    @property
    def active_params(self) -> int:
        """Parameters that one token meets: all but the experts it is not routed to."""
        experts = sum(p.num_elements for p in parameters(self) if p.family == "expert")
        return self.num_params - experts + experts * self.top_k // max(self.num_experts, 1)

    # ---- elements of matrices (norms and biases are less than a thousandth)

    @property
    def attention_matrices(self) -> int:
        """Elements of the matrices of one attention layer."""
        h, m = self.hidden, self.mla
        if m is None:
            return h * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        q_dim = m.nope_dim + m.rope_dim
        query = m.q_rank * (h + self.num_heads * q_dim) if m.q_rank else h * self.num_heads * q_dim
        latent = m.kv_rank * (h + self.num_heads * (m.nope_dim + m.value_dim)) + h * m.rope_dim
        return query + latent + self.value_width * h

    @property
    def value_width(self) -> int:
        """Columns that attention hands to its output projection."""
        return self.num_heads * (self.mla.value_dim if self.mla else self.head_dim)

    def score_products(self, seq_len: int, *, attention: Convention = "causal") -> float:
        """Multiply-adds per token of the scores and values of one attention layer, forward."""
        m = self.mla
        qk, value = (self.head_dim, self.head_dim) if m is None else (m.nope_dim + m.rope_dim, m.value_dim)
        return (0.5 if attention == "causal" else 1.0) * seq_len * self.num_heads * (qk + value)

    @property
    def expert_matrices(self) -> int:
        """Elements of the matrices of one routed expert."""
        return self.ffn_matrices * self.hidden * self.expert_ffn

    @property
    def shared_matrices(self) -> int:
        """Elements of the matrices of the shared expert of a layer."""
        return self.ffn_matrices * self.hidden * self.shared_ffn

    @property
    def dense_matrices(self) -> int:
        """Elements of the matrices of the feed-forward part of a layer without experts."""
        return self.ffn_matrices * self.hidden * self.dense_ffn


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One logical parameter. `*_dim` says which dim an axis splits (None: that axis does not split it)."""

    name: str
    shape: tuple[int, ...]
    family: Literal["dense_sharded", "dense_replicated", "dense_tied", "expert"]
    """Row of the gradient rules (`plan/mapping/folding.py`). `dense_tied` is an embedding that the stage of the head uses too."""
    tp_dim: int | None = None
    ep_dim: int | None = None
    etp_dim: int | None = None
    init: Literal["normal", "ones", "zeros"] = "normal"
    init_over: float = 1.0
    """The model's `init_std` over this is the standard deviation of its initial values."""
    layer: int | None = None
    decay: bool = True
    """Weight decay applies (matrices, not norms and biases)."""

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


@lru_cache(maxsize=8)
def parameters(spec: ModelSpec) -> tuple[ParamSpec, ...]:
    """All trainable parameters in forward order."""
    table = _sharded("embedding.weight", (spec.vocab, spec.hidden), 0, None)
    out = [dataclasses.replace(table, family="dense_tied") if spec.table_at_both_ends else table]
    for layer in range(spec.num_layers):
        out += _block_params(spec, layer)
    out.append(_norm("norm.weight", spec.hidden, None))
    if not spec.tied_embeddings:
        out.append(_sharded("head.weight", (spec.vocab, spec.hidden), 0, None))
    for layer in spec.mtp_blocks:
        out += _mtp_params(spec, layer)
    return tuple(out)


def _block_params(spec: ModelSpec, layer: int) -> list[ParamSpec]:
    rest = _moe_params(spec, layer) if layer in spec.moe_layers else _dense_params(spec, layer)
    return [*_attention_params(spec, layer), *rest]


def _mtp_params(spec: ModelSpec, layer: int) -> list[ParamSpec]:
    """A block, and what joins the token (first H columns) with what is known before it, and the norm before the head."""
    at, h = f"layers.{layer}.", spec.hidden
    return [
        _norm(at + "token_norm.weight", h, layer),
        _norm(at + "hidden_norm.weight", h, layer),
        ParamSpec(name=at + "join.weight", shape=(h, 2 * h), family="dense_replicated", layer=layer),
        *_block_params(spec, layer),
        _norm(at + "norm.weight", h, layer),
    ]


def _sharded(name: str, shape: tuple[int, ...], dim: int, layer: int | None, **more: Any) -> ParamSpec:
    return ParamSpec(name=name, shape=shape, family="dense_sharded", tp_dim=dim, layer=layer, **more)


def _norm(name: str, size: int, layer: int | None) -> ParamSpec:
    return ParamSpec(name=name, shape=(size,), family="dense_replicated", init="ones", layer=layer, decay=False)


def _output_over(spec: ModelSpec) -> float:
    """Projections that write to the residual stream start smaller by sqrt(2 * layers) (GPT-2)."""
    return math.sqrt(2 * spec.num_layers)


def _attention_params(spec: ModelSpec, layer: int) -> list[ParamSpec]:
    at = f"layers.{layer}."
    q, kv, h = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden
    out = [_norm(at + "attention_norm.weight", h, layer)]
    if spec.mla is not None:
        return out + _mla_params(spec, spec.mla, layer)
    widths = {"wq": q, "wk": kv, "wv": kv}
    out += [_sharded(at + f"attention.{n}.weight", (w, h), 0, layer) for n, w in widths.items()]
    if spec.attention_bias:
        out += [
            _sharded(at + f"attention.{n}.bias", (w,), 0, layer, init="zeros", decay=False) for n, w in widths.items()
        ]
    if spec.qk_norm == "head":
        out += [_norm(at + f"attention.{n}_norm.weight", spec.head_dim, layer) for n in "qk"]
    elif spec.qk_norm == "hidden":
        out += [
            _sharded(at + f"attention.{n}_norm.weight", (w,), 0, layer, init="ones", decay=False)
            for n, w in (("q", q), ("k", kv))
        ]
    out.append(_sharded(at + "attention.wo.weight", (h, q), 1, layer, init_over=_output_over(spec)))
    return out


def _mla_params(spec: ModelSpec, mla: MlaSpec, layer: int) -> list[ParamSpec]:
    at, h, a = f"layers.{layer}.attention.", spec.hidden, spec.num_heads
    q_width = a * (mla.nope_dim + mla.rope_dim)
    replicated = {"family": "dense_replicated", "layer": layer}
    out = [
        ParamSpec(name=at + "wkv_a.weight", shape=(mla.kv_rank + mla.rope_dim, h), **replicated),  # type: ignore[arg-type]
        _norm(at + "kv_norm.weight", mla.kv_rank, layer),
        _sharded(at + "wkv_b.weight", (a * (mla.nope_dim + mla.value_dim), mla.kv_rank), 0, layer),
    ]
    if mla.q_rank:
        out += [
            ParamSpec(name=at + "wq_a.weight", shape=(mla.q_rank, h), **replicated),  # type: ignore[arg-type]
            _norm(at + "q_norm.weight", mla.q_rank, layer),
            _sharded(at + "wq_b.weight", (q_width, mla.q_rank), 0, layer),
        ]
    else:
        out.append(_sharded(at + "wq.weight", (q_width, h), 0, layer))
    out.append(_sharded(at + "wo.weight", (h, a * mla.value_dim), 1, layer, init_over=_output_over(spec)))
    return out


def _mlp_params(spec: ModelSpec, prefix: str, width: int, layer: int) -> list[ParamSpec]:
    """SwiGLU: `w13` holds gate (index 0) and up (index 1) projections, `w2` the way back."""
    return [
        _sharded(prefix + "w13", (2, width, spec.hidden), 1, layer),
        _sharded(prefix + "w2", (spec.hidden, width), 1, layer, init_over=_output_over(spec)),
    ]


def _dense_params(spec: ModelSpec, layer: int) -> list[ParamSpec]:
    at = f"layers.{layer}."
    return [_norm(at + "ffn_norm.weight", spec.hidden, layer), *_mlp_params(spec, at + "mlp.", spec.dense_ffn, layer)]


def _moe_params(spec: ModelSpec, layer: int) -> list[ParamSpec]:
    at, e, f, h = f"layers.{layer}.", spec.num_experts, spec.expert_ffn, spec.hidden
    out = [
        _norm(at + "ffn_norm.weight", h, layer),
        ParamSpec(name=at + "moe.router.weight", shape=(e, h), family="dense_replicated", layer=layer),
        ParamSpec(name=at + "moe.experts.w13", shape=(e, 2, f, h), family="expert", ep_dim=0, etp_dim=2, layer=layer),
        ParamSpec(
            name=at + "moe.experts.w2",
            shape=(e, h, f),
            family="expert",
            ep_dim=0,
            etp_dim=2,
            layer=layer,
            init_over=_output_over(spec),
        ),
    ]
    if spec.shared_ffn:
        out += _mlp_params(spec, at + "moe.shared.", spec.shared_ffn, layer)
        if spec.shared_gate:
            out.append(ParamSpec(name=at + "moe.shared.gate", shape=(1, h), family="dense_replicated", layer=layer))
    return out


def buffers(spec: ModelSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, shape) of state that is not trained by gradients: the fp32 expert bias of each MoE layer, if it is used."""
    if not spec.router.bias_rate:
        return ()
    return tuple((f"layers.{i}.moe.router.expert_bias", (spec.num_experts,)) for i in spec.moe_layers)


def flops_per_token(spec: ModelSpec, seq_len: int, *, attention: Convention = "causal") -> float:
    """Model FLOPs of forward and backward per token (factor 6 = 3 passes x multiply and add).

    Counts matmuls only, the router left out, no recompute; `attention` says whether the causal half or the full square of the
    scores is counted (Megatron-LM counts the half since March 2025).
    """
    num_moe, num_blocks = len(spec.moe_layers), spec.num_layers + spec.mtp_layers
    layers = num_blocks * (spec.attention_matrices + spec.score_products(seq_len, attention=attention))
    layers += num_moe * (spec.top_k * spec.expert_matrices + spec.shared_matrices)
    layers += (num_blocks - num_moe) * spec.dense_matrices
    heads = (1 + spec.mtp_layers) * spec.hidden * spec.vocab
    return 6.0 * (layers + spec.mtp_layers * 2 * spec.hidden**2 + heads)


def _spec(name: str, **kw: Any) -> ModelSpec:
    return ModelSpec(name=name, **kw)


_SOFTMAX_RENORM = RouterSpec(score="softmax", softmax_order="before_topk", renormalize=True)

PRESETS: Mapping[str, ModelSpec] = {
    s.name: s
    for s in (
        _spec("tiny", num_layers=2, hidden=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab=256, num_experts=8,
              top_k=2, expert_ffn=48, router=_SOFTMAX_RENORM),
        _spec("laptop", num_layers=4, hidden=256, num_heads=8, num_kv_heads=4, head_dim=32, vocab=8192, num_experts=8,
              top_k=2, expert_ffn=512, qk_norm="head", router=_SOFTMAX_RENORM),
        _spec("mixtral-8x7b", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, vocab=32000,
              num_experts=8, top_k=2, expert_ffn=14336, rope_theta=1e6, router=_SOFTMAX_RENORM),
        _spec("mixtral-8x22b", num_layers=56, hidden=6144, num_heads=48, num_kv_heads=8, head_dim=128, vocab=32000,
              num_experts=8, top_k=2, expert_ffn=16384, rope_theta=1e6, router=_SOFTMAX_RENORM),
        _spec("mixtral-8x22b-g8t8", num_layers=56, hidden=6144, num_heads=48, num_kv_heads=8, head_dim=128, vocab=32000,
              num_experts=64, top_k=8, expert_ffn=2048, rope_theta=1e6, router=_SOFTMAX_RENORM),
        _spec("qwen2-57b-a14b", num_layers=28, hidden=3584, num_heads=28, num_kv_heads=4, head_dim=128, vocab=151936,
              num_experts=64, top_k=8, expert_ffn=2560, shared_ffn=20480, shared_gate=True, attention_bias=True,
              rope_theta=1e6, norm_eps=1e-6, router=RouterSpec(score="softmax", softmax_order="before_topk")),
        _spec("qwen3-30b-a3b", num_layers=48, hidden=2048, num_heads=32, num_kv_heads=4, head_dim=128, vocab=151936,
              num_experts=128, top_k=8, expert_ffn=768, qk_norm="head", rope_theta=1e6, norm_eps=1e-6,
              router=_SOFTMAX_RENORM),
        _spec("qwen3-235b-a22b", num_layers=94, hidden=4096, num_heads=64, num_kv_heads=4, head_dim=128, vocab=151936,
              num_experts=128, top_k=8, expert_ffn=1536, qk_norm="head", rope_theta=1e6, norm_eps=1e-6,
              router=_SOFTMAX_RENORM),
        _spec("olmoe-1b-7b", num_layers=16, hidden=2048, num_heads=16, num_kv_heads=16, head_dim=128, vocab=50304,
              num_experts=64, top_k=8, expert_ffn=1024, qk_norm="hidden",
              router=RouterSpec(score="softmax", softmax_order="before_topk")),
        _spec("deepseek-v2", num_layers=60, hidden=5120, num_heads=128, num_kv_heads=128, head_dim=192, vocab=102400,
              num_experts=160, top_k=6, expert_ffn=1536, shared_ffn=3072, dense_layers=1, dense_ffn=12288,
              norm_eps=1e-6, mla=MlaSpec(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
              router=RouterSpec(score="softmax", scale=16.0, num_groups=8, group_topk=3, group_score="max")),
        _spec("deepseek-v3", num_layers=61, hidden=7168, num_heads=128, num_kv_heads=128, head_dim=192, vocab=129280,
              num_experts=256, top_k=8, expert_ffn=2048, shared_ffn=2048, dense_layers=3, dense_ffn=18432,
              norm_eps=1e-6, mla=MlaSpec(q_rank=1536, kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128),
              router=RouterSpec(score="sigmoid", renormalize=True, scale=2.5, num_groups=8, group_topk=4,
                                group_score="top2", bias_rate=1e-3)),
    )
}  # fmt: skip
"""Shapes from the public model configurations (Hugging Face config.json of each; G8T8 from arXiv 2504.14960)."""


MLA_SETTINGS = tuple(f.name for f in dataclasses.fields(MlaSpec))
"""Settings of [model] that shape latent attention."""


def _yarn(base: YarnSpec | None, given: Mapping[str, Any]) -> YarnSpec | None:
    """The preset's YaRN with the recipe's `yarn_...`; a factor of 1 is none."""
    changes = {k.removeprefix("yarn_"): v for k, v in given.items() if k.startswith("yarn_")}
    if changes.get("factor", base.factor if base else 1.0) == 1.0:
        return None
    if base is not None:
        return dataclasses.replace(base, **changes)
    return YarnSpec(**{"original_length": 0, **changes})


def resolve_model(model: ModelConfig, router: RouterConfig, *, tokenizer_vocab: int | None = None) -> ModelSpec:
    """The preset with the recipe's changes. Raises `ConfigError` naming every problem, settings without effect included.

    `tokenizer_vocab` sets the vocabulary where the recipe does not: rounded up to a multiple of 64, so that it splits over tp.
    """
    if model.preset not in PRESETS:
        hint = nearest(model.preset, PRESETS)
        raise ConfigError.of("model.preset", model.preset, "is not a preset", hint, subject="recipe")
    base = PRESETS[model.preset]
    given = {f.name: getattr(model, f.name) for f in dataclasses.fields(model) if f.name != "preset"}
    given = {k: v for k, v in given.items() if v is not None}
    changes = {k: v for k, v in given.items() if k not in MLA_SETTINGS and not k.startswith("yarn_")}
    changes["yarn"] = _yarn(base.yarn, given)
    if base.mla is not None:
        mla = dataclasses.replace(base.mla, **{k: v for k, v in given.items() if k in MLA_SETTINGS})
        heads = changes.get("num_heads", base.num_heads)
        changes.update(mla=mla, head_dim=mla.nope_dim + mla.rope_dim, num_kv_heads=heads)
    if "vocab" not in changes and tokenizer_vocab is not None:
        changes["vocab"] = -(-tokenizer_vocab // 64) * 64
    routed = {f.name: getattr(router, f.name) for f in dataclasses.fields(router)}
    routed = {k: v for k, v in routed.items() if v is not None}
    if routed.get("num_groups") == 1:
        routed.setdefault("group_topk", 1)  # without groups there is nothing to limit
    changes["router"] = dataclasses.replace(base.router, **routed)
    spec = dataclasses.replace(base, **changes)
    raise_if(_too_large(spec), ConfigError, subject=f"model {spec.name}")
    idle = _idle_settings(model, router, spec)
    problems = model_problems(spec) + _vocab_problems(spec, tokenizer_vocab)
    problems = [p for p in problems if p.where not in {i.where for i in idle}] + idle
    raise_if(problems, ConfigError, subject=f"model {spec.name}")
    return spec


def _vocab_problems(spec: ModelSpec, tokenizer_vocab: int | None) -> list[Problem]:
    if tokenizer_vocab is None or spec.vocab >= tokenizer_vocab:
        return []
    rule = f"must hold the tokenizer's {tokenizer_vocab} tokens"
    return [Problem(where="model.vocab", value=spec.vocab, rule=rule, hint=f"try {-(-tokenizer_vocab // 64) * 64}")]


def _idle_settings(model: ModelConfig, router: RouterConfig, spec: ModelSpec) -> list[Problem]:
    """Settings of the recipe that this model never reads: an error, never a silence."""
    r, latent, dense = spec.router, spec.mla is not None, not spec.moe_layers
    idle = {
        "router.softmax_order": (
            r.score != "softmax" and r.softmax_order != "after_topk",
            f"router.score is {r.score}",
        ),
        "router.renormalize": (r.softmax_order == "after_topk", "these weights sum to one"),
        "router.group_topk": (r.num_groups == 1, "router.num_groups is 1"),
        "router.group_score": (r.num_groups == 1, "router.num_groups is 1"),
        "router.aux_scope": (r.aux_loss == 0, "router.aux_loss is 0"),
        "router.force_skew": (r.force != "imbalanced", f"router.force is {r.force}"),
        "model.dense_ffn": (spec.dense_layers == 0, "there are no dense layers"),
    }
    for name in ("original_length", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        idle[f"model.yarn_{name}"] = (spec.yarn is None, "model.yarn_factor is not set")
    if spec.yarn is not None:  # `rope.amplitude` takes both or none, `rope.softmax_factor` is of latent attention
        own, scores = spec.yarn.mscale, spec.yarn.mscale_all_dim
        idle["model.yarn_mscale"] = (own > 0 == scores, "model.yarn_mscale_all_dim is not set")
        alone = scores > 0 == own and not latent
        idle["model.yarn_mscale_all_dim"] = (alone, "model.yarn_mscale is not set, and attention is not latent")
    idle["model.mtp_weight"] = (not spec.mtp_layers, "model.mtp_layers is 0")
    idle["model.shared_gate"] = (not spec.shared_ffn or dense, "there is no shared expert")
    for name in MLA_SETTINGS:
        idle[f"model.{name}"] = (not latent, f"{spec.name} has no multi-head latent attention")
    for name in ("num_kv_heads", "head_dim", "qk_norm", "attention_bias"):
        idle[f"model.{name}"] = (latent, f"{spec.name} has multi-head latent attention")
    for name in ("num_experts", "top_k", "expert_ffn", "shared_ffn"):
        idle[f"model.{name}"] = (dense, "every layer is dense")
    sections = {"model": model, "router": router}
    out = []
    for where, (is_idle, why) in idle.items():
        section, name = where.split(".")
        value = getattr(sections[section], name)
        if is_idle and value is not None:
            out.append(Problem(where=where, value=value, rule=f"has no effect: {why}", hint="leave it out"))
    return out


def model_problems(spec: ModelSpec) -> list[Problem]:
    """What is wrong with a shape by itself; all of it."""
    sizes = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "vocab")
    out = [
        Problem(where=f"model.{name}", value=getattr(spec, name), rule="must be at least 1", hint="use 1 or more")
        for name in sizes
        if getattr(spec, name) < 1
    ]
    out += _too_large(spec)
    if out:
        return out
    out += _broken(_shape_rules(spec))
    if spec.mla is not None:
        out += _broken(_latent_rules(spec, spec.mla))
    if spec.yarn is not None:
        out += _broken(_yarn_rules(spec.yarn))
    if spec.moe_layers:
        out += _broken(_expert_rules(spec)) or _broken(_group_rules(spec))
        out += _broken(_router_rules(spec.router))
    return out


def _too_large(spec: ModelSpec) -> list[Problem]:
    """Sizes above what any model has (`LIMITS`): a plan of them would take all memory."""
    found = {
        **vars(spec),
        **(vars(spec.mla) if spec.mla else {}),
        **{f"yarn_{k}": v for k, v in (vars(spec.yarn) if spec.yarn else {}).items()},
    }
    limits = {name: LIMITS[f"model.{name}"] for name in found if f"model.{name}" in LIMITS}
    out = [
        Problem(
            where=f"model.{name}",
            value=found[name],
            rule=limit.refusal(found[name]),
            hint=f"use {plain(limit.ceiling)} or less",
        )
        for name, limit in limits.items()
        if found[name] > limit.ceiling
    ]
    if not out and (experts := spec.num_experts * len(spec.moe_layers)) > MOST_EXPERTS:
        rule = f"must be less: {experts} experts of all layers are more than {MOST_EXPERTS}"
        out.append(Problem(where="model.num_experts", value=spec.num_experts, rule=rule, hint="use 256"))
    return out


_Rule = tuple[bool, str, object, str, str]
"""(holds, where, value, rule, hint)"""


def _broken(rules: Iterable[_Rule]) -> list[Problem]:
    return [Problem(where=w, value=v, rule=rule, hint=hint) for ok, w, v, rule, hint in rules if not ok]


def _shape_rules(spec: ModelSpec) -> Iterator[_Rule]:
    a, kv, d, dense, h = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.dense_layers, spec.hidden
    yield a % kv == 0, "model.num_kv_heads", kv, f"must divide num_heads = {a}", f"try {math.gcd(kv, a)}"
    even = d % 2 == 0 or spec.mla is not None  # latent attention has rules of its own
    yield even, "model.head_dim", d, "must be even (rotary embedding)", f"try {d + 1}"
    near = min(max(dense, 0), spec.num_layers)
    rule = f"must lie between 0 and num_layers = {spec.num_layers}"
    yield dense == near, "model.dense_layers", dense, rule, f"try {near}"
    rule = f"must be at least 1, as there are {dense} dense layers"
    yield dense <= 0 or spec.dense_ffn > 0, "model.dense_ffn", spec.dense_ffn, rule, f"try {4 * h}"
    yield spec.shared_ffn >= 0, "model.shared_ffn", spec.shared_ffn, "must not be negative", "use 0 for none"
    yield spec.rope_theta > 0, "model.rope_theta", spec.rope_theta, "must be positive", "try 10000.0"
    yield spec.mtp_layers >= 0, "model.mtp_layers", spec.mtp_layers, "must not be negative", "use 0 for none"
    yield spec.mtp_weight > 0, "model.mtp_weight", spec.mtp_weight, "must be positive", "try 0.3"
    yield (
        spec.ffn_matrices == 3,
        "model.ffn_matrices",
        spec.ffn_matrices,
        "must be 3: layers without a gate are predicted, not trained",
        "use 3",
    )
    yield spec.norm_eps > 0, "model.norm_eps", spec.norm_eps, "must be positive", "try 1e-5"
    yield spec.init_std > 0, "model.init_std", spec.init_std, "must be positive", "try 0.02"


def _latent_rules(spec: ModelSpec, mla: MlaSpec) -> Iterator[_Rule]:
    for name in ("kv_rank", "nope_dim", "value_dim"):
        value = getattr(mla, name)
        yield value >= 1, f"model.{name}", value, "must be at least 1", "try 32"
    yield mla.q_rank >= 0, "model.q_rank", mla.q_rank, "must not be negative", "use 0 for direct queries"
    rule = "must be even, as the whole head is"
    yield mla.nope_dim % 2 == 0, "model.nope_dim", mla.nope_dim, rule, f"try {mla.nope_dim + 1}"
    ok = mla.rope_dim >= 2 and mla.rope_dim % 2 == 0
    yield ok, "model.rope_dim", mla.rope_dim, "must be even (rotary embedding)", f"try {max(2, mla.rope_dim + 1)}"
    ok = spec.head_dim == mla.nope_dim + mla.rope_dim
    yield ok, "model.head_dim", spec.head_dim, "is nope_dim + rope_dim", f"use {mla.nope_dim + mla.rope_dim}"
    ok = spec.num_kv_heads == spec.num_heads
    rule = "each query head of latent attention has keys and values of its own"
    yield ok, "model.num_kv_heads", spec.num_kv_heads, rule, f"use {spec.num_heads}"


def _yarn_rules(yarn: YarnSpec) -> Iterator[_Rule]:
    yield yarn.factor > 1, "model.yarn_factor", yarn.factor, "must be above 1", "use 1 for no stretching"
    value, rule = yarn.original_length, "is needed with model.yarn_factor: the sequence length before stretching"
    yield (
        value >= 1,
        "model.yarn_original_length",
        value or None,
        rule,
        "use the length it was trained with, such as 4096",
    )
    ok = yarn.beta_fast >= yarn.beta_slow > 0
    rule, near = f"must not be below yarn_beta_slow = {yarn.beta_slow:g}", max(32, 2 * yarn.beta_slow)
    yield ok, "model.yarn_beta_fast", yarn.beta_fast, rule, f"try {near:g}"


def _expert_rules(spec: ModelSpec) -> Iterator[_Rule]:
    e, k, r = spec.num_experts, spec.top_k, spec.router
    yield e >= 1, "model.num_experts", e, "must be at least 1", "try 8"
    yield (
        e < 1 or 1 <= k <= e,
        "model.top_k",
        k,
        f"must lie between 1 and num_experts = {e}",
        f"try {max(1, min(k, e))}",
    )
    yield spec.expert_ffn >= 1, "model.expert_ffn", spec.expert_ffn, "must be at least 1", f"try {4 * spec.hidden}"
    groups = max(1, r.num_groups)
    ok = groups == r.num_groups and e % groups == 0
    yield ok, "router.num_groups", r.num_groups, f"must divide num_experts = {e}", f"try {math.gcd(groups, max(e, 1))}"
    rule = f"must lie between 1 and num_groups = {r.num_groups}"
    yield 1 <= r.group_topk <= groups, "router.group_topk", r.group_topk, rule, f"try {groups}"


def _group_rules(spec: ModelSpec) -> Iterator[_Rule]:
    """Group-limited routing, once its degrees are sane: the chosen groups hold enough experts and can be scored."""
    k, r = spec.top_k, spec.router
    width = spec.num_experts // r.num_groups
    room = r.group_topk * width
    yield k <= room, "model.top_k", k, f"the {r.group_topk} chosen groups hold only {room} experts", f"try {room}"
    if r.num_groups > 1 and r.group_score == "top2":
        rule = f"group_score top2 needs two experts in a group, but there are {spec.num_experts} in all"
        yield width >= 2, "router.num_groups", r.num_groups, rule, "use group_score = 'sum_topk'"


def _router_rules(router: RouterSpec) -> Iterator[_Rule]:
    for name in ("z_loss", "aux_loss", "bias_rate", "force_skew"):
        value = getattr(router, name)
        yield value >= 0, f"router.{name}", value, "must not be negative", "use 0"
    yield router.scale > 0, "router.scale", router.scale, "must be positive", "use 1.0"
