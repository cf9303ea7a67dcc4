"""Predictions against published measurements: errors, ranking, memory, by family and in all.

Decides what is counted: the error of a row is |predicted - measured| / measured of the step time; ranking compares rows that do the same job
on the same machines (Kendall's tau over such pairs); a row that was out of memory must be predicted so, and no other. Must never
change: calibration rows and validation rows are never summed together but under "all".
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from phalanx.core.errors import PlanError
from phalanx.simulate.step.timing import Prediction, predict
from phalanx_lab.publications.published import Row, read_rows
from phalanx_lab.publications.published_mapping import cluster_of, job_of, mapping_of, measured_seconds


@dataclass(frozen=True, kw_only=True)
class RowOutcome:
    """A row, and what was predicted of it; `prediction` is None where the row's degrees are impossible."""

    row: Row
    prediction: Prediction | None
    flags: tuple[str, ...]

    @property
    def oom(self) -> bool:
        return self.row.metric == "OOM"

    @property
    def measured(self) -> float:
        return measured_seconds(self.row)

    @property
    def error(self) -> float | None:
        """Signed relative error of the step time, None where there is none to compare."""
        if self.oom or self.prediction is None:
            return None
        return self.prediction.step.seconds / self.measured - 1

    @property
    def mfu_pct(self) -> float | None:
        return None if self.prediction is None else 100 * self.prediction.mfu(self.row.convention)

    def to_dict(self) -> dict[str, Any]:
        p, row = self.prediction, self.row
        return {
            "line": row.line,
            "family": row.family,
            "role": role(row),
            "model": row.spec.name,
            "gpus": row.gpus,
            "seq_len": row.seq_len,
            "method": row.method,
            "metric": row.metric,
            "value": row.value,
            "measured_s": None if self.oom else self.measured,
            "predicted_s": p.step.seconds if p else None,
            "p10_s": p.step.p10 if p else None,
            "p90_s": p.step.p90 if p else None,
            "predicted_mfu_pct": self.mfu_pct,
            "error": self.error,
            "peak_bytes": p.peak_bytes if p else None,
            "fits": p.fits if p else None,
            "mapping": p.mapping.label() if p else None,
            "parts": p.step.parts if p else {},
            "flags": list(self.flags),
        }


def role(row: Row) -> str:
    """What a row is for. Dense rows and Grok rows calibrate, everything else is validation."""
    return "calibration" if row.calibration else "validation"


def outcome_of(row: Row) -> RowOutcome:
    """Predict one row."""
    try:
        mapping, flags = mapping_of(row)
        prediction = predict(job_of(row), mapping, cluster_of(row))
    except PlanError as error:
        return RowOutcome(row=row, prediction=None, flags=(*row.flags, *(f"impossible: {p}" for p in error.problems)))
    return RowOutcome(row=row, prediction=prediction, flags=flags)


def validate(path: Path, *, progress: Callable[[int, int], None] | None = None) -> tuple[RowOutcome, ...]:
    """Predict every row of a CSV. Raises `DataError` where it cannot be read."""
    rows, out = read_rows(path), []
    for number, row in enumerate(rows, start=1):
        out.append(outcome_of(row))
        if progress is not None:
            progress(number, len(rows))
    return tuple(out)


def kendall_tau(outcomes: Sequence[RowOutcome]) -> float | None:
    """(concordant - discordant) / pairs, over pairs of rows that do the same job; None without such a pair.

    A prediction that ties what was measured apart is neither.
    """
    groups: dict[tuple[object, ...], list[RowOutcome]] = {}
    for outcome in outcomes:
        if outcome.error is not None:
            groups.setdefault(outcome.row.comparable, []).append(outcome)
    signs = [
        _sign(a.measured - b.measured) * _sign(_predicted(a) - _predicted(b))
        for group in groups.values()
        for a, b in combinations(group, 2)
        if a.measured != b.measured
    ]
    return sum(signs) / len(signs) if signs else None


def _predicted(outcome: RowOutcome) -> float:
    assert outcome.prediction is not None
    return outcome.prediction.step.seconds


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def statistics_of(outcomes: Sequence[RowOutcome]) -> dict[str, Any]:
    """What the result file has of a family or of all rows. Errors are in per cent."""
    errors = [100 * abs(o.error) for o in outcomes if o.error is not None]
    ooms = [o for o in outcomes if o.oom]
    return {
        "mape": statistics.fmean(errors) if errors else None,
        "median": statistics.median(errors) if errors else None,
        "worst": max(errors) if errors else None,
        "kendall_tau": kendall_tau(outcomes),
        "oom_rows": len(ooms),
        "oom_right": sum(o.prediction is not None and not o.prediction.fits for o in ooms),
        "false_oom": sum(o.prediction is not None and not o.prediction.fits for o in outcomes if not o.oom),
        "impossible": sum(o.prediction is None for o in outcomes),
        "rows": len(outcomes),
    }


def report(outcomes: Sequence[RowOutcome]) -> dict[str, Any]:
    """The whole result: by family, by role, in all, and every row."""
    families: dict[str, list[RowOutcome]] = {}
    for outcome in outcomes:
        families.setdefault(outcome.row.family, []).append(outcome)
    roles = {r: [o for o in outcomes if role(o.row) == r] for r in ("calibration", "validation")}
    return {
        **statistics_of(outcomes),
        "families": {name: {**statistics_of(group), "role": role(group[0].row)} for name, group in families.items()},
        "roles": {name: statistics_of(group) for name, group in roles.items() if group},
        "flagged": sum(bool(o.flags) for o in outcomes),
        "results": [o.to_dict() for o in outcomes],
    }
