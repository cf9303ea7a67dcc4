"""Is the memory that a dry run promises the memory that a run takes? `phalanx bench memory [RECIPE.toml] [--section.key VALUE ...] --json F`.

Trains the recipe as `phalanx train` does, in a scratch folder, and reads in every rank

    baseline   memory resident after imports and the creation of process groups (VmRSS)
    peak       the most that was ever resident (VmHWM), less the baseline

beside `simulate.memory.estimate_memory`. The text is prepared before, by another process, so that what preparation needs is not counted (the
dry run names it). Options: --json F, --tolerance X (exit status 1 where an estimate is further off).

`phalanx bench memory --foldings` does the same for some two dozen mappings of a small model, and compares each pipeline stage of each (`memory_foldings.py`); exit
status 1 where one is more than 10 % off.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from phalanx.bench.memory_healing import measure_healing
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, RunError, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.process import peak_resident_bytes, resident_bytes
from phalanx.core.recipe import load_recipe
from phalanx.core.units import format_bytes
from phalanx.data.prepare import prepare
from phalanx.data.size import token_file_bytes
from phalanx.plan.heal_choice import choose_healing
from phalanx.plan.model import ModelSpec
from phalanx.plan.recipe import run_problems
from phalanx.plan.run_placement import run_placement
from phalanx.plan.stage_foldings import AnyFolding
from phalanx.runtime.groups import WorldInfo, build_groups, close_world
from phalanx.runtime.launch import StopRequest, run_local, threads_per_rank
from phalanx.simulate.memory import MemoryEstimate, estimate_memory
from phalanx.train.setup import open_rank, replicas_of, resolve_pipeline, resolve_shape
from phalanx.train.trainer import build_trainer


@dataclass(frozen=True, kw_only=True)
class MemoryArgs:
    """Train a recipe and compare the memory of its ranks with the estimate."""

    tolerance: float | None = None
    """Largest error allowed, as a share of the measured peak. Default: any; with --foldings 0.1."""
    foldings: bool = False
    """Many mappings of a small model instead of a recipe; settings that follow apply to all."""
    part: str | None = None
    """With --foldings: only part I/N of them, as in 1/3."""
    only: str | None = None
    """With --foldings: only those whose names hold this."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank."""

    rank: int
    stage: int
    """Of the pipeline."""
    baseline_bytes: int
    measured_bytes: int
    estimated_bytes: int
    moment: str
    """When the estimate has its peak."""

    @staticmethod
    def of(estimate: MemoryEstimate, baseline_bytes: int, measured_bytes: int) -> RankMemory:
        """A promise beside what was measured."""
        return RankMemory(
            rank=estimate.rank,
            stage=estimate.stage,
            baseline_bytes=baseline_bytes,
            measured_bytes=measured_bytes,
            estimated_bytes=estimate.peak_bytes,
            moment=estimate.peak.name,
        )

    @property
    def error(self) -> float:
        return self.estimated_bytes / max(1, self.measured_bytes) - 1.0


