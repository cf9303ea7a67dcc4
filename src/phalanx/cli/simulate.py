"""`phalanx simulate`: a recipe's step on a cluster that is not here; published measurements; failures.

    phalanx simulate RECIPE --cluster h100x128      time, rates, memory by stage, where the time goes
    phalanx simulate RECIPE --cluster FILE --against RUN      the same program, predicted and recorded, id by id
    phalanx simulate validate [--data CSV]          predictions beside published measurements
    phalanx simulate goodput --ranks 16384          progress under failures
    phalanx simulate flops --model mixtral-8x22b    FLOPs by convention, one published rate in the other units
    phalanx simulate traced FILE...                 what a counted step would take on a GPU
    phalanx simulate clusters                       known hardware, each constant with its source

No process, no torch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.cli.lab import lab_part
from phalanx.cli.predicting.recipe import read_and_predict
from phalanx.core.arguments import WordParser
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.core.units import format_bytes, format_count, format_rate, format_seconds
from phalanx.observe.pictures import timeline_svg
from phalanx.simulate.hardware import known_hardware, load_hardware
from phalanx.simulate.step import Prediction, StageMemory, chrome_trace, usable_bytes


def main(argv: Sequence[str]) -> int:
    """Run `phalanx simulate ARGV...`."""
    part = _part(argv[0]) if argv else None
    return step(argv) if part is None else part(argv[1:])


def _part(name: str) -> Callable[[Sequence[str]], int] | None:
    """What a first word asks for, if it is no recipe. Imported when asked for: a prediction alone starts a sixth sooner (0.96 s of CPU for 1.15)."""
    if name == "validate":
        return lab_part("validation", needed_by="validate")
    if name == "goodput":
        from phalanx.cli.predicting.goodput import goodput

        return goodput
    if name == "flops":
        from phalanx.cli.predicting.flops import flops

        return flops
    if name == "traced":
        from phalanx.cli.predicting.traced import traced

        return traced
    return clusters if name == "clusters" else None


def step(argv: Sequence[str]) -> int:
    """One step of a recipe on a cluster."""
    parser = WordParser(
        prog="phalanx simulate",
        description="Predict a step of a recipe on a cluster; also: validate, goodput, flops, traced, clusters (each with --help).",
        epilog="Settings of the recipe may follow: --folding.ep 8 --train.micro_batch 2 ...",
    )
    parser.add_argument("recipe", type=Path, help="recipe file, such as recipes/laptop.toml")
    parser.add_argument("--cluster", required=True, metavar="NAMExRANKS", help="such as h100x128, or FILE.toml:128")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the prediction")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the schedule as a trace for Perfetto")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the schedule's timeline")
    parser.add_argument(
        "--straggler",
        action="append",
        default=None,
        metavar="WHO:FACTOR",
        help="who computes slower, such as host=3:1.2, rank=17:1.1, or host=0.5%%:1.1 for hosts drawn at random; may be repeated",
    )
    parser.add_argument("--spread", type=float, metavar="S", help="draw every device's pace with this spread (standard deviation of its logarithm)")  # fmt: skip
    parser.add_argument("--against", type=Path, metavar="RUN", help="compare with recorded steps of a run, id by id")
    parser.add_argument("--steps", metavar="A:B", help="with --against: which of them (default: all)")
    parser.add_argument("--learn", metavar="A:B", help="with --against: steps whose medians come before the formulas")
    args, overrides = parser.parse_with_settings(argv)
    check_writable(args.json, args.trace, args.svg)
    raise_if(_without_effect(args), ConfigError, subject="the arguments")
    if args.against is not None:
        from phalanx.cli.predicting.against import (
            against,  # reads runs, and so tokenizers: a prediction alone needs none
        )

        how = {"steps": args.steps, "learn": args.learn, "json_file": args.json}
        return against(args.recipe, args.against, args.cluster, overrides, **how)
    _, prediction = read_and_predict(
        args.recipe, args.cluster, overrides, stragglers=args.straggler or (), spread=args.spread
    )
    if args.json is not None:
        write_json(args.json, prediction.to_dict())
    step = prediction.step
    if args.trace is not None:
        write_text(args.trace, json.dumps(chrome_trace(step, title=prediction.mapping.label())) + "\n")
    if args.svg is not None and step.timeline is not None:
        write_text(args.svg, timeline_svg(step.timeline))
    print(describe(prediction))
    return 0 if prediction.fits else 2


def _without_effect(args: argparse.Namespace) -> list[Problem]:
    """Arguments of the other way to use the command."""
    alone = ("steps", "learn") if args.against is None else ("trace", "svg", "straggler", "spread")
    rule = "has no effect " + ("without --against" if args.against is None else "with --against")
    return [
        Problem(where=f"--{name}", value=str(getattr(args, name)), rule=rule, hint="leave it out")
        for name in alone
        if getattr(args, name) is not None
    ]


def describe(p: Prediction) -> str:
    """The prediction as a person reads it."""
    s, total = p.step, p.step.seconds
    parts = sorted(s.parts.items(), key=lambda kv: -kv[1])
    fullest = max(p.memory, key=lambda stage: stage.total)
    usable = usable_bytes(p.cluster.hardware)
    lines = [
        p.cluster.explain(),
        p.mapping.explain(),
        f"step {format_seconds(total)} (p10 {format_seconds(s.p10)}, p90 {format_seconds(s.p90)}), "
        f"{s.microbatches} micro-batches, {format_count(p.tokens_per_s)} tokens/s",
        f"  {format_rate(p.flops_per_s('causal'), 'FLOP')} a rank, MFU {p.mfu('causal'):.1%} (causal half of the scores counted), "
        f"{p.mfu('full'):.1%} (all scores)",
        "  " + ", ".join(f"{kind} {seconds / total:.1%}" for kind, seconds in parts if seconds / total >= 0.0005),
        f"  overlapped with computation: {format_seconds(s.hidden_s)} of communication",
        *([] if p.mapping.slots is None else [f"  replicas: {p.mapping.slots.explain()}"]),
        *_slow_lines(p),
        f"{'stage':>7}{'weights':>12}{'gradients':>12}{'optimizer':>12}{'activations':>13}{'other':>12}{'total':>12}",
    ]
    for m in _shown(p):
        other = m.logits + m.buffers + m.communication
        cells = (m.weights, m.gradients, m.optimizer)
        row = "".join(f"{format_bytes(c):>12}" for c in cells)
        lines.append(
            f"{m.pipeline_rank:>7}{row}{format_bytes(m.activations):>13}{format_bytes(other):>12}{format_bytes(m.total):>12}"
        )
    verdict = "fits" if p.fits else "DOES NOT FIT"
    lines.append(
        f"{verdict}: stage {fullest.pipeline_rank} needs {format_bytes(fullest.total)} of {format_bytes(usable)}"
    )
    return "\n".join(lines)


def _slow_lines(p: Prediction) -> list[str]:
    """What slow ranks cost."""
    if p.stragglers is None or p.nominal_s is None:
        return []
    longer = p.step.seconds / p.nominal_s - 1
    how = f" in the median of {p.stragglers.draws} draws" if p.stragglers.drawn else ""
    return [f"  slow ranks: {longer:+.1%}{how} ({format_seconds(p.nominal_s)} where nobody is slow)"]


def _shown(p: Prediction) -> list[StageMemory]:
    """All stages of a short pipeline, else first, last and fullest."""
    if len(p.memory) <= 8:
        return list(p.memory)
    fullest = max(p.memory, key=lambda stage: stage.total).pipeline_rank
    return [p.memory[i] for i in sorted({0, 1, fullest, len(p.memory) - 1})]


def clusters(argv: Sequence[str]) -> int:
    """List known hardware, or the constants of one with their sources."""
    parser = WordParser(prog="phalanx simulate clusters", description="Known hardware and its constants.")
    parser.add_argument("name", nargs="?", help="one of them, or a file of yours: every constant with its source")
    args = parser.parse_args(list(argv))
    if args.name is None:
        for name in known_hardware():
            h = load_hardware(name)
            rate, memory = format_rate(h.bf16_flops_per_s, "FLOP"), format_bytes(h.memory_bytes)
            print(f"{name:<12}{rate:>14} bf16  {memory:>9}  {h.title}")
        return 0
    hardware = load_hardware(args.name)
    for name, source in hardware.sources.items():
        print(f"{name:<24}{getattr(hardware, name)!s}\n    {source}")
    return 0
