"""One MoE layer of a known model on one rank: router, dispatch, experts, combine, and the shared expert.

Legend: T tokens, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from phalanx.kernels.cpu.lanes import Lanes
from phalanx.models.context import ForwardInfo, ModelContext, TokenBatch
from phalanx.models.moe import MoE
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model import PRESETS, ModelSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx_lab.bench.workload import WorkloadShape
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.plain_model import plain_context


@dataclass(frozen=True, kw_only=True)
class LayerPart:
    """The experts of a model that one rank of an expert group has, with as many tokens that each gets 2,048 rows in the mean."""

    preset: str
    experts: int
    tokens: int
    least_mfu: float
    """Of the dense rate in the same run: the bar."""

    def spec(self) -> ModelSpec:
        return dataclasses.replace(PRESETS[self.preset], num_experts=self.experts, num_layers=4)


PARTS: Mapping[str, LayerPart] = {
    part.preset: part
    for part in (
        LayerPart(preset="qwen3-30b-a3b", experts=16, tokens=4096, least_mfu=0.55),
        LayerPart(preset="mixtral-8x7b", experts=8, tokens=8192, least_mfu=0.75),
        LayerPart(preset="deepseek-v3", experts=32, tokens=8192, least_mfu=0.65),
    )
}


@dataclass(frozen=True, kw_only=True)
class LayersOf(WorkloadShape):
    """Four whole layers of a model, as a shape of the training benchmarks."""

    part: LayerPart
    tiny: bool = False

    def spec(self) -> ModelSpec:
        spec = dataclasses.replace(self.part.spec(), vocab=self.vocab)
        return _narrow(spec) if self.tiny else spec


def _narrow(spec: ModelSpec) -> ModelSpec:
    """Widths of the self-test."""
    return dataclasses.replace(spec, hidden=32, expert_ffn=16, shared_ffn=16 if spec.shared_ffn else 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRun:
    """A layer and what it is given."""

    moe: MoE
    x_TH: torch.Tensor
    dy_TH: torch.Tensor
    batch: TokenBatch
    flops: float
    """Of a forward and a backward pass."""


def context(
    spec: ModelSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kernels: Literal["fast", "reference"] = "fast",
    dispatch: DispatchSpec | None = None,
) -> ModelContext:
    """One rank that holds everything."""
    groups = build_groups(make_folding(world=1), rank=0, cache=GroupCache())
    how: dict[str, Any] = {"dispatch": dispatch or DispatchSpec(), "kernels": kernels, "lanes": Lanes(1)}
    return plain_context(spec, groups, dtype=dtype, device=device, **how)


def make_layer(part: LayerPart, here: Here, *, dispatch: DispatchSpec | None = None) -> LayerRun:
    """In bf16 with random weights; widths of the self-test are tiny."""
    spec = part.spec()
    if not here.on_gpu:
        spec = _narrow(spec)
    tokens = here.pick(part.tokens, 64)
    ctx = context(spec, device=here.device, dtype=torch.bfloat16, dispatch=dispatch)
    torch.manual_seed(0)
    moe = MoE(ctx, spec.dense_layers)
    with torch.no_grad():
        for weight in moe.parameters():
            weight.normal_(std=0.02)
    x_TH, dy_TH = (torch.randn(tokens, spec.hidden, device=here.device, dtype=torch.bfloat16) for _ in range(2))
    places = torch.arange(tokens, device=here.device).unsqueeze(0)
    routed = tokens * spec.top_k * spec.expert_ffn
    widths = 3 * (routed + tokens * spec.shared_ffn) + tokens * spec.num_experts
    return LayerRun(
        moe=moe,
        x_TH=x_TH.requires_grad_(),
        dy_TH=dy_TH,
        batch=TokenBatch(places, places, places, ((tokens,),)),
        flops=3 * 2.0 * spec.hidden * widths,
    )


def forward(run: LayerRun) -> torch.Tensor:
    """The layer's output (T, H)."""
    out: torch.Tensor = run.moe(run.x_TH, ForwardInfo(), run.batch)[0]
    return out


def passes(run: LayerRun) -> None:
    """Forward and backward; gradients of all weights and of the input are made anew."""
    run.moe.zero_grad(set_to_none=True)
    run.x_TH.grad = None
    with torch.autograd.set_multithreading_enabled(False):  # as a training step does
        forward(run).backward(run.dy_TH)
