"""Puts together what a step works on: model, gradient buffers, sharded state, optimizer. Trainer, benchmark and verification share it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from phalanx.core.config import OptimConfig
from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.fixed_point import FixedSums
from phalanx.kernels.device import WeightSums
from phalanx.kernels.ops.deferred import DeferredGradients
from phalanx.models import Decoder, ModelContext
from phalanx.plan.layout import FlatLayout, flat_layouts, stage_params
from phalanx.plan.mapping import GRADIENT_RULES, GradientRule
from phalanx.plan.model import buffers
from phalanx.plan.pipeline import Pipeline, plain_pipeline
from phalanx.plan.reshard import equal_hosts
from phalanx.runtime.state import GradientBuffers, ShardedState, StateSums, borrowable
from phalanx.train.step import AdamW, ExactSums, StepParts


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of master weights, moments and accumulated gradients for a compute type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def moment_dtype(optim: OptimConfig, dtype: torch.dtype) -> torch.dtype:
    """Type of both moments for a compute type."""
    return torch.bfloat16 if optim.state_dtype == "bfloat16" else state_dtype(dtype)


def bucket_elements(optim: OptimConfig, dtype: torch.dtype) -> int:
    """Elements of a gradient bucket (0: a family is not divided)."""
    return math.ceil(optim.bucket_mb * 1e6 / dtype.itemsize)


def assemble(
    ctx: ModelContext,
    *,
    optim: OptimConfig,
    num_microbatches: int,
    pipeline: Pipeline | None = None,
    rules: Mapping[str, GradientRule] = GRADIENT_RULES,
    samples: int | None = None,
    exact: ExactSums | None = None,
    holders: int = 1,
    hosts: Sequence[int] | None = None,
    racks: Sequence[int] = (),
) -> StepParts:
    """This rank's part of a freshly initialised run; where weights are not drawn, its state has no memory yet (`ShardedState.make_room`). `num_microbatches` = micro-batches of one step on this rank, empty ones included.

    `pipeline` (None: 1F1B over the pipeline ranks of the folding, if it has several) decides the stages, whatever `ctx` says of them.
    `rules` is an argument so that `phalanx verify` can plant faults in it. `samples` = micro-batches of one step over all ranks, where ranks
    may have unequal numbers of them; `exact`: results do not depend on the number of ranks (docs/explanation/exact-mode.md). `holders`: hosts that keep each shard of
    the optimizer state, `hosts` of all ranks (None: each stands for one), `racks` too (empty: not known).
    """
    pipeline = pipeline if pipeline is not None else plain_pipeline(ctx.spec, pp=ctx.groups.folding.pp)
    ctx = _with_sums(ctx, pipeline, exact)
    model, dtype = Decoder(ctx), state_dtype(ctx.dtype)
    params = dict(model.named_parameters())
    layouts = flat_layouts(
        stage_params(ctx.spec, ctx.stages), ctx.groups.folding, ctx.placement, ctx.groups.rank, zero=optim.zero, rules=rules,
        bucket_elements=bucket_elements(optim, dtype), expert_state=ctx.expert_state, holders=holders, hosts=hosts, racks=racks,
    )  # fmt: skip
    gradients = GradientBuffers(
        params, layouts, dtype=dtype, borrowed=_borrowed(layouts, ctx, num_microbatches=num_microbatches), fixed=ctx.sums,
        summands=1 if exact is None else exact.summands, lanes=ctx.lanes, summed=ctx.comms.sums is not None, zero=optim.zero,
        weight_sums=ctx.weight_sums,
    )  # fmt: skip
    return StepParts(
        model=model, spec=ctx.spec, groups=ctx.groups, comms=ctx.comms, buffers=gradients, state=_state(model, layouts, ctx, moment_dtype(optim, ctx.dtype)),
        optimizer=AdamW(optim, _update_kernels(ctx), ctx.lanes), clip_norm=optim.clip_norm, pipeline=pipeline,
        placement=None if ctx.placement.is_plain else ctx.placement, later=ctx.later, kernels=ctx.kernels, lanes=ctx.lanes,
        samples=samples, exact=exact, fused=ctx.fused, hosts=equal_hosts(ctx.host_of_rank) if ctx.host_of_rank else None,
    )  # fmt: skip


def _with_sums(ctx: ModelContext, pipeline: Pipeline, exact: ExactSums | None) -> ModelContext:
    """`ctx` with the stages of `pipeline`, and how its modules sum gradients."""
    later = DeferredGradients() if pipeline.splits_backward else None
    sums = None if exact is None else FixedSums(chunk_rows=exact.chunk_rows)
    by_products = exact is None and later is None and ctx.kernels == "fast" and ctx.device.type != "cpu"
    weight_sums = WeightSums() if by_products else ctx.weight_sums
    ctx = dataclasses.replace(ctx, pipeline=pipeline.stages, later=later, sums=sums, weight_sums=weight_sums)
    raise_if(_pipeline_problems(ctx, pipeline), PlanError, subject="the pipeline")
    return ctx


def _state(model: Decoder, layouts: Mapping[str, FlatLayout], ctx: ModelContext, moments: torch.dtype) -> ShardedState:
    """Sharded state of the model, with those of its buffers that a checkpoint holds."""
    wanted = {name for name, _ in buffers(ctx.spec)}
    state = ShardedState(
        dict(model.named_parameters()),
        layouts,
        groups=ctx.groups,
        buffers={name: tensor for name, tensor in model.named_buffers() if name in wanted},
        dtype=state_dtype(ctx.dtype),
        moments=moments,
        has_room=ctx.drawn,
    )
    if ctx.comms.sums is not None:
        state.sums = StateSums(rows=ctx.lanes.rows)
        state.sums.published(state.read_in_a_step(), {})
    return state


def _update_kernels(ctx: ModelContext) -> Impl:
    """Kernels of exact mode: torch's fused update gives the last elements of a shard other bits than the same elements inside a
    longer one."""
    return "reference" if ctx.sums is not None and ctx.lanes.rows is None else ctx.kernels


def _borrowed(layouts: Mapping[str, FlatLayout], ctx: ModelContext, *, num_microbatches: int) -> frozenset[str]:
    """A tied table that two stages of this rank use gets two gradients from one micro-batch."""
    if ctx.sums is not None:
        return frozenset()  # rounding to fixed point is part of every gradient
    found = borrowable(layouts, ctx.groups, num_microbatches=num_microbatches)
    if len(ctx.stages) == 1:
        return found
    return frozenset(key for key in found if layouts[key].rule.family != "dense_tied")


def _pipeline_problems(ctx: ModelContext, pipeline: Pipeline) -> list[Problem]:
    """Groups that were made for another pipeline."""
    folding, problems = ctx.groups.folding, []
    if folding.pp != pipeline.pp:
        rule = f"is not the {pipeline.pp} ranks that the pipeline was planned for"
        problems.append(Problem(where="folding.pp", value=folding.pp, rule=rule))
    elif ctx.spec.table_at_both_ends:
        wanted = folding.embedding_groups(pipeline.stages.table_ranks)
        found = ctx.groups.axis("embedding").ranks
        if found not in wanted:
            rule = f"do not share the embedding: stage ranks {pipeline.stages.table_ranks} hold it (build_groups(table_ranks=...))"
            problems.append(Problem(where="groups.embedding", value=found, rule=rule))
    return problems
