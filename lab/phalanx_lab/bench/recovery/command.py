"""Training through a failure trace, elastic recovery itself against torchrun restarts from checkpoints: `phalanx bench recovery --json F`.

Both systems train the same model on the same slots, one after the other, and the same slots are taken and given back at the same moments. What counts is
committed samples from the moment at which training runs (warm) to the end of the trace.

    failures   one slot after another is lost for good, down to half of them, at equal intervals
    spot       a stretch of the Bamboo p3 trace; slots come back

Scale. A restart is real processes here, so it costs what it costs on this machine; it is measured first, and one factor follows for all times: the paper's failure
interval is to its restart as ours to ours (`--restart-share`). Checkpoints come at the paper's share of that interval (every 50 steps; ours, as Lazarus's, every 250), and once more at Young and Daly's with writes
beside training. Nothing is slept. Ranks share the cores, so slots that the baseline leaves idle cost it nothing here; with `--own-cores` each slot has its own part of
them, as hosts have, and the predictions `own` count that way.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from phalanx.core.arguments import read_words
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, write_json
from phalanx.simulate.failures.goodput import read_nodes
from phalanx_lab.bench.cluster import kept_or_temporary
from phalanx_lab.bench.recovery.cores import SlotCores
from phalanx_lab.bench.recovery.model import (
    PAPER_FAILURE_S,
    PAPER_INTERVAL_STEPS,
    PAPER_RESTART_S,
    Figures,
    best_interval,
    paper_figures,
    paper_interval_share,
    paper_save_s,
    paper_save_share,
    predict,
    where_as_good,
)
from phalanx_lab.bench.recovery.ours import PhalanxSystem
from phalanx_lab.bench.recovery.replay import replay
from phalanx_lab.bench.recovery.table import Score
from phalanx_lab.bench.recovery.torchrun import Torchrun
from phalanx_lab.bench.recovery.trace import Change, Trace, bamboo, every, from_nodes, random_failures
from phalanx_lab.bench.recovery.workload import System, Workload, workloads

Model = Literal["small", "large"]
What = Literal["failures", "spot", "poisson", "file"]
CALIBRATION_STEPS = 3
"""Steps between saves while step, save and restart are measured."""
UNEQUAL = 0.05
"""Difference of the shares of stolen processor time (`phalanx_lab/bench/stolen.py`) that two systems met beyond which they are not
compared."""
OURS, PAPER, BEST = "heals", "torchrun, paper's interval", "torchrun, best interval"


@dataclass(frozen=True, kw_only=True)
class RecoveryArgs:
    """Training through a failure trace: elastic recovery itself against restarts from checkpoints."""

    what: tuple[What, ...] = ("failures", "spot")
    """Traces: failures, spot (Bamboo), poisson, file."""
    models: tuple[Model, ...] = ("small", "large")
    """The shapes of GPT-S and GPT-L of the paper, in small."""
    slots: int = 8
    """Ranks at the beginning, even. 8 have the idle slots of the paper, 4 take a third of the time."""
    mode: Literal["fast", "exact"] = "fast"
    """Mode of the elastic run."""
    rounds: int = 1
    """How often each system replays each trace."""
    restart_share: float = PAPER_RESTART_S / PAPER_FAILURE_S
    """Restart over failure interval."""
    failure_s: float | None = None
    """Seconds between failures, in place of what follows from a measured restart."""
    spot_start_min: float = 30.0
    """First minute of the Bamboo trace."""
    spot_min: float = 32.0
    """Minutes of it, before scaling (the paper: 80)."""
    trace: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """MILLISECONDS,add|remove,NODE for `file`, in seconds of the replay."""
    skew: float | None = 2.2
    """Routing of both: Zipf exponent (2.2 puts 87 % of the tokens on two experts of 16, as in the paper; who is hot changes from step to step). None: the router's."""
    seq_len: int = 512
    """Tokens of a sequence (the paper: 1024); more of them make experts weigh more in a step."""
    replica_slots: int | None = 6
    """Expert replicas that a rank of the elastic run has room for (the paper: 6). None: none."""
    own_cores: bool = True
    """Each slot has its share of the cores (control groups), whoever else is there: idle slots and lost ones count."""
    paced_saves: bool = True
    """Checkpoints are written no faster than takes the paper's share of a failure interval (its storage is a network file system), by `checkpoint.write_rate`, of both."""
    best: bool = True
    """Replay the baseline at the best interval too."""
    seed: int = 0
    folder: Path | None = None
    """Where to run (kept afterwards). Default: a temporary folder."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(kw_only=True)
class TraceCase:
    """One model through one trace."""

    what: str
    model: str
    slots: int
    figures: Figures
    failure_s: float
    intervals: dict[str, int]
    """Steps between saves, by system."""
    proportions: dict[str, dict[str, float]]
    """Proportions in failure intervals: here and in the paper."""
    trace: Trace
    scores: dict[str, list[Score]] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)

    def samples(self, system: str) -> float:
        """Committed, mean over the rounds."""
        found = self.scores.get(system, [])
        return sum(s.committed_samples for s in found) / len(found) if found else 0.0

    def ratio(self, system: str) -> float | None:
        """Ours over that system."""
        base = self.samples(system)
        return self.samples(OURS) / base if base else None


def main(args: list[str]) -> int:
    """Run `phalanx bench recovery ARGS...`; exit status 0 if no sample was trained on twice."""
    options = read_words(RecoveryArgs, args, prog="phalanx bench recovery", description=__doc__)
    check_writable(options.json)
    raise_if(problems(options), ConfigError, subject="the arguments")
    with contextlib.ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # runs end with this one
        stack.callback(signal.signal, signal.SIGTERM, before)
        folder = stack.enter_context(kept_or_temporary(options.folder, prefix="phalanx-recovery-"))
        cases = measure(options, folder, tell=lambda text: print(text, flush=True))
    print(report(cases))
    return 1 if result(options, cases)["doubled_samples"] else 0


def problems(options: RecoveryArgs) -> list[Problem]:
    """All that is wrong with the arguments."""
    out = []
    if options.slots < 4 or options.slots % 2:
        out.append(Problem(where="--slots", value=options.slots, rule="must be even, and 4 at least", hint="use 4"))
    if not 0 < options.restart_share < 1:
        out.append(Problem(where="--restart-share", value=options.restart_share, rule="must lie between 0 and 1"))
    if options.failure_s is not None and options.failure_s <= 0:
        out.append(Problem(where="--failure-s", value=options.failure_s, rule="must be above 0", hint="leave it out"))
    if options.folder is not None and options.folder.exists() and any(options.folder.iterdir()):
        rule = "must be empty: runs begin at step 0"
        out.append(Problem(where="--folder", value=options.folder, rule=rule, hint="name a new one"))
    if options.rounds < 1:
        out.append(Problem(where="--rounds", value=options.rounds, rule="must be 1 at least"))
    if ("file" in options.what) != (options.trace is not None):
        out.append(Problem(where="--trace", value=options.trace, rule="goes with --what file, and the other way round"))
    return out


def measure(options: RecoveryArgs, folder: Path, *, tell: Callable[[str], None]) -> list[TraceCase]:
    """All cases, in `folder`."""
    cases = []
    with contextlib.ExitStack() as stack:
        cores = stack.enter_context(slot_cores(options.slots)) if options.own_cores else None
        for name in options.models:
            workload = replace(workloads(options.slots)[name], skew=options.skew, seq_len=options.seq_len)
            figures = calibrate(workload, folder / name, options, tell, cores)
            if options.paced_saves:
                workload, figures = paced(workload, figures, options)
                tell(f"  saves are paced to {figures.save_s:.2f} s ({workload.write_rate:.2f} MB/s)")
            for what in options.what:
                case = make_case(what, workload, figures, options)
                _replay_all(case, workload, folder / name, options, tell, cores)
                cases.append(case)
                if options.json is not None:  # what is measured is kept, whatever ends this program
                    write_json(options.json, result(options, cases))
    return cases


def slot_cores(slots: int) -> SlotCores:
    """This machine's cores, in equal parts."""
    return SlotCores(slots, cores=len(os.sched_getaffinity(0)) / slots)


