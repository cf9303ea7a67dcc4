"""The passes of this rank's stages: what a step collects its gradients with, and what only goes forward. With or without a pipeline.

Decides nothing about order (`plan/pipeline/run.py`) and moves nothing between ranks itself (`runtime/pipeline/runner.py`). Must never change: the gradient of
a micro-batch reaches the buffers once and whole, whichever of its passes made it; between a forward pass and its backward pass nothing is held
that the backward pass does not need (of the output its place in the graph, not its values).

    F   the stage's layers and its part of the objective
    B   all gradients
    I   the gradient of the input, of vectors, router, embedding and head; what matrices need for theirs is kept
    W   the gradients of the matrices, from what I kept

Legend: T rows of this rank between layers, H hidden, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from phalanx.kernels.ops.deferred import DeferredGradients, DeferredProduct, run
from phalanx.models import Decoder, DecoderOutput, ForwardInfo, TokenBatch
from phalanx.plan.layout import stage_params
from phalanx.plan.mapping import Folding, Stage, StagedFolding
from phalanx.plan.pipeline import Pipeline, PipelinePlan, Transfer
from phalanx.plan.pipeline.boundary import Activation, EdgePlan, on_one_host, staged_edges
from phalanx.plan.pipeline.schedule import Action, Edge, Order, WarmupChoice
from phalanx.plan.program import boundary_id
from phalanx.plan.reshard import Hosts
from phalanx.runtime.comm import Collectives, Groups
from phalanx.runtime.moe import CoScheduler
from phalanx.runtime.pipeline import Boundary, Tensors, agree_on, direct_edges, run_pipeline
from phalanx.runtime.state import GradientBuffers
from phalanx.train.step.loss import LossShare, objective
from phalanx.train.step.warmup import PassTimes, TimedPasses, choose


@dataclass(frozen=True, kw_only=True, eq=False)
class StageRunner:
    """This rank's stages, and how they are run."""

    model: Decoder
    pipeline: Pipeline
    groups: Groups
    comms: Collectives
    later: DeferredGradients | None = None
    hosts: Hosts | None = None
    """Where stages have foldings of their own: which rank is on which host (None: all on one)."""
    times: PassTimes | None = None
    """Takes down what the passes of training take, where somebody wants to know."""
    done: set[str] = field(default_factory=set)
    """Programs that have been run once. A GPU loads kernels when it first meets them, and loading may wait for all that runs there (CUDA C++ Programming Guide, lazy loading): for a message of
    a pipeline as well, whose sender waits for this rank. So in a first step nothing is computed while one is under way."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    def agree(self, num_microbatches: int) -> None:
        """Raise `RunError` where the ranks of the pipeline have different plans. Collective over the pipeline."""
        agree_on(self.pipeline.plan(num_microbatches), axis=self.groups.axis("pp"), comms=self.comms)

    def train(
        self,
        batches: Sequence[TokenBatch],
        infos: Sequence[ForwardInfo],
        *,
        valid_tokens: torch.Tensor,
        buffers: GradientBuffers,
    ) -> list[LossShare]:
        """Forward and backward of all micro-batches; gradients go to `buffers`. Collective over the pipeline.

        One share for each stage of this rank and micro-batch. `valid_tokens`: 0-d, of the whole step.
        """
        plan = self.pipeline.plan(len(batches))
        boundary = self.boundary(plan, batches, program="train")
        passes = _TrainingPasses(self, batches, infos, boundary, valid_tokens, buffers)
        timed = (
            passes
            if self.times is None
            else TimedPasses(passes, self.times, self.device, list(self.model.parameters()))
        )
        with self._beside(plan) as beside:
            run_pipeline(plan, timed, boundary, name=lambda transfer: _id(transfer, infos), beside=beside)
        self.done.add("train")
        return passes.shares

    def _beside(self, plan: PipelinePlan) -> AbstractContextManager[CoScheduler | None]:
        """What runs the pairs of the plan; None where passes run one after the other."""
        if not plan.pairs or self.groups.second is None:
            return nullcontext()
        return CoScheduler(self.comms, self.groups.second)

    @torch.no_grad()
    def forward(
        self,
        batches: Sequence[TokenBatch],
        infos: Sequence[ForwardInfo],
        keep: Callable[[Stage, int, DecoderOutput], None],
    ) -> None:
        """Forward passes alone; `keep(stage, micro-batch, output)` hears of each pass of this rank. Collective over the pipeline."""
        plan = self.pipeline.forward_plan(len(batches))
        boundary = self.boundary(plan, batches, program="forward")
        passes = _ForwardPasses(self, batches, infos, boundary, keep)
        run_pipeline(plan, passes, boundary, name=lambda transfer: _id(transfer, infos))
        self.done.add("forward")

    def boundary(self, plan: PipelinePlan, batches: Sequence[TokenBatch], *, program: str = "train") -> Boundary:
        """How such micro-batches cross between this rank's stages and others."""
        rows = {_num_rows(batch, tp=self.groups.axis("tp").size) for batch in batches}
        if len(rows) != 1:
            raise ValueError(
                f"the micro-batches of a step have {sorted(rows)} rows: a pipeline needs one shape for all"
            )
        axis = self.groups.axis("pp")
        folding = self.groups.folding
        if isinstance(folding, Folding):
            edges = direct_edges(plan, (*rows, self.model.spec.hidden), axis.ranks)
        else:
            edges = self._staged_edges(plan, folding, batches[0])
        return Boundary(
            position=folding.coord(self.groups.rank, "pp"),
            edges=edges,
            dtype=self.model.dtype,
            device=self.device,
            axis=axis,
            comms=self.comms,
            in_turn=self.device.type == "cuda" and program not in self.done,
        )

    def _staged_edges(self, plan: PipelinePlan, folding: StagedFolding, batch: TokenBatch) -> dict[Edge, EdgePlan]:
        """Plans between stages with foldings of their own, for micro-batches like this rank's part of one."""
        stage, (_, shares) = folding.of_rank(self.groups.rank), folding.share_of(self.groups.rank)
        what = Activation(
            sequences=batch.num_sequences * shares,
            seq_len=batch.tokens_BS.shape[1] * stage.cp,
            hidden=self.model.spec.hidden,
            itemsize=self.model.dtype.itemsize,
        )
        return staged_edges(
            plan.edges,
            plan.schedule.rank_of_stage,
            folding,
            replica=folding.replica_of(self.groups.rank),
            what=what,
            hosts=self.hosts if self.hosts is not None else on_one_host(range(folding.world)),
        )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(T, H) of what crossed, which may be (b, s, H)."""
    return x.view(-1, x.shape[-1])


def _own_shape(boundary: Boundary) -> tuple[int, ...]:
    """Shape of what this rank gives to, and takes from, other stages: the same on every edge."""
    shapes = {plan.forward[boundary.rank].shape for plan in boundary.edges.values() if boundary.rank in plan.forward}
    return next(iter(shapes), ())


def choose_measured(runner: StageRunner, batches: Sequence[TokenBatch], *, memory_gb: float | None) -> WarmupChoice:
    """The forwards ahead that fit what `runner.times` has taken down (`train/step/warmup.py`). Collective over the world."""
    assert runner.times is not None  # of a step that was measured
    plan = runner.pipeline.plan(len(batches))
    return choose(
        runner.pipeline,
        runner.times,
        runner.boundary(plan, batches),
        num_microbatches=len(batches),
        memory_gb=memory_gb,
        world=runner.groups.axis("world"),
    )


def _some_are_empty(infos: Sequence[ForwardInfo], groups: Groups) -> bool:
    """Whether some rank of the step has fewer micro-batches than others: the same answer on all."""
    info = infos[0]
    return info.rounds is not None and info.rounds * groups.folding.replicas != info.num_microbatches


def _num_rows(batch: TokenBatch, *, tp: int) -> int:
    return batch.num_tokens // tp if batch.token_index_T is None else len(batch.token_index_T)


def _id(transfer: Transfer, infos: Sequence[ForwardInfo]) -> str:
    info = infos[transfer.microbatch]
    return boundary_id(transfer, microbatch=info.microbatch, phase=info.phase)


def last_gradients(
    order: Order, stages: Mapping[int, Sequence[str]], deferred: frozenset[str]
) -> dict[Action, list[str]]:
    """Pass -> parameters that get their last gradient of the step in it. `stages`: the parameters of each stage of the rank."""
    last: dict[str, Action] = {}
    for action in order:
        if action.kind != "F":
            made = [n for n in stages[action.stage] if action.kind == "B" or (n in deferred) == (action.kind == "W")]
            last.update(dict.fromkeys(made, action))
    out: dict[Action, list[str]] = {}
    for name, action in last.items():
        out.setdefault(action, []).append(name)
    return out


@dataclass(frozen=True, eq=False)
class _Live:
    """What a forward pass leaves for the backward pass."""

    x_TH: torch.Tensor | None
    hidden: GradientEdge | None
    """Edge of the output that another stage has; None on the last."""
    total: GradientEdge | None
    """Edge of the stage's part of the objective, whose gradient is one; None where nothing of it depends on a parameter."""


