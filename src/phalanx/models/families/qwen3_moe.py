"""Qwen3-MoE (Alibaba): norms on each query and key head, no shared expert."""

from __future__ import annotations

from typing import Any

from phalanx.models.families.family import Family
from phalanx.models.families.names import ENDS, FUSED_EXPERTS, GROUPED_ATTENTION, NORMS, experts, mlp
from phalanx.models.families.options import (
    WHOLE_ATTENTION,
    Options,
    common,
    common_fields,
    dense_first,
    grouped_heads,
    renormalizes,
    router_spec,
    sparse_layers,
)
from phalanx.plan.model import ModelSpec

_REST = (*ENDS, *NORMS, *GROUPED_ATTENTION, *mlp("mlp", "mlp"))


def _read(options: Options) -> ModelSpec:
    options.only("use_sliding_window", False, why=WHOLE_ATTENTION)
    options.only("attention_bias", False, why="a bias on the output projection of attention is not supported")
    shape = common(options)
    dense = sparse_layers(options, shape["num_layers"])
    return ModelSpec(
        name="qwen3-30b-a3b",
        **shape,
        **grouped_heads(options),
        norm_eps=options.number("rms_norm_eps"),
        qk_norm="head",
        num_experts=options.whole("num_experts"),
        expert_ffn=options.whole("moe_intermediate_size"),
        dense_layers=dense,
        dense_ffn=options.whole("intermediate_size") if dense else 0,
        router=router_spec(top_k=shape["top_k"], renormalize=options.flag("norm_topk_prob")),
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        **common_fields(spec, "Qwen3MoeForCausalLM"),
        "head_dim": spec.head_dim,
        "attention_bias": False,
        "num_experts": spec.num_experts,
        "moe_intermediate_size": spec.expert_ffn,
        "intermediate_size": spec.dense_ffn or 3 * spec.hidden,
        "mlp_only_layers": dense_first(spec),
        "decoder_sparse_step": 1,
        "norm_topk_prob": renormalizes(spec),
        "use_sliding_window": False,
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    preset="qwen3-30b-a3b",
    rules=(*_REST, *experts("mlp")),
    fused_rules=(*_REST, *FUSED_EXPERTS),
    read=_read,
    write=_write,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "num_experts": 128,
        "norm_topk_prob": False,
    },
    aliases={"num_local_experts": "num_experts"},
)
