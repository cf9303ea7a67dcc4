"""Step times of many plans, predicted and measured: `phalanx bench predict --json F`, four local ranks in paced mode.

Paced mode: there are more ranks than processors, so that computing would measure who gets a processor. Every operation that a recorded step tells
(`observe.trace_steps`: forward, backward, again, the end of the step) lasts a time that is given beforehand, FLOPs over a rate, or a floor: it computes, on a small model, and then
waits. All else is real: the trainer's step, its pipelines, autograd, and every message over gloo. Gradients of the embedding and weight gradients that are put off are not
told of by a run, so they are not paced and cost nothing in the prediction; schedules that put them off are left out.

*Predicted* is the program of the plan (`plan/program.py`) on the clock of `simulate/program_time.py`: work costs what it is paced to, links what
`phalanx calibrate` has found on as many ranks of this machine (`--cluster`, or measured before anything else). Nothing is fitted to a step.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from phalanx.bench.calibration import measure as measure_machine
from phalanx.bench.calibration import world_axis
from phalanx.core.config import OptimConfig, PipelineConfig
from phalanx.core.errors import ConfigError, Problem, RunError, raise_if
from phalanx.core.events import Collective, Event, Operation
from phalanx.core.files import check_writable, write_json
from phalanx.core.units import format_seconds
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.dispatch import DispatchSpec
from phalanx.plan.folding import Folding, make_folding
from phalanx.plan.model import PRESETS, ModelSpec
from phalanx.plan.pipeline import Pipeline, make_pipeline
from phalanx.plan.placement import plain_placement
from phalanx.plan.program import Sizes, StepOptions, StepProgram, step_program
from phalanx.plan.program_ops import Op
from phalanx.runtime.collectives import Collectives
from phalanx.runtime.groups import GroupCache, WorldInfo, build_groups, close_world, init_world
from phalanx.runtime.launch import StopRequest, run_local
from phalanx.simulate.calibration import calibrate
from phalanx.simulate.cost import Cost
from phalanx.simulate.hardware import Hardware, parse_cluster
from phalanx.simulate.program_cost import ProgramOracle, kind_of
from phalanx.simulate.program_time import programs_hash, run_programs
from phalanx.train.assemble import assemble, bucket_elements
from phalanx.train.step import StepParts, train_step

WORLD = 4
SEQUENCES, SEQ_LEN = 2, 32
SPEC: ModelSpec = dataclasses.replace(
    PRESETS["tiny"],
    num_layers=4,
    shared_ffn=16,
    router=dataclasses.replace(PRESETS["tiny"].router, force="balanced"),
)
PACED_FLOPS_PER_S = 2e8
FLOOR_S = 2e-3
"""Longer than any of the small operations takes on a processor of its own."""
NOT_TOLD = ("bwd.embedding", "bwd.weights")
"""Kinds of work that no recorded step tells of."""
TIMEOUT_S = 60.0
MEDIAN_BAR, WORST_BAR = 0.05, 0.12


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to take a step."""

    name: str
    folding: Folding
    microbatches: int = 2
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    dispatch: DispatchSpec = dataclasses.field(default_factory=DispatchSpec)
    recompute: Literal["none", "selective", "full"] = "none"
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    zero: Literal[0, 1] = 1

    @property
    def planned(self) -> Pipeline:
        return make_pipeline(self.pipeline, SPEC, pp=self.folding.pp, seq_len=SEQ_LEN)

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(zero=self.zero, bucket_mb=0.0)

    def programs(self) -> tuple[StepProgram, ...]:
        """Of all ranks."""
        options = StepOptions(
            num_microbatches=self.microbatches,
            recompute=self.recompute,
            cp_method=self.cp_method,
            zero=self.zero,
            bucket_elements=bucket_elements(self.optim, torch.float32),
            pipeline=self.planned,
            sizes=Sizes(sequences=SEQUENCES, seq_len=SEQ_LEN, itemsize=4),
        )
        made = partial(step_program, self.folding, SPEC, self.dispatch, options=options)
        return tuple(made(rank=rank) for rank in range(WORLD))


def _fold(**degrees: int) -> Folding:
    return make_folding(world=WORLD, **degrees)


def _pipe(schedule: Any, virtual: int | None = None) -> PipelineConfig:
    return PipelineConfig(schedule=schedule, virtual=virtual)


