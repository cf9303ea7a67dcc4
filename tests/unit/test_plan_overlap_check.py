"""Plans of overlap are safe: 10,000 random batches under adversarial arrivals, planted faults, plan files that are refused."""

import dataclasses
import json

import numpy as np
import pytest
from overlap_check import check, from_json, plan_problems
from overlap_events import Adversary, simulate
from overlap_plan_help import plans_of_group, random_dispatch, random_schedule, routed
from tiers import times

from phalanx.core.errors import PlanError
from phalanx.plan.moe.overlap.tiles.plan import plan_overlap
from phalanx.plan.moe.overlap.tiles.types import Tile, TileOp, TileSchedule

pytestmark = pytest.mark.unit


def test_batches_under_adversarial_arrivals():
    """10,000 with all tests. Each tile once, never before its inputs, no deadlock: whatever the routing, the schedule and the order of arrival."""
    rng = np.random.default_rng(0)
    kinds, overtaken, late, joint = set(), 0, 0, 0
    count = times(10_000, 1000)
    for number in range(count):
        dispatch, schedule = random_dispatch(rng), random_schedule(rng)
        direction = ("forward", "backward")[number % 2]
        plans = plans_of_group(dispatch, schedule, tile_rows=16, direction=direction, has_shared=number % 3 == 0)
        if number % 20 == 0:
            check(plans[-1])
        timing = Recorder(rng)
        trace = simulate(plans, timing)
        kinds.add((schedule.order, schedule.seed is not None, direction))
        joint += any(plan.joint for plan in plans)
        overtaken += timing.arrivals != sorted(timing.arrivals)
        late += trace.blocked_s(0) > 100
    assert len(kinds) == 12 and joint > count // 10
    assert overtaken > 0.4 * count and late > 0.1 * count, "the adversary does no harm"


class Recorder(Adversary):
    """Remembers arrivals in the order of their posting."""

    def __init__(self, rng):
        super().__init__(rng)
        self.arrivals = []

    def arrives(self, plan, op, at):
        self.arrivals.append(super().arrives(plan, op, at))
        return self.arrivals[-1]


def test_every_group_of_ranks_is_done_at_a_time_that_its_messages_allow():
    rng = np.random.default_rng(1)
    dispatch, _ = routed(rng, ep=3, per_rank=2, top_k=2, tokens=60)
    trace = simulate(plans_of_group(dispatch, TileSchedule(parts=2, order="arrival"), tile_rows=16), rng)
    ends = {}
    for event in trace.events:
        assert ends.get(event.rank, 0.0) == event.start_s <= event.end_s
        ends[event.rank] = event.end_s
    assert trace.seconds == max(ends.values()) and len(ends) == 3


# ---- planted faults --------------------------------------------------------------------------------------------------------


def group(rng=None, **rest):
    rng = rng or np.random.default_rng(2)
    dispatch, _ = routed(rng, ep=2, per_rank=2, top_k=2, tokens=80)
    schedule = TileSchedule(**{"parts": 2, "blocks": 2, "order": "own_first", **rest})
    return plans_of_group(dispatch, schedule, tile_rows=16, direction="backward", has_shared=True)


def with_ops(plan, ops):
    return dataclasses.replace(plan, ops=tuple(ops))


def rejected(plans, number=0):
    """Whether check and simulation find something: (by itself, together)."""
    found = bool(plan_problems(plans[number]))
    try:
        simulate(plans, np.random.default_rng(3))
    except PlanError:
        return found, True
    return found, False


def test_an_operation_that_is_missing_is_found():
    plans = group()
    for at, op in enumerate(plans[0].ops):
        broken = [with_ops(plans[0], [*plans[0].ops[:at], *plans[0].ops[at + 1 :]]), plans[1]]
        alone, together = rejected(broken)
        assert alone == (op.kind != "shared")
        assert together == (op.kind not in ("shared", "weights")), str(op)


def test_an_operation_that_stands_there_twice_is_found():
    plans = group()
    for at, op in enumerate(plans[0].ops):
        broken = [with_ops(plans[0], [*plans[0].ops[:at], op, *plans[0].ops[at:]]), plans[1]]
        assert rejected(broken)[0], str(op)


def test_an_operation_on_another_peer_part_or_block_is_found():
    plans = group()
    for at, op in enumerate(plans[0].ops):
        for wrong in (
            dataclasses.replace(op, peer=op.peer + 2),
            dataclasses.replace(op, part=op.part + 2),
            dataclasses.replace(op, block=op.block + 2),
        ):
            assert rejected([with_ops(plans[0], [*plans[0].ops[:at], wrong, *plans[0].ops[at + 1 :]]), plans[1]])[0]


def parts_with_rows(plan):
    """Slot -> (source, part) in which rows of it come, tile by tile."""
    found = {}
    for source, tiles in enumerate(plan.tiles):
        for number, tile in enumerate(tiles):
            part = sum(end <= number for end in plan.part_ends[source])
            found.setdefault(tile.slot, set()).add((source, part))
    return found


