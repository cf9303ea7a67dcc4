"""Many steps of one case against one rank: does the loss stay with it?

A single step compares everything (`session.py`); here the state of each step is what the steps before have made of it, so that an error too small
to be seen in one step, or that only a state left by another step shows, adds up. Every step has other data. Compared are the loss and the
gradient norm of each step, in float64.

Must never change: a run in which the loss did not fall, or in which nothing was dropped where the policy is to drop, is a failure, for agreement
in standing still proves nothing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from phalanx.core.errors import RunError
from phalanx.core.reading import load_json
from phalanx.core.samples import num_rounds, owned
from phalanx.models import TokenBatch, part_of
from phalanx.runtime.comm import GroupCache, build_groups, with_second_groups
from phalanx.runtime.processes import STOPPED, StopRequest, WorldInfo, close_world, init_world, run_local
from phalanx.train.step import StepParts, train_step
from phalanx.verify.numbers import StartingValues, empty, microbatch
from phalanx.verify.reference import alone, collectives, context, in_parts, on_mapping, partition, start
from phalanx.verify.replicas import placement_of
from phalanx.verify.session import TIMEOUT_S, end_if, import_early
from phalanx.verify.setups import Case

LIMIT = 1e-9
"""Largest relative difference of a step's loss."""
RATE = 0.02
WINDOW = 5
"""Steps whose mean loss is looked at, first and last: data differ from step to step."""


@dataclass(kw_only=True)
class Curve:
    """What one run computed."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    dropped: int = 0
    """Rows of all steps that no expert took."""


@dataclass(kw_only=True)
class FollowResult:
    """Both runs and their difference; what `--json` writes."""

    label: str
    steps: int
    worst_loss_rel_error: float = 0.0
    worst_norm_rel_error: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    dropped: int = 0
    losses: list[float] = field(default_factory=list)
    reference_losses: list[float] = field(default_factory=list)
    not_verified: list[str] = field(default_factory=list)
    """What of the recipe these steps do not have (`carried.py`)."""


def follow(case: Case, *, steps: int) -> FollowResult:
    """Run the case on its ranks, then on one. Call it before any tensor operation of this process (it forks)."""
    import_early()
    with tempfile.TemporaryDirectory(prefix="phalanx-follow-") as name:
        ours = _fork(partial(_on_mapping, case, steps), Path(name) / "ours.json", ranks=case.folding.world)
        want = _fork(partial(_on_one, case, steps), Path(name) / "alone.json", ranks=1)
    return judge(case, ours, want)


def judge(case: Case, ours: Curve, want: Curve) -> FollowResult:
    """Hold one curve against the other."""
    result = FollowResult(label=case.label, steps=len(want.losses), dropped=ours.dropped)
    result.losses, result.reference_losses = ours.losses, want.losses
    errors = relative_errors(ours.losses, want.losses)
    result.worst_loss_rel_error = max(errors)
    result.worst_norm_rel_error = max(relative_errors(ours.norms, want.norms))
    if not result.worst_loss_rel_error <= LIMIT:
        step = next(i for i, error in enumerate(errors) if not error <= LIMIT)
        result.failures.append(
            f"the loss of step {step} is {ours.losses[step]!r}, on one rank {want.losses[step]!r}: it differs by {errors[step]:.1e}"
            f" (limit {LIMIT:.0e})"
        )
    if ours.dropped != want.dropped:
        result.failures.append(f"{ours.dropped} rows were dropped, on one rank {want.dropped}")
    if case.setup.dispatch.policy == "drop" and case.setup.spec.moe_layers and want.dropped == 0:
        result.failures.append("no row was dropped, so agreement says nothing about dropping")
    if len(want.losses) >= 2 * WINDOW and not _mean(want.losses[-WINDOW:]) < _mean(want.losses[:WINDOW]):
        result.failures.append("the loss of one rank did not fall, so agreement says little")
    return result


def relative_errors(ours: Sequence[float], want: Sequence[float]) -> list[float]:
    """One for each step. What is not a number is infinitely far."""
    out = []
    for a, b in zip(ours, want, strict=True):
        error = abs(a - b) / max(abs(b), 1e-30)
        out.append(error if error == error else float("inf"))
    return out


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _fork(run: Callable[[WorldInfo, StopRequest], Curve], path: Path, *, ranks: int) -> Curve:
    """Run on forked ranks; the curve is the first rank's (all have the same: every figure of a step is global)."""

    def main(info: WorldInfo, stop: StopRequest) -> int:
        curve = run(info, stop)
        if info.rank == 0:
            path.write_text(json.dumps(asdict(curve)))
        return 0

    if run_local(main, ranks=ranks, threads=1) == STOPPED:
        raise KeyboardInterrupt
    if not path.exists():
        raise RunError("the first rank ended without its curve")
    return Curve(**load_json(path))


def _on_mapping(case: Case, steps: int, info: WorldInfo, stop: StopRequest) -> Curve:
    init_world(info, timeout_s=TIMEOUT_S)
    setup, pipeline, folding = case.setup, case.pipeline, case.folding
    cache = GroupCache(timeout_s=TIMEOUT_S)
    groups = build_groups(folding, rank=info.rank, cache=cache, table_ranks=pipeline.stages.table_ranks)
    if pipeline.pair_passes:
        groups = with_second_groups(groups, cache=cache)
    placement = placement_of(setup, folding, pipeline.stages.of_rank(folding.coord(info.rank, "pp")), info.rank)
    comms = collectives(setup, info.rank, timeout_s=TIMEOUT_S)
    ctx = context(setup, groups, comms, dtype=torch.float64, placement=placement)
    total = case.num_microbatches
    parts = on_mapping(setup, ctx, num_microbatches=total, pipeline=pipeline)
    mine = owned(total, owners=folding.replicas, owner=folding.replica_of(info.rank))
    curve = _run(case, parts, mine, steps=steps, stop=stop, cut=lambda batch: part_of(batch, folding, info.rank))
    ctx.comms.barrier(groups.axis("world"))
    close_world()
    return curve


def _on_one(case: Case, steps: int, info: WorldInfo, stop: StopRequest) -> Curve:
    total = case.num_microbatches
    parts = alone(case.setup, num_microbatches=total, dtype=torch.float64)
    where = partition(case.setup, case.folding)
    return _run(case, parts, range(total), steps=steps, stop=stop, cut=lambda batch: in_parts(batch, where))


def _run(
    case: Case,
    parts: StepParts,
    mine: Sequence[int],
    *,
    steps: int,
    stop: StopRequest,
    cut: Callable[[TokenBatch], TokenBatch],
) -> Curve:
    """All steps; of each the micro-batches `mine`, cut to what this rank has of them, and empty ones where other ranks have more. Collective."""
    start(parts, StartingValues())
    total, curve = case.num_microbatches, Curve()
    rounds = num_rounds(total, owners=parts.groups.folding.replicas)
    for step in range(steps):
        end_if(stop)
        whole = [*(microbatch(case.setup, step * total + j) for j in mine), *[empty()] * (rounds - len(mine))]
        result = train_step(parts, [cut(batch) for batch in whole], step=step, lr=RATE)
        curve.losses.append(result.loss)
        curve.norms.append(result.grad_norm)
        curve.dropped += result.dropped
    return curve
