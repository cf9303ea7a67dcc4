"""Which member takes which rank of a new mapping, so that as little as can be has to travel.

Decides the ranks and who is idle. `plan/recovery/devices.py: place_devices` says which members stay together (the tp x cp ranks of a data-parallel coordinate, or as
many as share an expert) and in which stage; here such blocks, and the members inside one, change places until the bytes that are lacking are fewest (assignment).
Must never change: a block of one machine stays one; equal facts give equal ranks, in whatever order the facts come.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from phalanx.plan.mapping import Folding
from phalanx.plan.recovery.devices import Device, place_devices
from phalanx.plan.recovery.state_descriptor import Fact, machines_of

Lacks = Callable[[Fact, int], int]
"""Bytes that a member lacks of what a rank of the new mapping holds."""


def rank_members(facts: Sequence[Fact], new: Folding, lacks: Lacks) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """(member of rank 0, 1, ..., idle members)."""
    listed = sorted(facts, key=lambda fact: fact.order)
    machines = machines_of(listed)
    devices = [Device(i, machines.index(fact.machine)) for i, fact in enumerate(listed)]
    old, before = _before(listed, devices, new)
    placed, idle = place_devices(old, before, devices, new)
    order = [listed[device.id] for device in placed]
    width = math.lcm(new.tp * new.cp, new.etp)
    return tuple(_exchanged(order, width, lacks)), tuple(listed[device.id] for device in idle)


def _before(listed: Sequence[Fact], devices: Sequence[Device], new: Folding) -> tuple[Folding, list[Device]]:
    """The mapping that most members come from, and which members had its ranks: numbers below 0 for those that are gone."""
    counts = Counter(fact.descriptor.folding for fact in listed if fact.descriptor is not None)
    if not counts:
        return new, [Device(-1 - rank, 0) for rank in range(new.world)]
    old = max(counts, key=lambda folding: (counts[folding], folding.to_json()))
    ranks = [Device(-1 - rank, 0) for rank in range(old.world)]
    for fact, device in zip(listed, devices, strict=True):
        if fact.descriptor is not None and fact.descriptor.folding == old and ranks[fact.descriptor.rank].id < 0:
            ranks[fact.descriptor.rank] = device
    return old, ranks


def _exchanged(order: Sequence[Fact], width: int, lacks: Lacks) -> list[Fact]:
    """Blocks of `width` members change places; within a block of one machine, members do."""
    blocks = [tuple(order[i : i + width]) for i in range(0, len(order), width)]
    inner: dict[tuple[int, int], list[int]] = {}
    costs: list[list[int]] = []
    for b, block in enumerate(blocks):
        costs.append([])
        for at in range(len(blocks)):
            table = [[lacks(fact, at * width + i) for i in range(width)] for fact in block]
            moves = width > 1 and len({fact.machine for fact in block}) == 1
            inner[b, at] = assigned(table) if moves else list(range(width))
            costs[-1].append(sum(table[member][place] for member, place in enumerate(inner[b, at])))
    out: list[Fact | None] = [None] * len(order)
    for b, at in enumerate(assigned(costs)):
        for member, place in enumerate(inner[b, at]):
            out[at * width + place] = blocks[b][member]
    return [fact for fact in out if fact is not None]


def assigned(costs: Sequence[Sequence[int]]) -> list[int]:
    """Column of each row of a square table, the sum of the costs as small as can be; among equals, few rows leave the column of their own number.

    The Hungarian method by shortest augmenting paths (Jonker and Volgenant 1987), in whole numbers: SciPy's import takes longer than a run has to recover.
    """
    size = len(costs)
    table = [
        [cost * (size + 1) + (row != column) for column, cost in enumerate(line)] for row, line in enumerate(costs)
    ]
    row_price, column_price = [0] * (size + 1), [0] * (size + 1)
    row_of = [size] * (size + 1)  # by column; number `size` stands for none
    for row in range(size):
        _augment(table, row, row_price, column_price, row_of)
    out = [0] * size
    for column in range(size):
        out[row_of[column]] = column
    return out


def _augment(
    table: Sequence[Sequence[int]], row: int, row_price: list[int], column_price: list[int], row_of: list[int]
) -> None:
    """Give `row` a column, along the cheapest path of rows that change theirs."""
    size = len(table)
    came_from, slack, done = [size] * size, [math.inf] * size, [False] * (size + 1)
    row_of[size], column = row, size
    while row_of[column] != size or column == size:
        done[column] = True
        at, least, following = row_of[column], math.inf, size
        for j in range(size):
            if done[j]:
                continue
            cost = table[at][j] - row_price[at] - column_price[j]
            if cost < slack[j]:
                slack[j], came_from[j] = cost, column
            if slack[j] < least:
                least, following = slack[j], j
        step = int(least)
        for j in range(size + 1):
            if done[j]:
                row_price[row_of[j]] += step
                column_price[j] -= step
            elif j < size:
                slack[j] -= step
        column = following
    while column != size:
        row_of[column] = row_of[came_from[column]]
        column = came_from[column]
