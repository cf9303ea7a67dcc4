"""Is a layout of one tensor sound, and does a source have all that a destination needs? Trusts no builder and no planner.

Decides nothing. Shares no code with what it checks: it counts elements of boxes and of their intersections, two at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import Problem
from phalanx.plan.layout.box_cells import cells_without
from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import TensorLayout

SHOWN = 4
"""Lost boxes that a message lists."""
MOST_ELEMENTS = 1 << 56
"""Most elements of a tensor: its bytes are counted in 64 bits."""


def box_problems(layout: TensorLayout) -> list[Problem]:
    """What is wrong with a layout by itself: lengths, bounds, boxes of a rank that overlap. That a term has no holder (left) is named by `coverage_problems`, with its boxes."""
    problems = _length_problems(layout)
    if problems:
        return problems
    sound: set[tuple[int, tuple[int, ...]]] = set()
    for position, rank in enumerate(layout.ranks):
        key = (id(layout.held[position]), layout.local_shapes[position])
        if key not in sound:
            found = _rank_problems(layout, position, f"layout of rank {rank}")
            problems += found
            if not found:
                sound.add(key)
    return problems


def _length_problems(layout: TensorLayout) -> list[Problem]:
    problems = []
    if len(set(layout.ranks)) != len(layout.ranks) or min(layout.ranks, default=0) < 0:
        problems.append(Problem(where="layout.ranks", value=None, rule="each rank once, none negative"))
    for name, value in (("held", layout.held), ("local_shapes", layout.local_shapes), ("terms", layout.terms)):
        if len(value) != len(layout.ranks) and (name != "terms" or value):
            rule = f"one for each of the {len(layout.ranks)} ranks"
            problems.append(Problem(where=f"layout.{name}", value=len(value), rule=rule))
    if min(layout.terms, default=0) < 0:
        problems.append(Problem(where="layout.terms", value=min(layout.terms), rule="must not be negative"))
    if math.prod(layout.shape) > MOST_ELEMENTS:
        rule = f"must have at most {MOST_ELEMENTS:,} elements"
        problems.append(Problem(where="layout.shape", value=layout.shape, rule=rule))
    return problems


def _rank_problems(layout: TensorLayout, position: int, where: str) -> list[Problem]:
    held, local_shape = layout.held[position], layout.local_shapes[position]
    problems = []
    for one in held:
        for what, box, shape in (("box", one.box, layout.shape), ("local box", one.local_box(), local_shape)):
            if not _inside(box, shape):
                problems.append(Problem(where=where, value=None, rule=f"{what} {box_text(box)} is not inside {shape}"))
    if problems:
        return problems
    if len(held) == 1:
        return []  # inside its local tensor, so not larger; most layouts are of such ranks and there are many
    for what, boxes in (("boxes", [one.box for one in held]), ("local boxes", [one.local_box() for one in held])):
        pair = overlapping_pair(boxes)
        if pair is not None:
            first, second = (box_text(boxes[i]) for i in pair)
            problems.append(Problem(where=where, value=None, rule=f"{what} {first} and {second} overlap"))
    # fewer is legal: of optimizer state a rank holds a run of what its parameter is
    if sum(one.box.num_elements for one in held) > math.prod(local_shape):
        rule = f"its boxes have no more elements than its local tensor, {math.prod(local_shape)}"
        problems.append(Problem(where=where, value=sum(one.box.num_elements for one in held), rule=rule))
    return problems


def _inside(box: Box, shape: Sequence[int]) -> bool:
    if not len(box.offsets) == len(box.sizes) == len(shape):
        return False
    return all(o >= 0 and s >= 0 and o + s <= n for o, s, n in zip(box.offsets, box.sizes, shape, strict=True))


def overlapping_pair(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Positions of two boxes that share an element, if any do."""
    low, high = bounds(boxes)
    full = np.nonzero((high > low).all(axis=1))[0] if len(boxes) else np.zeros(0, dtype=np.int64)
    for at, i in enumerate(full[:-1]):
        rest = full[at + 1 :]
        hit = ((np.minimum(high[rest], high[i]) > np.maximum(low[rest], low[i])).all(axis=1)).nonzero()[0]
        if len(hit):
            return int(i), int(rest[hit[0]])
    return None


def bounds(boxes: Sequence[Box]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(n, dims) first index and end of each box."""
    dims = len(boxes[0].offsets) if boxes else 0
    low = np.array([box.offsets for box in boxes], dtype=np.int64).reshape(len(boxes), dims)
    return low, low + np.array([box.sizes for box in boxes], dtype=np.int64).reshape(len(boxes), dims)


def lost_boxes(src: TensorLayout, dst: TensorLayout) -> list[Box]:
    """Parts of what `dst` needs that no rank of `src` holds (for a partial source: of which some term has no holder)."""
    needed = list({box: None for boxes in dict.fromkeys(dst.held) for one in boxes if (box := one.box).num_elements})
    lost: list[Box] = []
    for term in range(src.num_terms):
        held = dict.fromkeys(
            boxes for position, boxes in enumerate(src.held) if not src.terms or src.terms[position] == term
        )
        have = list(dict.fromkeys(one.box for boxes in held for one in boxes if one.box.num_elements))
        lost += [part for box in needed for part in _without(box, have)]
    return _disjoint(lost)


def _disjoint(boxes: Sequence[Box]) -> list[Box]:
    out: list[Box] = []
    for box in boxes:
        out += _without(box, out)
    return out


def _without(box: Box, have: Sequence[Box]) -> list[Box]:
    """What is left of a box when all of `have` is taken away, as disjoint boxes."""
    if not have:
        return [box]
    low, high = bounds(have)
    mine, end = (
        np.array(v, dtype=np.int64) for v in (box.offsets, [sum(p) for p in zip(box.offsets, box.sizes, strict=True)])
    )
    near = np.nonzero((np.minimum(high, end) > np.maximum(low, mine)).all(axis=1))[0].tolist()
    left = [box]
    for i in near:
        left = [part for piece in left for part in cells_without(piece, have[i])]
        if not left:
            break
    return left


def coverage_problems(src: TensorLayout, dst: TensorLayout, *, name: str) -> list[Problem]:
    """Why `dst` cannot be made from `src`: other shapes, a partial destination, boxes that nobody holds."""
    if src.shape != dst.shape:
        return [Problem(where=f"{name}.dst.shape", value=dst.shape, rule=f"must be the source's, {src.shape}")]
    problems = []
    if dst.num_terms > 1:
        rule = "a destination is never partial"
        problems.append(Problem(where=f"{name}.dst.terms", value=dst.num_terms, rule=rule, hint="leave terms empty"))
    lost = lost_boxes(src, dst)
    if lost:
        more = f" and {len(lost) - SHOWN} more" if len(lost) > SHOWN else ""
        text = ", ".join(map(box_text, lost[:SHOWN])) + more
        rule = f"lost: no source rank holds {text}"
        problems.append(
            Problem(where=name, value=None, rule=rule, hint="give a source that has it, such as a checkpoint")
        )
    return problems


def box_text(box: Box) -> str:
    """`[0:4, 8:16]`."""
    return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(box.offsets, box.sizes, strict=True)) + "]"
