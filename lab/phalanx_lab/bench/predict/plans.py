"""The plans of `phalanx bench predict`, how long their work is made to last, and their predictions.

Decides what is paced: every operation of a rank's own that a recorded step tells, FLOPs over a rate, or a floor. Weight gradients that are put off
are not told of by a run, so they are not paced and cost nothing in the prediction; schedules that put them off are left out.

*Predicted* is the program of the plan (`plan/program/step.py`) on the clock of `simulate/program/clock.py`: work costs what it is paced to, links what `measure_links` found on those
very links. Between the end of an operation and the posting of a collective (`Glue.post_s`), and between two collectives (`Glue.between_s`), passes what a chain
of operations and collectives with nothing in between takes there: being woken, autograd, telling. Nothing is fitted to a step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from phalanx.core.config import OptimConfig, PipelineConfig
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.mapping.stage_foldings import AnyFolding, parse_stages
from phalanx.plan.model.model import PRESETS, ModelSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.pipeline.boundary.stage_edges import Activation, edges_for
from phalanx.plan.pipeline.run import Pipeline, make_pipeline
from phalanx.plan.program.ops import Op
from phalanx.plan.program.step import StepOptions, StepProgram, step_program
from phalanx.plan.program.work import Sizes
from phalanx.simulate.hardware.clusters import Hardware
from phalanx.simulate.hardware.cost import Cost
from phalanx.simulate.program.clock import ProgramTimeline, run_programs
from phalanx.simulate.program.cost import ProgramOracle, kind_of
from phalanx.train.assembly import bucket_elements

WORLD = 4
SEQUENCES, SEQ_LEN = 2, 32
SPEC: ModelSpec = dataclasses.replace(
    PRESETS["tiny"],
    num_layers=4,
    shared_ffn=16,
    router=dataclasses.replace(PRESETS["tiny"].router, force="balanced"),
)
PACED_FLOPS_PER_S = 1e8
FLOOR_S = 4e-3
"""Longer than any of the small operations takes on a processor of its own."""
NOT_TOLD = ("bwd.weights",)
"""Kinds of work that no recorded step tells of."""


@dataclass(frozen=True, kw_only=True)
class PlanSetup:
    """What a plan runs: a micro-batch is `sequences` of `seq_len` tokens, in float32."""

    world: int
    spec: ModelSpec
    sequences: int
    seq_len: int


PACED = PlanSetup(world=WORLD, spec=SPEC, sequences=SEQUENCES, seq_len=SEQ_LEN)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One way to take a step."""

    name: str
    folding: AnyFolding
    microbatches: int = 2
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    dispatch: DispatchSpec = dataclasses.field(default_factory=DispatchSpec)
    recompute: Literal["none", "selective", "full"] = "none"
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    zero: Literal[0, 1] = 1
    setup: PlanSetup = PACED

    @property
    def planned(self) -> Pipeline:
        return make_pipeline(self.pipeline, self.setup.spec, pp=self.folding.pp, seq_len=self.setup.seq_len)

    @property
    def optim(self) -> OptimConfig:
        return OptimConfig(zero=self.zero, bucket_mb=0.0)

    def programs(self) -> tuple[StepProgram, ...]:
        """Programs of all ranks."""
        of = self.setup
        options = StepOptions(
            num_microbatches=self.microbatches,
            recompute=self.recompute,
            cp_method=self.cp_method,
            zero=self.zero,
            bucket_elements=bucket_elements(self.optim, torch.float32),
            pipeline=self.planned,
            sizes=Sizes(sequences=of.sequences, seq_len=of.seq_len, itemsize=4),
        )
        plan, what = self.planned.plan(self.microbatches), Activation(of.sequences, of.seq_len, of.spec.hidden, 4)
        programs = []
        for rank in range(of.world):
            own = dataclasses.replace(options, edges=edges_for(self.folding, plan, rank=rank, what=what))
            programs.append(step_program(self.folding, of.spec, self.dispatch, rank=rank, options=own))
        return tuple(programs)


def _fold(**degrees: int) -> Folding:
    return make_folding(world=WORLD, **degrees)


def pipe(schedule: Any, virtual: int | None = None) -> PipelineConfig:
    """Settings of a pipeline."""
    return PipelineConfig(schedule=schedule, virtual=virtual)


