"""One step that counts for nothing, before a worker says that it is ready: what a process does for the first time takes long, and others would wait for it.

Threads of autograd, compiled kernels, scripted functions, generated code (`train/warm.py`): a member that joins a running job otherwise meets all of that in its first step,
with all others in the same collectives. The step is that of a model of the same widths with one layer of each kind and a small vocabulary, on this rank alone, so it takes
no message, and the memory of a whole layer with as few experts as a rank holds.

Must never change: nothing of it is left but warm code; a model that cannot be made small is not warmed up, and the run goes on all the same.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from phalanx.core.config import CheckpointConfig, FoldingConfig, Recipe, ResilienceConfig
from phalanx.core.processor import this_processor
from phalanx.data import MicroBatch, PreparedData
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.models import MoE
from phalanx.observe import Sinks
from phalanx.plan.mapping import Folding, plain_placement
from phalanx.plan.model import ModelSpec, model_problems
from phalanx.plan.pipeline import plain_pipeline
from phalanx.runtime.comm import GroupCache, Peers
from phalanx.runtime.processes import WorldInfo
from phalanx.train import make_loader, make_parts, token_batch, warm_kernels
from phalanx.train.setup import MemoryMeter, Rank, RunFolder, make_context
from phalanx.train.step import commit_step, learning_rate, publish, reduce_step

ALONE = Folding(world=1)
VOCABULARY = 4096
"""Largest vocabulary: tables of a whole one may be larger than all that a rank of the run holds, and more rows meet no other
code."""


def warm_up(
    recipe: Recipe,
    spec: ModelSpec,
    folding: Folding,
    *,
    prepared: PreparedData,
    device: torch.device,
    folder: RunFolder,
    lanes: Lanes,
) -> None:
    """Meet the shapes of the run's products on `folding`, and make a step with a small model of `spec`'s widths. Needs no other rank.

    Raises `RunError` where that step is not finite.
    """
    alone = _alone(recipe, device)
    rank = Rank(
        recipe=alone,
        info=WorldInfo(rank=0, world=1),
        device=device,
        peers=Peers(),
        cache=GroupCache(),
        folder=folder,
        sinks=Sinks([]),
        memory=MemoryMeter(device),
        lanes=lanes,
        lock=None,
    )
    ctx = make_context(rank, spec, ALONE, plain_pipeline(spec, pp=1), plain_placement(spec.num_experts, ALONE))
    warm_kernels(
        ctx,
        micro_batch=recipe.train.micro_batch,
        seq_len=recipe.train.seq_len,
        processor=this_processor(),
        folding=folding,
    )
    small = small_model(spec, experts_of_rank=spec.num_experts // folding.ep)
    try:
        if small is not None:
            _step(rank, small, prepared)
    finally:
        _forget(device)


def _forget(device: torch.device) -> None:
    """Give back memory: on a GPU that of a whole layer, of which this member will have a share; and count its peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _step(rank: Rank, spec: ModelSpec, prepared: PreparedData) -> None:
    placement = plain_placement(spec.num_experts, ALONE)
    parts = make_parts(rank, spec, ALONE, plain_pipeline(spec, pp=1), warm=False, placement=placement)
    for layer in parts.model.modules():
        if isinstance(layer, MoE):  # counts are asked for as beside other ranks: products of experts go by them
            layer.routed.dispatcher.listen = lambda plan, counts: None
    micros = [_within(m, spec.vocab) for m in make_loader(rank.recipe, prepared).microbatches(0)]
    batches = [token_batch(m, rank.device, folding=ALONE, rank=0) for m in micros]
    lr = learning_rate(0, rank.recipe.optim, total_steps=rank.recipe.train.steps)
    commit_step(parts, reduce_step(parts, batches, step=0, lr=lr))
    publish(parts)
    parts.buffers.close()


def _within(micro: MicroBatch, vocab: int) -> MicroBatch:
    """Other words: what they are does not matter here, but that there are such."""
    labels = np.where(micro.labels < 0, micro.labels, micro.labels % vocab)
    return replace(micro, tokens=micro.tokens % vocab, labels=labels)


def small_model(spec: ModelSpec, *, experts_of_rank: int) -> ModelSpec | None:
    """One dense layer where there are any, one with experts, and as few of these as a rank of the run holds, as far as the router can choose among them."""
    dense = min(1, spec.dense_layers)
    layers = dense + min(1, spec.num_layers - spec.dense_layers)
    for experts in _fewer(spec, experts_of_rank):
        small = replace(
            spec, num_layers=layers, dense_layers=dense, num_experts=experts, vocab=min(spec.vocab, VOCABULARY)
        )
        if not model_problems(small):
            return small
    return None


def _fewer(spec: ModelSpec, least: int) -> Iterator[int]:
    """Numbers of experts that divide those of the model, from `least` on."""
    return (n for n in range(max(1, least, spec.top_k), spec.num_experts + 1) if spec.num_experts % n == 0)


def _alone(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe of one rank that makes one micro-batch a step, on a GPU two: there the second one's products add to the first one's gradients, which are other kernels."""
    train, micros = recipe.train, 1 if device.type == "cpu" else 2
    return replace(
        recipe,
        folding=FoldingConfig(),
        dispatch=replace(
            recipe.dispatch, overlap="serial"
        ),  # alone there is nothing to overlap, and nothing to calibrate
        train=replace(train, global_batch=micros * train.micro_batch),
        resilience=ResilienceConfig(
            mode=recipe.resilience.mode,
            chunk_rows=recipe.resilience.chunk_rows,
            fixed_bits=recipe.resilience.fixed_bits,
        ),
        checkpoint=CheckpointConfig(interval=0),
    )
