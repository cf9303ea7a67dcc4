"""The recorded steps of a run as a trace for Perfetto: a process for each rank, its lanes, and arrows from what made something to what needed it.

    recovery, told   of an elastic run (`observe/recorded/recovery.py`)
    step       the steps, those that were given up too; moves of state between them
    beside     moves of state while a step was computed
    passes     passes of the pipeline, waiting for data
    compute    what was computed; time in which the rank stood waiting is cut out of it
    waiting    the rank stood waiting: communication that nothing hid
    ep, tp ... messages along an axis from posting to the end of the wait for them, in as many lanes as overlap

Arrows go from a sender to its receiver, in a collective of a group from the rank that came last to those that waited for it, from what was
computed to the dispatch or combine that carries it away, and from those to what was computed with what they brought. Must never change:
spans of one lane do not overlap, and no arrow points back in time (`core/trace_file.py` refuses it; how many it refused is in the file).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from phalanx.core.op_ids import expert_exchange, read_op_id
from phalanx.core.trace_file import TraceFile, TraceSpan
from phalanx.observe.recorded.intervals import in_rows, innermost, subtract, union
from phalanx.observe.recorded.lanes import (
    Key,
    LaneMessage,
    LaneWork,
    Meeting,
    RankMove,
    RankStep,
    Recording,
    numbered,
    others,
)
from phalanx.observe.recorded.recovery import LANES as RECOVERY_LANES, SlotSpan, draw_recoveries

LANES = (*RECOVERY_LANES, "step", "passes", "compute", "waiting", "beside")
FIRST_AXIS = len(LANES)
SAME_S = 1e-9
"""Times closer than this are one moment."""


def perfetto_trace(recording: Recording, recoveries: Sequence[SlotSpan] = ()) -> dict[str, Any]:
    """Chrome's JSON object. `recoveries` of an elastic run, on the clocks of its members."""
    steps, what = recording.steps, "slot" if recording.is_elastic or recoveries else "rank"
    drawn = {rank: recording.drawn(rank) for rank in recording.logs}
    file = TraceFile(
        title=f"{recording.run}, steps {steps[0]} to {steps[-1]}",
        origin_s=min([s.begin_s for own in drawn.values() for s in own] + [span.begin_s for span in recoveries]),
        other={"clock_error_s": max(recording.clock_error_s.values(), default=0.0)},
    )
    drawing = _Drawing(file)
    for rank in sorted({*drawn, *(span.slot for span in recoveries)}):
        host = recording.hosts.get(rank)
        file.process(rank, f"{what} {rank} on {host}" if host else f"{what} {rank}")
        draw_recoveries(file, [span for span in recoveries if span.slot == rank])
        _Rank(drawing, rank).draw(drawn.get(rank, []))
    drawing.arrows_between_ranks()
    out = file.to_json_dict()
    out["otherData"] |= {"arrows": drawing.arrows, "arrows_left_out": drawing.left_out}
    return out


@dataclass
class _Drawing:
    """What of all ranks has been drawn."""

    file: TraceFile
    ends: dict[tuple[Meeting, Key], tuple[LaneMessage, TraceSpan]] = field(default_factory=dict)
    """(step or move, end of a message) -> the message of the rank whose end it is."""
    arrows: int = 0
    left_out: int = 0
    """They would have pointed back in time: clocks of two machines are not compared better than that."""

    def arrow(self, name: str, source: TraceSpan, target: TraceSpan, *, from_s: float, to_s: float) -> None:
        if self.file.arrow(name, source, target, from_s=from_s, to_s=to_s):
            self.arrows += 1
        else:
            self.left_out += 1

    def arrows_between_ranks(self) -> None:
        for (step, key), (message, span) in self.ends.items():
            if key[0] == "send":
                continue
            for other in others(key, message):
                sender = self.ends.get((step, other))
                if sender is None or (key[0] == "all" and other[4] != message.last_rank):
                    continue
                self.arrow("sent", sender[1], span, from_s=sender[1].begin_s, to_s=span.inside_end_s)


