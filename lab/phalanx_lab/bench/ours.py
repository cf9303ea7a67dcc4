"""Phalanx on one rank, as a contender: the model, gradients, state and train step that `phalanx train` runs."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Literal

import torch

from phalanx.core.config import OptimConfig, PipelineConfig
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.device import WeightSums
from phalanx.kernels.native import compiled_rows
from phalanx.models.context import TokenBatch
from phalanx.models.shard import part_of
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, Groups, build_groups
from phalanx.runtime.processes.allocator import keep_freed_memory
from phalanx.train.assembly import assemble
from phalanx.train.step.transaction import eval_loss, train_step
from phalanx_lab.bench.workload import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY, WorkloadShape, batch_of
from phalanx_lab.plain_model import plain_context

OPTIM = OptimConfig(beta1=BETAS[0], beta2=BETAS[1], weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM)
HOST = torch.device("cpu")
Recompute = Literal["none", "selective", "full"]


class OurRun:
    """A freshly initialised run: of one rank, or of the ranks of `groups`.

    `pair_passes`: forward passes of a step of several micro-batches run beside backward passes (`groups` have second ones then).
    """

    def __init__(
        self,
        shape: WorkloadShape,
        *,
        threads: int,
        dtype: torch.dtype = torch.bfloat16,
        kernels: Literal["fast", "reference"] = "fast",
        rate: Callable[[int], float] = lambda step: LEARNING_RATE,
        groups: Groups | None = None,
        comms: Collectives | None = None,
        optim: OptimConfig = OPTIM,
        native: bool = True,
        num_microbatches: int = 1,
        pair_passes: bool = False,
        overlap: str = "serial",
        device: torch.device = HOST,
        recompute: Recompute = "none",
        weight_sums: WeightSums | None = None,
    ) -> None:
        keep_freed_memory(threads=threads)
        groups = groups or build_groups(make_folding(world=1), rank=0, cache=GroupCache())
        spec = shape.spec()
        ctx = plain_context(
            spec, groups, dtype=dtype, dispatch=DispatchSpec(overlap=overlap), comms=comms or Collectives(), device=device, kernels=kernels,
            recompute=recompute, weight_sums=weight_sums, lanes=Lanes(threads, rows=compiled_rows() if native else None),
        )  # fmt: skip
        self.device = device
        self.shape, self.rate, self.lanes, self.groups = shape, rate, ctx.lanes, groups
        pipeline = make_pipeline(PipelineConfig(pair_passes=pair_passes), spec, pp=1, seq_len=shape.seq_len)
        self.num_microbatches = num_microbatches
        self.parts = assemble(ctx, optim=optim, num_microbatches=num_microbatches, pipeline=pipeline)
        self.num_params = spec.num_params
        self.steps_done = 0

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Seconds and losses of `steps` more steps."""
        times, losses = [], []
        for _ in range(steps):
            batches = self._batches(self.steps_done)
            begin_s = time.perf_counter()
            result = train_step(self.parts, batches, step=self.steps_done, lr=self.rate(self.steps_done))
            times.append(time.perf_counter() - begin_s)
            losses.append(result.loss)
            self.steps_done += 1
        return times, losses

    def loss_of(self, step: int) -> float:
        """Mean loss of the batch of a step, without taking it."""
        loss, _ = eval_loss(self.parts, self._batches(step))
        return loss

    def pair(self, on: bool) -> None:
        """Run passes beside one another from now on, or one after the other; counts for a run that was made with `pair_passes`."""
        groups = self.groups if on else dataclasses.replace(self.groups, second=None)
        self.parts = dataclasses.replace(self.parts, groups=groups)

    def step_loss(self, step: int) -> tuple[float, float]:
        """Loss and norm of the gradient of a step at a rate of zero without decay: it leaves the weights as they are, but for moments."""
        result = train_step(self.parts, self._batches(step), step=self.steps_done, lr=0.0)
        return result.loss, result.grad_norm

    def _batches(self, step: int) -> list[TokenBatch]:
        return [self._batch(step, j) for j in range(self.num_microbatches)]

    def _batch(self, step: int, j: int) -> TokenBatch:
        dp = self.groups.axis("dp")
        number = (step * dp.size + dp.index) * self.num_microbatches + j
        tokens = torch.from_numpy(batch_of(self.shape, step=number))
        positions = torch.arange(self.shape.seq_len).expand(self.shape.batch, -1)
        segments = ((self.shape.seq_len,),) * self.shape.batch
        batch = TokenBatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions, segments)
        return part_of(batch.on(self.device), self.groups.folding, self.groups.rank)
