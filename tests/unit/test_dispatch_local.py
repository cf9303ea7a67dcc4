"""Local-first dispatch over replicas: whole numbers, nothing lost, replicas even, and as much stays at home as can."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dispatch_by_hand import rows_by_hand
from hypothesis import given, settings, strategies as st
from tiers import times

import phalanx.plan.moe.dispatch_local as dispatch_local
from phalanx.core.errors import PlanError
from phalanx.kernels.ops.exact_experts import chunks_of
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.dispatch_local import plan_local_dispatch
from phalanx.plan.placement.search.host_pool import equal_pool
from phalanx.plan.placement.search.plan import plan_placement
from phalanx.plan.placement.search.replicas import replica_counts, zipf_loads

pytestmark = pytest.mark.unit


@st.composite
def cases(draw):
    """(counts, slots, ep, etp, host of each ep rank)."""
    ep, etp, width = draw(st.integers(1, 5)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, ep * width))
    extra = draw(st.lists(st.integers(0, num_experts - 1), min_size=ep * width, max_size=ep * width))
    slots = draw(st.permutations([*range(num_experts), *extra][: ep * width]))
    row = st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts)
    counts = draw(st.lists(row, min_size=ep * etp, max_size=ep * etp))
    hosts = [r // 2 for r in range(ep)] if draw(st.booleans()) else []
    return np.array(counts), slots, ep, etp, hosts


def kept_at_home(plan):
    """Rows that stay on their ep rank."""
    return sum(plan.sends(ep=p, etp=x)[p] for p in range(plan.ep) for x in range(plan.etp))


def most_at_home(counts, plan):
    """No plan with these loads of slots keeps more: rank by rank, what it has of an expert, or what its slots take of it."""
    slots, width = np.array(plan.slots_G), plan.slots_per_rank
    loads = plan.rows_PG.sum(0)
    total = 0
    for rank in range(plan.ep):
        mine = counts[rank * plan.etp : (rank + 1) * plan.etp].sum(0)
        for expert in range(counts.shape[1]):
            here = slice(rank * width, (rank + 1) * width)
            total += min(mine[expert], loads[here][slots[here] == expert].sum())
    return total


@given(cases())
@settings(max_examples=times(300, 100), deadline=None)
def test_nothing_is_lost_replicas_are_even_and_home_comes_first(case):
    counts, slots, ep, etp, hosts = case
    plan = plan_local_dispatch(counts, slots, ep=ep, etp=etp, host_of_ep=hosts)
    plan.check(counts)
    assert kept_at_home(plan) == most_at_home(counts, plan)
    for expert in set(slots):
        rows = plan.rows_PG[:, np.array(slots) == expert]
        assert rows.sum(0).max() - rows.sum(0).min() <= 1
        circles = 3 if hosts else 2
        assert (rows > 0).sum() <= circles * (rows.shape[0] + rows.shape[1] - 1)


@given(cases(), st.integers(2, 5))
@settings(max_examples=times(200, 66), deadline=None)
def test_chunks_of_rows_stay_together(case, unit_rows):
    """Whoever cuts what arrives finds the chunks of each source's whole list; replicas share them evenly, and home comes first."""
    counts, slots, ep, etp, hosts = case
    plan = plan_local_dispatch(counts, slots, ep=ep, etp=etp, host_of_ep=hosts, unit_rows=unit_rows)
    plan.check(counts)
    whole = plan_local_dispatch(-(-counts // unit_rows), slots, ep=ep, etp=etp, host_of_ep=hosts)
    assert (plan.units_PG == whole.rows_PG).all()
    for source in range(len(counts)):
        for expert in set(slots):
            parts = [(n,) for n in plan.rows_PG[source, np.array(slots) == expert]]
            cut = [size for part in parts for size in chunks_of([part], unit_rows)[0]]
            assert cut == list(chunks_of([[counts[source, expert]]], unit_rows)[0])


def test_a_chunk_cut_in_two_is_found():
    plan = plan_local_dispatch([[10], [0]], [0, 0], ep=2, etp=1, unit_rows=4)
    assert plan.rows_PG.tolist() == [[8, 2], [0, 0]]
    cut = replace(plan, rows_PG=np.array([[7, 3], [0, 0]]))
    with pytest.raises(PlanError, match=r"rows\[0\]\[0\] = 7: source 0 sends whole chunks of 4 rows of expert 0"):
        cut.check([[10], [0]])
    with pytest.raises(PlanError, match="unit_rows = 0"):
        plan_local_dispatch([[1]], [0], ep=1, etp=1, unit_rows=0)


@given(cases())
@settings(max_examples=times(100, 40), deadline=None)
def test_the_odd_rows_go_where_they_are_at_home(case):
    """No other choice of the replicas that take one row more would keep more rows on their rank."""
    counts, slots, ep, etp, _ = case
    plan = plan_local_dispatch(counts, slots, ep=ep, etp=etp)
    slots_G, width = np.array(slots), plan.slots_per_rank
    for expert in set(slots):
        mine = np.flatnonzero(slots_G == expert)
        loads = plan.rows_PG.sum(0)[mine]
        have = np.array([counts[g // width * etp : (g // width + 1) * etp, expert].sum() for g in mine])
        ranks = mine // width

        def at_home(loads, have=have, ranks=ranks):
            return sum(min(have[ranks == r][0], loads[ranks == r].sum()) for r in set(ranks.tolist()))

        for i in np.flatnonzero(loads == loads.max()):
            for j in np.flatnonzero(loads == loads.min()):
                other = loads.copy()
                other[i], other[j] = loads[j], loads[i]
                assert at_home(other) <= at_home(loads)


@given(cases())
@settings(max_examples=50, deadline=None)
def test_orders_follow_from_the_rows(case):
    """What `DispatchPlan` derives holds for these rows too: every token reaches a slot of its expert once."""
    counts, slots, ep, etp, _ = case
    plan = plan_local_dispatch(counts, slots, ep=ep, etp=etp)
    experts = [np.repeat(np.arange(counts.shape[1]), row).reshape(-1, 1) for row in counts]
    arrived = rows_by_hand(experts, plan)
    for slot, rows in zip(plan.slots_G, arrived, strict=True):
        assert all(experts[p][t, k] == slot for p, t, k in rows)
    assert sorted(r for rows in arrived for r in rows) == sorted(
        (p, t, 0) for p, table in enumerate(experts) for t in range(len(table))
    )
    for p in range(ep):
        assert [len(r) for r in arrived[p * plan.slots_per_rank : (p + 1) * plan.slots_per_rank]] == list(
            plan.slot_counts(ep=p)
        )


def test_an_example_by_hand():
    """10 rows of one expert, 3 replicas on 3 ranks that have 7, 0 and 3: 4 + 3 + 3, and 3 rows travel."""
    plan = plan_local_dispatch([[7], [0], [3]], [0, 0, 0], ep=3, etp=1)
    assert plan.rows_PG.tolist() == [[4, 3, 0], [0, 0, 0], [0, 0, 3]]
    assert plan.hash == plan_local_dispatch([[7], [0], [3]], [0, 0, 0], ep=3, etp=1).hash


def test_odd_rows_that_are_nowhere_at_home_go_to_the_lower_slots():
    plan = plan_local_dispatch([[5], [0], [0]], [0, 0, 0], ep=3, etp=1)
    assert plan.rows_PG.tolist() == [[2, 2, 1], [0, 0, 0], [0, 0, 0]]


def test_an_odd_row_of_one_slot_is_no_wish_of_the_next_one_on_its_rank():
    """5 rows over 3 replicas, of which rank 0 has two and 3 rows of its own: it serves those, and rank 1 its 2."""
    plan = plan_local_dispatch([[3, 0], [2, 0]], [0, 0, 0, 1], ep=2, etp=1)
    assert plan.rows_PG.tolist() == [[2, 1, 0, 0], [0, 0, 2, 0]]


def test_host_before_the_rest():
    """Ranks 0 and 3 share a host, and 1 and 2: what rank 0 cannot serve goes to rank 3, though rank 1 has room and comes first."""
    counts = [[8], [0], [8], [0]]
    rows = plan_local_dispatch(counts, [0, 0, 0, 0], ep=4, etp=1, host_of_ep=[0, 1, 1, 0]).rows_PG
    assert rows.tolist() == [[4, 0, 0, 4], [0, 0, 0, 0], [0, 4, 4, 0], [0, 0, 0, 0]]


def test_replicas_level_a_skewed_load():
    """Zipf 1 over 16 experts on 8 ranks: far nearer to even than without replicas, and more stays at home than by the even rule."""
    loads = zipf_loads(1, 16, skew=1.0, seed=3)
    pool = equal_pool(8, 6)
    plan = plan_placement(replica_counts(loads, pool, floor=2), pool, loads)
    slots = plan.layer_placement(0).group_slots(0)
    counts = np.random.default_rng(0).multinomial(4096, loads[0] / loads[0].sum(), size=8)
    made = plan_local_dispatch(counts, slots, ep=8, etp=1)
    per_rank = made.rows_PG.sum(0).reshape(8, -1).sum(1)
    plain = counts.sum(0).reshape(8, -1).sum(1)
    assert plain.max() / plain.mean() - 1 > 4 * (per_rank.max() / per_rank.mean() - 1)
    assert kept_at_home(made) > kept_at_home(plan_dispatch(counts, slots, ep=8, etp=1))


def test_wrong_input_is_named_all_at_once():
    with pytest.raises(PlanError) as error:
        plan_local_dispatch([[1, -2], [3, 4]], [0, 0, 5], ep=2, etp=1, host_of_ep=[0])
    text = str(error.value)
    assert all(word in text for word in ("not negative", "each of the 2 ep ranks", "experts are 0 ... 1", "host_of_ep"))
    with pytest.raises(PlanError, match=r"slots = \[2\]: experts are 0 ... 1"):
        plan_local_dispatch([[1, 0], [1, 0]], [0, 2], ep=2, etp=1)
    with pytest.raises(PlanError, match="with rows needs a slot"):
        plan_local_dispatch([[1, 1]], [0, 0], ep=1, etp=1)
    with pytest.raises(PlanError, match="2 x 2 sources"):
        plan_local_dispatch([[1]], [0, 0], ep=2, etp=2)
    with pytest.raises(PlanError, match="slots = 0: the same number on each of the 1 ep ranks"):
        plan_local_dispatch(np.zeros((1, 0)), [], ep=1, etp=1)


@pytest.mark.parametrize("fault", ["round_down", "wrong_circle", "all_odd_to_the_first"])
def test_planted_faults_are_caught(monkeypatch, fault):
    rooms, corner = dispatch_local._rooms, dispatch_local._corner_fill
    if fault == "round_down":  # each rank rounds its real-valued share by itself
        monkeypatch.setattr(dispatch_local, "_rooms", lambda c, s, *a: c.sum(0)[s] // np.bincount(s)[s])
    elif fault == "wrong_circle":
        monkeypatch.setattr(dispatch_local, "_corner_fill", lambda l, r, s, a, b: corner(l, r, s, a[::-1], b))
    else:
        monkeypatch.setattr(dispatch_local, "_rooms", lambda c, s, a, b: rooms(c, s, a, b) + (np.arange(len(s)) == 0))
    counts = np.array([[7, 2], [1, 5], [3, 0]])
    slots = [0, 1, 0, 1, 0, 1]
    plan = plan_local_dispatch(counts, slots, ep=3, etp=1)
    try:
        plan.check(counts)
        assert kept_at_home(plan) == most_at_home(counts, plan) == 13
    except (PlanError, AssertionError):
        return
    pytest.fail(f"{fault} went unseen")
