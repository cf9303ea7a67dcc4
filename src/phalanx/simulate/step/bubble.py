"""How long ranks of a pipeline of equal stages wait, without a clock: the bubble, and how long before the end each rank is done.

Decides what the first pass of a search takes for both. Schedules that have a closed form have it here; of the others the schedule itself runs on a
clock of equal stages, once. Must never change: on equal stages both are those of the clock (test).
"""

from __future__ import annotations

from functools import lru_cache

from phalanx.plan.pipeline.schedule import Schedule, ends_of_ranks, make_schedule, uniform_costs

WHOLE = ("1f1b", "gpipe", "interleaved_1f1b")
"""Schedules with closed forms."""
WEIGHTS = 19
"""Tenths of a forward pass that weight gradients may take: of two, all but a tenth."""


@lru_cache(maxsize=64)
def schedule_of(
    name: str, pp: int, virtual: int, microbatches: int, extra_warmup: tuple[int, ...] | None = None
) -> Schedule:
    """`make_schedule`, once."""
    return make_schedule(name, pp=pp, virtual=virtual, num_microbatches=microbatches, extra_warmup=extra_warmup)


def bubble_share(
    schedule: str, p: int, v: int, m: int, weight: float, extra_warmup: tuple[int, ...] | None = None
) -> float:
    """Bubble in units of forward and backward of a rank's chunks of one micro-batch; `weight` is W's share of a backward (B = 2F).

    Where there is no closed form the clock has few micro-batches: the bubble does not grow with their number.
    """
    if p == 1:
        return 0.0
    if schedule == "interleaved_1f1b" and m < p:
        return (p - 1) / v + (p - m) * (v - 1) / v
    if schedule in WHOLE:
        return (p - 1) / v
    return _clocked(schedule, p, v, min(m, 3 * p), extra_warmup)[tenths(weight)][0]


def idle_passes(
    schedule: str, p: int, v: int, m: int, weight: float, extra_warmup: tuple[int, ...] | None = None
) -> tuple[float, ...]:
    """(p,) how long before the end of all passes each rank's last one ends, in backward passes of one chunk; the arguments are those of `bubble_share`.

    Rank r begins r forward passes after the first in every schedule.
    """
    if schedule in WHOLE or p == 1:
        return tuple(map(float, range(p)))
    return _clocked(schedule, p, v, min(m, 3 * p), extra_warmup)[tenths(weight)][1]


def tenths(weight: float) -> int:
    """W's share of a backward as closed forms tell it apart."""
    return min(WEIGHTS, round(20 * weight))


@lru_cache(maxsize=1024)
def _clocked(
    schedule: str, p: int, v: int, m: int, extra_warmup: tuple[int, ...] | None = None
) -> tuple[tuple[float, tuple[float, ...]], ...]:
    """Bubble and idle ends by tenths of W, on a clock: F = 1, I = 2 - W."""
    costs = [uniform_costs(p * v, input_grad=2 - w / 10, weight_grad=max(w / 10, 0.1)) for w in range(WEIGHTS + 1)]
    ends = ends_of_ranks(schedule_of(schedule, p, v, m, extra_warmup), costs)[1]
    busy = (m * v * (one.forward[0] + one.input_grad[0] + one.weight_grad[0]) for one in costs)
    return tuple(
        ((max(own) - work) / (3 * v), tuple((max(own) - end) / 2 for end in own))
        for own, work in zip(ends.tolist(), busy, strict=True)
    )
