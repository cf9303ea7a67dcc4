"""A map of a placement: hosts across, a column each; what every slot holds, as text and as SVG.

Decides the picture only. A cell is a slot; its number is the expert, its colour says how many hosts have that expert: red ones are the rarest, on as few
hosts as any, and the first to be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.observe.pictures.svg import page, words
from phalanx.plan.placement.search import HostPlacement

CELL, ROW, LEFT, TOP = 34, 22, 96, 64
MAX_CELLS = 20_000
MAX_TEXT_HOSTS = 40
COLOURS = ("#e45756", "#f58518", "#eeca3b", "#54a24b", "#4c78a8", "#72b7b2")
"""Colours from the rarest to the most common."""


def placement_text(plan: HostPlacement, layer: int) -> str:
    """One layer: a line for each slot, a column for each host. `!` marks the experts on fewest hosts."""
    raise_if(_layer_problems(plan, layer), PlanError, subject="picture")
    hosts = plan.pool.num_hosts
    shown = range(min(hosts, MAX_TEXT_HOSTS))
    rarest, on = _rarity(plan, layer)
    width = max(len(str(plan.num_experts - 1)) + 1, *(len(str(name)) for name in plan.pool.host_names)) + 1
    lines = ["host".ljust(8) + "".join(str(plan.pool.host_names[n]).rjust(width) + " " for n in shown).rstrip()]
    if plan.pool.racks:
        lines.append("rack".ljust(8) + "".join(str(plan.pool.racks[n]).rjust(width) + " " for n in shown).rstrip())
    for slot in range(max(plan.pool.slots)):
        cells = []
        for n in shown:
            held = plan.slots[layer][n]
            text = f"{held[slot]}{'!' if on[held[slot]] == rarest else ' '}" if slot < len(held) else ""
            cells.append(text.rjust(width + 1))
        lines.append(f"slot {slot}".ljust(8) + "".join(cells).rstrip())
    if hosts > MAX_TEXT_HOSTS:
        lines.append(f"... and {hosts - MAX_TEXT_HOSTS} more hosts")
    lines.append(f"! = on {rarest} host{'s' if rarest != 1 else ''} only, the fewest of layer {layer}")
    return "\n".join(lines)


def placement_svg(plan: HostPlacement, layers: Sequence[int] | None = None) -> str:
    """All layers (or `layers`) one below the other. Raises `PlanError` where that is more than can be read."""
    chosen = list(range(plan.num_layers)) if layers is None else list(layers)
    problems = [p for layer in chosen for p in _layer_problems(plan, layer)]
    cells = len(chosen) * plan.pool.num_slots
    if cells > MAX_CELLS:
        rule = f"a picture shows at most {MAX_CELLS} slots"
        problems.append(Problem(where="slots", value=cells, rule=rule, hint="fewer layers"))
    raise_if(problems, PlanError, subject="picture")
    height_of_layer = ROW * max(plan.pool.slots) + 30
    width = max(LEFT + CELL * plan.pool.num_hosts + 16, 640)
    height = TOP + height_of_layer * len(chosen) + 12
    body = [words(12, 24, f"{plan.num_experts} experts on {plan.pool.num_hosts} hosts", size=16, weight=600)]
    body.append(words(12, 42, plan.certificate.explain(most=4), fill="#444"))
    for n, name in enumerate(plan.pool.host_names):
        label = f"{name}" if not plan.pool.racks else f"{name}/{plan.pool.racks[n]}"
        body.append(words(_center(n), TOP - 6, label, anchor="middle", fill="#666"))
    body.append(words(LEFT - 10, TOP - 6, "host/rack" if plan.pool.racks else "host", anchor="end", fill="#666"))
    for i, layer in enumerate(chosen):
        body += _layer_cells(plan, layer, TOP + i * height_of_layer)
    return page(body, width=width, height=height)


def _layer_cells(plan: HostPlacement, layer: int, top: int) -> list[str]:
    rarest, on = _rarity(plan, layer)
    order = sorted(set(on))
    out = [words(LEFT - 10, top + 16, f"layer {layer}", anchor="end", weight=600)]
    out.append(words(LEFT - 10, top + 32, f"rarest: {rarest}", anchor="end", fill="#666"))
    for n, held in enumerate(plan.slots[layer]):
        for slot, expert in enumerate(held):
            fill = COLOURS[min(order.index(on[expert]), len(COLOURS) - 1)]
            x, y = LEFT + CELL * n, top + ROW * slot
            out.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{ROW - 2}" rx="3" fill="{fill}" opacity="0.85">'
                f"<title>layer {layer} expert {expert}: on {on[expert]} hosts</title></rect>"
            )
            out.append(words(_center(n), y + 15, str(expert), anchor="middle", fill="#fff"))
    return out


def _rarity(plan: HostPlacement, layer: int) -> tuple[int, list[int]]:
    """Fewest hosts of any expert of the layer, and the hosts of each."""
    on = (plan.copies[layer] > 0).sum(1).tolist()
    return min(on), on


def _layer_problems(plan: HostPlacement, layer: int) -> list[Problem]:
    if 0 <= layer < plan.num_layers:
        return []
    return [Problem(where="layer", value=layer, rule=f"layers are 0 ... {plan.num_layers - 1}")]


def _center(host: int) -> float:
    return LEFT + CELL * (host + 0.5)
