"""Layouts over meshes, their text, and the check of layouts: chunk rules by hand, every element somewhere, each fault named."""

from __future__ import annotations

import dataclasses
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from reshard_plan_help import random_layout
from tiers import times

from phalanx.core.errors import PlanError
from phalanx.plan.layout.check import box_problems, coverage_problems, lost_boxes
from phalanx.plan.layout.mesh.placements import Partial, Ragged, Replicate, Shard, Strided, mesh_layout, read_layout
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import Held, TensorLayout, whole_layout

pytestmark = pytest.mark.unit


def rows(layout: TensorLayout) -> list[list[tuple[int, int]]]:
    """(start, stop) along dim 0 of each rank's boxes."""
    return [[(h.box.offsets[0], h.box.offsets[0] + h.box.sizes[0]) for h in held] for held in layout.held]


def test_chunks_are_those_of_torch() -> None:
    """torch.chunk(5, 4) gives 2 2 1; the fourth is empty."""
    layout = mesh_layout((5, 3), (4,), (Shard(0),))
    assert rows(layout) == [[(0, 2)], [(2, 4)], [(4, 5)], []]
    assert layout.local_shapes == ((2, 3), (2, 3), (1, 3), (0, 3))
    assert box_problems(layout) == []


def test_the_order_of_axes_matters() -> None:
    first, second = read_layout("2x3 S01", (12,)), read_layout("2x3 S10", (12,))
    assert rows(first) == [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)], [(8, 10)], [(10, 12)]]
    assert rows(second) == [[(0, 2)], [(4, 6)], [(8, 10)], [(2, 4)], [(6, 8)], [(10, 12)]]


def test_strided_holds_a_chunk_of_each_chunk() -> None:
    """torch's _StridedShard(0, split_factor=2) over two: [0 1 2 3][4 5 6 7] -> 0 1 4 5 and 2 3 6 7, laid end to end."""
    layout = mesh_layout((8,), (2,), (Strided(0, 2),))
    assert rows(layout) == [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]
    assert [held.local for held in layout.held[0]] == [(0,), (2,)]
    joined = mesh_layout((8,), (2, 2), (Strided(0, 2), Shard(0)))
    assert rows(joined) == [[(0, 2)], [(4, 6)], [(2, 4)], [(6, 8)]]


def test_strided_uneven() -> None:
    """9 over two: chunks 0:5 and 5:9, each over two: 0:3 3:5 and 5:7 7:9."""
    assert rows(mesh_layout((9,), (2,), (Strided(0, 2),))) == [[(0, 3), (5, 7)], [(3, 5), (7, 9)]]


def test_ragged_and_partial() -> None:
    layout = mesh_layout((7,), (2, 3), (Partial(), Ragged(0, (4, 0, 3))), ranks=(9, 8, 7, 6, 5, 4))
    assert rows(layout)[:3] == [[(0, 4)], [], [(4, 7)]]
    assert layout.terms == (0, 0, 0, 1, 1, 1) and layout.num_terms == 2
    assert layout.term_of(6) == 1 and layout.of_rank(8) == ()


@settings(max_examples=times(200, 66), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_every_element_is_somewhere(seed: int) -> None:
    """Each term of each random layout covers the tensor, and local tensors have exactly the elements of their boxes."""
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 3)))
    layout = random_layout(draw, shape, 3, partial=True)
    assert box_problems(layout) == []
    seen = np.zeros((layout.num_terms, *shape), dtype=bool)
    for rank in layout.ranks:
        for held in layout.of_rank(rank):
            seen[(layout.term_of(rank), *held.box.slices())] = True
    assert seen.all()
    assert lost_boxes(layout, whole_layout(shape, (0,))) == []
    for held_of, local_shape in zip(layout.held, layout.local_shapes, strict=True):
        local = np.zeros(local_shape, dtype=int)
        for held in held_of:
            local[held.local_box().slices()] += 1
        assert (local == 1).all() and local.size == math.prod(local_shape)


