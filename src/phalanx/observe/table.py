"""Training as rows of a table: which columns there are, how numbers look, which of them deserve a second look.

One row function serves the live display, the plain log and `phalanx metrics`. Widths are fixed, so rows printed minutes apart align.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"
BUSY_LOAD = 2.0
"""An expert with twice its share holds up its rank noticeably: shown in yellow."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one line shows; None leaves the column empty."""

    step: int
    loss: float | None = None
    validation: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    load: float | None = None
    """Tokens of the fullest expert over the mean, worst layer."""
    dead: int | None = None
    dropped: int | None = None
    left_s: float | None = None


@dataclass(frozen=True)
class Column:
    title: str
    width: int


COLUMNS = (
    Column("step", 6),
    Column("loss", 7),
    Column("val", 7),
    Column("tok/s", 6),
    Column("MFU", 6),
    Column("grad", 6),
    Column("lr", 7),
    Column("load", 5),
    Column("dead", 4),
    Column("drop", 5),
    Column("left", 7),
)
NARROW_WIDTH = sum(c.width for c in COLUMNS) + len(COLUMNS) - 1
WIDE_WIDTH = NARROW_WIDTH + len(COLUMNS) - 1


def header(width: int) -> Text:
    """Titles above the columns."""
    return _line([Text(c.title, style="bold") for c in COLUMNS], width)


def row_line(row: Row, width: int, *, style: str = "") -> Text:
    """One row in at most `width` columns (less than 76 cut it on the right)."""
    cells = [
        Text(f"{row.step}", style=style),
        Text(loss_text(row.loss), style=style),
        Text(loss_text(row.validation), style="cyan"),
        Text(_optional(row.tokens_per_s, short)),
        Text(_optional(row.mfu, lambda v: f"{100 * v:.1f} %")),
        Text(_optional(row.grad_norm, lambda v: f"{v:.3f}" if v < 10 else f"{v:.3g}")),
        Text(_optional(row.lr, lambda v: f"{v:.1e}".replace("e-0", "e-"))),
        Text(_optional(row.load, lambda v: f"{v:.2f}"), style="yellow" if (row.load or 0) >= BUSY_LOAD else ""),
        Text(_optional(row.dead, str), style="yellow" if row.dead else ""),
        Text(_optional(row.dropped, short), style="yellow" if row.dropped else ""),
        Text(_optional(row.left_s, clock), style="dim"),
    ]
    return _line(cells, width)


def _optional(value: Any, shown: Callable[[Any], str]) -> str:
    return "" if value is None else shown(value)


def _line(cells: Sequence[Text], width: int) -> Text:
    gap = "  " if width >= WIDE_WIDTH else " "
    line = Text(no_wrap=True, overflow="crop")
    for column, cell in zip(COLUMNS, cells, strict=True):
        line.append(gap if line else "")
        line.append(" " * (column.width - len(cell.plain)))
        line.append_text(cell)
    return line


def loss_text(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def short(value: float) -> str:
    """Three digits and a letter: `short(11234) == '11.2k'`."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 0.9995 * 10**power:
            return f"{value / 10**power:.3g}{letter}"
    return f"{value:.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:.3g}"


def clock(seconds: float) -> str:
    """`2:05`, `1:02:05`, `3d 04h`: narrow, for a column."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    if whole >= 48 * 3600:
        return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The course of `values` in at most `width` characters, each the mean of its part."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite or width < 1:
        return ""
    columns = min(width, len(finite))
    cuts = [len(finite) * i // columns for i in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * columns
    return "".join(BARS[round((m - low) / (high - low) * (len(BARS) - 1))] for m in means)


def load_bar(load: float, *, full: float = 3.0) -> str:
    """One character for max/mean load: an even layer is low, `full` times the mean is a full block."""
    share = (load - 1.0) / (full - 1.0)
    return BARS[max(0, min(len(BARS) - 1, round(share * (len(BARS) - 1))))]
