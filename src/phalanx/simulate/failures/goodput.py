"""How much of the time a job makes progress, when hosts fail: checkpoint and restart against recovery from replicas.

Decides the clock of failures. A job runs in cycles: `interval` seconds of steps, then a save that stops it for `save_s`. A failure of any rank
loses what was done since the last save and costs detection and restart; with replicas of the experts and shards, a failure that leaves
one holder of everything costs detection and repair, nothing is lost, and the job goes on without the lost hosts, slower by their share or as its mapping has it (`Practice.share`); once no host is left, replicas are lost too. Failures are a
Poisson process of the job's rate, whatever number of hosts is running, or come from a trace. Must never change: useful + saving + lost + down =
all of the time, and none of them is negative.

Young and Daly's interval: sqrt(2 * save_s * M), M the mean time between failures of the job.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from phalanx.core.errors import DataError, PlanError, Problem, raise_if
from phalanx.core.reading import MalformedError, is_count, parse_csv, read_text

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
    """Seconds from the detection of a failure to the first step, from a checkpoint."""
    repair_s: float = 20.0
    """The same from replicas: membership, plan, transfer."""
    survival: float = 1.0
    """Probability that a failure leaves a holder of every expert and shard."""
    repair_host_s: float = 0.0
    """Time until the lost host is replaced; until then a job with replicas runs without it."""
    share: Callable[[int], float] | None = None
    """Share of full speed with so many hosts, which make no whole mapping perhaps; 0: they wait. None: the hosts' own share."""
    pace: float = 1.0
    """Pace of the job with its slow ranks, over the usual one: at most 1."""
    put_out: tuple[tuple[float, float], ...] = ()
    """(when, pace from then on): with replicas a slow host is removed, and replaced as a lost one is. Nothing is lost, and nobody waits to detect it."""


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
    for pace in (practice.pace, *(pace for _, pace in practice.put_out)):
        if not 0 < pace <= 1:
            rule = "must be above 0 and at most 1, that of a job without slow ranks"
            out.append(Problem(where="goodput.pace", value=pace, rule=rule, hint="use 1"))
    if not 0 <= practice.survival <= 1:
        out.append(Problem(where="goodput.survival", value=practice.survival, rule="is a probability", hint="use 1"))
    return out


def young_daly(save_s: float, mean_between_s: float) -> float:
    """The best interval between saves, to first order."""
    return math.sqrt(2 * save_s * mean_between_s)


