"""`phalanx simulate flops`: FLOPs of a model by a named convention, and one published rate turned into the others. No process, no torch."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from phalanx.cli.predicting.arguments import model_and_cluster
from phalanx.core.arguments import WordParser
from phalanx.core.errors import ConfigError, Problem
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_count, format_rate, format_seconds
from phalanx.plan.model import Convention, ModelSpec, flops_per_token
from phalanx.simulate.hardware import GpuCluster

CONVENTIONS: tuple[Convention, ...] = ("causal", "full")
GIVEN = ("tokens", "tflops", "mfu", "step")


def flops(argv: Sequence[str]) -> int:
    """Print FLOPs a token, and every rate that follows from the one that is given."""
    args = _parser().parse_args(list(argv))
    check_writable(args.json)
    spec, cluster, unknown = model_and_cluster(args)
    problems = [*_problems(args), *unknown]
    if problems or spec is None or cluster is None:
        raise ConfigError(problems, subject="the arguments")
    result = rates(spec, cluster, args)
    write_json(args.json, result)
    print(describe(result))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = WordParser(
        prog="phalanx simulate flops",
        description="FLOPs of a model, and a published rate in the other units. A rate in FLOPs needs the convention that its source counts by.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="a preset, or a model of the published measurements")
    add("--cluster", default="h100x1", metavar="NAMExRANKS", help="whose peak MFU is of (default h100x1)")
    add("--seq", type=int, default=4096, help="sequence length (default 4096)")
    add("--batch", type=int, help="sequences of a step: for step times")
    add("--tokens", type=float, metavar="RATE", help="tokens per second of one rank")
    add("--tflops", type=float, metavar="RATE", help="1e12 FLOPs per second of one rank")
    add("--mfu", type=float, metavar="PERCENT", help="share of the bf16 peak in per cent")
    add("--step", type=float, metavar="SECONDS", help="seconds of a step of --batch sequences")
    add("--convention", choices=CONVENTIONS, help="causal: half of the scores counted; full: all of them")
    add("--json", type=Path, metavar="FILE")
    return parser


def _problems(args: argparse.Namespace) -> list[Problem]:
    given = [name for name in GIVEN if getattr(args, name) is not None]
    problems = [
        Problem(where=f"--{name}", value=getattr(args, name), rule="must be above 0 and finite", hint="give a number")
        for name in ("seq", "batch", *given)
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf
    ]
    if len(given) > 1:
        rule = "say the same thing: give one of them"
        problems.append(Problem(where=" ".join(f"--{n}" for n in given), value=None, rule=rule, hint=f"--{given[0]}"))
    if args.step is not None and args.batch is None:
        problems.append(Problem(where="--batch", value=None, rule="is needed with --step", hint="--batch 256"))
    if given and given[0] in ("tflops", "mfu") and args.convention is None:
        rule = "is needed with a rate in FLOPs: sources count half of the scores or all of them"
        problems.append(Problem(where="--convention", value=None, rule=rule, hint="--convention causal, or full"))
    if args.batch is not None and not given:
        rule = f"has no effect without one of {', '.join(f'--{n}' for n in GIVEN)}"
        problems.append(Problem(where="--batch", value=args.batch, rule=rule, hint="leave it out"))
    if args.convention is not None and not {"tflops", "mfu"} & set(given):
        rule = "has no effect without --tflops or --mfu: both conventions are printed"
        problems.append(Problem(where="--convention", value=args.convention, rule=rule, hint="leave it out"))
    return problems


def rates(spec: ModelSpec, cluster: GpuCluster, args: argparse.Namespace) -> dict[str, Any]:
    """FLOPs of a token by convention, and, where a rate is given, all rates."""
    per_token = {c: flops_per_token(spec, args.seq, attention=c) for c in CONVENTIONS}
    peak = cluster.hardware.bf16_flops_per_s
    result: dict[str, Any] = {
        "model": spec.name,
        "seq_len": args.seq,
        "cluster": cluster.name,
        "flops_per_token": per_token,
    }
    if args.tokens is not None:
        tokens = args.tokens
    elif args.step is not None:
        tokens = args.batch * args.seq / args.step / cluster.world
    elif args.tflops is not None:
        tokens = args.tflops * 1e12 / per_token[args.convention]
    elif args.mfu is not None:
        tokens = args.mfu / 100 * peak / per_token[args.convention]
    else:
        return result
    result["tokens_per_s_per_rank"] = tokens
    result["tflops_per_rank"] = {c: tokens * f / 1e12 for c, f in per_token.items()}
    result["mfu_pct"] = {c: 100 * tokens * f / peak for c, f in per_token.items()}
    if args.batch is not None:
        result["step_s"] = args.batch * args.seq / tokens / cluster.world
    return result


def describe(result: dict[str, Any]) -> str:
    names = {"causal": "causal half of the scores counted", "full": "all scores counted"}
    lines = [f"{result['model']}, sequences of {result['seq_len']}, forward and backward of a token:"]
    for convention, count in result["flops_per_token"].items():
        line = f"  {format_count(count)} FLOP, {names[convention]}"
        if "tflops_per_rank" in result:
            rate = result["tflops_per_rank"][convention] * 1e12
            line += f": {format_rate(rate, 'FLOP')} a rank, {result['mfu_pct'][convention]:.2f} % of {result['cluster']}'s peak"
        lines.append(line)
    if "tokens_per_s_per_rank" in result:
        line = f"  {result['tokens_per_s_per_rank']:,.1f} tokens/s a rank"
        lines.append(line + (f", a step in {format_seconds(result['step_s'])}" if "step_s" in result else ""))
    return "\n".join(lines)
