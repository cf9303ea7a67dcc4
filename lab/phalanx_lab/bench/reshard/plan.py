"""How near the bound are plans of moves between layouts? `phalanx bench reshard-plan --seed S --cases N [--unequal-links] --json F`

Random cases that are not trivial (the first replica of each slice, in tile order, takes 1.02 x the bound or more; at most 150 unit tasks), each planned by us
and by the randomised greedy of arXiv 2211.05322 in the same run. `rho` is the makespan over a bound that holds for any schedule; its certificate is checked again
from the layouts. Chunks of relayed streams may be as small as `--least-bytes`, for the model knows no latency. `--nine`: the paper's nine cases with every strategy. `--scale`: 262,144 unit tasks, and a state of 47,397 tensors, together and stage by stage.
All times are CPU times of this process, without imports. Makespans are of the model: links of hosts limit, nothing inside a host does.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.process import peak_resident_bytes
from phalanx.plan.reshard.best import find_bound
from phalanx.plan.reshard.bound import Bound
from phalanx.plan.reshard.flows import make_flows, unit_flows, whole_groups
from phalanx.plan.reshard.history import HISTORY, busy_times, greedy, naive, perfect_order_seconds
from phalanx.plan.reshard.plan import LEAST_CHUNK, ReshardPlan, plan_reshard
from phalanx.plan.reshard.units import templates_of
from phalanx_lab.bench.reshard.cases import ReshardCase, large_state, nine_cases, random_cases, wide_case

TRIVIAL = 1.02
MOST_UNITS = 150


@dataclass(frozen=True, kw_only=True)
class ReshardPlanArgs:
    """Plans of moves between layouts against the bound and against the paper's greedy."""

    seed: int = 0
    """Seed of the random cases."""
    cases: int = 200
    """Random cases that are not trivial."""
    unequal_links: bool = False
    """Links of the sources at 0.25 to 1, of the destinations at 0.5 to 1 of the full rate."""
    least_bytes: int = 256
    """Smallest chunk of relayed streams (a run takes 16 KiB)."""
    nine: bool = False
    """The paper's nine cases with every strategy, in place of random ones."""
    scale: bool = False
    """Large cases, in place of random ones."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench reshard-plan ARGS...`."""
    options = read_words(ReshardPlanArgs, args, prog="phalanx bench reshard-plan", description=__doc__)
    raise_if(_problems(options), ConfigError, subject="arguments")
    check_writable(options.json)
    import scipy.optimize
    import scipy.sparse  # noqa: F401

    if options.nine:
        result = measure_nine()
    elif options.scale:
        result = measure_scale()
    else:
        result = measure_random(
            options.seed, options.cases, unequal_links=options.unequal_links, least_bytes=options.least_bytes
        )
    write_json(options.json, result)
    return 0


def _problems(options: ReshardPlanArgs) -> list[Problem]:
    problems = too_small(options, cases=1, least_bytes=1)
    if options.nine and options.scale:
        problems.append(Problem(where="--scale", value=True, rule="not together with --nine", hint="run it twice"))
    for name in ("seed", "cases", "unequal_links", "least_bytes"):
        value = getattr(options, name)
        if (options.nine or options.scale) and value != ReshardPlanArgs.__dataclass_fields__[name].default:
            where, rule = f"--{name.replace('_', '-')}", "has no effect with --nine or --scale"
            problems.append(Problem(where=where, value=value, rule=rule, hint="leave it out"))
    return problems


# ---- random cases ---------------------------------------------------------------------------------------------------------------


def measure_random(seed: int, count: int, *, unequal_links: bool, least_bytes: int = 256) -> dict[str, Any]:
    """Plan `count` cases that are not trivial, and print and return the figures."""
    ours, theirs, firsts, seconds, names = [], [], [], [], []
    drawn = 0
    for case in random_cases(seed, unequal_links=unequal_links):
        drawn += 1
        baseline = _baselines(case)
        if baseline is None:
            continue
        plan, took = _timed(case, least_bytes=least_bytes)
        # one bound for both: the plan's own may be a weaker one that was enough to stop at
        ours.append(plan.makespan_s / baseline[2].seconds)
        firsts.append(baseline[0])
        theirs.append(baseline[1])
        seconds.append(took)
        names.append((ours[-1], f"{case.label}, {plan.phases[0].schedule.name}"))
        if len(ours) == count:
            break
    wins = [b / a for a, b in zip(ours, theirs, strict=True)]
    result = {
        "seed": seed,
        "cases": count,
        "drawn": drawn,
        "unequal_links": unequal_links,
        "least_bytes": least_bytes,
        "mean_rho": statistics.fmean(ours),
        "p95_rho": float(np.quantile(ours, 0.95)),
        "max_rho": max(ours),
        "min_rho": min(ours),
        "greedy_mean_rho": statistics.fmean(theirs),
        "greedy_p95_rho": float(np.quantile(theirs, 0.95)),
        "greedy_max_rho": max(theirs),
        "naive_mean_rho": statistics.fmean(firsts),
        "geo_mean_win": math.exp(statistics.fmean(map(math.log, wins))),
        "max_win": max(wins),
        "cpu_s": statistics.fmean(seconds),
        "max_cpu_s": max(seconds),
        "worst": [name for _, name in sorted(names, reverse=True)[:3]],
    }
    _print_random(result)
    return result


