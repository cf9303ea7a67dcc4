"""Moves of state that a run records: planned again from what they were planned from, read back from logs, compared message by message."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_events import started
from recovery_plan_help import after, fresh, new_member, planner, tiny
from test_observe_recovery import AT, formed, write
from test_trace import problems_of

from phalanx.cli.main import main
from phalanx.cli.predicting import against as simulate_against
from phalanx.cli.predicting.against import as_it_ran
from phalanx.core.errors import ConfigError, DataError
from phalanx.core.events import ClockCompared, Collective, Event, MoveRecorded, StepPublished, StepRecorded, TeamFormed
from phalanx.core.recipe import load_recipe
from phalanx.observe.recorded.lanes import read_recording
from phalanx.observe.recorded.trace import perfetto_trace
from phalanx.plan.layout.parameters import Box
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.mapping.placement import LayerPlacements, Placement
from phalanx.plan.program.moves import move_program
from phalanx.plan.program.ops import Op
from phalanx.plan.recovery.move_order import STATE_MOVE_ID, expert_moves, expert_order, moves_again, state_move_order
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.recipe import recovery_planner
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import Move, equal_hosts
from phalanx.runtime.membership.member import Reformed
from phalanx.simulate.from_recipe import resolve_recipe
from phalanx.simulate.hardware.cost import Cost
from phalanx.simulate.program.clock import ProgramTimeline, run_moves
from phalanx.simulate.program.compare_moves import MeasuredMove, compare_move
from phalanx.simulate.program.compare_run import MeasuredOp
from phalanx.simulate.program.cost import kind_of
from phalanx.train import recording
from phalanx.train.placement.state_transfer import Moved
from phalanx.train.recording import Recorder
from phalanx.train.recovery.messages import Entry, Telling

pytestmark = pytest.mark.unit


def written(order: dict[str, Any]) -> dict[str, Any]:
    """As it is read back from a log."""
    found: dict[str, Any] = json.loads(json.dumps(order))
    return found


def a_join(run: RecoveryPlanner) -> tuple[list[Move], dict[str, Any]]:
    """To three members comes a fourth, and one of those that are there is not to be trusted with part of a tensor."""
    plan = run.plan(fresh(3))
    plan = run.plan([*after(plan), new_member(9)])
    whole = plan.params[0].src.shape
    wrong = [(1, plan.params[0].name, Box((0,) * len(whole), (1,) * len(whole)))]
    return plan.without(wrong).moves, state_move_order(plan, wrong)


@pytest.mark.parametrize("slots", [None, 4])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_recovery_is_planned_again(slots: int | None, zero: int) -> None:
    run = planner(Folding(world=4, ep=2), slots=slots, zero=zero)
    moves, order = a_join(run)
    again = moves_again(STATE_MOVE_ID, written(order), planner(Folding(world=4, ep=2), slots=slots, zero=zero))
    hosts = equal_hosts([0] * 4)
    assert plan_reshard(again, hosts).hash == plan_reshard(moves, hosts).hash
    assert (
        plan_reshard(moves_again(STATE_MOVE_ID, {**order, "left_out": []}, run), hosts).hash
        != plan_reshard(moves, hosts).hash
    )


def test_experts_are_placed_again() -> None:
    run, folding = planner(Folding(world=4, ep=4), slots=3), Folding(world=4, ep=4)
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
    return run_moves([move_program(plan, r, ranks=range(4), op_id=STATE_MOVE_ID) for r in range(4)], cost(slower))


def cost(slower: float = 1.0) -> Any:
    def of(op: Op, ranks: tuple[int, ...]) -> Cost:
        return Cost(slower * (1e-4 + op.sent_bytes / 1e9), 0.1, "given")

    return of


def measured(moves: list[Move], order: dict[str, Any]) -> MeasuredMove:
    """As the clock says it."""
    found = clock(moves)
    spans = {key: span for key, span in found.by_id.items() if span.op.kind == "collective"}
    return MeasuredMove(
        op_id=STATE_MOVE_ID,
        step=5,
        generation=2,
        plan=plan_reshard(moves, equal_hosts([0] * 4)).hash,
        hosts=(0,) * 4,
        order=written(order),
        ranks=4,
        seconds=found.seconds,
        messages={key: MeasuredOp(span.begin_s, span.seconds) for key, span in spans.items()},
        sent_bytes={key: round(span.op.sent_bytes) for key, span in spans.items()},
    )


def test_a_move_that_went_as_predicted_has_no_error() -> None:
    run = planner(Folding(world=4, ep=2))
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
    run = planner(Folding(world=4, ep=2))
    moves, order = a_join(run)
    with pytest.raises(ConfigError, match="makes another plan of the move heal/state after step 5 than the run"):
        compare_move(measured(moves, order), planner(Folding(world=4, ep=2), zero=1), cost())


def test_a_recipe_that_leaves_recovery_open_is_taken_as_it_ran() -> None:
    """Copies of shards decide what moves."""
    recipe = load_recipe(None, ["--launch.ranks", "4", "--folding.ep", "2", "--model.preset", "tiny"])
    assert recipe.resilience.heal is None
    assert as_it_ran(recipe, is_elastic=False).resilience.shard_holders == 1
    assert as_it_ran(recipe, is_elastic=True).resilience.shard_holders == recipe.resilience.f


def test_messages_of_moves_are_of_one_kind() -> None:
    assert kind_of("heal/state.3to1.0") == kind_of("heal/state.0to2.17") == "heal/state"
    assert kind_of("replace/exp_avg.0to1.2") == "replace/exp_avg" and kind_of("heal/state.plan") == "heal/state.plan"


# ---- read back -------------------------------------------------------------------------------------------------------


def moved(at: float, *, rank: int, done: bool = True, generation: int = 2, **more: Any) -> list[tuple[float, Event]]:
    """0.2 s after step 5, in which rank 0 sends something to rank 1. `more`: other fields of the last event."""
    ends: Any = {"sends_to": (1,)} if rank == 0 else {"receives_from": (0,)}
    common: dict[str, Any] = {"axis": "everyone", "size": 2, "ranks": (0, 1)}
    events: list[Event] = [
        ClockCompared(rank=rank, host="here", offset_s=0.0, error_s=0.0),
        Collective(op_id="heal/state.plan", op="all_gather", sent_bytes=8, begin_s=AT + at, end_s=AT + at + 0.05, waited_s=0.05, **common),
        Collective(
            op_id="heal/state.0to1.0", op="exchange", sent_bytes=10 * (rank == 0), begin_s=AT + at + 0.05 + 0.05 * rank,
            end_s=AT + at + 0.15, waited_s=0.05, **common, **ends,
        ),
        replace(
            MoveRecorded(
                op_id="heal/state", step=5, begin_s=AT + at, end_s=AT + at + 0.2, rank=rank, generation=generation, world=2, done=done,
                plan="ab", hosts=(0, 0), order={"members": [], "left_out": []},
            ),
            **more,
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


def test_slots_that_come_late_keep_nothing_of_an_earlier_start(tmp_path: Path) -> None:
    """The program ends after generation 2 and is started again: in generation 2 of that slot 1 is another rank, and slot 2 does not come at all."""

    def start(at: float, life: str, *, slot: int, rank: int, generation: int = 1) -> list[tuple[float, Event]]:
        begins = [(at, started(rank=slot, step=5)), (at, formed(generation, 5, life=life))]
        return [*begins, *moved(at + 1, rank=rank), *stepped(at + 1.3, rank=rank)]

    logs = {
        0: [*start(0.0, "ab", slot=0, rank=0), *start(9.0, "cd", slot=0, rank=1)],
        1: [*start(0.0, "ab", slot=1, rank=1), *start(9.1, "cd", slot=1, rank=0, generation=2)],
        2: [*start(0.1, "ab", slot=2, rank=1, generation=2)],
    }
    recording = read_recording(write(tmp_path, logs))
    assert {slot: [m.rank for m in moves] for slot, moves in recording.moves.items()} == {0: [1], 1: [0]}
    assert {slot: steps[6].rank for slot, steps in recording.ranks.items()} == {0: 1, 1: 0} and recording.given_up == {}
    (ranks,) = recording.whole_moves.values()
    assert [round(r.begin_s - AT, 1) for r in ranks] == [10.1, 10.0]


def test_a_service_that_lost_its_values_is_no_start(tmp_path: Path) -> None:
    """It counts on above what members know."""
    logs = {
        slot: [
            (0.0, started(rank=slot, step=5)),
            (0.0, formed(1, 5, life="ab")),
            *moved(1.0, rank=slot),
            (2.0, formed(3, 5, life="cd")),
            *moved(3.0, rank=slot, generation=3),
            *stepped(3.3, rank=slot),
        ]
        for slot in (0, 1)
    }
    assert [at[0] for at in read_recording(write(tmp_path, logs)).whole_moves] == [2, 3]


def test_what_moves_were_planned_from_is_asked_for_where_it_is_recorded_and_written_once(tmp_path: Path) -> None:
    told: list[Event] = []

    def never() -> dict[str, Any]:
        raise AssertionError("nothing is recorded")

    def recorder(steps: tuple[int, ...] | None) -> Recorder:
        return Recorder(steps, comms=cast("Any", None), peers=cast("Any", None), emit=told.append)

    assert recorder(None).moves(5, never) is None and recorder((6, 7)).moves(7, never) is None
    record = recorder((6, 7)).moves(5, lambda: {"folding": 1})
    assert record is not None
    resharder = SimpleNamespace(
        comms=SimpleNamespace(recording=lambda: nullcontext([])), axis=SimpleNamespace(size=1),
        prepare=lambda moves: SimpleNamespace(plan=SimpleNamespace(hash="ab")), hosts=equal_hosts([0]),
    )  # fmt: skip
    for kind in ("master", "exp_avg"):
        with record.recording(cast("Any", resharder), [], op_id=f"replace/{kind}"):
            pass
    assert [e.order for e in told if isinstance(e, MoveRecorded)] == [{"folding": 1}, {}]
    later = replace(cast("MoveRecorded", told[1]), generation=1)  # of another recorder, whose first record was lost
    logs = {0: [(5.0, started()), *((5.1, e) for e in (*told, later)), *stepped(5.3, rank=0)]}
    assert [m.order for m in read_recording(write(tmp_path, logs)).moves[0]] == [{"folding": 1}, {"folding": 1}, {}]


class Sending:
    """Collectives of a rank that is recorded, without others."""

    def __init__(self) -> None:
        self.kept: list[Event] = []

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        self.kept = []
        yield self.kept
        self.kept = []

    def send(self, op_id: str, at: float) -> None:
        self.kept.append(
            Collective(
                op_id=op_id, op="all_gather", axis="dp", size=2, sent_bytes=8, begin_s=AT + at, end_s=AT + at + 0.1, waited_s=0.1, ranks=(0, 1)
            )
        )  # fmt: skip


def test_what_publishes_the_parameters_of_a_step_is_of_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is: nothing of a step that was not recorded, or given up, and nothing twice."""
    told: list[Event] = []
    comms, now = Sending(), SimpleNamespace(s=0.0)
    monkeypatch.setattr(recording, "now_s", lambda: AT + now.s)
    recorder = Recorder((2, 4), comms=cast("Any", comms), peers=cast("Any", None), emit=told.append)
    recorder.rank, recorder.generation = 0, 1

    def publish(at: float) -> None:
        now.s = at
        with recorder.publishing():
            comms.send("publish/dense", at)
            now.s += 0.25

    for step, committed in ((1, True), (2, True), (3, True), (4, False)):
        publish(10.0 * step)
        now.s = 10.0 * step + 1
        recorder.begin(step)
        comms.send("vote", now.s)
        now.s += 1
        recorder.end(committed=committed)
        recorder.tell()
    publish(50.0)
    publish(51.0)
    assert [(e.step, e.end_s - e.begin_s) for e in told if isinstance(e, StepPublished)] == [(2, 0.25), (3, 0.25)]
    found = read_recording(write(tmp_path, {0: [(9.0, started()), *((60.0, e) for e in told)]}))
    assert {n: [m.op_id for m in s.messages] for n, s in found.ranks[0].items()} == {
        2: ["vote", "publish/dense"],
        3: ["vote", "publish/dense"],
    }
    assert [m.op_id for s in found.given_up[0] for m in s.messages] == ["vote"]
    assert simulate_against._step_s(found, 2) == pytest.approx(1.25)
    assert problems_of(perfetto_trace(found)) == []


