"""Layouts of a run's state, and its rows in waves: held against what flat buffers and modules hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reshard_plan_help import shard_layouts
from tiers import times

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import ConfigError
from phalanx.plan.layout.parameters import flat_layouts, stage_params
from phalanx.plan.layout.state import StateLayouts
from phalanx.plan.layout.tensors import TensorLayout
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import Placement, plain_placement
from phalanx.plan.mapping.stage_foldings import AnyFolding, parse_stages
from phalanx.plan.model.model import PRESETS, RouterSpec
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.plan.reshard.weight_waves import divide, readers_layout, wave_rows

pytestmark = pytest.mark.unit

SPEC = dataclasses.replace(
    PRESETS["tiny"], num_layers=4, tied_embeddings=False, router=RouterSpec(score="sigmoid", bias_rate=1e-3)
)
FOLDINGS: Sequence[AnyFolding] = (
    make_folding(world=8, tp=2, ep=4),
    make_folding(world=8, tp=2, pp=2, ep=2, etp=2),
    make_folding(world=4, cp=2, ep=2),
    parse_stages(["tp1", "tp2.dp2.ep4", "tp2"]),
)


def layouts_of(folding: AnyFolding, **more: object) -> StateLayouts:
    pipeline = make_pipeline(PipelineConfig(), SPEC, pp=folding.pp, seq_len=64)
    return StateLayouts(spec=SPEC, folding=folding, stages=pipeline.stages, **more)  # type: ignore[arg-type]


def times_held(layout: TensorLayout) -> np.ndarray:
    """How many ranks hold each element."""
    count = np.zeros(layout.shape, dtype=int)
    for held in layout.held:
        for h in held:
            count[h.box.slices()] += 1
    return count


@pytest.mark.parametrize("folding", FOLDINGS, ids=lambda f: f.label())
def test_every_element_is_held_and_local_boxes_lie_inside(folding: AnyFolding) -> None:
    state = layouts_of(folding)
    for name, layout in [*state.parameters().items(), *state.buffers().items(), *shard_layouts(state).items()]:
        assert times_held(layout).min() > 0, name
        for held, shape in zip(layout.held, layout.local_shapes, strict=True):
            local = np.zeros(shape, dtype=int)
            for h in held:
                assert local[h.local_box().slices()].shape == h.box.sizes, name
                local[h.local_box().slices()] += 1
            assert local.max(initial=0) <= 1, name


@pytest.mark.parametrize("folding", FOLDINGS, ids=lambda f: f.label())
def test_shards_are_the_pieces_of_the_flat_buffers(folding: AnyFolding) -> None:
    state, stages = layouts_of(folding), make_pipeline(PipelineConfig(), SPEC, pp=folding.pp, seq_len=64).stages
    shards, whole = shard_layouts(state), state.parameters()
    for rank in range(folding.world):
        params = stage_params(SPEC, stages.of_rank(folding.coord(rank, "pp")))
        placement = plain_placement(SPEC.num_experts, folding.of_rank(rank))
        for layout in flat_layouts(params, folding, placement, rank).values():
            pieces = layout.pieces(*layout.shard_range())
            for local in layout.params:
                mine = [p.box for p in pieces if p.param == local.param]
                assert [h.box for h in shards[local.param.name].of_rank(rank)] == mine
                held = [(h.box, h.local) for h in whole[local.param.name].of_rank(rank)]
                assert held == [(p.box, p.local.offsets) for p in local.pieces]


def test_without_sharding_every_replica_keeps_all_that_its_modules_hold() -> None:
    state = layouts_of(FOLDINGS[0])
    for name, layout in shard_layouts(state, zero=0).items():
        assert (times_held(layout) == times_held(state.parameter(name))).all(), name


def test_ranks_may_begin_anywhere_and_experts_lie_where_a_placement_says() -> None:
    folding = make_folding(world=2, ep=2)
    swapped = Placement(num_experts=SPEC.num_experts, slots=((tuple(range(4, 8)), tuple(range(4))),))
    state = layouts_of(folding, first_rank=5, placement=lambda rank: swapped)
    name = next(n for n, p in state.params.items() if p.ep_dim is not None)
    layout = state.parameter(name)
    assert layout.ranks == (5, 6) and [h.box.offsets[0] for h in layout.of_rank(5)] == [4]
    assert state.buffers()["layers.0.moe.router.expert_bias"].ranks == (5, 6)


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(1, 4000),
)
@settings(max_examples=times(150, 50), deadline=None)
def test_waves_hold_every_row_once_and_keep_to_the_limit(
    given_shapes: list[list[int]], readers: int, limit_bytes: int
) -> None:
    shapes = {f"t{i}": tuple(shape) for i, shape in enumerate(given_shapes)}
    try:
        waves = divide(shapes, element_bytes=4, readers=readers, limit_bytes=limit_bytes)
    except ConfigError as error:
        assert max(4 * int(np.prod(s[1:])) for s in shapes.values()) > limit_bytes and "the least is" in str(error)
        return
    seen = {name: np.zeros(shape, dtype=int) for name, shape in shapes.items()}
    for wave in waves:
        held_bytes = np.zeros(readers, dtype=int)
        for rows in wave:
            layout = readers_layout(shapes[rows.name], rows, readers=readers)
            seen[rows.name] += times_held(layout)
            held_bytes += [4 * int(np.prod(shape)) for shape in layout.local_shapes]
        assert held_bytes.max() <= limit_bytes
    assert all((count == 1).all() for count in seen.values())


def test_rows_of_a_layout_stay_in_their_places() -> None:
    layout = layouts_of(FOLDINGS[0]).parameter("embedding.weight")
    parts = [wave_rows(layout, rows) for wave in divide({"e": layout.shape}, element_bytes=4, readers=2, limit_bytes=4000)
             for rows in wave]  # fmt: skip
    assert len(parts) > 2
    for rank in layout.ranks:
        local = np.full(layout.local_shapes[0], -1)
        whole = np.arange(np.prod(layout.shape)).reshape(layout.shape)
        for part in parts:
            for h in part.of_rank(rank):
                local[h.local_box().slices()] = whole[h.box.slices()]
        (held,) = layout.of_rank(rank)
        assert (local == whole[held.box.slices()]).all()
