"""`phalanx bench layer --cells`: how far the schedule that is chosen stays behind the best one, over shapes, tokens, loads, links and types.

The shapes are the layers of Mixtral 8x7B, Qwen2-MoE-2.7B and Phi-3.5-MoE (sizes as printed in arXiv 2502.19811, section 5.1), width and
expert width an eighth of theirs. Every shape meets every number of tokens in both types; links and loads go round, so that every
link meets every load. Forward passes only. A cell has as many iterations as its share of the time allows, at least 8. `--part 2/3` measures every third
cell, from the second on, and puts them beside those that the result file has already: three quiet spells of two to three minutes in place of one of eight.

In each cell `auto` calibrates itself as a run does; which of the other methods is best is decided on every second iteration, and both are scored on the others. Links are set once each; processes
live on. Unshaped, the link is this machine's own memory, where overlap can only lose and serial order is to be chosen.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table

from phalanx_lab.bench.layer.methods import AUTO, SERIAL
from phalanx_lab.bench.layer.rank import BenchLayer, BenchLayerShape, RankPlace, Times, as_lists
from phalanx_lab.bench.layer.scores import medians, regret

MODELS = {
    "mixtral": {"hidden": 512, "ffn": 1792, "experts": 8, "top_k": 2},
    "qwen2": {"hidden": 256, "ffn": 176, "experts": 64, "top_k": 4},
    "phi3.5": {"hidden": 512, "ffn": 800, "experts": 16, "top_k": 2},
}
TOKENS = (128, 512, 1024, 4096)
LINKS: tuple[float | None, ...] = (2e8, 8e8, 3.2e9, None)
"""25, 100 and 400 MB/s, and no limit."""
LOADS = ("0", "0.032", "dead")
TYPES = ("float32", "bfloat16")
IN_ORDER = "tiles"
"""Serial order, as `auto` takes it."""
LEAST_ITERATIONS, MOST_ITERATIONS = 8, 60


@dataclass(frozen=True, kw_only=True)
class LayerCell:
    model: str
    shape: BenchLayerShape
    link_bit_per_s: float | None


def cells() -> list[LayerCell]:
    """The grid, by link."""
    found = []
    for number, (dtype, model, tokens) in enumerate(itertools.product(TYPES, MODELS, TOKENS)):
        link = LINKS[(number + number // 4) % len(LINKS)]
        shape = BenchLayerShape(
            tokens=tokens, load=LOADS[(number + number // 3) % len(LOADS)], dtype=dtype, **MODELS[model]
        )
        found.append(LayerCell(model=model, shape=shape, link_bit_per_s=link))
    return sorted(found, key=lambda c: LINKS.index(c.link_bit_per_s))


# ---- one rank ----------------------------------------------------------------------------------------------------------------


def run(place: RankPlace, methods: Sequence[str], *, seconds: float, part: str = "1/1") -> dict[str, Any]:
    """The cells of a part, on all ranks at once; `seconds` would be all of the grid's."""
    grid, rows, wrong = cells(), [], []
    link: float | None = None
    mine = part_of(part)
    for number in mine:
        cell = grid[number]
        if cell.link_bit_per_s != link or number == mine[0]:
            link = cell.link_bit_per_s
            place.set_link(link)
        layer = BenchLayer(place, cell.shape, seed=number)
        wrong += [f"{cell.model}, {cell.shape}: {line}" for line in layer.wrong(methods[1:])]
        clocked = _forward_turns(layer, methods, seconds=seconds / len(grid))
        lists = {method: times["forward"] for method, times in as_lists(clocked).items()}
        rows.append(
            {
                "model": cell.model,
                "shape": asdict(cell.shape),
                "link_bit_per_s": link,
                "auto": layer.choice(),
                "seconds": lists,
            }
        )
    return _result(rows, wrong)


def part_of(text: str) -> list[int]:
    """Cells of part `i/n`: numbers in the grid. Raises `ValueError` where that is no part."""
    which, count = map(int, text.split("/"))
    found = list(range(len(cells())))[which - 1 :: count] if 1 <= which <= count else []
    if not found:
        raise ValueError(f"{text}: the grid has {len(cells())} cells")
    return found


