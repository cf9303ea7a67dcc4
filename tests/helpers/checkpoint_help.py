"""Optimizer state of any mapping with known contents, for checkpoint tests: the value of a logical element depends on its name and place alone."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.core.config import ModelConfig, RouterConfig
from phalanx.plan.layout.parameters import flat_layouts, local_param
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import ModelSpec, buffers, parameters, resolve_model
from phalanx.runtime.checkpoint.folder import RunState
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.runtime.state.optimizer import ShardedState


@dataclass(frozen=True)
class Mapping:
    world: int
    ep: int = 1
    etp: int = 1
    zero: int = 1


def small_spec(**changes: Any) -> ModelSpec:
    return resolve_model(ModelConfig(preset="tiny", **changes), RouterConfig(bias_rate=1e-3))


def logical(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def make_state(
    rank: int, cache: GroupCache, mapping: Mapping, *, spec: ModelSpec | None = None, dtype: torch.dtype = torch.float32
) -> ShardedState:
    """State of one rank, zero everywhere."""
    spec = spec or small_spec()
    folding = make_folding(world=mapping.world, ep=mapping.ep, etp=mapping.etp)
    placement = plain_placement(spec.num_experts, folding)
    specs = parameters(spec)
    params = {p.name: torch.zeros(local_param(p, folding, placement, rank).shape, dtype=dtype) for p in specs}
    return ShardedState(
        params,
        flat_layouts(specs, folding, placement, rank, zero=mapping.zero),
        groups=build_groups(folding, rank=rank, cache=cache),
        buffers={name: torch.zeros(shape, dtype=dtype) for name, shape in buffers(spec)},
        dtype=dtype,
    )


def fill(boxes: list[BoxTensor]) -> None:
    for box in boxes:
        box.tensor.copy_(logical(box.name, box.shape, box.tensor.dtype)[box.box.slices()])


def wrong_boxes(boxes: list[BoxTensor]) -> list[str]:
    """Names of boxes that are not bitwise what `fill` puts there."""
    return [
        b.name for b in boxes if not torch.equal(b.tensor, logical(b.name, b.shape, b.tensor.dtype)[b.box.slices()])
    ]


def run_state(step: int, spec: ModelSpec | None = None, **changes: Any) -> RunState:
    spec = spec or small_spec()
    fields: dict[str, Any] = {
        "step": step,
        "samples": step * 8,
        "tokens": step * 8 * 16,
        "seed": 0,
        "loader": {"step": step},
        "model": model_fields(spec),
        "model_hash": spec.hash,
        "recipe_hash": "r",
        "folding": {"ep": 1},
        "world": 1,
        "versions": {"torch": torch.__version__},
    }
    return RunState(**{**fields, **changes})


def model_fields(spec: ModelSpec) -> dict[str, Any]:
    import json

    fields: dict[str, Any] = json.loads(spec.to_json())
    return fields
