"""`phalanx simulate goodput`: progress of a job under failures, checkpoints against replicas, and the best interval between saves."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from phalanx.core.arguments import WordParser
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, PlanError, Problem, raise_if
from phalanx.core.files import check_writable, write_json, write_text
from phalanx.core.units import format_seconds
from phalanx.observe.pictures import Series, plot
from phalanx.plan.mapping import Folding
from phalanx.simulate import resolve_recipe
from phalanx.simulate.failures import (
    LLAMA3_FAILURES_PER_RANK_HOUR,
    Goodput,
    HostsLeft,
    Practice,
    RecoveryTime,
    SlowHosts,
    elastic_recipe,
    expected_goodput,
    host_lost,
    hosts_left,
    memory_left,
    poisson,
    practice_problems,
    read_removals,
    simulate_goodput,
    slow_hosts,
    sweep,
    swept_optimum,
    young_daly,
)
from phalanx.simulate.mapping import parse_stragglers, straggler_problems
from phalanx.simulate.step import Prediction

Way = Literal["checkpoint", "replicas"]
MOST_FAILURES = 100_000
"""More than that many failures are not played one by one: they take minutes, and change nothing in a share."""
SWEPT = 4000
"""Failures, at least, over which the interval between saves is swept."""


@dataclass(frozen=True, kw_only=True)
class GoesOn:
    """A recipe on a cluster, and how its run goes on without a host."""

    recipe: Recipe
    predicted: Prediction
    left: HostsLeft | None = None
    """What it makes of fewer hosts; None: nothing."""
    repair: RecoveryTime | None = None
    """Seconds from the loss of a host to the next step."""
    why_not: str = ""
    """Why it does not go on."""


def goodput(argv: Sequence[str]) -> int:
    """Monte Carlo over failures."""
    args, overrides = _parser().parse_with_settings(argv)
    check_writable(args.json, args.svg)
    raise_if(_recipe_problems(args, overrides), ConfigError, subject="the arguments")
    run_of = None if args.recipe is None else _goes_on(args, overrides)
    left, repair = (None, None) if run_of is None else (run_of.left, run_of.repair)
    slow = None if run_of is None else _slow(args, run_of)
    _fill_in(args, run_of)
    base = _practice(args, left, slow)
    raise_if(_problems(args, base), ConfigError, subject="the arguments")
    why_not = _one_host(args) if run_of is None else run_of.why_not
    result = run(base, args, why_not=why_not)
    if repair is not None and left is not None:
        result |= {"repair": repair_dict(repair, share=left.share(args.hosts - 1))}
    if repair is not None and run_of is not None and run_of.recipe.resilience.heal is None:
        result |= {"assumed": "resilience.heal is not set: recovery from replicas is that of resilience.heal = true"}
    result |= {} if slow is None else {"slow": {**asdict(slow), "explain": slow.explain()}}
    if run_of is not None:
        result |= {"memory": memory_dict(left, run_of.predicted, goes_on=repair is not None)}
    write_json(args.json, {k: v for k, v in result.items() if k != "curves"})
    if args.svg is not None:
        write_text(args.svg, picture(result))
    print(describe(result))
    return 0


def _fill_in(args: argparse.Namespace, run_of: GoesOn | None) -> None:
    """Defaults of arguments, those of the recipe where there is one."""
    repair = None if run_of is None else run_of.repair
    if run_of is not None:
        args.ranks, args.hosts = run_of.predicted.cluster.world, run_of.predicted.cluster.hosts
    defaults = {
        "detect": 60.0 if run_of is None else run_of.recipe.resilience.limit_s,
        "repair": 20.0 if repair is None else repair.seconds,
        "ranks": 16384,
    }
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _practice(args: argparse.Namespace, left: HostsLeft | None, slow: SlowHosts | None) -> Practice:
    """What the job does about failures."""
    return Practice(
        interval_s=1.0 if args.interval is None else args.interval,
        save_s=args.save,
        detect_s=args.detect,
        restart_s=args.restart,
        repair_s=args.repair,
        survival=args.survival,
        repair_host_s=args.replace,
        share=None if left is None else left.share,
        pace=1.0 if slow is None else slow.pace,
        put_out=() if slow is None else slow.put_out,
    )


def _problems(args: argparse.Namespace, base: Practice) -> list[Problem]:
    """What is wrong with the arguments, all of it, each by the name that it was given by."""
    problems = [
        Problem(where=f"--{name}", value=value, rule="must be above 0 and finite", hint="leave it out")
        for name in ("ranks", "hosts", "days", "rate")
        if (value := getattr(args, name)) is not None and not 0 < value < math.inf
    ]
    names = {"repair_host_s": "replace", "survival": "survival"}
    for p in practice_problems(base):
        field = p.where.removeprefix("goodput.")
        problems.append(replace(p, where=f"--{names.get(field, field.removesuffix('_s'))}"))
    if args.failures is not None:
        rule = "has no effect with --failures, which says when hosts fail and how long the job is"
        problems += [
            Problem(where=f"--{name}", value=getattr(args, name), rule=rule, hint="leave it out")
            for name in ("days", "rate")
            if getattr(args, name) is not None
        ]
    if args.save == 0 and args.interval is None:
        rule = "is 0: a save that costs nothing has no best interval"
        problems.append(Problem(where="--save", value=args.save, rule=rule, hint="give --interval too"))
    if not problems and args.failures is None:
        expected = _days(args) * 24 * _rate(args) * args.ranks
        if expected > MOST_FAILURES:
            rule = f"would be {expected:,.0f} failures, of which at most {MOST_FAILURES:,} are played"
            hint = f"--days {_days(args) * MOST_FAILURES / expected:.3g}"
            problems.append(Problem(where="--days", value=_days(args), rule=rule, hint=hint))
    return problems


def _recipe_problems(args: argparse.Namespace, overrides: Sequence[str]) -> list[Problem]:
    """Arguments that go together."""
    problems = []
    if (args.recipe is None) != (args.cluster is None):
        lacks, has = ("--recipe", "--cluster") if args.recipe is None else ("--cluster", "--recipe")
        problems.append(Problem(where=lacks, value=None, rule=f"belongs to {has}", hint="give both, or neither"))
    if args.recipe is None:
        rule, hint = "slows the step of a recipe on a cluster", "give --recipe and --cluster"
        asked = [("--straggler", value) for value in args.straggler or ()] + [("--spread", args.spread)]
        problems += [Problem(where=w, value=v, rule=rule, hint=hint) for w, v in asked if v is not None]
    if args.recipe is None and overrides:
        rule, hint = "is not known (settings of a recipe need --recipe)", "see phalanx simulate goodput --help"
        problems.append(Problem(where=overrides[0], value=None, rule=rule, hint=hint))
    if args.recipe is not None:
        rule = "has no effect with --recipe"
        idle = [(f"--{name}", getattr(args, name), "the cluster says how many") for name in ("ranks", "hosts")]
        idle.append(("--repair", args.repair, "it is derived"))
        problems += [Problem(where=w, value=v, rule=rule, hint=hint) for w, v, hint in idle if v is not None]
    return problems


def _goes_on(args: argparse.Namespace, overrides: Sequence[str]) -> GoesOn:
    """The recipe on the cluster, with nobody slow, and what it does without a host: as an elastic run, also where it leaves that open."""
    from phalanx.cli.predicting.recipe import predict_on, read_and_predict

    recipe, plain = read_and_predict(args.recipe, args.cluster, overrides)
    cluster, folding = plain.cluster, plain.mapping.folding
    elastic, problems = elastic_recipe(recipe, cluster)
    if problems:
        return GoesOn(recipe=recipe, predicted=plain, why_not=". ".join(map(str, problems)))
    assert isinstance(folding, Folding)  # stages of their own are a problem of an elastic run
    spec = resolve_recipe(recipe)
    heals = replace(recipe.resilience, heal=True, mode=elastic.resilience.mode)
    same = heals == recipe.resilience
    predicted = plain if same else predict_on(replace(recipe, resilience=heals), spec, cluster)
    if plain.fits and not predicted.fits:
        why = f"it does not fit in memory with the copies of its state on {heals.f} hosts; more ranks or a smaller train.micro_batch need less"
        return GoesOn(recipe=recipe, predicted=plain, why_not=why)
    left = hosts_left(elastic, spec, folding, cluster, fits=memory_left(predicted))
    if why := left.why_not(cluster.hosts - 1):
        return GoesOn(recipe=recipe, predicted=predicted, left=left, why_not=why)
    return GoesOn(recipe=recipe, predicted=predicted, left=left, repair=host_lost(predicted, left))


def _one_host(args: argparse.Namespace) -> str:
    """Why a job without a recipe has no replicas to go on from."""
    return "" if _hosts(args) > 1 else "the job is on one host, with which everything is lost; use --hosts 2 or more"


def _hosts(args: argparse.Namespace) -> int:
    return int(args.hosts) if args.hosts is not None else max(1, args.ranks // 8)


def _slow(args: argparse.Namespace, run_of: GoesOn) -> SlowHosts | None:
    """Slow ranks, where they were asked for, and what the recipe does about them."""
    named, predicted = args.straggler or (), run_of.predicted
    raise_if(straggler_problems(named, args.spread, predicted.cluster), ConfigError, subject="the arguments")
    stragglers = parse_stragglers(named, args.spread)
    if stragglers is None:
        return None
    rule = None if run_of.left is None or run_of.why_not else run_of.left.rule
    return slow_hosts(predicted, replace(stragglers, seed=args.seed), rule)


def repair_dict(repair: RecoveryTime, *, share: float) -> dict[str, Any]:
    """Where the seconds of `--repair` are from, and at which share of its speed the job goes on without the host."""
    return {
        "share": share,
        "seconds": repair.seconds,
        "phases": repair.phases,
        "moved_bytes": repair.moved_bytes,
        "explain": repair.explain(),
    }


def memory_dict(left: HostsLeft | None, predicted: Prediction, *, goes_on: bool) -> dict[str, Any]:
    """Whether the mapping of all ranks fits in their memory, and with how many hosts that of those that are left does not."""
    few, explain = ([], "") if left is None else (sorted(left.too_large), left.explain() if goes_on else "")
    if not predicted.fits:
        explain = "the mapping of all ranks does not fit in their memory: what follows is of a run that cannot be (phalanx simulate says more)"
    return {"fits": predicted.fits, "too_few_hosts": few, "explain": explain}


def _days(args: argparse.Namespace) -> float:
    return 54.0 if args.days is None else float(args.days)


def _rate(args: argparse.Namespace) -> float:
    return LLAMA3_FAILURES_PER_RANK_HOUR if args.rate is None else float(args.rate)


def _parser() -> WordParser:
    parser = WordParser(prog="phalanx simulate goodput", description="Progress under failures.")
    add = parser.add_argument
    add("--recipe", type=Path, metavar="RECIPE", help="derive --detect and --repair from this recipe on --cluster; its settings may follow")  # fmt: skip
    add("--cluster", metavar="NAMExRANKS", help="with --recipe: such as h100x128")
    add("--straggler", action="append", metavar="WHO:FACTOR", help="with --recipe: slow ranks, as in phalanx simulate; may be repeated")  # fmt: skip
    add("--spread", type=float, metavar="S", help="the same, with the pace of every device drawn")
    add("--ranks", type=int, default=None, help="ranks of the job (default 16384, or those of --cluster)")
    add("--hosts", type=int, default=None, help="hosts of the job (default a host for 8 ranks, or those of --cluster)")
    add("--rate", type=float, help="failures of a rank in an hour (default Llama 3's)")
    add("--failures", type=Path, metavar="CSV", help="a trace of removals in place of --rate and --days: MILLISECONDS,add|remove,NODE")  # fmt: skip
    add("--days", type=float, help="length of the job (default 54)")
    add("--interval", type=float, default=None, help="seconds between saves (default: Young and Daly's)")
    add("--save", type=float, default=10.0, help="seconds that a save stops the job (default 10)")
    add("--detect", type=float, help="seconds until a failure is known (default 60; of a recipe its resilience.limit_s)")  # fmt: skip
    add("--restart", type=float, default=600.0, help="seconds from there to the first step from a checkpoint (default 600)")  # fmt: skip
    add("--repair", type=float, default=None, help="the same from replicas (default 20; derived from --recipe)")
    add("--survival", type=float, default=0.99, help="share of failures that leave a replica of everything (default 0.99)")  # fmt: skip
    add("--replace", type=float, default=1800.0, help="seconds until a lost host is replaced (default 1800)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE")
    add("--svg", type=Path, metavar="FILE", help="draw progress against the interval between saves")
    return parser


def run(base: Practice, args: argparse.Namespace, *, why_not: str = "") -> dict[str, Any]:
    """Both ways of recovery over the same failures, and the sweep over intervals. `why_not`: why there is none from replicas."""
    ways: tuple[Way, ...] = ("checkpoint",) if why_not else ("checkpoint", "replicas")
    mean = 3600 / (_rate(args) * args.ranks)
    duration = _days(args) * 86400
    removals = None
    if args.failures is not None:
        removals, duration = read_removals(args.failures)
        if not removals or duration <= 0:
            rule = "has no removals" if not removals else "ends at its beginning: all its lines are at 0"
            raise PlanError.of(str(args.failures), None, rule, "give another trace", subject="the trace")
        mean = duration / len(removals)
    best = young_daly(base.save_s, mean)
    practice = replace(base, interval_s=args.interval if args.interval is not None else max(best, 1.0))
    hosts = _hosts(args)

    def failures() -> Iterator[float]:
        return iter(removals) if removals is not None else poisson(mean, args.seed)

    def play(recovery: Way) -> Goodput:
        return simulate_goodput(
            replace(practice, recovery=recovery), failures(), duration_s=duration, hosts=hosts, seed=args.seed
        )

    intervals = [(best or practice.interval_s) * 2 ** (k / 2) for k in range(-6, 7)]
    span = duration if removals is not None else max(duration, SWEPT * mean)
    curves = {
        name: sweep(replace(practice, recovery=name), failures, intervals, duration_s=span, hosts=hosts, seed=args.seed)
        for name in ways
    }
    return {
        "mean_between_failures_s": mean,
        "young_daly_s": best,
        "swept_failures": len(removals) if removals is not None else round(span / mean),
        "swept_optimum_s": swept_optimum(curves["checkpoint"]),
        "interval_s": practice.interval_s,
        **{name: vars(play(name)) for name in ways},
        **({"no_replicas": why_not} if why_not else {}),
        "expected_checkpoint": expected_goodput(practice, mean),
        "curves": curves,
        "sweep": {name: [list(point) for point in curve] for name, curve in curves.items()},
    }


def describe(result: dict[str, Any]) -> str:
    lines = [
        f"a failure every {format_seconds(result['mean_between_failures_s'])}; a save every {format_seconds(result['interval_s'])} "
        f"(Young and Daly: {format_seconds(result['young_daly_s'])})",
        f"{'recovery':<12}{'useful':>9}{'saving':>9}{'lost':>9}{'down':>9}{'failures':>10}",
    ]
    for name in result["curves"]:
        g = result[name]
        shares = "".join(f"{g[part]:>9.2%}" for part in ("useful", "saving", "lost", "down"))
        lines.append(f"{name:<12}{shares}{g['failures']:>10}")
    if "no_replicas" in result:
        lines.append(f"recovery from replicas cannot be: {result['no_replicas']}")
    if "assumed" in result:
        lines.append(result["assumed"])
    if "repair" in result:
        then = f"without the host at {result['repair']['share']:.1%} of the speed"
        lines.append(f"recovery from replicas: {result['repair']['explain']}; {then}")
    if "slow" in result:
        lines.append(result["slow"]["explain"])
    if result.get("memory", {}).get("explain"):
        lines.append(result["memory"]["explain"])
    lines.append(f"expected of checkpoints, in closed form: {result['expected_checkpoint']:.2%}")
    if result["swept_optimum_s"] is not None:
        lines.append(
            f"best interval of the sweep over {result['swept_failures']:,} failures: {format_seconds(result['swept_optimum_s'])}"
        )
    return "\n".join(lines)


def picture(result: dict[str, Any]) -> str:
    """Useful time against the interval between saves, for both ways."""
    colours = {"checkpoint": "#c0392b", "replicas": "#0b6e99"}
    series = [
        Series(name=name, colour=colours[name], line=True, points=tuple((x / 60, 100 * y, "") for x, y in curve))
        for name, curve in result["curves"].items()
    ]
    mark = [(result["young_daly_s"] / 60, "Young and Daly")]
    title = "Progress under failures" + " with slow ranks" * ("slow" in result)
    x_name, y_name = "minutes between saves", "useful time, %"
    return plot(series, title=title, x_name=x_name, y_name=y_name, marks=mark, log=True)
