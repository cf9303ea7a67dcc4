"""The index of a run says what its logs say, whoever made it, in bounded size; what is damaged, stale or another run's is made anew."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_events import a_run, ended, started
from long_run import write_run

from phalanx.core.events import (
    CheckpointSaved,
    ExpertLoads,
    Note,
    RunEnded,
    TeamFormed,
    TrainingResumed,
    Validated,
    WentBack,
)
from phalanx.observe import JsonlSink, read_history
from phalanx.observe.event_log import encode
from phalanx.observe.index import COLUMNS, KEPT, IndexSink, LogFiles, RunIndex
from phalanx.observe.index.curves import MOST_ROWS, Curves
from phalanx.observe.index.heat import MOST_COLUMNS, HeatMap
from phalanx.observe.index.logs import HEAD_BYTES, MOST_LINE
from phalanx.observe.page.view import peek
from phalanx.observe.recorded import read_run
from phalanx.train import reporting

pytestmark = pytest.mark.unit


def log(folder: Path, *events: Any, rank: int = 0) -> None:
    sink = JsonlSink(folder, rank=rank)
    for event in events:
        sink.write(event)
    sink.close()


def read(folder: Path) -> RunIndex:
    index = RunIndex(folder)
    index.update()
    return index


def curve(index: RunIndex, name: str = "loss") -> dict[int, float]:
    """Steps that the index has, as long as rows are of one step."""
    width, first, _, mean, _, _ = index.curves.joined(10**9)
    assert width == 1
    column = mean[:, COLUMNS.index(name)]
    return {first + i: float(v) for i, v in enumerate(column) if math.isfinite(v)}


def same(a: RunIndex, b: RunIndex) -> None:
    assert a.course.to_json_dict() == b.course.to_json_dict()
    assert (a.last_step, a.missing, a.places, a.shape, a.elastic) == (
        b.last_step,
        b.missing,
        b.places,
        b.shape,
        b.elastic,
    )
    for ours, theirs in zip(a.curves.joined(10**9), b.curves.joined(10**9), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for ours, theirs in ((a.layers, b.layers), (a.experts, b.experts)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert abs(ours.codes().astype(int) - theirs.codes().astype(int)).max(initial=0) <= 1


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_it_says_what_the_log_says(tmp_path: Path) -> None:
    log(tmp_path, *a_run(120, every=40))
    index, history = read(tmp_path), read_history(tmp_path)
    assert curve(index) == pytest.approx({s: r["loss"] for s, r in history.steps.items()})
    assert curve(index, "load") == pytest.approx({s: max(r["load_max_over_mean"]) for s, r in history.steps.items()})
    assert [v["step"] for v in index.course.validations] == [40, 80, 120]
    assert index.course.ended is not None and index.course.ended["reason"] == "finished"
    assert index.tokens == sum(r["tokens"] for r in history.steps.values())
    assert index.layers is not None and index.layers.cells == 4


def test_what_training_went_back_behind_is_void(tmp_path: Path) -> None:
    log(tmp_path, started(), *(ended(s) for s in range(1, 31)), Validated(step=30, loss=9.0, tokens=1, seconds=1.0))
    log(tmp_path, started(step=20), *(ended(s, loss=1.0 + s) for s in range(21, 26)))
    index, history = read(tmp_path), read_history(tmp_path)
    assert curve(index) == pytest.approx({s: r["loss"] for s, r in history.steps.items()})
    assert index.last_step == 25 and index.course.last["loss"] == 26.0 and not index.course.validations
    assert index.tokens == 25 * 8192 == peek(tmp_path, id="x").summary()["tokens"]
    index.save()
    again = RunIndex(tmp_path)
    assert again.load() and again.tokens == 25 * 8192


def test_a_clock_that_was_set_back_voids_nothing_new(tmp_path: Path) -> None:
    """Of one log its order decides."""
    old = [(float(s), ended(s)) for s in range(1, 81)]
    new = [(s - 1000.0, ended(s, loss=1000.0 + s)) for s in range(51, 61)]
    told(tmp_path, (0.0, started()), *old, (80.5, validated(80, 9.0)), (81.0, RunEnded(step=80, reason="interrupted", seconds=1.0)), (-960.0, started(step=50)), *new, (-930.0, validated(60, 2.0)))  # fmt: skip
    index, history = read(tmp_path), read_history(tmp_path)
    assert curve(index) == pytest.approx({s: r["loss"] for s, r in history.steps.items()})
    assert (index.last_step, index.course.last["loss"], index.course.ended) == (60, 1060.0, None)
    assert index.course.started["step"] == 50 and [v["step"] for v in index.course.validations] == [60]
    index.save()
    again = RunIndex(tmp_path)
    assert again.load() and [v["step"] for v in again.course.validations] == [60]


@pytest.mark.parametrize("piece", [300, 5000, 10**9])
def test_an_elastic_run_is_joined_from_all_its_logs(
    tmp_path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slot 0 is away for some steps, which slot 1 tells; then all went back; whatever piece of a log is read at a time."""
    times = iter(range(1, 1000))
    monkeypatch.setattr("phalanx.observe.event_log.time.time", lambda: 1e9 + next(times))
    team = {
        "noticed_s": 0.1,
        "formed_s": 0.1,
        "built_s": 0.0,
        "moved_s": 0.2,
        "checked": 0,
        "folding": "dp2|ep2",
        "members": 2,
        "life": "a",
    }
    sinks = [JsonlSink(tmp_path, rank=rank) for rank in range(2)]

    def tell(event: Any, *who: int) -> None:
        for rank in who:
            sinks[rank].write(event)

    tell(started(rank=0), 0)
    tell(started(rank=1), 1)
    tell(TeamFormed(generation=1, step=0, why="begins", moved_bytes=0, **team), 0, 1)
    for step in range(1, 21):
        tell(ended(step), *((0, 1) if step <= 8 or step > 14 else (1,)))
    tell(TeamFormed(generation=2, step=14, why="lost", moved_bytes=100, **{**team, "moved_s": 0.9}), 1)
    tell(TeamFormed(generation=2, step=14, why="lost", moved_bytes=50, **team), 0)
    tell(WentBack(history=3, step=16, from_step=20, why="all", damaged=(), abandoned=()), 0, 1)
    for step in range(17, 19):
        tell(ended(step, loss=77.0), 0, 1)
    for sink in sinks:
        sink.close()
    monkeypatch.setattr("phalanx.observe.index.logs.CHUNK", piece if piece < 10**9 else 1 << 18)
    index, course = read(tmp_path), read_run(tmp_path)
    assert index.elastic and sorted(course.history.steps) == list(range(1, 19))
    assert curve(index) == pytest.approx({s: r["loss"] for s, r in course.history.steps.items()})
    found = [r for r in index.course.recoveries if r["generation"] == 2]
    assert [(r["moved_bytes"], r["moved_s"]) for r in found] == [(150, 0.9)]
    assert index.last_step == 18 and not index.missing


