"""A recorded step as lanes for the page: what each rank computed, when it stood waiting, and which messages were under way behind its work.

Decides which part of the logs is read (the lines around the step, found by their times, and no more than `MOST_BYTES` of each log) and how much is drawn. Spans of one lane do not overlap:
a message is cut into the part that something hid and the part for which the rank waited.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.core.errors import DataError, Problem, printable
from phalanx.observe import Record, read_line
from phalanx.observe.index import LogFiles
from phalanx.observe.recorded import (
    RankStep,
    Recording,
    by_axis,
    by_layer,
    innermost,
    recording_of,
    subtract,
    union,
)

AROUND_S = 20.0
"""How long before and after a step its lines are looked for: clocks of machines differ."""
MOST_BYTES = 32 << 20
MOST_LOGS = 512
MOST_SPANS = 20_000
PARTS = (b'{"kind":"Operation"', b'{"kind":"Collective"')
WHOLES = (b'{"kind":"StepRecorded"', b'{"kind":"StepPublished"', b'{"kind":"MoveRecorded"')
"""What the parts before it are of."""
STARTS = (b'{"kind":"ClockCompared"', b'{"kind":"RunStarted"')
COMPUTE, WAITING, HIDDEN = range(3)
"""Kinds of spans."""


def step_lanes(folder: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """The step of `entry` (of `RunCourse.recorded`) for the page; `problem` says why there is nothing to draw. Raises `OSError`."""
    files, step = LogFiles(folder), round(entry["step"])
    begin_s, end_s = float(entry.get("begin_s") or entry["at"]) - AROUND_S, entry["at"] + AROUND_S
    names = [name for name in files.names() if name.startswith("rank-")][:MOST_LOGS]
    logs = {int(name[5:-6]): _records(files, name, step, begin_s=begin_s, end_s=end_s) for name in names}
    found = recording_of(folder, logs, first=step, last=step)
    if isinstance(found, Problem):
        return {"problem": "the lines of this step are not in the logs any more"}
    return drawn(found, step)


def _records(files: LogFiles, name: str, step: int, *, begin_s: float, end_s: float) -> Iterator[Record]:
    """Events of that step, and of the move before it, among those of that time. Broken lines are left out, and those of other steps are not even parsed."""
    parts: list[bytes] = []
    for line in files.lines_from(name, files.offset_at(name, begin_s), most=MOST_BYTES):
        if line.startswith(PARTS):
            parts.append(line)
        elif line.startswith((*WHOLES, *STARTS)):
            record = _parsed(files, name, line)
            if record is not None and record["time_s"] > end_s:
                return
            if record is not None and (line.startswith(STARTS) or record["step"] in (step, step - 1)):
                yield from filter(None, (_parsed(files, name, part) for part in parts))
                yield record
            parts = []


def _parsed(files: LogFiles, name: str, line: bytes) -> Record | None:
    try:
        return read_line(files.folder / "events" / name, 0, line)
    except DataError:
        return None


def drawn(recording: Recording, step: int) -> dict[str, Any]:
    """Lanes of all ranks that can be drawn, and what communication cost."""
    steps = {log: own[step] for log, own in recording.ranks.items() if step in own}
    if not steps:
        return {"problem": "this step was given up, or its lines are not in the logs any more"}
    begin_s, spans = min(s.begin_s for s in steps.values()), 0
    ranks: list[dict[str, Any]] = []
    for log, own in sorted(steps.items(), key=lambda item: item[1].rank):
        lanes = rank_lanes(own, begin_s)
        spans += sum(len(lane["spans"]) for lane in lanes)
        if spans > MOST_SPANS and ranks:
            break
        host = recording.hosts.get(log)
        ranks.append(
            {"rank": own.rank, "log": log, "host": None if host is None else printable(host[:80]), "lanes": lanes}
        )
    exposed = [
        {"what": f"layer {layer} {way}", **cost.to_json_dict()} for (layer, way), cost in by_layer(recording).items()
    ]
    exposed += [
        {"what": f"axis {printable(axis[:40])}", **cost.to_json_dict()} for axis, cost in by_axis(recording).items()
    ]
    return {
        "step": step, "seconds": max(s.end_s for s in steps.values()) - begin_s, "ranks": ranks, "left_out": len(steps) - len(ranks),
        "clock_error_s": max(recording.clock_error_s.values(), default=0.0), "exposure": exposed[:400],
    }  # fmt: skip


def rank_lanes(own: RankStep, origin_s: float) -> list[dict[str, Any]]:
    """Lanes of one rank: `spans` are [begin, length (both us), kind, number of the name in `names`]."""
    waits = [((m.wait_s, m.end_s), m.op_id or m.op) for m in own.messages if m.waited_s > 0]
    waits += [((w.begin_s, w.end_s), w.op_id) for w in own.work if w.lane == "wait"]
    stood = union(at for at, _ in waits)
    work = [((w.begin_s, w.end_s), w.op_id) for w in own.work if w.lane == "compute"]
    computed = [(piece, name) for at, name in innermost(work) for piece in subtract([at], stood)]
    lanes = [_lane("compute", [(at, name, COMPUTE) for at, name in computed], origin_s)]
    lanes.append(_lane("waiting", [(at, name, WAITING) for at, name in innermost(waits)], origin_s))
    for axis in sorted({m.axis for m in own.messages}):
        sent = [((m.begin_s, m.end_s), m.op_id or m.op) for m in own.messages if m.axis == axis]
        spans = []
        for at, name in innermost(sent):
            spans += [(piece, name, HIDDEN) for piece in subtract([at], stood)]
            spans += [(piece, name, WAITING) for piece in subtract([at], subtract([at], stood))]
        lanes.append(_lane(axis, sorted(spans), origin_s))
    return [lane for lane in lanes if lane["spans"]]


def _lane(name: str, spans: list[tuple[tuple[float, float], str, int]], origin_s: float) -> dict[str, Any]:
    names: dict[str, int] = {}
    made = [
        [round((begin - origin_s) * 1e6, 1), round((end - begin) * 1e6, 1), kind, names.setdefault(printable(label[:120]), len(names))]
        for (begin, end), label, kind in spans
    ]  # fmt: skip
    return {"name": printable(name[:40]), "names": list(names), "spans": made}
