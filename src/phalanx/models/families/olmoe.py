"""OLMoE (Ai2): norms over all queries and over all keys at once; the chosen weights are not renormalised."""

from __future__ import annotations

from typing import Any

from phalanx.models.families.family import Family
from phalanx.models.families.names import ENDS, FUSED_EXPERTS, GROUPED_ATTENTION, NORMS, experts
from phalanx.models.families.options import (
    Options,
    common,
    common_fields,
    grouped_heads,
    no_sliding_window,
    renormalizes,
    router_spec,
)
from phalanx.plan.model import ModelSpec

_REST = (*ENDS, *NORMS, *GROUPED_ATTENTION)


def _read(options: Options) -> ModelSpec:
    no_sliding_window(options)
    options.only("attention_bias", False, why="a bias on the output projection of attention is not supported")
    options.only("clip_qkv", None, why="clipping of queries, keys and values is not supported")
    shape, heads = common(options), grouped_heads(options)
    if heads["head_dim"] * options.whole("num_attention_heads") != options.whole("hidden_size"):
        options.refuse(
            "head_dim", "the norm over all queries is as wide as the model: hidden_size / num_attention_heads"
        )
    return ModelSpec(
        name="olmoe-1b-7b",
        **shape,
        **heads,
        norm_eps=options.number("rms_norm_eps"),
        qk_norm="hidden",
        num_experts=options.whole("num_experts"),
        expert_ffn=options.whole("intermediate_size"),
        router=router_spec(top_k=shape["top_k"], renormalize=options.flag("norm_topk_prob")),
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        **common_fields(spec, "OlmoeForCausalLM"),
        "head_dim": spec.head_dim,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts": spec.num_experts,
        "intermediate_size": spec.expert_ffn,
        "norm_topk_prob": renormalizes(spec),
    }


def _cautions(spec: ModelSpec) -> tuple[str, ...]:
    if not renormalizes(spec):
        return ()
    return (
        "norm_topk_prob is true in its config.json, which vLLM ignores in OLMoE: serve it with a program that reads it",
    )


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    preset="olmoe-1b-7b",
    rules=(*_REST, *experts("mlp")),
    fused_rules=(*_REST, *FUSED_EXPERTS),
    read=_read,
    write=_write,
    cautions=_cautions,
    defaults={
        "vocab_size": 50304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": None,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts_per_tok": 8,
        "num_experts": 64,
        "norm_topk_prob": False,
    },
    aliases={"num_local_experts": "num_experts"},
    keys={"expert_ffn": "intermediate_size"},
)
