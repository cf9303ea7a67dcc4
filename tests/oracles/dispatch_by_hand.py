"""Rows of a dispatch counted one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from phalanx.plan.moe.dispatch import DispatchPlan


def rows_by_hand(experts_PTK: Sequence[ArrayLike], plan: DispatchPlan) -> list[list[tuple[int, int, int]]]:
    """For every slot of the group, its rows as (source, token, k) in the order in which the experts see them.

    A pair with expert -1 was dropped. The twin of the device's index arithmetic, for tests and explanations.
    """
    slots = np.asarray(plan.slots_G)
    arrived: list[list[tuple[int, int, int]]] = [[] for _ in slots]
    for p, experts_TK in enumerate(experts_PTK):
        experts = np.asarray(experts_TK)
        for expert in range(int(slots.max()) + 1):
            pairs = [(p, int(t), int(k)) for t, k in np.argwhere(experts == expert)]
            for slot in np.flatnonzero(slots == expert):
                count = int(plan.rows_PG[p, slot])
                arrived[slot] += pairs[:count]
                pairs = pairs[count:]
    order = {plan.source(ep=p, etp=x): (x, p) for p in range(plan.ep) for x in range(plan.etp)}
    return [sorted(rows, key=lambda row: order[row[0]]) for rows in arrived]
