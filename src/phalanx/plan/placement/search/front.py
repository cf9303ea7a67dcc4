"""Recovery, load and bytes pull apart: the placements between which nobody but the user can choose, and a cost that chooses.

Decides which placements are worth showing (the Pareto front: none is better in one thing and no worse in the others) and which of them to take: the one that
recovers best within limits on load and copies (`choose`), or the one that wastes least time (`CostWeights`). Must never change: every point of the front holds the
floor, and the first is the best that recovery knows, with no regard to the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.core.errors import PlanError, Problem
from phalanx.plan.placement.search.balance import relieved, safest
from phalanx.plan.placement.search.host_pool import HostPool
from phalanx.plan.placement.search.hosts import HostPlacement, from_copies
from phalanx.plan.placement.search.local_search import MAX_HOSTS
from phalanx.plan.placement.search.migration import Migration, plan_migration
from phalanx.plan.placement.search.plan import Effort, apart_placement, plan_placement
from phalanx.plan.placement.search.probability import Certificate, fatal_counts
from phalanx.plan.placement.search.replicas import Floats, ReplicaCounts, read_loads, replica_counts

UNCAPPED = "ours, the paper's counts"
PARTS = (0.4, 0.7, 0.9)
"""Where between recovery and balance further placements are looked for."""


@dataclass(frozen=True, kw_only=True)
class CostWeights:
    """What things cost, in seconds lost per second of training. The defaults are the set-up of arXiv 2407.04656: a failure every 300 s
    among 10 hosts, 30 s to be whole again, and minutes to come back from a checkpoint."""

    failure: float = 0.01
    """Probability that a host fails while what was lost is being replaced, where the hosts' own are not known."""
    window_s: float = 30.0
    """Time to replace what was lost."""
    rollback_s: float = 300.0
    """Time that going back to the checkpoint costs."""
    expert_share: float = 0.5
    """Part of the step that waits for the busiest host."""
    copy_s: float = 0.01
    """Time that training stands still for each expert state that travels."""
    horizon_s: float = 120.0
    """Time until the next placement."""

    def cost(self, point: Point) -> float:
        """Seconds lost per second."""
        waiting = self.expert_share * (point.max_over_mean - 1)
        rollback = point.risk * self.rollback_s / self.window_s
        return waiting + rollback + point.num_copies * self.copy_s / self.horizon_s


@dataclass(frozen=True, kw_only=True)
class Point:
    """A placement and what it is worth."""

    name: str
    plan: HostPlacement
    risk: float
    """Probability that the hosts that fail in one window are too many, or the wrong ones."""
    max_over_mean: float
    num_copies: int
    """Expert states that travel from the present placement; 0 where there is none."""
    migration: Migration | None = None
    on_front: bool = True

    @property
    def losses(self) -> tuple[float, ...]:
        """Fatal part of the losses of k = 0, 1, 2, ... hosts: what recovery alone compares."""
        return tuple(float(1 - chance.low) for chance in self.plan.certificate.chances)

    def is_beaten_by(self, other: Point) -> bool:
        """Whether `other` is nowhere worse and somewhere better."""
        mine = (self.risk, self.max_over_mean, self.num_copies)
        theirs = (other.risk, other.max_over_mean, other.num_copies)
        return theirs != mine and all(t <= m for t, m in zip(theirs, mine, strict=True))


def risk_of(certificate: Certificate, failure: float) -> float:
    """Probability of a fatal loss when each host fails with probability `failure`: losses of k hosts, weighted by how likely k is."""
    n = certificate.num_hosts
    return math.fsum(
        math.comb(n, c.lost) * failure**c.lost * (1 - failure) ** (n - c.lost) * float(1 - c.low)
        for c in certificate.chances
    )


def placement_front(
    loads: ArrayLike,
    pool: HostPool,
    *,
    floor: int,
    current: HostPlacement | None = None,
    worth: CostWeights | None = None,
    effort: Effort | None = None,
    best: HostPlacement | None = None,
) -> list[Point]:
    """All placements that were looked at, the best for recovery first, then by rising risk; `on_front` marks those that nothing beats.

    `best`: the best for recovery, where it is known already.
    """
    loads_LE = read_loads(loads)
    counts = replica_counts(loads_LE, pool, floor=floor)
    rate = (worth or CostWeights()).failure
    effort = effort or Effort()
    best = best or plan_placement(counts, pool, loads_LE, effort=effort)
    others = _others(loads_LE, pool, counts, effort)
    level = dict(others).get("least loaded")
    plans = [("ours", best)]
    if pool.num_hosts <= MAX_HOSTS and loads_LE.any() and level is not None:
        for part in PARTS:
            start = min((best, dict(others).get(UNCAPPED, best)), key=lambda plan: plan.max_over_mean(loads_LE))
            plans.append((f"ours, {part:.0%} to level", _between(start, level, loads_LE, part=part, effort=effort)))
    plans += others
    points = [_point(name, plan, loads_LE, current, rate) for name, plan in plans]
    if current is not None:
        moved = plan_migration(current, plans[0][1], rename=True)
        points.append(_measured("ours, fewest moves", moved.new, loads_LE, moved, rate))
        points += _patched_point(current, pool, loads_LE, floor=counts.floor, rate=rate)
    first, rest = points[0], sorted(points[1:], key=lambda p: (p.risk, p.max_over_mean, p.num_copies))
    return [replace(p, on_front=not any(p.is_beaten_by(q) for q in points)) for p in (first, *rest)]


