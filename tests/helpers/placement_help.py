"""Slow and plain twins of the placement planners: all losses one by one, all placements one by one.

`python tests/helpers/placement_help.py random 10000` compares that many random cases with the printed rule and spread; `... brute 6` all allocations of up to 6 hosts
with all placements.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from phalanx.plan.placement.search.host_pool import equal_pool
from phalanx.plan.placement.search.hosts import HostPlacement
from phalanx.plan.placement.search.local_search import holder_sets
from phalanx.plan.placement.search.plan import plan_placement, rule_placement
from phalanx.plan.placement.search.probability import fatal_counts
from phalanx.plan.placement.search.replicas import ReplicaCounts, replica_counts
from phalanx.plan.placement.search.rules import max_overlap


def survives(slots: Sequence[Sequence[Sequence[int]]], num_experts: int, lost: Sequence[int]) -> bool:
    """Whether every expert of every layer is in some slot of a host that is not lost."""
    everyone = set(range(num_experts))
    return all({e for n, held in enumerate(hosts) if n not in lost for e in held} == everyone for hosts in slots)


def fatal_by_hand(plan: HostPlacement) -> tuple[int, ...]:
    """Fatal losses of k = 0 .. N hosts, each tried."""
    n = plan.pool.num_hosts
    return tuple(
        sum(not survives(plan.slots, plan.num_experts, lost) for lost in itertools.combinations(range(n), k))
        for k in range(n + 1)
    )


def fatal_of(plan: HostPlacement) -> tuple[int, ...]:
    """The same from the certificate, which must be exact."""
    out = []
    for chance, total in zip(plan.certificate.chances, _pascal(plan.pool.num_hosts), strict=True):
        assert chance.is_exact
        fatal = (1 - chance.low) * total
        assert fatal.denominator == 1
        out.append(int(fatal))
    return tuple(out)


def _pascal(n: int) -> list[int]:
    row = [1]
    for k in range(n):
        row.append(row[-1] * (n - k) // (k + 1))
    return row


def allocations(total: int, num_experts: int, *, low: int = 1, high: int | None = None) -> Iterator[tuple[int, ...]]:
    """All rising replica counts with this sum."""
    if not num_experts:
        if not total:
            yield ()
        return
    for first in range(low, min(total // num_experts, total if high is None else high) + 1):
        for rest in allocations(total - first, num_experts - 1, low=first, high=high):
            yield (first, *rest)


@cache
def _tables(num_hosts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each set of hosts the losses that contain it, and for each k the losses of k hosts, as bits over all losses."""
    losses = range(1 << num_hosts)
    above = tuple(sum(1 << f for f in losses if f & s == s) for s in losses)
    by_size = tuple(sum(1 << f for f in losses if f.bit_count() == k) for k in range(num_hosts + 1))
    return above, by_size


def better_placement(
    counts: Sequence[int], num_hosts: int, width: int, than: Sequence[int]
) -> list[tuple[int, ...]] | None:
    """Holders of each expert with fewer fatal losses (compared from k = 0 upward) than `than`; None: nobody has any.

    Every placement is looked at, but for those whose first experts alone are as bad already and those that differ in the names of hosts.
    An expert may have fewer hosts than replicas: what is left over fills vacant slots.
    """
    above, by_size = _tables(num_hosts)
    order = sorted(range(len(counts)), key=lambda e: counts[e])
    than = tuple(than)
    dead: set[tuple[int, tuple[int, ...], int]] = set()

    def vector(fatal: int) -> tuple[int, ...]:
        return tuple((fatal & layer).bit_count() for layer in by_size)

    def place(at: int, room: tuple[int, ...], fatal: int, chosen: list[int]) -> list[int] | None:
        if vector(fatal) >= than:
            return None
        if at == len(order):
            return chosen
        key = (at, room, fatal)
        if key in dead:
            return None
        limit = min(counts[order[at]], num_hosts)
        seen: set[tuple[tuple[int, ...], int]] = set()
        for mask in _sets_of(num_hosts, limit):
            if any(mask >> n & 1 and not room[n] for n in range(num_hosts)):
                continue
            if at == 0 and mask != (1 << mask.bit_count()) - 1:
                continue  # hosts are alike before the first expert
            left = tuple(r - (mask >> n & 1) for n, r in enumerate(room))
            step = (left, fatal | above[mask])
            if step not in seen:
                seen.add(step)
                found = place(at + 1, *step, [*chosen, mask])
                if found is not None:
                    return found
        dead.add(key)
        return None

    found = place(0, (width,) * num_hosts, 0, [])
    if found is None:
        return None
    holders: list[tuple[int, ...]] = [()] * len(counts)
    for expert, mask in zip(order, found, strict=True):
        holders[expert] = tuple(n for n in range(num_hosts) if mask >> n & 1)
    return holders


