"""A predicted step beside recorded ones, operation by operation.

Decides what is compared: of work its duration; of a collective that held the rank the time from when the last rank had posted it to its end; of what was
under way beside other work only when it began, for nobody can ask gloo when it arrived (in a move of state a rank does nothing but wait, so there every message has an end). Must never change: rows are matched by rank and id alone, and
whatever has no partner on the other side is told.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.simulate.program.clock import OpSpan, ProgramTimeline
from phalanx.simulate.program.cost import kind_of

SHORTEST = 1e-3
"""Share of a step below which an operation is in sums, but has no error of its own."""


class MeasuredOp(NamedTuple):
    """An operation of a rank in one recorded step; seconds since that rank's step began."""

    begin_s: float
    seconds: float


RecordedStep = Mapping[tuple[int, str], MeasuredOp]
"""(rank, id) -> what was measured."""


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One id of one rank."""

    rank: int
    id: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """All ids of one kind, over all ranks."""

    kind: str
    count: int
    predicted_s: float
    """Sum over a rank's ids, mean over ranks that have any."""
    measured_s: float
    median: float | None
    """Error id by id; None where all are too short to have one."""
    worst: float | None
    worst_id: str


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything that two reports of one step share."""

    hash: str
    steps: int
    predicted_s: float
    sigma: float
    """Spread of the logarithm of the prediction."""
    measured_s: float
    """Seconds of a step, median over those that were recorded."""
    kinds: tuple[KindRow, ...]
    median: float
    worst: float
    worst_id: str
    begin_correlation: float
    """Correlation of begins, predicted and measured, over all ids of all ranks."""
    only_predicted: tuple[str, ...]
    only_measured: tuple[str, ...]

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "hash": {"predicted": self.hash, "measured": self.hash},
            "steps": self.steps,
            "step": {
                "predicted_s": self.predicted_s,
                "sigma": self.sigma,
                "measured_s": self.measured_s,
                "error": self.error,
            },
            "ids": {"median": self.median, "worst": self.worst, "worst_id": self.worst_id},
            "begin_correlation": self.begin_correlation,
            "kinds": [vars(kind) for kind in self.kinds],
            "only_predicted": list(self.only_predicted),
            "only_measured": list(self.only_measured),
        }


def compare_steps(
    timeline: ProgramTimeline, steps: Sequence[RecordedStep], *, step_s: Sequence[float], beside: bool = False
) -> Comparison:
    """`step_s`: seconds of each recorded step. Of several steps medians count. `beside`: what travels beside work is timed too, because there is none."""
    measured = medians(steps)
    predicted = timeline.by_id
    both = [key for key in predicted if key in measured]
    total = statistics.median(step_s)
    rows = [
        ComparedRow(rank=rank, id=id, predicted_s=predicted[rank, id].seconds, measured_s=measured[rank, id].seconds)
        for rank, id in both
        if _is_timed(predicted[rank, id], beside=beside)
    ]
    long = [row for row in rows if row.measured_s >= SHORTEST * total]
    wrong = [abs(row.error) for row in long]
    worst = max(long, key=lambda row: abs(row.error), default=None)
    begins = np.array([[predicted[key].begin_s, measured[key].begin_s] for key in both])
    missing = {key[1] for key in set(predicted) - set(measured) if predicted[key].op.kind == "collective"}
    return Comparison(
        hash=timeline.hash,
        steps=len(steps),
        predicted_s=timeline.seconds,
        sigma=timeline.sigma,
        measured_s=total,
        kinds=_kinds(rows, total),
        median=statistics.median(wrong) if wrong else 0.0,
        worst=abs(worst.error) if worst else 0.0,
        worst_id=worst.id if worst else "",
        begin_correlation=_correlation(begins),
        only_predicted=tuple(sorted(missing)),
        only_measured=tuple(sorted({id for _, id in set(measured) - set(predicted)})),
    )


def medians(steps: Sequence[RecordedStep]) -> dict[tuple[int, str], MeasuredOp]:
    """Medians of each id of each rank over the steps that have it."""
    found: dict[tuple[int, str], list[MeasuredOp]] = {}
    for step in steps:
        for key, value in step.items():
            found.setdefault(key, []).append(value)
    return {
        key: MeasuredOp(statistics.median(v.begin_s for v in values), statistics.median(v.seconds for v in values))
        for key, values in found.items()
    }


def table_of(steps: Sequence[RecordedStep]) -> dict[str, float]:
    """Median seconds by kind: what the oracle takes before any formula."""
    found: dict[str, list[float]] = {}
    for (_, id), value in medians(steps).items():
        found.setdefault(kind_of(id), []).append(value.seconds)
    return {kind: statistics.median(values) for kind, values in found.items()}


def _correlation(begins: NDArray[np.float64]) -> float:
    """Correlation of two columns; 1 where one of them has a single value, which orders nothing."""
    if len(begins) < 2 or not begins.std(0).all():
        return 1.0
    return float(np.corrcoef(begins[:, 0], begins[:, 1])[0, 1])


def _is_timed(span: OpSpan, *, beside: bool) -> bool:
    return span.op.kind != "host" and (beside or not span.op.beside) and not span.op.posted_after


def _kinds(rows: Sequence[ComparedRow], total: float) -> tuple[KindRow, ...]:
    groups: dict[str, list[ComparedRow]] = {}
    for row in rows:
        groups.setdefault(kind_of(row.id), []).append(row)
    out = []
    for kind, found in groups.items():
        ranks = len({row.rank for row in found})
        long = [row for row in found if row.measured_s >= SHORTEST * total]
        worst = max(long, key=lambda row: abs(row.error), default=None)
        out.append(
            KindRow(
                kind=kind,
                count=len(found),
                predicted_s=sum(row.predicted_s for row in found) / ranks,
                measured_s=sum(row.measured_s for row in found) / ranks,
                median=statistics.median(abs(row.error) for row in long) if long else None,
                worst=abs(worst.error) if worst else None,
                worst_id=worst.id if worst else "",
            )
        )
    return tuple(sorted(out, key=lambda row: -row.measured_s))
