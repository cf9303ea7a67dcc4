"""Replica counts: the paper's walk where it is defined, and every case that it leaves open."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.core.errors import PlanError
from phalanx.plan.placement.search.host_pool import HostPool, equal_pool
from phalanx.plan.placement.search.replicas import capped, paper_counts, replica_counts, smoothed, zipf_loads

pytestmark = pytest.mark.unit

loads_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-6, 1e9), st.integers(0, 10**6).map(float)), min_size=1, max_size=24
)


@given(loads_lists, st.integers(0, 60), st.integers(1, 4))
@settings(max_examples=times(300, 100), deadline=None)
def test_the_papers_walk_fills_the_slots_and_holds_the_floor(loads, extra, floor):
    num_slots = len(loads) * floor + extra
    counts = paper_counts(loads, num_slots, floor=floor)
    assert counts.sum() == num_slots and counts.min() >= floor
    order = np.argsort(loads, kind="stable")
    assert (np.diff(counts[order]) >= 0).all()  # more load, no fewer replicas


def test_the_papers_walk_by_hand():
    """6 slots, loads 1 2 3: 1/6 of 6, then 2/5 of 5, then the rest."""
    assert paper_counts([3, 1, 2], 6, floor=1).tolist() == [3, 1, 2]
    assert paper_counts([3, 1, 2], 6, floor=2).tolist() == [2, 2, 2]
    assert paper_counts([100, 1, 1], 9, floor=2).tolist() == [5, 2, 2]


@given(loads_lists, st.integers(1, 12), st.integers(1, 8), st.integers(1, 5))
@settings(max_examples=times(300, 100), deadline=None)
def test_every_input_has_an_answer_that_holds_what_it_says(loads, hosts, slots, floor):
    pool = equal_pool(hosts, slots)
    if hosts * slots < len(loads):
        with pytest.raises(PlanError, match="need a slot each"):
            replica_counts([loads], pool, floor=floor)
        return
    made = replica_counts([loads], pool, floor=floor)
    (counts,) = made.counts
    assert sum(counts) == pool.num_slots and min(counts) >= made.floor >= 1
    assert made.floor == min(floor, hosts, hosts * min(slots, len(loads)) // len(loads))
    assert (made.floor < floor) == any("lowered" in note for note in made.notes)
    if len(loads) >= slots:
        assert max(counts) <= hosts
    paper = paper_counts(loads, pool.num_slots, floor=made.floor)
    assert all(c >= min(p, hosts) for c, p in zip(counts, paper, strict=True))


def test_surplus_goes_to_the_highest_load_per_replica():
    assert capped([9, 2, 1], [90, 8, 6], num_hosts=5).tolist() == [5, 4, 3]
    assert capped([10, 1, 1], [0, 0, 0], num_hosts=4).tolist() == [4, 4, 4]
    assert capped([8, 2], [80, 20], num_hosts=4).tolist() == [8, 2]


def test_cases_that_the_paper_leaves_open():
    idle = replica_counts([[0, 0, 0]], equal_pool(3, 2), floor=2)
    assert idle.counts == ((2, 2, 2),) and "without any load" in idle.notes[0]
    tight = replica_counts([[5, 1, 1, 1, 1]], equal_pool(3, 2), floor=2)
    assert tight.floor == 1 and tight.notes[0] == "f lowered from 2 to 1: 6 slots hold 5 experts 1 times"
    few = replica_counts([[1, 1]], equal_pool(2, 4), floor=3)
    assert few.floor == 2 and few.notes[0] == "f lowered from 3 to 2: there are 2 hosts"
    assert few.counts == ((4, 4),) and "share work, not risk" in few.notes[1]


def test_hosts_with_different_slots_hold_what_distinct_hosts_allow():
    """4 experts on hosts of 1, 1 and 6 slots: the large one counts for 4, so 6 places, one each for certain."""
    pool = HostPool(slots=(1, 1, 6))
    assert pool.max_floor(4) == 1 and pool.max_floor(2) == 2 and pool.max_floor(3) == 1
    assert replica_counts([[1, 1, 1, 1]], pool, floor=2).floor == 1


def test_smoothing():
    first = smoothed(None, [[4, 0]], weight=0.25)
    assert smoothed(first, [[0, 4]], weight=0.25).tolist() == [[3, 1]]
    with pytest.raises(PlanError, match="shape of the loads before"):
        smoothed(first, [[1, 2, 3]], weight=0.25)


def test_zipf_loads_are_the_same_everywhere_and_sum_alike():
    loads = zipf_loads(3, 8, skew=1.0, seed=5)
    assert (loads == zipf_loads(3, 8, skew=1.0, seed=5)).all() and np.allclose(loads.sum(1), 1e6)
    assert (np.sort(loads[0]) == np.sort(loads[1])).all() and (loads[0] != loads[1]).any()


@pytest.mark.parametrize(
    ("loads", "words"),
    [
        ([[1, -1]], ["loads[0, 1]", "not negative"]),
        ([[1, float("nan")]], ["finite"]),
        ([], ["layers x experts"]),
        ([[1], [1, 2]], ["table of numbers"]),
        ("many", ["table of numbers"]),
    ],
)
def test_wrong_loads_are_named(loads, words):
    with pytest.raises(PlanError) as error:
        replica_counts(loads, equal_pool(2, 2), floor=1)
    assert all(word in str(error.value) for word in words)


def test_wrong_hosts_are_named_all_at_once():
    with pytest.raises(PlanError) as error:
        replica_counts([[1, 1]], HostPool(slots=(2, 0), racks=(1,), failure=(0.1, 1.5), names=(3, 3)), floor=0)
    text = str(error.value)
    words = (
        "at least 1 on each host",
        "racks",
        "probability of failing",
        "different names",
        "every expert needs a replica",
    )
    assert all(word in text for word in words)
