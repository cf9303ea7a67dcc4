"""What a rank steps on and with: groups, modules, buffers and state for its place in a mapping, and the samples that reach it.

Must never change: which samples form a step depends on the step alone, never on the number of ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from phalanx.core.config import Recipe
from phalanx.core.processor import this_processor
from phalanx.data import Loader, MicroBatch, PreparedData
from phalanx.models import TokenBatch, part_of
from phalanx.plan import microbatches_per_rank
from phalanx.plan.mapping import AnyFolding, AnyPlacement
from phalanx.plan.model import ModelSpec
from phalanx.plan.pipeline import Pipeline
from phalanx.train.assembly import assemble
from phalanx.train.setup import Rank, make_context
from phalanx.train.step import StepParts, exact_sums, measures_warmup, with_none_ahead
from phalanx.train.step_hook import NOWHERE, Where
from phalanx.train.warm import warm_kernels


def make_parts(
    rank: Rank,
    spec: ModelSpec,
    folding: AnyFolding,
    pipeline: Pipeline,
    *,
    warm: bool = True,
    drawn: bool = True,
    placement: AnyPlacement | None = None,
    where: Where = NOWHERE,
) -> StepParts:
    """Groups, and this rank's part of a freshly initialised run. Collective.

    `warm`: kernels first meet the shapes that vary (`train/warm.py`). `drawn`: weights get their initial values; else their state must come from elsewhere. `placement` of the experts of its stage; None: as the recipe says. `where` the
    ranks are, for copies of shards.
    """
    recipe, microbatches = rank.recipe, microbatches_per_rank(rank.recipe, folding)
    if measures_warmup(recipe, pipeline):
        pipeline = with_none_ahead(pipeline)
    ctx = replace(make_context(rank, spec, folding, pipeline, placement), drawn=drawn)
    if warm:
        t = recipe.train
        warm_kernels(ctx, micro_batch=t.micro_batch, seq_len=t.seq_len, processor=this_processor())
    parts = assemble(
        ctx,
        optim=recipe.optim,
        num_microbatches=microbatches,
        pipeline=pipeline,
        samples=recipe.train.global_batch // recipe.train.micro_batch,
        exact=exact_sums(recipe.resilience, recipe.train, folding, spec=spec, rank=rank.info.rank),
        holders=recipe.resilience.shard_holders,
        hosts=where.hosts,
        racks=where.racks,
    )
    parts.runner.agree(microbatches)
    return parts


def make_loader(recipe: Recipe, prepared: PreparedData) -> Loader:
    """The training samples of a run."""
    t = recipe.train
    return Loader(
        prepared.train, seq_len=t.seq_len, global_batch=t.global_batch, micro_batch=t.micro_batch, seed=t.seed,
        any_ranks=recipe.resilience.mode != "off",
    )  # fmt: skip


def token_batch(micro: MicroBatch, device: torch.device, *, folding: AnyFolding, rank: int) -> TokenBatch:
    """The part of a micro-batch of the loader that `rank` works on, as tensors on `device`."""
    tokens, labels, positions = (torch.from_numpy(a).to(device) for a in (micro.tokens, micro.labels, micro.positions))
    whole = TokenBatch(
        tokens_BS=tokens, labels_BS=labels, positions_BS=positions, segments=micro.segments,
        is_empty=micro.is_empty, padding=micro.padding,
    )  # fmt: skip
    return part_of(whole, folding, rank)
