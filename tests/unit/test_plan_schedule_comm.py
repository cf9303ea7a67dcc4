"""Transfers of a pipeline: executed in emulators of several kinds of transport, none deadlocks and every pass gets its own input."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from collections import deque

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.core.errors import PlanError
from phalanx.plan.pipeline.comm import PipelinePlan, Recv, Run, Send, Transfer, batches, plan_pipeline
from phalanx.plan.pipeline.schedule.clock import chain, simulate, uniform_costs
from phalanx.plan.pipeline.schedule.make import SCHEDULES, Action, make_schedule

pytestmark = pytest.mark.unit


def planned(name: str, pp: int, virtual: int, m: int, skips: random.Random | None = None) -> PipelinePlan:
    """`skips`: with about half of all skip connections that there could be."""
    made = make_schedule(name, pp=pp, virtual=SCHEDULES[name].virtual or virtual, num_microbatches=m)
    edges = list(chain(made.num_stages))
    if skips is not None:
        longer = itertools.combinations(range(made.num_stages), 2)
        edges += [(a, b) for a, b in longer if b > a + 1 and skips.random() < 0.5]
    return plan_pipeline(made, edges=edges)


plans = st.builds(
    planned,
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 9),
    st.none() | st.integers(0, 2**32).map(random.Random),
)


class Machine:
    """Runs passes on values that say which stage made them for which; nearest stage first."""

    def __init__(self, plan: PipelinePlan) -> None:
        stages = range(plan.schedule.num_stages)
        self.above = {s: [t for t in stages if (s, t) in plan.edges] for s in stages}
        self.below = {s: [t for t in reversed(stages) if (t, s) in plan.edges] for s in stages}
        self.done: list[list[Action]] = [[] for _ in plan.programs]

    def run(self, rank: int, op: Run, values: list[object]) -> dict[Transfer, object]:
        kind, stage, mb = op.action
        self.done[rank].append(op.action)
        if kind == "W":
            assert op.takes == () and op.gives == ()
            return {}
        up, down = self.above[stage], self.below[stage]
        comes, goes = (down, up) if kind == "F" else (up, down)
        way = "F" if kind == "F" else "B"
        assert values == [(way, mb, other, stage) for other in comes]
        assert [t.target_stage for t in op.gives] == goes
        return {t: (way, mb, stage, t.target_stage) for t in op.gives}

    def finish(self, plan: PipelinePlan) -> None:
        assert tuple(map(tuple, self.done)) == plan.schedule.actions


def run_posted(plan: PipelinePlan, rng: random.Random, *, tagged: bool) -> None:
    """Ranks advance in random order; sends never wait, a receive is waited for where it is taken.

    Tagged: messages are found by tag, whatever their order. Else the n-th send of a pair of ranks meets its n-th posted receive.
    """
    machine = Machine(plan)
    position = [0] * len(plan.programs)
    wires: dict[object, deque[object]] = {}
    posted: dict[tuple[int, int], deque[Transfer]] = {}
    outputs: dict[Transfer, object] = {}
    inputs: dict[Transfer, object] = {}

    def wire(t: Transfer) -> deque[object]:
        key = (t.src_rank, t.dst_rank, plan.tag(t)) if tagged else (t.src_rank, t.dst_rank)
        return wires.setdefault(key, deque())

    def arrived(t: Transfer) -> bool:
        if t in inputs or t.is_local:
            return True
        queue = deque([t]) if tagged else posted[t.src_rank, t.dst_rank]
        while queue and wire(queue[0]):  # in order of posting
            first = queue.popleft()
            inputs[first] = wire(first).popleft()
        return t in inputs

    def can_go_on(rank: int) -> bool:
        if position[rank] == len(plan.programs[rank]):
            return False
        op = plan.programs[rank][position[rank]]
        return not isinstance(op, Run) or all(arrived(t) for t in op.takes)

    while free := [rank for rank in range(len(position)) if can_go_on(rank)]:
        rank = rng.choice(free)
        op = plan.programs[rank][position[rank]]
        if isinstance(op, Run):
            taken = [(outputs if t.is_local else inputs).pop(t) for t in op.takes]
            outputs.update(machine.run(rank, op, taken))
        elif isinstance(op, Send):
            wire(op.transfer).append(outputs.pop(op.transfer))
        else:
            posted.setdefault((op.transfer.src_rank, op.transfer.dst_rank), deque()).append(op.transfer)
        position[rank] += 1
    assert position == [len(program) for program in plan.programs], "deadlock"
    machine.finish(plan)
    assert not inputs and not outputs and not any(wires.values())


def run_rendezvous(plan: PipelinePlan, *, batched: bool) -> None:
    """A send and its receive wait for each other. Batched: all of a batch is posted at once, and waited for before the next step."""
    machine, values = Machine(plan), dict[Transfer, object]()
    steps = [
        batches(program) if batched else [op if isinstance(op, Run) else (op,) for op in program]
        for program in plan.programs
    ]
    position = [0] * len(steps)
    met: set[tuple[int, int, int]] = set()  # rank, step, operation of it

    def post_of(rank: int) -> tuple[Send | Recv, ...]:
        here = steps[rank][position[rank]] if position[rank] < len(steps[rank]) else ()
        return () if isinstance(here, Run) else here

    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(steps):
            while position[rank] < len(own):
                step = own[position[rank]]
                if isinstance(step, Run):
                    values.update(machine.run(rank, step, [values.pop(t) for t in step.takes]))
                else:
                    for i, op in enumerate(step):
                        t = op.transfer
                        other = t.dst_rank if isinstance(op, Send) else t.src_rank
                        facing: Send | Recv = Recv(t) if isinstance(op, Send) else Send(t)
                        theirs = post_of(other)
                        if facing in theirs:
                            met |= {(rank, position[rank], i), (other, position[other], theirs.index(facing))}
                    if any((rank, position[rank], i) not in met for i in range(len(step))):
                        break
                position[rank] += 1
                moved = True
    assert position == [len(s) for s in steps], "deadlock"
    machine.finish(plan)


@settings(max_examples=60, deadline=None)
@given(plans, st.integers(0, 2**32).map(random.Random))
def test_posted_with_tags_in_any_timing(plan: PipelinePlan, rng: random.Random) -> None:
    run_posted(plan, rng, tagged=True)


@settings(max_examples=60, deadline=None)
@given(plans, st.integers(0, 3), st.integers(0, 2**32).map(random.Random))
def test_posted_ahead_with_tags_in_any_timing(plan: PipelinePlan, ahead: int, rng: random.Random) -> None:
    programs = tuple(plan.posted(rank, ahead=ahead) for rank in range(plan.schedule.pp))
    for before, after in zip(plan.programs, programs, strict=True):
        assert [op for op in before if not isinstance(op, Recv)] == [op for op in after if not isinstance(op, Recv)]
        assert [op for op in before if isinstance(op, Recv)] == [op for op in after if isinstance(op, Recv)]
    run_posted(dataclasses.replace(plan, programs=programs), rng, tagged=True)


@settings(max_examples=60, deadline=None)
@given(plans, st.integers(0, 2**32).map(random.Random))
def test_posted_without_tags_in_any_timing(plan: PipelinePlan, rng: random.Random) -> None:
    run_posted(plan, rng, tagged=False)


@settings(max_examples=60, deadline=None)
@given(plans, st.booleans())
def test_blocking_sends_and_receives(plan: PipelinePlan, batched: bool) -> None:
    run_rendezvous(plan, batched=batched)


@settings(max_examples=40, deadline=None)
@given(plans)
def test_the_check_passes_and_everything_crosses_once(plan: PipelinePlan) -> None:
    plan.check()
    made = plan.schedule
    boundaries = len(plan.edges)
    assert len(plan.transfers) == len(set(plan.transfers)) == 2 * boundaries * made.num_microbatches
    tags = {plan.tag(t) for t in plan.transfers}
    assert len(tags) == len(plan.transfers) and (
        not tags or 0 <= min(tags) <= max(tags) < 2 * boundaries * made.num_microbatches
    )
    for a in range(made.pp):
        for b in range(made.pp):
            sends = [op.transfer for op in plan.programs[a] if isinstance(op, Send) and op.transfer.dst_rank == b]
            recvs = [op.transfer for op in plan.programs[b] if isinstance(op, Recv) and op.transfer.src_rank == a]
            assert sends == recvs == [t for t in plan.sent if (t.src_rank, t.dst_rank) == (a, b)]


def test_hand_over_at_the_bottom_of_a_v_and_on_one_rank() -> None:
    plan = planned("zbv", 3, 2, 5)
    local = [t for t in plan.transfers if t.is_local]
    assert len(local) == 10 and {(t.src_rank, min(t.stage, t.target_stage)) for t in local} == {(2, 2)}
    alone = planned("interleaved_1f1b", 1, 3, 4)
    assert not alone.sent and len(alone.transfers) == 16


def test_skip_connections_travel_both_ways_and_have_their_own_names() -> None:
    made = make_schedule("1f1b", pp=4, virtual=1, num_microbatches=2)
    plan = plan_pipeline(made, edges=[(1, 2), (0, 3), (0, 1), (2, 3)])
    assert plan.edges == ((0, 1), (1, 2), (2, 3), (0, 3))
    runs = {str(op.action): op for program in plan.programs for op in program if isinstance(op, Run)}
    assert [str(t) for t in runs["F0.1"].gives] == ["forward 0.1 0->1", "forward 0+3.1 0->3"]
    assert [str(t) for t in runs["F3.1"].takes] == ["forward 2.1 2->3", "forward 0+3.1 0->3"]
    assert [str(t) for t in runs["B3.1"].gives] == ["backward 3.1 3->2", "backward 3+3.1 3->0"]
    assert [str(t) for t in runs["B0.1"].takes] == ["backward 1.1 1->0", "backward 3+3.1 3->0"]
    assert "in addition to the chain, stages send: 0 to 3" in plan.explain()
    assert plan.hash != plan_pipeline(made).hash
    plan.check()


@pytest.mark.parametrize(
    ("edges", "says"),
    [
        ([(0, 1)], r"has no edge \(1, 2\)"),
        ([(0, 1), (1, 2), (2, 0)], "leads from a stage to one above it"),
        ([(0, 1), (1, 2), (1, 3)], "leads from a stage to one above it"),
        ([(0, 1), (1, 2), (0, 1)], "given once each"),
    ],
)
def test_edges_that_are_none(edges: list[tuple[int, int]], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan_pipeline(make_schedule("1f1b", pp=3, virtual=1, num_microbatches=2), edges=edges)


def test_time_with_skip_connections_and_scarce_links() -> None:
    """By hand: 3 stages, 1 micro-batch, F = 1, B = 2, each transfer 1 but the skip 0 to 2, which takes 4."""
    made = make_schedule("1f1b", pp=3, virtual=1, num_microbatches=1)
    edges = [(0, 1), (1, 2), (0, 2)]
    costs = uniform_costs(3, p2p=1)
    slow = dataclasses.replace(costs, edge_p2p={(0, 2): 4.0})
    assert simulate(made, costs).makespan == 3 + 6 + 4
    # up: the skip arrives at 5, where the chain would at 4; down: 8 + 4 = 12, where the chain is at 11: 12 + 2
    assert simulate(made, slow, edges=edges).makespan == 14
    # one link a rank: up, the skip has those of ranks 0 and 2 from 2 to 6, then 1 to 2 comes, there at 7;
    # down, from rank 2 at 10 the chain and from 11 to 15 the skip, and rank 1's only then: 16, and 2 for the last pass
    scarce = simulate(made, dataclasses.replace(slow, channels="rank"), edges=edges)
    assert scarce.spans[2][0].start == 7 and scarce.makespan == 18
    # a sender that waits for its transfers begins its next pass after them
    two = make_schedule("gpipe", pp=2, virtual=1, num_microbatches=2)
    blocked = simulate(two, uniform_costs(2, p2p=3, blocking=True))
    assert [span.start for span in blocked.spans[0][:2]] == [0, 4] and [s.start for s in blocked.spans[1][:2]] == [4, 8]


def test_a_receive_posted_ahead_stands_so_many_passes_earlier() -> None:
    plan = planned("1f1b", 2, 1, 3)
    words = [str(op.action) if isinstance(op, Run) else type(op).__name__ for op in plan.posted(0, ahead=1)]
    assert words == ["F0.0", "Send", "Recv", "F0.1", "Send", "B0.0", "Recv", "F0.2", "Send", "Recv", "B0.1", "B0.2"]


def test_a_program_in_full() -> None:
    plan = planned("1f1b", 2, 1, 2)
    first = [str(op.action) if isinstance(op, Run) else f"{type(op).__name__} {op.transfer}" for op in plan.programs[0]]
    assert first == [
        "F0.0", "Send forward 0.0 0->1", "F0.1", "Send forward 0.1 0->1",
        "Recv backward 1.0 1->0", "B0.0", "Recv backward 1.1 1->0", "B0.1",
    ]  # fmt: skip
    assert "4 transfers between ranks, 0 within one" in plan.explain()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("swapped", "runs the passes of the schedule"),
        ("lost", "sent once and received once"),
        ("early", "comes after"),
        ("crossed", "deadlocks waiting for the other rank"),
        ("foreign", "belongs to other ranks"),
        ("left out", "names one transfer for each edge"),
    ],
)
def test_the_check_sees(fault: str, said: str) -> None:
    plan = planned("1f1b", 3, 1, 4)
    programs = [list(program) for program in plan.programs]
    middle = programs[1]
    if fault == "swapped":
        at = [i for i, op in enumerate(middle) if isinstance(op, Run)]
        middle[at[0]], middle[at[1]] = middle[at[1]], middle[at[0]]
    elif fault == "lost":
        middle.remove(next(op for op in reversed(middle) if isinstance(op, Send)))
    elif fault == "early":
        middle.insert(0, middle.pop(next(i for i, op in enumerate(middle) if isinstance(op, Send))))
    elif fault == "crossed":  # the first rank waits for a gradient before it sends what the gradient needs
        first = programs[0]
        first.insert(1, first.pop(next(i for i, op in enumerate(first) if isinstance(op, Recv))))
    elif fault == "foreign":
        programs[2].append(next(op for op in programs[0] if isinstance(op, Send)))
    elif fault == "left out":
        plan = plan_pipeline(plan.schedule, edges=[(0, 1), (1, 2), (0, 2)])
        programs = [list(program) for program in plan.programs]
        at = next(i for i, op in enumerate(programs[2]) if isinstance(op, Run))
        run = programs[2][at]
        programs[2][at] = dataclasses.replace(run, takes=run.takes[:1])
    broken = dataclasses.replace(plan, programs=tuple(map(tuple, programs)))
    with pytest.raises(PlanError, match=said):
        broken.check()


def test_the_emulators_see_a_deadlock() -> None:
    plan = planned("1f1b", 3, 1, 4)
    first = list(plan.programs[0])
    at = next(i for i, op in enumerate(first) if isinstance(op, Run) and op.action == Action("B", 0, 0))
    blocking = list(first)
    blocking.insert(1, blocking.pop(at - 1))  # the receive of a gradient before the first send
    with pytest.raises(AssertionError, match="deadlock"):
        run_rendezvous(dataclasses.replace(plan, programs=(tuple(blocking), *plan.programs[1:])), batched=False)
    first.insert(1, first.pop(at - 1))
    first.insert(2, first.pop(at))  # and the backward that waits for it
    with pytest.raises(AssertionError, match="deadlock"):
        run_posted(
            dataclasses.replace(plan, programs=(tuple(first), *plan.programs[1:])), random.Random(0), tagged=True
        )


@pytest.mark.parametrize("name", SCHEDULES)
def test_threads_with_blocking_queues(name: str) -> None:
    """Real threads, one a rank; a message is found by its tag, a receive blocks where it is taken."""
    plan = planned(name, 4, 2, 6)
    machine, failures = Machine(plan), list[BaseException]()
    mail: dict[tuple[int, int, int], object] = {}
    bell = threading.Condition()

    def rank_main(rank: int) -> None:
        kept: dict[Transfer, object] = {}
        try:
            for op in plan.programs[rank]:
                if isinstance(op, Run):
                    values = []
                    for t in op.takes:
                        if t.is_local:
                            values.append(kept.pop(t))
                            continue
                        key = (t.src_rank, rank, plan.tag(t))
                        with bell:
                            assert bell.wait_for(lambda key=key: key in mail, timeout=20), f"rank {rank} waits for {t}"
                            values.append(mail.pop(key))
                    kept.update(machine.run(rank, op, values))
                elif isinstance(op, Send):
                    with bell:
                        mail[rank, op.transfer.dst_rank, plan.tag(op.transfer)] = kept.pop(op.transfer)
                        bell.notify_all()
            assert not kept
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not failures and not mail
    machine.finish(plan)
