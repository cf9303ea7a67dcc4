"""What is left of a box when another is taken out of it. Pure geometry."""

from __future__ import annotations

from phalanx.plan.layout.parameters import Box


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