def _others(loads: Floats, pool: HostPool, counts: ReplicaCounts, effort: Effort) -> list[tuple[str, HostPlacement]]:
    """Replica counts of the paper, and rules that know nothing of recovery, repaired so far that they hold the floor."""
    uncapped = replica_counts(loads, pool, floor=counts.floor, cap=False)
    plans = []
    if uncapped.counts != counts.counts:
        plans.append((UNCAPPED, plan_placement(uncapped, pool, loads, effort=effort)))
    for rule in ("spread", "least_loaded"):
        plan = apart_placement(rule, loads, counts, pool)
        if plan is not None:
            plans.append((rule.replace("_", " "), plan))
    return plans


def _between(best: HostPlacement, level: HostPlacement, loads: Floats, *, part: float, effort: Effort) -> HostPlacement:
    """A plan a `part` of the way from the best for recovery to the most level one.

    One layer: the safest found within that bound on the load. Several layers survive together only because they are aligned, which swaps
    in one of them cannot build: so the best is relieved of load within that bound on fatal losses.
    """
    num_hosts, seed = best.pool.num_hosts, effort.seed
    swaps = effort.of(num_hosts, effort.balance_swaps, best.num_layers)
    if best.num_layers == 1:
        low, high = level.max_over_mean(loads), best.max_over_mean(loads)
        most = high - part * max(high - low, 0.0)
        copies = safest(level.copies, loads, most=most, swaps=4 * swaps, seed=seed)
    else:
        ends = [fatal_counts(plan.holder_sets, num_hosts) for plan in (best, level)]
        allowed = tuple(a + int(part * max(b - a, 0)) for a, b in zip(*ends, strict=True))
        copies = relieved(best.copies, loads, allowed=allowed, swaps=swaps, seed=seed)
    plan = from_copies(copies, best.pool, floor=best.floor)
    plan.check()
    return plan


def _point(name: str, plan: HostPlacement, loads: Floats, current: HostPlacement | None, rate: float) -> Point:
    moved = None if current is None else plan_migration(current, plan)
    return _measured(name, plan if moved is None else moved.new, loads, moved, rate)


def _measured(name: str, plan: HostPlacement, loads: Floats, moved: Migration | None, rate: float) -> Point:
    risk = risk_of(plan.certificate, rate) if plan.independent is None else 1 - plan.independent[0]
    return Point(
        name=name,
        plan=plan,
        risk=risk,
        max_over_mean=plan.max_over_mean(loads),
        num_copies=0 if moved is None else moved.num_copies,
        migration=moved,
    )


def _patched_point(current: HostPlacement, pool: HostPool, loads: Floats, *, floor: int, rate: float) -> list[Point]:
    """What is held now, with no more than the floor mended: where the hosts are those that are there, or fewer of them."""
    patched = patched_placement(current, pool, floor=floor)
    if patched is None:
        return []
    return [_point("as it is, floor mended", patched, loads, current, rate)]


def patched_placement(current: HostPlacement, pool: HostPool, *, floor: int) -> HostPlacement | None:
    """The present slots of the hosts of `pool`, with the fewest changed so that every expert is on `floor` hosts again.

    What is below the floor takes the slot of the expert with most hosts, in a rack that has none of it where there is one. None where a host is new or has other slots, or where the
    floor cannot be reached this way.
    """
    names = current.pool.host_names
    if any(name not in names for name in pool.host_names):
        return None
    at = [names.index(name) for name in pool.host_names]
    if tuple(current.pool.slots[i] for i in at) != pool.slots:
        return None
    copies: NDArray[np.int64] = current.copies[:, :, at].copy()
    racks = np.array(pool.racks or range(pool.num_hosts))
    if not all(_mended(table, floor, racks) for table in copies):
        return None
    return from_copies(copies, pool, floor=floor)


