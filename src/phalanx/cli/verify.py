"""Prove mappings against one rank: loss, every parameter's gradient, gradient norm, router losses, expert bias, and the parameters after
one clipped AdamW step, with different data on every rank.

Without a recipe: every legal mapping of the ranks, then pipelines with every schedule, over small models that together use every option
(each pair of options in at least one case); in float32 and bfloat16 the mappings of ep, etp and dp. With a recipe, or settings of one (--folding.ep 4): its own options and mapping on a shrunken model.
What of the recipe no verified step has is said. With --overlap VALUE: the built-in cases with `dispatch.overlap` forced to it. With --steps N: the loss of N steps of it beside one rank, in float64. Exits 1 where something differs.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from phalanx.cli.lab import lab_part
from phalanx.core.arguments import read_words
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.recipe import load_recipe
from phalanx.plan import choose_recovery, run_problems
from phalanx.plan.moe.overlap import setting_problems

SHOWN_FAILURES = 12
"""Lines printed of one case; the JSON file has all."""


MOST_RANKS = 64
"""A world of processes on one machine: more would take hours, and a processor has not so many cores."""


@dataclass(frozen=True, kw_only=True)
class VerifyArgs:
    """Prove mappings against one rank."""

    recipe: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = None
    """A recipe.toml: verify its options and mapping. Default: every mapping and every option."""
    ranks: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Local ranks. Default: the recipe's launch.ranks, or 4."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Compute type. Errors may reach 1e-12, 1e-5, 2e-2."""
    plant: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Plant this fault and show that it is found (then the command fails), or `all`: a table of all faults."""
    steps: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Follow the recipe for so many steps, with other data in each: the loss may differ from that of one rank by 1e-9."""
    overlap: Annotated[str | None, tyro.conf.arg(metavar="VALUE")] = None
    """Force this `dispatch.overlap` (serial, coarse:N, tiles, fine, auto) on every built-in case in which it can apply."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result: mappings, worst_gradient_rel_error, worst_norm_rel_error, worst_step_rel_error, seconds, failures, not_verified, ..."""


def main(args: list[str]) -> int:
    """Run `phalanx verify ARGS...`; returns the exit status."""
    own, overrides = split_overrides(args)
    parsed = read_words(VerifyArgs, own, prog="phalanx verify", description=__doc__)
    raise_if(_problems(parsed, overrides), ConfigError, subject="arguments")
    check_writable(parsed.json)
    if parsed.plant == "all":
        return plant_all(parsed, Console())
    recipe = _recipe(parsed, overrides) if parsed.recipe is not None or overrides else None
    if parsed.steps is not None:
        assert recipe is not None  # see _problems
        return follow_recipe(parsed, recipe, Console())
    return verify(parsed, recipe, Console())