def expected_goodput(practice: Practice, mean_between_s: float) -> float:
    """Useful share of the time, exactly for Poisson failures: a cycle is repeated until it has no failure, a restart until it has none.

    Time of a cycle: M e^(D/M) (e^(cycle/M) - 1) with M between failures and D down after each (J. T. Daly 2006, doi 10.1016/j.future.2004.11.016).
    """
    cycle, down = practice.interval_s + practice.save_s, practice.detect_s + practice.restart_s
    m = mean_between_s
    try:
        return practice.pace * practice.interval_s / (m * math.exp(down / m) * math.expm1(cycle / m))
    except OverflowError:  # no cycle ever ends
        return 0.0


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

    With replicas every failure takes a host for the downtime and `repair_host_s` after it. Once repaired the job goes on at
    `Practice.share` of its speed, (hosts - out) / hosts without one, and is down while no host is left. Raises `PlanError`.
    """
    raise_if(practice_problems(practice), PlanError, subject="the practice")
    job, times = _Job(practice, hosts, random.Random(seed)), iter(failures)
    upcoming = next(times, math.inf)
    while job.now < duration_s:
        job.advance(min(upcoming, duration_s, job.next_change))
        job.put_out()
        while upcoming <= job.now:
            job.fail()
            upcoming = next(times, math.inf)
    useful, saving, lost, down = (part / duration_s for part in (job.useful, job.saving, job.lost, job.down))
    return Goodput(useful=useful, saving=saving, lost=lost, down=down, failures=job.failures, hours=duration_s / 3600)


@dataclass
class _Job:
    """A job between two events. Work is counted in seconds of all hosts: at half the speed half of a second is useful, half lost."""

    practice: Practice
    hosts: int
    draw: random.Random
    now: float = 0.0
    at: float = 0.0
    """Seconds into the cycle of work and save."""
    unsaved: float = 0.0
    """Useful work since the last save."""
    down_until: float = 0.0
    out: list[float] = field(default_factory=list)
    """A heap: when each lost host is replaced."""
    useful: float = 0.0
    saving: float = 0.0
    lost: float = 0.0
    down: float = 0.0
    failures: int = 0
    gone: int = 0
    """Slow hosts that were removed."""

    @property
    def pace(self) -> float:
        """Pace of as many hosts, over the usual one."""
        return self.practice.put_out[self.gone - 1][1] if self.gone else self.practice.pace

    @property
    def speed(self) -> float:
        """Share of full speed; 0 while down."""
        left = self.hosts - len(self.out)
        if self.now < self.down_until or not left:
            return 0.0
        share = self.practice.share
        return self.pace * (left / self.hosts if share is None else share(left))

    @property
    def next_change(self) -> float:
        """When the speed changes next, if nothing fails."""
        returns = min(self.out[0] if self.out else math.inf, self._next_out_s)
        return min(returns, self.down_until) if self.now < self.down_until else returns

    @property
    def _next_out_s(self) -> float:
        """When the next slow host is removed: never without replicas."""
        p = self.practice
        return p.put_out[self.gone][0] if p.recovery == "replicas" and self.gone < len(p.put_out) else math.inf

    def put_out(self) -> None:
        """Hosts whose time has come hand over what they hold and leave; a save under way begins again."""
        p = self.practice
        while self._next_out_s <= self.now:
            self.gone += 1
            self.at = min(self.at, p.interval_s)
            self.down_until = max(self.down_until, self.now + p.repair_s)
            if len(self.out) < self.hosts:
                heapq.heappush(self.out, self.down_until + p.repair_host_s)

    def advance(self, until: float) -> None:
        """Advances to an event, at one speed."""
        span, speed = until - self.now, self.speed
        if speed:
            self._work(span, speed)
        else:
            self.down += span
        self.now = until
        while self.out and self.out[0] <= self.now:
            heapq.heappop(self.out)

    def _work(self, span: float, speed: float) -> None:
        interval = self.practice.interval_s
        whole, rest = divmod(self.at + span, interval + self.practice.save_s)
        work = whole * interval + min(rest, interval) - min(self.at, interval)
        self.useful, self.lost = self.useful + work * speed, self.lost + work * (1 - speed)
        self.saving += span - work
        self.unsaved = speed * min(rest, interval) if whole else self.unsaved + speed * work
        self.at = rest

    def fail(self) -> None:
        """A host fails now. What is kept goes on from where it was; a save under way begins again."""
        p = self.practice
        self.failures += 1
        others = self.hosts - len(self.out) > 1
        kept = p.recovery == "replicas" and self.draw.random() < p.survival and others
        if kept:
            self.at = min(self.at, p.interval_s)
        else:
            self.useful, self.lost = self.useful - self.unsaved, self.lost + self.unsaved
            self.at = self.unsaved = 0.0
        self.down_until = max(self.down_until, self.now + p.detect_s + (p.repair_s if kept else p.restart_s))
        if p.recovery == "replicas":
            if len(self.out) == self.hosts:  # there is no other host to fail
                heapq.heappop(self.out)
            heapq.heappush(self.out, self.down_until + p.repair_host_s)


def read_removals(path: Path) -> tuple[list[float], float]:
    """(times of removals, time of the last line, in seconds) of a trace of spot instances. Raises `DataError`."""
    nodes = read_nodes(path)
    return [at_s for at_s, kind, _ in nodes if kind == "remove"], max((at_s for at_s, _, _ in nodes), default=0.0)


def read_nodes(path: Path) -> list[tuple[float, str, str]]:
    """(seconds, add or remove, node) of a trace of spot instances: lines of `milliseconds,add|remove,node`. Raises `DataError`."""
    try:
        rows = parse_csv(read_text(path), where=str(path))
    except (OSError, MalformedError) as error:
        reason = error.problems[0].rule if isinstance(error, MalformedError) else error.strerror
        raise DataError.of(str(path), None, f"cannot be read ({reason})", subject="the trace") from error
    problems, out = [], []
    for line, row in enumerate(rows, start=1):
        if len(row) != 3 or row[1] not in ("add", "remove") or not is_count(row[0]):
            rule = "is not MILLISECONDS,add|remove,NODE"
            problems.append(Problem(where=f"{path}:{line}", value=",".join(row), rule=rule, hint="0,add,node1"))
        else:
            out.append((int(row[0]) / 1000, row[1], row[2]))
    raise_if(problems, DataError, subject="the trace")
    return sorted(out, key=lambda event: event[0])


def sweep(
    practice: Practice,
    failures: Callable[[], Iterator[float] | Sequence[float]],
    intervals: Sequence[float],
    *,
    duration_s: float,
    hosts: int = 1,
    seed: int = 0,
) -> list[tuple[float, float]]:
    """(interval, useful share) of runs over the same failures, which `failures` gives anew for each."""
    out = []
    for interval in intervals:
        changed = replace(practice, interval_s=interval)
        run = simulate_goodput(changed, failures(), duration_s=duration_s, hosts=hosts, seed=seed)
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
