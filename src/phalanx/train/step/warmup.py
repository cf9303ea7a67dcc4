"""How many forwards ahead of 1F1B a run does, where the recipe leaves it to a measurement (`pipeline.extra_warmup = "auto"`).

    first step     as 1F1B, which holds least; each pass is timed, and what a micro-batch holds is counted
    then           a few transfers through the whole pipeline with passes that do nothing: what a transfer takes between these ranks
    all ranks      tell one another, and choose by `plan/pipeline/schedule/eager.py`: the same figures, so the same choice everywhere

An elastic run does so in each generation, whose ranks and mapping are others. Decides nothing itself. Must never change: orders do not change sums, so a run has the same bits whatever is chosen, also when it goes on
on other machines and chooses anew.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, PlanError, Problem
from phalanx.plan.pipeline import Pipeline, PipelinePlan, Run, plan_pipeline
from phalanx.plan.pipeline.schedule import Action, ScheduleCosts, WarmupChoice, choose_warmup, make_schedule
from phalanx.runtime.comm import Axis, synchronize
from phalanx.runtime.pipeline import Boundary, Passes, Tensors, run_pipeline

PROBES = 8
"""Micro-batches of a probe: enough that the way through the pipeline, which the formula takes out, is not most of it."""
ROUNDS = 3
MIN_S = 1e-9


def measures_warmup(recipe: Recipe, pipeline: Pipeline) -> bool:
    """Whether the first step on such a pipeline is measured, and the others follow what it took."""
    return recipe.pipeline.extra_warmup == "auto" and pipeline.pp > 1


def with_none_ahead(pipeline: Pipeline) -> Pipeline:
    """The pipeline of a first step that is measured."""
    return dataclasses.replace(pipeline, extra_warmup=(0,) * pipeline.pp)


class PassTimes:
    """Seconds of this rank's passes in one step, and the bytes that its first forward pass has left for the backward pass."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self._host: dict[str, list[float]] = {}
        self._device: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timed(self, kind: str, device: torch.device) -> Iterator[None]:
        """Time what runs inside, as the device sees it."""
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._device.append((kind, begin, end))
            return
        begin_s = time.perf_counter()
        yield
        self._host.setdefault(kind, []).append(time.perf_counter() - begin_s)

    def median_s(self, kind: str) -> float:
        """Median seconds of the passes of one kind; 0 where there were none."""
        for name, begin, end in self._device:
            end.synchronize()  # SYNC: the step is over, and its times are wanted on the host
            self._host.setdefault(name, []).append(begin.elapsed_time(end) / 1e3)
        self._device.clear()
        return statistics.median(self._host.get(kind, [0.0]))


