"""Boxes without boxes: what is left of a box, and which parts of a tensor nobody holds. Pure geometry."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from phalanx.plan.layout import Box


def without(box: Box, hole: Box) -> list[Box]:
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


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> list[Box]:
    """The parts of a tensor that none of `boxes` covers."""
    left = [Box((0,) * len(shape), tuple(shape))]
    for box in dict.fromkeys(boxes):
        left = [part for one in left for part in without(one, box)]
        if not left:
            break
    return left