@dataclass(kw_only=True)
class MemoryResult:
    ranks: list[RankMemory]
    estimated_bytes: int
    """Of the rank that needs most: what the dry run promises."""
    measured_bytes: int
    """The largest peak of a rank."""
    error: float
    """Of the promise, as a share of the measured peak."""
    terms: dict[str, int]
    """Of that rank's estimate at its peak."""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench memory ARGS...`; exit status 1 where a tolerance was given and missed."""
    options, rest = tyro.cli(
        MemoryArgs, args=args, prog="phalanx bench memory [RECIPE]", description=__doc__, return_unknown_args=True
    )
    raise_if(_problems(options), ConfigError, subject="the options")
    check_writable(options.json)
    if options.foldings:
        return _main_foldings(options, rest)
    path = rest.pop(0) if rest and not rest[0].startswith("-") else None
    recipe = choose_healing(load_recipe(path, rest, check=lambda r: run_problems(r, world=r.launch.ranks))).recipe
    result = compare(recipe, tolerance=options.tolerance)
    Console().print(_table(result))
    for failure in result.failures:
        print(f"FAILED: {failure}")
    if options.json is not None:
        errors = {"errors": [r.error for r in result.ranks]}
        write_json(options.json, asdict(result) | errors)
    return 1 if result.failures else 0


def _problems(options: MemoryArgs) -> list[Problem]:
    found = []
    for name in ("part", "only"):
        value = getattr(options, name)
        if value is not None and not options.foldings:
            rule = "has no effect without --foldings"
            found.append(Problem(where=f"--{name}", value=value, rule=rule, hint="leave it out"))
    if options.tolerance is not None and not options.tolerance > 0:
        found.append(Problem(where="--tolerance", value=options.tolerance, rule="must be above 0", hint="0.1"))
    return found


def _main_foldings(options: MemoryArgs, rest: list[str]) -> int:
    from phalanx.bench import memory_foldings as foldings  # it measures as this file does

    console, bar = Console(), options.tolerance or foldings.BAR
    cases = foldings.run_cases(foldings.chosen(part=options.part, only=options.only), rest, tell=console)
    console.print(foldings.table(cases, bar=bar))
    report = foldings.report(cases, bar=bar)
    if options.json is not None:
        write_json(options.json, report)
    return 0 if report["met"] else 1


def compare(recipe: Recipe, *, tolerance: float | None = None) -> MemoryResult:
    """Train `recipe` in a scratch folder; measured and estimated memory of every rank."""
    begin = time.monotonic()
    vocab = prepare_apart(recipe)
    spec, folding = resolve_shape(recipe, world=recipe.launch.ranks, tokenizer_vocab=vocab)
    with tempfile.TemporaryDirectory(prefix="phalanx-memory-") as scratch:
        run = replace(
            recipe,
            run=replace(recipe.run, folder=scratch),
            checkpoint=replace(recipe.checkpoint, resume=False),
        )
        found = measure(run, spec, folding, folder=Path(scratch))
    estimates = estimates_of(recipe, spec, folding, vocab=vocab)
    ranks = [RankMemory.of(estimate, *pair) for estimate, pair in zip(estimates, found, strict=True)]
    worst = max(estimates, key=lambda e: e.peak_bytes)
    measured = max(r.measured_bytes for r in ranks)
    result = MemoryResult(
        ranks=ranks,
        estimated_bytes=worst.peak_bytes,
        measured_bytes=measured,
        error=worst.peak_bytes / measured - 1.0,
        terms=dict(worst.peak.terms),
        seconds=time.monotonic() - begin,
    )
    if tolerance is not None and abs(result.error) > tolerance:
        result.failures.append(f"the estimate is {result.error:+.1%} of the measured peak off, allowed {tolerance:.0%}")
    return result


def estimates_of(recipe: Recipe, spec: ModelSpec, folding: AnyFolding, *, vocab: int) -> list[MemoryEstimate]:
    """What the dry run says of each rank, the text being prepared."""
    threads = threads_per_rank(recipe.launch.ranks, recipe.launch.threads)
    text_bytes = token_file_bytes(recipe.data, vocab=vocab)
    pipeline = resolve_pipeline(recipe, spec, folding)
    asked = replicas_of(recipe, world=folding.world, local_ranks=folding.world)
    out = []
    for rank in range(folding.world):
        stages = pipeline.stages.of_rank(folding.coord(rank, "pp"))
        placement = run_placement(spec, folding, stages, rank=rank, asked=asked)
        out.append(
            estimate_memory(
                recipe, spec, folding, rank=rank, placement=placement, threads=threads, text_bytes=text_bytes
            )
        )
    return out


def measure(recipe: Recipe, spec: ModelSpec, folding: AnyFolding, *, folder: Path) -> list[tuple[int, int]]:
    """(baseline, peak above it) of each rank of a run of `recipe` in `folder`. The ranks are processes of this machine."""
    ranks = recipe.launch.ranks
    if recipe.resilience.heal:
        run = replace(
            recipe, checkpoint=replace(recipe.checkpoint, resume=True)
        )  # a folder of its own: nothing is there
        return measure_healing(run, folder=folder)
    body = partial(_measured_rank, recipe, folding, folder)
    run_local(body, ranks=ranks, threads=threads_per_rank(ranks, recipe.launch.threads))
    return [tuple(json.loads(_report(folder, rank).read_text())) for rank in range(ranks)]


def _measured_rank(recipe: Recipe, folding: AnyFolding, folder: Path, info: WorldInfo, stop: StopRequest) -> int:
    rank = open_rank(recipe, info)
    build_groups(folding, rank=info.rank, cache=rank.cache)
    baseline = resident_bytes()
    with rank.sinks:
        build_trainer(rank, stop).run()
    _report(folder, info.rank).write_text(json.dumps([baseline, peak_resident_bytes() - baseline]))
    close_world()
    return 0


def _report(folder: Path, rank: int) -> Path:
    return folder / f"memory-{rank}.json"


def prepare_apart(recipe: Recipe) -> int:
    """Make the token files in a process of its own, so that nothing of it stays here; returns the tokenizer's size."""
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    child = context.Process(target=_prepare_in_child, args=(recipe, theirs))
    child.start()
    theirs.close()
    try:
        answer: int | str = mine.recv()
    except EOFError:
        answer = "the process that prepares the text ended without an answer"
    child.join()
    if isinstance(answer, str):
        raise RunError(answer)
    return answer


def _prepare_in_child(recipe: Recipe, answer: multiprocessing.connection.Connection) -> None:
    try:
        answer.send(prepare(recipe.data).tokenizer.vocab_size)
    except Exception as err:  # the parent tells
        answer.send(str(err))


def _table(result: MemoryResult) -> Table:
    table = Table(title=f"memory of {len(result.ranks)} ranks, promise {result.error:+.1%} of the measured peak off")
    for title in ("rank", "baseline", "measured", "estimated", "error", "estimated peak"):
        table.add_column(title, justify="left" if title == "estimated peak" else "right")
    for r in result.ranks:
        cells = [format_bytes(n) for n in (r.baseline_bytes, r.measured_bytes, r.estimated_bytes)]
        table.add_row(str(r.rank), *cells, f"{r.error:+.1%}", r.moment)
    return table
