"""One copy of a token for each host: plans with gateways are safe, complete, and their bytes are those of the messages."""

import dataclasses

import numpy as np
import pytest
from overlap_bytes_by_hand import count_host_copies
from overlap_check import check, from_json, plan_problems
from overlap_clock import predict
from overlap_events import simulate
from overlap_plan_help import plans_of_group, random_dispatch, random_schedule, routed, traffic_by_routing
from tiers import times

from phalanx.core.errors import PlanError
from phalanx.plan.moe.dispatch import plan_dispatch
from phalanx.plan.moe.overlap.prediction.bytes import traffic_of, wire_bytes
from phalanx.plan.moe.overlap.prediction.choose import compare_schedules
from phalanx.plan.moe.overlap.prediction.cost import LayerShape, OverlapCost
from phalanx.plan.moe.overlap.tiles.hosts import can_forward, gateway, gateways, message_parts
from phalanx.plan.moe.overlap.tiles.plan import plan_overlap
from phalanx.plan.moe.overlap.tiles.types import TileOp, TileSchedule

pytestmark = pytest.mark.unit
HOSTS = {2: ((0, 1), (0, 0)), 3: ((0, 0, 1), (0, 1, 0)), 4: ((0, 0, 1, 1), (0, 1, 0, 1), (1, 0, 0, 0), (0, 0, 1, 2))}


def test_gateways_by_hand():
    hosts = (0, 0, 0, 1, 1, 2)
    assert [gateway(hosts, source, 1) for source in range(3)] == [3, 4, 3]
    assert gateways(hosts, 1) == [4, 5] and gateways(hosts, 5) == [0, 3]
    assert message_parts(hosts, 0, (3, 1, 2, 1, 4, 2)) == (3, 1, 2, 4, 0, 2)
    assert can_forward(hosts) and not can_forward((0, 1, 2)) and not can_forward((4, 4))


def hosts_of(rng, size):
    return HOSTS[size][int(rng.integers(len(HOSTS[size])))]


def draw(rng):
    """A group of several ranks with hosts, in any schedule."""
    while True:
        dispatch = random_dispatch(rng)
        size = dispatch.ep * dispatch.etp
        if size > 1:
            schedule = dataclasses.replace(random_schedule(rng), hot_first=bool(rng.integers(2)))
            return dispatch, schedule, hosts_of(rng, size)


def test_batches_under_adversarial_arrivals():
    rng = np.random.default_rng(0)
    relayed = merged = 0
    count = times(2000, 250)
    for number in range(count):
        dispatch, schedule, hosts = draw(rng)
        plans = plans_of_group(
            dispatch, schedule, tile_rows=16, host_of_rank=hosts, through_hosts=True, has_shared=number % 3 == 0,
            direction=("forward", "backward")[number % 2],
        )  # fmt: skip
        if number % 10 == 0:
            check(plans[number % len(plans)])
            assert from_json(plans[0].to_json()) == plans[0]
        trace = simulate(plans, rng)
        kinds = [event.op.kind for event in trace.events]
        relayed, merged = relayed + kinds.count("relay"), merged + kinds.count("merge")
    assert relayed > count and merged > count


def group(**rest):
    dispatch, _ = routed(np.random.default_rng(2), ep=4, per_rank=2, top_k=3, tokens=60)
    schedule = TileSchedule(**{"parts": 2, "blocks": 2, "order": "arrival", **rest})
    return plans_of_group(
        dispatch, schedule, tile_rows=16, host_of_rank=(0, 0, 1, 1), through_hosts=True, direction="backward"
    )


def moved(plan, a, b):
    ops = list(plan.ops)
    ops.insert(b, ops.pop(a))
    return dataclasses.replace(plan, ops=tuple(ops))


def finds(plans):
    """(check of the first, simulation of all)."""
    found = bool(plan_problems(plans[0]))
    try:
        simulate(plans, np.random.default_rng(3))
    except PlanError:
        return found, True
    return found, False


def test_operations_missing_or_misdirected_are_found():
    plans = group()
    for at, op in enumerate(plans[0].ops):
        if op.kind not in ("relay", "merge", "send", "return", "wait_return"):
            continue
        rest = (*plans[0].ops[:at], *plans[0].ops[at + 1 :])
        missing = [dataclasses.replace(plans[0], ops=rest), *plans[1:]]
        assert finds(missing) == (True, True), str(op)
        wrong = [dataclasses.replace(plans[0], ops=(*rest[:at], dataclasses.replace(op, part=7), *rest[at:]))]
        assert finds([*wrong, *plans[1:]])[0], str(op)