PLANS: tuple[StepPlan, ...] = (
    StepPlan(name="dp4", folding=_fold()),
    StepPlan(name="dp4 zero 0", folding=_fold(), zero=0),
    StepPlan(name="ep2", folding=_fold(ep=2)),
    StepPlan(name="ep4", folding=_fold(ep=4)),
    StepPlan(name="ep2 etp2", folding=_fold(ep=2, etp=2)),
    StepPlan(name="etp4", folding=_fold(etp=4)),
    StepPlan(name="tp2 ep2", folding=_fold(tp=2, ep=2)),
    StepPlan(name="tp2 ep4", folding=_fold(tp=2, ep=4)),
    StepPlan(name="tp2 etp2", folding=_fold(tp=2, etp=2)),
    StepPlan(name="ep4 gathered", folding=_fold(ep=4), dispatch=DispatchSpec(transport="all_gather")),
    StepPlan(name="ep4 recompute full", folding=_fold(ep=4), recompute="full"),
    StepPlan(name="ep4 recompute selective", folding=_fold(ep=4), recompute="selective"),
    StepPlan(name="ep4 coarse:2", folding=_fold(ep=4), dispatch=DispatchSpec(overlap="coarse:2")),
    StepPlan(name="ep4 coarse:4", folding=_fold(ep=4), dispatch=DispatchSpec(overlap="coarse:4")),
    StepPlan(name="ep2 etp2 coarse:2", folding=_fold(ep=2, etp=2), dispatch=DispatchSpec(overlap="coarse:2")),
    StepPlan(name="cp2 ep2 ring", folding=_fold(cp=2, ep=2)),
    StepPlan(name="cp2 ep2 all_gather", folding=_fold(cp=2, ep=2), cp_method="all_gather"),
    StepPlan(name="cp2 ep4 ulysses", folding=_fold(cp=2, ep=4), cp_method="ulysses"),
    StepPlan(name="cp4 ep2 ring", folding=_fold(cp=4, ep=2)),
    StepPlan(name="tp2 cp2 ep4 ring", folding=_fold(tp=2, cp=2, ep=4)),
    StepPlan(name="pp2 ep2 1f1b", folding=_fold(pp=2, ep=2), microbatches=4, pipeline=pipe("1f1b")),
    StepPlan(name="pp2 ep2 gpipe", folding=_fold(pp=2, ep=2), microbatches=4, pipeline=pipe("gpipe")),
    StepPlan(name="pp2 ep2 v2", folding=_fold(pp=2, ep=2), microbatches=4, pipeline=pipe("interleaved_1f1b", 2)),
    StepPlan(name="pp2 tp2 1f1b", folding=_fold(pp=2, tp=2), microbatches=4, pipeline=pipe("1f1b")),
    StepPlan(name="pp2 cp2 ep2 eager", folding=_fold(pp=2, cp=2, ep=2), microbatches=4, pipeline=pipe("eager_1f1b")),
    StepPlan(name="pp4 1f1b", folding=_fold(pp=4), microbatches=8, pipeline=pipe("1f1b")),
    StepPlan(name="pp4 eager", folding=_fold(pp=4), microbatches=8, pipeline=pipe("eager_1f1b")),
    StepPlan(name="ep4 tiles", folding=_fold(ep=4), dispatch=DispatchSpec(overlap="tiles")),
    StepPlan(name="ep2 etp2 tiles", folding=_fold(ep=2, etp=2), dispatch=DispatchSpec(overlap="tiles")),
    StepPlan(name="ep4 fine", folding=_fold(ep=4), dispatch=DispatchSpec(overlap="fine")),
    StepPlan(name="tp2 ep4 fine", folding=_fold(tp=2, ep=4), dispatch=DispatchSpec(overlap="fine")),
    StepPlan(
        name="stages tp2/dp2.ep2", folding=parse_stages(("tp2", "dp2.ep2")), microbatches=4, pipeline=pipe("1f1b")
    ),
    StepPlan(
        name="stages dp2.ep2/tp2.ep2",
        folding=parse_stages(("dp2.ep2", "tp2.ep2")),
        microbatches=4,
        pipeline=pipe("1f1b"),
    ),
    StepPlan(
        name="stages tp1/tp2.ep2/tp1",
        folding=parse_stages(("tp1", "tp2.ep2", "tp1")),
        microbatches=4,
        pipeline=pipe("1f1b"),
    ),
    StepPlan(
        name="stages cp2/dp2 eager", folding=parse_stages(("cp2", "dp2")), microbatches=4, pipeline=pipe("eager_1f1b")
    ),
)


@dataclass(frozen=True)
class Glue:
    """Seconds that pass between an operation and what follows it, though neither is made to last so long."""

    post_s: float = 0.0
    """Seconds from the end of an operation to the posting of a collective behind it."""
    between_s: float = 0.0
    """Seconds from the end of a collective to the posting of another."""


def paced_s(op: Op) -> float:
    """What an operation of a rank's own is made to last."""
    if op.kind != "compute" or kind_of(op.id) in NOT_TOLD:
        return 0.0
    return max(FLOOR_S, op.flops / PACED_FLOPS_PER_S)


@dataclass(frozen=True, kw_only=True)
class PlanPrediction:
    """A plan's program on a clock, with the links of `hardware`."""

    plan: StepPlan
    hardware: Hardware
    glue: Glue = Glue()

    def timeline(self) -> ProgramTimeline:
        """Every operation of every rank."""
        return run_programs(self._programs, self.plan.folding, self._cost)

    @cached_property
    def _programs(self) -> tuple[StepProgram, ...]:
        return self.plan.programs()

    @cached_property
    def _oracle(self) -> ProgramOracle:
        return ProgramOracle(hardware=self.hardware, precision="fp32", seq_len=self.plan.setup.seq_len)

    @cached_property
    def _glued(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for program in self._programs:
            found |= glued(program, self.glue)
        return found

    def _cost(self, op: Op, ranks: tuple[int, ...]) -> Cost:
        if op.kind == "collective":
            found = self._oracle.cost(op, ranks)
            return dataclasses.replace(found, seconds=found.seconds + self._glued.get(op.id, 0.0))
        return Cost(paced_s(op), 0.0, "paced")


def glued(program: StepProgram, glue: Glue) -> dict[str, float]:
    """How much later each collective is posted than what stands before it has ended."""
    found: dict[str, float] = {}
    before: Op | None = None
    for op in program.ops:
        if op.kind == "collective":
            follows = op.posted_after or before is None or before.kind != "collective" or before.beside
            found[op.id] = glue.post_s if follows else glue.between_s
        if op.kind == "collective" or paced_s(op):
            before = op
    return found


def predicted_s(plan: StepPlan, hardware: Hardware, *, glue: Glue = Glue()) -> float:
    """Seconds of a step of the plan's program."""
    return PlanPrediction(plan=plan, hardware=hardware, glue=glue).timeline().seconds
