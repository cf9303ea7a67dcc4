"""`phalanx metrics RUN...`: the course of a run from its event log, while it trains or later, or several runs beside one another; also the table in docs/reference/metrics.md.

Reads `events/rank-N.jsonl` alone: no torch, and a run that is being written is not disturbed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.tables import markdown_table, replace_part
from phalanx.core.arguments import WordParser
from phalanx.core.errors import DataError, printable
from phalanx.core.events import Event, StepEnded, Validated
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_bytes, format_seconds
from phalanx.observe import (
    METRICS,
    History,
    Record,
    TableRow,
    chart,
    differences,
    exchange_words,
    header,
    loss_text,
    read_history,
    recipe_values,
    row_line,
    short,
)
from phalanx.observe.recorded import Course, read_run, recovery_figures

MAX_ROWS = 20
EXCHANGE = ("exposed_forward_s", "exposed_backward_s", "hidden_forward_s", "hidden_backward_s")
"""Fields of `StepEnded` that stand for each MoE layer; logs of older programs lack them."""
SETTLED = 0.1
"""Speeds leave out this share of the steps, at the beginning, where caches are cold."""


def main(argv: Sequence[str]) -> int:
    """Show a run, or list the metrics."""
    parser = WordParser(
        prog="phalanx metrics", description="Show the course of a run from its event log, or compare several runs."
    )
    parser.add_argument("run", nargs="*", type=Path, help="folder of the run, such as runs/laptop; of several, what differs is shown")  # fmt: skip
    parser.add_argument("--rank", type=int, help="whose log to read (default: 0, or all of an elastic run, joined by step)")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of the run, and its whole curves, to this file")  # fmt: skip
    parser.add_argument("--names", action="store_true", help="list the metrics by name instead")
    parser.add_argument("--write", type=Path, metavar="FILE", help="replace that list between the marks of a Markdown file")  # fmt: skip
    args = parser.parse_args(argv)
    if args.write is not None:
        replace_part(args.write, "metrics", names_markdown())
    elif args.names:
        print(names_markdown(), end="")
    elif not args.run:
        parser.error("give the folder of a run, or --names")
    else:
        check_writable(args.json)
        _show_runs(list(dict.fromkeys(args.run)), rank=args.rank, file=args.json)
    return 0


def _show_runs(folders: Sequence[Path], *, rank: int | None, file: Path | None) -> None:
    courses = [
        read_run(folder) if rank is None else Course(history=read_history(folder, rank=rank)) for folder in folders
    ]
    figures = [
        {**run_figures(course.history, folder=folder), **recovery_figures(course)}
        for course, folder in zip(courses, folders, strict=True)
    ]
    recipes = {str(folder): recipe_values(folder) for folder in folders} if len(folders) > 1 else {}
    differing = dict(differences(recipes))
    if file is not None:
        whole = [{**f, "curves": curves(c.history)} for f, c in zip(figures, courses, strict=True)]
        write_json(file, whole[0] if len(whole) == 1 else {"runs": whole, "differences": differing})
    if len(folders) == 1:
        show(courses[0], figures[0], Console())
    else:
        compare(list(recipes), figures, differing, Console())


def curves(history: History) -> dict[str, Any]:
    """Every figure of each step by the name of its metric, beside the numbers of the steps; None where it is not known. Of each MoE layer a list, where there is one for each."""
    kept = {StepEnded: history.steps, Validated: history.validations}
    found: dict[str, Any] = {}
    for kind, records in kept.items():
        events = [_event(kind, records[step]) for step in sorted(records)]
        found |= {"step" if kind is StepEnded else "validation/step": sorted(records)}
        found |= {m.name: [_finite(m.read(e)) for e in events] for m in METRICS if m.kind is kind}
    return found


def _event(kind: type[Event], record: Record) -> Event:
    """The event that a record is, with defaults for what logs of older programs lack."""
    made = {f.name: record[f.name] for f in fields(kind) if f.name in record}
    return kind(
        **{
            name: math.nan if value is None else value
            for name, value in made.items()
            if name != "slowness" or value is not None
        }
    )


def _finite(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value if isinstance(value, int | float) and math.isfinite(value) else None


COMPARED = (
    ("step", "step", str), ("training loss", "loss", loss_text), ("validation loss", "validation_loss", loss_text), ("tokens", "tokens", short),
    ("tokens/s, median", "tokens_per_s", short), ("a step, median", "step_s", format_seconds), ("MFU, median", "mfu", lambda v: f"{100 * v:.1f} %"),
    ("peak memory", "peak_memory_bytes", format_bytes), ("starts", "starts", str),
)  # fmt: skip
"""Title, figure, how it is written."""


def compare(
    names: Sequence[str],
    figures: Sequence[dict[str, Any]],
    differing: Mapping[str, Sequence[str | None]],
    console: Console,
) -> None:
    """Runs beside one another: in which settings they differ, then their figures."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("", *names):
        table.add_column(Text(title), overflow="fold")
    for setting, values in differing.items():
        table.add_row(Text(setting), *(Text("not set" if v is None else v) for v in values))
    if differing:
        table.add_section()
        table.add_row(*[""] * (1 + len(names)))
    for title, key, shown in COMPARED:
        table.add_row(title, *("" if f[key] is None else shown(f[key]) for f in figures))
    table.add_row("ended", *(Text(printable(f["ended"] or "running, or killed")) for f in figures))
    table.add_row("recoveries", *(str(len(f["recoveries"])) for f in figures))
    console.print(table)
    if not differing:
        console.print("their recipes do not differ")


