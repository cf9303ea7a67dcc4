"""Pictures of a pipeline timeline: rows of cells for a terminal, and an SVG.

Decides what is shown, never what happens. One row a rank, time to the right. A pass has the colour of its kind, darker for later chunks,
and is labelled with its microbatch. Where there are no colours the label has the kind too: `F3` is the forward of microbatch 3, with two
chunks `f3` that of the second one, with more `Fc3` that of the third; as much of it as fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.core.errors import PlanError
from phalanx.observe.pictures.svg import page
from phalanx.plan.pipeline.schedule import ActionSpan, Kind, Timeline

COLOURS: dict[Kind, tuple[str, str]] = {
    "F": ("#9ec9f0", "#3f7fc1"),
    "B": ("#a9dba8", "#3f9a4d"),
    "I": ("#ffd08a", "#e0902a"),
    "W": ("#d3bde6", "#8b5fb8"),
}
"""Kind -> colour of the first and of the last chunk."""

NAMES: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
ROW, LEFT, TOP, FOOT = 30, 74, 62, 64
WIDEST, NARROWEST, UNIT = 1800, 640, 26
MAX_SPANS = 40_000
CUT = " // "
"""Stands where the middle of a long timeline is left out."""


@dataclass(frozen=True)
class Cell:
    """Columns of one row with one meaning: a pass (`kind`, `colour`), or idle (kind "-")."""

    kind: Kind | Literal["-"]
    colour: str
    text: str


def chunk_colour(kind: Kind, chunk: int, *, virtual: int) -> str:
    """Colour of a pass: from the first chunk's to the last chunk's."""
    first, last = COLOURS[kind]
    share = chunk / (virtual - 1) if virtual > 1 else 0.35
    mixed = (round(int(first[i : i + 2], 16) * (1 - share) + int(last[i : i + 2], 16) * share) for i in range(1, 7, 2))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def text_rows(timeline: Timeline, *, width: int, colour: bool) -> tuple[tuple[Cell, ...], ...]:
    """One row of cells a rank, `width` columns at most; beginning and end where the whole does not fit.

    The shortest pass has a whole number of columns where the whole fits. `colour`: the reader will see the cells' colours.
    """
    unit = min((span.end - span.start for spans in timeline.spans for span in spans), default=1.0)
    columns = width / (timeline.makespan / unit or 1.0)
    if columns >= 1:
        scale = min(int(columns), 4) / unit
        return tuple(tuple(_cells(timeline, spans, scale, colour=colour)) for spans in timeline.spans)
    scale, half = len(str(timeline.schedule.num_microbatches - 1)) + (0 if colour else 1), (width - len(CUT)) // 2
    rows = [_cells(timeline, spans, scale / unit, colour=colour) for spans in timeline.spans]
    whole = round(timeline.makespan * scale / unit)
    cut = Cell("-", "", CUT)
    return tuple((*_window(row, 0, half), cut, *_window(row, whole - half, whole)) for row in rows)


def _window(row: Sequence[Cell], start: int, stop: int) -> list[Cell]:
    """The columns start .. stop of a row; a pass that is cut there loses its label's end."""
    out, column = [], 0
    for cell in row:
        low, high = max(start - column, 0), min(stop - column, len(cell.text))
        column += len(cell.text)
        if low < high:
            text = cell.text[low:high] if low == 0 or cell.kind == "-" else " " * (high - low)
            out.append(Cell(cell.kind, cell.colour, text))
    return out


def _cells(timeline: Timeline, spans: Sequence[ActionSpan], scale: float, *, colour: bool) -> list[Cell]:
    cells, column = [], 0
    for span in spans:
        start, stop = max(column, round(span.start * scale)), round(span.end * scale)
        if stop <= start:
            continue  # narrower than a column
        if start > column:
            cells.append(Cell("-", "", "." * (start - column)))
        size = stop - start
        text = next((label for label in _labels(timeline, span, colour=colour) if len(label) <= size), "")
        cells.append(Cell(span.action.kind, _colour(timeline, span), text.ljust(size)))
        column = stop
    rest = round(timeline.makespan * scale) - column
    return [*cells, Cell("-", "", "." * rest)] if rest > 0 else cells


