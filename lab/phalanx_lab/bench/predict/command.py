"""Step times of many plans, predicted and measured: `phalanx bench predict --json F`, four ranks in paced mode.

Paced mode: there are more ranks than processors, so that computing would measure who gets a processor. Every operation that a recorded step tells
(`observe.trace_steps`: forward, backward, again, the end of the step) lasts a time that is given beforehand (`phalanx_lab/bench/predict/plans.py`), with whatever no operation tells of before it: it
computes, on a small model, and then waits (`runtime/comm/pacing.py`). All else is real: the trainer's step, its pipelines, autograd, and every message over gloo.

With `--testbed` the ranks are on emulated hosts with links of `--rate`, so that communication is a real share of the step and the network decides how long it takes. Links are measured in the
same job, between the same ranks, before the first plan; nothing is fitted to a step. `--part 2/3` takes the second third of the plans.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from phalanx.core.arguments import read_words, too_small
from phalanx.core.errors import ConfigError, Problem, RunError, nearest, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_seconds, read_rate
from phalanx.runtime.processes.launch import run_local
from phalanx.runtime.processes.world import read_world
from phalanx.simulate.calibration.fit import TimedCollective, with_links
from phalanx.simulate.hardware.clusters import Hardware, load_hardware
from phalanx.simulate.program.clock import ProgramTimeline, programs_hash
from phalanx.simulate.program.compare_run import MeasuredOp, compare_steps
from phalanx.simulate.program.cost import ProgramOracle
from phalanx_lab.bench.predict import real as predict_real, recovery as predict_recovery
from phalanx_lab.bench.predict.fitted_costs import learn, paces, usual_pace
from phalanx_lab.bench.predict.plans import PLANS, WORLD, Glue, PlanPrediction, StepPlan
from phalanx_lab.bench.predict.rank import SIZES, rank_report
from phalanx_lab.bench.predict.spans import recorded_step
from phalanx_lab.bench.rank_jobs import read_told, run_ranks, tell
from phalanx_lab.testbed.cluster import ClusterSpec

PACED_BARS = {"median": 0.05, "worst": 0.12, "kendall_tau": 0.9}
REAL_BARS = {"median": 0.12, "worst": 0.12, "kendall_tau": 0.9}
JOB_S = 580.0
ROUNDS = 2
"""Number of rounds in which --real measures everything."""


@dataclass(frozen=True, kw_only=True)
class PredictArgs:
    """Step times of plans on four ranks in paced mode, beside their predictions."""

    testbed: bool = False
    """Run on emulated hosts."""
    real: bool = False
    """Two ranks that really compute, in place of four that are paced."""
    recovery: bool = False
    """Not steps: from kill -9 of a rank to the next committed step, on local ranks."""
    kills: int = 3
    """Number of kills of each case of --recovery; the median counts."""
    hosts: int = 4
    """Number of hosts of the testbed; ranks are shared among them evenly."""
    rate: str = "50mbit"
    """Rate of each emulated host's link, each way."""
    steps: int = 3
    """Steps of each plan, behind one that is not counted; the median counts."""
    part: str = "1/1"
    """Which part of the plans, of how many: 2/3."""
    only: tuple[str, ...] = ()
    """Names of plans; none: all of the part."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""
    told: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for what the ranks told: links, and the last step of each plan, event by event."""
    rank_of: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Be a rank of the job that the file describes (the benchmark starts these itself)."""


def main(args: list[str]) -> int:
    """Run `phalanx bench predict ARGS...`; 1 where a bar is missed."""
    options = read_words(PredictArgs, args, prog="phalanx bench predict", description=__doc__)
    if options.rank_of is not None:
        return _rank_of(options.rank_of)
    raise_if(_problems(options), ConfigError, subject="the options")
    check_writable(options.json, options.told)
    if options.recovery:
        report = measure_recovery(options)
        print(predict_recovery.describe(report))
    else:
        report = measure(options)
        print(describe(report))
    write_json(options.json, report)
    return 0 if report["met"] else 1


def _problems(options: PredictArgs) -> list[Problem]:
    problems = too_small(options, steps=1)
    if _read_part(options.part) is None:
        problems.append(Problem(where="--part", value=options.part, rule="is not PART/PARTS", hint="use 1/2, then 2/2"))
    if options.hosts not in (2, WORLD):
        problems.append(Problem(where="--hosts", value=options.hosts, rule=f"is 2 or {WORLD}", hint=f"use {WORLD}"))
    _, problem = read_rate(options.rate, where="--rate")
    problems += [problem] if problem is not None else []
    names = _names(options)
    if options.real and options.testbed:
        problems.append(Problem(where="--real", value=True, rule="is of local ranks", hint="leave out --testbed"))
    for name in options.only:
        if name not in names:
            problems.append(Problem(where="--only", value=name, rule="is no plan", hint=nearest(name, names)))
    problems += _recovery_problems(options)
    if not problems and not (runs_of(options) if options.recovery else plans_of(options)):
        rule = f"has none of the plans {', '.join(options.only) or 'there are'}"
        problems.append(Problem(where="--part", value=options.part, rule=rule, hint="use 1/1"))
    if not options.testbed:
        defaults = PredictArgs()
        for setting in ("hosts", "rate"):
            if getattr(options, setting) != getattr(defaults, setting):
                value, rule = getattr(options, setting), "has no effect on local ranks"
                problems.append(Problem(where=f"--{setting}", value=value, rule=rule, hint="add --testbed"))
    return problems


def measure_recovery(options: PredictArgs) -> dict[str, Any]:
    """Recoveries of all runs that are asked for. Raises `RunError` where one does not go on."""
    return predict_recovery.measure(runs_of(options), kills=options.kills)


def _names(options: PredictArgs) -> list[str]:
    if options.recovery:
        return [run.name for run in predict_recovery.RUNS]
    return [plan.name for plan in (predict_real.PLANS if options.real else PLANS)]


def _recovery_problems(options: PredictArgs) -> list[Problem]:
    defaults, problems = PredictArgs(), too_small(options, kills=1)
    idle = ("testbed", "real", "steps", "told") if options.recovery else ("kills",)
    rule = "has no effect with --recovery" if options.recovery else "has no effect without --recovery"
    problems += [
        Problem(where=f"--{name}", value=getattr(options, name), rule=rule, hint="leave it out")
        for name in idle
        if getattr(options, name) != getattr(defaults, name)
    ]
    return problems


def runs_of(options: PredictArgs) -> tuple[predict_recovery.KillTargets, ...]:
    """Those that are asked for of --recovery."""
    part, parts = _read_part(options.part) or (1, 1)
    runs = predict_recovery.RUNS[part - 1 :: parts]
    return tuple(run for run in runs if not options.only or run.name in options.only)


def _read_part(text: str) -> tuple[int, int] | None:
    part, slash, parts = text.partition("/")
    if not (slash and part.isdigit() and parts.isdigit()) or not 1 <= int(part) <= int(parts) <= len(PLANS):
        return None
    return int(part), int(parts)


def plans_of(options: PredictArgs) -> tuple[StepPlan, ...]:
    """Those that are asked for. A part has every n-th plan, so that all parts have plans of all kinds."""
    part, parts = _read_part(options.part) or (1, 1)
    plans = predict_real.PLANS if options.real else PLANS
    return tuple(plan for plan in plans[part - 1 :: parts] if not options.only or plan.name in options.only)


def measure(options: PredictArgs) -> dict[str, Any]:
    """All plans. Raises `RunError` where a rank fails."""
    plans = plans_of(options)
    world = predict_real.WORLD if options.real else WORLD
    per_host = world // options.hosts if options.testbed else world
    names = [plan.name for plan in plans]
    told = _run(options, {"plans": names, "steps": options.steps, "ranks_per_host": per_host, "real": options.real})
    write_json(options.told, told)
    links = [TimedCollective(**link) for link in told["links"]]
    hardware = with_links(load_hardware("h100"), links, ranks_per_host=per_host)  # of computing nothing is asked of it
    predicted = _predicted(options, plans, told, hardware)
    compared = compared_of(told) if options.real else told["plans"]
    rows = [_row(plan, found, time) for plan, found, time in zip(plans, compared, predicted, strict=True)]
    place = f"{options.hosts} emulated hosts, links of {options.rate}" if options.testbed else "one machine"
    report = report_of(rows, REAL_BARS if options.real else PACED_BARS)
    mode = {"mode": "real" if options.real else "paced", "ranks": world, "place": place}
    return mode | report | {"glue": told["glue"], "links": told["links"]}


def _predicted(
    options: PredictArgs, plans: Sequence[StepPlan], told: Mapping[str, Any], hardware: Hardware
) -> list[ProgramTimeline]:
    if options.real:
        return real_timelines(plans, told, hardware)
    glue = Glue(**told["glue"])
    return [PlanPrediction(plan=plan, hardware=hardware, glue=glue).timeline() for plan in plans]


def real_timelines(plans: Sequence[StepPlan], told: Mapping[str, Any], hardware: Hardware) -> list[ProgramTimeline]:
    """Timelines of the plans of --real, at the usual pace of the processors."""
    oracle = ProgramOracle(hardware=hardware, precision="fp32", seq_len=predict_real.LARGE.seq_len)
    recorded = recorded_of(told)
    learned = learn(predict_real.LEARNED * len(told["learned"]), recorded, oracle)
    return [predict_real.RealPrediction(plan=plan, oracle=oracle, learned=learned).timeline() for plan in plans]


def recorded_of(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is learned from, of all rounds."""
    return [found for each in told["learned"] for found in each]


