"""DeepSeek-V2 (arXiv 2405.04434): latent attention, dense first layers, shared experts, softmax routing limited to the best groups.

Also here: what V3 shares with it.
"""

from __future__ import annotations

from typing import Any

from phalanx.models.families.family import Family
from phalanx.models.families.names import ENDS, FUSED_EXPERTS, LATENT_ATTENTION, NORMS, experts, mlp
from phalanx.models.families.options import Options, common, common_fields
from phalanx.plan.model import MlaSpec, ModelSpec, RouterSpec

REST = (*ENDS, *NORMS, *LATENT_ATTENTION, *mlp("mlp", "mlp"), *mlp("mlp.shared_experts", "moe.shared"))


def latent_shape(options: Options, *, interleaved: bool) -> dict[str, Any]:
    """Arguments of `ModelSpec` that both DeepSeek families have; their losses, where the config tells of them."""
    options.only("attention_bias", False, why="biases of latent attention are not there")
    options.only("moe_layer_freq", 1, why="every layer after the dense ones has experts")
    shape = common(options)
    heads = options.whole("num_attention_heads")
    if options.whole("num_key_value_heads", heads) != heads:
        options.refuse(
            "num_key_value_heads", "each head of latent attention has keys and values of its own", f"use {heads}"
        )
    nope, rope = options.whole("qk_nope_head_dim"), options.whole("qk_rope_head_dim", least=2)
    mla = MlaSpec(
        q_rank=options.whole("q_lora_rank") if options.config.get("q_lora_rank") is not None else 0,
        kv_rank=options.whole("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=options.whole("v_head_dim"),
        rope_interleaved=interleaved,
    )
    ffn = options.whole("moe_intermediate_size")
    dense = min(options.whole("first_k_dense_replace", 0, least=0), shape["num_layers"])
    return {
        **shape,
        "num_kv_heads": heads,
        "head_dim": nope + rope,
        "norm_eps": options.number("rms_norm_eps", 1e-6),
        "mla": mla,
        "num_experts": options.whole("n_routed_experts"),
        "expert_ffn": ffn,
        "shared_ffn": ffn * options.whole("n_shared_experts"),
        "dense_layers": dense,
        "dense_ffn": options.whole("intermediate_size") if dense else 0,
    }


def latent_fields(spec: ModelSpec, architecture: str) -> dict[str, Any]:
    """The fields that `latent_shape` reads."""
    fields = common_fields(spec, architecture)
    if spec.mla is not None:
        fields |= {
            "q_lora_rank": spec.mla.q_rank or None,
            "kv_lora_rank": spec.mla.kv_rank,
            "qk_nope_head_dim": spec.mla.nope_dim,
            "qk_rope_head_dim": spec.mla.rope_dim,
            "v_head_dim": spec.mla.value_dim,
        }
    return fields | {
        "attention_bias": False,
        "n_routed_experts": spec.num_experts,
        "n_shared_experts": spec.shared_ffn // max(spec.expert_ffn, 1),
        "moe_intermediate_size": spec.expert_ffn,
        "first_k_dense_replace": spec.dense_layers,
        "intermediate_size": spec.dense_ffn or 4 * spec.hidden,
        "routed_scaling_factor": spec.router.scale,
    }


def groups(options: Options) -> dict[str, Any]:
    """Group-limited routing; one group is none."""
    count = options.whole("n_group", 1)
    return {"num_groups": count, "group_topk": options.whole("topk_group", 1) if count > 1 else 1}


def _read(options: Options) -> ModelSpec:
    options.only(
        "norm_topk_prob", False, None, why="transformers does not renormalise the weights of DeepSeek-V2 either"
    )
    options.only("scoring_func", "softmax", why="DeepSeek-V2 scores with a softmax")
    options.only("mlp_bias", False, why="biases of MLPs are not there")
    options.only("topk_method", "greedy", "group_limited_greedy", why="is not a choice of experts that we know")
    limited = options.config.get("topk_method", "greedy") == "group_limited_greedy"
    return ModelSpec(
        name="deepseek-v2",
        **latent_shape(options, interleaved=True),
        router=RouterSpec(
            scale=options.number("routed_scaling_factor", 1.0),
            group_score="max",
            **(groups(options) if limited else {}),
        ),
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    r = spec.router
    return {
        **latent_fields(spec, "DeepseekV2ForCausalLM"),
        "topk_method": "group_limited_greedy" if r.num_groups > 1 else "greedy",
        "n_group": r.num_groups,
        "topk_group": r.group_topk,
        "norm_topk_prob": False,
        "mlp_bias": False,
    }


DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    preset="deepseek-v2",
    rules=(*REST, *experts("mlp")),
    fused_rules=(*REST, *FUSED_EXPERTS),
    read=_read,
    write=_write,
)
