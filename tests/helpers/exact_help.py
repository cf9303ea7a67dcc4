"""A small run on any number of ranks, from its first step or a checkpoint on, and everything it ends with, to be compared bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from checkpoint_help import run_state

from phalanx.core.config import ModelConfig, OptimConfig, ResilienceConfig, RouterConfig, TrainConfig
from phalanx.core.samples import num_rounds, owned
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.layout.holders import ExpertState
from phalanx.plan.mapping.folding import Folding, make_folding
from phalanx.plan.mapping.placement import AnyPlacement, Placement, plain_placement
from phalanx.plan.model.model import ModelSpec, resolve_model
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.pipeline.run import plain_pipeline
from phalanx.runtime.checkpoint.manager import CheckpointManager
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.runtime.comm.peers import own_group
from phalanx.train.assembly import assemble
from phalanx.train.step.exact import exact_sums
from phalanx.train.step.transaction import StepParts, eval_loss, train_step
from phalanx.verify.replicas import random_placements
from ranks import run_ranks

VOCAB, SEQ, SEQUENCES = 256, 24, 2


@dataclass(frozen=True)
class Run:
    """What must decide the bits: everything here but `mode`."""

    mode: str = "exact"
    samples: int = 7
    steps: int = 10
    dtype: torch.dtype = torch.float32
    router: dict[str, Any] = field(default_factory=lambda: {"bias_rate": 1e-2, "z_loss": 1e-3})
    model: dict[str, Any] = field(default_factory=dict)
    dispatch: DispatchSpec = field(default_factory=DispatchSpec)
    recompute: str = "none"
    compiled: bool = True
    threads: int = 1
    kernels: str = "fast"
    chunk_rows: int | None = None
    fixed_bits: int | None = None

    @property
    def spec(self) -> ModelSpec:
        return resolve_model(ModelConfig(preset="tiny", **self.model), RouterConfig(**self.router))


@dataclass(frozen=True)
class Ranks:
    """What must not decide them, with tp and pp as they are."""

    world: int
    ep: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 1
    holders: int = 1
    slots: int | None = None
    """A rank's, for replicas at random places drawn by `seed`."""
    seed: int = 0
    expert_state: ExpertState = "whole"

    def placement(self, spec: ModelSpec, folding: Folding) -> AnyPlacement:
        if self.slots is None:
            return plain_placement(max(1, spec.num_experts), folding)
        if self.world == 1:  # some experts twice
            slots = (*range(spec.num_experts), *range(self.slots - spec.num_experts))
            return Placement(num_experts=spec.num_experts, slots=((slots,),))
        return random_placements(spec.moe_layers, spec.num_experts, folding.ep, self.slots, self.seed)


@dataclass(frozen=True)
class Ended:
    """`figures`: of each step, as Python floats."""

    figures: tuple[tuple[float, ...], ...]
    evaluated: tuple[float, int]
    state: dict[str, str]
    """Digest of each logical tensor: masters, moments, expert biases."""


def microbatch(step: int, sample: int) -> TokenBatch:
    """Sequences that depend on (step, sample) alone, with some positions that predict nothing."""
    generator = torch.Generator().manual_seed(1000 * step + sample)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, SEQ + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, : sample % 5] = -100
    return _batch(tokens[:, :-1].contiguous(), labels)


def empty() -> TokenBatch:
    nothing = torch.zeros(SEQUENCES, SEQ, dtype=torch.int64)
    return replace(_batch(nothing, nothing - 100), is_empty=True)


def _batch(tokens: torch.Tensor, labels: torch.Tensor) -> TokenBatch:
    return TokenBatch(tokens, labels, torch.arange(SEQ).expand(SEQUENCES, SEQ), ((SEQ,),) * SEQUENCES)


def build(rank: int, cache: GroupCache, run: Run, ranks: Ranks) -> StepParts:
    spec = run.spec
    folding = make_folding(world=ranks.world, ep=ranks.ep, tp=ranks.tp, pp=ranks.pp)
    pipeline = plain_pipeline(spec, pp=ranks.pp)
    ctx = ModelContext(
        spec=spec,
        dispatch=run.dispatch,
        placement=ranks.placement(spec, folding),
        expert_state=ranks.expert_state,
        groups=build_groups(folding, rank=rank, cache=cache, table_ranks=pipeline.stages.table_ranks),
        comms=Collectives(timeout_s=240),
        dtype=run.dtype,
        device=torch.device("cpu"),
        recompute=run.recompute,
        kernels=run.kernels,
        lanes=Lanes(run.threads, rows=compiled_rows() if run.compiled else None),
    )
    train = TrainConfig(micro_batch=SEQUENCES, global_batch=SEQUENCES * run.samples, seq_len=SEQ)
    config = ResilienceConfig(mode=run.mode, chunk_rows=run.chunk_rows, fixed_bits=run.fixed_bits)
    return assemble(
        ctx,
        optim=OptimConfig(zero=ranks.zero),
        num_microbatches=num_rounds(run.samples, owners=folding.replicas),
        pipeline=pipeline,
        samples=run.samples,
        exact=exact_sums(config, train, folding, spec=spec, rank=rank),
        holders=ranks.holders,
    )


def shares(parts: StepParts, run: Run, step: int) -> list[TokenBatch]:
    """This rank's micro-batches of a step."""
    folding, rank = parts.groups.folding, parts.groups.rank
    own = owned(run.samples, owners=folding.replicas, owner=folding.replica_of(rank))
    missing = num_rounds(run.samples, owners=folding.replicas) - len(own)
    batches = [microbatch(step, s) for s in own] + [empty()] * missing
    return [part_of(batch, folding, rank) for batch in batches]