@pytest.mark.parametrize(
    ("text", "shape", "words"),
    [
        ("2x4 S0R", (4,), "needs a symbol for each of the 1 tensor dims"),
        ("2x4 S2", (4,), "names axis 2 of a mesh of 2 axes"),
        ("2x4 S0S0", (4, 4), "uses mesh axis 0 twice"),
        ("2x4 S0 P0", (4,), "uses mesh axis 0 twice"),
        ("0x4 S0", (4,), "each mesh axis has 1 rank or more"),
        ("99999999x4 S0", (4,), "has at most 2,000,000 ranks; use 2000000"),
        ("S0R", (4, 4), "write 2x4 S0RR"),
        ("2x4 Q", (4,), "write 2x4 S0RR"),
    ],
)
def test_texts_that_are_wrong(text: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(PlanError) as error:
        read_layout(text, shape, where="SRC")
    assert words in str(error.value) and "SRC" in str(error.value) and repr(text) in str(error.value)


def test_problems_of_a_mesh_come_together() -> None:
    with pytest.raises(PlanError) as error:
        mesh_layout((4, 4), (2, 0), (Shard(2), Strided(0, 0), Replicate()), ranks=(1, 1), order=(0, 0))
    found = {problem.where for problem in error.value.problems}
    assert found == {"mesh", "placements", "order", "ranks", "placements[0].dim", "placements[1].split_factor"}
    for sizes in ((3, 2), (4, 1, 0), (5, -1)):
        with pytest.raises(PlanError, match="2 sizes that add up to 4"):
            mesh_layout((4,), (2,), (Ragged(0, sizes),))
    with pytest.raises(PlanError, match="must be of the first axis that splits its dim"):
        mesh_layout((4,), (2, 2), (Shard(0), Ragged(0, (1, 1))))


def held(start: int, stop: int, at: int = 0) -> Held:
    return Held(Box((start,), (stop - start,)), (at,))


GOOD = TensorLayout(shape=(8,), ranks=(0, 1), held=((held(0, 4),), (held(4, 8),)), local_shapes=((4,), (4,)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": (0, 0)}, "each rank once"),
        ({"held": ((held(0, 4),),)}, "one for each of the 2 ranks"),
        ({"terms": (0,)}, "one for each of the 2 ranks"),
        ({"held": ((held(0, 4),), (held(5, 9),))}, "box [5:9] is not inside (8,)"),
        ({"held": ((held(0, 4),), (held(4, 8, 1),))}, "local box [1:5] is not inside (4,)"),
        ({"held": ((held(0, 3), held(2, 4, 3)), ()), "local_shapes": ((5,), (0,))}, "boxes [0:3] and [2:4] overlap"),
        (
            {"held": ((held(0, 3), held(3, 5, 1)), ()), "local_shapes": ((4,), (0,))},
            "local boxes [0:3] and [1:3] overlap",
        ),
    ],
)
def test_faults_of_a_layout(changes: dict[str, object], words: str) -> None:
    assert box_problems(GOOD) == []
    found = [str(problem) for problem in box_problems(dataclasses.replace(GOOD, **changes))]
    assert any(words in problem for problem in found), found


def test_what_is_lost_is_listed_box_by_box() -> None:
    src = dataclasses.replace(GOOD, ranks=(0,), held=GOOD.held[:1], local_shapes=((4,),))
    assert lost_boxes(src, whole_layout((8,), (5,))) == [Box((4,), (4,))]
    assert [str(p) for p in coverage_problems(src, whole_layout((8,), (5,)), name="w")] == [
        "w: lost: no source rank holds [4:8]; give a source that has it, such as a checkpoint"
    ]
    empty = dataclasses.replace(src, ranks=(), held=(), local_shapes=())
    assert lost_boxes(empty, GOOD) == [Box((0,), (4,)), Box((4,), (4,))]
