"""How many forwards ahead of 1F1B are worth their memory: chosen from what passes and transfers take and from what a rank may hold.

Decides `extra_warmup` of an eager schedule. More of it hides more of the transfers and holds more micro-batches; how much is hidden depends on the
transfer's share c/f of a forward pass alone, and where transfers are short nothing is gained (arXiv 2211.05322, and the table of
`docs/explanation/pipelines.md`). So: of all numbers that fit the memory, the smallest on each rank with which the simulated step takes at most
`tolerance` longer than with the best of them. Must never change: a choice is a function of its arguments, the same on every rank
that has the same figures. Orders do not change sums, so no result of a run depends on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.units import format_bytes, format_seconds
from phalanx.plan.pipeline.schedule.clock import ScheduleCosts, simulate
from phalanx.plan.pipeline.schedule.make import make_schedule, most_extra, nearest_extra, schedule_problems

TOLERANCE = 0.005
"""Share of the step's time that a measurement cannot tell apart, and that is not worth a micro-batch's memory."""
STEADY = 6
"""Micro-batches for each rank that are simulated at most: each one more repeats the same."""
TRIED = 120
"""So many numbers are tried one and all; where there are more (beyond five ranks), a local search of `SEARCH_STEPS` steps looks for the best."""
SEARCH_STEPS = 8


@dataclass(frozen=True, kw_only=True)
class WarmupChoice(Hashed):
    """The forwards ahead that were chosen, and all that they were chosen from."""

    schedule: str
    num_microbatches: int
    costs: ScheduleCosts
    live_bytes: tuple[int, ...]
    """What one micro-batch holds on each rank between its forward and its backward pass."""
    budget_bytes: int | None
    """What a rank may hold of them; None: as much as it wants."""
    tolerance: float
    extra_warmup: tuple[int, ...]
    makespan_s: float
    """Simulated, of `simulated` micro-batches."""
    best_s: float
    """The same with the best numbers that fit the memory."""
    plain_s: float
    """The same with none ahead: 1F1B."""
    simulated: int

    @property
    def ratio(self) -> float:
        """c/f: a transfer over a forward pass of the slowest stage."""
        return self.costs.p2p / max(self.costs.forward)

    @property
    def live(self) -> tuple[int, ...]:
        """Micro-batches that each rank holds at most."""
        pp = len(self.extra_warmup)
        return tuple(min(self.num_microbatches, pp - rank + e) for rank, e in enumerate(self.extra_warmup))

    def check(self) -> None:
        """Raise `PlanError` where the choice is illegal, does not fit the memory or is slower than it says."""
        pp = len(self.extra_warmup)
        problems = schedule_problems(
            self.schedule, pp=pp, virtual=1, num_microbatches=self.num_microbatches, extra_warmup=self.extra_warmup
        )
        for rank, (count, each) in enumerate(zip(self.live, self.live_bytes, strict=True)):
            if self.budget_bytes is not None and count * each > self.budget_bytes:
                rule = f"must be at most the {self.budget_bytes} that a rank may hold"
                problems.append(Problem(where=f"warmup.rank{rank}.bytes", value=count * each, rule=rule))
        if self.makespan_s > self.best_s * (1 + self.tolerance):
            rule = f"must be within {self.tolerance:.1%} of the best, {self.best_s}"
            problems.append(Problem(where="warmup.makespan_s", value=self.makespan_s, rule=rule))
        raise_if(problems, PlanError, subject="forwards ahead")

    def to_dict(self) -> dict[str, Any]:
        plain = super().to_dict()
        plain["costs"]["edge_p2p"] = sorted(self.costs.edge_p2p.items())
        return plain

    def explain(self) -> str:
        """Why these numbers, in a few lines."""
        held = " ".join(
            f"{count} x {format_bytes(each)}" for count, each in zip(self.live, self.live_bytes, strict=True)
        )
        budget = "no bound" if self.budget_bytes is None else f"at most {format_bytes(self.budget_bytes)} a rank"
        gain = self.plain_s / self.makespan_s
        return (
            f"{self.schedule}: a transfer takes {format_seconds(self.costs.p2p)}, {self.ratio:.2f} of a forward pass\n"
            f"  forwards ahead of 1F1B, by rank: {' '.join(map(str, self.extra_warmup))} (at most {' '.join(map(str, most_extra(len(self.extra_warmup))))})\n"
            f"  {gain:.3f} times as fast as with none by the simulation, within {self.tolerance:.1%} of the best that fits\n"
            f"  activations held, by rank: {held} ({budget})"
        )


def choose_warmup(
    schedule: str,
    costs: ScheduleCosts,
    *,
    num_microbatches: int,
    live_bytes: Sequence[int],
    budget_bytes: int | None = None,
    tolerance: float = TOLERANCE,
) -> WarmupChoice:
    """The smallest numbers, the first rank's first. Raises `PlanError` where not even 1F1B fits the memory."""
    pp, m = len(live_bytes), num_microbatches
    limit = _fitting(tuple(live_bytes), budget_bytes, m)
    few = min(m, STEADY * pp)

    def takes(extra: Sequence[int]) -> float:
        made = make_schedule(schedule, pp=pp, virtual=1, num_microbatches=few, extra_warmup=extra)
        return simulate(made, costs).makespan

    options = _options(limit, takes)
    best_s = min(takes(extra) for extra in options)
    enough = best_s * (1 + tolerance)
    chosen = min(extra for extra in options if takes(extra) <= enough)
    for rank in range(pp):
        chosen = _fewest(chosen, rank, lambda extra: takes(extra) <= enough)
    return WarmupChoice(
        schedule=schedule,
        num_microbatches=m,
        costs=costs,
        live_bytes=tuple(live_bytes),
        budget_bytes=budget_bytes,
        tolerance=tolerance,
        extra_warmup=chosen,
        makespan_s=takes(chosen),
        best_s=best_s,
        plain_s=takes((0,) * pp),
        simulated=few,
    )


