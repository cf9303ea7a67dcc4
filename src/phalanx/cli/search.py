"""`phalanx search`: the best mapping of a model on a cluster, with reasons, a picture, and the recipe of the winner. No process, no torch."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.progress import Progress

from phalanx.cli.predicting.arguments import PRECISIONS, model_and_cluster, precision_problems
from phalanx.core.arguments import WordParser, too_small
from phalanx.core.errors import ConfigError, PlanError, Problem, raise_if
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.core.units import format_bytes, format_seconds
from phalanx.observe.pictures import Series, plot
from phalanx.plan.pipeline.schedule import schedules
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import (
    Job,
    Mapping,
    RouterModel,
    parse_stragglers,
    straggler_problems,
)
from phalanx.simulate.search import (
    BF16_OVERLAPS,
    RERANKED,
    EpOverlap,
    SearchResult,
    Space,
    base_mapping,
    may_fit,
    reasons,
    search,
    with_slow_ranks,
)
from phalanx.simulate.step import Prediction, predict, usable_bytes

if TYPE_CHECKING:
    from phalanx.cli.predicting.searched import Find, Fitting

SHOWN = 3
"""Mappings that were passed over, in what is said of a recipe."""


def main(argv: Sequence[str]) -> int:
    """Run `phalanx search ARGV...`."""
    args = _parser().parse_args(list(argv))
    check_writable(args.json, args.svg, args.recipe)
    spec, cluster, problems = model_and_cluster(args)
    problems += too_small(args, "use 1 or more", seq=1, batch=1, top=1, exact=1)
    problems += precision_problems(args.precision, cluster, where="--precision")
    asked = args.ep_overlap or ()
    problems += [
        Problem(where="--ep-overlap", value=way, rule="computes in bf16", hint="leave one out")
        for way in BF16_OVERLAPS
        if args.precision == "fp8" and way in asked
    ]
    if "fused" in asked and cluster is not None and cluster.hardware.sms is None:
        rule = "stores rows in the memory of other devices, and this cluster computes on processors"
        problems.append(Problem(where="--ep-overlap", value="fused", rule=rule, hint="try tiles"))
    problems += straggler_problems(args.straggler or (), args.spread, cluster)
    raise_if(problems, ConfigError, subject="the arguments")
    assert spec is not None and cluster is not None
    begin = time.perf_counter()
    job = Job(spec=spec, seq_len=args.seq, global_batch=args.batch)
    find = partial(_find, args, job)
    more = partial(_more_gpus, cluster, find, partial(may_fit, job, precision=args.precision, base=_base(args)))
    result = _first(find, cluster, more, writes=args.recipe is not None)
    seconds = time.perf_counter() - begin
    if args.json is not None:
        write_json(args.json, to_dict(result, seconds=seconds))
    if args.svg is not None:
        write_text(args.svg, pareto_svg(result))
    print(describe(result, top=args.top, seconds=seconds))
    if args.recipe is None:
        return 0
    from phalanx.cli.predicting.searched import fastest_fitting

    found, reasons_why = fastest_fitting(result, find)
    if found is None:
        print(f"no recipe written: {_no_recipe(result, more, reasons_why)}", file=sys.stderr)
        return 2
    print(write_recipe(args.recipe, found, cluster))
    return 0


def _first(find: Find, cluster: GpuCluster, more: Callable[[], str], *, writes: bool) -> SearchResult:
    """The search. Raises `PlanError` where nothing fits, with how many more GPUs would."""
    try:
        return find(cluster, 1.0)
    except PlanError as error:
        found = [replace(problem, hint=more()) for problem in error.problems]
        raise PlanError(found, subject=f"the search{', so no recipe was written' if writes else ''}") from error


def _find(args: argparse.Namespace, job: Job, cluster: GpuCluster, room: float) -> SearchResult:
    """The search that the arguments ask for, of what fills this share of the memory."""
    with Progress(transient=True) as bar:
        task = bar.add_task("mappings")
        result = search(
            job,
            cluster,
            space=_space(args),
            precision=args.precision,
            keep=max(args.exact, args.top),
            base=_base(args),
            room=room,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    slow = parse_stragglers(args.straggler or (), args.spread)
    return result if slow is None else with_slow_ranks(result, slow)


def _parser() -> argparse.ArgumentParser:
    parser = WordParser(prog="phalanx search", description="Find the best mapping of a model on a cluster.")
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="a preset (phalanx settings model.preset lists them), or a model of the published measurements")  # fmt: skip
    add("--cluster", required=True, metavar="NAMExRANKS", help="such as h100x128 (phalanx simulate clusters lists them), or FILE.toml:128")  # fmt: skip
    add("--seq", type=int, default=4096, help="sequence length (default 4096)")
    add("--batch", type=int, default=256, help="sequences of a step (default 256)")
    add("--precision", choices=PRECISIONS, default="bf16")
    add("--routing", choices=("balanced", "learned"), default="learned", help="how tokens meet experts: as under a trained router (default learned), or evenly, as in benchmarks")  # fmt: skip
    add("--schedules", nargs="+", choices=tuple(schedules()), metavar="NAME", help=f"of {', '.join(schedules())}")
    add("--ep-overlap", nargs="+", choices=get_args(EpOverlap), metavar="HOW",
        help="how dispatch overlaps with computation: none, chunks, pair, tiles, fused (default: what runs there in this precision, but fused; pair needs processors to run, fused devices)")  # fmt: skip
    add("--straggler", action="append", metavar="WHO:FACTOR", help="rank the best with slow ranks, as in phalanx simulate; may be repeated")  # fmt: skip
    add("--spread", type=float, metavar="S", help="the same, with the pace of every device drawn")
    add("--top", type=int, default=10, help="mappings to show (default 10)")
    add("--exact", type=int, default=RERANKED, help=f"mappings to run on the exact schedule (default {RERANKED})")
    add("--json", type=Path, metavar="FILE")
    add("--svg", type=Path, metavar="FILE", help="draw time against memory")
    add("--recipe", type=Path, metavar="FILE", help="write the recipe of the fastest that fits by the dry run")
    return parser


def _base(args: argparse.Namespace) -> Mapping:
    return base_mapping(RouterModel(kind=args.routing))


def _space(args: argparse.Namespace) -> Space:
    space = Space(ep_overlaps=None if args.ep_overlap is None else tuple(args.ep_overlap))
    return space if args.schedules is None else replace(space, schedules=tuple(args.schedules))


def write_recipe(path: Path, found: Fitting, cluster: GpuCluster) -> str:
    """Write a recipe that fits, and say which it is and what comes next."""
    from phalanx.cli.predicting.recipe import predict_on
    from phalanx.cli.predicting.searched import searched_text
    from phalanx.simulate import resolve_recipe

    write_text(path, searched_text(found, cluster))
    which = (
        f"number {found.number}"
        if found.number is not None
        else f"the fastest that fits, {found.prediction.mapping.label()}"
    )
    step = format_seconds(predict_on(found.recipe, resolve_recipe(found.recipe), cluster).step.seconds)
    lines = [f"{path}: {which}; by the dry run a step takes {step}, a rank {format_bytes(found.peak_bytes)}"]
    lines += [f"  passed over: {text}" for text in found.passed_over[:SHOWN]]
    more, recipe = len(found.passed_over) - SHOWN, shlex.quote(str(path))
    lines += [f"  and {more} more"] if more > 0 else []
    return "\n".join(
        [
            *lines,
            "next",
            f"  phalanx train {recipe} --dry-run --cluster {shlex.quote(cluster.word)}",
            f"  phalanx launch slurm {recipe} --nodes {cluster.hosts}",
        ]
    )


def _no_recipe(result: SearchResult, more: Callable[[], str], why: tuple[str, ...]) -> str:
    """Why none was written, and on how many more GPUs one would be."""
    if not any("by the dry run" in text for text in why):
        return "; ".join(why[:1])
    return f"nothing fits {result.cluster.name} by the dry run ({why[0]}); {more()}"


def _more_gpus(cluster: GpuCluster, find: Find, may_fit: Callable[[GpuCluster], bool]) -> str:
    """On how many more something fits."""
    from phalanx.cli.predicting.searched import LARGER, fits_on

    larger = fits_on(cluster, find, may_fit)
    if larger is None:
        return f"nothing fits {LARGER[-1]} times as many GPUs either: take a smaller batch, sequence or model"
    return f"{larger.world - cluster.world} more GPUs would: --cluster {shlex.quote(larger.word)}"


def to_dict(result: SearchResult, *, seconds: float) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "model": result.job.spec.name,
        "cluster": result.cluster.name,
        "seconds": seconds,
        "foldings": result.num_foldings,
        "choices": result.tried,
        "evaluated": result.evaluated,
        "fitting": result.fitting,
        "indistinguishable": result.indistinguishable,
        "best": [_entry(result, p) for p in result.best],
        "variants": [_entry(result, p) for p in result.variants],
        "pareto_until_s": result.pareto_until_s if math.isfinite(result.pareto_until_s) else None,
        "pareto": [{"seconds": c.seconds, "peak_bytes": c.peak_bytes, **_degrees(c.mapping)} for c in result.pareto],
    }


def _entry(result: SearchResult, p: Prediction) -> dict[str, Any]:
    return {
        **_degrees(p.uniform),
        "seconds": p.step.seconds,
        "p10": p.step.p10,
        "p90": p.step.p90,
        "mfu_causal": p.mfu("causal"),
        "mfu_full": p.mfu("full"),
        "tokens_per_s": p.tokens_per_s,
        "peak_bytes": p.peak_bytes,
        "reason": reasons(result, p),
        **({} if p.nominal_s is None else {"nominal_s": p.nominal_s}),
        "hash": p.mapping.hash,
    }


def _degrees(m: Mapping) -> dict[str, Any]:
    f = m.folding
    return {
        "tp": f.tp, "cp": f.cp, "dp": f.dp, "pp": f.pp, "etp": f.etp, "ep": f.ep, "edp": f.edp, "micro_batch": m.micro_batch,
        "schedule": m.schedule, "virtual": m.virtual, "recompute": m.recompute, "ep_overlap": m.overlap.ep,
        "chunks": m.overlap.chunks if m.overlap.ep == "chunks" else None,
    }  # fmt: skip


def describe(result: SearchResult, *, top: int, seconds: float) -> str:
    """The table of the best, with reasons."""
    usable = usable_bytes(result.cluster.hardware)
    lines = [
        result.cluster.explain(),
        f"{result.job.spec.name}, {result.job.global_batch} sequences of {result.job.seq_len}: {result.num_foldings:,} foldings, "
        f"{result.tried:,} choices in {format_seconds(seconds)} ({result.evaluated:,} evaluated, {result.fitting:,} of them fit, "
        "the others cannot be among the best)",
        f"{'':>3} {'step':>9} {'MFU':>6} {'memory':>9}  best choice of each folding",
    ]
    for number, p in enumerate(result.best[:top], start=1):
        memory = format_bytes(p.peak_bytes)
        lines.append(
            f"{number:>3} {format_seconds(p.step.seconds):>9} {p.mfu('causal'):>6.1%} {memory:>9}  {p.mapping.label()}"
        )
        lines.append(f"{'':>31}{reasons(result, p)}")
    first = result.best[0]
    if first.uniform.routing.kind == "balanced" and result.job.spec.num_moe_layers:
        learned = predict(result.job, replace(first.uniform, routing=RouterModel(kind="learned")), result.cluster)
        lines.append(
            f"with even routing; the first under a learned router: {format_seconds(learned.step.seconds)}, "
            f"{format_bytes(learned.peak_bytes)}{'' if learned.fits else ', which does not fit'} (the default ranks by that)"
        )
    if first.nominal_s is not None:
        place = 1 + sum(p.nominal_s < first.nominal_s for p in result.best if p.nominal_s is not None)
        lines.append(
            f"ranked with slow ranks: the first takes {first.step.seconds / first.nominal_s - 1:+.1%}, and is number {place} where nobody is slow"
        )
    n = result.indistinguishable
    if n > 1:
        lines.append(f"the first {n} are indistinguishable within the model's error")
    if math.isfinite(result.pareto_until_s):
        lines.append(
            f"the front of time and memory is whole up to steps of {format_seconds(result.pareto_until_s)} (--exact more for more of it)"
        )
    lines.append(f"memory that can be filled: {format_bytes(usable)} a rank")
    return "\n".join(lines)


def pareto_svg(result: SearchResult) -> str:
    """Time against memory of what fits, its front, and the best."""
    usable = usable_bytes(result.cluster.hardware)
    best = result.best[0]
    slowest = 3 * best.step.seconds
    near = [c for c in result.sampled if c.seconds <= slowest]
    front = [c for c in result.pareto if c.seconds <= slowest]
    series = [
        Series("what fits", tuple((c.seconds, c.peak_bytes / 1e9, c.mapping.label()) for c in near), "#bbbbbb", size=2),
        Series("front", tuple((c.seconds, c.peak_bytes / 1e9, c.mapping.label()) for c in front), "#0b6e99"),
        Series(
            "best",
            ((best.nominal_s or best.step.seconds, best.peak_bytes / 1e9, best.mapping.label()),),
            "#c0392b",
            size=6,
        ),
    ]
    title = (
        f"{result.job.spec.name} on {result.cluster.name}: time against memory ({usable / 1e9:.0f} GB can be filled)"
    )
    return plot(series, title=title, x_name="step, s", y_name="fullest rank, GB")
