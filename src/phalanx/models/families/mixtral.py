"""Mixtral (mistralai): every layer has experts; softmax over all of them, the chosen weights renormalised."""

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
    router_spec,
)
from phalanx.plan.model import ModelSpec

_REST = (*ENDS, *NORMS, *GROUPED_ATTENTION)


def _read(options: Options) -> ModelSpec:
    no_sliding_window(options)
    options.only("router_jitter_noise", 0, 0.0, why="noise on the router's input is not supported")
    shape = common(options)
    return ModelSpec(
        name="mixtral-8x7b",
        **shape,
        **grouped_heads(options),
        norm_eps=options.number("rms_norm_eps"),
        num_experts=options.whole("num_local_experts"),
        expert_ffn=options.whole("intermediate_size"),
        router=router_spec(top_k=shape["top_k"], renormalize=True),
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        **common_fields(spec, "MixtralForCausalLM"),
        "head_dim": spec.head_dim,
        "num_local_experts": spec.num_experts,
        "intermediate_size": spec.expert_ffn,
        "sliding_window": None,
        "router_jitter_noise": 0.0,
    }


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    preset="mixtral-8x7b",
    rules=(*_REST, *experts("block_sparse_moe", ("w1", "w3", "w2"))),
    fused_rules=(*_REST, *FUSED_EXPERTS),
    read=_read,
    write=_write,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 131072,
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "router_jitter_noise": 0.0,
    },
    aliases={"num_experts": "num_local_experts"},
    keys={"num_experts": "num_local_experts", "expert_ffn": "intermediate_size"},
)
