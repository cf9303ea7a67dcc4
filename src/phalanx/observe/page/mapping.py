"""Who holds what: the folding of a run as a picture and as a table of its ranks.

Decides how the label in an event log (`dp8|ep4.edp2`, `tp1/tp2.ep2`) becomes a folding again; a label that is none gives nothing, for logs are hostile input.
"""

from __future__ import annotations

import re
from typing import Any

from phalanx.core.errors import PhalanxError
from phalanx.observe.pictures import folding_svg
from phalanx.plan.mapping import AnyFolding, Folding, parse_stages

MOST_RANKS = 4096
MOST_ROWS = 512
AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")


def read_label(label: Any) -> AnyFolding | None:
    """The folding that a label names; None where it names none that can be."""
    if not isinstance(label, str) or len(label) > 400:
        return None
    try:
        if "/" in label:
            return parse_stages(label.split("/"))
        left, bar, right = label.partition("|")
        degrees = {**_degrees(left), **_degrees(right)} if bar else {}
        if not bar or not set(degrees) <= set(AXES):
            return None
        world = degrees.get("tp", 1) * degrees.get("cp", 1) * degrees.get("dp", 1) * degrees.get("pp", 1)
        if not 1 <= world <= MOST_RANKS:
            return None
        folding = Folding(world=world, **{k: v for k, v in degrees.items() if k in ("tp", "cp", "pp", "ep", "etp")})
        folding.check()
        return folding
    except (PhalanxError, ValueError):
        return None


def _degrees(text: str) -> dict[str, int]:
    found = re.findall(r"([a-z]{2,3})(\d{1,5})(?:\.|$)", text)
    return {axis: int(degree) for axis, degree in found}


def folding_picture(label: Any) -> str | None:
    """An SVG of both grids; None where the label is no folding, or has more ranks than can be read."""
    folding = read_label(label)
    if not isinstance(folding, Folding):
        return None
    try:
        return folding_svg(folding)
    except PhalanxError:
        return None


def holders(label: Any, *, experts: int) -> dict[str, Any]:
    """A row for each rank: its coordinates in both grids, and which experts it holds (of plain placements: those in order)."""
    folding = read_label(label)
    if not isinstance(folding, Folding):
        return {"rows": [], "axes": [], "left_out": 0, "picture": False}
    axes = [axis for axis in AXES if folding.degree(axis) > 1]
    each = experts // folding.ep if experts and experts % folding.ep == 0 else 0
    rows = []
    for rank in range(min(folding.world, MOST_ROWS)):
        first = folding.coord(rank, "ep") * each
        held = "" if not each else f"{first}" if each == 1 else f"{first}-{first + each - 1}"
        rows.append([rank, *(folding.coord(rank, axis) for axis in axes), held])
    return {
        "rows": rows,
        "axes": axes,
        "left_out": folding.world - len(rows),
        "picture": folding_picture(label) is not None,
    }