def told(folder: Path, *events: tuple[float, Any], rank: int = 0) -> None:
    """A log with events at times of their own."""
    path = folder / "events" / f"rank-{rank}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(encode(event, time_s=1e9 + at) for at, event in events))


def formed(generation: int, step: int, *, life: str = "a", **more: Any) -> TeamFormed:
    fields = {"members": 2, "folding": "dp2|ep2", "why": "lost", "moved_bytes": 0, "checked": 0}
    seconds = dict.fromkeys(("noticed_s", "formed_s", "built_s", "moved_s"), 0.0)
    return TeamFormed(**{"generation": generation, "step": step, "life": life, **fields, **seconds, **more})  # type: ignore[arg-type]


def validated(step: int, loss: float) -> Validated:
    return Validated(step=step, loss=loss, tokens=1, seconds=1.0)


def test_a_void_validation_stays_void_when_a_lost_member_tells_it_too(tmp_path: Path) -> None:
    """Slot 1 was lost before all went back to step 50, and its log is read last."""
    before = [(0.0, started()), (0.1, formed(1, 0)), *((float(s), ended(s)) for s in range(1, 61)), (20.5, validated(20, 3.8)), (60.5, validated(60, 3.4))]  # fmt: skip
    back = WentBack(history=2, step=50, from_step=60, why="all", damaged=(), abandoned=())
    told(tmp_path, *before, (70.0, formed(2, 50)), (70.1, back), *((20.0 + s, ended(s)) for s in range(51, 56)))
    told(tmp_path, *before, rank=1)
    index = read(tmp_path)
    assert index.last_step == 55 and [(v["step"], v["loss"]) for v in index.course.validations] == [(20, 3.8)]
    # a step that is validated again has its new loss, though the old one is read later
    told(tmp_path, (0.0, started()), (0.1, formed(1, 0)), (100.0, validated(20, 2.0)))
    assert [(v["step"], v["loss"]) for v in read(tmp_path).course.validations] == [(20, 2.0), (60, 3.4)]


