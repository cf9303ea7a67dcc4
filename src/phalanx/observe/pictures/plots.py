"""Pictures of predictions as SVG text: time against memory, predicted against measured, curves.

Decides nothing about numbers. Colours: #0b6e99 for what is shown, #bbbbbb for what stands around it, #c0392b for what to look at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 720, 440, 76, 56, 40, 24


@dataclass(frozen=True)
class Series:
    """Points of one kind. `line` joins them."""

    name: str
    points: tuple[tuple[float, float, str], ...]
    """(x, y, tooltip)"""
    colour: str = "#0b6e99"
    line: bool = False
    size: float = 3.0


def plot(
    series: Sequence[Series],
    *,
    title: str,
    x_name: str,
    y_name: str,
    log: bool = False,
    diagonal: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """A plot of points and lines. `marks` are vertical lines with a word; `diagonal` draws x = y. Without points the axes are 1 to 10."""
    marks = [mark for mark in marks if mark[0] > 0 or not log]
    xs = [p[0] for s in series for p in s.points] + [x for x, _ in marks]
    ys = [p[1] for s in series for p in s.points]
    if diagonal:
        xs = ys = [*xs, *ys]
    x_of, x_ticks = _scale(xs, LEFT, WIDTH - RIGHT, log=log)
    y_of, y_ticks = _scale(ys, HEIGHT - BOTTOM, TOP, log=log and diagonal)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{escape(title)}</text>',
        *(_tick(x_of(t), t, down=True) for t in x_ticks),
        *(_tick(y_of(t), t, down=False) for t in y_ticks),
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text transform="translate(16 {HEIGHT / 2:.0f}) rotate(-90)" text-anchor="middle">{escape(y_name)}</text>',
    ]
    if diagonal and xs:
        low, high = max(min(xs), min(ys)), min(max(xs), max(ys))
        out.append(_segment(x_of(low), y_of(low), x_of(high), y_of(high), "#bbbbbb"))
    for x, word in marks:
        out.append(_segment(x_of(x), TOP, x_of(x), HEIGHT - BOTTOM, "#c0392b"))
        out.append(f'<text x="{x_of(x) + 4:.1f}" y="{TOP + 12}" fill="#c0392b">{escape(word)}</text>')
    for one in series:
        out += _draw(one, x_of, y_of)
    for index, one in enumerate(series):
        if one.name:
            out.append(f'<rect x="{WIDTH - 204}" y="{TOP + 16 * index - 3}" width="180" height="16" fill="white"/>')
            out.append(f'<rect x="{WIDTH - 200}" y="{TOP + 16 * index}" width="10" height="10" fill="{one.colour}"/>')
            out.append(f'<text x="{WIDTH - 185}" y="{TOP + 9 + 16 * index}">{escape(one.name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _draw(one: Series, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[str]:
    if one.line:
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y, _ in one.points)
        return [f'<polyline points="{path}" fill="none" stroke="{one.colour}" stroke-width="2"/>']
    return [
        f'<circle cx="{x_of(x):.1f}" cy="{y_of(y):.1f}" r="{one.size}" fill="{one.colour}" fill-opacity="0.75">'
        f"<title>{escape(tip)}</title></circle>"
        for x, y, tip in one.points
    ]


def _segment(x0: float, y0: float, x1: float, y1: float, colour: str) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{colour}"/>'


def _tick(at: float, value: float, *, down: bool) -> str:
    label = f"{value:g}"
    if down:
        line = _segment(at, TOP, at, HEIGHT - BOTTOM, "#eeeeee")
        return f'{line}<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{label}</text>'
    line = _segment(LEFT, at, WIDTH - RIGHT, at, "#eeeeee")
    return f'{line}<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>'


def _scale(
    values: Sequence[float], start: float, stop: float, *, log: bool
) -> tuple[Callable[[float], float], list[float]]:
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    if log:
        a, b = math.log10(low * 0.9), math.log10(high * 1.1)
        ticks = [m * 10.0**e for e in range(math.floor(a), math.ceil(b) + 1) for m in (1, 2, 5)]
        ticks = [t for t in ticks if a <= math.log10(t) <= b]
        return (lambda v: start + (math.log10(v) - a) / ((b - a) or 1.0) * (stop - start)), ticks
    span = (high - low) or abs(high) or 1.0
    low, high = low - 0.04 * span, high + 0.06 * span
    step = 10.0 ** math.floor(math.log10(span / 4))
    step *= next(m for m in (1, 2, 5, 10) if span / (m * step) <= 7)
    first = math.ceil(low / step)
    ticks = [round(k * step, 12) for k in range(first, math.floor(high / step) + 1)]
    return (lambda v: start + (v - low) / (high - low) * (stop - start)), ticks
