"""How much of the time a job makes progress, when hosts fail: checkpoint and restart against recovery from replicas.

Decides the clock of failures. A job runs in cycles: `interval` seconds of steps, then a save that stops it for `save_s`. A failure of any rank
loses what was done since the last save and costs detection and restart; with replicas of the experts and shards, a failure that leaves
one holder of everything costs detection and repair, and nothing is lost. Failures are a Poisson process of the
job's rate, or come from a trace. Must never change: useful + saving + lost + down = all of the time.

Young and Daly's interval: sqrt(2 * save_s * M), M the mean time between failures of the job.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from phalanx.core.errors import DataError, PlanError, Problem, raise_if

LLAMA3_FAILURES_PER_RANK_HOUR = 1.97e-5
"""419 unexpected interruptions in 54 days on 16,384 devices (arXiv 2407.21783, section 3.3.4)."""


@dataclass(frozen=True, kw_only=True)
class Practice:
    """What a job does about failures."""

    recovery: Literal["checkpoint", "replicas"] = "checkpoint"
    interval_s: float = 1800.0
    """Work between the ends of two saves."""
    save_s: float = 10.0
    """How long a save stops the job (not how long it takes to reach the disk)."""
    detect_s: float = 60.0
    restart_s: float = 300.0
    """From the detection of a failure to the first step, from a checkpoint."""
    repair_s: float = 20.0
    """The same from replicas: membership, plan, transfer."""
    survival: float = 1.0
    """Probability that a failure leaves a holder of every expert and shard."""
    repair_host_s: float = 0.0
    """Time until the lost host is replaced; until then a job with replicas runs without it."""


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the time went, in shares of it."""

    useful: float
    saving: float
    lost: float
    down: float
    failures: int
    hours: float

    @property
    def total(self) -> float:
        return self.useful + self.saving + self.lost + self.down


def practice_problems(practice: Practice) -> list[Problem]:
    """Times that cannot be."""
    out = [
        Problem(where=f"goodput.{name}", value=value, rule="must be above 0 and finite", hint="try 1800")
        for name, value in (("interval_s", practice.interval_s),)
        if not 0 < value < math.inf
    ]
    for name in ("save_s", "detect_s", "restart_s", "repair_s", "repair_host_s"):
        value = getattr(practice, name)
        if not 0 <= value < math.inf:
            out.append(
                Problem(where=f"goodput.{name}", value=value, rule="must not be negative, and finite", hint="try 60")
            )
    if not 0 <= practice.survival <= 1:
        out.append(Problem(where="goodput.survival", value=practice.survival, rule="is a probability", hint="use 1"))
    return out


def young_daly(save_s: float, mean_between_s: float) -> float:
    """The best interval between saves, to first order."""
    return math.sqrt(2 * save_s * mean_between_s)


def expected_goodput(practice: Practice, mean_between_s: float) -> float:
    """Useful share of the time, exactly for Poisson failures (J. T. Daly 2006): a cycle is repeated until it has no failure."""
    cycle, down = practice.interval_s + practice.save_s, practice.detect_s + practice.restart_s
    m = mean_between_s
    expected = (m + down) * math.expm1(cycle / m)
    return practice.interval_s / expected


def poisson(mean_between_s: float, seed: int) -> Iterator[float]:
    """Times of failures, ascending, without end."""
    draw, now = random.Random(seed), 0.0
    while True:
        now += draw.expovariate(1 / mean_between_s)
        yield now


def simulate_goodput(
    practice: Practice, failures: Iterator[float] | Sequence[float], *, duration_s: float, hosts: int = 1, seed: int = 0
) -> Goodput:
    """Run a job of `duration_s` through `failures`. A failure while the job is down begins its downtime again.

    `hosts`: a job that goes on without a lost host makes progress at (hosts - 1) / hosts until `repair_host_s` later. Raises `PlanError`.
    """
    raise_if(practice_problems(practice), PlanError, subject="the practice")
    draw, times = random.Random(seed), iter(failures)
    useful = saving = lost = down = now = since = 0.0
    slow_until, count = 0.0, 0
    upcoming = next(times, math.inf)
    while now < duration_s:
        stop = min(upcoming, duration_s)
        work, saved, since, rate_loss = _run(practice, now, stop, since, slow_until, hosts)
        useful, saving, lost, now = useful + work, saving + saved, lost + rate_loss, stop
        if now >= duration_s:
            break
        count, upcoming = count + 1, next(times, math.inf)
        kept = practice.recovery == "replicas" and draw.random() < practice.survival
        if not kept:
            useful, lost, since = useful - since, lost + since, 0.0
        pause = practice.detect_s + (practice.repair_s if kept else practice.restart_s)
        if kept:
            slow_until = now + pause + practice.repair_host_s
        end = now + pause
        while upcoming < end and upcoming < duration_s:  # fails again before it runs
            count, end = count + 1, upcoming + pause
            upcoming = next(times, math.inf)
        down, now = down + min(end, duration_s) - now, min(end, duration_s)
    parts = [part / duration_s for part in (useful, saving, lost, down)]
    return Goodput(
        useful=parts[0], saving=parts[1], lost=parts[2], down=parts[3], failures=count, hours=duration_s / 3600
    )


