"""What the event logs of a replayed trace say: steps committed, samples told once, how long each recovery took and in which phases. Pure Python.

A step counts when it is committed and not taken back: where a run starts again from an earlier step, what came after that step is void (`RunStarted.step`). All
ranks that take part tell of a step; it counts once.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outage:
    """What followed one change of the slots, in seconds after it. None: it did not happen before the next change."""

    at_s: float
    what: str
    running_s: float | None
    """All that is needed to step is there again: processes and checkpoint (torchrun), or groups and state (elastic). None: nobody was disturbed."""
    resumed_s: float | None
    """The first step since, which may be one that had been done before."""
    caught_up_s: float | None
    """More steps are committed than before the change."""
    steps_again: int
    """Steps that were taken back."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """A run through a trace."""

    system: str
    committed_steps: int
    committed_samples: int
    seconds: float
    steps_again: int
    step_s: float
    """Median from commit to commit."""
    saves: int
    save_s: float
    """Mean time for which a checkpoint stopped training (of those before `begin_s` where there was none since)."""
    save_bytes: int
    """Bytes of the largest of them."""
    doubled_samples: int
    untold_samples: int
    """Samples of committed steps whose rank died before it could tell what it had trained on."""
    outages: tuple[Outage, ...] = field(default=())
    stolen: float = 0.0
    """Share of the machine's processor time that its host gave to others meanwhile."""

    @property
    def samples_per_s(self) -> float:
        return self.committed_samples / self.seconds


class RunHistory:
    """The history of one run as its records tell it, in the order of time."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.commits: list[tuple[float, int]] = []
        """(when, steps committed then), each step when the first rank told of it, and again where it was done again."""
        self.returns: list[tuple[float, int, int]] = []
        """(when, steps before, steps after) of going back."""
        self.windows: dict[int, list[int]] = {}
        """Samples of each step that stands."""
        self.step = 0
        for record in sorted(records, key=lambda r: float(r["time_s"])):
            self._take(record)

    def _take(self, record: Record) -> None:
        kind, at_s = record["kind"], float(record["time_s"])
        if kind == "RunStarted" and record["step"] < self.step:
            self.returns.append((at_s, self.step, record["step"]))
            self.step = int(record["step"])
            self.windows = {step: taken for step, taken in self.windows.items() if step <= self.step}
        elif kind == "StepEnded" and record["step"] > self.step:
            self.step = int(record["step"])
            self.commits.append((at_s, self.step))
        elif kind == "SamplesTaken":
            self.windows.setdefault(int(record["step"]), []).extend(record["windows"])

    def at(self, when_s: float) -> int:
        """Steps that stand at a moment."""
        moments = [*self.commits, *((at_s, after) for at_s, _, after in self.returns)]
        before = [(at_s, step) for at_s, step in moments if at_s <= when_s]
        return max(before, key=lambda m: m[0])[1] if before else 0

    def doubled(self) -> int:
        """Samples that a step has twice."""
        return sum(times - 1 for taken in self.windows.values() for times in Counter(taken).values() if times > 1)

    def untold(self, first: int, last: int, *, global_batch: int) -> int:
        """Samples of the steps after `first` up to `last` that no rank told of."""
        return sum(max(0, global_batch - len(self.windows.get(step, ()))) for step in range(first + 1, last + 1))


def score(
    records: Sequence[Record],
    *,
    system: str,
    global_batch: int,
    begin_s: float,
    end_s: float,
    changes: Sequence[tuple[float, str]] = (),
    stolen: float = 0.0,
) -> Score:
    """Score of the time from `begin_s` to `end_s`; `changes` are (when, what) by the same clock, seconds since the epoch."""
    ledger = RunHistory([r for r in records if r["time_s"] <= end_s])
    first, last = ledger.at(begin_s), ledger.at(end_s)
    gaps = [b[0] - a[0] for a, b in zip(ledger.commits, ledger.commits[1:], strict=False) if a[0] >= begin_s]
    all_saves = [r for r in records if r["kind"] == "CheckpointSaved" and r["slot"] == 0 and r["time_s"] <= end_s]
    saves = [r for r in all_saves if r["time_s"] >= begin_s]
    blocked = [r["blocked_s"] for r in saves or all_saves]
    ends = [*(at_s for at_s, _ in changes), end_s][1:]
    return Score(
        system=system,
        committed_steps=last - first,
        committed_samples=(last - first) * global_batch,
        seconds=end_s - begin_s,
        steps_again=sum(before - after for at_s, before, after in ledger.returns if at_s >= begin_s),
        step_s=statistics.median(gaps) if gaps else 0.0,
        saves=len(saves),
        save_s=statistics.fmean(blocked) if blocked else 0.0,
        save_bytes=max((r["bytes"] for r in all_saves), default=0),
        doubled_samples=ledger.doubled(),
        untold_samples=ledger.untold(
            first, last - 2, global_batch=global_batch
        ),  # others may still write of the last two
        outages=tuple(
            _outage(ledger, records, at_s, what, until) for (at_s, what), until in zip(changes, ends, strict=True)
        ),
        stolen=stolen,
    )


def _outage(ledger: RunHistory, records: Sequence[Record], at_s: float, what: str, until_s: float) -> Outage:
    span = [r for r in records if at_s < r["time_s"] <= until_s]
    again = [r["time_s"] for r in span if r["kind"] in ("RunStarted", "TeamFormed")]
    running_s = min(again) if again else None
    had = ledger.at(at_s)
    commits = [(when, step) for when, step in ledger.commits if at_s < when <= until_s]
    resumed = [when for when, _ in commits if running_s is None or when >= running_s]
    caught_up = [when for when, step in commits if step > had and (running_s is None or when >= running_s)]
    return Outage(
        at_s=at_s,
        what=what,
        running_s=None if running_s is None else running_s - at_s,
        resumed_s=min(resumed) - at_s if resumed else None,
        caught_up_s=min(caught_up) - at_s if caught_up else None,
        steps_again=sum(before - after for when, before, after in ledger.returns if at_s < when <= until_s),
    )
