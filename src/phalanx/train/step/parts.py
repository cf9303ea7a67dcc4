"""What a step works on and with, made by `train/assembly.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.ops.deferred import DeferredGradients
from phalanx.models import Decoder
from phalanx.plan.mapping import AnyPlacement
from phalanx.plan.model import ModelSpec
from phalanx.plan.pipeline import Pipeline
from phalanx.plan.reshard import Hosts
from phalanx.runtime.comm import Collectives, Groups
from phalanx.runtime.moe import FusedMemory
from phalanx.runtime.state import GradientBuffers, ShardedState
from phalanx.train.step.exact import ExactSums
from phalanx.train.step.optim import Optimizer
from phalanx.train.step.passes import StageRunner
from phalanx.train.step.warmup import PassTimes


@dataclass(frozen=True, kw_only=True, eq=False)
class StepParts:
    """Built once by the trainer, and again where experts move."""

    model: Decoder
    spec: ModelSpec
    groups: Groups
    comms: Collectives
    buffers: GradientBuffers
    state: ShardedState
    optimizer: Optimizer
    clip_norm: float
    pipeline: Pipeline
    placement: AnyPlacement | None = None
    """Where experts have replicas: the experts that each rank of the stage holds."""
    later: DeferredGradients | None = None
    kernels: Impl = "fast"
    lanes: Lanes = SERIAL
    times: PassTimes | None = None
    """Takes down what passes take, in a step that is measured."""
    samples: int | None = None
    """Micro-batches of a step over all data-parallel ranks; None: as many on each of them as are given."""
    exact: ExactSums | None = None
    """Exact mode: how gradients are summed."""
    fused: FusedMemory | None = None
    """Where kernels that wait on flags have said whether one gave up."""
    hosts: Hosts | None = None
    """Which rank is on which host (None: unknown, and all count as one): a boundary between stages sends one copy to a host."""
    done: set[str] = field(default_factory=set)
    """Programs that have been run once (`StageRunner.done`)."""

    @property
    def runner(self) -> StageRunner:
        """What runs the stages of `model`."""
        return StageRunner(
            model=self.model,
            pipeline=self.pipeline,
            groups=self.groups,
            comms=self.comms,
            later=self.later,
            hosts=self.hosts,
            times=self.times,
            done=self.done,
        )
