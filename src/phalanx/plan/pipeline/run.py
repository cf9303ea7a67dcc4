"""The pipeline of a run: which schedule with how many virtual stages, and which layers each stage holds.

Decides the defaults, what is legal, and the plans that every rank carries out: one for the passes of a step, one for passes that only go
forward. Must never change: both depend on the recipe, the model and the number of micro-batches alone.

A run without a pipeline is one stage on one rank, and its plan a forward and a backward pass for each micro-batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.plan.mapping import StagePlan, assign_stages, division_problems
from phalanx.plan.model import ModelSpec
from phalanx.plan.pipeline.comm import PipelinePlan, plan_pipeline
from phalanx.plan.pipeline.schedule import (
    choose_pairs,
    make_schedule,
    nearest_extra,
    schedule_problems,
    schedules,
    stage_ranks,
    why_no_pairs,
)

_PLACES = {
    "schedule.name": "pipeline.schedule",
    "schedule.virtual": "pipeline.virtual",
    "schedule.pp": "folding.pp",
    "schedule.extra_warmup": "pipeline.extra_warmup",
    "schedule.pair_passes": "pipeline.pair_passes",
    "stages.layers": "pipeline.layers",
}
"""Where the recipe says what the planner calls so."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Schedule and division of one run."""

    schedule: str
    pp: int
    virtual: int
    stages: StagePlan
    extra_warmup: tuple[int, ...] | None = None
    """Forwards of an eager schedule ahead of 1F1B, by rank (None: the most)."""
    pair_passes: bool = False
    """Whether forward passes overlap with backward passes, where that pays (`plan/pipeline/schedule/pairs.py`)."""

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are deferred."""
        return self.plan(1).schedule.splits_backward

    def plan(self, num_microbatches: int) -> PipelinePlan:
        """Passes and transfers of a step of so many micro-batches on each data-parallel rank."""
        return _plan(
            self.schedule, self.pp, self.virtual, num_microbatches, self.extra_warmup, pair_passes=self.pair_passes
        )

    def forward_plan(self, num_microbatches: int) -> PipelinePlan:
        """The forward passes of `plan` alone, in its order: for validation, counting and generation."""
        return _forward_plan(self.schedule, self.pp, self.virtual, num_microbatches, self.extra_warmup)

    def explain(self) -> str:
        """Schedule and stages in a few lines that a person reads."""
        about = schedules()[self.schedule].about
        head = f"pipeline of {self.pp} ranks x {self.virtual} virtual stages, {self.schedule}: {about}"
        extra = self.plan(1).schedule.extra_warmup
        ahead = f"\nforwards ahead of 1F1B, by rank: {' '.join(map(str, extra))}" if extra else ""
        beside = "\nforward passes overlap with backward passes" if self.pair_passes else ""
        return f"{head}{ahead}{beside}\n{self.stages.explain()}"


@lru_cache(maxsize=32)
def _plan(
    name: str,
    pp: int,
    virtual: int,
    num_microbatches: int,
    extra_warmup: tuple[int, ...] | None,
    *,
    pair_passes: bool = False,
) -> PipelinePlan:
    schedule = make_schedule(name, pp=pp, virtual=virtual, num_microbatches=num_microbatches, extra_warmup=extra_warmup)
    return plan_pipeline(schedule, pairs=choose_pairs(schedule) if pair_passes else ())


@lru_cache(maxsize=32)
def _forward_plan(
    name: str, pp: int, virtual: int, num_microbatches: int, extra_warmup: tuple[int, ...] | None
) -> PipelinePlan:
    """A part of an order that comes to its end comes to its end, if nothing in it waits for what was left out. Nothing is held for a backward pass."""
    whole = _plan(name, pp, virtual, num_microbatches, extra_warmup).schedule
    actions = tuple(tuple(action for action in order if action.kind == "F") for order in whole.actions)
    return plan_pipeline(
        dataclasses.replace(whole, name=f"{name}, forward", actions=actions, max_live=(0,) * pp, extra_warmup=())
    )


def choose_schedule(config: PipelineConfig) -> tuple[str, int]:
    """Name and virtual stages, with what is not set filled in: 1F1B, interleaved where there are virtual stages."""
    name = config.schedule
    if name is None:
        name = "interleaved_1f1b" if (config.virtual or 1) > 1 else "1f1b"
    rule = schedules().get(name)  # none: a name that `schedule_problems` refuses
    virtual = config.virtual if config.virtual is not None else (rule.virtual if rule is not None else None) or 1
    return name, virtual


def schedule_setting_problems(config: PipelineConfig, *, pp: int) -> list[Problem]:
    """What is wrong with schedule and virtual stages, whatever the model."""
    name, virtual = choose_schedule(config)
    asked = (0,) if config.extra_warmup == "auto" else config.extra_warmup  # none are legal wherever any are
    found = schedule_problems(name, pp=pp, virtual=virtual, num_microbatches=1, extra_warmup=asked)
    if config.extra_warmup == "auto":
        found = [dataclasses.replace(p, value="auto") if p.where == "schedule.extra_warmup" else p for p in found]
    return [_in_recipe(p) for p in found]


def _given_extra(config: PipelineConfig) -> tuple[int, ...] | None:
    """What the recipe says; None where it says nothing, or leaves it to a measurement."""
    return None if isinstance(config.extra_warmup, str) else config.extra_warmup


def _extra_of(config: PipelineConfig, pp: int) -> tuple[int, ...] | None:
    given = _given_extra(config)
    return nearest_extra(given, pp=pp) if given is not None else None


def pipeline_problems(config: PipelineConfig, spec: ModelSpec, *, pp: int) -> list[Problem]:
    """Why `spec` cannot run in such a pipeline, each with a legal value nearby."""
    _, virtual = choose_schedule(config)
    problems = schedule_setting_problems(config, pp=pp)
    if not problems:
        problems = _too_many_stages(config, spec, pp=pp)
    if not problems:
        problems = division_problems(spec.num_layers, pp * virtual, layers=config.layers)
    return [_in_recipe(problem) for problem in problems]


def pairing_problems(config: PipelineConfig, *, pp: int, num_microbatches: int) -> list[Problem]:
    """Why passes cannot run beside one another, or why that cannot pay, with so many micro-batches on each data-parallel rank."""
    if not config.pair_passes or schedule_setting_problems(config, pp=pp):
        return []
    where = "pipeline.pair_passes"
    if config.extra_warmup == "auto":
        rule = 'cannot go with pipeline.extra_warmup = "auto", which measures passes by themselves'
        return [Problem(where=where, value=True, rule=rule, hint="leave pipeline.extra_warmup out")]
    if pp == 1 and num_microbatches == 1:
        rule = "has nothing to pair: each rank has one micro-batch a step, and no pipeline"
        return [Problem(where=where, value=True, rule=rule, hint="halve train.micro_batch")]
    name, virtual = choose_schedule(config)
    made = make_schedule(
        name, pp=pp, virtual=virtual, num_microbatches=num_microbatches, extra_warmup=_extra_of(config, pp)
    )
    return [_in_recipe(problem) for problem in why_no_pairs(made)]


def _too_many_stages(config: PipelineConfig, spec: ModelSpec, *, pp: int) -> list[Problem]:
    """More stages than there is to hold; the fault of `virtual` where it was chosen, else of `pp`."""
    name, virtual = choose_schedule(config)
    most, count = spec.num_layers + 2, pp * virtual
    if count <= most:
        return []
    holds = f"{spec.num_layers} layers, embedding and head fill at most {most}"
    text = f"with {virtual} virtual and {pp} pipeline ranks there are {count} stages, and {holds}"
    if most // pp and schedules()[name].virtual is None:
        return [Problem(where="pipeline.virtual", value=virtual, rule=text, hint=f"nearest legal: {most // pp}")]
    fewer = min(most // virtual, spec.num_layers)
    hint = f"nearest legal: folding.pp {fewer}" if fewer else "nearest legal: pipeline.virtual 1"
    return [Problem(where="folding.pp", value=pp, rule=text, hint=hint)]


def _in_recipe(problem: Problem) -> Problem:
    head, bracket, rest = problem.where.partition("[")
    return dataclasses.replace(problem, where=_PLACES.get(head, head) + bracket + rest)


def make_pipeline(config: PipelineConfig, spec: ModelSpec, *, pp: int, seq_len: int) -> Pipeline:
    """The pipeline of `spec` over `pp` ranks. Raises `ConfigError` naming every problem.

    `extra_warmup = "auto"` stands for the most here: a run that measures chooses as many or fewer.
    """
    raise_if(pipeline_problems(config, spec, pp=pp), ConfigError, subject=f"the pipeline of {spec.name}")
    name, virtual = choose_schedule(config)
    ranks = stage_ranks(name, pp=pp, virtual=virtual)
    return Pipeline(
        schedule=name,
        pp=pp,
        virtual=virtual,
        stages=assign_stages(spec, ranks, seq_len=seq_len, layers=config.layers),
        extra_warmup=_extra_of(config, pp),
        pair_passes=config.pair_passes,
    )


def plain_pipeline(spec: ModelSpec, *, pp: int = 1) -> Pipeline:
    """What nobody has said anything about: everything on one stage, or 1F1B; layers divided by their weights' cost."""
    return make_pipeline(PipelineConfig(), spec, pp=pp, seq_len=1)
