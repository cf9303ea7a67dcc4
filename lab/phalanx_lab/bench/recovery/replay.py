"""A system goes through a trace: started, waited for until it trains, hurt at the moments of the trace, ended, scored."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from phalanx.core.errors import RunError
from phalanx_lab.bench.cluster import Logs
from phalanx_lab.bench.recovery.cores import SlotCores
from phalanx_lab.bench.recovery.table import Score, score
from phalanx_lab.bench.recovery.trace import Change, Trace
from phalanx_lab.bench.recovery.workload import WAIT_S, System, running
from phalanx_lab.bench.stolen import StolenTime

WARM_STEPS = 10
"""Steps before the clock starts: both systems have begun, and nothing is compiled or allocated any more."""
LOOK_S = 0.02
PLACE_S = 0.1
"""Seconds between two looks for new processes."""
Record = dict[str, Any]


def replay(
    system: System, trace: Trace, *, global_batch: int, stop_when_resumed: bool = False, cores: SlotCores | None = None
) -> Score:
    """Its score from warm training to the end of the trace. `stop_when_resumed`: end a few steps after the last change. Raises `RunError`."""
    if cores is not None:
        system = PinnedSystem(system, cores)
    records: list[Record] = []
    logs = Logs(system.folder, slots=trace.slots)
    moments: list[tuple[float, str]] = []
    with running(system):
        _until(system, lambda: _step(records, logs) >= WARM_STEPS, WAIT_S)
        begin_s, stolen = time.time(), StolenTime()
        there = frozenset(range(trace.slots))
        for change in trace.changes:
            _until_time(system, begin_s + change.at_s)
            there = there - set(change.lost) | set(change.back)
            moments.append((time.time(), describe(change)))
            system.change(there, frozenset(change.lost), frozenset(change.back))
        if stop_when_resumed:
            records += logs.new()
            seen = len(records)
            _until(system, lambda: _commits_since_start(records, logs, seen) >= 2, WAIT_S)
        else:
            _until_time(system, begin_s + trace.duration_s)
        end_s = time.time() if stop_when_resumed else begin_s + trace.duration_s
        records += logs.new()
        share = stolen.share()
    return score(
        records, system=system.name, global_batch=global_batch, begin_s=begin_s, end_s=end_s, changes=tuple(moments),
        stolen=share,
    )  # fmt: skip


class PinnedSystem:
    """A system whose ranks have the cores of their slots."""

    def __init__(self, system: System, cores: SlotCores) -> None:
        self.system, self.cores = system, cores
        self.name, self.folder = system.name, system.folder
        self._looked_s = 0.0

    def look(self) -> None:
        self.system.look()
        if time.monotonic() - self._looked_s > PLACE_S:
            self._looked_s = time.monotonic()
            self.cores.place(self.system.workers())

    def start(self) -> None:
        self.system.start()

    def workers(self) -> dict[int, int]:
        return self.system.workers()

    def change(self, there: frozenset[int], lost: frozenset[int], back: frozenset[int]) -> None:
        self.system.change(there, lost, back)

    def stop(self) -> None:
        self.system.stop()


def describe(change: Change) -> str:
    """Describes it in words."""
    parts = [f"slots {', '.join(map(str, s))} {w}" for s, w in ((change.lost, "lost"), (change.back, "back")) if s]
    return "; ".join(parts)


def _step(records: list[Record], logs: Logs) -> int:
    records += logs.new()
    return max((r["step"] for r in records if r["kind"] == "StepEnded"), default=0)


def _commits_since_start(records: list[Record], logs: Logs, seen: int) -> int:
    """Steps that were told after the first sign of new groups or processes."""
    records += logs.new()
    new = sorted(records[seen:], key=lambda r: r["time_s"])
    begun = [r["time_s"] for r in new if r["kind"] in ("RunStarted", "TeamFormed")]
    return len({r["step"] for r in new if r["kind"] == "StepEnded" and r["time_s"] > begun[0]}) if begun else 0


def _until(system: System, done: Callable[[], bool], limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while not done():
        system.look()
        if time.monotonic() > end_s:
            raise RunError(f"{system.name}: nothing happened for {limit_s:g} s; see {system.folder.parent}")
        time.sleep(LOOK_S)


def _until_time(system: System, when_s: float) -> None:
    while (left_s := when_s - time.time()) > 0:
        system.look()
        time.sleep(min(LOOK_S, left_s))
