"""Whether experts should lie elsewhere: skew that shifts moves them once, noise never, too few hosts always; no guarantee gets worse."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from phalanx.core.errors import PlanError
from phalanx.plan.mapping.placement import LayerPlacements
from phalanx.plan.placement.rebalancing import (
    LEAST_GAIN,
    Costs,
    StageNow,
    hosts_of_placement,
    placement_of_hosts,
    plan_replacement,
    smoothed_loads,
)
from phalanx.plan.placement.search.host_pool import equal_pool
from phalanx.plan.placement.search.hosts import HostPlacement
from phalanx.plan.placement.search.plan import Effort, plan_placement
from phalanx.plan.placement.search.replicas import replica_counts, zipf_loads

pytestmark = pytest.mark.unit
QUICK = Effort(swaps=60, balance_swaps=40)
CHEAP = Costs(row_s=1e-6, bytes_per_s=1e9, rebuild_s=0.1, expert_bytes=10**6)
LAYERS, EXPERTS, HOSTS, SLOTS = 2, 8, 4, 5
POOL = equal_pool(HOSTS, SLOTS)


def placed(loads, *, floor=2, pool=POOL):
    return plan_placement(replica_counts(loads, pool, floor=floor), pool, loads, effort=QUICK)


def now(placement, loads, slots=SLOTS):
    return StageNow(layers=tuple(range(len(loads))), placement=placement, loads=loads, slots_per_rank=slots)


def decide(placement, loads, *, costs=CHEAP, floor=2, interval=200):
    return plan_replacement([now(placement, loads)], costs, floor=floor, interval=interval, effort=QUICK)


def steps(rng, loads, num):
    """Counts of steps of 200,000 tokens, drawn."""
    shares = loads / loads.sum(1, keepdims=True)
    return [np.stack([rng.multinomial(200_000, p) for p in shares]) for _ in range(num)]


def history(before, counts, interval=200):
    for c in counts:
        before = smoothed_loads(before, c, interval=interval)
    return before


def test_skew_that_shifts_moves_experts_once_and_noise_never() -> None:
    rng, interval = np.random.default_rng(1), 200
    first, second = (zipf_loads(LAYERS, EXPERTS, skew=1.0, seed=s) for s in (1, 2))
    present, loads, actions, levels = placed(np.ones((LAYERS, EXPERTS))), None, [], []
    for skew in (first, first, first, second, second, second, second):
        loads = history(loads, steps(rng, skew, interval))
        found = decide(present, loads, interval=interval)
        actions.append(found.action)
        levels.append((found.before, found.after))
        if found.action != "keep":
            found.check()
            assert "busiest rank / mean" in found.explain() and found.num_copies > 0
            present = found.migrations[0].new
    assert actions == ["balance", "keep", "keep", "balance", "keep", "keep", "keep"]
    for at in (0, 3):
        before, after = levels[at]
        assert after - 1 < (before - 1) / 2


def test_decisions_are_pure_and_written_down() -> None:
    present, loads = placed(np.ones((LAYERS, EXPERTS))), zipf_loads(LAYERS, EXPERTS, skew=1.0, seed=3)
    assert decide(present, loads).hash == decide(present, loads.copy()).hash
    assert decide(present, loads).hash != decide(present, loads, interval=100).hash


def test_what_does_not_pay_stays() -> None:
    present, loads = placed(np.ones((LAYERS, EXPERTS))), zipf_loads(LAYERS, EXPERTS, skew=1.0, seed=4)
    cheap = decide(present, loads)
    assert cheap.action == "balance" and cheap.gain_s * cheap.interval >= 2 * cheap.cost_s
    for costs in (replace(CHEAP, bytes_per_s=1e4), replace(CHEAP, rebuild_s=100.0), replace(CHEAP, row_s=1e-12)):
        found = decide(present, loads, costs=costs)
        assert found.action == "keep" and found.migrations == () and found.after == found.before
        assert "the placement stays" in found.explain()
    assert decide(present, loads, costs=replace(CHEAP, rebuild_s=1.0), interval=1).action == "keep"


def test_little_gain_stays_even_where_moving_is_free() -> None:
    loads = zipf_loads(LAYERS, EXPERTS, skew=1.0, seed=5)
    free = replace(CHEAP, rebuild_s=0.0, bytes_per_s=1e18)
    present = decide(placed(np.ones((LAYERS, EXPERTS))), loads, costs=free).migrations[0].new
    rng = np.random.default_rng(0)
    for _ in range(10):
        assert decide(present, loads * rng.uniform(0.98, 1.02, loads.shape), costs=free).action == "keep"
    assert LEAST_GAIN == 0.05


LONELY = ((0, 0, 1, 2, 7), (1, 3, 4, 5, 7), (2, 3, 6, 7, 1), (4, 5, 6, 7, 2))
"""Expert 0 is on the first host alone, all others on two at least."""


def test_too_few_hosts_are_mended_always_and_first() -> None:
    """With the fewest copies; even loads, where they pay, are for the decision after."""
    present = HostPlacement(num_experts=EXPERTS, pool=equal_pool(HOSTS, 5), slots=(LONELY,))
    dear = replace(CHEAP, bytes_per_s=1.0)
    level = np.array([[2.0, 3, 3, 2, 2, 2, 2, 4]])
    stage = now(present, level, slots=5)
    found = plan_replacement([stage], dear, floor=2, interval=200, effort=QUICK)
    assert found.action == "mend" and found.num_copies == 1
    assert (found.migrations[0].new.copies > 0).sum(2).min() == 2
    assert found.migrations[0].urgent == 1
    loads = zipf_loads(1, EXPERTS, skew=1.2, seed=6)
    first = plan_replacement([now(present, loads, slots=5)], CHEAP, floor=2, interval=200, effort=QUICK)
    assert first.action == "mend" and first.num_copies == 1
    mended = now(first.migrations[0].new, loads, slots=5)
    then = plan_replacement([mended], CHEAP, floor=2, interval=200, effort=QUICK)
    assert then.action == "balance" and then.after < then.before and then.num_copies > 1


def test_a_floor_that_slots_cannot_hold_is_no_reason_to_move() -> None:
    pool = equal_pool(4, 2)
    plain = placed(np.ones((1, 8)), floor=1, pool=pool)
    stage = now(plain, np.ones((1, 8)), slots=2)
    assert plan_replacement([stage], CHEAP, floor=2, interval=200, effort=QUICK).action == "keep"


@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 6), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_no_expert_gets_on_fewer_hosts_than_the_floor(seed, hosts, slots, floor) -> None:
    rng = np.random.default_rng(seed)
    experts = int(rng.integers(2, hosts * slots + 1))
    pool = equal_pool(hosts, slots)
    drawn = [*range(experts), *rng.integers(0, experts, hosts * slots - experts)]
    rng.shuffle(drawn)
    table = tuple(tuple(int(e) for e in drawn[h * slots : (h + 1) * slots]) for h in range(hosts))
    present = HostPlacement(num_experts=experts, pool=pool, slots=(table,))
    loads = rng.random((1, experts)) ** 4
    found = plan_replacement([now(present, loads, slots)], CHEAP, floor=floor, interval=200, effort=QUICK)
    found.check()
    wanted, held = min(floor, pool.max_floor(experts)), (present.copies > 0).sum(2)
    if (held < wanted).any():
        assert found.action == "mend"
    if found.action != "keep":
        assert ((found.migrations[0].new.copies > 0).sum(2) >= wanted).all()
    if found.action == "balance":
        assert found.after < found.before


def test_of_several_stages_the_slowest_counts() -> None:
    level, skewed = np.ones((1, EXPERTS)) * 1e6, zipf_loads(1, EXPERTS, skew=1.0, seed=7)
    present = placed(np.ones((1, EXPERTS)))
    even = placed(level, pool=equal_pool(HOSTS, 4))
    both = [now(present, skewed), now(even, level * 100, slots=4)]
    assert plan_replacement(both, CHEAP, floor=2, interval=200, effort=QUICK).action == "keep"  # it waits for the other
    assert plan_replacement(both[:1], CHEAP, floor=2, interval=200, effort=QUICK).action == "balance"
    assert plan_replacement([], CHEAP, floor=2, interval=200).action == "keep"


def test_placements_of_ranks_and_of_hosts_are_one() -> None:
    hosts = placed(zipf_loads(LAYERS, EXPERTS, skew=1.0, seed=8), pool=equal_pool(2, 8))
    host_of_ep = [0, 0, 1, 1]
    ranks = LayerPlacements(layers={3 + i: hosts.layer_placement(i, host_of_ep=host_of_ep) for i in range(LAYERS)})
    layers, found = hosts_of_placement(ranks)
    assert layers == (3, 4) and (found.copies == hosts.copies).all()
    again = placement_of_hosts(layers, found, ranks)
    assert hosts_of_placement(again)[1].hash == found.hash


def test_bad_numbers_are_all_named() -> None:
    stage = now(placed(np.ones((LAYERS, EXPERTS))), np.ones((1, EXPERTS)))
    with pytest.raises(PlanError) as err:
        plan_replacement([stage], replace(CHEAP, row_s=0.0), floor=0, interval=0)
    for words in ("stages[0].loads", "costs.row_s", "floor = 0", "interval = 0"):
        assert words in str(err.value)