def run_figures(history: History, *, folder: Path) -> dict[str, Any]:
    """The run in a few numbers. Raises `DataError` where no step was logged."""
    steps = [history.steps[s] for s in sorted(history.steps)]
    if not steps:
        hint = "wait for its first step, or see events/ in the run folder"
        raise DataError.of(str(folder), "no StepEnded", "has logged no step yet", hint, subject="the event log")
    settled = steps[int(SETTLED * len(steps)) :]
    validated = [history.validations[s] for s in sorted(history.validations)]
    return {
        "run": history.started.get("run", folder.name),
        "step": steps[-1]["step"],
        "total_steps": history.started.get("total_steps"),
        "starts": history.starts,
        "ended": history.ended["reason"] if history.ended is not None else None,
        "loss": steps[-1]["loss"],
        "mtp_loss": steps[-1].get("mtp_loss") or None,  # 0 where nothing further is predicted
        "validation_loss": validated[-1]["loss"] if validated else None,
        "unigram_loss": history.started.get("unigram_loss"),
        "tokens": sum(s["tokens"] for s in steps),
        "tokens_per_s": statistics.median(s["tokens_per_s"] for s in settled),
        "mfu": statistics.median(s["mfu"] for s in settled) or None,
        "step_s": statistics.median(s["step_s"] for s in settled),
        **{name: _median_of_layers(settled, name) for name in EXCHANGE},
        "peak_memory_bytes": max(s["peak_memory_bytes"] for s in steps),
        "dropped_tokens": sum(s["dropped_tokens"] for s in steps),
        "warnings": [n["text"] for n in history.notes if n["level"] != "info"],
    }


def _median_of_layers(steps: Sequence[Record], name: str) -> list[float]:
    """Median of each MoE layer over the steps; empty where some do not know it."""
    told = [step.get(name) or () for step in steps]
    return [statistics.median(values) for values in zip(*told, strict=False)]


def show(course: Course, figures: dict[str, Any], console: Console) -> None:
    """Rows, a chart of the loss, recoveries, and what the figures say."""
    history = course.history
    width = console.width if console.is_terminal else 100
    steps = sorted(history.steps)
    lines, tokens = [header(width, with_left=False)], _tokens_until(history)
    for step in _spread(steps, MAX_ROWS, keep=sorted(history.validations)):
        lines.append(row_line(_row(history.steps[step], history.validations.get(step), tokens=tokens[step]), width))
    lines.append(Text("\ntrain loss"))
    points = [(s, history.steps[s]["loss"]) for s in steps if history.steps[s]["loss"] is not None]
    lines += [Text(line, style="green") for line in chart(points, width=min(width, 100))]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
    console.print(Text("\n" + _words(figures)), highlight=False, soft_wrap=True)
    told = [found.explain() for found in course.recoveries[-MAX_ROWS:]] + [back.explain() for back in course.rollbacks]
    for words in told:
        console.print(Text(f"  {words}"), highlight=False, soft_wrap=True)
    for warning in figures["warnings"]:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)