def split_overrides(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """The command's own arguments, and those that change a setting of the recipe: `--section.key VALUE` or `--section.key=VALUE`."""
    own: list[str] = []
    overrides: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not (word.startswith("--") and "." in word.split("=")[0]):
            own.append(word)
            continue
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own, overrides


def _problems(args: VerifyArgs, overrides: Sequence[str]) -> list[Problem]:
    out = _step_problems(args, has_recipe=args.recipe is not None or bool(overrides))
    if args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS:
        rule = f"must lie between 1 and {MOST_RANKS}: each is a process of this machine"
        out.append(Problem(where="--ranks", value=args.ranks, rule=rule, hint="try 4"))
    if args.plant is not None and (args.recipe is not None or overrides):
        rule = "faults are planted in the built-in cases, so it has no effect with a recipe"
        out.append(Problem(where="--plant", value=args.plant, rule=rule, hint="leave the recipe out"))
    if args.plant is not None and args.dtype != "float64":
        rule = "faults can be told from rounding only in float64"
        out.append(Problem(where="--dtype", value=args.dtype, rule=rule, hint="leave it out"))
    return out + _overlap_problems(args, has_recipe=args.recipe is not None or bool(overrides))


def _overlap_problems(args: VerifyArgs, *, has_recipe: bool) -> list[Problem]:
    if args.overlap is None:
        return []
    out = [dataclasses.replace(problem, where="--overlap") for problem in setting_problems(args.overlap)]

    def wrong(rule: str, hint: str) -> None:
        out.append(Problem(where="--overlap", value=args.overlap, rule=rule, hint=hint))

    if args.overlap == "fused":
        wrong("runs on GPUs only, and verify on processors, in float64", "fine")
    if has_recipe:
        wrong("is forced on the built-in cases, and a recipe has its own", "set --dispatch.overlap instead")
    if args.plant is not None:
        wrong("faults are planted in the cases in which they exist, each with its own overlap", "leave it out")
    return out


def _step_problems(args: VerifyArgs, *, has_recipe: bool) -> list[Problem]:
    if args.steps is None:
        return []
    out = []
    if args.steps < 1:
        out.append(Problem(where="--steps", value=args.steps, rule="must be at least 1", hint="try 50"))
    if not has_recipe:
        rule = "follows one mapping, so it needs a recipe or settings of one"
        out.append(Problem(where="--steps", value=args.steps, rule=rule, hint="try --folding.ep 2 beside it"))
    if args.plant is not None:
        rule = "compares the losses of many steps, and faults are planted in one step"
        out.append(Problem(where="--plant", value=args.plant, rule=rule, hint="leave --steps out"))
    if args.dtype != "float64":
        rule = "has no effect with --steps: rounding would make the curves diverge, so they are compared in float64"
        out.append(Problem(where="--dtype", value=args.dtype, rule=rule, hint="leave it out"))
    return out


# ---- one verification ----------------------------------------------------------------------------------------------------------


def verify(args: VerifyArgs, recipe: Recipe | None, console: Console) -> int:
    """Run the cases, print the table, write the JSON file."""
    import torch  # seconds: not for --help, and not before the arguments are known to be good

    from phalanx.verify import (
        EXACT_AXES,
        HEALTHY,
        PLANT_TIMEOUT_S,
        ROUNDED_AXES,
        TIMEOUT_S,
        CaseTask,
        VerifyJob,
        default_cases,
        force_overlap,
        not_verified,
    )

    begin_s = time.perf_counter()
    ranks = _ranks(args, recipe)
    fault = HEALTHY if args.plant is None else _faults().fault_named(args.plant)
    axes = EXACT_AXES if args.dtype == "float64" else ROUNDED_AXES
    cases = default_cases(ranks, axes=axes) if recipe is None else _cases_of(recipe, ranks)
    forced = None if args.overlap is None else force_overlap(cases, args.overlap)
    if forced is not None:
        raise_if(_never_forced(forced), ConfigError, subject="arguments")
        cases = forced.cases
    if args.plant is not None:
        cases = _faults().cases_with(fault, cases, ranks=ranks)
    job = VerifyJob(
        tasks=[CaseTask(case, fault) for case in cases],
        world=ranks,
        dtype=getattr(torch, args.dtype),
        timeout_s=TIMEOUT_S if args.plant is None else PLANT_TIMEOUT_S,
    )
    reports = _run(job, console)
    result = summary(reports, ranks=ranks, dtype=args.dtype, seconds=time.perf_counter() - begin_s)
    result["not_verified"] = [] if recipe is None else not_verified(recipe, cases[-1])
    if args.plant is not None:
        result["planted"] = fault.name
    if forced is not None:
        result |= {"overlap": forced.value, "overlap_forced": forced.num_forced, "overlap_kept": forced.kept}
    write_json(args.json, result)
    _print_table(reports, result, console)
    _print_not_verified(result["not_verified"], console)
    if forced is not None:
        _print_forced(forced, console)
    if args.plant is not None:
        found = "found" if result["failures"] else "NOT FOUND"
        console.print(f"planted fault [b]{fault.name}[/] ({escape(fault.summary)}): {found}")
    return 1 if result["failures"] else 0


def _never_forced(forced: Any) -> list[Problem]:
    """A value that applies to no case, whose success would say nothing of it."""
    if forced.num_forced:
        return []
    why = max(forced.kept, key=forced.kept.__getitem__)
    rule = f"applies to none of the {len(forced.cases)} cases of these ranks: {why}"
    return [Problem(where="--overlap", value=forced.value, rule=rule, hint="try more --ranks, or another value")]


def _print_not_verified(left: list[str], console: Console) -> None:
    if left:
        console.print(f"not verified: {escape(', '.join(left))}", soft_wrap=True)


def _print_forced(forced: Any, console: Console) -> None:
    console.print(f"dispatch.overlap = {forced.value} in {forced.num_forced} of {len(forced.cases)} cases")
    for why, number in forced.kept.items():
        console.print(f"  {number} as they are: {escape(forced.value)} {escape(why)}", soft_wrap=True)


def _run(job: Any, console: Console) -> list[Any]:
    from phalanx.verify import run_job

    with Progress(
        TextColumn("verifying"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("verifying", total=len(job.tasks))
        return run_job(job, progress=lambda done: bar.update(task, completed=done))


def _ranks(args: VerifyArgs, recipe: Recipe | None) -> int:
    return args.ranks if args.ranks is not None else recipe.launch.ranks if recipe is not None else 4


def _recipe(args: VerifyArgs, overrides: Sequence[str]) -> Recipe:
    """The recipe, checked like for training on the ranks asked for, with the mapping and the holders of shards that training has."""

    def check(recipe: Recipe) -> list[Problem]:
        return run_problems(recipe, world=args.ranks or recipe.launch.ranks) or _only_on_gpus(recipe)

    recipe = load_recipe(None if args.recipe is None else str(args.recipe), overrides, check=check)
    ranks = args.ranks or recipe.launch.ranks
    chosen = choose_recovery(replace(recipe, launch=replace(recipe.launch, ranks=ranks)))
    return replace(recipe, folding=chosen.recipe.folding, resilience=chosen.recipe.resilience)


def _only_on_gpus(recipe: Recipe) -> list[Problem]:
    rule = "runs on GPUs only, and verify on processors, in float64"
    found = (("overlap", "fused", "fine"), ("transport", "deepep", "all_to_all"))
    return [
        Problem(where=f"dispatch.{key}", value=value, rule=rule, hint=f'verify with "{other}"')
        for key, value, other in found
        if getattr(recipe.dispatch, key) == value
    ]


def _cases_of(recipe: Recipe, ranks: int) -> list[Any]:
    from phalanx.plan import resolve_shape
    from phalanx.plan.moe import dispatch_spec
    from phalanx.verify import recipe_cases

    spec, folding = resolve_shape(recipe, world=ranks, tokenizer_vocab=256)
    return recipe_cases(recipe, spec, folding, dispatch_spec(recipe.dispatch))


def summary(reports: list[Any], *, ranks: int, dtype: str, seconds: float) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "mappings": len({r.task.case.folding for r in reports}),
        "worst_gradient_rel_error": _worst(reports, "gradient_error"),
        "worst_norm_rel_error": _worst(reports, "norm_error"),
        "worst_step_rel_error": _worst(reports, "step_error"),
        "seconds": seconds,
        "failures": [f"{r.task.case.label}: {text}" for r in reports for text in r.failures],
        "worst_loss_rel_error": _worst(reports, "loss_error"),
        "worst_scalar_rel_error": _worst(reports, "scalar_error"),
        "cases": len(reports),
        "ranks": ranks,
        "dtype": dtype,
        "tokens_replaced": sum(r.replaced for r in reports),
        "replica_max_over_mean": next((list(r.work) for r in reports if any(r.work)), None),
        "labels": [r.task.case.label for r in reports],
    }


def _worst(reports: list[Any], name: str) -> float:
    return max((getattr(r, name) for r in reports), default=0.0)


def _print_table(reports: list[Any], result: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"{result['ranks']} ranks against one, {result['dtype']}: worst relative error", title_justify="left"
    )
    for title in ("mapping", "cases", "gradient", "norm", "losses", "step", "failed"):
        table.add_column(title, justify="left" if title == "mapping" else "right", no_wrap=True)
    for folding in dict.fromkeys(r.task.case.folding for r in reports):
        mine = [r for r in reports if r.task.case.folding == folding]
        errors = [f"{_worst(mine, n):.1e}" for n in ("gradient_error", "norm_error", "scalar_error", "step_error")]
        bad = sum(bool(r.failures) for r in mine)
        table.add_row(folding.label(), str(len(mine)), *errors, f"[red]{bad}[/]" if bad else "0")
    console.print(table)
    for report in reports:
        if report.failures:
            console.print(f"[red]differs[/] {escape(report.task.case.label)}", soft_wrap=True)
            for text in report.failures[:SHOWN_FAILURES]:
                console.print("  " + escape(text), soft_wrap=True)
            if len(report.failures) > SHOWN_FAILURES:
                console.print(f"  and {len(report.failures) - SHOWN_FAILURES} more")
    bad = sum(bool(r.failures) for r in reports)
    verdict = f"[red]{bad} of {len(reports)} cases differ[/]" if bad else f"all {len(reports)} cases agree"
    mappings = "1 mapping" if result["mappings"] == 1 else f"{result['mappings']} mappings"
    console.print(f"{verdict}, {mappings}, {result['seconds']:.1f} s")
    if result["replica_max_over_mean"]:
        with_them, without = result["replica_max_over_mean"]
        console.print(
            f"skewed loads: the busiest rank has {with_them:.2f} times the mean work with replicas, {without:.2f} without"
        )
    if result["tokens_replaced"]:
        console.print(
            f"{result['tokens_replaced']} tokens of the data were replaced beforehand: rounding could have routed them either way",
            soft_wrap=True,
        )


# ---- many steps ----------------------------------------------------------------------------------------------------------------


def follow_recipe(args: VerifyArgs, recipe: Recipe, console: Console) -> int:
    """The recipe's losses beside those of one rank, in the larger of its cases."""
    from phalanx.verify import follow, not_verified  # imports torch

    begin_s = time.perf_counter()
    assert args.steps is not None
    case = _cases_of(recipe, _ranks(args, recipe))[-1]
    result = follow(case, steps=args.steps)
    result.seconds, result.not_verified = time.perf_counter() - begin_s, not_verified(recipe, case)
    write_json(args.json, asdict(result))
    console.print(escape(result.label), soft_wrap=True)
    console.print(
        f"{result.steps} steps on {case.folding.world} ranks and on one: loss {result.reference_losses[0]:.4f} -> "
        f"{result.reference_losses[-1]:.4f}, largest relative difference {result.worst_loss_rel_error:.1e} "
        f"(gradient norm {result.worst_norm_rel_error:.1e}), {result.dropped} rows dropped, {result.seconds:.1f} s",
        soft_wrap=True,
    )
    _print_not_verified(result.not_verified, console)
    for text in result.failures:
        console.print(f"[red]differs[/] {escape(text)}", soft_wrap=True)
    return 1 if result.failures else 0


# ---- all faults ----------------------------------------------------------------------------------------------------------------


def _faults() -> Any:
    return lab_part("faults", needed_by="--plant")


def plant_all(args: VerifyArgs, console: Console) -> int:
    """Plant every fault that exists on these ranks; a table of what finds it, and whether the loss alone would have."""
    import torch

    from phalanx.verify import PLANT_TIMEOUT_S, CaseTask, VerifyJob, default_cases

    ranks, begin_s, faults = args.ranks or 4, time.perf_counter(), _faults()
    cases = default_cases(ranks)
    tasks = [CaseTask(case, f) for f in faults.FAULTS for case in [c for c in cases if f.needs(c)][: faults.PER_FAULT]]
    job = VerifyJob(tasks=tasks, world=ranks, dtype=torch.float64, timeout_s=PLANT_TIMEOUT_S)
    reports = _run(job, console)
    rows = [_fault_row(fault, [r for r in reports if r.task.fault is fault]) for fault in faults.FAULTS]
    escaped = [row["name"] for row in rows if row["cases"] and not row["caught"]]
    result = {
        "faults": rows,
        "planted": sum(bool(row["cases"]) for row in rows),
        "caught": sum(row["caught"] for row in rows),
        "escaping_a_loss_check": [row["name"] for row in rows if row["caught"] and not row["loss_moves"]],
        "not_on_these_ranks": [row["name"] for row in rows if not row["cases"]],
        "seconds": time.perf_counter() - begin_s,
        "failures": [f"{name} was not found" for name in escaped],
    }
    write_json(args.json, result)
    _print_faults(result, ranks, console)
    return 1 if escaped else 0


def _fault_row(fault: Any, reports: list[Any]) -> dict[str, Any]:
    return {
        "name": fault.name,
        "summary": fault.summary,
        "cases": len(reports),
        "caught": bool(reports) and all(r.failures for r in reports),
        "gradient_error": _worst(reports, "gradient_error"),
        "norm_error": _worst(reports, "norm_error"),
        "step_error": _worst(reports, "step_error"),
        "loss_error": _worst(reports, "loss_error"),
        "loss_moves": any(r.loss_error > 1e-12 or r.crashed for r in reports),
        "found_by": [r.failures[0] for r in reports if r.failures],
    }


def _print_faults(result: dict[str, Any], ranks: int, console: Console) -> None:
    table = Table(title=f"planted faults, {ranks} ranks, float64: errors that they make", title_justify="left")
    for title in ("fault", "found", "gradient", "norm", "step", "loss"):
        table.add_column(title, justify="left" if title == "fault" else "right", no_wrap=True)
    for row in result["faults"]:
        if row["cases"]:
            errors = [f"{row[name]:.0e}" for name in ("gradient_error", "norm_error", "step_error", "loss_error")]
            table.add_row(row["name"], "yes" if row["caught"] else "[red]NO[/]", *errors)
    console.print(table)
    for row in result["faults"]:
        if row["found_by"]:
            console.print(f"[b]{row['name']}[/]: {escape(row['found_by'][0])}", soft_wrap=True)
    silent = len(result["escaping_a_loss_check"])
    console.print(
        f"{result['caught']} of {result['planted']} faults found; {silent} of them leave the loss of the step unchanged. "
        f"{result['seconds']:.1f} s"
    )
    if result["not_on_these_ranks"]:
        console.print(f"need more ranks: {', '.join(result['not_on_these_ranks'])}")