def calibrate(
    workload: Workload,
    folder: Path,
    options: RecoveryArgs,
    tell: Callable[[str], None],
    cores: SlotCores | None = None,
) -> Figures:
    """Step, save, restart and repair of this model on this machine: one kill each, with nothing else to wait for."""
    often = Torchrun(workload, folder / "calibrate", slots=options.slots, interval=CALIBRATION_STEPS, asynchronous=False, name="calibration")  # fmt: skip
    ours = _ours(workload, folder / "calibrate-ours", options, interval=10**6)
    found = []
    for system in (often, ours):
        last = Change(at_s=6.0, lost=(options.slots - 1,))
        trace = Trace(name="one loss", slots=options.slots, duration_s=600.0, changes=(last,))
        found.append(replay(system, trace, global_batch=workload.global_batch, stop_when_resumed=True, cores=cores))
    base, elastic = found
    figures = Figures(
        step_s=base.step_s,
        save_s=base.save_s,
        save_bytes=base.save_bytes,
        restart_s=base.outages[0].resumed_s or 0.0,
        elastic_step_s=elastic.step_s,
        repair_s=elastic.outages[0].resumed_s or 0.0,
    )
    tell(f"{workload.name}: {describe_figures(figures)}")
    return figures


def paced(workload: Workload, figures: Figures, options: RecoveryArgs) -> tuple[Workload, Figures]:
    """Workload with checkpoints that take the paper's share of a failure interval, or what they take by themselves if that is
    more."""
    save_s = max(figures.save_s, paper_save_share(workload) * _failure_s(figures, options))
    rate = figures.save_bytes / 1e6 / max(1e-3, save_s - figures.save_s) if save_s > figures.save_s else 0.0
    return replace(workload, write_rate=rate), replace(figures, save_s=save_s)


