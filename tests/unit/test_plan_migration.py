"""Migration: the assignment is the best there is, sources live, boxes add up; and the front between recovery, load and copies."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import phalanx.plan.placement.search.migration as migration
from phalanx.core.errors import PlanError
from phalanx.plan.placement.search.front import CostWeights, choose, patched_placement, placement_front, risk_of
from phalanx.plan.placement.search.host_pool import equal_pool
from phalanx.plan.placement.search.migration import plan_migration
from phalanx.plan.placement.search.plan import Effort, plan_placement
from phalanx.plan.placement.search.replicas import replica_counts, zipf_loads

pytestmark = pytest.mark.unit
QUICK = Effort(swaps=60, balance_swaps=40)


def planned(loads, pool, floor=2):
    return plan_placement(replica_counts(loads, pool, floor=floor), pool, loads, effort=QUICK)


def copies_needed(old, new, order):
    """States that travel if host i of `new.pool` takes place order[i], host by host."""
    total = 0
    for name, place in zip(new.pool.host_names, order, strict=True):
        held = [
            set(row[old.pool.host_names.index(name)]) if name in old.pool.host_names else set() for row in old.slots
        ]
        total += sum(len(set(row[place]) - have) for row, have in zip(new.slots, held, strict=True))
    return total


def paper_greedy(old, new):
    """Each host in turn takes the free place for which it must fetch least (arXiv 2407.04656, section 4.4)."""
    free, total = list(range(new.pool.num_hosts)), 0
    for name in new.pool.host_names:
        held = [set(row[old.pool.host_names.index(name)]) for row in old.slots]
        costs = {p: sum(len(set(row[p]) - have) for row, have in zip(new.slots, held, strict=True)) for p in free}
        best = min(free, key=lambda p: (costs[p], p))
        total += costs[best]
        free.remove(best)
    return total


@given(st.integers(0, 10**6), st.integers(3, 6), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_no_other_assignment_moves_less(seed, hosts, layers):
    rng = np.random.default_rng(seed)
    pool = equal_pool(hosts, 3)
    old, new = (planned(rng.random((layers, 5)), pool, floor=1) for _ in range(2))
    made = plan_migration(old, new)
    least = min(copies_needed(old, new, order) for order in itertools.permutations(range(hosts)))
    assert made.num_copies == len(made.fetches) == least
    renamed = plan_migration(old, new, rename=True)
    assert renamed.num_copies <= least
    assert renamed.new.certificate == made.new.certificate == new.certificate
    counts = [sorted(layer) for layer in renamed.new.copies.sum(2).tolist()]
    assert counts == [sorted(layer) for layer in new.copies.sum(2).tolist()]


def test_far_less_travels_than_by_the_papers_greedy():
    """24 layers, 10 hosts, random losses of 1 to 3: never more, and at most 80 % on average when experts may trade rows."""
    rng = np.random.default_rng(4)
    loads = rng.gamma(1.0, 1.0, (24, 16))
    pool = equal_pool(10, 6)
    old = planned(loads, pool)
    ratios, plain = [], []
    for lost in ((9,), (0,), (0, 4), (1, 5, 7), (2, 3)):
        new = planned(loads, pool.without(lost))
        greedy = paper_greedy(old, new)
        plain.append(plan_migration(old, new).num_copies / greedy)
        ratios.append(plan_migration(old, new, rename=True).num_copies / greedy)
    assert max(plain) <= 1 and np.mean(ratios) <= 0.8


def test_nothing_travels_to_where_it_is():
    plan = planned(zipf_loads(3, 8, skew=1.0), equal_pool(5, 4))
    made = plan_migration(plan, plan)
    assert made.fetches == () and made.new.slots == plan.slots
    assert "0 of" in made.explain()


def test_slots_stay_sources_are_many_and_the_rarest_come_first():
    loads = zipf_loads(6, 16, skew=1.0)
    old = planned(loads, equal_pool(10, 6))
    new = planned(loads, equal_pool(10, 6).without((3,)))
    made = plan_migration(old, new)
    assert made.lost == () and 3 not in made.senders
    kept = [
        (a == b)
        for row_old, row_new in zip(old.slots, made.new.slots, strict=True)
        for name, held in zip(made.new.pool.host_names, row_new, strict=True)
        for a, b in zip(row_old[name], held, strict=True)
    ]
    stays = sum(
        len(set(r[n]) & set(row[i]))
        for r, row in zip(old.slots, made.new.slots, strict=True)
        for i, n in enumerate(made.new.pool.host_names)
    )
    assert sum(kept) >= stays
    sends = made.sends()
    assert max(sends.values()) <= 3 * np.mean(list(sends.values()))
    below = {(l, e) for l in range(6) for e in range(16) if len(set(old.holders(l, e)) - {3}) < 2}
    assert below and {(f.layer, f.expert) for f in made.fetches[: made.urgent]} == below
    assert plan_migration(old, new).hash == made.hash and "first, to be on 2 hosts again" in made.explain()


def test_what_nobody_holds_is_named():
    old = planned([[5.0, 1.0, 1.0]], equal_pool(3, 2))
    holders = old.holders(0, 1)
    lost = tuple(holders)
    new = planned(
        [[5.0, 1.0, 1.0]],
        replace(equal_pool(3, 2), names=(*(n for n in range(3) if n not in lost), *range(10, 10 + len(lost)))),
    )
    made = plan_migration(old, new)
    assert (0, 1) in made.lost and "go back to the checkpoint" in made.explain()


def test_other_models_are_refused():
    old = planned(zipf_loads(2, 6, skew=1.0), equal_pool(4, 3))
    with pytest.raises(PlanError) as error:
        plan_migration(old, planned(zipf_loads(1, 5, skew=1.0), equal_pool(4, 3)))
    assert "num_layers" in str(error.value) and "num_experts" in str(error.value)


@pytest.mark.parametrize("fault", ["dead_source", "forgets_one", "fetches_twice", "hosts_in_plan_order"])
def test_planted_faults_are_caught(monkeypatch, fault):
    loads = zipf_loads(4, 12, skew=1.0)
    old = planned(loads, equal_pool(8, 4))
    new = planned(loads, equal_pool(8, 4).without((0, 5)))
    good = plan_migration(old, new)
    fetch = good.fetches[0]
    if fault == "dead_source":
        bad = replace(good, fetches=(fetch._replace(src=5), *good.fetches[1:]))
    elif fault == "forgets_one":
        bad = replace(good, fetches=good.fetches[1:])
    elif fault == "fetches_twice":
        bad = replace(good, fetches=(fetch, *good.fetches))
    else:
        monkeypatch.setattr(migration, "ordered_hosts", lambda sets, pool, costs: list(range(pool.num_hosts)))
        assert plan_migration(old, new).num_copies > good.num_copies
        return
    with pytest.raises(PlanError):
        bad.check()


# ---- the front --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def front():
    loads = zipf_loads(1, 16, skew=1.5)
    pool = equal_pool(10, 6)
    old = planned(zipf_loads(1, 16, skew=1.0), pool, floor=3)
    return placement_front(loads, pool, floor=3, current=old, effort=QUICK), loads


def test_the_front_holds_the_floor_and_is_a_front(front):
    points, loads = front
    ours = points[0]
    assert ours.name == "ours"
    for point in points:
        if sorted(point.plan.copies[0].sum(1)) == sorted(ours.plan.copies[0].sum(1)):  # the same replicas, elsewhere
            assert ours.losses <= point.losses
    for point in points:
        point.plan.check()
        assert point.plan.certificate.guaranteed >= 3
        assert point.max_over_mean == pytest.approx(point.plan.max_over_mean(loads))
        beaten = [q for q in points if point.is_beaten_by(q)]
        assert point.on_front == (not beaten)
    shown = [p for p in points if p.on_front]
    assert len({p.name for p in shown}) >= 4  # there is something to choose
    for a, b in itertools.permutations(shown, 2):
        assert not a.is_beaten_by(b)


def test_choices(front):
    points, _ = front
    best = choose(points)
    assert best.losses == min(p.losses for p in points)
    assert best.max_over_mean == min(p.max_over_mean for p in points if p.losses == best.losses)
    bound = best.max_over_mean - 0.001
    level = choose(points, max_over_mean=bound)
    assert level.max_over_mean <= bound and level.losses > best.losses
    few = choose(points, max_copies=3 * min(p.num_copies for p in points))
    assert few.num_copies < points[0].num_copies
    by_cost = choose(points, by=CostWeights().cost)
    assert CostWeights().cost(by_cost) == min(CostWeights().cost(p) for p in points)
    careful = choose(points, by=CostWeights(rollback_s=1e9).cost)
    assert careful.risk == min(p.risk for p in points)
    with pytest.raises(PlanError, match="the lowest found is"):
        choose(points, max_over_mean=0.5, max_copies=-1)


def test_mending_the_floor_moves_only_what_it_must():
    loads = zipf_loads(3, 12, skew=1.0)
    old = planned(loads, equal_pool(8, 4))
    pool = equal_pool(8, 4).without((1,))
    mended = patched_placement(old, pool, floor=2)
    assert mended is not None
    mended.check()
    below = sum(len(set(old.holders(l, e)) - {1}) < 2 for l in range(3) for e in range(12))
    assert plan_migration(old, mended).num_copies == below > 0
    assert patched_placement(old, equal_pool(9, 4), floor=2) is None  # host 8 is new: it must get something
    assert patched_placement(old, equal_pool(2, 4), floor=2) is None  # no room


def test_risk_is_the_sum_over_all_losses():
    plan = planned(zipf_loads(1, 6, skew=1.0), equal_pool(5, 3))
    p, total = 0.1, 0.0
    for lost in itertools.chain.from_iterable(itertools.combinations(range(5), k) for k in range(6)):
        alive = {e for n, held in enumerate(plan.slots[0]) if n not in lost for e in held}
        total += (len(alive) < 6) * p ** len(lost) * (1 - p) ** (5 - len(lost))
    assert risk_of(plan.certificate, p) == pytest.approx(total)
