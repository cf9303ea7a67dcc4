"""`phalanx trace RUN`: what each rank did in the recorded steps of a run, as a file for Perfetto or as a table.

Reads the event logs of all ranks alone: no torch, and a run that is being written is not disturbed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.cli.predicting.arguments import read_steps
from phalanx.core.arguments import WordParser
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.core.units import format_bytes, format_seconds
from phalanx.observe.recorded import (
    Course,
    Exposure,
    RankMove,
    Recording,
    by_axis,
    by_layer,
    find_recording,
    perfetto_trace,
    read_recording,
    read_run,
    recovery_figures,
    recovery_spans,
    recovery_trace,
)

HOW = "open it at https://ui.perfetto.dev (it stays in your browser) or in chrome://tracing"


def main(argv: Sequence[str]) -> int:
    """Write the trace, or print its summary."""
    parser = WordParser(
        prog="phalanx trace",
        description="What each rank did in the steps that --observe.trace_steps recorded, and how an elastic run recovered: a file for https://ui.perfetto.dev.",
    )
    parser.add_argument("run", type=Path, help="folder of the run, such as runs/laptop")
    parser.add_argument("--steps", metavar="A:B", help="first and last step; one number for one step (default: all recorded)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the trace goes (default: trace.json in the run folder)")  # fmt: skip
    parser.add_argument("--summary", action="store_true", help="print communication exposed and hidden; no trace unless --out is given")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of the summary to this file")
    args = parser.parse_args(argv)
    first, last = read_steps(args.steps)
    out = args.out if args.out is not None or args.summary else args.run / "trace.json"
    if args.run.is_dir():  # else the file would make the folder
        check_writable(out)
    check_writable(args.json)
    spans, course, console = recovery_spans(args.run), Course(), Console()
    if spans:
        course = read_run(args.run)
    if spans and args.steps is None:  # worth drawing by themselves
        found = find_recording(args.run)
        recording = found if isinstance(found, Recording) else None
    else:
        recording = read_recording(args.run, first=first, last=last)
    if args.json is not None:
        write_json(args.json, {**({} if recording is None else figures(recording)), **recovery_figures(course)})
    if args.summary:
        for recovery in course.recoveries:
            console.print(Text(recovery.explain()), highlight=False, soft_wrap=True)
        if recording is not None and recording.ranks:
            show(recording, console)
    if out is not None:
        trace = recovery_trace(args.run.name, spans) if recording is None else perfetto_trace(recording, spans)
        write_text(out, json.dumps(trace, separators=(",", ":")) + "\n")
        said = (
            f"{out}: {len(spans)} spans; no steps were recorded (--observe.trace_steps)\n{HOW}"
            if recording is None
            else words(recording, trace, out)
        )
        head = f"{len(course.recoveries)} recoveries\n" if spans else ""
        console.print(Text(head + said), highlight=False, soft_wrap=True)
    return 0


def figures(recording: Recording) -> dict[str, Any]:
    """The summary as a JSON object."""
    layers: dict[str, dict[str, Any]] = {}
    for (layer, direction), found in by_layer(recording).items():
        layers.setdefault(str(layer), {})[direction] = found.to_json_dict()
    return {
        "run": recording.run,
        "steps": list(recording.steps),
        "ranks": len(recording.ranks),
        "step_s": _step_s(recording),
        "clock_error_s": max(recording.clock_error_s.values(), default=0.0),
        "layers": layers,
        "other_axes": {axis: found.to_json_dict() for axis, found in by_axis(recording).items()},
        "moves": [move_figures(ranks) for ranks in recording.whole_moves.values()],
    }


def move_figures(ranks: Sequence[RankMove]) -> dict[str, Any]:
    """Figures of a move of state: seconds from when the last rank had begun to the last end, messages and bytes of all ranks."""
    first = ranks[0]
    return {
        "op_id": first.op_id, "step": first.step, "generation": first.generation, "ranks": first.world,
        "seconds": max(r.end_s for r in ranks) - max(r.begin_s for r in ranks),
        "messages": sum(bool(m.sends_to) for r in ranks for m in r.messages),
        "sent_bytes": sum(m.sent_bytes for r in ranks for m in r.messages if m.sends_to),
    }  # fmt: skip


def _step_s(recording: Recording) -> float:
    lengths = [step.end_s - step.begin_s for steps in recording.ranks.values() for step in steps.values()]
    return sum(lengths) / len(lengths) if lengths else 0.0


def show(recording: Recording, console: Console) -> None:
    """A table of dispatch and combine by layer and direction, and one of everything else by axis."""
    step_s = _step_s(recording)
    console.print(Text(
        f"{recording.run}: steps {recording.steps[0]} to {recording.steps[-1]} on {len(recording.ranks)} ranks, "
        f"{format_seconds(step_s)} a step; means over ranks and steps"
    ), highlight=False, soft_wrap=True)  # fmt: skip
    layers = {f"layer {layer} {direction}": found for (layer, direction), found in by_layer(recording).items()}
    if layers:
        console.print(_table("dispatch and combine", layers, step_s))
    others = by_axis(recording)
    if others:
        console.print(_table("everything else, by axis", others, step_s))
    for ranks in recording.whole_moves.values():
        found = move_figures(ranks)
        console.print(Text(
            f"moved {found['op_id']} after step {found['step']}: {format_bytes(found['sent_bytes'])} in {found['messages']} messages between "
            f"{found['ranks']} ranks, {format_seconds(found['seconds'])}"
        ), highlight=False, soft_wrap=True)  # fmt: skip
    console.print(
        Text("waits: the rank stood still; of that late: for a rank that had not sent yet. hidden: under way meanwhile, at most."),
        style="dim", soft_wrap=True,
    )  # fmt: skip


def _table(title: str, rows: Mapping[str, Exposure], step_s: float) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("sent", "waits", "of a step", "late", "hidden", "hidden share"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, found in rows.items():
        share = found.hidden_share
        table.add_row(
            name, format_bytes(round(found.sent_bytes)), format_seconds(found.exposed_s), f"{100 * found.exposed_s / step_s:.1f} %",
            format_seconds(found.late_s), format_seconds(found.hidden_s), "" if share is None else f"{100 * share:.0f} %",
        )  # fmt: skip
    return table


def words(recording: Recording, trace: Mapping[str, Any], out: Path) -> str:
    """What has been written, and what to do with it."""
    about = trace["otherData"]
    lines = [
        f"{out}: steps {recording.steps[0]} to {recording.steps[-1]} of {len(recording.ranks)} ranks, "
        f"{sum(e['ph'] == 'X' for e in trace['traceEvents'])} spans, {about['arrows']} arrows",
        HOW,
    ]
    if about["arrows_left_out"]:
        lines.insert(1, f"{about['arrows_left_out']} arrows are left out: the clocks of the machines are known to within "
                        f"{format_seconds(about['clock_error_s'])} only")  # fmt: skip
    return "\n".join(lines)