def _run(
    practice: Practice, now: float, stop: float, since: float, slow_until: float, hosts: int
) -> tuple[float, float, float, float]:
    """Work and saves from `now` to `stop`: (useful, saving, work since the last save, lost to running with fewer hosts)."""
    span, cycle = stop - now, practice.interval_s + practice.save_s
    first = practice.interval_s - since + practice.save_s
    if span < first:
        work = min(span, practice.interval_s - since)
        saving, after = span - work, since + work
    else:
        whole, rest = divmod(span - first, cycle)
        partial = min(rest, practice.interval_s)
        work = practice.interval_s - since + whole * practice.interval_s + partial
        saving, after = span - work, partial
    slow = max(0.0, min(stop, slow_until) - now) / hosts if hosts > 1 and span else 0.0
    slow = min(slow, work)
    return work - slow, saving, after, slow


def read_removals(path: Path) -> list[float]:
    """Times of removals, in seconds, of a trace of spot instances. Raises `DataError`."""
    return sorted(at_s for at_s, kind, _ in read_nodes(path) if kind == "remove")


def read_nodes(path: Path) -> list[tuple[float, str, str]]:
    """(seconds, add or remove, node) of a trace of spot instances: lines of `milliseconds,add|remove,node`. Raises `DataError`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise DataError(
            [Problem(where=str(path), value=None, rule=f"cannot be read ({reason})")], subject="the trace"
        ) from error
    problems, out = [], []
    for line, row in enumerate(rows, start=1):
        if len(row) != 3 or row[1] not in ("add", "remove") or not row[0].isdigit():
            rule = "is not MILLISECONDS,add|remove,NODE"
            problems.append(Problem(where=f"{path}:{line}", value=",".join(row), rule=rule, hint="0,add,node1"))
        else:
            out.append((int(row[0]) / 1000, row[1], row[2]))
    raise_if(problems, DataError, subject="the trace")
    return sorted(out, key=lambda event: event[0])


def sweep(
    practice: Practice, mean_between_s: float, intervals: Sequence[float], *, duration_s: float, seed: int = 0
) -> list[tuple[float, float]]:
    """(interval, useful share) of Monte Carlo runs over the same failures."""
    out = []
    for interval in intervals:
        changed = Practice(
            **{**{n: getattr(practice, n) for n in practice.__dataclass_fields__}, "interval_s": interval}
        )
        run = simulate_goodput(changed, poisson(mean_between_s, seed), duration_s=duration_s, seed=seed)
        out.append((interval, run.useful))
    return out


def swept_optimum(points: Sequence[tuple[float, float]]) -> float | None:
    """The best interval of a sweep of (interval, useful share): least squares of `lost = a + b / interval + c interval`, so sqrt(b / c).

    Over the points within a factor of 4 of the best, for the form is that of the first order. None where the sweep has no optimum inside (saves that cost nothing, failures that cost nothing, or less than three useful points).
    """
    best = max(points, key=lambda point: point[1], default=(1.0, 0.0))[0]
    used = [(x, y) for x, y in points if y > 0 and best / 4.1 < x < 4.1 * best]
    if len(used) < 3:
        return None
    table = np.array([[1.0, 1 / x, x] for x, _ in used])
    scale = np.abs(table).max(axis=0)
    (_, b, c), *_ = np.linalg.lstsq(table / scale, np.array([1 - y for _, y in used]), rcond=None)
    b, c = b / scale[1], c / scale[2]
    found = math.sqrt(b / c) if b > 0 and c > 0 else 0.0
    return found if used[0][0] <= found <= used[-1][0] else None