class _Rank:
    """Draws the lanes of one rank."""

    def __init__(self, drawing: _Drawing, rank: int) -> None:
        self.drawing, self.file, self.rank = drawing, drawing.file, rank

    def draw(self, steps: Sequence[RankStep]) -> None:
        beside = [id(step) for step in steps if isinstance(step, RankMove) and _meets_a_step(step, steps)]
        for tid, name in enumerate(LANES):
            if name not in RECOVERY_LANES and (name != "beside" or beside):
                self.file.lane(self.rank, tid, name)
        tids = self._axis_lanes(steps)
        for step in steps:
            lane = "beside" if id(step) in beside else "step"
            self._span(lane, step.name, (step.begin_s, step.end_s), _about(step))
            if step.voted_s and step.decided_s > step.voted_s:
                self._span("passes", "decision", (step.voted_s, step.decided_s), {"committed": step.committed})
            waits = self._waits(step)
            self._draw_work(step, "host", "passes", [])
            pieces = self._draw_work(step, "compute", "compute", waits)
            self._draw_messages(step, tids, _Pieces(pieces))

    def _span(self, lane: str, name: str, at: tuple[float, float], args: dict[str, Any]) -> TraceSpan:
        return self.file.span(
            self.rank, LANES.index(lane), name, begin_s=at[0], end_s=at[1], category=lane, args=args
        )  # fmt: skip

    def _waits(self, step: RankStep) -> list[tuple[float, float]]:
        """Draws the time in which the rank stood waiting, and returns it."""
        items: list[tuple[tuple[float, float], str]] = [
            ((m.wait_s, m.end_s), m.op_id or m.op) for m in step.messages if m.waited_s > 0
        ]
        items += [((w.begin_s, w.end_s), w.op_id) for w in step.work if w.lane == "wait"]
        for at, name in innermost(items):
            self._span("waiting", name, at, {})
        return union(at for at, _ in items)

    def _draw_work(
        self, step: RankStep, kind: str, lane: str, cut_out: Sequence[tuple[float, float]]
    ) -> list[tuple[LaneWork, TraceSpan]]:
        items = [((w.begin_s, w.end_s), w) for w in step.work if w.lane == kind]
        drawn = []
        for at, work in innermost(items):
            for piece in subtract([at], cut_out):
                drawn.append((work, self._span(lane, work.op_id, piece, _place(work.op_id))))
        return drawn

    def _axis_lanes(self, steps: Sequence[RankStep]) -> dict[str, list[int]]:
        """Numbers of the lanes of each axis: as many as its messages ever need at once."""
        tids: dict[str, list[int]] = {}
        free = FIRST_AXIS
        for axis in sorted({m.axis for step in steps for m in step.messages}):
            rows = max(len(_rows(step, axis)) for step in steps)
            tids[axis] = list(range(free, free + rows))
            free += rows
            for number, tid in enumerate(tids[axis], start=1):
                self.file.lane(self.rank, tid, axis if number == 1 else f"{axis} ({number})")
        return tids

    def _draw_messages(self, step: RankStep, tids: dict[str, list[int]], pieces: _Pieces) -> None:
        spans: dict[int, TraceSpan] = {}
        for axis, rows in tids.items():
            for tid, row in zip(rows, _rows(step, axis), strict=False):
                for at, message in row:
                    span = self.file.span(
                        self.rank, tid, message.op_id or message.op, begin_s=at[0], end_s=at[1], category="communication",
                        args=_figures(message),
                    )  # fmt: skip
                    spans[id(message)] = span
                    self._arrows_of_experts(message, span, pieces)
        for message, keys in numbered(step.rank, step):
            for key in keys:
                self.drawing.ends[step.meeting, key] = message, spans[id(message)]

    def _arrows_of_experts(self, message: LaneMessage, span: TraceSpan, pieces: _Pieces) -> None:
        if expert_exchange(message.op_id) is None:
            return
        made, needed = pieces.before(message), pieces.after(message)
        if made is not None:
            self.drawing.arrow("carried away", made, span, from_s=made.inside_end_s, to_s=span.begin_s)
        if needed is not None:
            self.drawing.arrow("brought", span, needed, from_s=span.inside_end_s, to_s=needed.begin_s)


class _Pieces:
    """What a rank computed, by micro-batch, layer and pass, in order."""

    def __init__(self, drawn: Sequence[tuple[LaneWork, TraceSpan]]) -> None:
        self._spans: dict[tuple[Any, ...], list[TraceSpan]] = {}
        for work, span in drawn:
            self._spans.setdefault(read_op_id(work.op_id)[:3], []).append(span)
        for spans in self._spans.values():
            spans.sort(key=lambda span: span.begin_s)

    def before(self, message: LaneMessage) -> TraceSpan | None:
        """The last that had ended when the message was posted."""
        spans = self._spans.get(read_op_id(message.op_id)[:3], [])
        place = bisect_right(spans, message.begin_s + SAME_S, key=lambda span: span.end_s)
        return spans[place - 1] if place else None

    def after(self, message: LaneMessage) -> TraceSpan | None:
        """The first that began when the message had been waited for."""
        spans = self._spans.get(read_op_id(message.op_id)[:3], [])
        place = bisect_left(spans, message.end_s - SAME_S, key=lambda span: span.begin_s)
        return spans[place] if place < len(spans) else None


def _rows(step: RankStep, axis: str) -> list[list[tuple[tuple[float, float], LaneMessage]]]:
    return in_rows([((m.begin_s, m.end_s), m) for m in step.messages if m.axis == axis])


def _meets_a_step(move: RankMove, steps: Sequence[RankStep]) -> bool:
    others = (step for step in steps if not isinstance(step, RankMove))
    return any(step.begin_s < move.end_s and move.begin_s < step.end_s for step in others)


def _about(step: RankStep) -> dict[str, Any]:
    return {"generation": step.generation, "rank": step.rank} if step.generation else {}


def _place(op_id: str) -> dict[str, Any]:
    place = read_op_id(op_id)
    named = {"microbatch": place.microbatch, "layer": place.layer, "phase": place.phase}
    return {key: value for key, value in named.items() if value is not None}


def _figures(m: LaneMessage) -> dict[str, Any]:
    figures = {
        "op": m.op, "axis": m.axis, "sent_bytes": m.sent_bytes, "exposed_ms": _ms(m.waited_s), "late_ms": _ms(m.late_s),
        "hidden_ms": _ms(max(0.0, min(m.wait_s, m.end_s) - m.ready_s)), "last_rank": m.last_rank,
    }  # fmt: skip
    return {**_place(m.op_id), **figures, **({"on": "a thread next to the rank's own"} if m.aside else {})}


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 6)
