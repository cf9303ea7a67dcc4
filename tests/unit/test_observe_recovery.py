"""An elastic run, read back from hand-made logs of its members: one course, recoveries, steps taken twice, a trace."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_events import ended, started
from test_trace import arrows_of, problems_of

from phalanx.cli.main import main
from phalanx.core.events import (
    Collective,
    Event,
    Note,
    Operation,
    RunEnded,
    StepRecorded,
    TeamFormed,
    TrainingResumed,
    WentBack,
)
from phalanx.observe.event_log import encode, log_path
from phalanx.observe.metrics import samples
from phalanx.observe.recorded.lanes import read_recording
from phalanx.observe.recorded.recovery import LOOK_BYTES, read_run, recovery_spans, recovery_trace

AT = 1_800_000_000.0


def formed(generation: int, step: int, **more: Any) -> TeamFormed:
    fields = {
        "members": 3, "folding": "dp3|ep1", "why": "local.0.ab: killed by SIGKILL", "noticed_s": 0.05, "formed_s": 0.02, "built_s": 0.03,
        "moved_s": 0.04, "moved_bytes": 1000, "checked": 7,
    }  # fmt: skip
    return TeamFormed(generation=generation, step=step, **{**fields, **more})


def write(folder: Path, logs: dict[int, list[tuple[float, Event]]]) -> Path:
    for slot, told in logs.items():
        path = log_path(folder, slot)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(encode(event, time_s=AT + at) for at, event in told))
    return folder


def a_run(folder: Path) -> Path:
    """Slot 0 dies after step 3 and comes back at step 5; all state is lost after step 6, and the run goes back to step 4."""
    first = formed(1, 0, members=2, why="the run begins", noticed_s=0.0, moved_bytes=0)
    lost = {"lost_s": AT + 3.5, "told_s": 0.01}
    back = WentBack(history=4, step=4, from_step=6, why="nobody holds it", damaged=(), abandoned=("step-00000008",))
    again = formed(4, 4, members=2, why="local.1.cd: killed by SIGKILL")
    return write(
        folder,
        {
            0: [(0.0, started()), (0.1, first), *((s, ended(s)) for s in (1, 2, 3)),
                (4.9, started(step=4)), (5.0, formed(3, 4, why="ready to join", moved_bytes=5000, noticed_s=0.0)), (5.5, ended(5)),
                (6.0, ended(6)), (6.2, Note(level="warning", text="goes back")), (6.3, back), (6.4, started(step=4)), (6.5, again), (7, ended(5, loss=1.0))],
            1: [(0.0, started(rank=1)), (0.1, first), *((s, ended(s)) for s in (1, 2, 3)),
                (3.7, formed(2, 3, members=1, moved_bytes=0, **lost)), (4.0, ended(4)),
                (4.01, TrainingResumed(generation=2, step=4, seconds=0.4, since_lost_s=0.5)),
                (5.02, formed(3, 4, why="ready to join", moved_bytes=0, moved_s=0.06)), (5.51, ended(5)), (6.01, ended(6)),
                (6.21, Note(level="warning", text="goes back")), (6.31, back), (6.5, again), (7.01, ended(5, loss=1.0)),
                (8.0, RunEnded(step=5, reason="interrupted", seconds=8.0))],
        },
    )  # fmt: skip


@pytest.mark.unit
def test_a_run_that_became_elastic_later(tmp_path: Path) -> None:
    """It began under a launcher that starts and ends its ranks, with more steps than a look at the beginning sees, and was resumed by one that heals."""
    steps = [(s / 1000, ended(s)) for s in range(1, 301)]
    first, lost = formed(1, 300, members=2, why="the run begins", moved_bytes=0), formed(2, 301, members=1)
    both: list[tuple[float, Event]] = [(0.0, started()), *steps[:200], (0.2005, started(step=200)), *steps[200:],
                                       (1.0, started(step=300)), (1.1, first), (1.2, ended(301))]  # fmt: skip
    folder = write(tmp_path, {0: [*both, (1.3, lost), (1.4, ended(302))], 1: both})
    assert log_path(folder, 0).stat().st_size > 2 * LOOK_BYTES
    course = read_run(folder)
    assert [r.generation for r in course.recoveries] == [2] and len(course.history.steps) == 302
    assert course.history.starts == 3


@pytest.mark.unit
def test_all_logs_make_one_course(tmp_path: Path) -> None:
    course = read_run(a_run(tmp_path))
    assert sorted(course.history.steps) == [1, 2, 3, 4, 5] and course.history.steps[5]["loss"] == 1.0
    assert course.history.starts == 1 and len(course.history.notes) == 1 and course.history.ended is not None
    first, join, third = course.recoveries
    assert (first.generation, first.members, first.since_lost_s, first.resumed_s) == (2, 1, 0.5, 0.4)
    assert (join.moved_bytes, join.moved_s, join.resumed_s) == (5000, 0.06, None)
    assert third.generation == 4
    (back,) = course.rollbacks
    assert (back.step, back.last, back.abandoned) == (4, 6, ("step-00000008",))
    assert "the samples of steps 5 to 6 were taken twice" in back.explain()


@pytest.mark.unit
def test_starts_of_a_run_are_lives_of_its_service_that_count_anew(tmp_path: Path) -> None:
    """The service of the first start loses what it knew; of the third start nobody lived to tell of generation 1."""
    at = ((1.0, 1, "ab"), (2.0, 2, "ab"), (3.0, 3, "cd"), (4.0, 1, "ef"), (5.0, 2, "ef"), (6.0, 2, "gh"))
    told: list[tuple[float, Event]] = [(at_s, formed(n, int(at_s), life=life)) for at_s, n, life in at]
    course = read_run(write(tmp_path, {0: told, 1: [(at_s + 0.1, event) for at_s, event in told]}))
    assert course.history.starts == 3
    assert [(r.generation, r.step, r.moved_bytes) for r in course.recoveries] == [
        (2, 2, 2000), (3, 3, 2000), (2, 5, 2000), (2, 6, 2000)
    ]  # fmt: skip


@pytest.mark.unit
def test_metrics_shows_failures_and_what_was_done_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path)
    assert main(["metrics", str(tmp_path), "--json", str(tmp_path / "f.json")]) == 0
    shown = capsys.readouterr().out
    assert "laptop: 5 of 300 steps (interrupted, 1 start)" in shown
    assert "3 new generations, 1 after a loss, 500 ms (median; at most 500 ms) from a loss to the next step" in shown
    assert "after step 3: local.0.ab: killed by SIGKILL; 1 member (dp3|ep1): told in 10.0 ms" in shown
    assert "went back to the checkpoint of step 4" in shown
    found = json.loads((tmp_path / "f.json").read_text())
    assert [r["generation"] for r in found["recoveries"]] == [2, 3, 4] and found["rollbacks"][0]["last"] == 6


@pytest.mark.unit
def test_one_log_can_still_be_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path)
    assert main(["metrics", str(tmp_path), "--rank", "1"]) == 0
    assert "new generation" not in capsys.readouterr().out


@pytest.mark.unit
def test_recoveries_are_spans_of_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = recovery_trace("run", recovery_spans(a_run(tmp_path)))
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for span in spans:
        lanes.setdefault((span["pid"], span["tid"]), []).append((span["ts"], span["ts"] + span["dur"]))
    for times in lanes.values():
        times.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(times)), "spans of one lane do not overlap"
    names = [s["name"] for s in spans if s["pid"] == 1]
    assert names[:6] == ["told", "wait for the generation", "connect", "build", "move state", "first step"]
    assert main(["trace", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "3 recoveries" in said and "no steps were recorded" in said and (tmp_path / "trace.json").exists()
    assert recovery_spans(write(tmp_path / "calm", {0: [(0.0, started()), (1.0, ended(1))]})) == []
    assert main(["trace", str(tmp_path), "--steps", "3"]) == 2
    assert "observe.trace_steps was not set" in capsys.readouterr().err


def recorded(
    step: int, at: float, *, rank: int, generation: int, committed: bool = True, peer: int = 1
) -> list[tuple[float, Event]]:
    """0.4 s of one step: something computed, something that rank 0 sends to the other, the wait for the decision."""
    ends: Any = {"sends_to": (peer,)} if rank == 0 else {"receives_from": (0,)}
    events: list[Event] = [
        Operation(op_id="mb0.L0.fwd.experts", lane="compute", begin_s=AT + at, end_s=AT + at + 0.1),
        Collective(
            op_id="mb0.fwd.boundary0", op="exchange", axis="pp", size=2, sent_bytes=10, begin_s=AT + at + 0.1 + 0.05 * rank, end_s=AT + at + 0.3,
            waited_s=0.1, ranks=(0, 1), **ends,
        ),
        StepRecorded(
            step=step, begin_s=AT + at, end_s=AT + at + 0.4, rank=rank, generation=generation, committed=committed, voted_s=AT + at + 0.3,
            decided_s=AT + at + 0.35,
        ),
    ]  # fmt: skip
    return [(at + 0.4, event) for event in events]


@pytest.mark.unit
def test_steps_of_several_generations_are_lanes_of_slots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Slots 0 and 1 are ranks 0 and 1; slot 0 dies in step 6, and slots 1 and 2 are ranks 0 and 1 of the second generation, which repeats it."""
    first = formed(1, 4, members=2, why="the run begins", noticed_s=0.0, moved_bytes=0)
    second = formed(2, 5, members=2, lost_s=AT + 5.6, told_s=0.01)
    write(
        tmp_path,
        {
            0: [(4.0, started(step=4)), (4.1, first), *recorded(5, 4.5, rank=0, generation=1)],
            1: [(4.0, started(rank=1, step=4)), (4.1, first), *recorded(5, 4.5, rank=1, generation=1),
                *recorded(6, 5.3, rank=1, generation=1, committed=False), (6.0, second), *recorded(6, 6.1, rank=0, generation=2),
                (6.6, TrainingResumed(generation=2, step=6, seconds=0.9, since_lost_s=1.0))],
            2: [(6.0, started(rank=1, step=5)), (6.0, second), *recorded(6, 6.1, rank=1, generation=2)],
        },
    )  # fmt: skip
    recording = read_recording(tmp_path)
    assert {slot: sorted(steps) for slot, steps in recording.ranks.items()} == {0: [5], 1: [5, 6], 2: [6]}
    assert [(s.step, s.generation, s.rank) for s in recording.given_up[1]] == [(6, 1, 1)] and recording.is_elastic
    assert main(["trace", str(tmp_path)]) == 0
    assert "1 recoveries" in capsys.readouterr().out
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert problems_of(trace) == []
    drawn = {(e["pid"], e["name"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert {(1, "step 6, given up"), (1, "step 6"), (2, "step 6"), (1, "decision"), (1, "move state")} <= drawn
    assert (0, "step 6") not in drawn
    boundary = "mb0.fwd.boundary0"
    assert {a for a in arrows_of(trace) if a[0] == "sent"} == {
        ("sent", f"{n} {boundary}", f"{n + 1} {boundary}") for n in (0, 1)
    }
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"} == {
        "slot 0",
        "slot 1",
        "slot 2",
    }
    assert main(["trace", str(tmp_path), "--summary", "--json", str(tmp_path / "f.json")]) == 0
    assert "moved in 40.0 ms, next step after 900 ms" in capsys.readouterr().out
    found = json.loads((tmp_path / "f.json").read_text())
    assert found["steps"] == [5, 6] and [r["generation"] for r in found["recoveries"]] == [2]


@pytest.mark.unit
def test_what_a_way_back_makes_void_is_not_summed(tmp_path: Path) -> None:
    """Slot 0 hears of the way back; slot 1 was lost before it, and what it said of step 6 is of the old history."""
    first = formed(1, 4, members=2, why="the run begins")
    back = WentBack(history=2, step=5, from_step=6, why="nobody holds it", damaged=(), abandoned=())
    logs: dict[int, list[tuple[float, Event]]] = {
        n: [(4.0, started(rank=n, step=4)), (4.1, first), *recorded(6, 4.5, rank=n, generation=1)] for n in (0, 1)
    }
    logs[0] += [
        (5.0, back),
        (5.1, started(step=5)),
        (5.2, formed(2, 5, members=1)),
        *recorded(6, 5.3, rank=0, generation=2),
    ]
    recording = read_recording(write(tmp_path, logs))
    assert {slot: [s.generation for s in steps.values()] for slot, steps in recording.ranks.items()} == {0: [2]}
    assert {slot: [s.generation for s in steps] for slot, steps in recording.given_up.items()} == {0: [1], 1: [1]}
    for n in (0, 1):  # another start of the program
        logs[n] += [
            (9.0, started(rank=n, step=5)),
            (9.1, replace(first, life="cd")),
            *recorded(6, 9.2, rank=n, generation=1),
        ]
    recording = read_recording(write(tmp_path, logs))
    assert recording.given_up == {} and recording.ranks[1][6].begin_s == AT + 9.2


@pytest.mark.unit
def test_recoveries_have_metrics_and_the_first_team_has_none() -> None:
    names = {s.metric.name: s.value for s in samples(formed(2, 3, lost_s=AT, told_s=0.01))}
    assert names["recovery/told_s"] == 0.01 and names["recovery/moved_bytes"] == 1000
    first = [s.metric.name for s in samples(formed(1, 0))]
    assert first == ["team/members"]
    resumed = TrainingResumed(generation=2, step=4, seconds=0.4, since_lost_s=0.5)
    assert {s.tag: s.value for s in samples(resumed)} == {"recovery/resumed_s": 0.4, "recovery/since_lost_s": 0.5}