def _spread(steps: Sequence[int], count: int, *, keep: Sequence[int]) -> list[int]:
    """Chooses at most `count` steps: first and last, up to half of them from `keep`, the others evenly spread."""

    def even(of: Sequence[int], number: int) -> set[int]:
        number = min(number, len(of))
        return {of[round(i * (len(of) - 1) / max(1, number - 1))] for i in range(number)}

    known = set(steps)
    kept = even([s for s in keep if s in known], count // 2)
    return sorted(kept | even(steps, count - len(kept)))


def _tokens_until(history: History) -> dict[int, int]:
    """All tokens up to each step; of steps before it that are missing, as many as of the step itself."""
    out, total, last = dict[int, int](), 0, 0
    for step in sorted(history.steps):
        total += (step - last) * history.steps[step]["tokens"]
        out[step], last = total, step
    return out


def _row(step: Record, validated: Record | None, *, tokens: int) -> TableRow:
    return TableRow(
        step=step["step"], loss=step["loss"], validation=validated["loss"] if validated else None,
        tokens_per_s=step["tokens_per_s"], mfu=step["mfu"] or None, grad_norm=step["grad_norm"], lr=step["lr"],
        load=max(step["load_max_over_mean"], default=None), dead=step["dead_experts"], dropped=step["dropped_tokens"],
        tokens=tokens, memory_bytes=step["peak_memory_bytes"], step_s=step["step_s"],
        entropy=step["router_entropy"], aux_loss=step["aux_loss"],
    )  # fmt: skip


def _mfu(f: dict[str, Any]) -> str:
    return "MFU not measured" if f["mfu"] is None else f"MFU {100 * f['mfu']:.1f} %"


def _words(f: dict[str, Any]) -> str:
    state = f["ended"] or "running, or killed"
    lines = [
        f"{f['run']}: {f['step']} of {f['total_steps']} steps ({state}, {f['starts']} start{'s' if f['starts'] != 1 else ''})",
        f"  {short(f['tokens_per_s'])} tokens/s, {format_seconds(f['step_s'])} a step, {_mfu(f)} (medians), "
        f"peak memory {format_bytes(f['peak_memory_bytes'])}",
    ]
    exposed_s, hidden_s = (sum(f[f"{what}_forward_s"]) + sum(f[f"{what}_backward_s"]) for what in ("exposed", "hidden"))
    if exposed_s or hidden_s:
        lines.append(f"  waits for dispatch and combine {exchange_words(exposed_s, hidden_s)} (medians)")
        for layer, figures in enumerate(zip(*(f[name] for name in EXCHANGE), strict=False)):
            there, back = (exchange_words(figures[i], figures[i + 2]) for i in (0, 1))
            lines.append(f"    MoE layer {layer}: forward {there}; backward {back}")
    if f["mtp_loss"] is not None:
        lines.append(f"  loss of the tokens after the next one {f['mtp_loss']:.4f} (train/mtp_loss)")
    if f["validation_loss"] is not None:
        unigram = f" (unigram model {f['unigram_loss']:.3f})" if f["unigram_loss"] is not None else ""
        lines.append(f"  validation loss {f['validation_loss']:.4f}{unigram}")
    if f["recoveries"]:
        lines.append(recovery_words(f["recoveries"]))
    return "\n".join(lines)


def recovery_words(recoveries: Sequence[dict[str, Any]]) -> str:
    """How often the membership changed, and how long that took."""
    lost = [r for r in recoveries if r["lost_s"]]
    times = sorted(r["since_lost_s"] for r in lost if r["since_lost_s"] is not None)
    shown = (
        f", {format_seconds(statistics.median(times))} (median; at most {format_seconds(times[-1])}) from a loss to the next step"
        if times
        else ""
    )
    number = len(recoveries)
    return f"  {number} new generation{'s' if number != 1 else ''}, {len(lost)} after a loss{shown}"


def names_markdown() -> str:
    """The table of metrics."""
    rows = [
        [
            f"`{m.name}`",
            m.kind.__name__,
            m.unit,
            m.meaning,
            f"`{m.prometheus_name}`" + ("{layer}" if m.per_layer else ""),
        ]
        for m in METRICS
    ]
    return markdown_table(["metric", "event", "unit", "meaning", "Prometheus"], rows)