def test_what_several_members_tell_counts_once_and_lies_in_order(tmp_path: Path) -> None:
    """However many they are; slot 0 was away at first, so that its log begins later than the one read after it."""
    for rank in range(3):
        begin = 100 if rank == 0 else 1
        events: list[tuple[float, Any]] = [(begin - 1.0, started(step=begin - 1))]
        for step in range(begin, 301):
            at = step + 0.001 * rank
            events += [(at, ended(step)), (at, validated(step, 5.0 - step / 100)), (at, Note(level="info", text=f"{step}"))]  # fmt: skip
            events += [(at, formed(step, step)), (at, CheckpointSaved(step=step, path="x", bytes=1, blocked_s=0.0, total_s=0.0))]  # fmt: skip
        told(tmp_path, *events, rank=rank)
    course = read(tmp_path).course
    assert [v["step"] for v in course.validations] == list(range(1, 301)) and course.validations[-1]["loss"] == 2.0
    assert [c["step"] for c in course.checkpoints] == list(range(1, 301))
    assert [n["text"] for n in course.notes] == [f"{step}" for step in range(101, 301)], "the newest"
    assert [r["generation"] for r in course.recoveries] == list(range(1, 301))


def test_seconds_of_a_recovery_go_to_the_start_that_took_them(tmp_path: Path) -> None:
    """Every start counts generations from 1."""
    for rank in range(2):
        events: list[tuple[float, Any]] = []
        for begin, life, seconds in ((0.0, "a", 300.0), (1000.0, "b", 1.0)):
            resumed = TrainingResumed(generation=2, step=11, seconds=seconds, since_lost_s=seconds)
            events += [(begin, started()), (begin + 0.1, formed(1, 0, life=life)), (begin + 5, formed(2, 10, life=life)), (begin + 6, resumed)]  # fmt: skip
        told(tmp_path, *events, rank=rank)
    found = [r for r in read(tmp_path).course.recoveries if r["generation"] == 2]
    assert [(r["life"], r["resumed_s"], r["since_lost_s"]) for r in found] == [("a", 300.0, 300.0), ("b", 1.0, 1.0)]


def test_every_start_counts_once(tmp_path: Path) -> None:
    """Also those of the same step; members of an elastic run tell of one a moment apart."""
    starts = [(at, started()) for at in (0.0, 10.0, 20.0)]
    told(tmp_path, *starts, (21.0, ended(1)))
    assert [s["at"] - 1e9 for s in read(tmp_path).course.starts] == [0.0, 10.0, 20.0]
    for rank in range(3):
        told(tmp_path, *((at + rank, event) for at, event in (*starts, (22.0, formed(1, 0)))), rank=rank)
    assert [s["at"] - 1e9 for s in read(tmp_path).course.starts] == [2.0, 12.0, 22.0]


