"""What entered each host in a reshard, counted by the ranks that received it: bytes, and distinct bytes among them.

Decides nothing. A plan that is as good as can be brings each byte that a host needs into it once, however many of its ranks need it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.plan.layout import Box
from phalanx.plan.reshard import Hosts, Move, MovePart
from phalanx.runtime.comm import Axis, Collectives
from phalanx.runtime.reshard.executor import ReshardReport


@dataclass(frozen=True, kw_only=True)
class HostCount:
    """Bytes that came to one host from others. Terms of a sum count one by one: each is a value of its own."""

    host: int
    entered_bytes: int
    distinct_bytes: int

    @property
    def once(self) -> bool:
        """Each distinct byte came in exactly once."""
        return self.entered_bytes == self.distinct_bytes


def gather_counts(
    comms: Collectives, axis: Axis, report: ReshardReport, *, moves: Sequence[Move], hosts: Hosts
) -> list[HostCount]:
    """The counts of all hosts that something entered, on the first rank of the axis; none on others. Collective: a gather of plain objects."""
    told = comms.gather_objects((report.entered_bytes, report.entered), axis)
    if axis.index:
        return []
    return host_counts(dict(zip(axis.ranks, told, strict=True)), moves=moves, hosts=hosts)


def host_counts(
    told: dict[int, tuple[int, tuple[MovePart, ...]]], *, moves: Sequence[Move], hosts: Hosts
) -> list[HostCount]:
    """Counts by host, made of what each rank says: bytes, and the parts that they were."""
    entered: dict[int, int] = defaultdict(int)
    parts: dict[int, list[MovePart]] = defaultdict(list)
    for rank, (nbytes, found) in told.items():
        if nbytes:
            entered[hosts.host_of_rank[rank]] += nbytes
            parts[hosts.host_of_rank[rank]] += found
    return [
        HostCount(host=host, entered_bytes=entered[host], distinct_bytes=distinct_bytes(parts[host], moves))
        for host in sorted(entered)
    ]


def distinct_bytes(parts: Iterable[MovePart], moves: Sequence[Move]) -> int:
    """Bytes in the union of parts."""
    boxes: dict[tuple[int, int], set[Box]] = defaultdict(set)
    for part in parts:
        boxes[part.move, part.term].add(part.box)
    return sum(union_elements(sorted(found, key=_first)) * moves[move].itemsize for (move, _), found in boxes.items())


def _first(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return box.offsets, box.sizes


def union_elements(boxes: Sequence[Box]) -> int:
    """Elements in the union of boxes: each box without those before it."""
    if not boxes:
        return 0
    low = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    high = low + np.array([box.sizes for box in boxes], dtype=np.int64).reshape(len(boxes), -1)
    total = 0
    for i, box in enumerate(boxes):
        met = (np.minimum(high[:i], high[i]) > np.maximum(low[:i], low[i])).all(axis=1)
        total += _new_elements(box, [boxes[j] for j in np.nonzero(met)[0].tolist()])
    return total


def _new_elements(box: Box, before: Sequence[Box]) -> int:
    """Elements of `box` in none of the boxes `before`: cut it along the first of them, and go on with the pieces."""
    if not before:
        return box.num_elements
    common = box.intersection(before[0])
    if common is None:
        return _new_elements(box, before[1:])
    total, left = 0, box
    for dim in range(len(box.sizes)):
        for start, stop in (
            (left.offsets[dim], common.offsets[dim]),
            (common.offsets[dim] + common.sizes[dim], left.offsets[dim] + left.sizes[dim]),
        ):
            if start < stop:
                total += _new_elements(_with(left, dim, start, stop), before[1:])
        left = _with(left, dim, common.offsets[dim], common.offsets[dim] + common.sizes[dim])
    return total


def _with(box: Box, dim: int, start: int, stop: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = start, stop - start
    return Box(tuple(offsets), tuple(sizes))
