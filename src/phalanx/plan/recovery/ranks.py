"""Which member takes which rank of a new mapping, so that as little as can be has to travel.

Decides the ranks and who is idle. `plan/recovery/devices.py: place_devices` says which members stay together (the tp x cp ranks of a data-parallel coordinate, or as
many as share an expert) and in which stage; here such blocks, and the members inside one, change places until the bytes that are lacking are fewest (assignment). Where that
leaves state on fewer hosts than are asked for, hosts take ranks in turn instead, and only the members of a host change places.
Must never change: a block of one machine stays one; equal facts give equal ranks, in whatever order the facts come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.plan.mapping import Folding
from phalanx.plan.recovery.devices import Device, StateKind, num_holding, place_devices
from phalanx.plan.recovery.state_descriptor import Fact, machines_of

Ints = NDArray[np.int64]

Lacks = Callable[[Sequence[Fact]], Ints]
"""Of members: what each lacks of what each rank of the new mapping holds (members, ranks), in elements."""

_FAR = np.iinfo(np.int64).max


def rank_members(
    facts: Sequence[Fact], new: Folding, lacks: Lacks, *, host_of: Mapping[str, int], floor: int
) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """(member of rank 0, 1, ..., idle members). State is on `floor` hosts (by a member's uid), as far as hosts in turn would have it on as many."""
    listed = sorted(facts, key=lambda fact: fact.order)
    machines = machines_of(listed)
    devices = [Device(i, machines.index(fact.machine)) for i, fact in enumerate(listed)]
    old, before = _before(listed, devices, new)
    order = [listed[device.id] for device in place_devices(old, before, devices, new)[0]]
    width = math.lcm(new.tp * new.cp, new.etp)

    sizes: dict[StateKind, int] = {"edp": new.edp, "dp_cp": new.dp * new.cp}
    shared = [state for state, size in sizes.items() if size > 1]  # what one rank holds is on its host

    def holding(ranked: Sequence[Fact]) -> int:
        hosts = [host_of[fact.uid] for fact in ranked]
        return sum(min(floor, num_holding(state, new, hosts)) for state in shared)

    ranked = _exchanged(order, width, lacks)
    if holding(ranked) < floor * len(shared):
        nobody = [Device(-1 - rank, 0) for rank in range(new.world)]
        anew = [listed[device.id] for device in place_devices(new, nobody, devices, new)[0]]
        best = max(ranked, *(_in_turn(of, width, host_of) for of in (order, anew)), key=holding)
        ranked = ranked if best is ranked else _within_hosts(best, lacks, host_of)
    taken = {fact.uid for fact in ranked}
    return tuple(ranked), tuple(fact for fact in listed if fact.uid not in taken)


def _before(listed: Sequence[Fact], devices: Sequence[Device], new: Folding) -> tuple[Folding, list[Device]]:
    """The mapping that most members come from, and which members had its ranks: numbers below 0 for those that are gone.

    Of two that had one rank, in different generations of that mapping, the one that is in the middle of a move had it later.
    """
    counts = Counter(fact.descriptor.folding for fact in listed if fact.descriptor is not None)
    if not counts:
        return new, [Device(-1 - rank, 0) for rank in range(new.world)]
    old = max(counts, key=lambda folding: (counts[folding], folding.to_json()))
    ranks = [Device(-1 - rank, 0) for rank in range(old.world)]
    claims = [(f.descriptor, d) for f, d in zip(listed, devices, strict=True) if f.descriptor is not None]
    for at, device in sorted(claims, key=lambda claim: claim[0].moved is None):
        if at.folding == old and ranks[at.rank].id < 0:
            ranks[at.rank] = device
    return old, ranks


def _exchanged(order: Sequence[Fact], width: int, lacks: Lacks) -> list[Fact]:
    """Blocks of `width` members change places; within a block of one machine, members do."""
    table, count = lacks(order), len(order) // width
    inner: dict[tuple[int, int], list[int]] = {}
    costs = table if width == 1 else np.zeros((count, count), np.int64)
    stay = list(range(width))
    for b in range(count if width > 1 else 0):
        rows = slice(b * width, (b + 1) * width)
        moves = len({fact.machine for fact in order[rows]}) == 1
        for at in range(count):
            mine = table[rows, at * width : (at + 1) * width]
            # of equal costs no member moves, and most blocks lack all of what most others hold
            inner[b, at] = assigned(mine) if moves and (mine != mine[0, 0]).any() else stay
            costs[b, at] = mine[stay, inner[b, at]].sum()
    out: list[Fact | None] = [None] * len(order)
    for b, at in enumerate(assigned(costs)):
        for member, place in enumerate(inner.get((b, at), stay)):
            out[at * width + place] = order[b * width + member]
    return [fact for fact in out if fact is not None]


def _in_turn(order: Sequence[Fact], width: int, host_of: Mapping[str, int]) -> list[Fact]:
    """Blocks of `width` members, host by host."""
    blocks = [order[first : first + width] for first in range(0, len(order), width)]
    return [fact for block in sorted(blocks, key=lambda of: host_of[of[0].uid]) for fact in block]


def _within_hosts(order: Sequence[Fact], lacks: Lacks, host_of: Mapping[str, int]) -> list[Fact]:
    """The members of each host change places."""
    table, out = lacks(order), list(order)
    at: dict[int, list[int]] = {}
    for place, fact in enumerate(order):
        at.setdefault(host_of[fact.uid], []).append(place)
    for places in at.values():
        for row, column in enumerate(assigned(table[np.ix_(places, places)])):
            out[places[column]] = order[places[row]]
    return out


def assigned(costs: ArrayLike) -> list[int]:
    """Column of each row of a square table, the sum of the costs as small as can be; among equals, few rows leave the column of their own number.

    The Hungarian method by shortest augmenting paths (Jonker and Volgenant 1987), in whole numbers: SciPy's import takes longer than a run has to recover.
    """
    whole = np.asarray(costs, np.int64)
    size = len(whole)
    table = whole * (size + 1) + ~np.eye(size, dtype=bool)
    row_price, column_price = np.zeros(size + 1, np.int64), np.zeros(size + 1, np.int64)
    row_of = np.full(size + 1, size)  # by column; number `size` stands for none
    column_price[:size] = table.min(axis=0, initial=_FAR)
    row_price[:size] = (table - column_price[:size]).min(axis=1, initial=_FAR)
    # nowhere is cheaper for these, almost all of thousands of members: the method takes rows to the third power
    stay = table.diagonal() == row_price[:size] + column_price[:size]
    row_of[:size][stay] = np.flatnonzero(stay)
    for row in np.flatnonzero(~stay).tolist():
        _augment(table, row, row_price, column_price, row_of)
    out = np.empty(size, np.int64)
    out[row_of[:size]] = np.arange(size)
    return [int(column) for column in out]


def _augment(table: Ints, row: int, row_price: Ints, column_price: Ints, row_of: Ints) -> None:
    """Give `row` a column, along the cheapest path of rows that change theirs."""
    size = len(table)
    came_from, slack, done = np.full(size, size), np.full(size, _FAR), np.zeros(size + 1, bool)
    row_of[size], column = row, size
    while row_of[column] != size or column == size:
        done[column] = True
        at, free = row_of[column], ~done[:size]
        cost = table[at] - row_price[at] - column_price[:size]
        nearer = free & (cost < slack)
        slack[nearer], came_from[nearer] = cost[nearer], column
        following = int(np.where(free, slack, _FAR).argmin())
        step = slack[following]
        row_price[row_of[done]] += step
        column_price[done] -= step
        slack[free] -= step
        column = following
    while column != size:
        row_of[column] = row_of[came_from[column]]
        column = came_from[column]
