"""A model family: Mixtral with a norm on each query and key head. `phalanx import-hf` and `export-hf` know it."""

from typing import Any

from phalanx.models.families.family import Family
from phalanx.models.families.names import ENDS, GROUPED_ATTENTION, NORMS, experts
from phalanx.models.families.options import Options, common, common_fields, grouped_heads, router_spec
from phalanx.plan.model import ModelSpec


def read(options: Options) -> ModelSpec:
    """The model that a config.json means."""
    shape = common(options)
    return ModelSpec(
        name="mymoe",
        **shape,
        **grouped_heads(options),
        qk_norm="head",
        norm_eps=options.number("rms_norm_eps"),
        num_experts=options.whole("num_local_experts"),
        expert_ffn=options.whole("intermediate_size"),
        router=router_spec(top_k=shape["top_k"], renormalize=True),
    )


def write(spec: ModelSpec) -> dict[str, Any]:
    """The config.json that says so."""
    return {
        **common_fields(spec, "MyMoeForCausalLM"),
        "head_dim": spec.head_dim,
        "num_local_experts": spec.num_experts,
        "intermediate_size": spec.expert_ffn,
    }


RULES = (*ENDS, *NORMS, *GROUPED_ATTENTION, *experts("block_sparse_moe", ("w1", "w3", "w2")))
MYMOE = Family(
    model_type="mymoe",
    architecture="MyMoeForCausalLM",
    preset="mixtral-8x7b",
    rules=RULES,
    fused_rules=RULES,
    read=read,
    write=write,
    defaults={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": None,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
    },
    keys={"num_experts": "num_local_experts", "expert_ffn": "intermediate_size"},
)
