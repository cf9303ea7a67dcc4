"""Division of a model into pipeline stages: optimal by cost, legal by hand, with everything known about embedding, head and experts."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.core.errors import PlanError
from phalanx.plan.mapping.stages import (
    LayerCosts,
    assign_stages,
    balanced_counts,
    division_problems,
    layer_costs,
    stage_problems,
)
from phalanx.plan.model.model import PRESETS, flops_per_token
from phalanx.plan.pipeline.schedule.make import make_schedule
from phalanx.plan.pipeline.schedule.orders import looped_ranks, vee_ranks

pytestmark = pytest.mark.unit
LAPTOP = PRESETS["laptop"]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("seq_len", [128, 4096])
def test_costs_of_the_parts_sum_to_the_flops_of_the_model(name: str, seq_len: int) -> None:
    spec = PRESETS[name]
    costs = layer_costs(spec, seq_len=seq_len)
    assert costs.total == pytest.approx(flops_per_token(spec, seq_len), rel=1e-12)
    assert costs.head == 6 * spec.hidden * spec.vocab and costs.embedding == 0 and min(costs.blocks) > 0
    assert len(set(costs.blocks[: spec.dense_layers])) <= 1


def every_division(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """All legal counts, found by trying everything."""
    if num_stages == 1:
        return [(num_layers,)]
    found = itertools.product(range(num_layers + 1), repeat=num_stages)
    return [c for c in found if sum(c) == num_layers and all(n >= 1 for n in c[1:-1])]


@settings(max_examples=times(150, 50), deadline=None)
@given(st.data())
def test_no_division_is_better(data: st.DataObject) -> None:
    cost = st.integers(0, 12)
    blocks = tuple(data.draw(st.lists(cost, min_size=1, max_size=7)))
    num_stages = data.draw(st.integers(1, min(5, len(blocks) + 2)))
    costs = LayerCosts(embedding=data.draw(cost), blocks=blocks, head=data.draw(cost))

    def key(counts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        ends = [0, *itertools.accumulate(counts)]
        sums = [sum(blocks[a:b]) for a, b in itertools.pairwise(ends)]
        sums[0] += costs.embedding
        sums[-1] += costs.head
        return max(sums), sum(s * s for s in sums), counts

    def scaled(unit: float) -> LayerCosts:
        return LayerCosts(
            embedding=costs.embedding * unit, blocks=tuple(b * unit for b in blocks), head=costs.head * unit
        )

    best = min(map(key, every_division(len(blocks), num_stages)))
    for unit in (1, 3.0, 0.1875, 2.0**-60, 1e15):  # products are exact: equally dear divisions are equal
        assert balanced_counts(scaled(unit), num_stages) == best[2], unit
    # 0.1 + 0.2 is not 0.3 in floats, so equal sums of such costs are not equal: then the dearest stage alone is promised
    assert key(balanced_counts(scaled(0.1), num_stages))[0] == best[0]


@settings(max_examples=times(100, 40), deadline=None)
@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 8), st.integers(1, 3))
def test_every_model_is_covered_once_or_refused(name: str, pp: int, virtual: int) -> None:
    spec, ranks = PRESETS[name], looped_ranks(pp, virtual)
    if len(ranks) > spec.num_layers + 2:
        with pytest.raises(PlanError, match=f"nearest legal: {spec.num_layers + 2}"):
            assign_stages(spec, ranks, seq_len=512)
        return
    plan = assign_stages(spec, ranks, seq_len=512)
    plan.check()
    assert sum(plan.counts) == spec.num_layers and [s.rank for s in plan.stages] == list(ranks)
    assert sorted(m for s in plan.stages for m in s.moe_layers) == list(spec.moe_layers)
    assert [layer for s in plan.stages for layer in s.layers] == list(range(spec.num_layers))
    assert sum(s.cost for s in plan.stages) == pytest.approx(flops_per_token(spec, 512))
    assert plan.imbalance >= 1 - 1e-12


def test_the_head_counts_and_early_stages_get_less() -> None:
    same = LayerCosts(embedding=0, blocks=(1.0,) * 10, head=0)
    assert balanced_counts(same, 4) == (2, 2, 3, 3)
    heavy = LayerCosts(embedding=0, blocks=(1.0,) * 10, head=2.0)
    assert balanced_counts(heavy, 4) == (3, 3, 3, 1)
    assert balanced_counts(LayerCosts(embedding=0, blocks=(1.0, 1.0), head=9.0), 4) == (0, 1, 1, 0)


def test_dense_layers_make_stages_without_experts() -> None:
    spec = dataclasses.replace(LAPTOP, dense_layers=2, dense_ffn=512)
    plan = assign_stages(spec, looped_ranks(2, 1), seq_len=64, layers=(2, 2))
    assert [s.moe_layers for s in plan.stages] == [(), (2, 3)]
    assert "layers 0-1 (no experts)" in plan.explain()
    assert "(1 with experts)" in assign_stages(spec, looped_ranks(2, 1), seq_len=64, layers=(3, 1)).explain()


def test_who_holds_a_tied_table() -> None:
    tied = dataclasses.replace(LAPTOP, tied_embeddings=True)
    loop = assign_stages(tied, looped_ranks(2, 2), seq_len=64)
    vee = assign_stages(tied, make_schedule("zbv", pp=2, virtual=2, num_microbatches=4).rank_of_stage, seq_len=64)
    assert loop.table_ranks == (0, 1) and "ranks 0 and 1: its gradient is summed" in loop.explain()
    assert vee.table_ranks == (0,) and "nothing to sum" in vee.explain()
    assert assign_stages(LAPTOP, looped_ranks(4, 1), seq_len=64).table_ranks == (0,)
    assert [s.index for s in vee.of_rank(0)] == [0, 3]


def test_layers_by_hand() -> None:
    plan = assign_stages(LAPTOP, looped_ranks(3, 1), seq_len=64, layers=[0, 4, 0])
    assert plan.counts == (0, 4, 0) and [list(s.layers) for s in plan.stages] == [[], [0, 1, 2, 3], []]
    assert [(s.has_embedding, s.has_head) for s in plan.stages] == [(True, False), (False, False), (False, True)]
    text = plan.explain()
    assert "embedding" in text and "layers 0-3" in text and "head" in text


def test_illegal_layers_name_all_problems_and_a_legal_division() -> None:
    with pytest.raises(PlanError) as caught:
        assign_stages(LAPTOP, looped_ranks(4, 1), seq_len=64, layers=[1, 0, -1, 3, 3])
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert (
        "must give the layers of each of the 4 stages; for example 1 1 1 1" in text
        and "must sum to num_layers = 4, not to 6" in text
    )
    assert "stages.layers[1] = 0" in text and "stages.layers[2] = -1" in text
    hint = str(division_problems(5, 3, layers=[1, 1, 1])[0])
    assert division_problems(5, 3, layers=[int(n) for n in hint.split("for example ")[1].split()]) == []
    assert "nearest legal: 1" in str(division_problems(5, 0)[0])


@given(st.integers(1, 12), st.integers(1, 9))
def test_the_example_in_a_hint_is_legal(num_layers: int, num_stages: int) -> None:
    hints = [
        p.hint for p in division_problems(num_layers, num_stages, layers=[0] * num_stages) if "for example" in p.hint
    ]
    if num_stages <= num_layers + 2:
        example = [int(n) for n in hints[0].split("for example ")[1].split()]
        assert division_problems(num_layers, num_stages, layers=example) == []
    else:
        assert not hints


def test_a_dear_layer_is_alone() -> None:
    assert balanced_counts(LayerCosts(embedding=0.0, blocks=(3.0, 1.0, 1.0, 1.0), head=0.0), 2) == (1, 3)


def test_the_check_sees_gaps_and_misplaced_parts() -> None:
    plan = assign_stages(LAPTOP, vee_ranks(2), seq_len=64)
    stages = list(plan.stages)
    moved = dataclasses.replace(stages[2], first_layer=stages[2].first_layer + 1)
    assert "once each" in str(stage_problems(dataclasses.replace(plan, stages=(*stages[:2], moved, stages[3])))[0])
    head = dataclasses.replace(stages[1], has_head=True)
    with pytest.raises(PlanError, match="the head on the last"):
        dataclasses.replace(plan, stages=(stages[0], head, *stages[2:])).check()
    foreign = dataclasses.replace(stages[0], moe_layers=(3,))
    assert "experts only" in str(stage_problems(dataclasses.replace(plan, stages=(foreign, *stages[1:])))[0])


def test_hash_depends_on_the_division() -> None:
    a, b = (assign_stages(LAPTOP, looped_ranks(2, 1), seq_len=64, layers=c) for c in ((2, 2), (1, 3)))
    assert a.hash != b.hash and a.hash == assign_stages(LAPTOP, (0, 1), seq_len=64, layers=(2, 2)).hash
