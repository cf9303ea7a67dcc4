"""Training as rows of a table: which columns there are, how numbers look, which of them deserve a second look.

One row function serves the live display, the plain log and `phalanx metrics`. For one width of the line, columns and their widths are fixed, so rows printed minutes apart align.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from phalanx.core.units import format_bytes, format_seconds

BARS = "▁▂▃▄▅▆▇█"
FULL_LOAD = 3.0


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
    tokens: float | None = None
    """Tokens trained so far."""
    memory_bytes: int | None = None
    step_s: float | None = None
    entropy: float | None = None
    aux_loss: float | None = None
    waits_s: float | None = None
    """Time of the step for which a rank stood waiting for dispatch and combine."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: its title, how wide its values may be, and what it shows of a row."""

    title: str
    width: int
    meaning: str
    """As the legend says it; empty where the title does."""
    shown: Callable[[TableRow], str]
    rank: int = 0
    """0: always there; the others come in this order where the line is wide enough."""


COLUMNS = (
    Column(title="step", width=6, meaning="", shown=lambda r: f"{r.step}"),
    Column(title="loss", width=7, meaning="cross-entropy of a token, in nats", shown=lambda r: loss_text(r.loss)),
    Column(title="val", width=7, meaning="on held-out text", shown=lambda r: loss_text(r.validation)),
    Column(title="tokens", width=6, meaning="", shown=lambda r: _optional(r.tokens, short), rank=1),
    Column(title="tok/s", width=6, meaning="", shown=lambda r: _optional(r.tokens_per_s, short)),
    Column(title="s/step", width=7, meaning="", shown=lambda r: _optional(r.step_s, lambda v: f"{v:.3g}"), rank=3),
    Column(title="MFU", width=6, meaning="share of the matmul rate", shown=lambda r: _optional(r.mfu, lambda v: f"{100 * v:.1f} %")),
    Column(title="grad", width=6, meaning="", shown=lambda r: _optional(r.grad_norm, lambda v: f"{v:.3f}" if v < 10 else short(v))),
    Column(title="lr", width=7, meaning="", shown=lambda r: _optional(r.lr, lambda v: f"{v:.1e}".replace("e-0", "e-"))),
    Column(title="aux", width=6, meaning="load-balancing loss", shown=lambda r: _optional(r.aux_loss, lambda v: f"{v:.4f}"), rank=5),
    Column(title="load", width=5, meaning="busiest expert over the mean", shown=lambda r: _optional(r.load, lambda v: f"{v:.2f}")),
    Column(title="entropy", width=7, meaning="of the router", shown=lambda r: _optional(r.entropy, lambda v: f"{v:.3f}"), rank=6),
    Column(title="dead", width=4, meaning="experts without a token", shown=lambda r: _optional(r.dead, str)),
    Column(title="drop", width=5, meaning="tokens over capacity", shown=lambda r: _optional(r.dropped, short)),
    Column(title="waits", width=7, meaning="time of a step spent waiting for tokens of other ranks", shown=lambda r: _optional(r.waits_s, format_seconds).replace(" ", ""), rank=4),
    Column(title="memory", width=8, meaning="of the fullest rank", shown=lambda r: _optional(r.memory_bytes, format_bytes).replace(" ", ""), rank=2),
    Column(title="left", width=7, meaning="", shown=lambda r: _optional(r.left_s, clock)),
)  # fmt: skip
MOST_GAP = 4
"""Spaces between columns, at most: the eye must follow a row."""


def columns(width: int, *, with_left: bool = True) -> tuple[Column, ...]:
    """The columns that a line of so many characters has; of a run that is over there is no time left."""
    shown = [c for c in COLUMNS if c.rank == 0]
    for column in sorted((c for c in COLUMNS if c.rank), key=lambda c: c.rank):
        if _width_of([*shown, column], 2) > width:
            break
        shown.append(column)
    return tuple(c for c in COLUMNS if c in shown and (with_left or c.title != "left"))


def _width_of(shown: Sequence[Column], gap: int) -> int:
    return sum(c.width for c in shown) + gap * (len(shown) - 1)


def legend(width: int) -> str:
    """What the titles of the columns mean."""
    return "; ".join(f"{c.title}: {c.meaning}" for c in columns(width) if c.meaning)


def header(width: int, *, with_left: bool = True) -> Text:
    """Titles above the columns."""
    return _line([Text(c.title, style="bold") for c in columns(width, with_left=with_left)], width)


def row_line(row: TableRow, width: int, *, style: str = "") -> Text:
    """One row; where not even the columns that are always there have room, it is cut on the right."""
    return _line([Text(c.shown(row), style=style) for c in columns(width)], width)


def _line(cells: Sequence[Text], width: int) -> Text:
    shown = columns(width)
    gap = max(1, min(MOST_GAP, (width - _width_of(shown, 0)) // max(1, len(shown) - 1)))
    line = Text(no_wrap=True, overflow="crop")
    for number, (column, cell) in enumerate(zip(shown, cells, strict=False)):
        line.append(" " * (gap if number else 0))
        line.append(" " * (column.width - len(cell.plain)))
        line.append_text(cell)
    line.rstrip()
    line.truncate(width)
    return line


def _optional(value: Any, shown: Callable[[Any], str]) -> str:
    return "" if value is None else shown(value)


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


def load_bar(load: float) -> str:
    """One character for max/mean load: an even layer is low, `FULL_LOAD` times the mean is a full block."""
    share = (load - 1.0) / (FULL_LOAD - 1.0)
    return BARS[max(0, min(len(BARS) - 1, round(share * (len(BARS) - 1))))]
