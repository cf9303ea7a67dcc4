"""Puts together what a step works on: model, gradient buffers, sharded state, optimizer. Trainer, benchmark and verification share it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from phalanx.core.config import OptimConfig
from phalanx.models.context import ModelContext
from phalanx.models.decoder import Decoder
from phalanx.plan.folding import GRADIENT_RULES, GradientRule
from phalanx.plan.layout import flat_layouts
from phalanx.plan.model import buffers, parameters
from phalanx.runtime.gradients import GradientBuffers, borrowable
from phalanx.runtime.optimizer_state import ShardedState
from phalanx.train.optim import AdamW
from phalanx.train.step import StepParts


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of master weights, moments and accumulated gradients for a compute type."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def bucket_elements(optim: OptimConfig, dtype: torch.dtype) -> int:
    """Elements of a gradient bucket (0: a family is not divided)."""
    return math.ceil(optim.bucket_mb * 1e6 / dtype.itemsize)


def assemble(
    ctx: ModelContext,
    *,
    optim: OptimConfig,
    num_microbatches: int,
    rules: Mapping[str, GradientRule] = GRADIENT_RULES,
) -> StepParts:
    """This rank's part of a freshly initialised run. `num_microbatches` = micro-batches of one step on this rank.

    `rules` is an argument so that `phalanx verify` can plant faults in it.
    """
    model = Decoder(ctx)
    params = dict(model.named_parameters())
    wanted = {name for name, _ in buffers(ctx.spec)}
    layouts = flat_layouts(
        parameters(ctx.spec),
        ctx.groups.folding,
        ctx.placement,
        ctx.groups.rank,
        zero=optim.zero,
        rules=rules,
        bucket_elements=bucket_elements(optim, state_dtype(ctx.dtype)),
    )
    state = ShardedState(
        params,
        layouts,
        groups=ctx.groups,
        buffers={name: tensor for name, tensor in model.named_buffers() if name in wanted},
        dtype=state_dtype(ctx.dtype),
    )
    gradients = GradientBuffers(
        params,
        layouts,
        dtype=state_dtype(ctx.dtype),
        borrowed=borrowable(layouts, ctx.groups, num_microbatches=num_microbatches),
    )
    return StepParts(
        model=model,
        spec=ctx.spec,
        groups=ctx.groups,
        comms=ctx.comms,
        buffers=gradients,
        state=state,
        optimizer=AdamW(optim, ctx.kernels, ctx.lanes),
        clip_norm=optim.clip_norm,
        kernels=ctx.kernels,
        lanes=ctx.lanes,
    )
