"""The file that Perfetto and chrome://tracing open (Trace Event Format of Chrome, JSON object form): processes, lanes, spans and arrows.

Decides the units: microseconds from an origin, three decimals. Must never change: a span ends where the next one may begin (both are rounded
alike), and an arrow never points back in time.

Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INSIDE_S = 1e-6
"""An arrow that leaves or enters at the end of a span is drawn this much before it: at the end itself nothing is open to bind it to."""


@dataclass(frozen=True)
class TraceSpan:
    """A piece of a lane that has been written."""

    pid: int
    tid: int
    begin_s: float
    end_s: float

    @property
    def inside_end_s(self) -> float:
        """Just before the end, within the span."""
        return self.end_s - min((self.end_s - self.begin_s) / 2, INSIDE_S)


class TraceFile:
    """Collects what is to be drawn. A process is a group of lanes; times are seconds, `origin_s` becomes 0."""

    def __init__(self, *, title: str, origin_s: float = 0.0, other: Mapping[str, Any] | None = None) -> None:
        self._events: list[dict[str, Any]] = []
        self._origin_s = origin_s
        self._other = {"title": title, **(other or {})}
        self._arrows = 0

    def process(self, pid: int, name: str) -> None:
        """Name a process; they are drawn in the order of their numbers."""
        self._meta("process_name", pid, 0, name=name)
        self._meta("process_sort_index", pid, 0, sort_index=pid)

    def lane(self, pid: int, tid: int, name: str) -> None:
        """Name a lane of a process; they are drawn in the order of their numbers."""
        self._meta("thread_name", pid, tid, name=name)
        self._meta("thread_sort_index", pid, tid, sort_index=tid)

    def span(
        self, pid: int, tid: int, name: str, *, begin_s: float, end_s: float, category: str, args: Mapping[str, Any]
    ) -> TraceSpan:
        """Something that a lane did. Spans of one lane must not overlap."""
        begin, end = self._us(begin_s), self._us(end_s)
        self._events.append(
            {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": begin, "dur": round(end - begin, 3),
             "args": dict(args)}
        )  # fmt: skip
        return TraceSpan(pid, tid, begin_s, end_s)

    def arrow(self, name: str, source: TraceSpan, target: TraceSpan, *, from_s: float, to_s: float) -> bool:
        """Draws an arrow from a moment within `source` to one within `target`; False, and nothing drawn, where that would point
        back in time."""
        begin, end = self._us(from_s), self._us(to_s)
        if end < begin:
            return False
        common = {"name": name, "cat": "flow", "id": self._arrows}
        self._arrows += 1
        self._events.append({"ph": "s", **common, "pid": source.pid, "tid": source.tid, "ts": begin})
        self._events.append({"ph": "f", "bp": "e", **common, "pid": target.pid, "tid": target.tid, "ts": end})
        return True

    def to_json_dict(self) -> dict[str, Any]:
        """Chrome's JSON object."""
        return {"traceEvents": list(self._events), "displayTimeUnit": "ms", "otherData": dict(self._other)}

    def _meta(self, what: str, pid: int, tid: int, **args: Any) -> None:
        self._events.append({"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args})

    def _us(self, time_s: float) -> float:
        return round((time_s - self._origin_s) * 1e6, 3)