# ---- beside a prediction ---------------------------------------------------------------------------------------------

RECIPE = """
[model]
preset = "tiny"
[launch]
ranks = 2
[folding]
ep = 2
[train]
dtype = "float32"
"""


def calm(recipe_file: Path) -> dict[str, Any]:
    """Of a move between two members who both hold everything: what a log tells of it."""
    recipe = as_it_ran(load_recipe(recipe_file, []), is_elastic=True)
    folding = Folding(world=2, ep=2)
    run = recovery_planner(recipe, resolve_recipe(recipe, tokenizer_vocab=512), folding)
    plan = run.plan(after(run.plan(fresh(2))))
    return {"order": state_move_order(plan, []), "plan": plan_reshard(plan.moves, equal_hosts([0, 0])).hash}


def test_a_move_that_cannot_be_compared_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a move in generation 2 the recipe makes another plan, that in generation 3 is fine, in generation 4 one member is alone, and of the one in generation 5
    the log of rank 1 has lost a line."""
    monkeypatch.setattr(simulate_against, "load_tokenizer", lambda folder: SimpleNamespace(vocab_size=512))
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    fine = calm(recipe)
    alone = replace(cast("MoveRecorded", moved(5.2, rank=0, generation=4)[-1][1]), world=1, hosts=(0,))

    def logs(*, wrong: bool) -> dict[int, list[tuple[float, Event]]]:
        return {
            slot: [
                (0.0, started(rank=slot)),
                *(moved(4.0, rank=slot, **{**fine, "plan": "another"}) if wrong else ()),
                *(e for e in moved(4.2, rank=slot, generation=5, **fine) if wrong and not (slot and is_first(e[1]))),
                *moved(4.5, rank=slot, generation=3, **fine),
                *([(5.2, alone)] if slot == 0 else []),
                *stepped(5.5, rank=slot),
            ]
            for slot in (0, 1)
        }

    def is_first(event: Event) -> bool:
        return isinstance(event, Collective) and event.op_id == "heal/state.plan"

    command = ["simulate", str(recipe), "--cluster", "h100x2", "--against", str(tmp_path)]
    write(tmp_path, logs(wrong=True))
    assert main([*command, "--json", str(tmp_path / "a.json")]) == 2
    said = capsys.readouterr().out
    assert "the same in both; 1 recorded steps" in said and "move heal/state after step 5, 2 ranks, plan" in said
    assert (
        "2 ranks, is not compared: the recipe" in said
        and "makes another plan of the move heal/state after step 5" in said
    )
    assert "move heal/state after step 5, 1 rank, is not compared: one rank alone sends nothing" in said
    assert "rank 1: has no heal/state.plan of the move after step 5" in said
    found = json.loads((tmp_path / "a.json").read_text())
    assert [m["generation"] for m in found["moves"]] == [3] and found["steps"] == 1
    assert [(m["generation"], m["wrong"]) for m in found["moves_not_compared"]] == [(2, True), (4, False), (5, True)]
    write(tmp_path, logs(wrong=False))
    assert main(command) == 0


def test_a_member_tells_of_which_life_of_the_service_its_generation_is() -> None:
    told: list[Event] = []
    telling = Telling(told.append)
    telling.entry = Entry(
        folding="dp2|ep2", plan="ab", built_s=0.1, moved_s=0.1, moved=Moved(received_bytes=0, checked=0)
    )
    telling(Reformed(
        uid="local.0.ab", generation=1, life="cd", members=2, why="", at_s=AT, lost_s=0.0, told_s=0.0, broken_s=0.0, formed_s=0.1, entered_s=0.1, step=0,
    ))  # fmt: skip
    assert [e.life for e in told if isinstance(e, TeamFormed)] == ["cd"]
