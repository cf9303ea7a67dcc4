"""Which forward pass runs beside which backward pass, so that each computes while the other's messages travel.

Decides the pairs of a schedule and whether they pay. A pair is a pass of a backward kind (B, I or W) and the forward pass that follows it
at once on the same rank: they are of different micro-batches or stages, so neither needs the other. (What the 1F1B all-to-all hiding
of Megatron-Core and DualPipe, arXiv 2412.19437, pair as well.) The other way round, a forward pass and the backward pass that follows,
ranks may wait for one another for ever, and where they do not, whoever waits for the gradient waits for a forward pass too.

A pair runs as one: it starts when both have their inputs, and others get its results when both have ended. So it needs slack between
neighbours. Plain 1F1B over several ranks has none: micro-batch j goes down and up again before the pair of j + 1 can start, and every
rank waits for a whole pair, each time; schedules with further forwards ahead (interleaved_1f1b, eager_1f1b, the V-shaped ones) have it.

Must never change: order and number of passes stay those of the schedule, so whatever runs is the same sums in the same order; with no more than one
micro-batch more held than the schedule says (the forward pass begins before the backward pass has let go of its own).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from phalanx.core.errors import PlanError, Problem
from phalanx.plan.pipeline.schedule.clock import Pair, simulate
from phalanx.plan.pipeline.schedule.make import Order, Schedule

PAYS_AT = 2 / 3
"""A pair over its two passes, where all communication is hidden and there is half as much of it as of computing."""


def neighbour_pairs(order: Order) -> tuple[Pair, ...]:
    """Each pass of a backward kind with the forward pass right after it, in the order of one rank."""
    return tuple((first, second) for first, second in pairwise(order) if first.kind != "F" and second.kind == "F")


@lru_cache(maxsize=32)
def choose_pairs(schedule: Schedule) -> tuple[Pair, ...]:
    """The pairs of all ranks; none where ranks would wait for one another for ever, or where they cannot pay (`why_no_pairs`)."""
    found = tuple(pair for order in schedule.actions for pair in neighbour_pairs(order))
    return found if found and _time_over_unpaired(schedule, found, PAYS_AT) < 1 else ()


def break_even(schedule: Schedule) -> float:
    """Largest time of a pair over that of its two passes at which pairing still gains something by the plan's clock, 0 to 1.

    1: pairs cost nothing even where they hide nothing. 0: never, or there are no pairs.
    """
    found = tuple(pair for order in schedule.actions for pair in neighbour_pairs(order))
    if not found or _time_over_unpaired(schedule, found, 0.5) > 1:
        return 0.0
    low, high = 0.5, 1.0
    if _time_over_unpaired(schedule, found, high) <= 1:
        return high
    for _ in range(7):  # to a hundredth
        middle = (low + high) / 2
        low, high = (middle, high) if _time_over_unpaired(schedule, found, middle) <= 1 else (low, middle)
    return low


def why_no_pairs(schedule: Schedule) -> list[Problem]:
    """Why no pass of this schedule runs beside another; empty where some do."""
    where, name = "schedule.pair_passes", schedule.name
    if not any(neighbour_pairs(order) for order in schedule.actions):
        rule = f"finds no backward pass with a forward pass right after it in {name}"
        return [Problem(where=where, value=True, rule=f"{rule} of {_batches(schedule)}", hint="leave it out")]
    if choose_pairs(schedule):
        return []
    most = break_even(schedule)
    if most > PAYS_AT:
        rule, hint = (
            f"gains nothing in {name} of {_batches(schedule)}: other ranks wait anyway",
            "use more micro-batches",
        )
    else:
        rule = f"loses time in {name} of {_batches(schedule)}, whose ranks leave each other no slack"
        rule += f", unless a pair takes less than {most:.2f} of its two passes" if most else ""
        hint = "eager_1f1b, interleaved_1f1b or dualpipev has slack"
    return [Problem(where=where, value=True, rule=rule, hint=hint)]


def _batches(schedule: Schedule) -> str:
    count = schedule.num_microbatches
    return f"{count} micro-batch{'es' if count > 1 else ''} over {schedule.pp} rank{'s' if schedule.pp > 1 else ''}"


def _time_over_unpaired(schedule: Schedule, pairs: tuple[Pair, ...], share: float) -> float:
    """Infinite where ranks wait for ever."""
    try:
        paired = simulate(schedule, pairs=pairs, paired_share=share).makespan
    except PlanError:
        return float("inf")
    return paired / simulate(schedule).makespan
