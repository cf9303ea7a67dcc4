"""Qwen2-MoE (Alibaba): biases on queries, keys and values; a gated shared expert alongside the routed ones."""

from __future__ import annotations

from typing import Any

from phalanx.models.families.family import Family
from phalanx.models.families.names import ENDS, FUSED_EXPERTS, GROUPED_ATTENTION, NORMS, NameRule, experts, mlp
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

_GATE = NameRule("model.layers.{layer}.mlp.shared_expert_gate.weight", "layers.{layer}.moe.shared.gate")
_REST = (*ENDS, *NORMS, *GROUPED_ATTENTION, *mlp("mlp", "mlp"), *mlp("mlp.shared_expert", "moe.shared"), _GATE)


def _read(options: Options) -> ModelSpec:
    options.only("use_sliding_window", False, why=WHOLE_ATTENTION)
    shape = common(options)
    dense = sparse_layers(options, shape["num_layers"])
    return ModelSpec(
        name="qwen2-57b-a14b",
        **shape,
        **grouped_heads(options),
        norm_eps=options.number("rms_norm_eps"),
        attention_bias=options.flag("qkv_bias"),
        num_experts=options.whole("num_experts"),
        expert_ffn=options.whole("moe_intermediate_size"),
        shared_ffn=options.whole("shared_expert_intermediate_size"),
        shared_gate=True,
        dense_layers=dense,
        dense_ffn=options.whole("intermediate_size") if dense else 0,
        router=router_spec(top_k=shape["top_k"], renormalize=options.flag("norm_topk_prob")),
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        **common_fields(spec, "Qwen2MoeForCausalLM"),
        "head_dim": spec.head_dim,
        "qkv_bias": spec.attention_bias,
        "num_experts": spec.num_experts,
        "moe_intermediate_size": spec.expert_ffn,
        "shared_expert_intermediate_size": spec.shared_ffn,
        "intermediate_size": spec.dense_ffn or spec.shared_ffn,
        "mlp_only_layers": dense_first(spec),
        "decoder_sparse_step": 1,
        "norm_topk_prob": renormalizes(spec),
        "use_sliding_window": False,
    }


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    preset="qwen2-57b-a14b",
    rules=(*_REST, *experts("mlp")),
    fused_rules=(*_REST, *FUSED_EXPERTS),
    read=_read,
    write=_write,
    defaults={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "num_experts": 60,
        "norm_topk_prob": False,
        "qkv_bias": True,
    },
)
