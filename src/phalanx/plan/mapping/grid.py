"""A grid of ranks: named axes over consecutive ranks, and the groups along any of them.

Decides the arithmetic that every mapping rests on: rank = sum of coordinate * stride, the first axis varying fastest.
Must never change: the groups along any axes partition the ranks, members ascend, and every rank computes the same tuples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class RankSet:
    """The ranks of a group, without a list of them: a million of groups of 16,384 ranks take no room. Equal where the groups are."""

    first: int
    steps: tuple[tuple[int, int], ...]
    """(distance, count), fast first, as few as there can be."""

    def __len__(self) -> int:
        return math.prod(count for _, count in self.steps)

    def __contains__(self, rank: int) -> bool:
        left = rank - self.first
        for distance, count in reversed(self.steps):
            left -= min(max(left // distance, 0), count - 1) * distance
        return left == 0

    def __iter__(self) -> Iterator[int]:
        """Ascending."""
        ways = (range(0, distance * count, distance) for distance, count in reversed(self.steps))
        return (self.first + sum(way) for way in itertools.product(*ways))


@dataclass(frozen=True)
class Grid:
    """`axes` = (name, degree) pairs, fastest varying first. Holds `size` ranks."""

    axes: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return math.prod(degree for _, degree in self.axes)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Axis -> distance in ranks between neighbours along it."""
        out, stride = {}, 1
        for name, degree in self.axes:
            out[name] = stride
            stride *= degree
        return out

    @cached_property
    def degrees(self) -> dict[str, int]:
        return dict(self.axes)

    def coord(self, rank: int, axis: str) -> int:
        """Coordinate of `rank` on `axis`."""
        return rank // self.strides[axis] % self.degrees[axis]

    def _offsets(self, varying: Sequence[str]) -> NDArray[np.int64]:
        """Distances from a group's first rank to its members, ascending."""
        found = np.zeros(1, np.int64)
        for name, degree in reversed(self.axes):
            if name in varying:
                found = np.add.outer(found, np.arange(degree) * self.strides[name]).ravel()
        return found

    def groups(self, varying: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """All sets of ranks that differ on `varying` only, ranks ascending in each, ordered by their first rank."""
        fixed = [name for name, _ in self.axes if name not in varying]
        members = np.add.outer(self._offsets(fixed), self._offsets(varying))
        return tuple(tuple(row) for row in members.tolist())

    def group_of(self, rank: int, varying: Sequence[str]) -> tuple[int, ...]:
        """The ranks that agree with `rank` on every axis outside `varying`."""
        first = rank - sum(self.coord(rank, name) * self.strides[name] for name in self.strides if name in varying)
        return tuple((self._offsets(varying) + first).tolist())

    def rank_set(self, rank: int, varying: Sequence[str]) -> RankSet:
        """`group_of`, not listed."""
        first, steps = rank, list[tuple[int, int]]()
        for name, degree in self.axes:
            if name in varying and degree > 1:
                distance = self.strides[name]
                first -= self.coord(rank, name) * distance
                if steps and math.prod(steps[-1]) == distance:  # one goes on where the other ends
                    distance, count = steps.pop()
                    degree *= count
                steps.append((distance, degree))
        return RankSet(first, tuple(steps))


def pp_groups_equal(attention: Grid, experts: Grid) -> bool:
    """The one constraint of folding: both grids have the same pipeline groups, because activations flow through layers of both."""
    degrees = [grid.degrees.get("pp", 1) for grid in (attention, experts)]
    worlds = [math.prod(grid.degrees.values()) for grid in (attention, experts)]
    strides = [grid.strides.get("pp", 1) for grid in (attention, experts)]
    return degrees[0] == degrees[1] and worlds[0] == worlds[1] and (degrees[0] == 1 or strides[0] == strides[1])