def legal(plan, ops):
    """The rules of order once more, by hand: for each pair of operations whether the first may stand behind the second."""
    place = {op: at for at, op in enumerate(ops)}
    come = parts_with_rows(plan)
    for op, at in place.items():
        for other, there in place.items():
            same, block = op.peer == other.peer and other.part <= op.part, op.block == other.block
            needs = (
                (op.kind == "sum" and other != op)
                or (op.kind == "first" and other.kind == "wait" and same)
                or (op.kind == "second" and other.kind == "first" and same and other.part == op.part)
                or (op.kind == "return" and other.kind == "second" and same and block)
                or (op.kind == "weights" and other.kind in ("first", "first_all"))
                or (
                    op.kind == "first_all"
                    and other.kind == "wait"
                    and any(p == other.peer and other.part <= k for p, k in come[op.part])
                )
                or (op.kind == "second_all" and other.kind == "first_all" and op.part == other.part)
                or (
                    op.kind == "return"
                    and other.kind == "second_all"
                    and block
                    and any(p == op.peer and k <= op.part for p, k in come[other.part])
                )
                or (op.kind == "wait" and other.kind == "send")
                or (op.kind == "wait_return" and other.kind == "return")
            )
            if needs and there > at:
                return False
    return True


def test_check_accepts_exactly_the_legal_orders_and_what_it_accepts_runs():
    rng = np.random.default_rng(4)
    verdicts = []
    for number in range(200):
        plans = group(rng, order=("serial", "own_first", "arrival")[number % 3])
        ops = list(plans[0].ops)
        a, b = (int(i) for i in rng.integers(len(ops), size=2))
        ops.insert(b, ops.pop(a))
        broken = [with_ops(plans[0], ops), plans[1]]
        alone, together = rejected(broken)
        assert alone == (not legal(plans[0], ops)), (str(plans[0].ops[a]), a, b)
        assert alone or not together
        verdicts.append((alone, together))
    assert len(set(verdicts)) == 3, "moves that are legal, illegal, and illegal but harmless by chance"


def test_ranks_that_wait_for_each_other_are_found():
    plans = group()
    late = [with_ops(p, sorted(p.ops, key=lambda op: op.kind == "sum" or 2 * (op.kind == "send"))) for p in plans]
    late = [with_ops(p, [*(o for o in p.ops if o.kind != "sum"), TileOp("sum")]) for p in late]
    for plan in late:
        with pytest.raises(PlanError, match="comes after every send"):
            check(plan)
    with pytest.raises(PlanError, match="wait for ever") as caught:
        simulate(late, np.random.default_rng(0))
    assert len([p for p in caught.value.problems if "for ever" in p.rule]) == 2


def test_plans_that_do_not_fit_each_other_are_found():
    dispatch, _ = routed(np.random.default_rng(5), ep=2, per_rank=2, top_k=2, tokens=80)
    mixed = [plan_overlap(dispatch, TileSchedule(parts=n), rank=n - 1, tile_rows=16) for n in (1, 2)]
    for plan in mixed:
        check(plan)
    with pytest.raises(PlanError, match="what rank 1 plans for the rows of rank 0"):
        simulate(mixed, np.random.default_rng(0))
    with pytest.raises(PlanError, match="rank 0 of 1"):
        simulate(mixed[:1], np.random.default_rng(0))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"rank": 7}, "a position in a group of 2"),
        ({"blocks": 0}, "at least 1"),
        ({"part_ends": ((1,), (1,))}, "the last part ends with the last of"),
        ({"part_ends": ((0, 3), (1,))}, "no part is empty"),
        ({"peer_part_ends": ((), ())}, "seen from the other side"),
        ({"tiles": ((Tile(0, 0, 4, 0),),)}, "one entry for each of the 2 ranks"),
        ({"tiles": ((Tile(0, 0, 4, 1),), (Tile(5, 1, 4, 0),))}, "rows end to end"),
        ({"tiles": ((Tile(0, 0, 4, 1),), (Tile(5, 1, 4, 0),))}, "in one of 2 slots"),
        ({"direction": "forward"}, "no such peer, part, block or slot"),
    ],
)
def test_a_wrong_cut_is_found(change, rule):
    with pytest.raises(PlanError, match=rule):
        check(dataclasses.replace(group()[0], **change))


def test_all_problems_are_reported_together():
    plan = group()[0]
    ops = [TileOp("sum"), *plan.ops[1:-1], plan.ops[4]]
    with pytest.raises(PlanError) as caught:
        check(with_ops(plan, ops))
    found = str(caught.value)
    for rule in ("must be there", "2 times", "the last operation is sum"):
        assert rule in found


# ---- plan files ------------------------------------------------------------------------------------------------------------


def test_a_plan_comes_back_from_its_file():
    rng = np.random.default_rng(6)
    for _ in range(50):
        for plan in plans_of_group(random_dispatch(rng), random_schedule(rng), tile_rows=16, direction="backward"):
            again = from_json(plan.to_json())
            assert again == plan and again.hash == plan.hash


def damaged(**changes):
    return json.dumps({**group()[0].to_dict(), **changes})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        damaged(rank="0"),
        damaged(extra=1),
        damaged(direction="sideways"),
        damaged(ops=[["jump", 0, 0, 0]]),
        damaged(ops=[["first", 0, 0.5, 0]]),
        damaged(ops=7),
        damaged(schedule={"parts": 1, "colour": "red"}),
        damaged(tiles=[[[0, 1]]]),
    ],
)
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(PlanError, match="a plan of overlap in JSON"):
        from_json(text)


def test_a_plan_file_that_fails_its_check_is_refused():
    ops = group()[0].to_dict()["ops"]
    with pytest.raises(PlanError, match="must be there, and is not"):
        from_json(damaged(ops=ops[:3] + ops[4:]))
    with pytest.raises(PlanError, match="one entry for each of the 2 ranks"):
        from_json(damaged(tiles=[]))