def test_lists_of_an_older_file_are_put_in_order(tmp_path: Path) -> None:
    """It had validations once for each member, void ones too, in the order of the logs, and a sum of tokens."""
    told(tmp_path, (0.0, started()), (0.1, formed(1, 0)), *((float(s), ended(s)) for s in range(1, 6)))
    index = read(tmp_path)
    index.voids.append((1e9 + 3.5, 3))
    index.course.validations = [{"at": 1e9 + at, "step": s, "loss": at, "seconds": 1.0} for s, at in ((4, 4.0), (5, 3.0), (2, 2.0), (2, 1.0))]  # fmt: skip
    index.course.notes = [{"at": 1e9 + at, "level": "info", "text": ""} for at in (2.0, 1.0)]
    made = index.course.to_json_dict()
    index.course.to_json_dict = lambda: {**made, "tokens": 9.0}  # type: ignore[method-assign]
    index.save()
    older = RunIndex(tmp_path)
    assert older.load()
    assert [(v["step"], v["loss"]) for v in older.course.validations] == [(2, 2.0), (4, 4.0)]
    assert [n["at"] - 1e9 for n in older.course.notes] == [1.0, 2.0]


def test_loads_of_experts_are_told_over_the_mean(tmp_path: Path) -> None:
    log(
        tmp_path,
        started(),
        ExpertLoads(step=1, counts=((10, 30), (0, 20))),
        ExpertLoads(step=4, counts=((20, 20), (20, 0))),
    )
    index = read(tmp_path)
    assert index.shape == (2, 2) and index.experts is not None
    np.testing.assert_allclose(index.experts.means()[[0, 3]], [[0.5, 1.5, 0.0, 2.0], [1.0, 1.0, 2.0, 0.0]])
    codes = index.experts.codes()
    assert codes[1].tolist() == [0] * 4 and codes[0, 2] == 1, "not told, and no token, are two things"
    np.testing.assert_allclose(np.exp((codes[0, [0, 1, 3]].astype(float) - 128) / 18), [0.5, 1.5, 2.0], rtol=0.03)


# ---- bounds ----------------------------------------------------------------------------------------------------------


