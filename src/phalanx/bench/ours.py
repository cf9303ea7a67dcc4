"""Phalanx on one rank, as a contender: the model, gradients, state and train step that `phalanx train` runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import torch

from phalanx.bench.workload import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, Shape, batch_of
from phalanx.core.config import OptimConfig
from phalanx.kernels.lanes import Lanes
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.plan.dispatch import DispatchSpec
from phalanx.plan.folding import make_folding
from phalanx.plan.placement import plain_placement
from phalanx.runtime.allocator import keep_freed_memory
from phalanx.runtime.collectives import Collectives
from phalanx.runtime.groups import GroupCache, build_groups
from phalanx.train.assemble import assemble
from phalanx.train.step import train_step


class Ours:
    """A freshly initialised run of one rank, one micro-batch a step."""

    def __init__(
        self,
        shape: Shape,
        *,
        threads: int,
        dtype: torch.dtype = torch.bfloat16,
        kernels: Literal["fast", "reference"] = "fast",
        rate: Callable[[int], float] = lambda step: LEARNING_RATE,
    ) -> None:
        keep_freed_memory(threads=threads)
        folding = make_folding(world=1)
        spec = shape.spec()
        ctx = ModelContext(
            spec=spec,
            dispatch=DispatchSpec(),
            placement=plain_placement(spec.num_experts, folding),
            groups=build_groups(folding, rank=0, cache=GroupCache()),
            comms=Collectives(),
            dtype=dtype,
            device=torch.device("cpu"),
            kernels=kernels,
            lanes=Lanes(threads),
        )
        optim = OptimConfig(beta1=BETAS[0], beta2=BETAS[1], weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM)
        self.shape, self.rate, self.lanes = shape, rate, ctx.lanes
        self.parts = assemble(ctx, optim=optim, num_microbatches=1)
        self.num_params = spec.num_params
        self.steps_done = 0

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Seconds and losses of `steps` more steps."""
        times, losses = [], []
        for _ in range(steps):
            batch = self._batch(self.steps_done)
            begin_s = time.perf_counter()
            result = train_step(self.parts, [batch], step=self.steps_done, lr=self.rate(self.steps_done))
            times.append(time.perf_counter() - begin_s)
            losses.append(result.loss)
            self.steps_done += 1
        return times, losses

    def _batch(self, step: int) -> TokenBatch:
        tokens = torch.from_numpy(batch_of(self.shape, step=step))
        positions = torch.arange(self.shape.seq_len).expand(self.shape.batch, -1)
        segments = ((self.shape.seq_len,),) * self.shape.batch
        return TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, segments)