PLANS: tuple[Plan, ...] = (
    Plan(name="dp4", folding=_fold()),
    Plan(name="dp4 zero 0", folding=_fold(), zero=0),
    Plan(name="ep2", folding=_fold(ep=2)),
    Plan(name="ep4", folding=_fold(ep=4)),
    Plan(name="ep2 etp2", folding=_fold(ep=2, etp=2)),
    Plan(name="etp4", folding=_fold(etp=4)),
    Plan(name="tp2 ep2", folding=_fold(tp=2, ep=2)),
    Plan(name="tp2 ep4", folding=_fold(tp=2, ep=4)),
    Plan(name="tp2 etp2", folding=_fold(tp=2, etp=2)),
    Plan(name="ep4 gathered", folding=_fold(ep=4), dispatch=DispatchSpec(transport="all_gather")),
    Plan(name="ep4 recompute full", folding=_fold(ep=4), recompute="full"),
    Plan(name="ep4 recompute selective", folding=_fold(ep=4), recompute="selective"),
    Plan(name="ep4 coarse:2", folding=_fold(ep=4), dispatch=DispatchSpec(overlap="coarse:2")),
    Plan(name="ep4 coarse:4", folding=_fold(ep=4), dispatch=DispatchSpec(overlap="coarse:4")),
    Plan(name="ep2 etp2 coarse:2", folding=_fold(ep=2, etp=2), dispatch=DispatchSpec(overlap="coarse:2")),
    Plan(name="cp2 ep2 ring", folding=_fold(cp=2, ep=2)),
    Plan(name="cp2 ep2 all_gather", folding=_fold(cp=2, ep=2), cp_method="all_gather"),
    Plan(name="cp2 ep4 ulysses", folding=_fold(cp=2, ep=4), cp_method="ulysses"),
    Plan(name="cp4 ep2 ring", folding=_fold(cp=4, ep=2)),
    Plan(name="tp2 cp2 ep4 ring", folding=_fold(tp=2, cp=2, ep=4)),
    Plan(name="pp2 ep2 1f1b", folding=_fold(pp=2, ep=2), microbatches=4, pipeline=_pipe("1f1b")),
    Plan(name="pp2 ep2 gpipe", folding=_fold(pp=2, ep=2), microbatches=4, pipeline=_pipe("gpipe")),
    Plan(name="pp2 ep2 v2", folding=_fold(pp=2, ep=2), microbatches=4, pipeline=_pipe("interleaved_1f1b", 2)),
    Plan(name="pp2 tp2 1f1b", folding=_fold(pp=2, tp=2), microbatches=4, pipeline=_pipe("1f1b")),
    Plan(name="pp2 cp2 ep2 eager", folding=_fold(pp=2, cp=2, ep=2), microbatches=4, pipeline=_pipe("eager_1f1b")),
    Plan(name="pp4 1f1b", folding=_fold(pp=4), microbatches=8, pipeline=_pipe("1f1b")),
    Plan(name="pp4 eager", folding=_fold(pp=4), microbatches=8, pipeline=_pipe("eager_1f1b")),
)


