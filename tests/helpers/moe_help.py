"""What the tests of router, dispatcher and MoE layer share: contexts on any grid, and a dense model of routed experts."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from phalanx.models.context import ModelContext
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.mapping.placement import Placement, plain_placement
from phalanx.plan.model.model import ModelSpec, RouterSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups


def moe_spec(
    *, num_experts: int = 8, top_k: int = 2, hidden: int = 16, expert_ffn: int = 24, **router: Any
) -> ModelSpec:
    """One MoE layer's worth of model."""
    return ModelSpec(
        name="test",
        num_layers=1,
        hidden=hidden,
        num_heads=2,
        num_kv_heads=2,
        head_dim=8,
        vocab=64,
        num_experts=num_experts,
        top_k=top_k,
        expert_ffn=expert_ffn,
        router=RouterSpec(**router),
    )


def context(
    spec: ModelSpec,
    *,
    folding: Folding | None = None,
    rank: int = 0,
    cache: GroupCache | None = None,
    dispatch: DispatchSpec | None = None,
    placement: Placement | None = None,
    comms: Collectives | None = None,
    **more: Any,
) -> ModelContext:
    folding = folding or make_folding(world=1)
    settings: dict[str, Any] = {
        "spec": spec,
        "dispatch": dispatch or DispatchSpec(),
        "placement": placement or plain_placement(spec.num_experts, folding),
        "groups": build_groups(folding, rank=rank, cache=GroupCache() if cache is None else cache),
        "comms": comms or Collectives(timeout_s=240),
        "dtype": torch.float64,
        "device": torch.device("cpu"),
    }
    return ModelContext(**{**settings, **more})


def with_router(spec: ModelSpec, **router: Any) -> ModelSpec:
    return dataclasses.replace(spec, router=dataclasses.replace(spec.router, **router))


def dense_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    w13_E2FH: torch.Tensor,
    w2_EHF: torch.Tensor,
) -> torch.Tensor:
    """(T, H): every expert on every token, then the chosen ones weighted (expert -1: dropped). Slow and plain."""
    gate, up = (x_TH @ w13_E2FH.flatten(0, 2).T).unflatten(-1, w13_E2FH.shape[:3]).unbind(2)
    y_TEH = torch.einsum("tef,ehf->teh", gate * torch.sigmoid(gate) * up, w2_EHF)
    hit_TKE = (experts_TK.unsqueeze(-1) == torch.arange(len(w2_EHF))).to(x_TH.dtype)
    return torch.einsum("tk,tke,teh->th", weights_TK, hit_TKE, y_TEH)
