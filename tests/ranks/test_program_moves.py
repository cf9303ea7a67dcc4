"""Moves between layouts as programs: what they wait for, what a real move tells under the same ids, and their clock."""

import pytest
from reshard_help import equal_hosts
from tiers import times

from phalanx.plan.layout.mesh.placements import Replicate, Shard, mesh_layout
from phalanx.plan.program.moves import message_id, move_program
from phalanx.plan.program.ops import Op
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import Move
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.reshard.program import rank_program
from phalanx.runtime.reshard.resharder import PlanOptions, Resharder
from phalanx.simulate.hardware.cost import Cost
from phalanx.simulate.program.clock import run_moves
from phalanx_lab.bench.reshard.drawn import prefilled, random_case, sources
from ranks import run_ranks

WORLD = 8
EVERYONE = tuple(range(WORLD))


def options_of(case):
    return {n: getattr(case, n) for n in ("method", "message_bytes", "open_hops", "staging_bytes") if getattr(case, n)}


@pytest.mark.unit
def test_a_program_waits_for_what_the_executor_waits_for() -> None:
    """Ids, bytes and dependencies, against what the executor finds from the places of all bytes."""
    waits = 0
    for seed in range(120):
        case = random_case(seed, world=WORLD)
        plan = plan_reshard(case.moves, case.hosts, **options_of(case))
        for rank in EVERYONE:
            made = move_program(plan, rank, ranks=EVERYONE)
            made.check()
            steps = rank_program(plan, rank).steps
            ids = [message_id("reshard", *((rank, s.peer) if s.sends else (s.peer, rank)), s.tag) for s in steps]
            messages = made.ops[1:-1]
            assert [op.id for op in messages] == ids
            assert [op.sent_bytes for op in messages] == [s.nbytes if s.sends else 0 for s in steps]
            assert [set(op.needs) for op in messages] == [{ids[n] for n in s.needs} for s in steps], seed
            waits += sum(bool(s.needs) for s in steps)
    assert waits > 100


@pytest.mark.unit
def test_a_move_on_the_clock() -> None:
    """Two ranks send a half each to a third, whose link takes in one message at a time: the sum of their sizes."""
    src = mesh_layout((8, 4), [2], [Shard(0)], ranks=[0, 1])
    moves = [Move(name="w", itemsize=4, src=src, dst=mesh_layout((8, 4), [1], [Replicate()], ranks=[2]))]
    plan = plan_reshard(moves, equal_hosts([0, 1, 2, 3]), method="best")
    programs = [move_program(plan, rank, ranks=range(4), op_id="heal/state") for rank in range(4)]

    def cost(op: Op, ranks: tuple[int, ...]) -> Cost:
        return Cost(op.sent_bytes / 64 if op.collective == "exchange" else 0.0, 0.0, "given")

    found = run_moves(programs, cost)
    arrived = {span.op.id for span in found.spans[2] if span.op.receives_from is not None}
    assert arrived and all(name.startswith("heal/state.") and "to2." in name for name in arrived)
    assert found.seconds == pytest.approx(2.0, rel=0.01)  # 128 bytes, 64 a second


def moved(rank, cache, seeds):
    """What this rank tells of real moves, and what its programs say."""
    told, planned = [], []
    axis = Axis("reshard", EVERYONE, rank, cache.get(EVERYONE))
    for seed in seeds:
        case, events = random_case(seed, world=WORLD), []
        comms = Collectives(timeout_s=20, trace=True, emit=events.append)
        resharder = Resharder(comms, axis, hosts=case.hosts, options=PlanOptions(**options_of(case)))
        resharder.move(
            case.moves, sources(case, rank), dtypes=case.dtypes, out=prefilled(case, rank), op_id="heal/state"
        )
        told.append(sorted((e.op_id, e.sent_bytes, e.sends_to, e.receives_from) for e in events))
        program = move_program(resharder.prepare(case.moves).plan, rank, ranks=EVERYONE, op_id="heal/state")
        place = [
            tuple(() if p is None else (p,) for p in (op.sends_to, op.receives_from)) for op in program.collectives
        ]
        planned.append(
            sorted((op.id, op.sent_bytes, *ends) for op, ends in zip(program.collectives, place, strict=True))
        )
    return told, planned


@pytest.mark.core
@pytest.mark.ranks
def test_a_real_move_tells_the_ids_of_its_program() -> None:
    for told, planned in run_ranks(WORLD, moved, list(range(times(20, 8))), timeout_s=400):
        assert told == planned
