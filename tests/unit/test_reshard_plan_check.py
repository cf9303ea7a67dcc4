"""The independent check catches what is planted: each fault, made by hand in a good plan, is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from reshard_plan_help import equal_hosts

from phalanx.core.errors import PlanError
from phalanx.plan.layout.mesh.placements import Partial, Replicate, mesh_layout, read_layout
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import whole_layout
from phalanx.plan.reshard.check import reshard_plan_problems
from phalanx.plan.reshard.check_time import certified_bytes
from phalanx.plan.reshard.plan import ReshardPlan, plan_reshard
from phalanx.plan.reshard.types import Hop, Hosts, Move, MovePart, Reduction

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Forged:
    """A plan of which parts were replaced; everything else is the good plan's."""

    good: ReshardPlan
    hops: tuple[Hop, ...]
    reductions: tuple[Reduction, ...]
    changed: dict[str, Any]
    programs: dict[int, tuple[Hop, ...]]

    def __getattr__(self, name: str) -> Any:
        return self.changed[name] if name in self.changed else getattr(self.good, name)

    def program(self, rank: int) -> tuple[Hop, ...]:
        if rank in self.programs:
            return self.programs[rank]
        return tuple(hop for hop in self.hops if rank in (hop.src, hop.dst))

    def copies(self, rank: int) -> tuple[MovePart, ...]:
        return self.changed["copies"](rank) if "copies" in self.changed else self.good.copies(rank)


def forge(
    plan: ReshardPlan,
    *,
    hops: tuple[Hop, ...] | None = None,
    reductions: tuple[Reduction, ...] | None = None,
    programs: dict[int, tuple[Hop, ...]] | None = None,
    **changed: Any,
) -> list[str]:
    forged = Forged(
        plan,
        plan.hops if hops is None else hops,
        plan.reductions if reductions is None else reductions,
        changed,
        programs or {},
    )
    return [str(problem) for problem in reshard_plan_problems(forged)]


@pytest.fixture(scope="module")
def good() -> ReshardPlan:
    """Two hosts to three, in chains from host to host."""
    src = read_layout("2x2 S0R", (24, 16))
    dst = read_layout("3x2 RS1", (24, 16), first_rank=4)
    plan = plan_reshard([Move(name="w", itemsize=4, src=src, dst=dst)], equal_hosts(5, 2), message_bytes=128)
    plan.check()
    return plan


@pytest.fixture(scope="module")
def summed() -> ReshardPlan:
    src = mesh_layout((12,), (2, 2), (Partial(), Replicate()))
    dst = whole_layout((12,), (4, 5))
    plan = plan_reshard([Move(name="g", itemsize=4, src=src, dst=dst)], equal_hosts(3, 2))
    plan.check()
    assert plan.reductions
    return plan


def test_a_good_plan_has_no_problems(good: ReshardPlan, summed: ReshardPlan) -> None:
    assert forge(good) == [] and forge(summed) == []


def swapped(hops: tuple[Hop, ...]) -> tuple[Hop, ...]:
    """The first message that is passed on comes before the one that brings it."""
    brought = {(hop.dst, part): i for i, hop in enumerate(hops) for part in hop.parts}
    at = next(i for i, hop in enumerate(hops) if (hop.src, hop.parts[0]) in brought)
    first = brought[hops[at].src, hops[at].parts[0]]
    order = list(hops)
    order.insert(first, order.pop(at))
    return tuple(order)


def with_part(hops: tuple[Hop, ...], change: Callable[[MovePart], MovePart]) -> tuple[Hop, ...]:
    return (Hop(hops[0].src, hops[0].dst, (change(hops[0].parts[0]), *hops[0].parts[1:])), *hops[1:])


def shifted(part: MovePart) -> MovePart:
    return part._replace(box=part.box.shifted((0, 1)))


def smaller(part: MovePart) -> MovePart:
    sizes = part.box.sizes
    return part._replace(box=Box(part.box.offsets, (*sizes[:-1], sizes[-1] - 1)))