class TimedPasses:
    """`passes`, with what each takes in `times`."""

    def __init__(
        self, passes: Passes, times: PassTimes, device: torch.device, parameters: Sequence[torch.Tensor]
    ) -> None:
        self.passes, self.times, self.device = passes, times, device
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        with self.times.timed("F", self.device):
            if self.times.live_bytes:
                return self.passes.forward(stage, microbatch, inputs)
            with self._counted():
                return self.passes.forward(stage, microbatch, inputs)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count every storage that autograd keeps, once; parameters are there anyway."""
        kept: dict[int, int] = {}

        def keep(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in self.parameters:
                kept[storage.data_ptr()] = storage.nbytes()
            return x.detach()  # an output that held itself would never be freed

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            yield
        self.times.live_bytes = max(1, sum(kept.values()))

    def backward(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        with self.times.timed("B", self.device):
            return self.passes.backward(stage, microbatch, d_outputs)

    def input_gradient(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        with self.times.timed("I", self.device):
            return self.passes.input_gradient(stage, microbatch, d_outputs)

    def weight_gradient(self, stage: int, microbatch: int) -> None:
        with self.times.timed("W", self.device):
            self.passes.weight_gradient(stage, microbatch)


# ---- transfers ------------------------------------------------------------------------------------------------------------------


class _Nothing:
    """Passes that take no time: they give zeros of the shapes that cross."""

    def __init__(self, plan: PipelinePlan, boundary: Boundary) -> None:
        program = plan.programs[boundary.position]
        self.runs = {op.action: op for op in program if isinstance(op, Run)}
        self.boundary = boundary
        self.zeros: dict[tuple[int, ...], torch.Tensor] = {}

    def _give(self, action: Action) -> Tensors:
        out = []
        for transfer in self.runs[action].gives:
            shape = self.boundary.route(transfer).shape
            if shape not in self.zeros:
                self.zeros[shape] = torch.zeros(shape, dtype=self.boundary.dtype, device=self.boundary.device)
            out.append(self.zeros[shape])
        return tuple(out)

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        return self._give(Action("F", stage, microbatch))

    def backward(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        return self._give(Action("B", stage, microbatch))

    def input_gradient(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        raise NotImplementedError("a probe has whole backward passes")

    def weight_gradient(self, stage: int, microbatch: int) -> None:
        raise NotImplementedError("a probe has whole backward passes")


def transfer_seconds(boundary: Boundary, *, pp: int) -> float:
    """What one transfer between neighbouring stages takes, as this rank sees it. Collective over the pipeline.

    With passes that take no time, k micro-batches are through pp stages after pp - 2 + k transfers, and their gradients after as many.
    """
    plan = plan_pipeline(make_schedule("gpipe", pp=pp, virtual=1, num_microbatches=PROBES))
    found = []
    for _ in range(ROUNDS + 1):
        boundary.comms.barrier(boundary.axis)
        begin_s = time.perf_counter()
        run_pipeline(plan, _Nothing(plan, boundary), boundary)
        synchronize(boundary.device)  # SYNC: a measurement, once a run
        found.append((time.perf_counter() - begin_s) / (2 * (pp - 2 + PROBES)))
    return min(found[1:])  # the first opens connections


# ---- the choice -----------------------------------------------------------------------------------------------------------------


def choose(
    pipeline: Pipeline,
    times: PassTimes,
    boundary: Boundary,
    *,
    num_microbatches: int,
    memory_gb: float | None,
    world: Axis,
) -> WarmupChoice:
    """The forwards ahead for these ranks. Collective over the world: stages that share experts must do the same in the same order.

    Raises `ConfigError` on all ranks where not even 1F1B fits `memory_gb`.
    """
    figures = {kind: times.median_s(kind) for kind in "FBIW"}
    told = boundary.comms.gather_objects(
        (boundary.position, figures, times.live_bytes, transfer_seconds(boundary, pp=pipeline.pp)), world
    )
    by_place = [[fact for fact in told if fact[0] == place] for place in range(pipeline.pp)]
    seconds = {kind: tuple(max(MIN_S, *(fact[1][kind] for fact in facts)) for facts in by_place) for kind in "FBIW"}
    try:
        return choose_warmup(
            pipeline.schedule,
            _costs(seconds, splits=pipeline.splits_backward, transfer_s=max(fact[3] for fact in told)),
            num_microbatches=num_microbatches,
            live_bytes=[max(fact[2] for fact in facts) for facts in by_place],
            budget_bytes=None if memory_gb is None else int(memory_gb * 1e9),
        )
    except PlanError as error:
        problems = [
            Problem(where="pipeline.memory_gb", value=memory_gb, rule=p.rule, hint=p.hint) for p in error.problems
        ]
        raise ConfigError(problems, subject="the recipe") from error


def _costs(seconds: Mapping[str, tuple[float, ...]], *, splits: bool, transfer_s: float) -> ScheduleCosts:
    """Costs by place of the pipeline; a backward pass is whole or divided, and what was not measured is its half or its sum."""
    halves = tuple(b / 2 for b in seconds["B"])
    inputs, weights = (seconds["I"], seconds["W"]) if splits else (halves, halves)
    return ScheduleCosts(
        forward=seconds["F"],
        backward=tuple(i + w for i, w in zip(inputs, weights, strict=True)),
        input_grad=inputs,
        weight_grad=weights,
        p2p=transfer_s,
    )