class _TrainingPasses:
    """Holds what is between a forward and a backward pass, and no more."""

    def __init__(
        self,
        runner: StageRunner,
        batches: Sequence[TokenBatch],
        infos: Sequence[ForwardInfo],
        boundary: Boundary,
        valid_tokens: torch.Tensor,
        buffers: GradientBuffers,
    ) -> None:
        self.runner, self.batches, self.infos = runner, batches, infos
        self.shape = _own_shape(boundary)
        self.valid_tokens, self.buffers = valid_tokens, buffers
        self.stages = {stage.index: stage for stage in runner.model.stages}
        self.shares: list[LossShare] = []
        self._live: dict[tuple[int, int], _Live] = {}
        self._owed: dict[tuple[int, int], list[DeferredProduct]] = {}
        waits = {"dense_tied"} if boundary.in_turn else set[str]()
        """Families that leave after the passes. In turn one end of a pipeline would wait in the sum of the other's table for what it is yet to send it."""
        self._names = {
            i: [p.name for p in stage_params(runner.model.spec, [stage]) if p.family not in waits]
            for i, stage in self.stages.items()
        }
        self._last = self._last_gradients()
        self._are_alike = not _some_are_empty(infos, runner.groups)
        """Whether all ranks of a stage make the same gradients in each pass: else sharded ones leave at its end, for within it a rank waits for those that left before (`ShardedSums.settle`)."""
        self._leave_early = runner.groups.step is None or self._are_alike
        """Whether gradients leave as soon as they are complete. Not where messages match by their order and a rank has an empty micro-batch: it would post them at another place among the
        exchanges of layers, and NCCL asks for one order on all ranks, of different communicators too."""

    def _last_gradients(self) -> dict[Action, list[str]]:
        runner = self.runner
        order = runner.pipeline.plan(len(self.batches)).schedule.actions[
            runner.groups.folding.coord(runner.groups.rank, "pp")
        ]
        return last_gradients(order, self._names, runner.model.deferred)

    def forward(self, index: int, microbatch: int, inputs: Tensors) -> Tensors:
        stage, batch, info = self.stages[index], self.batches[microbatch], self.infos[microbatch]
        x_TH = _rows(inputs[0]) if inputs else None
        if x_TH is not None:
            x_TH.requires_grad_()
        model = self.runner.model
        output = model.run_stage(stage, x_TH, batch, info)
        total, share = objective(model, output, batch, info, stage=stage, valid_tokens=self.valid_tokens)
        self.shares.append(share)
        goal = get_gradient_edge(total) if total.requires_grad else None
        hidden = None if stage.has_head else get_gradient_edge(output.hidden_TH)
        self._live[index, microbatch] = _Live(x_TH, hidden, goal)
        return () if stage.has_head else (output.hidden_TH.detach().view(self.shape),)

    def backward(self, index: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        self._pass_begins(index, of=None)
        d_inputs = self._differentiate(Action("B", index, microbatch), d_outputs)
        if self.runner.later is not None:
            run(self.runner.later.take(), between=self.runner.comms.offer_turn)
        self.buffers.pass_ends()
        return d_inputs

    def input_gradient(self, index: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        d_inputs = self._differentiate(Action("I", index, microbatch), d_outputs)
        assert self.runner.later is not None  # made with the model, for schedules that divide the backward pass
        self._owed[index, microbatch] = self.runner.later.take()
        return d_inputs

    def weight_gradient(self, index: int, microbatch: int) -> None:
        self._announce(Action("W", index, microbatch))
        self._pass_begins(index, of=self.runner.model.deferred)
        run(self._owed.pop((index, microbatch)), between=self.runner.comms.offer_turn)
        self.buffers.pass_ends()

    def _differentiate(self, action: Action, d_outputs: Tensors) -> Tensors:
        self._announce(action)
        live = self._live.pop((action.stage, action.microbatch))
        roots: list[GradientEdge] = []
        grads: list[torch.Tensor | None] = []
        if live.hidden is not None:
            roots.append(live.hidden)
            grads.append(_rows(d_outputs[0]))  # the plan gives every stage but the last a gradient
        if live.total is not None:
            roots.append(live.total)
            # 1, which torch makes itself: given one it imports sympy (480 modules, 0.6 s), and a host that joins has not yet
            grads.append(None)
        with torch.autograd.set_multithreading_enabled(False):  # a thread of the device's own would be handed each pass
            torch.autograd.backward(roots, grads)
        if live.x_TH is None:
            return ()
        assert live.x_TH.grad is not None  # every output depends on the input
        return (live.x_TH.grad.view(self.shape),)

    def _pass_begins(self, index: int, *, of: frozenset[str] | None) -> None:
        """The last pass of a micro-batch on a stage begins; `of`: all that it may make gradients of, None: everything."""
        names = self._names[index]
        made = names if of is None else [name for name in names if name in of]
        self.buffers.pass_begins(names, made, self.runner.groups, self.runner.comms, early=self._are_alike)

    def _announce(self, action: Action) -> None:
        names = self._last.get(action)
        if names and self._leave_early:
            self.buffers.final(names, self.runner.groups, self.runner.comms)


class _ForwardPasses:
    """No graph is made; what `keep` does not keep is gone with the pass."""

    def __init__(
        self,
        runner: StageRunner,
        batches: Sequence[TokenBatch],
        infos: Sequence[ForwardInfo],
        boundary: Boundary,
        keep: Callable[[Stage, int, DecoderOutput], None],
    ) -> None:
        self.runner, self.batches, self.infos, self.keep = runner, batches, infos, keep
        self.shape = _own_shape(boundary)
        self.stages = {stage.index: stage for stage in runner.model.stages}

    def forward(self, index: int, microbatch: int, inputs: Tensors) -> Tensors:
        stage = self.stages[index]
        x_TH = _rows(inputs[0]) if inputs else None
        output = self.runner.model.run_stage(stage, x_TH, self.batches[microbatch], self.infos[microbatch])
        self.keep(stage, microbatch, output)
        return () if stage.has_head else (output.hidden_TH.view(self.shape),)

    def backward(self, index: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        raise NotImplementedError("a forward plan has no backward passes")

    input_gradient = backward

    def weight_gradient(self, index: int, microbatch: int) -> None:
        raise NotImplementedError("a forward plan has no backward passes")
