"""Mixtral (mistralai): every layer has experts; softmax over all of them, the chosen weights renormalised."""

from __future__ import annotations

from typing import Any

from phalanx.models.families.family import Family
from phalanx.models.families.names import ENDS, FUSED_EXPERTS, GROUPED_ATTENTION, NORMS, experts
from phalanx.models.families.options import Options, common, common_fields, grouped_heads, no_sliding_window
from phalanx.plan.model import ModelSpec, RouterSpec

_REST = (*ENDS, *NORMS, *GROUPED_ATTENTION)


def _read(options: Options) -> ModelSpec:
    no_sliding_window(options)
    options.only("router_jitter_noise", 0, 0.0, why="noise on the router's input is not supported")
    if options.config.get("num_experts_per_tok") == 1:
        options.refuse(
            "num_experts_per_tok", "a single chosen expert has weight 1 here, which gives the router no gradient"
        )
    return ModelSpec(
        name="mixtral-8x7b",
        **common(options),
        **grouped_heads(options),
        norm_eps=options.number("rms_norm_eps", 1e-5),
        num_experts=options.whole("num_local_experts"),
        expert_ffn=options.whole("intermediate_size"),
        router=RouterSpec(renormalize=True),
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
)