def test_what_check_accepts_runs_and_what_can_close_a_circle_is_refused():
    """Random moves of one operation on one rank; the rules of order once more, by hand, decide what is legal."""
    rng, verdicts = np.random.default_rng(4), []
    for number in range(200):
        plans = group(order=("serial", "own_first", "arrival")[number % 3])
        kinds = ("relay", "merge", "wait", "return")
        a = int(rng.choice([i for i, op in enumerate(plans[0].ops) if op.kind in kinds]))
        changed = moved(plans[0], a, int(rng.integers(len(plans[0].ops))))
        alone, together = finds([changed, *plans[1:]])
        assert alone == (not legal(changed.ops)), str(plans[0].ops[a])
        assert alone or not together
        verdicts.append((alone, together))
    assert {(False, False), (True, True), (True, False)} == set(verdicts)


def legal(ops):
    far = {2, 3}
    before = {
        "relay": lambda op, other: other.kind == "send",
        "wait": lambda op, other: (
            other.kind == "send" or (other.kind == "relay" and op.peer in far and other.part <= op.part)
        ),
        "first": lambda op, other: other.kind == "wait" and other.peer == op.peer and other.part <= op.part,
        "second": lambda op, other: other.kind == "first" and (other.peer, other.part) == (op.peer, op.part),
        "return": lambda op, other: (
            other.kind == "second" and (other.peer, other.block) == (op.peer, op.block) and other.part <= op.part
        ),
        "merge": lambda op, other: (
            other.kind == "relay" or (other.kind == "return" and other.peer in far and other.part <= op.part)
        ),
        "wait_return": lambda op, other: other.kind in ("return", "merge"),
        "weights": lambda op, other: other.kind == "first",
    }
    late = any(before[op.kind](op, other) for at, op in enumerate(ops) if op.kind in before for other in ops[at + 1 :])
    return not late and ops[-1].kind == "sum"


def test_two_gateways_that_wait_for_each_other_are_found():
    """Each takes a part of the other host before it passes on the same part of its own: neither ever does."""
    plans = group(parts=1, blocks=1, order="own_first")
    late = []
    for plan in plans:
        relays = [op for op in plan.ops if op.kind == "relay"]
        rest = [op for op in plan.ops if op.kind != "relay"]
        last = max(i for i, op in enumerate(rest) if op.kind == "first")
        late.append(dataclasses.replace(plan, ops=(*rest[: last + 1], *relays, *rest[last + 1 :])))
    with pytest.raises(PlanError, match="comes after every relay of parts up to its own"):
        check(late[0])
    with pytest.raises(PlanError, match="wait for ever"):
        simulate(late, np.random.default_rng(0))


def test_hosts_that_do_not_fit_are_found():
    plans = group()
    with pytest.raises(PlanError, match="those of rank 0"):
        simulate([*plans[:3], dataclasses.replace(plans[3], hosts=(0, 1, 0, 1))], np.random.default_rng(0))
    with pytest.raises(PlanError, match="one entry for each of the 4 ranks, or none"):
        check(dataclasses.replace(plans[0], hosts=(0, 1)))
    with pytest.raises(PlanError, match="it is not the gateway of this source"):
        check(dataclasses.replace(plans[0], relay_parts=(0, 0, 2, 2)))
    with pytest.raises(PlanError, match="at least the 2 parts for itself"):
        check(dataclasses.replace(plans[0], relay_parts=(0, 0, 1, 0)))
    dispatch = plan_dispatch([[3, 4], [1, 2]], range(2), ep=2, etp=1)
    with pytest.raises(PlanError, match="needs to know which ranks share one"):
        plan_overlap(dispatch, TileSchedule(), rank=0, tile_rows=16, through_hosts=True)


# ---- seconds ---------------------------------------------------------------------------------------------------------------

SHAPE = LayerShape(tokens=256, hidden=512, ffn=512, element_bytes=4, slots=8)
COST = OverlapCost(latency_s=1e-4, bytes_per_s=2e7, flops_by_rows=((1, 2e10),), near_bytes_per_s=2e9)


def priced(rng, hosts=(0, 0, 1, 1)):
    dispatch, experts = routed(rng, ep=4, per_rank=8, top_k=6, tokens=256)
    of_hosts = [count_host_copies(e, etp=1, slots_per_rank=8, host_of_rank=hosts) for e in experts]
    return dispatch, traffic_by_routing(dispatch, experts, host_of_rank=hosts, copies_PH=np.stack(of_hosts))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_clock_charges_each_leg(direction):
    """On a slow link between hosts fewer bytes are less time; one rank alone is predicted about like all of them; no clock beats the link."""
    dispatch, traffic = priced(np.random.default_rng(5))
    wire = wire_bytes(traffic, "dedup_host", row_bytes=SHAPE.row_bytes, direction=direction)
    straight = wire_bytes(traffic, "dedup", row_bytes=SHAPE.row_bytes, direction=direction)
    slow = dataclasses.replace(COST, bytes_per_s=4e6)
    for order in ("serial", "own_first", "arrival"):
        schedule = TileSchedule(parts=3, blocks=2, order=order)
        common = {"tile_rows": 64, "direction": direction, "host_of_rank": (0, 0, 1, 1)}
        through = plans_of_group(dispatch, schedule, through_hosts=True, **common)
        found = predict(through, SHAPE, slow, wire)
        assert found.seconds < predict(plans_of_group(dispatch, schedule, **common), SHAPE, slow, straight).seconds
        assert predict(through[found.slowest], SHAPE, slow, wire).seconds == pytest.approx(found.seconds, rel=0.25)
        legs = wire.legs
        assert found.seconds > (legs.first_outbound_PP.sum(1) + legs.first_inbound_PP.sum(1)).max() / slow.bytes_per_s


