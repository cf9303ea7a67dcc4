"""A tensor cut along the edges of given boxes: what they cover together, and the parts that whoever holds the same elements holds whole.

Ranks of several layouts hold boxes that overlap in any way (a shard may end inside a row, and begin elsewhere on another number of ranks). Cut at the edges of
all of them, each becomes a set of *cells*, and two holders of an element hold the same cell: they can compare checksums of it. Must never change: cells are
disjoint, cover exactly what the boxes cover, and depend on the set of boxes alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from phalanx.plan.layout.parameters import Box

_Span = tuple[int, int]


def cells(boxes: Iterable[Box]) -> list[Box]:
    """The cells of boxes of one tensor, in order. Dim 0 is cut at all edges; each slab of it at those of the boxes that reach it, and so on."""
    spans = {tuple((o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True)) for b in boxes if b.num_elements}
    return [Box(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in _cut(sorted(spans))]


def _cut(boxes: Sequence[tuple[_Span, ...]]) -> Iterator[tuple[_Span, ...]]:
    if not boxes:
        return
    if not boxes[0]:
        yield ()
        return
    edges = sorted({edge for box in boxes for edge in box[0]})
    for start, stop in pairwise(edges):
        inside = sorted({box[1:] for box in boxes if box[0][0] <= start and stop <= box[0][1]})
        for rest in _cut(inside):
            yield ((start, stop), *rest)


def is_covered(shape: Sequence[int], boxes: Iterable[Box]) -> bool:
    """Whether the boxes together are the whole tensor. None of them reaches out of it."""
    return sum(cell.num_elements for cell in cells(boxes)) == math.prod(shape)


def cells_without(box: Box, hole: Box) -> list[Box]:
    """`box` without what `hole` covers of it, as boxes that do not overlap: at most two for each dim."""
    cut = box.intersection(hole)
    if cut is None:
        return [box]
    out, offsets, sizes = [], list(box.offsets), list(box.sizes)
    for dim in range(len(sizes)):
        first, last = cut.offsets[dim], cut.offsets[dim] + cut.sizes[dim]
        for start, stop in ((offsets[dim], first), (last, offsets[dim] + sizes[dim])):
            if start < stop:
                part = Box(
                    (*offsets[:dim], start, *offsets[dim + 1 :]), (*sizes[:dim], stop - start, *sizes[dim + 1 :])
                )
                out.append(part)
        offsets[dim], sizes[dim] = first, last - first
    return out
