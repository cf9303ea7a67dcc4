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

from phalanx.core.units import format_seconds

BARS = "▁▂▃▄▅▆▇█"
BUSY_LOAD = 2.0
"""An expert with twice its share holds up its rank noticeably: shown in yellow."""


@dataclass(frozen=True, kw_only=True)
class TableRow:
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


def header(width: int, *, with_left: bool = True) -> Text:
    """Titles above the columns; of a run that is over there is no time left."""
    return _line([Text(c.title, style="bold") for c in COLUMNS[: None if with_left else -1]], width)


def row_line(row: TableRow, width: int, *, style: str = "") -> Text:
    """One row; less than `NARROW_WIDTH` columns cut it on the right."""
    cells = [
        Text(f"{row.step}", style=style),
        Text(loss_text(row.loss), style=style),
        Text(loss_text(row.validation), style="cyan"),
        Text(_optional(row.tokens_per_s, short)),
        Text(_optional(row.mfu, lambda v: f"{100 * v:.1f} %")),
        Text(_optional(row.grad_norm, lambda v: f"{v:.3f}" if v < 10 else short(v))),
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
    for column, cell in zip(COLUMNS, cells, strict=False):
        line.append(gap if line else "")
        line.append(" " * (column.width - len(cell.plain)))
        line.append_text(cell)
    line.rstrip()
    line.truncate(width)
    return line


def loss_text(value: float | None) -> str:
    """Text of at most 7 characters, four decimals where a loss usually lies."""
    if value is None:
        return ""
    if 0 <= value < 99.99995:
        return f"{value:.4f}"
    return f"{value:.1f}" if abs(value) < 9999.95 else f"{value:.0e}"


def short(value: float) -> str:
    """Three digits and a letter: `short(11234) == '11.2k'`."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if 0.9995 * 10**power <= abs(value) < 0.9995 * 10 ** (power + 3):
            return f"{value / 10**power:.3g}{letter}"
    if abs(value) >= 0.9995e15:
        return f"{value:.0e}"
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1 else f"{value:.2f}"


def exchange_words(exposed_s: float, hidden_s: float) -> str:
    """`12.3 ms a step, 71 % hidden`: of dispatch and combine."""
    total_s = exposed_s + hidden_s
    share = f", {100 * hidden_s / total_s:.0f} % hidden" if total_s else ""
    return f"{format_seconds(exposed_s)} a step{share}"


def clock(seconds: float) -> str:
    """`2:05`, `1:02:05`, `12h 05m`, `3d 04h`: at most 7 characters."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02d}h" if hours < 24 * 1000 else f"{hours // 24}d"
    if hours >= 10:
        return f"{hours}h {minutes:02d}m"
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
