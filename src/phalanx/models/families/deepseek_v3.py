"""DeepSeek-V3 (arXiv 2412.19437): as V2, but sigmoid scores, groups by their best two, and an expert bias in place of a loss.

The expert bias is a buffer of the run (`router.bias_rate`), and on disk `e_score_correction_bias`. Blocks of multi-token prediction follow the last
layer on disk, each with a copy of embedding and head; configs name them also where they are not there, so they are read where asked for.
"""

from __future__ import annotations

from typing import Any

from phalanx.models.families.deepseek_v2 import KEYS, REST, groups, latent_fields, latent_shape
from phalanx.models.families.family import Family
from phalanx.models.families.names import FUSED_EXPERTS, NameRule, experts
from phalanx.models.families.options import Options, renormalizes, router_spec
from phalanx.plan.model import PRESETS, ModelSpec

_BIAS = NameRule("model.layers.{layer}.mlp.gate.e_score_correction_bias", "layers.{layer}.moe.router.expert_bias")

_MTP = tuple(
    NameRule(f"model.layers.{{layer}}.{theirs}.weight", f"layers.{{layer}}.{ours}.weight")
    for theirs, ours in (
        ("enorm", "token_norm"),
        ("hnorm", "hidden_norm"),
        ("eh_proj", "join"),
        ("shared_head.norm", "norm"),
    )
)
_COPIES = (
    NameRule("model.layers.{layer}.embed_tokens.weight", "embedding.weight"),
    NameRule("model.layers.{layer}.shared_head.head.weight", "head.weight"),
)


def _read(options: Options) -> ModelSpec:
    options.only("scoring_func", "sigmoid", why="DeepSeek-V3 scores with a sigmoid")
    options.only("topk_method", "noaux_tc", why="is not a choice of experts that we know")
    shape = latent_shape(options, interleaved=options.flag("rope_interleave"))
    return ModelSpec(
        name="deepseek-v3",
        **shape,
        mtp_layers=options.whole("num_nextn_predict_layers", least=0),
        router=router_spec(
            top_k=shape["top_k"],
            renormalize=options.flag("norm_topk_prob"),
            score="sigmoid",
            scale=options.number("routed_scaling_factor"),
            group_score="top2",
            bias_rate=PRESETS["deepseek-v3"].router.bias_rate,
            **groups(options, ranked_by=2),
        ),
    )


def _write(spec: ModelSpec) -> dict[str, Any]:
    return {
        **latent_fields(spec, "DeepseekV3ForCausalLM"),
        "n_group": spec.router.num_groups,
        "topk_group": spec.router.group_topk,
        "norm_topk_prob": renormalizes(spec),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "rope_interleave": spec.mla is None or spec.mla.rope_interleaved,
        "num_nextn_predict_layers": spec.mtp_layers,
    }


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    preset="deepseek-v3",
    rules=(*REST, *experts("mlp"), _BIAS),
    fused_rules=(*REST, *FUSED_EXPERTS, _BIAS),
    read=_read,
    write=_write,
    defaults={
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "qk_nope_head_dim": 128,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_interleave": True,
        "attention_bias": False,
        "num_nextn_predict_layers": 1,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    keys=KEYS,
    mtp_rules=_MTP,
    copies=_COPIES,
    absent=(_BIAS,),
)