def _baselines(case: ReshardCase) -> tuple[float, float, Bound] | None:
    """rho of the naive order and of the paper's greedy, and the bound; None for a trivial case or one with too many unit tasks."""
    templates = templates_of(case.moves, case.hosts)
    groups = whole_groups(templates)
    tasks = unit_flows(templates, groups, case.hosts).flows
    if len(tasks) > MOST_UNITS:
        return None
    bound, _ = find_bound(make_flows(templates, groups, case.hosts).flows, case.hosts)
    first = busy_times(tasks, case.hosts, naive(tasks))[1]
    if not bound.seconds or first < TRIVIAL * bound.seconds:
        return None
    theirs = busy_times(tasks, case.hosts, greedy(tasks, case.hosts))[1]
    return first / bound.seconds, theirs / bound.seconds, bound


def _timed(case: ReshardCase, *, least_bytes: int = LEAST_CHUNK) -> tuple[ReshardPlan, float]:
    begin = time.process_time()
    plan = plan_reshard(case.moves, case.hosts, least_bytes=least_bytes)
    return plan, time.process_time() - begin


def _print_random(result: dict[str, Any]) -> None:
    kind = "unequal links" if result["unequal_links"] else "equal links"
    print(f"{result['cases']} cases of {result['drawn']} drawn, seed {result['seed']}, {kind}; makespan over the bound")
    print(f"  {'':<18}{'mean':>9}{'p95':>9}{'max':>9}")
    for name, key in (("phalanx", ""), ("paper's greedy", "greedy_")):
        figures = "".join(f"{result[f'{key}{one}_rho']:>9.4f}" for one in ("mean", "p95", "max"))
        print(f"  {name:<18}{figures}")
    print(f"  {'first replica':<18}{result['naive_mean_rho']:>9.4f}")
    print(
        f"  faster than the greedy {result['geo_mean_win']:.3f} x (geometric mean), {result['max_win']:.2f} x at most"
    )
    print(f"  planning {result['cpu_s'] * 1e3:.1f} ms of CPU a case, {result['max_cpu_s'] * 1e3:.0f} ms at most")
    print("  worst: " + "; ".join(result["worst"]))


# ---- the paper's cases ----------------------------------------------------------------------------------------------------------


def measure_nine() -> dict[str, Any]:
    """Every strategy on the paper's nine cases."""
    rows = []
    print(f"  {'case':<6}{'ours':>8}{'ms':>7}" + "".join(f"{name[:12]:>14}" for name in HISTORY) + "   tile weights")
    for case in nine_cases():
        plan, took = min((_timed(case) for _ in range(5)), key=lambda made: made[1])
        bound = plan.bound.seconds
        made = {name: plan_reshard(case.moves, case.hosts, method=name) for name in HISTORY}
        row: dict[str, Any] = {"case": case.label, "rho": plan.rho, "cpu_s": took, "bound": plan.bound.explain()}
        row |= {name: one.makespan_s / bound for name, one in made.items()}
        row |= {
            f"{name}_best_order": perfect_order_seconds(made[name].phases[0].schedule, case.hosts) / bound
            for name in ("send_recv", "local_all_gather")
        }
        row["greedy_tile_weights"] = worst_with_tile_weights(case) / bound
        rows.append(row)
        figures = "".join(f"{row[name]:>14.3f}" for name in HISTORY)
        print(f"  {case.label[5:]:<6}{plan.rho:>8.4f}{took * 1e3:>7.2f}{figures}{row['greedy_tile_weights']:>15.3f}")
    return {"rows": rows}


def worst_with_tile_weights(case: ReshardCase) -> float:
    """Worst makespan of the greedy with whole source tiles for weights, as it was shipped."""
    templates = templates_of(case.moves, case.hosts)
    tasks = unit_flows(templates, whole_groups(templates), case.hosts).flows
    template = templates[0]
    tile = np.bincount(template.src_of, weights=template.elements)[template.src_of] * template.itemsize
    return max(
        busy_times(tasks, case.hosts, greedy(tasks, case.hosts, weights=tile.tolist(), seed=s))[1] for s in range(20)
    )


# ---- scale ----------------------------------------------------------------------------------------------------------------------


def measure_scale() -> dict[str, Any]:
    """Large cases: CPU seconds, memory, and what planning all stages together is worth."""
    wide = wide_case()
    gc.collect()
    plan, took = _timed(wide)
    rss = peak_resident_bytes() / 2**20
    result: dict[str, Any] = {"wide": _figures(wide, plan, took) | {"peak_rss_mib": rss}}
    state, by_stage = large_state()
    plan, took = _timed(state)
    alone = [plan_reshard(moves, state.hosts).makespan_s for moves in by_stage]
    result["state"] = _figures(state, plan, took) | {
        "stage_by_stage_s": sum(alone),
        "gain_over_stage_by_stage": sum(alone) / plan.makespan_s,
    }
    print(f"  peak memory of the first {rss:.0f} MiB, imports included")
    print(
        f"  stage by stage {sum(alone):.3f} s, together {plan.makespan_s:.3f} s: {sum(alone) / plan.makespan_s:.2f} x faster"
    )
    return result


def _figures(case: ReshardCase, plan: ReshardPlan, took: float) -> dict[str, Any]:
    templates = plan.phases[0].flows.templates
    figures = {
        "tensors": len(case.moves),
        "unit_tasks": sum(t.num_units * len(t.moves) for t in templates),
        "templates": len(templates),
        "flows": len(plan.phases[0].flows.flows),
        "bound_s": plan.bound.seconds,
        "certificate": plan.bound.explain(),
        "makespan_s": plan.makespan_s,
        "rho": plan.rho,
        "cpu_s": took,
    }
    print(f"{case.label}: planned in {took:.3f} s of CPU\n" + plan.explain())
    return figures
