"""Moves of state that a run records: planned again from what they were planned from, read back from logs, compared message by message."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fake_events import started
from heal_plan_help import after, fresh, healing, new_member, tiny
from phalanx.cli.main import main
from phalanx.cli.simulate_against import as_it_ran
from phalanx.core.errors import ConfigError, DataError
from phalanx.core.events import ClockCompared, Collective, Event, MoveRecorded, StepRecorded
from phalanx.core.recipe import load_recipe
from phalanx.observe.lanes import read_recording
from phalanx.plan.folding import Folding
from phalanx.plan.heal import Healing
from phalanx.plan.layout import Box
from phalanx.plan.move_order import HEAL_ID, expert_moves, expert_order, heal_order, moves_again
from phalanx.plan.placement import LayerPlacements, Placement
from phalanx.plan.program_moves import move_program
from phalanx.plan.program_ops import Op
from phalanx.plan.reshard import plan_reshard
from phalanx.plan.reshard_types import Move, equal_hosts
from phalanx.simulate.compare_moves import MeasuredMove, compare_move
from phalanx.simulate.compare_run import Measured
from phalanx.simulate.cost import Cost
from phalanx.simulate.program_cost import kind_of
from phalanx.simulate.program_time import ProgramTimeline, run_moves
from test_observe_recovery import AT, write
from test_trace import problems_of

pytestmark = pytest.mark.unit


def written(order: dict[str, Any]) -> dict[str, Any]:
    """As it is read back from a log."""
    found: dict[str, Any] = json.loads(json.dumps(order))
    return found


def a_join(run: Healing) -> tuple[list[Move], dict[str, Any]]:
    """To three members comes a fourth, and one of those that are there is not to be trusted with part of a tensor."""
    plan = run.plan(fresh(3))
    plan = run.plan([*after(plan), new_member(9)])
    whole = plan.params[0].src.shape
    wrong = [(1, plan.params[0].name, Box((0,) * len(whole), (1,) * len(whole)))]
    return plan.without(wrong).moves, heal_order(plan, wrong)


@pytest.mark.parametrize("slots", [None, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_recovery_is_planned_again(slots: int | None, zero: int) -> None:
    run = healing(Folding(world=4, ep=2), slots=slots, zero=zero)
    moves, order = a_join(run)
    again = moves_again(HEAL_ID, written(order), healing(Folding(world=4, ep=2), slots=slots, zero=zero))
    hosts = equal_hosts([0] * 4)
    assert plan_reshard(again, hosts).hash == plan_reshard(moves, hosts).hash
    assert (
        plan_reshard(moves_again(HEAL_ID, {**order, "left_out": []}, run), hosts).hash
        != plan_reshard(moves, hosts).hash
    )


def test_experts_are_placed_again() -> None:
    run, folding = healing(Folding(world=4, ep=4), slots=3), Folding(world=4, ep=4)
    experts = tiny().num_experts
    sides = [
        {
            0: LayerPlacements(
                layers={
                    layer: Placement(
                        num_experts=experts,
                        slots=(tuple(tuple((3 * r + s + by) % experts for s in range(3)) for r in range(4)),),
                    )
                    for layer in tiny().moe_layers
                }
            )
        }
        for by in (0, 1)
    ]
    moves = expert_moves(tiny(), folding, run.stages(folding), before=sides[0], after=sides[1], itemsize=4)
    again = moves_again("replace/master", written(expert_order(folding, *sides)), run)
    assert again == moves and all(move.src != move.dst for move in moves)
    with pytest.raises(DataError, match="is no order of a move: KeyError"):
        moves_again("replace/master", {"folding": {"world": 4}}, run)


# ---- compared --------------------------------------------------------------------------------------------------------


def clock(moves: list[Move], *, slower: float = 1.0) -> ProgramTimeline:
    plan = plan_reshard(moves, equal_hosts([0] * 4))
    return run_moves([move_program(plan, r, ranks=range(4), op_id=HEAL_ID) for r in range(4)], cost(slower))


def cost(slower: float = 1.0) -> Any:
    def of(op: Op, ranks: tuple[int, ...]) -> Cost:
        return Cost(slower * (1e-4 + op.sent_bytes / 1e9), 0.1, "given")

    return of


def measured(moves: list[Move], order: dict[str, Any]) -> MeasuredMove:
    """As the clock says it."""
    found = clock(moves)
    spans = {key: span for key, span in found.by_id.items() if span.op.kind == "collective"}
    return MeasuredMove(
        op_id=HEAL_ID,
        step=5,
        generation=2,
        plan=plan_reshard(moves, equal_hosts([0] * 4)).hash,
        hosts=(0,) * 4,
        order=written(order),
        ranks=4,
        seconds=found.seconds,
        messages={key: Measured(span.begin_s, span.seconds) for key, span in spans.items()},
        sent_bytes={key: round(span.op.sent_bytes) for key, span in spans.items()},
    )


def test_a_move_that_went_as_predicted_has_no_error() -> None:
    run = healing(Folding(world=4, ep=2))
    moves, order = a_join(run)
    told = measured(moves, order)
    same = compare_move(told, run, cost())
    assert same.found.error == same.found.median == same.found.worst == 0.0 and same.messages > 3
    assert same.sent_bytes[0] == same.sent_bytes[1] > 0 and same.other_bytes == ()
    assert same.found.only_measured == same.found.only_predicted == () and same.found.hash == told.plan
    assert {kind.kind for kind in same.found.kinds} == {"heal/state", "heal/state.plan"}
    twice = compare_move(told, run, cost(2.0)).found
    assert twice.error == twice.median == twice.worst == pytest.approx(1.0)
    some = next(key for key, n in told.sent_bytes.items() if n and "to" in key[1])
    other = compare_move(replace(told, sent_bytes={**told.sent_bytes, some: 1}), run, cost())
    assert other.other_bytes == (some[1],) and other.to_dict()["sent_bytes"]["measured"] < other.sent_bytes[0]


def test_a_move_of_another_plan_is_an_error() -> None:
    run = healing(Folding(world=4, ep=2))
    moves, order = a_join(run)
    with pytest.raises(ConfigError, match="makes another plan of the move heal/state after step 5 than the run"):
        compare_move(measured(moves, order), healing(Folding(world=4, ep=2), zero=1), cost())


def test_a_recipe_that_leaves_healing_open_is_taken_as_it_ran() -> None:
    """Copies of shards decide what moves."""
    recipe = load_recipe(None, ["--launch.ranks", "4", "--folding.ep", "2", "--model.preset", "tiny"])
    assert recipe.resilience.heal is None
    assert as_it_ran(recipe, heals=False).resilience.shard_holders == 1
    assert as_it_ran(recipe, heals=True).resilience.shard_holders == recipe.resilience.f


def test_messages_of_moves_are_of_one_kind() -> None:
    assert kind_of("heal/state.3to1.0") == kind_of("heal/state.0to2.17") == "heal/state"
    assert kind_of("replace/exp_avg.0to1.2") == "replace/exp_avg" and kind_of("heal/state.plan") == "heal/state.plan"


# ---- read back -------------------------------------------------------------------------------------------------------


def moved(at: float, *, rank: int, done: bool = True, generation: int = 2) -> list[tuple[float, Event]]:
    """0.2 s after step 5, in which rank 0 sends something to rank 1."""
    ends: Any = {"sends_to": (1,)} if rank == 0 else {"receives_from": (0,)}
    common: dict[str, Any] = {"axis": "everyone", "size": 2, "ranks": (0, 1)}
    events = [
        ClockCompared(rank=rank, host="here", offset_s=0.0, error_s=0.0),
        Collective(op_id="heal/state.plan", op="all_gather", sent_bytes=8, begin_s=AT + at, end_s=AT + at + 0.05, waited_s=0.05, **common),
        Collective(
            op_id="heal/state.0to1.0", op="exchange", sent_bytes=10 * (rank == 0), begin_s=AT + at + 0.05 + 0.05 * rank,
            end_s=AT + at + 0.15, waited_s=0.05, **common, **ends,
        ),
        MoveRecorded(
            op_id="heal/state", step=5, begin_s=AT + at, end_s=AT + at + 0.2, rank=rank, generation=generation, world=2, done=done,
            plan="ab", hosts=(0, 0), order={"members": [], "left_out": []},
        ),
    ]  # fmt: skip
    return [(at + 0.2, event) for event in events]


def stepped(at: float, *, rank: int) -> list[tuple[float, Event]]:
    event = StepRecorded(step=6, begin_s=AT + at, end_s=AT + at + 0.4, rank=rank, generation=2)
    return [(at + 0.4, event)]


def test_moves_are_read_back_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slot 1 dies while it writes, and what takes its place is rank 0; a move that was broken off is drawn and compared with nothing."""
    cut = Collective(op_id="mb0.fwd.loss", op="all_reduce", axis="dp", size=2, sent_bytes=1, begin_s=AT, end_s=AT + 1)
    broken = moved(4.5, rank=1, done=False, generation=1)[:2] + moved(4.5, rank=1, done=False, generation=1)[3:]
    logs = {
        0: [(0.0, started()), *broken, *moved(5.0, rank=1), *stepped(5.3, rank=1)],
        1: [
            (0.0, started(rank=1)),
            (1.0, cut),
            *moved(5.01, rank=0),
            (5.25, started(rank=1, step=5)),
            *stepped(5.3, rank=0),
        ],
    }
    recording = read_recording(write(tmp_path, logs))
    ((at, ranks),) = recording.whole_moves.items()
    assert (
        at == (2, 5, "heal/state") and [r.rank for r in ranks] == [0, 1] and [len(r.messages) for r in ranks] == [2, 2]
    )
    received = ranks[1].messages[1]
    assert (
        received.last_rank == 1 and received.ready_s == AT + 5.1 and ranks[0].order == {"members": [], "left_out": []}
    )
    assert main(["trace", str(tmp_path)]) == 0
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert problems_of(trace) == []
    drawn = {(e["pid"], e["name"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert {
        (0, "move heal/state"),
        (1, "move heal/state"),
        (0, "move heal/state, broken off"),
        (1, "heal/state.0to1.0"),
    } <= drawn
    capsys.readouterr()
    assert main(["trace", str(tmp_path), "--summary", "--json", str(tmp_path / "f.json")]) == 0
    assert "moved heal/state after step 5: 10 B in 1 messages between 2 ranks, 200 ms" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "f.json").read_text())["moves"]
    assert found["generation"] == 2 and found["sent_bytes"] == 10