def _options(limit: tuple[int, ...], takes: Callable[[tuple[int, ...]], float]) -> set[tuple[int, ...]]:
    """What is tried: all that is legal where that is little; else the same number everywhere, and from the best of those one rank at a time."""
    pp = len(limit)
    if math.prod(most + 1 for most in limit) <= TRIED:
        every = itertools.product(*(range(most + 1) for most in limit))
        return {extra for extra in every if nearest_extra(extra, pp=pp) == extra}
    options = {nearest_extra([min(most, n) for most in limit], pp=pp) for n in range(pp)}
    best = min(options, key=lambda extra: (takes(extra), extra))
    for _ in range(SEARCH_STEPS):
        around = {
            nearest_extra([*best[:rank], count, *best[rank + 1 :]], pp=pp)
            for rank, most in enumerate(limit)
            for count in (best[rank] - 1, best[rank] + 1)
            if 0 <= count <= most
        }
        around = {extra for extra in around if all(e <= most for e, most in zip(extra, limit, strict=True))}
        better = min(around - options, key=lambda extra: (takes(extra), extra), default=best)
        options |= around
        if takes(better) >= takes(best):
            break
        best = better
    return options


def _fewest(extra: tuple[int, ...], rank: int, fast: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """`extra` with the smallest number on `rank` that is still `fast`; ranks behind it follow where they must."""
    pp, low, high = len(extra), 0, extra[rank]
    found = extra
    while low < high:
        middle = (low + high) // 2
        option = nearest_extra((*extra[:rank], middle, *extra[rank + 1 :]), pp=pp)
        if fast(option):
            found, high = option, middle
        else:
            low = middle + 1
    return found


def _fitting(live_bytes: tuple[int, ...], budget_bytes: int | None, m: int) -> tuple[int, ...]:
    """The most forwards ahead that the memory has room for, by rank."""
    pp = len(live_bytes)
    if budget_bytes is None:
        return most_extra(pp)
    limits, problems = [], []
    for rank, (each, most) in enumerate(zip(live_bytes, most_extra(pp), strict=True)):
        room = budget_bytes // max(1, each)
        plain = min(m, pp - rank)
        if room < plain:
            rule = f"holds the {plain} micro-batches of 1F1B on rank {rank}, {format_bytes(each)} each"
            hint = f"at least {plain * each} bytes"
            problems.append(Problem(where="warmup.budget_bytes", value=budget_bytes, rule=rule, hint=hint))
        limits.append(most if room >= m else min(most, max(0, room - plain)))
    raise_if(problems, PlanError, subject="forwards ahead")
    return tuple(limits)