def _mended(table: NDArray[np.int64], floor: int, racks: NDArray[np.int64]) -> bool:
    """One layer, in place. `racks` of the hosts."""
    hosts = (table > 0).sum(1)
    for expert in np.argsort(hosts, kind="stable").tolist():
        while hosts[expert] < floor:
            spare = np.where(table > 1, len(hosts) + hosts[:, None], np.where(table > 0, hosts[:, None], -1))
            spare[expert] = -1
            spare[:, table[expert] > 0] = -1
            apart = ~np.isin(racks, racks[table[expert] > 0])
            better = np.where(apart & (spare > floor), spare + int(spare.max()), spare)
            victim, host = np.unravel_index(int(better.argmax()), spare.shape)
            if spare[victim, host] <= floor:
                return False
            table[victim, host] -= 1
            table[expert, host] += 1
            hosts = (table > 0).sum(1)
    return True


def parted_placement(plan: HostPlacement, *, floor: int) -> HostPlacement:
    """The placement with copies of experts of one rack brought to others, as far as single moves do it: into a slot whose expert
    can spare it, else in exchange for another's copy.

    Every move leaves one (layer, expert) less in one rack, brings no other there, and keeps every expert on as many hosts as it
    was, but for what it has beyond `floor`.
    """
    if not plan.num_in_one_rack(floor):
        return plan
    copies = plan.copies.copy()
    of_rack = np.array(plan.pool.racks)[:, None] == np.unique(plan.pool.racks)
    for table in copies:
        while any(
            _parted(table, int(expert), floor, of_rack) for expert in np.flatnonzero(_num_racks(table, of_rack) < 2)
        ):
            pass
    return from_copies(copies, plan.pool, floor=plan.floor)


def _num_racks(table: NDArray[np.int64], of_rack: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(E,) racks that each expert is in. `of_rack` (N, R)."""
    found: NDArray[np.int64] = ((table > 0).astype(np.int64) @ of_rack > 0).sum(1)
    return found


def _parted(table: NDArray[np.int64], expert: int, floor: int, of_rack: NDArray[np.bool_]) -> bool:
    """Bring a copy of `expert`, all of whose copies are in one rack, to another one; in place. False where no single move does."""
    at = table > 0
    hosts, in_rack = at.sum(1), at.astype(np.int64) @ of_rack
    rack_of, mine = of_rack.argmax(1), np.flatnonzero(at[expert])
    elsewhere = at & (rack_of != rack_of[mine[0]])
    stays = (table > 1) | (in_rack[:, rack_of] > 1)  # in that rack, with one copy less on that host
    num_racks = (in_rack > 0).sum(1)[:, None]
    racks_left, enough = num_racks - ~stays, np.minimum(num_racks, 2)
    spare = elsewhere & (racks_left >= enough) & ((table > 1) | (hosts[:, None] > floor))
    if spare.any():
        rank = np.where(spare, len(hosts) * (table > 1) + hosts[:, None], -1)
        other, host = np.unravel_index(int(rank.argmax()), rank.shape)
        table[other, host] -= 1
        table[expert, host] += 1
        return True
    for own in mine[np.argsort(-table[expert, mine], kind="stable")] if len(mine) > 1 else ():
        gained = racks_left + (in_rack[:, [rack_of[own]]] == 0)
        swaps = elsewhere & (gained >= enough) & ~at[:, [own]]
        if swaps.any():
            other, host = np.unravel_index(int(swaps.argmax()), swaps.shape)
            swapped, places = np.array([expert, other]), np.array([own, host])
            table[swapped, places] -= 1
            table[swapped[::-1], places] += 1
            return True
    return False


def choose(
    points: Sequence[Point],
    *,
    max_over_mean: float | None = None,
    max_copies: int | None = None,
    by: Callable[[Point], float] | None = None,
) -> Point:
    """The point within the limits that survives most losses of 1, 2, 3, ... hosts (of equals the most level), or the one with the
    least `by`.

    Raises `PlanError` naming the nearest where no point keeps the limits.
    """
    kept = [
        p
        for p in points
        if (max_over_mean is None or p.max_over_mean <= max_over_mean)
        and (max_copies is None or p.num_copies <= max_copies)
    ]
    if not kept:
        problems = []
        if max_over_mean is not None:
            least = min(points, key=lambda p: p.max_over_mean)
            hint = f"the lowest found is {least.max_over_mean:.3f} ({least.name})"
            problems.append(
                Problem(where="max_load", value=max_over_mean, rule="no placement found is as level", hint=hint)
            )
        if max_copies is not None:
            fewest = min(points, key=lambda p: p.num_copies)
            hint = f"the fewest found are {fewest.num_copies} ({fewest.name})"
            problems.append(
                Problem(where="max_copies", value=max_copies, rule="no placement found moves as little", hint=hint)
            )
        raise PlanError(problems, subject="the choice of a placement")
    if by is not None:
        return min(kept, key=by)
    return min(kept, key=lambda p: (p.losses, p.risk, p.max_over_mean, p.num_copies))
