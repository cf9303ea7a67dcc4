"""Masters and moments of a run moved in memory from one folding to another: bit for bit what the other would have read from a checkpoint."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from checkpoint_help import logical, small_spec
from reshard_plan_help import shard_layouts
from tiers import some

from phalanx.core.config import PipelineConfig
from phalanx.plan.layout.parameters import flat_layouts, local_param, stage_params
from phalanx.plan.layout.state import STATE_KINDS, StateLayouts
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.mapping.stage_foldings import AnyFolding, parse_stage, parse_stages
from phalanx.plan.model.model import ModelSpec
from phalanx.plan.pipeline.run import Pipeline, make_pipeline
from phalanx.plan.reshard.types import Move
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache, build_groups
from phalanx.runtime.reshard.resharder import Resharder
from phalanx.runtime.state.optimizer import ShardedState
from phalanx.runtime.state.views import ShardPart, ShardView, shard_views
from ranks import run_ranks

pytestmark = pytest.mark.ranks
WORLD = 8
FOLDINGS = ("tp2.dp4.ep8", "tp4.dp2.etp4.ep2", "cp2.dp4.ep4", "tp1/tp2/tp4.ep4/tp1", "dp2.ep2/tp2.dp2.ep4/cp2")


def folding_of(text: str) -> AnyFolding:
    problems: list[Any] = []
    return parse_stages(text.split("/")) if "/" in text else parse_stage(text, problems, "test")


def pipeline_of(spec: ModelSpec, folding: AnyFolding) -> Pipeline:
    return make_pipeline(PipelineConfig(), spec, pp=folding.pp, seq_len=64)


def state_of(spec: ModelSpec, folding: AnyFolding, rank: int, cache: GroupCache, *, zero: int) -> ShardedState:
    """Zero everywhere."""
    pipeline = pipeline_of(spec, folding)
    params = stage_params(spec, pipeline.stages.of_rank(folding.coord(rank, "pp")))
    placement = plain_placement(spec.num_experts, folding.of_rank(rank))
    tensors = {p.name: torch.zeros(local_param(p, folding, placement, rank).shape) for p in params}
    groups = build_groups(folding, rank=rank, cache=cache, table_ranks=pipeline.stages.table_ranks)
    layouts = flat_layouts(params, folding, placement, rank, zero=zero)
    return ShardedState(tensors, layouts, groups=groups, buffers={}, dtype=torch.float32)


def filled(state: ShardedState) -> ShardedState:
    for box in state.boxes():
        box.tensor.copy_(logical(box.name, box.shape, torch.float32)[box.box.slices()])
    return state


def _refold(rank: int, cache: GroupCache, pairs: list[tuple[str, str]]) -> list[str]:
    spec, wrong = dataclasses.replace(small_spec(), num_layers=4), []
    axis = Axis("world", tuple(range(WORLD)), rank, cache.get(tuple(range(WORLD))))
    resharder = Resharder(Collectives(timeout_s=20), axis)
    for i, (before, after) in enumerate(pairs):
        zero = (1, i % 2)
        sides = [folding_of(text) for text in (before, after)]
        layouts = [
            shard_layouts(StateLayouts(spec=spec, folding=f, stages=pipeline_of(spec, f).stages), zero=z)
            for f, z in zip(sides, zero, strict=True)
        ]
        old = filled(state_of(spec, sides[0], rank, cache, zero=zero[0]))
        new = state_of(spec, sides[1], rank, cache, zero=zero[1])
        moves = [Move(name=n, itemsize=4, src=layouts[0][n], dst=layouts[1][n]) for n in layouts[0]]
        for kind in STATE_KINDS:
            source, dest = shard_views(old, kind), shard_views(new, kind)
            resharder.move(
                moves,
                [source.get(m.name) for m in moves],  # type: ignore[misc]
                dtypes=[torch.float32] * len(moves),
                out=[dest.get(m.name) for m in moves],  # type: ignore[misc]
            )
        wrong += [
            f"{before} to {after}: {box.name} {box.box}"
            for box in new.boxes()
            if not torch.equal(box.tensor, logical(box.name, box.shape, torch.float32)[box.box.slices()])
        ]
    return wrong


def test_state_moves_between_any_two_foldings() -> None:
    pairs = some([(a, b) for a in FOLDINGS for b in FOLDINGS if a != b], 12)
    assert [found for found in run_ranks(WORLD, _refold, pairs, timeout_s=240) if found] == []


@pytest.mark.core
def test_a_view_reaches_only_what_the_shard_holds() -> None:
    shard = torch.arange(10.0)
    view = ShardView(shard, shape=(4, 3), parts=[ShardPart(4, 12, 0)])
    view[slice(2, 4), slice(0, 3)].fill_(-1)
    assert shard.tolist() == [0, 1, -1, -1, -1, -1, -1, -1, 8, 9] and view.numel() == 12
    assert view[slice(0, 0), slice(0, 3)].numel() == 0
    with pytest.raises(IndexError, match="not in what this rank keeps"):
        view[slice(0, 2), slice(0, 3)]
    with pytest.raises(IndexError, match="not in what this rank keeps"):
        ShardView(shard, shape=(4, 3), parts=[ShardPart(0, 10, 0)])[slice(0, 4), slice(0, 3)]
