"""`phalanx plan schedule`: the timeline of a pipeline schedule as text, SVG and JSON. An illegal one exits 2 and still writes the JSON."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.text import Text

from phalanx.core.errors import PlanError, Problem
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.observe.pictures import COLOURS, MAX_SPANS, NAMES, text_rows, timeline_svg
from phalanx.plan.pipeline import PipelinePlan, plan_pipeline
from phalanx.plan.pipeline.schedule import (
    Schedule,
    ScheduleCosts,
    Timeline,
    cost_problems,
    make_schedule,
    nearest_extra,
    nearest_schedule,
    schedule_problems,
    schedules,
    simulate,
    uniform_costs,
)

SHOWN_RANKS = 32
"""Rows of the text picture."""


@dataclass(frozen=True, kw_only=True)
class ScheduleArgs:
    """Draw the timeline of a pipeline schedule: when each rank runs which microbatch of which stage, and when it waits."""

    name: Annotated[str, tyro.conf.arg(metavar="NAME", help=f"One of {', '.join(schedules())}.")]
    pp: int
    """Pipeline ranks."""
    virtual: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Virtual stages of each rank (default: 2 for the V-shaped schedules, else 1)."""
    microbatches: int
    """Micro-batches of a step."""
    costs: Annotated[tuple[float, float, float, float], tyro.conf.arg(metavar="F B I W")] = (1.0, 2.0, 1.0, 1.0)
    """Time of a forward, a whole backward, an input gradient and a weight gradient of one virtual stage."""
    p2p: float = 0.0
    """Time of a transfer between two ranks, in the same unit."""
    extra_warmup: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="INT ...")] = None
    """Forwards ahead of 1F1B in an eager schedule: one number for each rank, or one for all (default: the most)."""
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the picture."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result: legal, problems, bubble, peak_live, schedule, timeline, ..."""


def schedule(args: ScheduleArgs) -> int:
    """Draw the timeline of a pipeline schedule."""
    check_writable(args.json, args.svg)
    begin = time.perf_counter()
    needed = schedules()[args.name].virtual if args.name in schedules() else None
    virtual = args.virtual if args.virtual is not None else needed or 1
    problems = schedule_problems(args.name, **_sizes(args, virtual))
    f, b, i, w = args.costs
    one = uniform_costs(1, forward=f, backward=b, input_grad=i, weight_grad=w, p2p=args.p2p)
    problems += cost_problems(one, 1)
    size = 3 * max(args.pp, 0) * max(virtual, 0) * max(args.microbatches, 0)
    if size > MAX_SPANS:
        rule = f"this command draws at most {MAX_SPANS} passes"
        problems.append(Problem(where="passes", value=size, rule=rule, hint="fewer microbatches or ranks"))
    if problems:
        return _refuse(args, problems, virtual=virtual)
    made = make_schedule(args.name, **_sizes(args, virtual))
    costs = uniform_costs(made.num_stages, forward=f, backward=b, input_grad=i, weight_grad=w, p2p=args.p2p)
    plan, timeline = plan_pipeline(made), simulate(made, costs)
    plan.check()
    result = schedule_result(plan, timeline, costs, seconds=time.perf_counter() - begin)
    write_json(args.json, result)
    if args.svg is not None:
        write_text(args.svg, timeline_svg(timeline))
    show_timeline(timeline, Console(highlight=False))
    _print_figures(plan, timeline)
    return 0


def _sizes(args: ScheduleArgs, virtual: int) -> dict[str, Any]:
    return {
        "pp": args.pp,
        "virtual": virtual,
        "num_microbatches": args.microbatches,
        "extra_warmup": args.extra_warmup,
    }


def _refuse(args: ScheduleArgs, problems: list[Problem], *, virtual: int) -> int:
    """All problems on stderr, and in the file."""
    name, pp, v, m = nearest_schedule(args.name, pp=args.pp, virtual=virtual, num_microbatches=args.microbatches)
    near: dict[str, Any] = {"name": name, "pp": pp, "virtual": v, "microbatches": m}
    if args.extra_warmup is not None and schedules()[name].eager:
        near["extra_warmup"] = list(nearest_extra(args.extra_warmup, pp=pp))
    write_json(args.json, {"legal": False, "problems": [str(p) for p in problems], "nearest": near})
    print(str(PlanError(problems, subject="the schedule")), file=sys.stderr)
    if schedule_problems(args.name, **_sizes(args, virtual)):
        shown = {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in near.items()}
        words = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in shown.items())
        print(f"nearest legal schedule: {words}", file=sys.stderr)
    return 2


def schedule_result(plan: PipelinePlan, timeline: Timeline, costs: ScheduleCosts, *, seconds: float) -> dict[str, Any]:
    """What `plan schedule --json` writes. A span of the timeline is [pass, start, end]."""
    made = plan.schedule
    return {
        "legal": True,
        "problems": [],
        "nearest": None,
        "bubble": timeline.bubble,
        "makespan": timeline.makespan,
        "idle": list(timeline.idle),
        "peak_live": list(timeline.peak_live),
        "transfers": len(plan.sent),
        "hand_overs": len(plan.transfers) - len(plan.sent),
        "costs": {"F": costs.forward[0], "B": costs.backward[0], "I": costs.input_grad[0], "W": costs.weight_grad[0]},
        "p2p": costs.p2p,
        "seconds": seconds,
        "hash": plan.hash,
        "schedule": made.to_dict(),
        "timeline": [[[str(s.action), s.start, s.end] for s in spans] for spans in timeline.spans],
    }


def show_timeline(timeline: Timeline, console: Console) -> None:
    """The picture, as wide as the console; colours where it has them."""
    made: Schedule = timeline.schedule
    margin = len(f"rank {made.pp - 1}  ")
    rows = text_rows(timeline, width=max(20, console.width - margin), colour=console.color_system is not None)
    for rank, row in enumerate(rows[:SHOWN_RANKS]):
        line = Text(f"rank {rank}".ljust(margin), style="bold", no_wrap=True, overflow="crop", end="\n")
        for cell in row:
            line.append(cell.text, style="dim" if cell.kind == "-" else f"not bold #111111 on {cell.colour}")
        console.print(line, no_wrap=True, overflow="crop", crop=True)
    if len(rows) > SHOWN_RANKS:
        console.print(f"... and {len(rows) - SHOWN_RANKS} more ranks")
    console.print(_legend(timeline, margin, colour=console.color_system is not None))


def _legend(timeline: Timeline, margin: int, *, colour: bool) -> Text:
    """What letters and colours mean."""
    kinds = {s.action.kind for spans in timeline.spans for s in spans}
    out = Text(" " * margin)
    for kind, name in NAMES.items():
        if kind in kinds:
            mark = "  " if colour else kind
            out.append(mark, style=f"#111111 on {COLOURS[kind][0]}").append(f" {name}  ")
    out.append("...", style="dim").append(" waits")
    virtual = timeline.schedule.virtual
    if virtual > 1:
        last = chr(ord("a") + min(virtual, 26) - 1)
        letters = "small letter: second stage of the rank" if virtual == 2 else f"a to {last}: stage of the rank"
        out.append("\n" + " " * margin + ("light to dark: stages of the rank" if colour else letters))
    return out


def _print_figures(plan: PipelinePlan, timeline: Timeline) -> None:
    print(plan.explain())
    ideal = max(timeline.busy)
    print(f"  bubble {timeline.bubble:.2%} of all ranks' time; step {timeline.makespan:g}, of which passes {ideal:g}")
