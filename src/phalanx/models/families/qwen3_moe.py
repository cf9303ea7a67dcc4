"""Qwen3-MoE (Alibaba): norms on each query and key head, no shared expert."""

from __future__ import annotations

from typing import Any

from phalanx.models.families.family import Family
from phalanx.models.families.names import ENDS, FUSED_EXPERTS, GROUPED_ATTENTION, NORMS, experts, mlp
from phalanx.models.families.options import (
    Options,
    common,
    common_fields,
    dense_first,
    grouped_heads,
    no_sliding_window,
    sparse_layers,
)
from phalanx.plan.model import ModelSpec, RouterSpec

_REST = (*ENDS, *NORMS, *GROUPED_ATTENTION, *mlp("mlp", "mlp"))


def _read(options: Options) -> ModelSpec:
    no_sliding_window(options)
    options.only("attention_bias", False, why="a bias on the output projection of attention is not supported")
    shape = common(options)
    dense = sparse_layers(options, shape["num_layers"])
    experts_key = "num_experts" if "num_experts" in options.config else "num_local_experts"
    return ModelSpec(
        name="qwen3-30b-a3b",
        **shape,
        **grouped_heads(options),
        norm_eps=options.number("rms_norm_eps", 1e-6),
        qk_norm="head",
        num_experts=options.whole(experts_key),
        expert_ffn=options.whole("moe_intermediate_size"),
        dense_layers=dense,
        dense_ffn=options.whole("intermediate_size") if dense else 0,
        router=RouterSpec(renormalize=options.flag("norm_topk_prob", False)),
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
        "norm_topk_prob": spec.router.renormalize,
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
)
