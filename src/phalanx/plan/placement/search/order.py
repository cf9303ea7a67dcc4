"""Which host takes which place of a plan, where hosts are not alike.

Decides an order of the hosts; every layer has the same. Losing any k hosts is as likely to be survived in any order; racks that fail as a whole and hosts
that fail more often than others tell the orders apart. Compared by, first to last: fatal losses of 1, 2, 3, ... racks, probability of a fatal loss under the
hosts' own failure probabilities, and what has to be moved (`costs`). Must never change: hosts that trade places have equally many slots.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.placement.search.host_pool import HostPool
from phalanx.plan.placement.search.host_sets import mask_of, minimal_sets
from phalanx.plan.placement.search.probability import fatal_counts, independent_recovery

MAX_ROUNDS = 8
"""Rounds of trying all pairs; 2 or 3 are enough in practice."""
MAX_PAIRS = 20_000
"""Pairs tried in all: beyond some 60 hosts a round is not finished."""

Costs = NDArray[np.int64]
"""(N, N) what moves if place i of the plan goes to host j."""


def ordered_hosts(sets: Collection[int], pool: HostPool, *, costs: Costs | None = None) -> list[int]:
    """`order[host]` = place of the plan that the host takes. As it is where all hosts are alike and nothing costs anything."""
    num_hosts = pool.num_hosts
    if not pool.racks and not pool.failure and costs is None:
        return list(range(num_hosts))
    minimal = minimal_sets(sets, limit=400) or sorted(sets, key=lambda s: (s.bit_count(), s))[:400]
    starts = [list(range(num_hosts)), _dealt(pool)]
    if costs is not None:
        starts.append(_cheapest(costs, pool))
    if not pool.racks and not pool.failure:
        return starts[-1]
    judge = _Judge(minimal, pool, costs)
    return min((_searched(start, judge, pool) for start in starts), key=judge)


class _Judge:
    """Orders compared; what depends on the order alone is computed once."""

    def __init__(self, minimal: Sequence[int], pool: HostPool, costs: Costs | None) -> None:
        self.pool, self.costs = pool, costs
        self.held = np.array([[s >> n & 1 for n in range(pool.num_hosts)] for s in minimal], dtype=bool)
        racks = sorted(set(pool.racks))
        self.rack_of = np.array([racks.index(r) for r in pool.racks], dtype=np.int64)
        self.num_racks = len(racks)

    def __call__(self, order: Sequence[int]) -> tuple[tuple[int, ...], float, int]:
        held = self.held[:, list(order)]
        return self._racks(held), self._risk(held), self._cost(order)

    def _racks(self, held: NDArray[np.bool_]) -> tuple[int, ...]:
        if not self.pool.racks:
            return ()
        touched = np.stack([held[:, self.rack_of == r].any(1) for r in range(self.num_racks)], axis=1)
        return fatal_counts({mask_of(np.flatnonzero(row)) for row in touched}, self.num_racks)

    def _risk(self, held: NDArray[np.bool_]) -> float:
        """Probability of a fatal loss; 12 digits, so that rounding decides nothing."""
        if not self.pool.failure:
            return 0.0
        low, _ = independent_recovery([mask_of(np.flatnonzero(row)) for row in held], self.pool.failure)
        return float(f"{1 - low:.12g}")

    def _cost(self, order: Sequence[int]) -> int:
        if self.costs is None:
            return 0
        return int(self.costs[list(order), np.arange(len(order))].sum())


def _dealt(pool: HostPool) -> list[int]:
    """Places dealt over racks in turn, so that consecutive places (a segment) stand in different racks; risky hosts far apart."""
    num_hosts = pool.num_hosts
    failure = pool.failure or (0.0,) * num_hosts
    racks = pool.racks or tuple(range(num_hosts))
    seen: dict[int, int] = {}
    turn = []
    for host in sorted(range(num_hosts), key=lambda n: (failure[n], n)):
        turn.append((seen.get(racks[host], 0), racks[host], host))
        seen[racks[host]] = seen.get(racks[host], 0) + 1
    order = [0] * num_hosts
    places: dict[int, list[int]] = {}
    for place, slots in enumerate(pool.slots):
        places.setdefault(slots, []).append(place)
    for _, _, host in sorted(turn):
        order[host] = places[pool.slots[host]].pop(0)
    return order


def _cheapest(costs: Costs, pool: HostPool) -> list[int]:
    """The assignment with the least cost (Hungarian), among hosts with equally many slots."""
    from scipy.optimize import linear_sum_assignment

    order = [0] * pool.num_hosts
    for slots in set(pool.slots):
        alike = [n for n, s in enumerate(pool.slots) if s == slots]
        rows, columns = linear_sum_assignment(costs[np.ix_(alike, alike)])
        for place, host in zip(rows, columns, strict=True):
            order[alike[host]] = alike[place]
    return order


def _searched(start: Sequence[int], judge: _Judge, pool: HostPool) -> list[int]:
    """Trade the places of two hosts as long as that is better."""
    order, best = list(start), judge(start)
    left = MAX_PAIRS if math.comb(pool.num_hosts, 2) < 200 else MAX_PAIRS // 40
    for _ in range(MAX_ROUNDS):
        before = best
        for i in range(pool.num_hosts):
            for j in range(i):
                if pool.slots[i] != pool.slots[j] or left <= 0:
                    continue
                left -= 1
                order[i], order[j] = order[j], order[i]
                new = judge(order)
                if new < best:
                    best = new
                else:
                    order[i], order[j] = order[j], order[i]
        if best == before:
            break
    return order
