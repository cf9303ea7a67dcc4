"""Is the memory that a dry run promises the memory that a run takes? `phalanx bench memory [RECIPE.toml] [--section.key VALUE ...] --json F`.

Trains the recipe as `phalanx train` does, in a scratch folder, and reads in every rank

    baseline   memory resident after imports and the creation of process groups (VmRSS)
    peak       the most that was ever resident (VmHWM), less the baseline

beside `simulate.memory.estimate_memory`. The text is prepared before, by another process, so that what preparation needs is not counted (the
dry run names it). Options: --json F, --tolerance X (exit status 1 where an estimate is further off).

`phalanx bench memory --foldings` does the same for some two dozen mappings of a small model, and compares each pipeline stage of each (`foldings.py`); exit
status 1 where one is more than 10 % off.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from phalanx.core.arguments import read_words
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.recipe import load_recipe
from phalanx.core.units import format_bytes
from phalanx.plan.recipe import run_problems
from phalanx.plan.recovery_choice import choose_recovery
from phalanx_lab.bench.memory import foldings
from phalanx_lab.bench.memory.ranks import MeasuredRankMemory, promised_and_measured


@dataclass(frozen=True, kw_only=True)
class MemoryArgs:
    """Train a recipe and compare the memory of its ranks with the estimate."""

    tolerance: float | None = None
    """Largest error allowed, as a share of the measured peak. Default: any; with --foldings 0.1."""
    foldings: bool = False
    """Many mappings of a small model instead of a recipe; settings that follow apply to all."""
    part: str | None = None
    """Only part I/N of the foldings, as in 1/3, with --foldings."""
    only: str | None = None
    """Only foldings whose names hold this, with --foldings."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(kw_only=True)
class MemoryResult:
    ranks: list[MeasuredRankMemory]
    estimated_bytes: int
    """Bytes that the dry run promises for the rank that needs most."""
    measured_bytes: int
    """The largest peak of a rank."""
    error: float
    """Error of the promise, as a share of the measured peak."""
    terms: dict[str, int]
    """Terms of that rank's estimate at its peak."""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench memory ARGS...`; exit status 1 where a tolerance was given and missed."""
    options, rest = read_words(MemoryArgs, args, prog="phalanx bench memory [RECIPE]", description=__doc__, others=True)
    raise_if(_problems(options), ConfigError, subject="the options")
    check_writable(options.json)
    if options.foldings:
        return _main_foldings(options, rest)
    path = rest.pop(0) if rest and not rest[0].startswith("-") else None
    recipe = choose_recovery(load_recipe(path, rest, check=lambda r: run_problems(r, world=r.launch.ranks))).recipe
    result = compare(recipe, tolerance=options.tolerance)
    Console().print(_table(result))
    for failure in result.failures:
        print(f"FAILED: {failure}")
    write_json(options.json, asdict(result) | {"errors": [r.error for r in result.ranks]})
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
    console, bar = Console(), options.tolerance or foldings.BAR
    cases = foldings.run_cases(foldings.chosen(part=options.part, only=options.only), rest, tell=console)
    console.print(foldings.table(cases, bar=bar))
    report = foldings.report(cases, bar=bar)
    write_json(options.json, report)
    return 0 if report["met"] else 1


def compare(recipe: Recipe, *, tolerance: float | None = None) -> MemoryResult:
    """Train `recipe` in a scratch folder; measured and estimated memory of every rank."""
    begin = time.monotonic()
    _, estimates, found = promised_and_measured(recipe)
    ranks = [MeasuredRankMemory.of(estimate, *pair) for estimate, pair in zip(estimates, found, strict=True)]
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


def _table(result: MemoryResult) -> Table:
    table = Table(title=f"memory of {len(result.ranks)} ranks, promise {result.error:+.1%} of the measured peak off")
    for title in ("rank", "baseline", "measured", "estimated", "error", "estimated peak"):
        table.add_column(title, justify="left" if title == "estimated peak" else "right")
    for r in result.ranks:
        cells = [format_bytes(n) for n in (r.baseline_bytes, r.measured_bytes, r.estimated_bytes)]
        table.add_row(str(r.rank), *cells, f"{r.error:+.1%}", r.moment)
    return table