def test_curves_keep_mean_least_and_largest_in_bounded_rows() -> None:
    draw = np.random.default_rng(5)
    steps, curves = MOST_ROWS * 2 + 37, Curves()
    values = draw.normal(size=(steps, len(COLUMNS)))
    values[::7, 3] = np.nan
    for step in range(1, steps + 1):
        curves.add(step, 1.0, values[step - 1].tolist())
    width, first, low, mean, high, _ = curves.joined(100)
    assert curves.width == 4 and len(curves.time_s) <= MOST_ROWS and first == 1 and 50 < len(mean) <= 100
    for i in (0, 17, len(mean) - 1):
        part = values[i * width : (i + 1) * width]
        np.testing.assert_allclose(mean[i], np.nanmean(part, 0), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose([low[i], high[i]], [np.nanmin(part, 0), np.nanmax(part, 0)], rtol=1e-6)
    same_again = curves.joined(100, first=first + 17 * width, width=width)
    np.testing.assert_array_equal(same_again[3], mean[17:])


def test_maps_and_lists_are_bounded(tmp_path: Path) -> None:
    heat = HeatMap(6)
    for step in range(1, 5000):
        heat.add(step, np.full(6, 1.0 + (step > 2500)))
    assert heat.columns <= MOST_COLUMNS
    assert heat.means()[0].tolist() == [1.0] * 6 and heat.means()[-1].tolist() == [2.0] * 6
    log(tmp_path, started(), *(Note(level="info", text=f"{i}" + "x" * 9000) for i in range(KEPT["notes"] + 50)))
    notes = read(tmp_path).course.notes
    assert len(notes) == KEPT["notes"] and notes[-1]["text"].startswith("249") and len(notes[-1]["text"]) <= 2000


def test_numbers_and_lines_that_cannot_be_break_nothing(tmp_path: Path) -> None:
    log(tmp_path, started(), *(ended(s) for s in range(1, 6)))
    path = tmp_path / "events" / "rank-0.jsonl"
    bad = [
        b"null", b"\xff", b"[" * 3000, b'{"kind":"StepEnded"}', b'{"kind":"StepEnded","time_s":"x","step":6}', b'{"kind":"Note","time_s":NaN}',
        b'{"kind":"StepEnded","time_s":2e9,"step":true}', b'{"kind":"StepEnded","time_s":2e9,"step":-1,"loss":1}', b'{"kind":"StepEnded","time_s":2e9,"step":1' + b"0" * 40 + b"}",
        b'{"kind":"ExpertLoads","time_s":2e9,"step":1,"counts":[[1],[2,3]]}', b'{"kind":"ExpertLoads","time_s":2e9,"step":1,"counts":[["x"]]}', b'{"kind":"WentBack","time_s":2e9,"step":"x"}',
        b'{"kind":"Note","time_s":2e9,"text":"' + b"y" * (2 * MOST_LINE) + b'"}', b'{"kind":"RunStarted","time_s":2e9,"step":1e400}',
    ]  # fmt: skip
    path.write_bytes(
        path.read_bytes()
        + b"\n".join(bad)
        + b'\n{"kind":"StepEnded","time_s":2000000001,"step":6,"loss":3.5}\n{"kind":"StepEn'
    )
    index = read(tmp_path)
    assert index.last_step == 6 and curve(index)[6] == 3.5 and index.course.broken >= 5
    json.dumps(index.course.to_json_dict(), allow_nan=False)
    with path.open("ab") as file:
        file.write(b'ded","time_s":2000000002,"step":7,"loss":4.5}\n')
    assert index.update() and curve(index)[7] == 4.5, "a torn line is waited for"


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    log(other, started(), ended(1))
    (run / "events").mkdir(parents=True)
    (run / "events" / "rank-0.jsonl").symlink_to(other / "events" / "rank-0.jsonl")
    os.mkfifo(run / "events" / "rank-1.jsonl")
    index = read(run)
    assert index.last_step == 0 and not index.places
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "events").symlink_to(other / "events")
    with pytest.raises(OSError):
        read(linked)
    (run / "events" / "index").symlink_to(tmp_path / "target")
    index.save()
    assert not (tmp_path / "target").exists(), "the link was replaced, not written through"


# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_file_says_the_same_and_is_read_on_from(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=700, ranks=3, elastic=True)
    made = read(folder)
    made.save()
    loaded = RunIndex(folder)
    assert loaded.load()
    same(loaded, made)
    assert not loaded.update(), "there is nothing that it has not read"
    with (folder / "events" / "rank-0.jsonl").open("ab") as file:
        file.write(b'{"kind":"StepEnded","time_s":2000000001,"step":701,"loss":3.5}\n')
    assert loaded.update() and loaded.last_step == 701
    same(loaded, read(folder))


