"""Update rules: the learning rate of a step, AdamW over sharded state.

Decides how reduced gradients become new state; touches nothing before it is asked to (the vote is in `train/step/transaction.py`).
Must never change: an update is elementwise in (state, scaled gradient), so it cannot depend on how the state is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.core.config import OptimConfig
from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.device import AdamRule, RunTable, fused_adamw, has_adamw
from phalanx.kernels.ops.adamw import adamw_
from phalanx.kernels.ops.narrow_moments import adamw_of_narrow_
from phalanx.runtime.state import FamilyState, ReducedGradients, Segment, ShardedState


def learning_rate(step: int, config: OptimConfig, *, total_steps: int) -> float:
    """Rate of step `step` (from 0): linear warm-up to `lr`, then the schedule; the last step runs at `lr * min_lr_ratio`.

    cosine: half a cosine over all steps after warm-up. wsd (arXiv 2405.18392): constant, then linear over the last `decay_steps`.
    """
    warmup = config.warmup(total_steps)
    if step < warmup:
        return config.peak_lr * (step + 1) / warmup
    if config.schedule == "constant":
        return config.peak_lr
    if config.schedule == "cosine":
        length = total_steps - warmup
    else:
        decay = max(1, total_steps // 5) if config.decay_steps is None else config.decay_steps
        length = min(decay, total_steps - warmup)
    done = min(1.0, max(0.0, (step + 1 - (total_steps - length)) / max(1, length)))
    left = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return config.peak_lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


class Optimizer(Protocol):
    """What the transaction needs: one call that makes new state of old state and a gradient, after the vote."""

    def commit(
        self, state: ShardedState, gradients: ReducedGradients, *, step: int, lr: float, scale: float
    ) -> None: ...

    def update(
        self, state: State, gradient: torch.Tensor, rounded: torch.Tensor | None, *, decay: bool, step: int, lr: float, scale: float
    ) -> None: ...  # fmt: skip


State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Master weights and both moments of the same elements, 1-d."""


@dataclass(frozen=True)
class AdamW:
    """AdamW (arXiv 1711.05101); decay only where `ParamSpec.decay` says so."""

    config: OptimConfig
    impl: Impl = "fast"
    lanes: Lanes = SERIAL

    def commit(self, state: ShardedState, gradients: ReducedGradients, *, step: int, lr: float, scale: float) -> None:
        """Update all that this rank keeps in place from `scale * gradient`, and round it. `step` counts from 0."""
        for family, segments in gradients.segments.items():
            target = state.families[family]
            if self.impl == "fast" and state.sums is None and has_adamw(target.master):
                self._commit_by_launches(target, segments, step=step, lr=lr, scale=scale)
                continue
            sums = None if state.sums is None else torch.zeros(7, dtype=torch.int64, device=target.master.device)
            for segment in segments:
                for run in target.runs_in(segment.start, segment.start + segment.tensor.numel()):
                    part = slice(run.start, run.stop)
                    self.update(
                        (target.master[part], target.exp_avg[part], target.exp_avg_sq[part]),
                        segment.tensor[run.start - segment.start : run.stop - segment.start],
                        target.rounded_part(run.start, run.stop),
                        decay=run.decay,
                        step=step,
                        lr=lr,
                        scale=scale,
                        sums=sums,
                    )
            if state.sums is not None and sums is not None:
                state.sums.updated(family, state.KINDS, sums)

    def _commit_by_launches(
        self, target: FamilyState, segments: Iterable[Segment], *, step: int, lr: float, scale: float
    ) -> None:
        """On a GPU: all runs of a segment at once."""
        c = self.config
        rule = AdamRule(lr=lr, beta1=c.beta1, beta2=c.beta2, eps=c.eps, weight_decay=c.weight_decay, step=step + 1)
        state = (target.master, target.exp_avg, target.exp_avg_sq)
        for segment in segments:
            table = RunTable(runs_R4=target.run_table, start=segment.start)
            fused_adamw(state, segment.tensor, target.rounded_whole, rule, scale=scale, table=table)

    def update(
        self,
        state: State,
        gradient: torch.Tensor,
        rounded: torch.Tensor | None,
        *,
        decay: bool,
        step: int,
        lr: float,
        scale: float,
        sums: torch.Tensor | None = None,
    ) -> None:
        """One run of elements, in place, from `scale * gradient`; `rounded`: where the new master goes in the compute type, if anywhere. `sums`: as of `adamw_`."""
        c = self.config
        master, exp_avg, exp_avg_sq = state
        kernel = adamw_ if exp_avg.dtype == master.dtype else adamw_of_narrow_
        kernel(
            master,
            gradient,
            exp_avg,
            exp_avg_sq,
            rounded,
            lr=lr,
            beta1=c.beta1,
            beta2=c.beta2,
            eps=c.eps,
            weight_decay=c.weight_decay if decay else 0.0,
            step=step + 1,
            scale=scale,
            impl=self.impl,
            lanes=self.lanes,
            sums=sums,
        )


def clip_scale(norm: float, clip_norm: float) -> float:
    """Factor that brings a gradient of global norm `norm` to at most `clip_norm` (0: never scale)."""
    return clip_norm / norm if clip_norm and norm > clip_norm else 1.0