def test_a_choice_with_gateways_is_made_by_their_clock():
    dispatch, traffic = priced(np.random.default_rng(6))
    wire = wire_bytes(traffic, "dedup_host", row_bytes=SHAPE.row_bytes)
    candidates = [TileSchedule(parts=p, order="arrival", own_before=0.5) for p in (1, 2, 4)]
    choice = compare_schedules(dispatch, SHAPE, COST, candidates, wire=wire, tile_rows=64)
    assert (
        choice.schedule != TileSchedule()
        and dict(choice.seconds)[choice.schedule] < dict(choice.seconds)[TileSchedule()]
    )


# ---- the most loaded slots first ---------------------------------------------------------------------------------------------


def test_a_skewed_batch_is_faster_with_its_hot_slots_first():
    """Many small tiles of rare experts, which compute slowly, and one that fills tiles: its results leave while the rest is computed."""
    helped = 0
    for seed in range(40):
        dispatch, cost = skewed(np.random.default_rng(seed))
        wire = wire_bytes(traffic_of(dispatch), "all_to_all", row_bytes=SHAPE.row_bytes)
        schedule = TileSchedule(parts=4, order="own_first")
        seconds = [
            predict(
                plans_of_group(dispatch, dataclasses.replace(schedule, hot_first=hot), tile_rows=128), SHAPE, cost, wire
            ).seconds
            for hot in (False, True)
        ]
        choice = compare_schedules(dispatch, SHAPE, cost, [schedule], wire=wire, tile_rows=128)
        predicted = dict(choice.seconds)
        assert predicted[choice.schedule] == min(predicted.values()) or predicted[choice.schedule] <= 1.005 * min(
            predicted.values()
        )
        if choice.schedule.hot_first:
            assert predicted[choice.schedule] < predicted[dataclasses.replace(choice.schedule, hot_first=False)]
            helped += seconds[1] < seconds[0]
    assert helped >= 10


def skewed(rng):
    """Two ranks; on each, the last slot is hot, and the others are thin."""
    counts = rng.integers(4, 24, (2, 16))
    counts[:, [7, 15]] = rng.integers(300, 700, (2, 2))
    rows = ((1, 2e9), (16, 8e9), (64, 2e10), (128, 3e10))
    cost = OverlapCost(latency_s=1e-4, bytes_per_s=float(rng.choice([3e7, 1e8])), flops_by_rows=rows)
    return plan_dispatch(counts, range(16), ep=2, etp=1), cost


def test_with_even_loads_or_one_part_hot_first_is_never_chosen():
    rng = np.random.default_rng(8)
    for _ in range(20):
        counts = np.full((2, 16), int(rng.integers(1, 90)))
        dispatch, (_, cost) = plan_dispatch(counts, range(16), ep=2, etp=1), skewed(rng)
        wire = wire_bytes(traffic_of(dispatch), "all_to_all", row_bytes=SHAPE.row_bytes)
        choice = compare_schedules(
            dispatch, SHAPE, cost, [TileSchedule(parts=4, order="own_first")], wire=wire, tile_rows=128
        )
        assert not choice.schedule.hot_first
        one = compare_schedules(
            skewed(rng)[0], SHAPE, cost, [TileSchedule(order="own_first")], wire=wire, tile_rows=128
        )
        assert all(not schedule.hot_first for schedule, _ in one.seconds)


def test_the_tiles_are_the_same_whatever_their_order():
    dispatch, _ = skewed(np.random.default_rng(9))
    plain, hot = (
        plan_overlap(dispatch, TileSchedule(parts=3, hot_first=h), rank=1, tile_rows=64) for h in (False, True)
    )
    assert [set(tiles) for tiles in plain.tiles] == [set(tiles) for tiles in hot.tiles]
    assert next(t.slot for t in hot.tiles[0]) == 7 and plain.tiles[0][0].slot == 0
    check(hot)
    with pytest.raises(PlanError, match="slots ascending"):
        check(dataclasses.replace(hot, schedule=TileSchedule(parts=3)))
    assert TileOp("sum") == hot.ops[-1]
