"""The event log survives whatever ends a process, and a reader of it is never confused by how the process ended."""

import json
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
from fake_events import a_run, ended, started, went_back

from phalanx.core.errors import DataError
from phalanx.core.events import Note, RunEnded, Sampled, Validated
from phalanx.observe.event_log import JsonlSink, encode, log_path, read_events, read_history

pytestmark = pytest.mark.unit


def write(folder: Path, *events: object, rank: int = 0) -> None:
    sink = JsonlSink(folder, rank=rank)
    for event in events:
        sink.write(event)  # type: ignore[arg-type]
    sink.close()


def test_every_event_is_a_line_with_kind_and_time(tmp_path: Path) -> None:
    before = time.time()
    write(tmp_path, *a_run(10), rank=3)
    assert log_path(tmp_path, 3) == tmp_path / "events" / "rank-3.jsonl"
    records = list(read_events(log_path(tmp_path, 3)))
    assert [r["kind"] for r in records] == ["RunStarted", *["StepEnded"] * 10, "RunEnded"]
    assert records[4]["step"] == 4 and records[4]["load_max_over_mean"] == list(ended(4).load_max_over_mean)
    assert before - 1 <= records[0]["time_s"] <= time.time() + 1


def test_lines_are_json_whatever_the_numbers(tmp_path: Path) -> None:
    event = ended(1, loss=float("nan"), grad_norm=float("inf"), load_max_over_mean=(1.0, float("nan")))
    record = json.loads(encode(event, time_s=1.5), parse_constant=pytest.fail)
    assert (record["loss"], record["grad_norm"], record["load_max_over_mean"]) == (None, None, [1.0, None])
    text = 'quote " newline \n \u2028 \U0001f600'
    assert encode(Note(level="info", text=text), time_s=0).count(b"\n") == 1
    write(tmp_path, Note(level="info", text=text))
    assert next(read_events(log_path(tmp_path, 0)))["text"] == text


def test_a_torn_last_line_is_left_out_and_cut_off_by_the_next_process(tmp_path: Path) -> None:
    write(tmp_path, started(), ended(1))
    path = log_path(tmp_path, 0)
    whole = path.read_bytes()
    for torn in (b"{", encode(ended(2), time_s=0)[:-1], b"x" * 200_000):
        path.write_bytes(whole + torn)
        assert [r["kind"] for r in read_events(path)] == ["RunStarted", "StepEnded"]
        write(tmp_path)
        assert path.read_bytes() == whole
    write(tmp_path, ended(2))
    assert [r.get("step") for r in read_events(path)] == [0, 1, 2]
    path.write_bytes(b"torn")
    write(tmp_path)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line", [b"{]\n", b"3\n", b'{"step": 1}\n', b'{"kind": "StepEnded", "step": 1}\n', b"\xff\n", b"\n"]
)
def test_a_broken_line_in_the_middle_is_named(line: bytes, tmp_path: Path) -> None:
    write(tmp_path, started())
    path = log_path(tmp_path, 0)
    path.write_bytes(path.read_bytes() + line + encode(ended(1), time_s=0))
    with pytest.raises(DataError) as caught:
        list(read_events(path))
    (problem,) = caught.value.problems
    assert (problem.where, problem.rule) == (f"{path}:2", "is not an event")


def test_a_run_without_a_log_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rank-0.jsonl: cannot be read: No such file or directory; give the folder"):
        read_history(tmp_path)


