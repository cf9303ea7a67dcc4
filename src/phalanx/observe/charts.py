"""A curve in characters, for terminals and logs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from phalanx.observe.table import BARS, loss_text


def chart(points: Sequence[tuple[int, float]], *, width: int, height: int = 10) -> list[str]:
    """Lines of an area chart of (x, y) with labels of both axes; each column is the mean of the points that fall into it.

    x ascends. Points that are not finite are left out; without any, there are no lines.
    """
    points = [(x, y) for x, y in points if math.isfinite(y)]
    if not points:
        return []
    left = max(len(loss_text(y)) for _, y in points) + 2
    columns = _columns(points, max(10, width - left))
    filled = [c for c in columns if c is not None]
    low, high = min(filled), max(filled)
    span = (high - low) or 1.0
    eighths = [None if c is None else 1 + round((c - low) / span * (8 * height - 1)) for c in columns]
    lines = []
    for level in range(height - 1, -1, -1):
        cells = "".join(_cell(e, level) for e in eighths)
        label = loss_text(high) if level == height - 1 else loss_text(low) if level == 0 else ""
        lines.append(f"{label:>{left - 2}} ┤{cells}".rstrip())
    first, last = str(points[0][0]), str(points[-1][0])
    gap = max(1, len(columns) - len(first) - len(last))
    return [*lines, " " * left + first + " " * gap + last]


def _columns(points: Sequence[tuple[int, float]], width: int) -> list[float | None]:
    """Mean of the points of each column; a column between two points takes their line."""
    first, last = points[0][0], points[-1][0]
    if first == last:
        return [sum(y for _, y in points) / len(points)]
    width = min(width, last - first + 1)
    sums, counts = [0.0] * width, [0] * width
    for x, y in points:
        column = min(width - 1, (x - first) * width // (last - first + 1))
        sums[column] += y
        counts[column] += 1
    columns = [s / n if n else None for s, n in zip(sums, counts, strict=True)]
    known = [i for i, c in enumerate(columns) if c is not None]
    for a, b in itertools.pairwise(known):
        for i in range(a + 1, b):
            ya, yb = columns[a], columns[b]
            assert ya is not None and yb is not None
            columns[i] = ya + (yb - ya) * (i - a) / (b - a)
    return columns


def _cell(eighths: int | None, level: int) -> str:
    if eighths is None:
        return " "
    part = eighths - 8 * level
    return " " if part <= 0 else BARS[min(8, part) - 1]