def joined(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Cells of two runs, scored together, in the order of the grid; where both have a cell, that of `now`. Raises `ValueError` where `before` has other cells."""
    names = [_name({"model": c.model, "shape": asdict(c.shape), "link_bit_per_s": c.link_bit_per_s}) for c in cells()]
    rows: dict[str, dict[str, Any]] = {}
    wrong: dict[str, None] = {}
    for result in (before, now):
        if not isinstance(result.get("cells"), list) or any(_name(row) not in names for row in result["cells"]):
            raise ValueError("holds no result of `phalanx bench layer --cells`, or of other cells")
        rows |= {_name(row): dict(row) for row in result["cells"]}
        wrong |= dict.fromkeys(result["wrong"])
    return _result([rows[name] for name in names if name in rows], list(wrong))


def _name(row: Mapping[str, Any]) -> str:
    """What makes a cell that cell."""
    return repr((row["model"], sorted(row["shape"].items()), row["link_bit_per_s"]))


def _forward_turns(layer: BenchLayer, methods: Sequence[str], *, seconds: float) -> dict[str, list[Times]]:
    """Forward passes in turns until the time is over; all ranks agree on how many after the first round."""
    first = {method: _forward(layer, method) for method in methods}
    once = max(layer.place.comms.gather_objects(sum(first.values()), layer.place.axis))
    count = int(min(max(seconds / once - 1, LEAST_ITERATIONS), MOST_ITERATIONS))
    mine: dict[str, list[Times]] = {method: [] for method in methods}
    for number in range(count):
        start = number % len(methods)
        for method in (*methods[start:], *methods[:start]):
            took = _forward(layer, method)
            mine[method].append(Times(took, took))
    return {method: layer.place.slowest(times) for method, times in mine.items()}


def _forward(layer: BenchLayer, method: str) -> float:
    return layer.timed(method, backward=False).forward


def _result(rows: list[dict[str, Any]], wrong: list[str]) -> dict[str, Any]:
    for row in rows:
        behind = regret(row["seconds"])
        row["ratio"], row["to_least"], row["best"] = behind.ratio, behind.to_least, behind.best
        row["medians"] = medians(row["seconds"])
        row["serial_ratio"] = row["medians"][SERIAL] / row["medians"][row["best"]]
        row["iterations"] = len(row["seconds"][SERIAL])
    ratios = [row["ratio"] for row in rows]
    unshaped = [row["auto"] == IN_ORDER for row in rows if row["link_bit_per_s"] is None]
    return {
        "cells": rows,
        "median_ratio": statistics.median(ratios),
        "worst_ratio": max(ratios),
        "median_to_least": statistics.median(row["to_least"] for row in rows),
        "worst_to_least": max(row["to_least"] for row in rows),
        "serial_where_unshaped": sum(unshaped),
        "unshaped": len(unshaped),
        "threads": torch.get_num_threads(),
        "wrong": wrong,
    }


# ---- what a person reads -----------------------------------------------------------------------------------------------------


def table(result: Mapping[str, Any]) -> Table:
    rows = result["cells"]
    out = Table(
        title="seconds of the schedule that a run chooses over those of the best one, which one half of the iterations finds and the other scores",
        caption=f"serial/: seconds of serial over those of the best; {len(rows)} cells: median {result['median_ratio']:.3f}, worst {result['worst_ratio']:.3f}; over the least of all medians {result['median_to_least']:.3f} and "
        f"{result['worst_to_least']:.3f}; on the link without limit (no MB/s) serial order was chosen in {result['serial_where_unshaped']} of {result['unshaped']}",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for title in ("layer", "type", "load", "chosen", "best"):
        out.add_column(title, no_wrap=True)
    for title in ("tokens", "MB/s", "ms", "serial/", "ratio"):
        out.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        shape, link = BenchLayerShape(**row["shape"]), row["link_bit_per_s"]
        out.add_row(
            row["model"],
            {"float32": "fp32", "bfloat16": "bf16"}[shape.dtype],
            shape.load,
            row["auto"].removeprefix("tiles:"),
            row["best"],
            str(shape.tokens),
            "" if link is None else f"{link / 8e6:.0f}",
            f"{row['medians'][AUTO] * 1e3:.1f}",
            f"{row['serial_ratio']:.2f}",
            f"{row['ratio']:.3f}",
        )
    return out