def _failure_s(figures: Figures, options: RecoveryArgs) -> float:
    return options.failure_s or figures.restart_s / options.restart_share


def describe_figures(figures: Figures) -> str:
    """Describes the figures in a line."""
    return (
        f"step {figures.step_s * 1000:.0f} ms, save {figures.save_s * 1000:.0f} ms, restart {figures.restart_s:.1f} s; "
        f"elastic recovery: step {figures.elastic_step_s * 1000:.0f} ms, recovery {figures.repair_s:.2f} s"
    )


def make_case(what: str, workload: Workload, figures: Figures, options: RecoveryArgs) -> TraceCase:
    """The trace and the intervals between saves that follow from measured figures."""
    failure_s = _failure_s(figures, options)
    trace = make_trace(what, options, failure_s)
    trace.check()
    paper_steps = max(1, round(paper_interval_share(workload) * failure_s / figures.step_s))
    losses = max(1, trace.num_losses)
    best_steps = best_interval(figures, trace.duration_s / losses)
    case = TraceCase(
        what=what,
        model=workload.name,
        slots=options.slots,
        figures=figures,
        failure_s=failure_s,
        intervals={OURS: 5 * paper_steps, PAPER: paper_steps, BEST: best_steps},
        proportions={
            "here": _proportions(failure_s, figures.step_s, figures.restart_s, figures.save_s, figures.repair_s, paper_steps),
            "paper": _proportions(
                PAPER_FAILURE_S, workload.paper_step_s, PAPER_RESTART_S, paper_save_s(workload), 30.0, PAPER_INTERVAL_STEPS
            ),
        },
        trace=trace,
    )  # fmt: skip
    for name, steps in ((PAPER, paper_steps), (BEST, best_steps)):
        for speed, own in (("here", False), ("own", True)):
            found = predict(figures, trace, ep=workload.ep, interval_steps=steps, own_speed=own)
            case.predicted[f"{name}, {speed}"] = found.ratio
    scaled = trace.scaled(PAPER_FAILURE_S / failure_s)
    at_paper = predict(paper_figures(workload), scaled, ep=workload.ep, interval_steps=PAPER_INTERVAL_STEPS, own_speed=True)  # fmt: skip
    case.predicted["paper's figures, own"] = at_paper.ratio
    return case


def _proportions(
    failure_s: float, step_s: float, restart_s: float, save_s: float, repair_s: float, steps: int
) -> dict[str, float]:
    return {
        "steps_between_failures": failure_s / step_s,
        "restart": restart_s / failure_s,
        "save": save_s / failure_s,
        "save_in_steps": save_s / step_s,
        "between_saves": steps * step_s / failure_s,
        "saving_share_of_work": save_s / (steps * step_s),
        "repair": repair_s / failure_s,
    }