@cache
def _sets_of(num_hosts: int, limit: int) -> tuple[int, ...]:
    """Sets of at most `limit` hosts, the largest first."""
    sets = [s for s in range(1, 1 << num_hosts) if s.bit_count() <= limit]
    return tuple(sorted(sets, key=lambda s: (-s.bit_count(), s)))


def random_case(rng: np.random.Generator) -> tuple[int, int, int, np.ndarray, int]:
    """(N, c, E, loads, f): any size up to 12 hosts, any skew from flat to steep, some experts without load."""
    while True:
        n, c, e = int(rng.integers(2, 13)), int(rng.integers(1, 9)), int(rng.integers(1, 25))
        if e <= n * c:
            break
    skew = float(rng.choice([0.0, 0.0, 0.5, 1.0, 2.0]))
    loads = rng.permutation(np.arange(1, e + 1, dtype=np.float64) ** -skew) * (1 + 0.1 * rng.random(e))
    loads[rng.random(e) < rng.choice([0.0, 0.0, 0.2])] = 0
    return n, c, e, loads, int(rng.integers(1, 4))


@dataclass
class Tally:
    """What random cases showed."""

    cases: int = 0
    broken_ours: int = 0
    broken_printed: int = 0
    worse: int = 0
    better: int = 0
    trade_offs: int = 0
    """Cases in which another rule survives more losses of some number of hosts, though fewer of a smaller number."""


def compare(rng: np.random.Generator, tally: Tally) -> list[str]:
    """One random case against the printed rule and spread; returns what is wrong with ours."""
    hosts, slots, _, loads, floor = random_case(rng)
    pool = equal_pool(hosts, slots)
    counts = replica_counts(loads, pool, floor=floor)
    ours = plan_placement(counts, pool, loads)
    mine, wrong = fatal_of(ours), []
    tally.cases += 1
    if ours.certificate.guaranteed < counts.floor:
        tally.broken_ours += 1
        wrong.append(f"f {counts.floor} broken: {hosts} {slots} {loads.tolist()}")
    for rule in ("printed", "spread"):
        plan = rule_placement(rule, loads, counts, pool)
        theirs = fatal_of(plan)
        tally.better += theirs > mine
        tally.trade_offs += any(t < m for t, m in zip(theirs, mine, strict=True))
        tally.broken_printed += rule == "printed" and plan.certificate.guaranteed < counts.floor
        if theirs < mine:
            tally.worse += 1
            wrong.append(f"worse than {rule}: {hosts} {slots} {loads.tolist()} f {floor}: {mine} {theirs}")
    return wrong


def optimal(num_hosts: int, width: int, counts: Sequence[int]) -> tuple[bool, bool]:
    """Whether ours and the printed rule are optimal for these replica counts, against all placements."""
    pool = equal_pool(num_hosts, width)
    given = ReplicaCounts(counts=(tuple(counts),), floor=1, asked_floor=1)
    mine = fatal_of(plan_placement(given, pool, [[0.0] * len(counts)]))
    best = better_placement(counts, num_hosts, width, mine) is None
    return best, best and fatal_counts(holder_sets(max_overlap(counts, pool.slots)), num_hosts) == mine


def cut_short(most_hosts: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """(N, c, counts) of all allocations with more experts than slots of a host: N 2 ... most_hosts, c up to 4, E up to 6."""
    for n, c, e in itertools.product(range(2, most_hosts + 1), range(1, 5), range(2, 7)):
        if e > c:
            for counts in allocations(n * c, e):
                yield n, c, counts


if __name__ == "__main__":
    if sys.argv[1] == "random":
        total, rng = Tally(), np.random.default_rng(7)
        for _ in range(int(sys.argv[2])):
            for line in compare(rng, total):
                print(line)
        print(total, f"{time.process_time():.1f} s of CPU")
    else:
        found = [optimal(*case) for case in cut_short(int(sys.argv[2]))]
        print(f"{len(found)} allocations: ours optimal {sum(o for o, _ in found)}, printed {sum(p for _, p in found)}")
        print(f"{time.process_time():.1f} s of CPU")