def _labels(timeline: Timeline, span: ActionSpan, *, colour: bool) -> tuple[str, ...]:
    """What can be written on a pass, the fullest first."""
    kind, stage, mb = span.action
    virtual, chunk = timeline.schedule.virtual, timeline.schedule.chunk_of_stage[stage]
    if colour:
        return (str(mb),)
    if virtual > 2:
        letter = chr(ord("a") + chunk % 26)
        return f"{kind}{letter}{mb}", f"{kind}{letter}", kind
    word = kind.lower() if chunk else kind
    return f"{word}{mb}", word


def _colour(timeline: Timeline, span: ActionSpan) -> str:
    chunk = timeline.schedule.chunk_of_stage[span.action.stage]
    return chunk_colour(span.action.kind, chunk, virtual=timeline.schedule.virtual)


def timeline_svg(timeline: Timeline) -> str:
    """An SVG of the timeline. Raises `PlanError` above 40,000 passes, which no picture shows."""
    count = sum(map(len, timeline.spans))
    if count > MAX_SPANS:
        rule = f"a picture shows at most {MAX_SPANS} passes"
        raise PlanError.of("passes", count, rule, "fewer microbatches", subject="picture")
    shortest = min(span.end - span.start for spans in timeline.spans for span in spans)
    width = min(WIDEST, max(NARROWEST, timeline.makespan / shortest * UNIT))
    scale = width / timeline.makespan
    schedule = timeline.schedule
    height = TOP + ROW * schedule.pp + FOOT
    title = (
        f"{schedule.name}: {schedule.pp} ranks, {schedule.virtual} stage{'s' if schedule.virtual > 1 else ''} each, "
        f"{schedule.num_microbatches} microbatches; bubble {timeline.bubble:.1%}"
    )
    body = [_text(12, 26, title, size=16, weight=600)]
    body.append(_text(LEFT + width + 12, TOP - 10, "activations held", fill="#666"))
    for rank, spans in enumerate(timeline.spans):
        top = TOP + ROW * rank
        body.append(_rect(LEFT, top, width, ROW - 4, "#f1f1f1"))
        body.append(_text(LEFT - 10, top + 18, f"rank {rank}", anchor="end"))
        body.append(_text(LEFT + width + 12, top + 18, str(timeline.peak_live[rank])))
        body += [_pass(timeline, span, top, scale) for span in spans]
    body += _axis(timeline, TOP + ROW * schedule.pp + 12, scale)
    body += _legend(timeline, height - 14)
    full = LEFT + width + 120
    return page(body, width=full, height=height)


def _pass(timeline: Timeline, span: ActionSpan, top: float, scale: float) -> str:
    """One pass: a box with its microbatch, and everything about it as the tooltip."""
    x, width = LEFT + span.start * scale, (span.end - span.start) * scale
    kind, stage, mb = span.action
    tip = f"{NAMES[kind]}, stage {stage}, microbatch {mb}, {span.start:g} to {span.end:g}"
    label = str(mb) if width >= 7 * len(str(mb)) + 3 else ""
    text = _text(x + width / 2, top + 18, label, anchor="middle", size=11) if label else ""
    box = _rect(x + 0.5, top, max(width - 1, 0.5), ROW - 4, _colour(timeline, span))
    return f"<g><title>{tip}</title>{box}{text}</g>"


def _axis(timeline: Timeline, y: float, scale: float) -> list[str]:
    """Times at up to nine places below the rows."""
    step = _round_up(timeline.makespan / 8)
    places = [i * step for i in range(int(timeline.makespan / step + 1e-9) + 1)]
    return [_text(LEFT + place * scale, y, f"{place:g}", anchor="middle", fill="#666", size=11) for place in places]


def _round_up(value: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 1.0
    while power > value:
        power /= 10
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value)


def _legend(timeline: Timeline, y: float) -> list[str]:
    used = {span.action.kind for spans in timeline.spans for span in spans}
    virtual, x, out = timeline.schedule.virtual, float(LEFT), []
    for kind, name in NAMES.items():
        if kind not in used:
            continue
        for chunk in range(virtual):
            out.append(_rect(x, y - 11, 14, 14, chunk_colour(kind, chunk, virtual=virtual)))
            x += 16
        out.append(_text(x + 4, y, name))
        x += 24 + 6.6 * len(name)
    if virtual > 1:
        out.append(_text(x, y, f"(light to dark: first to last of {virtual} stages of a rank)", fill="#666"))
    return out


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:g}" fill="{fill}"/>'


def _text(
    x: float, y: float, text: str, *, size: int = 12, weight: int = 400, anchor: str = "start", fill: str = "#111"
) -> str:
    return f'<text x="{x:.2f}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