def make_trace(what: str, options: RecoveryArgs, failure_s: float) -> Trace:
    """Makes a trace in seconds of the replay."""
    slots, factor = options.slots, failure_s / PAPER_FAILURE_S
    if what == "failures":
        return every(failure_s, slots=slots, leave=slots // 2, seed=options.seed)
    if what == "spot":
        found = bamboo(slots=slots, start_s=60 * options.spot_start_min, duration_s=60 * options.spot_min)
        return found.scaled(factor)
    if what == "poisson":
        return random_failures(
            failure_s, slots=slots, duration_s=6 * failure_s, back_s=failure_s, least=2, seed=options.seed
        )
    assert options.trace is not None
    events = read_nodes(options.trace)
    return from_nodes(events, slots=slots, start_s=0.0, duration_s=events[-1][0] + failure_s)


def _replay_all(
    case: TraceCase,
    workload: Workload,
    folder: Path,
    options: RecoveryArgs,
    tell: Callable[[str], None],
    cores: SlotCores | None,
) -> None:
    """Each round: ours, the baseline at the paper's interval, the baseline at the best one."""
    for number in range(options.rounds):
        for name in (OURS, PAPER, BEST)[: 3 if options.best else 2]:
            place = folder / f"{case.what}-{name.replace(' ', '-').replace(',', '')}-{number}"
            system = _system(name, workload, place, case, options)
            begin_s = time.monotonic()
            found = replay(system, case.trace, global_batch=workload.global_batch, cores=cores)
            case.scores.setdefault(name, []).append(found)
            tell(f"  {case.what} {name}: {found.committed_samples} samples ({time.monotonic() - begin_s:.0f} s)")


def _system(name: str, workload: Workload, place: Path, case: TraceCase, options: RecoveryArgs) -> System:
    if name == OURS:
        return _ours(workload, place, options, interval=case.intervals[name])
    beside = name == BEST
    return Torchrun(workload, place, slots=options.slots, interval=case.intervals[name], asynchronous=beside, name=name)


def _ours(workload: Workload, folder: Path, options: RecoveryArgs, *, interval: int) -> PhalanxSystem:
    slots, room = options.slots, options.replica_slots
    return PhalanxSystem(workload, folder, slots=slots, mode=options.mode, interval=interval, replica_slots=room)


def result(options: RecoveryArgs, cases: list[TraceCase]) -> dict[str, Any]:
    """What is written to the file. Ratios are of committed samples, at the paper's interval and (`_best`) at the best one."""
    out: dict[str, Any] = {}
    for case in cases:
        key = {"failures": f"ratio_{case.model}"}.get(case.what, f"ratio_{case.what}_{case.model}")
        out[key], out[f"{key}_best"] = case.ratio(PAPER), case.ratio(BEST)
    scores = [s for case in cases for found in case.scores.values() for s in found]
    out["doubled_samples"] = sum(s.doubled_samples for s in scores)
    out["untold_samples"] = sum(s.untold_samples for s in scores)
    out["cases"] = [asdict(case) for case in cases]
    out["as_good"] = {case.model: as_good(case) for case in cases}
    out["options"] = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}
    return out


def as_good(case: TraceCase) -> list[dict[str, float]]:
    """Where checkpoints are as good: rarer failures, cheaper restarts (predicted)."""
    return where_as_good(case.figures, case.failure_s, factors=(1, 3, 10, 100, 1000), restart_factors=(1.0, 0.3, 0.1))


def report(cases: list[TraceCase]) -> str:
    """Tables for a person."""
    lines = []
    for case in cases:
        lines += ["", f"{case.what}, {case.model}: {case.slots} slots, {case.trace.num_losses} losses in {case.trace.duration_s:.0f} s; {describe_figures(case.figures)}"]  # fmt: skip
        for key in case.proportions["here"]:
            here, paper = (case.proportions[p][key] for p in ("here", "paper"))
            lines.append(f"    {key.replace('_', ' '):<24} {here:10.3f}   paper {paper:10.3f}")
        for name, found in case.scores.items():
            lines += [_row(case, name, score) for score in found]
        shares = [score.stolen for found in case.scores.values() for score in found]
        if max(shares, default=0.0) - min(shares, default=0.0) > UNEQUAL:
            lines.append("    NOT COMPARABLE: the machine's host gave them unequal shares of its processors")
        lines.append("    predicted ratios: " + "; ".join(f"{k} {v:.2f}" for k, v in case.predicted.items()))
    for case in {c.model: c for c in cases}.values():
        lines += ["", f"{case.model}: predicted ratio at the best interval, by time between failures and restart"]
        lines += [f"    every {r['failure_s']:9.0f} s, restart {r['restart_s']:6.2f} s: {r['ratio']:6.2f}" for r in as_good(case)]  # fmt: skip
    return "\n".join(lines)


def _row(case: TraceCase, name: str, score: Score) -> str:
    ratio = case.samples(OURS) / score.committed_samples if score.committed_samples else float("inf")
    resumed = [o.caught_up_s for o in score.outages if o.caught_up_s is not None and o.running_s is not None]
    outage = f"{sum(resumed) / len(resumed):.2f} s until further than before" if resumed else "no outage ended"
    return (
        f"    {name:<28} every {case.intervals[name]:>4} steps: {score.samples_per_s:7.1f} samples/s  ours {ratio:5.2f}x  {score.saves} saves, "
        f"{score.steps_again} steps again, {outage}, {score.stolen:.1%} of the processor time stolen"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