@dataclass(frozen=True, kw_only=True)
class PredictArgs:
    """Step times of plans on four local ranks in paced mode, beside their predictions."""

    cluster: str | None = None
    """Cluster file of `phalanx calibrate --ranks 4`; without one the machine is measured first."""
    steps: int = 3
    """Of each plan, behind one that is not counted; the median counts."""
    plans: int = len(PLANS)
    """How many of the plans."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


def main(args: list[str]) -> int:
    """Run `phalanx bench predict ARGS...`; 1 where a bar is missed."""
    options = tyro.cli(PredictArgs, args=args, prog="phalanx bench predict", description=__doc__)
    raise_if(_problems(options), ConfigError, subject="the options")
    check_writable(options.json)
    report = measure(options)
    print(describe(report))
    if options.json is not None:
        write_json(options.json, report)
    return 0 if report["met"] else 1


def _problems(options: PredictArgs) -> list[Problem]:
    problems = []
    if options.steps < 1:
        problems.append(Problem(where="--steps", value=options.steps, rule="must be at least 1", hint="use 3"))
    if not 1 <= options.plans <= len(PLANS):
        rule, hint = f"must be 1 to {len(PLANS)}", f"use {len(PLANS)}"
        problems.append(Problem(where="--plans", value=options.plans, rule=rule, hint=hint))
    return problems


def measure(options: PredictArgs) -> dict[str, Any]:
    """All plans. Raises `RunError` where a rank fails, `ConfigError` for a cluster file that is none."""
    plans = PLANS[: options.plans]
    hardware = _hardware(options.cluster)
    predicted = [predicted_s(plan, hardware) for plan in plans]
    with tempfile.TemporaryDirectory(prefix="phalanx-predict-") as folder:
        path = Path(folder) / "told.json"
        code = run_local(lambda info, stop: _rank(info, stop, plans, options.steps, path), ranks=WORLD, threads=1)
        if code:
            raise RunError(f"a rank of the benchmark ended with {code}")
        told = json.loads(path.read_text())
    rows = [
        {
            "plan": plan.name,
            "hash": {"predicted": programs_hash(plan.programs()), "measured": found["hash"]},
            "predicted_s": seconds,
            "measured_s": statistics.median(found["seconds"]),
            "samples_s": found["seconds"],
            "late": found["late"],
            "told": found["told"],
        }
        for plan, seconds, found in zip(plans, predicted, told, strict=True)
    ]
    return _report(rows, hardware)


def _hardware(cluster: str | None) -> Hardware:
    """Of the file, or of this machine, measured now."""
    if cluster is not None:
        hardware = parse_cluster(cluster).hardware
        if hardware.ranks_per_host != WORLD:
            rule, hint = f"was measured with {hardware.ranks_per_host} ranks", f"phalanx calibrate --ranks {WORLD}"
            problem = Problem(where="--cluster", value=cluster, rule=rule, hint=hint)
            raise ConfigError([problem], subject="the options")
        return hardware
    return calibrate(measure_machine(ranks=WORLD), name="here", when=date.today().isoformat()).hardware


def _report(rows: list[dict[str, Any]], hardware: Hardware) -> dict[str, Any]:
    errors = [row["predicted_s"] / row["measured_s"] - 1 for row in rows]
    for row, error in zip(rows, errors, strict=True):
        row["error"] = error
    wrong = [abs(error) for error in errors]
    median, worst = statistics.median(wrong), max(wrong)
    return {
        "mode": "paced",
        "ranks": WORLD,
        "plans": rows,
        "median": median,
        "worst": worst,
        "worst_plan": rows[wrong.index(worst)]["plan"],
        "kendall_tau": kendall_tau([r["predicted_s"] for r in rows], [r["measured_s"] for r in rows]),
        "bars": {"median": MEDIAN_BAR, "worst": WORST_BAR},
        "met": median <= MEDIAN_BAR and worst <= WORST_BAR,
        "links": [list(row) for row in hardware.measured_links],
    }


def kendall_tau(a: Sequence[float], b: Sequence[float]) -> float:
    """Pairs that both put in the same order less those that they do not, over all pairs; 1 for fewer than two."""
    pairs = [(i, j) for i in range(len(a)) for j in range(i)]
    agree = sum(((a[i] > a[j]) - (a[i] < a[j])) * ((b[i] > b[j]) - (b[i] < b[j])) for i, j in pairs)
    return agree / len(pairs) if pairs else 1.0


def describe(report: Mapping[str, Any]) -> str:
    """A line for each plan."""
    lines = [f"step times on {report['ranks']} local ranks, paced: work waits for a given time, messages are real"]
    for row in report["plans"]:
        same = "" if row["hash"]["predicted"] == row["hash"]["measured"] else "  PLANS DIFFER"
        lines.append(
            f"  {row['plan']:<26}predicted {format_seconds(row['predicted_s']):>9}  measured {format_seconds(row['measured_s']):>9}"
            f"  {row['error']:+7.1%}  {row['late']} of {row['told']} operations late  {row['hash']['predicted']}{same}"
        )
    bars = report["bars"]
    lines.append(
        f"median error {report['median']:.1%} (bar {bars['median']:.0%}), worst {report['worst']:.1%} ({report['worst_plan']}; bar "
        f"{bars['worst']:.0%}), Kendall tau {report['kendall_tau']:.3f}: {'met' if report['met'] else 'missed'}"
    )
    return "\n".join(lines)


# ---- prediction ------------------------------------------------------------------------------------------------------------------


def paced_s(op: Op) -> float:
    """What an operation of a rank's own is made to last."""
    if op.kind != "compute" or kind_of(op.id) in NOT_TOLD:
        return 0.0
    return max(FLOOR_S, op.flops / PACED_FLOPS_PER_S)