def compared_of(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What was measured of each plan in all rounds together. `paces`: how much slower than usual the processors were around each step; `rounds`: medians at the usual pace."""
    usual_s = usual_pace(recorded_of(told))
    out = []
    for each in zip(*told["compared"], strict=True):
        slower = [[pace_s / usual_s for pace_s in paces(found)] for found in each]
        out.append(
            {
                "hash": each[0]["hash"],
                "late": 0,
                "told": 0,
                "seconds": [s for found in each for s in found["seconds"]],
                "steps": [step for found in each for step in found["steps"]],
                "paces": [pace for paces_of in slower for pace in paces_of],
                "rounds": [_at_usual_pace(found["seconds"], own) for found, own in zip(each, slower, strict=True)],
            }
        )
    return out


def _at_usual_pace(seconds: Sequence[float], slower: Sequence[float]) -> float:
    return statistics.median(s / pace for s, pace in zip(seconds, slower, strict=True))


def _run(options: PredictArgs, job: dict[str, Any]) -> Any:
    if options.testbed:
        rate, _ = read_rate(options.rate, where="--rate")
        spec = ClusterSpec(hosts=options.hosts, ranks_per_host=WORLD // options.hosts, link_bit_per_s=rate)
        return run_ranks("predict", job, spec, timeout_s=JOB_S)
    with tempfile.TemporaryDirectory(prefix="phalanx-predict-") as folder:
        job_file = Path(folder) / "job.json"
        job_file.write_text(json.dumps(job))
        world = predict_real.WORLD if options.real else WORLD
        code = run_local(lambda info, stop: _rank(info, job_file), ranks=world, threads=1)
        if code:
            raise RunError(f"a rank of the benchmark ended with {code}")
        return read_told(job_file)


def _rank_of(job: Path) -> int:
    info = read_world()
    assert info is not None  # the testbed sets it
    return _rank(info, job)


def _rank(info: Any, job: Path) -> int:
    asked = json.loads(job.read_text())
    how = {"steps": asked["steps"], "ranks_per_host": asked["ranks_per_host"]}
    if not asked["real"]:
        told = rank_report(info, [plan for plan in PLANS if plan.name in asked["plans"]], sizes=SIZES, **how)
    else:  # rounds, so that no slow minute is all that is learned, or all that a plan was measured in
        plans = [plan for plan in predict_real.PLANS if plan.name in asked["plans"]]
        order = [*predict_real.LEARNED, *plans] * ROUNDS
        told = rank_report(info, order, sizes=predict_real.SIZES, paced=False, **how)
        found, learned = told.pop("plans"), len(predict_real.LEARNED)
        each = [found[i : i + learned + len(plans)] for i in range(0, len(found), learned + len(plans))]
        told["learned"], told["compared"] = [r[:learned] for r in each], [r[learned:] for r in each]
    if info.rank == 0:
        tell(job, told)
    return 0


def _row(plan: StepPlan, found: Mapping[str, Any], timeline: ProgramTimeline) -> dict[str, Any]:
    """One plan, predicted and measured."""
    slower = found.get("paces", [1.0] * len(found["seconds"]))
    measured_s = _at_usual_pace(found["seconds"], slower)
    last = {
        key: MeasuredOp(one.begin_s / slower[-1], one.seconds / slower[-1])
        for key, one in recorded_step(found["steps"][-1]).items()
    }
    ids = compare_steps(timeline, [last], step_s=[measured_s])
    return {
        "plan": plan.name,
        "plan_hash": {"predicted": programs_hash(plan.programs()), "measured": found["hash"]},
        "predicted_s": timeline.seconds,
        "measured_s": measured_s,
        "error": timeline.seconds / measured_s - 1,
        "samples_s": found["seconds"],
        "paces": slower,
        "rounds_s": found.get("rounds", [measured_s]),
        "waiting": waiting(timeline),
        "late": found["late"],
        "told": found["told"],
        "begin_correlation": ids.begin_correlation,
        "kinds": [vars(kind) for kind in ids.kinds],
    }


def waiting(timeline: ProgramTimeline) -> float:
    """Share of the predicted step in which a rank does nothing of its own, mean over ranks."""
    busy = [sum(s.cost.seconds for s in spans if s.op.kind != "collective") for spans in timeline.spans]
    return 1 - statistics.mean(busy) / timeline.seconds


def report_of(rows: Sequence[dict[str, Any]], bars: Mapping[str, float] = PACED_BARS) -> dict[str, Any]:
    """Rows and what the bars ask of them. Pairs of plans that differ by no more than a plan from itself in another round are ties: nobody can say in which order they are. Where more than half of
    the pairs are, the measurement says nothing about the order, and the bars are not met."""
    wrong = [abs(row["error"]) for row in rows]
    median, worst = statistics.median(wrong), max(wrong)
    predicted, measured = [r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]
    tie = tie_of([row.get("rounds_s", ()) for row in rows])
    tau = kendall_tau(predicted, measured, tie=tie)
    same = all(row["plan_hash"]["predicted"] == row["plan_hash"]["measured"] for row in rows)
    pairs = len(rows) * (len(rows) - 1) // 2
    ties = pairs - len(_ordered(measured, tie))
    return {
        "rows": rows,
        "median": median,
        "worst": worst,
        "worst_plan": rows[wrong.index(worst)]["plan"],
        "kendall_tau": tau,
        "kendall_tau_of_all": kendall_tau(predicted, measured),
        "tie": tie,
        "pairs": pairs,
        "ties": ties,
        "bars": dict(bars),
        "met": median <= bars["median"]
        and worst <= bars["worst"]
        and tau >= bars["kendall_tau"]
        and 2 * ties <= pairs
        and same,
    }


def tie_of(rounds: Sequence[Sequence[float]]) -> float:
    """Difference of two plans' logarithms that may be chance: two standard deviations, from what two rounds of one plan differ by
    (median over plans; 0 where there is one round).

    A difference of two rounds has twice the variance of a round; a plan's time is the mean of two, and two plans are compared:
    half of that.
    """
    apart = [abs(math.log(each[0] / each[1])) for each in rounds if len(each) == 2]
    return 2 * 1.4826 * statistics.median(apart) / math.sqrt(2) if apart else 0.0


def kendall_tau(a: Sequence[float], b: Sequence[float], *, tie: float = 0.0) -> float:
    """Pairs that both put in the same order less those that they do not, over all pairs whose logarithms differ in `b` by more than `tie`; 1 where there are none."""
    pairs = _ordered(b, tie) if tie else [(i, j) for i in range(len(a)) for j in range(i)]
    agree = sum(((a[i] > a[j]) - (a[i] < a[j])) * ((b[i] > b[j]) - (b[i] < b[j])) for i, j in pairs)
    return agree / len(pairs) if pairs else 1.0


def _ordered(b: Sequence[float], tie: float) -> list[tuple[int, int]]:
    return [(i, j) for i in range(len(b)) for j in range(i) if abs(math.log(b[i] / b[j])) > tie]


def describe(report: Mapping[str, Any]) -> str:
    """A line for each plan."""
    glue = report["glue"]
    how = (
        f"paced: work waits for a given time, messages are real; a collective is posted {format_seconds(glue['post_s'])} after an operation, "
        f"{format_seconds(glue['between_s'])} after another collective"
        if report["mode"] == "paced"
        else "which really compute; learned from other plans' recorded steps at two sizes"
    )
    lines = [
        f"step times of {report['ranks']} ranks on {report['place']}, {how}",
        f"{'plan':<28}{'predicted':>10}{'measured':>10}{'error':>8}{'waiting':>9}  late operations, plan",
    ]
    for row in report["rows"]:
        same = "" if row["plan_hash"]["predicted"] == row["plan_hash"]["measured"] else "  PLANS DIFFER"
        lines.append(
            f"{row['plan']:<28}{format_seconds(row['predicted_s']):>10}{format_seconds(row['measured_s']):>10}{row['error']:>+8.1%}"
            f"{row['waiting']:>9.0%}  {row['late']} of {row['told']}, {row['plan_hash']['predicted']}{same}"
        )
    bars = report["bars"]
    lines.append(
        f"median error {report['median']:.1%} (bar {bars['median']:.0%}), worst {report['worst']:.1%} ({report['worst_plan']}; bar "
        f"{bars['worst']:.0%}), Kendall tau {report['kendall_tau']:.3f} (bar {bars['kendall_tau']}): {'met' if report['met'] else 'missed'}"
    )
    if report["tie"]:
        lines.append(
            f"plans within {report['tie']:.1%} of one another are ties ({report['ties']} of {report['pairs']} pairs); with them tau is {report['kendall_tau_of_all']:.3f}"
        )
    return "\n".join(lines)
