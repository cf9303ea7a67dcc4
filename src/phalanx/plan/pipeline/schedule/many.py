"""One schedule on the clock under many costs at once: the makespans that `clock.simulate` gives, one after another, in a hundredth of the time.

Decides nothing. Where each ordered pair of ranks has a channel of its own, no pass waits for a transfer that it does not need, so what comes before what on ranks and channels is the schedule's
order whatever passes cost; and ends are longest paths, one vector operation for each step of all costs. Must never change: the makespan of each cost is the clock's (test).

Shape: n costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PlanError, raise_if
from phalanx.plan.pipeline.schedule.clock import ScheduleCosts, chain, cost_problems, simulate
from phalanx.plan.pipeline.schedule.make import Schedule

Floats = NDArray[np.float64]


def ends_of_ranks(schedule: Schedule, costs: Sequence[ScheduleCosts]) -> tuple[Floats, Floats]:
    """(n, pp) when the first pass of each rank begins, and when its last one ends. Raises `PlanError` as `simulate` does.

    Of costs whose transfers neither block nor share the links of ranks.
    """
    assert all(one.channels == "pair" and not one.blocking for one in costs)
    raise_if([p for one in costs for p in cost_problems(one, schedule.num_stages)], PlanError, subject="costs")
    tables = {
        kind: np.array([getattr(one, name) for one in costs]).T
        for kind, name in (("F", "forward"), ("B", "backward"), ("I", "input_grad"), ("W", "weight_grad"))
    }
    transfers = {edge: np.array([one.transfer_s(edge) for one in costs]) for edge in chain(schedule.num_stages)}
    last_stage = schedule.num_stages - 1
    nothing: Floats = np.zeros(len(costs))
    free = [nothing] * schedule.pp
    starts: list[Floats | None] = [None] * schedule.pp
    channels: dict[tuple[int, int], Floats] = {}
    arrived: dict[tuple[bool, int, int], Floats] = {}
    spans = simulate(schedule, costs[0]).spans  # every pass behind all that it needs, whatever it costs
    for rank, span in sorted(((r, s) for r, own in enumerate(spans) for s in own), key=lambda one: one[1].start):
        kind, stage, microbatch = span.action
        start = free[rank]
        if kind != "W" and stage != (0 if kind == "F" else last_stage):
            start = np.maximum(start, arrived[kind != "F", stage, microbatch])
        if starts[rank] is None:
            starts[rank] = start
        free[rank] = end = start + tables[kind][stage]
        target = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or not 0 <= target <= last_stage:
            continue
        dst = schedule.rank_of_stage[target]
        seconds = transfers[min(stage, target), max(stage, target)]
        if dst != rank and seconds.any():
            before = channels.get((rank, dst), nothing)
            sent = np.maximum(end, before) + seconds
            channels[rank, dst] = np.where(seconds > 0, sent, before)
            end = np.where(seconds > 0, sent, end)  # what takes no time waits for no channel
        arrived[kind != "F", target, microbatch] = end
    return np.array([nothing if one is None else one for one in starts]).T, np.array(free).T
