"""Placements: the floor always holds, never worse than the printed rule or spread, optimal where all placements can be tried."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from placement_help import Tally, compare, cut_short, fatal_by_hand, fatal_of, optimal, random_case, survives
from speed_help import full_speed_s
from tiers import times

import phalanx.plan.placement.search.local_search as local_search
import phalanx.plan.placement.search.plan as placement_search
import phalanx.plan.placement.search.rules as placement_rules
from phalanx.core.errors import PlanError
from phalanx.plan.placement.search.balance import levelled, name_rows
from phalanx.plan.placement.search.host_pool import HostPool, equal_pool
from phalanx.plan.placement.search.hosts import HostPlacement, read_host_placement
from phalanx.plan.placement.search.local_search import busiest, holder_sets
from phalanx.plan.placement.search.plan import RULES, Effort, plan_placement, rule_placement
from phalanx.plan.placement.search.probability import fatal_counts
from phalanx.plan.placement.search.replicas import ReplicaCounts, replica_counts, zipf_loads
from phalanx.plan.placement.search.rules import (
    compact,
    complement_overlap,
    keep_apart,
    least_loaded,
    max_overlap,
    safe_spread,
    segments_fit,
    spread,
)

pytestmark = pytest.mark.unit
TEN = (6,) * 10
BALANCED, SKEWED = (7,) * 4 + (8,) * 4, (2, 3, 3, 4, 5, 7, 12, 24)


def survival(copies, lost):
    """P(recover) for each number of lost hosts."""
    n = copies.shape[1]
    fatal = fatal_counts(holder_sets(copies), n)
    return [round(1 - fatal[k] / int(np.prod([(n - i) / (i + 1) for i in range(k)]) + 0.5), 3) for k in lost]


# ---- rules ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "counts", "wanted"),
    [
        (max_overlap, BALANCED, [0.992, 0.967, 0.917, 0.7]),
        (max_overlap, SKEWED, [0.933, 0.867, 0.778, 0.533]),
        (spread, SKEWED, [0.917, 0.8, 0.619, 0.15]),
        (complement_overlap, BALANCED, [1, 1, 1, 0.983]),
        (max_overlap, (2,) * 11 + (3, 4, 5, 8, 18), [0.867, 0.733, 0.556, 0.133]),
        (spread, (2,) * 11 + (3, 4, 5, 8, 18), [0.667, 0.381, 0.127, 0]),
    ],
)
def test_rules_survive_what_others_computed_for_them(rule, counts, wanted):
    """P for 3, 4, 5 and 7 of 10 hosts lost, 6 slots each."""
    assert survival(rule(counts, TEN), (3, 4, 5, 7)) == wanted


@pytest.mark.parametrize(
    ("hosts", "slots", "counts", "fatal"),
    [
        (3, 2, (2, 2, 2), {1: 1}),
        (6, 2, (4, 4, 4), {2: 1, 3: 4, 4: 7}),
        (4, 3, (3, 3, 3, 3), {1: 1, 2: 3}),
        (5, 4, (4,) * 5, {1: 1, 3: 6}),
    ],
)
def test_the_printed_rule_breaks_where_its_last_segment_is_cut(hosts, slots, counts, fatal):
    """Counter-examples to its theorem: 1 of 3, 1 of 15, 3 of 6 and 6 of 10 losses are fatal without need."""
    printed = fatal_counts(holder_sets(max_overlap(counts, (slots,) * hosts)), hosts)
    assert not segments_fit(counts, (slots,) * hosts)
    assert {k: printed[k] for k in fatal} == fatal
    given_counts = ReplicaCounts(counts=(counts,), floor=2, asked_floor=2)
    plan = plan_placement(given_counts, equal_pool(hosts, slots), [[1.0] * len(counts)])
    assert fatal_of(plan) < printed


@st.composite
def counts_and_slots(draw):
    n, c = draw(st.integers(1, 7)), draw(st.integers(1, 5))
    e = draw(st.integers(1, n * c))
    loads = draw(st.lists(st.floats(0, 100), min_size=e, max_size=e))
    equal = draw(st.booleans())
    slots = (c,) * n if equal else tuple(draw(st.lists(st.integers(1, 6), min_size=n, max_size=n)))
    return loads, HostPool(slots=slots), draw(st.integers(1, 3))


@given(counts_and_slots())
@settings(max_examples=times(200, 66), deadline=None)
def test_every_rule_fills_every_slot(case):
    loads, pool, floor = case
    if pool.num_slots < len(loads):
        return
    counts = replica_counts([loads], pool, floor=floor)
    row = counts.counts[0]
    tables = [compact(row, pool.slots), spread(row, pool.slots), max_overlap(row, pool.slots)]
    tables += [least_loaded(row, pool.slots, loads), safe_spread(row, pool.slots, floor=counts.floor)]
    complement = complement_overlap(row, pool.slots)
    tables += [keep_apart(t) for t in tables] + ([] if complement is None else [complement])
    for table in tables:
        assert table.min() >= 0 and table.sum(1).tolist() == list(row) and table.sum(0).tolist() == list(pool.slots)
    safe = safe_spread(row, pool.slots, floor=counts.floor)
    assert (safe > 0).sum(1).min() >= counts.floor
    if len(set(pool.slots)) == 1 and max(row) <= pool.num_hosts:
        assert all(keep_apart(table).max() == 1 for table in tables)


# ---- ours -----------------------------------------------------------------------------------------------------------------------


def test_random_cases_hold_the_floor_and_are_never_worse():
    """With c dividing the experts or not. The printed rule must break its promise in some: else the check could not fail."""
    tally, rng = Tally(), np.random.default_rng(11)
    wrong = [line for _ in range(80) for line in compare(rng, tally)]
    assert not wrong
    assert tally.broken_printed > 0 and tally.better > 30


def test_optimal_against_all_placements():
    """Every sixth (or twenty-fourth) allocation of up to 5 hosts. (All 1,067 of up to 6 take half a minute: tests/helpers/placement_help.py.)"""
    found = [optimal(*case) for i, case in enumerate(cut_short(5)) if i % times(6, 24) == 0]
    ours, printed = sum(o for o, _ in found), sum(p for _, p in found)
    assert len(found) > times(75, 18) and ours >= 0.995 * len(found) and printed < 0.95 * len(found)


@given(st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_the_certificate_is_what_trying_every_loss_finds(seed):
    rng = np.random.default_rng(seed)
    while True:
        hosts, slots, _, loads, floor = random_case(rng)
        if hosts <= 8:
            break
    table = np.stack([loads, rng.permutation(loads)])
    pool = equal_pool(hosts, slots)
    plan = plan_placement(
        replica_counts(table, pool, floor=floor), pool, table, effort=Effort(swaps=100, balance_swaps=50)
    )
    assert fatal_of(plan) == fatal_by_hand(plan)


@given(counts_and_slots())
@settings(max_examples=40, deadline=None)
def test_hosts_that_differ_in_slots_hold_the_floor_too(case):
    loads, pool, floor = case
    if pool.num_slots < len(loads):
        return
    counts = replica_counts([loads], pool, floor=floor)
    plan = plan_placement(counts, pool, [loads], effort=Effort(swaps=50, balance_swaps=50))
    plan.check()
    assert min(len(plan.holders(0, e)) for e in range(len(loads))) >= counts.floor


def test_aligned_layers_survive_together():
    """12 layers, 10 hosts, 6 slots, 16 experts, Zipf 1, f 2: two lost hosts are survived as often as by one layer alone."""
    pool, loads = equal_pool(10, 6), zipf_loads(12, 16, skew=1.0)
    counts = replica_counts(loads, pool, floor=2)
    plan = plan_placement(counts, pool, loads)
    assert plan.certificate.probabilities[2] >= 0.95
    rng = np.random.default_rng(0)
    shuffled = [[layer[i] for i in rng.permutation(10)] for layer in plan.slots]
    loose = HostPlacement(num_experts=16, pool=pool, slots=tuple(map(tuple, shuffled)), floor=2)
    assert loose.certificate.probabilities[2] < 0.75  # each layer as good as before, but not together


def test_layers_of_different_loads_are_no_worse_together_than_under_the_printed_rule():
    pool, rng = equal_pool(9, 5), np.random.default_rng(3)
    loads = rng.gamma(2.0, 1.0, (6, 12))
    counts = replica_counts(loads, pool, floor=2)
    ours = fatal_of(plan_placement(counts, pool, loads))
    for rule in ("printed", "spread"):
        assert ours <= fatal_of(rule_placement(rule, loads, counts, pool))


def test_racks():
    """4 racks of 3 hosts: every single rack may be lost, and no host loss is survived less often for it."""
    loads = zipf_loads(1, 16, skew=1.0)
    known, unknown = equal_pool(12, 6, num_racks=4), equal_pool(12, 6)
    counts = replica_counts(loads, known, floor=2)
    plan, blind = (plan_placement(counts, pool, loads) for pool in (known, unknown))
    assert plan.rack_certificate is not None and plan.rack_certificate.probabilities[1] == 1
    assert all(survives(plan.slots, 16, range(3 * r, 3 * r + 3)) for r in range(4))
    assert plan.rack_certificate.probabilities[2] >= 4 / 6
    assert fatal_of(plan) == fatal_of(blind)
    blind_racks = sum(survives(blind.slots, 16, range(3 * r, 3 * r + 3)) for r in range(4))
    assert blind_racks < 4 and "racks (4)" in plan.explain()


def test_risky_hosts_stand_apart():
    """3 of 9 hosts fail often: knowing it, the plan loses less."""
    loads = zipf_loads(1, 12, skew=1.0)
    failure = (0.3, 0.3, 0.3) + (0.01,) * 6
    told = HostPool(slots=(4,) * 9, failure=failure)
    counts = replica_counts(loads, told, floor=2)
    plan = plan_placement(counts, told, loads)
    blind = plan_placement(counts, equal_pool(9, 4), loads)
    as_blind = HostPlacement(num_experts=12, pool=told, slots=blind.slots, floor=2)
    assert plan.independent is not None and as_blind.independent is not None
    assert plan.independent[0] > as_blind.independent[0]
    assert fatal_of(plan) == fatal_of(blind)


def test_load_is_levelled_at_no_cost():
    """Which experts share hosts is free among those with equally many replicas; swaps that cost nothing do the rest."""
    pool, loads = equal_pool(12, 4), zipf_loads(2, 24, skew=1.0)
    counts = replica_counts(loads, pool, floor=2)
    plan = plan_placement(counts, pool, loads)
    plain = plan_placement(counts, pool, np.zeros_like(loads))  # no loads known: nothing to level by
    assert fatal_of(plan) == fatal_of(plain)
    assert plan.max_over_mean(loads) < plain.max_over_mean(loads)


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_naming_and_levelling_keep_the_losses(seed):
    rng = np.random.default_rng(seed)
    counts = replica_counts([rng.random(10)], equal_pool(6, 4), floor=2).counts[0]
    table, loads = spread(sorted(counts), (4,) * 6), np.sort(rng.random(10))
    named = name_rows(table, loads)
    assert sorted(holder_sets(named)) == sorted(holder_sets(table)) and (named.sum(1) == table.sum(1)).all()
    after = levelled(named[None], loads[None], swaps=60, seed=seed)[0]
    assert fatal_counts(holder_sets(after), 6) <= fatal_counts(holder_sets(named), 6)
    assert busiest(after, loads / after.sum(1)) <= busiest(named, loads / named.sum(1)) or fatal_counts(
        holder_sets(after), 6
    ) < fatal_counts(holder_sets(named), 6)


def test_a_large_model_is_planned_in_a_second():
    """61 layers x 256 experts x 64 hosts. 0.7 to 0.9 s where nothing else runs; three times the bar here, because others may share caches and memory."""
    rng = np.random.default_rng(0)
    pool, loads = equal_pool(64, 9), rng.gamma(0.7, 1.0, (61, 256))

    def planning():
        return plan_placement(replica_counts(loads, pool, floor=2), pool, loads)

    counts, plan = replica_counts(loads, pool, floor=2), planning()
    assert full_speed_s(planning, rounds=3) <= 3.0
    assert plan.certificate.guaranteed >= 2
    printed = rule_placement("printed", loads, counts, pool)
    assert plan.certificate.probabilities[2:4] >= printed.certificate.probabilities[2:4]


# ---- the plan -------------------------------------------------------------------------------------------------------------------


def small_plan():
    loads = zipf_loads(2, 6, skew=1.0)
    pool = equal_pool(4, 3, num_racks=2)
    return plan_placement(replica_counts(loads, pool, floor=2), pool, loads), loads


def test_same_input_same_bytes_and_back():
    plan, _ = small_plan()
    again, _ = small_plan()
    assert plan.to_json() == again.to_json() and plan.hash == again.hash
    back = read_host_placement(plan.to_dict())
    assert back.slots == plan.slots and back.floor == plan.floor and back.pool.slots == plan.pool.slots


def test_a_layer_becomes_a_placement_over_ranks():
    plan, _ = small_plan()
    one = plan.layer_placement(1)
    assert one.slots == (plan.slots[1],)
    names = plan.pool.host_names
    plan6 = plan_placement(replica_counts([[9, 1, 1]], equal_pool(2, 6), floor=2), equal_pool(2, 6), [[9, 1, 1]])
    two = plan6.layer_placement(0, host_of_ep=[0, 1, 1, 0])
    assert two.slots_per_rank == 3 and sorted(two.slots[0][0] + two.slots[0][3]) == sorted(plan6.slots[0][0])
    assert max(rank.count(0) for rank in two.slots[0]) < plan6.slots[0][0].count(0)  # copies part
    with pytest.raises(PlanError, match="each of which has one"):
        plan.layer_placement(0, host_of_ep=[*names[:-1], 99])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s[1:], "hosts have"),
        (lambda s: ((0, 0, 0), *s[1:]), "each of the experts 0 ... 5 needs a slot|is on at least 2 hosts"),
        (lambda s: ((0, 1, 77), *s[1:]), "experts are 0 ... 5"),
    ],
)
def test_damaged_plans_are_refused(change, words):
    plan, _ = small_plan()
    damaged = plan.to_dict() | {"slots": [change(tuple(plan.slots[0])), plan.slots[1]]}
    with pytest.raises(PlanError, match=words):
        read_host_placement(damaged)
    with pytest.raises(PlanError, match="is not a placement on hosts"):
        read_host_placement({"slots": 3})


def test_wrong_counts_are_named_all_at_once():
    counts = ReplicaCounts(counts=((1, 4), (3, 3)), floor=2, asked_floor=2)
    with pytest.raises(PlanError) as error:
        plan_placement(counts, equal_pool(3, 2), [[1.0, 1.0]])
    assert all(word in str(error.value) for word in ("loads.shape", "fill the 6 slots", "at least 2"))


def test_rules_are_shown_as_they_are():
    """Nothing is repaired for the comparison: the printed rule keeps its broken promise, and `check` says so."""
    pool = equal_pool(3, 2)
    counts = replica_counts([[1, 1, 1]], pool, floor=2)
    plans = {rule: rule_placement(rule, [[1, 1, 1]], counts, pool) for rule in RULES}
    with pytest.raises(PlanError, match="is on at least 2 hosts"):
        plans["printed"].check()
    plans["spread"].check()
    assert plans["compact"].certificate.guaranteed == 1
    assert plan_placement(counts, pool, [[1, 1, 1]]).certificate.guaranteed == 2


@pytest.mark.parametrize("fault", ["printed_as_ours", "no_repair", "swaps_never_undone", "no_alignment"])
def test_planted_faults_are_caught(monkeypatch, fault):
    """Each makes ours break the floor, lose to another rule, or fall out of line with its certificate, in some of 40 cases."""
    if fault == "printed_as_ours":
        monkeypatch.setattr(
            placement_search,
            "_candidates",
            lambda layers, i: {"overlap": max_overlap(layers.patterns[i], layers.pool.slots)},
        )
        monkeypatch.setattr(placement_search, "_improved", lambda layers, starts, effort: starts[0])
        monkeypatch.setattr(placement_search, "levelled", lambda copies, *a, **k: copies)
    elif fault == "no_repair":
        monkeypatch.setattr(placement_rules, "_apart_swap", lambda *a: None)
        monkeypatch.setattr(placement_search, "_improved", lambda layers, starts, effort: starts[-1])
    elif fault == "swaps_never_undone":

        def wander(copies, table, **options):
            copies, dice = copies.copy(), random.Random(0)
            for _ in range(30):
                swap = local_search._random_swap(copies, dice)
                if swap is not None:
                    local_search._apply(copies, swap)
            return copies

        monkeypatch.setattr(placement_search, "local_search", wander)
    else:
        pool, loads = equal_pool(10, 6), zipf_loads(12, 16, skew=1.0)
        rng = np.random.default_rng(0)
        named = placement_search._named
        monkeypatch.setattr(
            placement_search, "_named", lambda *a, **k: np.stack([c[:, rng.permutation(10)] for c in named(*a, **k)])
        )
        plan = plan_placement(replica_counts(loads, pool, floor=2), pool, loads)
        assert plan.certificate.probabilities[2] < 0.95
        return
    tally, rng, seen = Tally(), np.random.default_rng(5), 0
    for _ in range(40):
        try:
            seen += len(compare(rng, tally))
        except PlanError:
            seen += 1
    assert seen


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the names of kernels are those of x86-64")
def test_the_processor_has_no_part_in_a_plan() -> None:
    """Ties of loads were broken by the last bit of a product of matrices: hosts with other processors made other plans."""
    ask = (
        "import numpy as np; from phalanx.plan.placement.search import equal_pool, plan_placement, replica_counts\n"
        "for seed, N, E, s in ((1, 4, 32, 25), (7, 6, 32, 19), (31, 5, 64, 31), (73, 6, 32, 20)):\n"
        "    rng = np.random.default_rng(seed); rng.integers(3, 7); rng.choice([16, 32, 64]); rng.integers(0, 12)\n"
        "    loads, pool = rng.integers(1, 6, (1, E)).astype(float), equal_pool(N, s)\n"
        "    print(plan_placement(replica_counts(loads, pool, floor=2), pool, loads).hash)\n"
    )
    told = [
        subprocess.check_output([sys.executable, "-c", ask], text=True, env=os.environ | kernels)
        for kernels in ({}, {"OPENBLAS_CORETYPE": "Prescott"})  # which every processor has
    ]
    assert told[0] == told[1] and len(told[0].split()) == 4
