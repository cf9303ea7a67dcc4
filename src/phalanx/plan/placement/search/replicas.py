"""How many replicas each expert of each layer gets, from the tokens that were routed to it.

Decides the counts only; where they live is `plan/placement/search/hosts.py`. Source: arXiv 2407.04656 equation 1 (`paper_counts`). It leaves cases open, which are
decided here:

- no load at all: all experts count equally;
- more experts than slots: refused;
- a floor that the slots cannot give (`experts * f > places`), or above the number of hosts: lowered to what they can, and said so;
- more replicas than hosts: a copy beside a copy adds no safety, and an expert on every host is already shared evenly; so the surplus goes to the
  experts with most load per replica, until each expert is everywhere (`cap=False` keeps the paper's counts).

Must never change: counts of a layer sum to the number of slots, each is at least the floor, and none is below the paper's, but for its surplus.

Shapes: L layers, E experts.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.placement.search.host_pool import HostPool, pool_problems

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ReplicaCounts:
    """Replicas of each expert in each layer."""

    counts: tuple[tuple[int, ...], ...]
    floor: int
    """Replicas that every expert has at least, on as many hosts."""
    asked_floor: int
    notes: tuple[str, ...] = ()
    """What was decided that nobody asked for, in words."""

    @property
    def num_layers(self) -> int:
        return len(self.counts)

    @property
    def num_experts(self) -> int:
        return len(self.counts[0])


def read_loads(loads: ArrayLike) -> Floats:
    """(L, E) loads, one layer also as (E,). Raises `PlanError` with all problems."""
    try:
        table = np.asarray(loads, dtype=np.float64)
    except (TypeError, ValueError) as error:
        problem = Problem(where="loads", value=None, rule="must be a table of numbers, a row for each layer")
        raise PlanError([problem], subject="loads") from error
    if table.ndim == 1:
        table = table[None]
    problems = []
    if table.ndim != 2 or 0 in table.shape:
        problems.append(
            Problem(where="loads.shape", value=table.shape, rule="must be layers x experts, none of them 0")
        )
    for word, wrong in (("finite", ~np.isfinite(table)), ("not negative", table < 0)):
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            problems.append(Problem(where=f"loads{list(at)}", value=float(table[at]), rule=f"a load is {word}"))
    raise_if(problems, PlanError, subject="loads")
    return table


def smoothed(before: ArrayLike | None, now: ArrayLike, *, weight: float) -> Floats:
    """Exponential average of loads: `weight` of the newest window, the rest of what was smoothed before (None: nothing yet)."""
    new = read_loads(now)
    if before is None:
        return new
    old = read_loads(before)
    if old.shape != new.shape:
        rule = f"must have the shape of the loads before, {old.shape}"
        raise PlanError.of("loads.shape", new.shape, rule, subject="loads")
    out: Floats = (1 - weight) * old + weight * new
    return out


def zipf_loads(num_layers: int, num_experts: int, *, skew: float, seed: int = 0) -> Floats:
    """Loads that fall as rank^-skew; which expert has which rank is drawn per layer."""
    falling = np.arange(1, num_experts + 1, dtype=np.float64) ** -skew
    rng = np.random.default_rng(seed)
    out: Floats = np.stack([rng.permutation(falling) for _ in range(num_layers)]) * (1e6 / falling.sum())
    return out


def paper_counts(loads_E: ArrayLike, num_slots: int, *, floor: int) -> NDArray[np.int64]:
    """Equation 1 of arXiv 2407.04656: experts by ascending load, each its share of what is left, at least `floor`.

    Needs `experts * floor <= num_slots`; sums to `num_slots`. Equal loads go by the lower expert. All zero: as if equal.
    """
    loads = np.asarray(loads_E, dtype=np.float64)
    if not loads.any():
        loads = np.ones_like(loads)
    loads = loads / loads.max()  # nothing overflows
    order = np.argsort(loads, kind="stable")
    rest_loads = np.cumsum(loads[order][::-1])[::-1]  # from the end, so that the last expert's share is exactly one
    counts, rest = np.zeros(len(loads), dtype=np.int64), num_slots
    for expert, rest_load in zip(order, rest_loads, strict=True):
        share = int(loads[expert] * rest / rest_load) if rest_load else 0
        counts[expert] = max(share, floor)
        rest -= counts[expert]
    counts[order[-1]] += rest  # 0 but for loads so small that their sum vanished
    return counts


def capped(counts_E: ArrayLike, loads_E: ArrayLike, *, num_hosts: int) -> NDArray[np.int64]:
    """No expert above the number of hosts while another is below it; the surplus goes one by one to the highest load per replica."""
    counts = np.array(counts_E, dtype=np.int64)
    limit = num_hosts * -(-int(counts.sum()) // (len(counts) * num_hosts))  # N, or as many rounds of N as it takes
    loads = np.asarray(loads_E, dtype=np.float64)
    surplus = int(np.maximum(counts - limit, 0).sum())
    counts = np.minimum(counts, limit)
    heap = [(-loads[e] / counts[e], int(counts[e]), e) for e in range(len(counts)) if counts[e] < limit]
    heapq.heapify(heap)
    for _ in range(surplus):
        _, count, e = heapq.heappop(heap)
        counts[e] = count + 1
        if counts[e] < limit:
            heapq.heappush(heap, (-loads[e] / (count + 1), count + 1, e))
    return counts


def replica_counts(loads: ArrayLike, pool: HostPool, *, floor: int, cap: bool = True) -> ReplicaCounts:
    """Counts for every layer. Raises `PlanError` with all problems; a floor that cannot be held is lowered, with a note."""
    loads_LE = read_loads(loads)
    num_experts = loads_LE.shape[1]
    raise_if(_problems(pool, num_experts, floor), PlanError, subject="replica counts")
    possible = pool.max_floor(num_experts)
    used = max(1, min(floor, possible))
    rows = []
    for loads_E in loads_LE:
        counts = paper_counts(loads_E, pool.num_slots, floor=used)
        rows.append(capped(counts, loads_E, num_hosts=pool.num_hosts) if cap else counts)
    return ReplicaCounts(
        counts=tuple(tuple(int(c) for c in row) for row in rows),
        floor=used,
        asked_floor=floor,
        notes=_notes(rows, loads_LE, pool, asked=floor, used=used),
    )


def _problems(pool: HostPool, num_experts: int, floor: int) -> list[Problem]:
    problems = pool_problems(pool)
    if floor < 1:
        problems.append(Problem(where="floor", value=floor, rule="every expert needs a replica", hint="use 1 or more"))
    if not problems and pool.num_slots < num_experts:
        rule = f"{num_experts} experts need a slot each, {pool.num_hosts} hosts have {pool.num_slots}"
        hint = f"at least {-(-num_experts // pool.num_hosts)} slots a host"
        problems.append(Problem(where="slots", value=list(dict.fromkeys(pool.slots)), rule=rule, hint=hint))
    return problems


def _notes(
    rows: Sequence[NDArray[np.int64]], loads_LE: Floats, pool: HostPool, *, asked: int, used: int
) -> tuple[str, ...]:
    notes = []
    if used < asked:
        experts, hosts = loads_LE.shape[1], pool.num_hosts
        why = (
            f"there are {hosts} hosts"
            if used == hosts
            else f"{pool.num_slots} slots hold {experts} experts {used} times"
        )
        notes.append(f"f lowered from {asked} to {used}: {why}")
    idle = [layer for layer, row in enumerate(loads_LE) if not row.any()]
    if idle:
        notes.append(f"{len(idle)} layer(s) without any load (first: {idle[0]}): all experts count equally")
    over = max(int(row.max()) for row in rows)
    if over > pool.num_hosts:
        notes.append(
            f"up to {over} replicas of an expert on {pool.num_hosts} hosts: copies on one host share work, not risk"
        )
    return tuple(notes)