FAULTS: dict[str, tuple[Callable[[tuple[Hop, ...]], tuple[Hop, ...]], str]] = {
    "a message is left out": (lambda hops: hops[:-1], "elements of w that it needs"),
    "a message comes twice": (lambda hops: (*hops, hops[0]), "twice"),
    "passed on before it came": (swapped, "before it has it"),
    "another box": (lambda hops: with_part(hops, shifted), "w"),
    "a smaller box": (lambda hops: with_part(hops, smaller), "elements of w that it needs"),
    "a sender that has nothing": (lambda hops: (hops[0]._replace(src=9), *hops[1:]), "rank 9 sends w"),
    "a receiver that needs nothing": (lambda hops: (*hops, hops[0]._replace(dst=1)), "rank 1: gets w"),
    "to itself": (lambda hops: (*hops, hops[0]._replace(dst=hops[0].src)), "goes from a rank to another"),
    "nothing in it": (lambda hops: (*hops, hops[0]._replace(parts=())), "carries something"),
    "too large": (lambda hops: (hops[0]._replace(parts=hops[0].parts * 40), *hops[1:]), "must be at most 128"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_in_the_messages(good: ReshardPlan, fault: str) -> None:
    change, words = FAULTS[fault]
    found = forge(good, hops=change(good.hops))
    assert any(words in problem for problem in found), found


def test_a_byte_that_enters_a_host_twice() -> None:
    """Both ranks of a host get their box from outside, as send/recv does."""
    src, dst = read_layout("1x2 S1R", (24, 16)), read_layout("2x2 RS0", (24, 16), first_rank=2)
    plan = plan_reshard([Move(name="w", itemsize=4, src=src, dst=dst)], equal_hosts(3, 2))
    plan.check()
    hosts = plan.hosts.host_of_rank
    at = next(i for i, hop in enumerate(plan.hops) if hosts[hop.src] == hosts[hop.dst])
    bringer = next(hop for hop in plan.hops[:at] if hop.dst == plan.hops[at].src and hop.parts == plan.hops[at].parts)
    found = forge(plan, hops=(*plan.hops[:at], plan.hops[at]._replace(src=bringer.src), *plan.hops[at + 1 :]))
    assert any("takes in a part of w twice" in problem for problem in found), found
    assert any("messages carry" in problem for problem in found), found


def test_a_host_that_gets_what_it_holds() -> None:
    src, dst = whole_layout((8,), (0, 2)), whole_layout((8,), (1, 2, 3))
    plan = plan_reshard([Move(name="w", itemsize=4, src=src, dst=dst)], equal_hosts(2, 2))
    plan.check()
    hops = tuple(hop._replace(src=0) if hop.dst == 3 else hop for hop in plan.hops)
    assert any("that its rank 2 holds" in problem for problem in forge(plan, hops=hops))
    assert any("rank 0: copies w[0:8], which it does not hold" in p for p in _with_copy(plan, rank=0, source=1))


def _with_copy(plan: ReshardPlan, *, rank: int, source: int) -> list[str]:
    move = plan.moves[0]
    src = dataclasses.replace(move.src, held=((), move.src.held[1]), local_shapes=((0,), (8,)))
    part = MovePart(0, Box((0,), (8,)))
    return forge(plan, moves=(dataclasses.replace(move, src=src),), copies=lambda r: (part,) if r == rank else ())


def test_ranks_that_wait_for_each_other(good: ReshardPlan) -> None:
    """Two ranks whose own orders differ: each waits for a message that the other has not begun."""
    rank = good.hops[0].dst
    program = [hop for hop in good.hops if rank in (hop.src, hop.dst)]
    found = forge(good, programs={rank: tuple(reversed(program))})
    assert any("deadlocks" in problem for problem in found), found
    assert any("programs have" in p for p in forge(good, programs=dict.fromkeys(range(10), ())))


def test_terms(summed: ReshardPlan) -> None:
    terms = [i for i, hop in enumerate(summed.hops) if hop.parts[0].term >= 0]
    assert terms
    without = tuple(hop for i, hop in enumerate(summed.hops) if i != terms[0])
    assert any("without all of its terms" in p for p in forge(summed, hops=without))
    other = summed.hops[terms[0]].parts[0]
    wrong = tuple(
        hop._replace(parts=(other._replace(term=1 - other.term),)) if i == terms[0] else hop
        for i, hop in enumerate(summed.hops)
    )
    assert any("before it has it" in p for p in forge(summed, hops=wrong))
    assert any("adds it nowhere" in p for p in forge(summed, reductions=()))
    assert any("twice" in p for p in forge(summed, hops=(*summed.hops, summed.hops[terms[0]])))


# ---- times and bounds --------------------------------------------------------------------------------------------------------------


def with_streams(plan: ReshardPlan, change: Callable[[list[Any]], list[Any]]) -> list[str]:
    phase = plan.phases[0]
    schedule = dataclasses.replace(phase.schedule, streams=tuple(change(list(phase.schedule.streams))))
    return forge(plan, phases=(phase._replace(schedule=schedule),))


def test_two_streams_on_one_lane(good: ReshardPlan) -> None:
    """All begin at once."""

    def at_once(streams: list[Any]) -> list[Any]:
        return [s._replace(begin_s=0.0, end_s=s.end_s - s.begin_s) for s in streams]

    plan = good if not good.phases[0].schedule.rounds_s else None
    assert plan is not None
    assert any("carries more than its rate" in p for p in with_streams(good, at_once))


def test_schedules_that_cannot_be(good: ReshardPlan) -> None:
    def faster(streams: list[Any]) -> list[Any]:
        return [
            streams[0]._replace(end_s=streams[0].begin_s + (streams[0].end_s - streams[0].begin_s) / 2),
            *streams[1:],
        ]

    assert any("carries more than its rate" in p for p in with_streams(good, faster))
    assert any("every byte of flow" in p for p in with_streams(good, lambda s: s[1:]))
    assert any("each of its needers once" in p for p in with_streams(good, lambda s: [s[0]._replace(edges=()), *s[1:]]))
    late = good.phases[0].schedule.makespan_s * 2
    assert any("ends too late" in p for p in with_streams(good, lambda s: [s[0]._replace(end_s=late), *s[1:]]))

    def before(streams: list[Any]) -> list[Any]:
        edges = tuple(e._replace(depth=0) for e in streams[0].edges)
        return [streams[0]._replace(edges=edges), *streams[1:]]

    assert any("before it has it" in p for p in with_streams(good, before))
    assert any("the schedule ends after" in p for p in forge(good, makespan_s=good.makespan_s * 2))
    assert any("below the bound" in p for p in forge(good, makespan_s=good.makespan_s / 2))


def test_rounds_that_are_too_short() -> None:
    """A relayed plan whose rounds are halved."""
    src, dst = whole_layout((1 << 14,), (0, 1)), whole_layout((1 << 14,), (1, 2, 3))
    hosts = Hosts(
        host_of_rank=(0, 1, 2, 3), send_bytes_per_s=(1.0, 0.7, 0.3, 0.2), recv_bytes_per_s=(1.0, 1.0, 1.0, 0.9)
    )
    plan = plan_reshard([Move(name="w", itemsize=4, src=src, dst=dst)], hosts, least_bytes=256)
    plan.check()
    phase = plan.phases[0]
    assert phase.schedule.rounds_s, "the case was chosen because only a relay solves it"
    half = dataclasses.replace(phase.schedule, rounds_s=tuple(at / 2 for at in phase.schedule.rounds_s))
    found = forge(plan, phases=(phase._replace(schedule=half),))
    assert any("carries more than its rate" in p for p in found) and any("do not end with it" in p for p in found)
    cut = dataclasses.replace(phase.schedule, rounds_s=phase.schedule.rounds_s[:-1])
    assert any("round for each chunk" in p for p in forge(plan, phases=(phase._replace(schedule=cut),)))


def test_bounds_that_do_not_hold(good: ReshardPlan) -> None:
    more = dataclasses.replace(good.bound, num_bytes=good.bound.num_bytes + 4)
    assert any("its hosts must pass" in p for p in forge(good, bound=more))
    slower = dataclasses.replace(good.bound, bytes_per_s=good.bound.bytes_per_s / 2)
    assert any("bytes per second, not" in p for p in forge(good, bound=slower))
    other = dataclasses.replace(good.bound, hosts=(0,), kind="receive")
    assert any("must pass 0 bytes" in p for p in forge(good, bound=other))


def test_certificates_by_hand() -> None:
    """Three hosts: 0 and 1 hold halves, 1 and 2 hold all of the second half, 3 needs everything, 2 the first half."""
    src = read_layout("2x1 S0", (8,))
    dst = whole_layout((8,), (2, 3))
    moves, hosts = [Move(name="w", itemsize=4, src=src, dst=dst)], equal_hosts(4, 1)
    assert certified_bytes(moves, hosts, "receive", frozenset({3})) == 32
    assert certified_bytes(moves, hosts, "receive", frozenset({0})) == 0
    assert certified_bytes(moves, hosts, "send", frozenset({0})) == 16
    assert certified_bytes(moves, hosts, "send", frozenset({0, 1})) == 32
    assert certified_bytes(moves, hosts, "send", frozenset({0, 1, 2, 3})) == 64
    assert certified_bytes(moves, hosts, "send", frozenset({2, 3})) == 0


def test_check_raises_with_all_problems(good: ReshardPlan) -> None:
    broken = dataclasses.replace(good, makespan_s=good.makespan_s / 2, staging_bytes=1)
    with pytest.raises(PlanError) as error:
        broken.check()
    assert len(error.value.problems) >= 3
    assert "staging = 1024: must be at most 1" in str(error.value)