def test_kill_9_loses_at_most_the_line_being_written(tmp_path: Path) -> None:
    """A child tells through a pipe what it has logged; after SIGKILL at a random moment all of that is in the log."""
    rng = random.Random(1)
    for round_number in range(5):
        folder = tmp_path / str(round_number)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            sink = JsonlSink(folder, rank=0)
            for step in range(1, 1_000_000):
                sink.write(ended(step))
                os.write(writer, step.to_bytes(8, "big"))
        os.close(writer)
        told = int.from_bytes(os.read(reader, 8), "big")  # it has begun, however busy the machine is
        time.sleep(0.02 + rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while chunk := os.read(reader, 8):
            told = int.from_bytes(chunk, "big")
        os.close(reader)
        steps = [r["step"] for r in read_events(log_path(folder, 0))]
        assert told >= 1 and steps == list(range(1, len(steps) + 1)) and len(steps) >= told


def test_a_full_disk_leaves_whole_lines_and_the_log_goes_on_when_there_is_room(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, rank=0)
    sink.write(ended(1))
    path = log_path(tmp_path, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            sink.write(ended(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [r["step"] for r in read_events(path)] == [1]
    sink.write(ended(3))
    sink.close()
    assert [r["step"] for r in read_events(path)] == [1, 3]


def test_history_forgets_what_training_went_back_behind(tmp_path: Path) -> None:
    first = [started(), *(ended(s) for s in range(1, 8)), Validated(step=6, loss=9.0, tokens=1, seconds=1.0)]
    write(tmp_path, *first)  # killed after step 7; its newest checkpoint was that of step 4
    again = [
        started(step=4),
        *(ended(s, loss=1.0) for s in range(5, 7)),
        RunEnded(step=6, reason="interrupted", seconds=1.0),
    ]
    write(tmp_path, *again, Sampled(step=6, prompt="a", text="b"), Note(level="warning", text="w"))
    history = read_history(tmp_path)
    assert sorted(history.steps) == [1, 2, 3, 4, 5, 6]
    assert [history.steps[s]["loss"] == 1.0 for s in (4, 5, 6)] == [False, True, True]
    assert history.validations == {} and history.starts == 2 and history.started["step"] == 4
    assert history.ended is not None and history.ended["reason"] == "interrupted"
    assert history.samples[0]["text"] == "b" and history.notes[0]["text"] == "w"
    write(tmp_path, started(step=6))
    assert read_history(tmp_path).ended is None
    write(
        tmp_path, ended(7), ended(8), Validated(step=8, loss=9.0, tokens=1, seconds=1.0), went_back(8, to=5), ended(6)
    )
    history = read_history(tmp_path)
    assert sorted(history.steps) == [1, 2, 3, 4, 5, 6] and history.validations == {} and history.starts == 3
    write(tmp_path, RunEnded(step=0, reason="StaleMember: it was excluded", seconds=1.0), ended(8))
    assert (
        read_history(tmp_path).ended is None
    )  # one that the others went on without: its place was taken before it ended


@pytest.mark.parametrize(
    "change", [{"step": "1"}, {"step": None}, {"step": 10**30}, {"tokens": 1.5}, {"tokens_per_s": None}, {"load_max_over_mean": 3}, {"load_max_over_mean": ["a"]}, {"time_s": None}, {"slowness": "x"}]
)  # fmt: skip
def test_a_field_of_another_type_is_no_event(change: dict[str, object], tmp_path: Path) -> None:
    record = {**json.loads(encode(ended(1), time_s=1.0)), **change}
    log_path(tmp_path, 0).parent.mkdir()
    log_path(tmp_path, 0).write_text(json.dumps(record) + "\n")
    with pytest.raises(DataError, match=r"rank-0.jsonl:1 = .*is not an event"):
        list(read_events(log_path(tmp_path, 0)))


def test_numbers_that_were_not_finite_and_what_steers_a_terminal(tmp_path: Path) -> None:
    write(
        tmp_path,
        ended(1, loss=float("nan"), load_max_over_mean=(1.0, float("nan"))),
        Note(level="info", text="a\x1b[2Jb\x9b\u202e\nc"),
    )
    step, note = read_events(log_path(tmp_path, 0))
    assert step["loss"] is None and step["load_max_over_mean"][1] != step["load_max_over_mean"][1]
    assert note["text"] == "a\\x1b[2Jb\\x9b\\x202e\nc"