def job(
    rank: int,
    cache: GroupCache,
    run: Run,
    ranks: Ranks,
    first: int,
    steps: int,
    folder: Path | None,
    faults: Sequence[str],
) -> tuple[Any, Any, Any]:
    """Steps [first, first + steps), from the checkpoint in `folder` where there is one and `first` is not 0, saved there at the end."""
    with ExitStack() as stack:
        for fault in faults:
            stack.enter_context(FAULTS[fault](rank))
        parts = build(rank, cache, run, ranks)
        manager = None
        if folder is not None:
            group = own_group(ranks.world, timeout_s=240) if ranks.world > 1 else None
            manager = CheckpointManager(folder, group=group)
            manager.open()
            if first:
                manager.load(parts.state.boxes(), step=manager.choose())
                parts.state.restore(parts.comms)
        figures = []
        for step in range(first, first + steps):
            r = train_step(parts, shares(parts, run, step), step=step, lr=3e-3)
            counts = tuple(map(float, r.counts_LE.flatten()))
            numbers = (r.loss, r.grad_norm, r.aux_loss, r.z_loss, r.mtp_loss, r.dropped, r.entropy, r.tokens)
            figures.append((*numbers, *counts))
        evaluated = eval_loss(parts, shares(parts, run, 1000))
        if manager is not None:
            manager.save(parts.state.boxes(), run_state(first + steps, run.spec))
            manager.finish()
        return figures, evaluated, [_box(box) for box in parts.state.boxes() if box.primary]


def _box(box: Any) -> tuple[str, tuple[int, ...], tuple[slice, ...], torch.Tensor]:
    return box.name, box.shape, box.box.slices(), box.tensor.detach().clone()


def ended(
    run: Run, ranks: Ranks, *, first: int = 0, steps: int | None = None, folder: Path | None = None, faults=()
) -> Ended:
    """What the run ends with on these ranks; all ranks agree on it."""
    given = (run, ranks, first, run.steps if steps is None else steps, folder, tuple(faults))
    alone = ranks.world == 1 and run.threads == 1
    told = [job(0, GroupCache(), *given)] if alone else run_ranks(ranks.world, job, *given, timeout_s=400)
    assert all(figures == told[0][0] and evaluated == told[0][1] for figures, evaluated, _ in told)
    whole: dict[str, torch.Tensor] = {}
    for _, _, boxes in told:
        for name, shape, at, tensor in boxes:
            whole.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))[at] = tensor
    digests = {name: hashlib.sha256(t.numpy().tobytes()).hexdigest() for name, t in whole.items()}
    return Ended(tuple(told[0][0]), told[0][1], digests)


# ---- planted faults ---------------------------------------------------------------------------------------------------


def _fp32_sums(rank: int) -> Any:
    """Running sums are rounded to fp32 after every addition."""
    from phalanx.kernels.cpu import fixed_point

    sound = fixed_point.fixed_add_

    def rounded(total: torch.Tensor, x: torch.Tensor, *, bits: int, **more: Any) -> float:
        top = sound(torch.zeros_like(total), x, bits=bits)
        before = (total.to(torch.float64) * 2.0**-bits).to(torch.float32)
        after = before + x.view(total.shape).to(torch.float32)
        total.copy_((after.to(torch.float64) * 2.0**bits).round().to(torch.int64))
        return top

    return mock.patch.object(fixed_point, "fixed_add_", rounded)


def _joined_rows(rank: int) -> Any:
    """Products of an expert over the rows of all sources together."""
    from phalanx.kernels.ops import exact_experts

    sound = exact_experts.chunks_of
    return mock.patch.object(
        exact_experts, "chunks_of", lambda counts_eP, rows: sound([[sum(counts)] for counts in counts_eP], rows)
    )


def _seeded_by_rank(rank: int) -> Any:
    """What is drawn depends on who draws it."""
    from phalanx.models import router

    sound = router.forced_experts
    return mock.patch.object(
        router, "forced_experts", lambda *args, seed, **more: sound(*args, seed=seed + rank, **more)
    )


def _every_rank_squares(rank: int) -> Any:
    """Replicas of an element are all counted in the norm."""
    from phalanx.runtime.state import gradients

    return mock.patch.object(gradients, "_is_first", lambda layout, groups: True)


def _rows_split(rank: int) -> Any:
    """Replicas of an expert share rows, whatever chunks they belong to."""
    from phalanx.runtime.moe import dispatch

    sound = dispatch.plan_local_dispatch
    return mock.patch.object(
        dispatch, "plan_local_dispatch", lambda *args, unit_rows, **more: sound(*args, unit_rows=1, **more)
    )


def _holder_left_out(rank: int) -> Any:
    """Nobody adds what the last rank has of the experts that others hold too."""
    from phalanx.runtime.state.holders import HolderSums

    sound = HolderSums.start

    def start(self: HolderSums, flat: torch.Tensor, axis: Any, comms: Any, *, op_id: str) -> None:
        sound(self, torch.zeros_like(flat) if axis.index == axis.size - 1 else flat, axis, comms, op_id=op_id)

    return mock.patch.object(HolderSums, "start", start)


def _every_holder_squares(rank: int) -> Any:
    """Each holder counts all of its experts in the norm."""
    from phalanx.runtime.state import gradients

    return mock.patch.object(gradients, "_counted", lambda layout, segments: [s.tensor for s in segments])


FAULTS = {
    "rows split": _rows_split,
    "holder left out": _holder_left_out,
    "every holder squares": _every_holder_squares,
    "fp32 sums": _fp32_sums,
    "joined rows": _joined_rows,
    "seeded by rank": _seeded_by_rank,
    "every rank squares": _every_rank_squares,
}