def predicted_s(plan: Plan, hardware: Hardware) -> float:
    """Seconds of a step of the plan's program."""
    oracle = ProgramOracle(hardware=hardware, precision="fp32", seq_len=SEQ_LEN)

    def cost(op: Op, ranks: tuple[int, ...]) -> Cost:
        return oracle.cost(op, ranks) if op.kind == "collective" else Cost(paced_s(op), 0.0, "paced")

    return run_programs(plan.programs(), plan.folding, cost).seconds


# ---- one rank ------------------------------------------------------------------------------------------------------------------


def _rank(info: WorldInfo, stop: StopRequest, plans: Sequence[Plan], steps: int, path: Path) -> int:
    init_world(info, device="cpu", timeout_s=TIMEOUT_S)
    cache = GroupCache(timeout_s=TIMEOUT_S)
    told = [_measured(plan, info, cache, steps) for plan in plans]
    if info.rank == 0:
        path.write_text(json.dumps(told))
    close_world()
    return 0


class _Pace:
    """How long operations last, by id."""

    def __init__(self, program: StepProgram) -> None:
        self.seconds = {op.id: paced_s(op) for op in program.ops}

    def __call__(self, op_id: str) -> float:
        return self.seconds.get(op_id, 0.0)


def _measured(plan: Plan, info: WorldInfo, cache: GroupCache, steps: int) -> dict[str, Any]:
    """Seconds of each step of a plan, from when the last rank begins to when the last has ended."""
    comms = Collectives(timeout_s=TIMEOUT_S)
    parts, programs = _parts(plan, info.rank, cache, comms), plan.programs()
    comms.pace = pace = _Pace(programs[info.rank])
    first = plan.folding.replica_of(info.rank) * plan.microbatches
    batches = [part_of(_batch(first + j), plan.folding, info.rank) for j in range(plan.microbatches)]
    world, spans, late, count = world_axis(info, cache), list[tuple[float, float]](), 0, 0
    strange = set[str]()
    for step in range(steps + 1):
        comms.barrier(world)
        begin = time.monotonic()
        with comms.recording() as events:
            train_step(parts, batches, step=step, lr=1e-3)
        spans.append((begin, time.monotonic()))
        works = [event for event in events if isinstance(event, Operation) and event.lane == "compute"]
        lasted = [(work.op_id, work.end_s - work.begin_s) for work in works]
        strange |= _strange(programs[info.rank], events)
        count += len(lasted)
        late += sum(seconds > pace(id) + FLOOR_S for id, seconds in lasted)
    if strange:
        raise RunError(f"{plan.name}: rank {info.rank} did not do what its program says, such as {min(strange)}")
    told = comms.gather_objects((spans[1:], late, count), world)
    ranks = [each[0] for each in told]
    seconds = [
        max(rank[i][1] for rank in ranks) - max(rank[i][0] for rank in ranks) for i in range(steps)
    ]  # one machine: its ranks share a clock
    return {
        "seconds": seconds,
        "hash": programs_hash(programs),
        "late": sum(each[1] for each in told),
        "told": sum(each[2] for each in told),
    }


def _strange(program: StepProgram, events: Sequence[Event]) -> set[str]:
    """Ids that a step told and its program does not have, and collectives of the program that it did not tell."""
    told = {event.op_id for event in events if isinstance(event, Collective)}
    work = {event.op_id for event in events if isinstance(event, Operation) and event.lane == "compute"}
    planned = {op.id for op in program.collectives}
    return (told ^ planned) | {id for id in work if id not in program.by_id}


def _parts(plan: Plan, rank: int, cache: GroupCache, comms: Collectives) -> StepParts:
    pipeline = plan.planned
    groups = build_groups(plan.folding, rank=rank, cache=cache, table_ranks=pipeline.stages.table_ranks)
    ctx = ModelContext(
        spec=SPEC,
        dispatch=plan.dispatch,
        placement=plain_placement(SPEC.num_experts, plan.folding),
        groups=groups,
        comms=comms,
        dtype=torch.float32,
        device=torch.device("cpu"),
        recompute=plan.recompute,
        cp_method=plan.cp_method,
    )
    return assemble(ctx, optim=plan.optim, num_microbatches=plan.microbatches, pipeline=pipeline)


def _batch(seed: int) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, SPEC.vocab, (SEQUENCES, SEQ_LEN + 1), generator=generator)
    positions = torch.arange(SEQ_LEN).expand(SEQUENCES, SEQ_LEN)
    return TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, ((SEQ_LEN,),) * SEQUENCES)