def test_a_damaged_file_is_not_believed(tmp_path: Path) -> None:
    log(tmp_path, *a_run(60), ExpertLoads(step=9, counts=((1, 2), (3, 4))))
    index = read(tmp_path)
    index.save()
    data, draw = index.path.read_bytes(), random.Random(3)
    places = [0, 5, 16, 25, 40, len(data) // 2, len(data) - 1, *(draw.randrange(len(data)) for _ in range(40))]
    for place in places:
        changed = bytearray(data)
        changed[place] ^= 1 << draw.randrange(8)
        index.path.write_bytes(changed)
        fresh = RunIndex(tmp_path)
        assert not fresh.load(), place
        assert fresh.update() and fresh.last_step == 60
    for cut in (0, 10, 200, len(data) - 3):
        index.path.write_bytes(data[:cut])
        assert not RunIndex(tmp_path).load()


def test_a_file_that_lies_about_its_sizes_is_refused(tmp_path: Path) -> None:
    """Its checksum is right: whoever made it knew ours."""
    import zlib

    log(tmp_path, *a_run(60))
    index = read(tmp_path)
    index.save()
    line, _, body = index.path.read_bytes().partition(b"\n")
    length = int(line.split()[2])
    head = json.loads(body[:length])
    for change in (
        {"parts": {**head["parts"], "curves": [{**head["parts"]["curves"][0], "rows": 10**9}, head["parts"]["curves"][1]]}},
        {"parts": {**head["parts"], "layers": [{"cells": 10**9, "width": 1, "counts": [1]}, 0]}},
        {"course": {**head["course"], "notes": "x"}}, {"course": {**head["course"], "recoveries": [{"at": 1}]}}, {"course": {**head["course"], "notes": [{"at": 1, "level": "x" * 9999, "text": ""}]}},
        {"course": {**head["course"], "validations": [{"at": None, "step": 1, "loss": 1, "seconds": 1}]}}, {"course": {}}, {"shape": [9, 9]}, {"logs": {"../../etc/passwd": [0, False, ""]}}, {"missing": None}, {"last_step": "x"},
    ):  # fmt: skip
        text = json.dumps({**head, **change}).encode()
        rest = text + body[length:]
        index.path.write_bytes(f"phalanx-index-1 {zlib.crc32(rest):08x} {len(text)}\n".encode() + rest)
        assert not RunIndex(tmp_path).load(), change


def test_an_index_of_another_log_is_not_believed(tmp_path: Path) -> None:
    log(tmp_path, *a_run(60))
    read(tmp_path).save()
    path = tmp_path / "events" / "rank-0.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    assert not RunIndex(tmp_path).load(), "the log is shorter"
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:1]) + data.replace(b'"loss":5', b'"loss":6'))
    assert not RunIndex(tmp_path).load(), "the log is another one"
    followed = read(tmp_path)
    path.write_bytes(data[: len(data) // 3])
    followed.update()
    followed.update()
    same(followed, read(tmp_path))


def test_a_log_that_is_replaced_by_a_longer_one_is_read_anew(tmp_path: Path) -> None:
    """Read on from its middle, it would keep the losses of the other run. One that was copied whole and goes on is the same."""
    log(tmp_path, *a_run(30))
    path = tmp_path / "events" / "rank-0.jsonl"
    data, followed = path.read_bytes(), read(tmp_path)
    copied = path.with_name("copy")
    copied.write_bytes(data + encode(ended(31), time_s=2e9))
    os.replace(copied, path)
    revised = followed.revised
    assert followed.update() and (followed.last_step, followed.revised) == (31, revised), "it was read on"
    of_others = [encode(ended(step, loss=99.0), time_s=2e9) for step in range(1, 80)]
    begin = encode(started(), time_s=1e9)
    alike = begin + of_others[0] * (HEAD_BYTES // len(of_others[0]) + 1)
    for first in (begin, alike):  # another first line, and another middle
        if first is alike:
            path.write_bytes(alike + data)
            followed = read(tmp_path)
        path.write_bytes(first + b"".join(of_others))
        followed.update()
        followed.update()
        assert set(curve(followed).values()) == {99.0} and followed.last_step == 79
        same(followed, read(tmp_path))


# ---- beside training -------------------------------------------------------------------------------------------------


def test_rank_0_keeps_it_while_the_run_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexSink, "PAUSE_S", 0.01)
    monkeypatch.setattr(IndexSink, "LEAST_S", 0.0)
    lines, sink = JsonlSink(tmp_path, rank=0), IndexSink(tmp_path)
    for event in a_run(80):
        lines.write(event)
        sink.write(event)
    sink.close()
    index = RunIndex(tmp_path)
    assert index.load() and index.last_step == 80 and index.course.ended is not None
    assert not index.update()


def test_an_index_that_cannot_be_written_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IndexSink, "PAUSE_S", 0.01)
    lines, sink = JsonlSink(tmp_path, rank=0), IndexSink(tmp_path)

    def refuse(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("phalanx.observe.index.kept.os.replace", refuse)
    for event in a_run(20):
        lines.write(event)
        sink.write(event)
    sink.close()
    assert sorted(p.name for p in (tmp_path / "events").iterdir()) == ["rank-0.jsonl"], "nothing is left behind"


def test_work_is_given_up_between_pieces_and_nothing_is_lost(tmp_path: Path) -> None:
    from phalanx.observe.index.kept import _work

    folder = write_run(tmp_path / "run", steps=1500, ranks=1)
    index, turns = RunIndex(folder), 0
    while index.last_step < 1500 and turns < 100:
        _work(index, 0.0)
        turns += 1
    assert turns > 2
    same(index, read(folder))


def test_loads_are_told_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """About 500 times while the age of the process grows by a factor of e."""
    told: list[Any] = []
    now = [0.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now[0])
    reporter = SimpleNamespace(
        _begin_s=0.0, _loads_s=-math.inf, rank=SimpleNamespace(sinks=told.append), progress=SimpleNamespace(step=3)
    )
    result = SimpleNamespace(counts_LE=np.array([[1, 2], [3, 4]]))
    while now[0] < 200_000:
        reporting.Reporter._tell_loads(reporter, result)  # type: ignore[arg-type]
        now[0] += 1.0
    assert told[0] == ExpertLoads(step=3, counts=((1, 2), (3, 4)))
    assert 500 + 500 * math.log(200_000 / 2500) == pytest.approx(len(told), rel=0.02)


def test_the_middle_of_a_log_is_found_by_its_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3000, ranks=1)
    files = LogFiles(folder)
    lines = (folder / "events" / "rank-0.jsonl").read_bytes().splitlines(keepends=True)
    offsets = np.cumsum([0, *map(len, lines)])
    for number in (0, 1, 777, 3001, len(lines) - 1):
        time_s = json.loads(lines[number])["time_s"]
        found = files.offset_at("rank-0.jsonl", time_s)
        assert found <= offsets[number] and offsets[number] - found < 100_000
        assert found in offsets, "at the beginning of a line"


def test_ends_of_members_do_not_end_the_run(tmp_path: Path) -> None:
    log(tmp_path, started(), ended(1), RunEnded(step=1, reason="left", seconds=1.0), ended(2))
    assert read(tmp_path).course.ended is None


@pytest.mark.parametrize("error", ["ConfigError", "CheckpointError", "DataError", "FinalError"])
def test_a_start_that_is_refused_leaves_the_run_as_it_was(error: str, tmp_path: Path) -> None:
    refused = RunEnded(step=0, reason=f"{error}: 1 problem with what it found:", seconds=1.0)
    log(tmp_path, refused)
    assert read(tmp_path).course.ended["reason"] == read_history(tmp_path).ended["reason"] == refused.reason  # type: ignore[index]
    log(tmp_path, started(), ended(1), RunEnded(step=1, reason="finished", seconds=1.0), refused)
    assert read(tmp_path).course.ended["reason"] == read_history(tmp_path).ended["reason"] == "finished"  # type: ignore[index]
    log(tmp_path, started(), ended(2), refused)  # not at its start
    assert read(tmp_path).course.ended["reason"] == read_history(tmp_path).ended["reason"] == refused.reason  # type: ignore[index]
    log(tmp_path, RunEnded(step=1, reason="RunError: no room", seconds=1.0))
    assert read(tmp_path).course.ended["reason"] == read_history(tmp_path).ended["reason"] == "RunError: no room"  # type: ignore[index]
