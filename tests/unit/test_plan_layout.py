"""Boxes, flat buffers and shards: every logical element lies where the rule table says, as often as it says."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers import some, times

from phalanx.core.errors import PlanError
from phalanx.plan.layout.parameters import (
    SHARD_MULTIPLE,
    boxes_of_range,
    flat_layouts,
    local_param,
    stage_params,
)
from phalanx.plan.mapping.folding import GRADIENT_RULES, Folding, legal_foldings, make_folding
from phalanx.plan.mapping.placement import Placement, plain_placement
from phalanx.plan.mapping.stages import assign_stages
from phalanx.plan.model.model import PRESETS, ModelSpec, ParamSpec, parameters

pytestmark = pytest.mark.unit

SPEC = dataclasses.replace(
    PRESETS["tiny"],
    num_layers=3,
    dense_layers=1,
    dense_ffn=24,
    shared_ffn=16,
    shared_gate=True,
    attention_bias=True,
    qk_norm="hidden",
    hidden=16,
    vocab=32,
    head_dim=4,
)
"""Small, with every kind of parameter."""
FOLDINGS = [*legal_foldings(8, SPEC, seq_len=32), *legal_foldings(6, SPEC, seq_len=32)]


# ---- ranges -> boxes ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(max_examples=times(300, 100), deadline=None)
def test_boxes_of_range_are_the_elements_of_the_range(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    flat = np.arange(total)
    tensor = flat.reshape(shape)
    seen: list[int] = []
    boxes = boxes_of_range(shape, start, stop)
    for box, first in boxes:
        values = tensor[box.slices()].ravel()
        assert values[0] == first and np.array_equal(values, np.arange(first, first + box.num_elements))
        seen += values.tolist()
    assert seen == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_empty_and_scalar_ranges() -> None:
    assert boxes_of_range((3, 4), 5, 5) == []
    assert boxes_of_range((), 0, 0) == []
    ((box, first),) = boxes_of_range((), 0, 1)
    assert (box.num_elements, first) == (1, 0)


# ---- parameters over ranks ------------------------------------------------------------------------------------------------------


def params_of(spec: ModelSpec, folding: Folding, rank: int) -> tuple[ParamSpec, ...]:
    """Those of a rank with one stage."""
    plan = assign_stages(spec, range(folding.pp), seq_len=32)
    return stage_params(spec, plan.of_rank(folding.coord(rank, "pp")))


def replicas(folding: Folding, family: str) -> int:
    return math.prod(len(folding.group_of(0, group)) for group in GRADIENT_RULES[family].replicas)


@pytest.mark.parametrize("folding", some(FOLDINGS, 50), ids=lambda f: f"{f.world}:{f.label()}")
def test_boxes_of_all_ranks_tile_each_tensor_exactly_replicas_times(folding: Folding) -> None:
    placement = plain_placement(SPEC.num_experts, folding)
    count = {p.name: np.zeros(p.shape, dtype=np.int64) for p in parameters(SPEC)}
    for rank in range(folding.world):
        for param in params_of(SPEC, folding, rank):
            local = local_param(param, folding, placement, rank)
            filled = np.zeros(local.shape, dtype=np.int64)
            for piece in local.pieces:
                filled[piece.local.slices()] += 1
                count[param.name][piece.box.slices()] += 1
            assert (filled == 1).all()
    for param in parameters(SPEC):
        assert (count[param.name] == replicas(folding, param.family)).all(), param.name


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("folding", some(FOLDINGS[::3], 20), ids=lambda f: f"{f.world}:{f.label()}")
def test_shards_tile_the_flat_buffer_and_each_logical_element_exactly_once(folding: Folding, zero: int) -> None:
    """With ZeRO-1 the shards of one tp/etp replica group cover each element once; without it, once per rank of the group."""
    placement = plain_placement(SPEC.num_experts, folding)
    count = {p.name: np.zeros(p.shape, dtype=np.int64) for p in parameters(SPEC)}
    for rank in range(folding.world):
        params = params_of(SPEC, folding, rank)
        for layout in flat_layouts(params, folding, placement, rank, zero=zero).values():
            assert layout.length == layout.shard_length * layout.num_shards
            assert layout.shard_length % SHARD_MULTIPLE == 0
            used = sum(p.num_elements for p in layout.params)
            assert used <= layout.length < used + layout.num_shards * SHARD_MULTIPLE
            start, stop = layout.shard_range()
            pieces = layout.pieces(start, stop)
            assert all(start <= p.start and p.stop <= stop for p in pieces)
            assert all(a.stop <= b.start for a, b in itertools.pairwise(pieces))
            for piece in pieces:
                count[piece.param.name][piece.box.slices()] += 1
    for param in parameters(SPEC):
        rule = GRADIENT_RULES[param.family]
        expected = replicas(folding, param.family)
        if zero:
            expected //= len(folding.group_of(0, rule.shard_over))
        assert (count[param.name] == expected).all(), param.name


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_pieces_of_any_range_are_what_the_local_tensors_hold(data: st.DataObject) -> None:
    """Round trip against NumPy: a buffer filled from global element numbers reads back through its pieces."""
    folding = data.draw(st.sampled_from(FOLDINGS))
    rank = data.draw(st.integers(0, folding.world - 1))
    params = params_of(SPEC, folding, rank)
    layouts = flat_layouts(params, folding, plain_placement(SPEC.num_experts, folding), rank)
    for layout in layouts.values():
        logical = {p.param.name: np.arange(p.param.num_elements).reshape(p.param.shape) for p in layout.params}
        buffer = np.full(layout.length, -1)
        for local, start in zip(layout.params, layout.starts, strict=True):
            tensor = np.full(local.shape, -1)
            for piece in local.pieces:
                tensor[piece.local.slices()] = logical[local.param.name][piece.box.slices()]
            buffer[start : start + tensor.size] = tensor.ravel()
        lo = data.draw(st.integers(0, layout.length))
        hi = data.draw(st.integers(lo, layout.length))
        read = np.full(layout.length, -1)
        for flat in layout.pieces(lo, hi):
            read[flat.start : flat.stop] = logical[flat.param.name][flat.box.slices()].ravel()
        expected = np.where((np.arange(layout.length) >= lo) & (np.arange(layout.length) < hi), buffer, -1)
        assert np.array_equal(read, expected)


def test_a_dim_that_does_not_divide_is_refused_by_name() -> None:
    folding = Folding(world=3, tp=3)
    with pytest.raises(ValueError, match=r"embedding\.weight: dim 0 of size 32 cannot be split over 3"):
        local_param(parameters(SPEC)[0], folding, plain_placement(8, folding), 0)


# ---- stages ---------------------------------------------------------------------------------------------------------------------


def test_ends_of_the_pipeline_hold_embedding_norm_and_head() -> None:
    def names(spec: ModelSpec, ranks: Sequence[int], rank: int) -> set[str]:
        return {p.name for p in stage_params(spec, assign_stages(spec, ranks, seq_len=32).of_rank(rank))}

    first, middle, last = (names(SPEC, range(3), rank) for rank in range(3))
    assert "embedding.weight" in first and "head.weight" in last and "norm.weight" in last
    assert not first & middle and not middle & last and not first & last
    assert first | middle | last == {p.name for p in parameters(SPEC)}
    tied: ModelSpec = dataclasses.replace(SPEC, tied_embeddings=True)
    assert [("embedding.weight" in names(tied, range(3), rank)) for rank in range(3)] == [True, False, True]
    assert names(tied, (0,), 0) == {p.name for p in parameters(tied)}
    ends = names(tied, (0, 1, 1, 0), 0)
    assert "embedding.weight" in ends and "norm.weight" in ends and not ends & names(tied, (0, 1, 1, 0), 1)


# ---- placements -----------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_plain_placement_puts_each_expert_in_the_slot_of_its_number(width: int, ep: int, edp: int) -> None:
    folding = Folding(world=ep * edp, ep=ep)
    placement = plain_placement(width * ep, folding)
    placement.check()
    assert placement.is_plain
    assert placement.slots_per_rank == width
    for group in range(edp):
        assert placement.group_slots(group).tolist() == list(range(width * ep))
    for expert in range(width * ep):
        assert placement.holders(expert) == tuple((d, expert // width) for d in range(edp))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_placement_with_enough_slots_fills_its_local_tensors(data: st.DataObject) -> None:
    """Replicated, shuffled slots: the pieces of each rank still hold its slots' experts, in slot order."""
    num_experts, ep, edp = 4, 2, 2
    folding = Folding(world=4, ep=ep)
    slots = []
    for _ in range(edp):
        row = data.draw(
            st.permutations([*range(num_experts), *data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=2))])
        )
        slots.append((tuple(row[:3]), tuple(row[3:])))
    placement = Placement(num_experts=num_experts, slots=tuple(slots))
    placement.check()
    spec = dataclasses.replace(PRESETS["tiny"], num_experts=num_experts)
    param = next(p for p in parameters(spec) if p.name.endswith("experts.w2"))
    logical = np.arange(param.num_elements).reshape(param.shape)
    for rank in range(4):
        local = local_param(param, folding, placement, rank)
        held = placement.local_experts(edp=folding.coord(rank, "edp"), ep=folding.coord(rank, "ep"))
        tensor = np.full(local.shape, -1)
        for piece in local.pieces:
            tensor[piece.local.slices()] = logical[piece.box.slices()]
        assert np.array_equal(tensor, logical[list(held)])


def test_broken_placements_are_refused_with_all_problems() -> None:
    placement = Placement(num_experts=3, slots=(((0, 1), (2,)), ((0, 9), (1, 0))))
    with pytest.raises(PlanError) as caught:
        placement.check()
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "same number of slots" in text and "slots[1] = [2]" in text and "slots[1] = [9]" in text
    with pytest.raises(PlanError, match="try ep = 2"):
        plain_placement(8, Folding(world=3, ep=3))


def test_layout_is_fast_enough_for_real_shapes() -> None:
    """One rank of DeepSeek-V3 on 1,024 ranks in pieces: needs no tensor and well under a second."""
    spec = PRESETS["deepseek-v3"]
    folding = make_folding(world=1024, tp=2, pp=8, ep=64)
    params = params_of(spec, folding, 1023)
    layouts = flat_layouts(params, folding, plain_placement(256, folding), 1023)
    held = sum(piece.box.num_elements for x in layouts.values() for piece in x.pieces(*x.shard_range()))
    assert held == sum(
        min(x.shard_range()[1], sum(p.num_elements for p in x.params))
        - min(x.shard_range()[0], sum(p.num_elements for p in x.params))
        for x in layouts.values()
    )
