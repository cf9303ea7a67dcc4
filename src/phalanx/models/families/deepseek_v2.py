"""DeepSeek-V2 (arXiv 2405.04434): latent attention, dense first layers, shared experts, softmax routing limited to the best groups.

Also here: what V3 shares with it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from phalanx.models.families.family import Family
from phalanx.models.families.names import ENDS, FUSED_EXPERTS, LATENT_ATTENTION, NORMS, experts, mlp
from phalanx.models.families.options import Options, common, common_fields
from phalanx.plan.model import MlaSpec, ModelSpec, RouterSpec

REST = (*ENDS, *NORMS, *LATENT_ATTENTION, *mlp("mlp", "mlp"), *mlp("mlp.shared_experts", "moe.shared"))


KEYS: Mapping[str, str] = {"num_experts": "n_routed_experts", "dense_layers": "first_k_dense_replace"}


def latent_shape(options: Options, *, interleaved: bool) -> dict[str, Any]:
    """Arguments of `ModelSpec` that both DeepSeek families have; their losses, where the config tells of them."""
    options.only("attention_bias", False, why="biases of latent attention are not there")
    shape = common(options, latent=True)
    heads = options.whole("num_attention_heads")
    if options.whole("num_key_value_heads", null=heads) != heads:
        options.refuse(
            "num_key_value_heads", "each head of latent attention has keys and values of its own", f"use {heads}"
        )
    nope, rope = options.whole("qk_nope_head_dim"), options.whole("qk_rope_head_dim", least=2)
    mla = MlaSpec(
        q_rank=options.whole("q_lora_rank") if options.get("q_lora_rank") is not None else 0,
        kv_rank=options.whole("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=options.whole("v_head_dim"),
        rope_interleaved=interleaved,
    )
    ffn = options.whole("moe_intermediate_size")
    dense = min(options.whole("first_k_dense_replace", least=0), shape["num_layers"])
    if options.get("moe_layer_freq") != [0] * dense + [1] * (shape["num_layers"] - dense):
        options.only("moe_layer_freq", 1, why="every layer after the first_k_dense_replace dense ones has experts")
    return {
        **shape,
        "num_kv_heads": heads,
        "head_dim": nope + rope,
        "norm_eps": options.number("rms_norm_eps"),
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


def groups(options: Options, *, ranked_by: int) -> dict[str, Any]:
    """Group-limited routing, by the best `ranked_by` experts of each group; no limit where all groups are chosen."""
    experts, count, chosen = (options.whole(key) for key in ("n_routed_experts", "n_group", "topk_group"))
    if experts % count:
        options.refuse("n_group", f"must divide n_routed_experts = {experts}", f"try {math.gcd(experts, count)}")
    elif experts // count < ranked_by:
        rule = f"each group needs {ranked_by} experts, by which it is ranked, but there are {experts} in all"
        options.refuse("n_group", rule, f"try {math.gcd(experts, max(experts // ranked_by, 1))}")
    if chosen > count:
        options.refuse("topk_group", f"must lie between 1 and n_group = {count}", f"try {count}")
    return {"num_groups": count, "group_topk": chosen} if chosen < count else {}


def _read(options: Options) -> ModelSpec:
    options.only(
        "norm_topk_prob", False, None, why="transformers does not renormalise the weights of DeepSeek-V2 either"
    )
    options.only("scoring_func", "softmax", why="DeepSeek-V2 scores with a softmax")
    options.only("mlp_bias", False, why="biases of MLPs are not there")
    options.only("topk_method", "greedy", "group_limited_greedy", why="is not a choice of experts that we know")
    limited = options.get("topk_method") == "group_limited_greedy"
    return ModelSpec(
        name="deepseek-v2",
        **latent_shape(options, interleaved=True),
        router=RouterSpec(
            scale=options.number("routed_scaling_factor"),
            group_score="max",
            **(groups(options, ranked_by=1) if limited else {}),
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
    defaults={
        "vocab_size": 102400,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "n_group": None,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 1.0,
        "topk_group": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "v_head_dim": 128,
        "num_experts_per_tok": None,
        "moe_intermediate_size": 1407,
    },
    aliases={"num_experts": "n_routed_experts"},
    keys=KEYS,
)
