"""The rules of `plan/moe/dispatch.py`: nothing lost, replicas even, every rank's arithmetic the same as moving tokens by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
from dispatch_by_hand import rows_by_hand
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.core.errors import PlanError
from phalanx.plan.moe.dispatch import (
    Chunks,
    DispatchPlan,
    DispatchSpec,
    capacity,
    kept_pairs,
    plan_dispatch,
    plan_static_dispatch,
    replica_index,
    split_over_replicas,
)

pytestmark = pytest.mark.unit


@st.composite
def groups(draw):
    """(ep, etp, slots, experts per source): any placement in which every expert has a slot, any routing."""
    ep, etp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    per_rank = draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, ep * per_rank))
    extra = draw(st.lists(st.integers(0, num_experts - 1), min_size=ep * per_rank, max_size=ep * per_rank))
    slots = draw(st.permutations([*range(num_experts), *extra][: ep * per_rank]))
    top_k = draw(st.integers(1, num_experts))
    seed = draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    experts = []
    for _ in range(ep * etp):
        n = int(rng.integers(0, 7))
        rows = [rng.permutation(num_experts)[:top_k] for _ in range(n)]
        table = np.array(rows, dtype=np.int64).reshape(n, top_k)
        table[rng.random(table.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -1  # dropped
        experts.append(table)
    return ep, etp, tuple(int(s) for s in slots), num_experts, experts


def counts_of(experts, num_experts):
    return np.array([[(e == i).sum() for i in range(num_experts)] for e in experts])


@given(groups())
@settings(max_examples=times(150, 50), deadline=None)
def test_every_row_goes_to_one_replica_and_replicas_share_evenly(case):
    ep, etp, slots, num_experts, experts = case
    counts = counts_of(experts, num_experts)
    plan = plan_dispatch(counts, slots, ep=ep, etp=etp)
    plan.check(counts)
    rows = plan.rows_PG
    assert (rows >= 0).all()
    for expert in range(num_experts):
        mine = [g for g, e in enumerate(slots) if e == expert]
        assert (rows[:, mine].sum(1) == counts[:, expert]).all()
        loads = rows[:, mine].sum(0)
        assert loads.max() - loads.min() <= 1 and list(loads) == sorted(loads, reverse=True)


@given(groups())
@settings(max_examples=times(150, 50), deadline=None)
def test_ranks_agree_with_moving_tokens_by_hand(case):
    """Permute, all-to-all, all-gather, sort: done with lists for all ranks at once, through what the plan tells each of them."""
    ep, etp, slots, num_experts, experts = case
    plan = plan_dispatch(counts_of(experts, num_experts), slots, ep=ep, etp=etp)
    sent = [send_list(plan, p, experts[p]) for p in range(ep * etp)]
    wanted = rows_by_hand(experts, plan)
    e = plan.slots_per_rank
    for me in range(ep):
        arrived = []
        for x in range(etp):
            got = []
            for source in range(ep):
                splits = plan.sends(ep=source, etp=x)
                begin = sum(splits[:me])
                got += sent[plan.source(ep=source, etp=x)][begin : begin + splits[me]]
                assert splits[me] == plan.receives(ep=me, etp=x)[source]
            assert len(got) == plan.etp_sizes(ep=me)[x]
            arrived += got
        order = plan.slot_order(ep=me)
        sorted_rows = [arrived[i] for i in order.index()]
        assert sorted_rows == [row for slot in wanted[me * e : (me + 1) * e] for row in slot]
        assert [sorted_rows[i] for i in order.inverse().index()] == arrived
        assert list(plan.slot_counts(ep=me)) == [len(rows) for rows in wanted[me * e : (me + 1) * e]]
        chunks, source_of = plan.gathered_order(ep=me)
        everything = [row for rows in sent for row in rows]
        assert [everything[i] for i in chunks.index()] == sorted_rows
        assert [r[0] for r in sorted_rows] == list(np.repeat(source_of, chunks.sizes))


def send_list(plan, p, experts_TK):
    by_expert = sorted((int(e), int(t), int(k)) for (t, k), e in np.ndenumerate(experts_TK) if e >= 0)
    order = plan.send_order(ep=p // plan.etp, etp=p % plan.etp)
    return [(p, *by_expert[i][1:]) for i in order.index()]


def test_plain_placement_sends_the_counts_themselves():
    counts = np.random.default_rng(0).integers(0, 9, (6, 8))
    assert (split_over_replicas(counts, range(8)) == counts).all()


def test_an_expert_with_three_replicas():
    """10 rows over 3 replicas: 4, 3, 3; counted through the sources, so that source 0 (7 rows) fills the first and most of the second."""
    rows = split_over_replicas([[7, 1], [3, 0]], [0, 1, 0, 0])
    assert rows.tolist() == [[4, 1, 3, 0], [0, 0, 0, 3]]
    index, replicas = replica_index((0, 1, 0, 0))
    assert (index.tolist(), replicas.tolist()) == ([0, 0, 1, 2], [3, 1, 3, 3])


@given(st.integers(0, 20), st.lists(st.integers(0, 3), min_size=4, max_size=8))
def test_static_plan_sends_the_capacity_to_every_expert(rows, more):
    slots = [0, 1, 2, 3, *more]
    slots = slots[: len(slots) // 2 * 2]
    plan = plan_static_dispatch(rows, slots, ep=2, etp=2)
    plan.check()
    for expert in range(4):
        mine = [g for g, e in enumerate(slots) if e == expert]
        assert (plan.rows_PG[:, mine].sum(1) == rows).all()


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_chunks_and_their_inverse(sizes, random):
    ends = np.cumsum(sizes)
    order = list(range(len(sizes)))
    random.shuffle(order)
    chunks = Chunks((ends - sizes)[order], np.array(sizes)[order])
    rows = np.arange(sum(sizes))
    assert (rows[chunks.index()][chunks.inverse().index()] == rows).all()
    assert chunks.num_rows == sum(sizes)


def test_check_names_every_problem():
    rows = np.array([[3, 0, 1], [-1, 0, 0]])
    plan = DispatchPlan((0, 1, 0), 1, 2, rows)
    with pytest.raises(PlanError) as info:
        plan.check([[4, 0], [0, 0]])
    text = str(info.value)
    assert "a number of rows is not negative" in text
    assert "source 1 routed 0 rows to expert 0" in text
    uneven = DispatchPlan((0, 1, 0), 1, 2, np.array([[3, 0, 0], [0, 0, 0]]))
    with pytest.raises(PlanError, match="replicas of one expert differ by 1 row at most"):
        uneven.check([[3, 0], [0, 0]])
    with pytest.raises(PlanError, match="2 x 1 sources by 3 slots"):
        DispatchPlan((0, 1, 0), 2, 1, rows).check()


def test_replicas_that_differ_by_two_rows_are_uneven():
    counts = [[4, 0], [0, 0]]
    DispatchPlan((0, 1, 0), 1, 2, np.array([[2, 0, 2], [0, 0, 0]])).check(counts)
    with pytest.raises(PlanError, match="differ by 1 row at most"):
        DispatchPlan((0, 1, 0), 1, 2, np.array([[3, 0, 1], [0, 0, 0]])).check(counts)


def test_slots_of_one_expert_on_a_rank_are_one_list_of_rows():
    plan = DispatchPlan((0, 0, 1, 0), 2, 2, np.arange(16).reshape(4, 4))
    assert plan.expert_source_counts(ep=0) == ((0, 8, 4, 12, 1, 9, 5, 13),)
    assert plan.expert_source_counts(ep=1) == ((2, 10, 6, 14), (3, 11, 7, 15))


@pytest.mark.parametrize(
    ("overlap", "transport", "over"),
    [
        ("serial", "all_to_all", "ep"), ("coarse:4", "all_to_all", "ep"), ("fused", "all_to_all", "ep"),
        ("tiles:parts=2", "all_to_all", "ep_etp"), ("fine", "all_to_all", "ep_etp"),
        ("serial", "all_gather", "ep_etp"), ("serial", "deepep", ""),
    ],
)  # fmt: skip
def test_rows_travel_over_the_group_of_their_way(overlap, transport, over):
    assert DispatchSpec(overlap=overlap, transport=transport).rows_over == over


def test_plan_prints_and_hashes():
    counts = [[2, 0, 1, 1], [4, 0, 0, 0]]
    plan = plan_dispatch(counts, range(4), ep=2, etp=1)
    assert plan.explain() == (
        "8 rows from 2 sources to 4 slots on 2 ep ranks; 2 stay where they are\n"
        "  rows per slot 0 ... 6, per ep rank 2 ... 6"
    )
    assert json.loads(plan.to_json())["rows"] == counts
    assert plan.hash == plan_dispatch(counts, range(4), ep=2, etp=1).hash
    assert plan.hash != plan_dispatch([[2, 0, 1, 1], [4, 0, 0, 1]], range(4), ep=2, etp=1).hash


def test_what_stays_is_counted_on_every_rank_of_a_coordinate():
    plan = plan_dispatch([[2, 0], [1, 3], [0, 1], [4, 5]], range(2), ep=2, etp=2)
    assert "; 9 stay where they are\n" in plan.explain()


def test_plans_whose_rows_stay_together_otherwise_are_other_plans():
    rows = np.array([[8, 4], [0, 0]])
    plans = [DispatchPlan((0, 0), 2, 1, rows, unit_rows) for unit_rows in (1, 4)]
    assert plans[0].hash != plans[1].hash and json.loads(plans[1].to_json())["unit_rows"] == 4


def test_capacity():
    spec = DispatchSpec(policy="drop", capacity_factor=1.25)
    assert capacity(spec, num_tokens=10, top_k=2, num_experts=8) == 4  # 3.125 rounded up
    assert capacity(spec, num_tokens=3, top_k=8, num_experts=8) == 3  # no expert can get more than all tokens
    assert capacity(spec, num_tokens=0, top_k=2, num_experts=8) == 0
    exact = DispatchSpec(policy="drop", capacity_factor=2.2)
    assert capacity(exact, num_tokens=100, top_k=8, num_experts=20) == 88  # products of floats lie a little above it


def test_kept_pairs_by_hand():
    experts = [[0, 1], [0, 1], [0, 2], [0, 1]]
    weights = [[0.1, 0.9], [0.7, 0.3], [0.7, 0.3], [0.5, 0.5]]
    assert kept_pairs(experts, weights, rows=2, by="position").tolist() == [[1, 1], [1, 1], [0, 1], [0, 0]]
    assert kept_pairs(experts, weights, rows=2, by="probability").tolist() == [[0, 1], [1, 0], [1, 1], [0, 1]]
    assert kept_pairs(experts, weights, rows=1, by="probability").tolist() == [[0, 1], [1, 0], [0, 1], [0, 0]]
