"""A picture of a folding: the same ranks twice, once as the attention grid, once as the expert grid.

Columns are ranks, in order. A cell's colour is the group it communicates with most: model shards of one data-parallel replica above
(ranks of one colour hold the same micro-batch), ranks of one expert-parallel group below (ranks of one colour exchange tokens).
"""

from __future__ import annotations

from phalanx.core.errors import PlanError
from phalanx.observe.pictures.svg import page, words
from phalanx.plan.mapping import Folding

CELL, ROW, LEFT, TOP = 46, 24, 112, 58
MAX_RANKS = 64
PALETTE = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b")
GRIDS = (("attention", ("tp", "cp", "dp", "pp"), ("dp", "pp")), ("experts", ("etp", "ep", "edp", "pp"), ("edp", "pp")))
"""Grid, its axes from the fastest, and the axes whose coordinates give a cell its colour."""


def folding_svg(folding: Folding) -> str:
    """An SVG of both grids. Raises `PlanError` above 64 ranks, where a cell could not be read."""
    if folding.world > MAX_RANKS:
        rule = f"a picture shows at most {MAX_RANKS} ranks"
        raise PlanError.of("world", folding.world, rule, "print it as text", subject="picture")
    height = TOP + sum(_grid_height(folding, axes) for _, axes, _ in GRIDS) + 18
    width = max(LEFT + CELL * folding.world + 16, 620)
    body = [words(12, 24, f"{folding.world} ranks, two grids over the same ranks", size=16, weight=600)]
    body += [words(_center(rank), TOP - 8, str(rank), anchor="middle", fill="#666") for rank in range(folding.world)]
    body.append(words(LEFT - 10, TOP - 8, "rank", anchor="end", fill="#666"))
    top = TOP
    for name, axes, colour_axes in GRIDS:
        body += _grid(folding, name, axes, colour_axes, top)
        top += _grid_height(folding, axes)
    return page(body, width=width, height=height)


def _shown(folding: Folding, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Axes with more than one coordinate; all of one grid may be trivial, then its fastest is shown."""
    return tuple(a for a in axes if folding.degree(a) > 1) or axes[:1]


def _grid_height(folding: Folding, axes: tuple[str, ...]) -> int:
    return ROW * len(_shown(folding, axes)) + 44


def _center(rank: int) -> float:
    return LEFT + CELL * (rank + 0.5)


def _grid(folding: Folding, name: str, axes: tuple[str, ...], colour_axes: tuple[str, ...], top: int) -> list[str]:
    shown = _shown(folding, axes)
    degrees = " x ".join(f"{a} {folding.degree(a)}" for a in axes)
    height = ROW * len(shown)
    out = [words(12, top + height + 17, f"{name}: {degrees}", fill="#333")]
    for row, axis in enumerate(shown):
        out.append(words(LEFT - 10, top + ROW * row + 16, axis, anchor="end", weight=600))
    for rank in range(folding.world):
        colour = 0
        for axis in colour_axes:
            colour = colour * folding.degree(axis) + folding.coord(rank, axis)
        fill = PALETTE[colour % len(PALETTE)]
        x = LEFT + CELL * rank
        out.append(
            f'<rect x="{x + 1}" y="{top}" width="{CELL - 2}" height="{height}" rx="4" fill="{fill}" opacity="0.85"/>'
        )
        for row, axis in enumerate(shown):
            label = f"{axis}{folding.coord(rank, axis)}"
            out.append(words(_center(rank), top + ROW * row + 16, label, anchor="middle", fill="#fff"))
    return out
