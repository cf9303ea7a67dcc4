"""One schedule on the clock under many costs at once: the makespans that `schedule_time.simulate` gives, one after another, in a hundredth of the time.

Decides nothing. Where each ordered pair of ranks has a channel of its own, no pass waits for a transfer that it does not need, so what comes before what on ranks and channels is the schedule's
order whatever passes cost; and ends are longest paths, one vector operation for each step of all costs. Must never change: the makespan of each cost is the clock's (test).

Shape: n costs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PlanError, raise_if
from phalanx.plan.schedule import Schedule
from phalanx.plan.schedule_time import ScheduleCosts, cost_problems, simulate

Floats = NDArray[np.float64]


def makespans(schedule: Schedule, costs: Sequence[ScheduleCosts]) -> Floats:
    """(n,) seconds until the last pass of any rank has ended, in a chain of stages. Raises `PlanError` as `simulate` does.

    Costs whose transfers block, or share the links of ranks, are put on the clock one by one.
    """
    if not all(one.channels == "pair" and not one.blocking and not one.edge_p2p for one in costs):
        return np.array([simulate(schedule, one).makespan for one in costs])
    raise_if(
        [p for one in costs for p in cost_problems(one, schedule.num_stages)], PlanError, subject="costs"
    )  # fmt: skip
    tables = {
        kind: np.array([getattr(one, name) for one in costs]).T
        for kind, name in (("F", "forward"), ("B", "backward"), ("I", "input_grad"), ("W", "weight_grad"))
    }
    p2p, last = np.array([one.p2p for one in costs]), schedule.num_stages - 1
    nothing: Floats = np.zeros(len(costs))
    free = [nothing] * schedule.pp
    channels: dict[tuple[int, int], Floats] = {}
    arrived: dict[tuple[bool, int, int], Floats] = {}
    spans = simulate(schedule, costs[0]).spans  # every pass behind all that it needs, whatever it costs
    for rank, span in sorted(((r, s) for r, own in enumerate(spans) for s in own), key=lambda one: one[1].start):
        kind, stage, microbatch = span.action
        start = free[rank]
        if kind != "W" and stage != (0 if kind == "F" else last):
            start = np.maximum(start, arrived[kind != "F", stage, microbatch])
        free[rank] = end = start + tables[kind][stage]
        target = stage + 1 if kind == "F" else stage - 1
        if kind == "W" or not 0 <= target <= last:
            continue
        dst = schedule.rank_of_stage[target]
        if dst != rank:
            end = channels[rank, dst] = np.maximum(end, channels.get((rank, dst), nothing)) + p2p
        arrived[kind != "F", target, microbatch] = end
    return np.max(free, axis=0)  # type: ignore[no-any-return]
