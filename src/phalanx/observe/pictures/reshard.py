"""Pictures of a reshard plan: a row for each lane that is used, time to the right; as text for a terminal, and as SVG.

Decides what is shown, never what happens. A stream that has its lanes for itself is a bar with the number of its flow; streams that share their lanes (relay) are
drawn as how busy the lane is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phalanx.core.errors import PlanError
from phalanx.core.units import format_bytes, format_seconds
from phalanx.observe.pictures.svg import page
from phalanx.plan.reshard import ReshardPlan

PALETTE = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b")
ROW, LEFT, TOP, WIDTH = 24, 130, 76, 980
MOST_BARS, MOST_ROWS = 20_000, 32
SHADES = ".:-=+*#%@"
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Bar(NamedTuple):
    """A stream on a lane: sending (or receiving) side of a host, for part `share` of its rate."""

    host: int
    sends: bool
    flow: int
    start_s: float
    stop_s: float
    share: float
    num_bytes: int


def bars(plan: ReshardPlan) -> list[Bar]:
    """Every stream on every lane that it takes."""
    out = []
    rates = {True: plan.hosts.send_bytes_per_s, False: plan.hosts.recv_bytes_per_s}
    for phase in plan.phases:
        for stream in phase.schedule.streams:
            size, took = stream.stop - stream.start, stream.end_s - stream.begin_s
            for edge in stream.edges:
                for host, sends in ((edge.src, True), (edge.dst, False)):
                    share = size / took / rates[sends][host] if took else 0.0
                    begin = phase.start_s + stream.begin_s
                    out.append(Bar(host, sends, stream.flow, begin, begin + took, share, size))
    return out


def lanes(drawn: Sequence[Bar]) -> list[tuple[int, bool]]:
    """Lanes that carry anything: all that send, then all that receive."""
    return sorted({(bar.host, bar.sends) for bar in drawn}, key=lambda lane: (not lane[1], lane[0]))


def _shared(plan: ReshardPlan) -> bool:
    return any(phase.schedule.rounds_s for phase in plan.phases)


def text_picture(plan: ReshardPlan, *, width: int) -> str:
    """One line a lane. A letter stands for a flow (0-9, a-z, A-Z, again from 0), a dot for an idle lane."""
    drawn = bars(plan)
    rows = lanes(drawn)
    if not rows:
        return "nothing crosses between hosts"
    columns = max(20, width - 16)
    shared = _shared(plan)
    lines = []
    for host, sends in rows[:MOST_ROWS]:
        busy = [0.0] * columns
        label = ["."] * columns
        for bar in drawn:
            if (bar.host, bar.sends) != (host, sends):
                continue
            first = int(bar.start_s / plan.makespan_s * columns)
            last = max(first + 1, round(bar.stop_s / plan.makespan_s * columns))
            for column in range(first, min(columns, last)):
                busy[column] += bar.share
                label[column] = LETTERS[bar.flow % len(LETTERS)]
        if shared:
            label = [SHADES[min(len(SHADES) - 1, round(b * (len(SHADES) - 1)))] for b in busy]
        lines.append(f"host {host:>3} {'sends' if sends else 'takes'} {''.join(label)}")
    if len(rows) > MOST_ROWS:
        lines.append(f"... and {len(rows) - MOST_ROWS} more lanes")
    meaning = "how busy a lane is, from . to @" if shared else "a letter stands for a flow, . for idle"
    return "\n".join([*lines, f"{'':>15}{meaning}; 0 to {format_seconds(plan.makespan_s)}"])


def svg_picture(plan: ReshardPlan) -> str:
    """The same as an SVG. Raises `PlanError` where there are more bars than a picture shows."""
    drawn = bars(plan)
    if len(drawn) > MOST_BARS:
        rule = f"a picture shows at most {MOST_BARS} bars"
        raise PlanError.of("streams", len(drawn), rule, "leave --svg out", subject="picture")
    rows = lanes(drawn)
    top = {lane: TOP + ROW * at for at, lane in enumerate(rows)}
    scale = WIDTH / plan.makespan_s if plan.makespan_s else 0.0
    height = TOP + ROW * len(rows) + 44
    title = f"{len(plan.moves)} tensors, {plan.method}: {format_seconds(plan.makespan_s)} = {plan.rho:.4f} x the bound"
    body = [_text(12, 26, title, size=16), _text(12, 48, plan.bound.explain(), fill="#555")]
    for lane in rows:
        body.append(_rect(LEFT, top[lane], WIDTH, ROW - 4, "#f1f1f1"))
        name = f"host {lane[0]} {'sends' if lane[1] else 'receives'}"
        body.append(_text(LEFT - 8, top[lane] + 15, name, anchor="end"))
    filled: dict[tuple[int, bool], float] = {}
    for bar in drawn:
        lane = bar.host, bar.sends
        y, high = float(top[lane]), ROW - 4.0
        if _shared(plan):  # streams side by side: stacked, each as high as its share of the lane
            high *= bar.share
            y += filled.get(lane, 0.0)
            filled[lane] = filled.get(lane, 0.0) + high
        body.append(_bar(bar, y, high, scale))
    foot = TOP + ROW * len(rows) + 16
    for part in range(5):
        at = plan.makespan_s * part / 4
        body.append(_text(LEFT + at * scale, foot, format_seconds(at), anchor="middle", fill="#666"))
    if plan.bound.seconds:
        x = LEFT + plan.bound.seconds * scale
        line = f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 8}" y2="{foot - 12}" stroke="#c00" stroke-dasharray="4 3"/>'
        body.append(line)
    full = LEFT + WIDTH + 30
    return page(body, width=full, height=height)


def _bar(bar: Bar, y: float, high: float, scale: float) -> str:
    x, width = LEFT + bar.start_s * scale, (bar.stop_s - bar.start_s) * scale
    tip = (
        f"flow {bar.flow}: {format_bytes(bar.num_bytes)}, {format_seconds(bar.start_s)} to {format_seconds(bar.stop_s)}"
    )
    box = _rect(x, y, max(width - 0.6, 0.4), high, PALETTE[bar.flow % len(PALETTE)])
    label = (
        _text(x + width / 2, y + 14, str(bar.flow), anchor="middle", fill="#fff") if width > 22 and high > 14 else ""
    )
    return f"<g><title>{tip}</title>{box}{label}</g>"


def _rect(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}"/>'


def _text(x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", fill: str = "#111") -> str:
    return f'<text x="{x:.2f}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}">{text}</text>'
