"""One step without its schedule's clock, written for reading: the closed forms of `simulate/step/bubble.py` on the mean stage.

`simulate/step/quick.py`, the first pass of a search, gives the same time and memory for a million mappings, computing each part once for what it depends on; tests compare the two.
"""

from __future__ import annotations

from itertools import accumulate

from phalanx.plan.pipeline.schedule.clock import ScheduleCosts
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import Job, Mapping
from phalanx.simulate.step import StepTime
from phalanx.simulate.step.bubble import bubble_share, idle_passes
from phalanx.simulate.step.device_memory import memory_of
from phalanx.simulate.step.timing import Ends, _Step
from phalanx.simulate.step.transfers import hop_seconds


def step_without_clock(job: Job, mapping: Mapping, cluster: GpuCluster) -> StepTime:
    """The step whose bubble, and whose ranks' idle ends, are those of a pipeline of mean stages."""
    step = _Step(job, mapping, cluster)
    return step.result(ends=_ends(step, hop_seconds(job, mapping, step.network)[:-1]))


def _ends(step: _Step, hops: tuple[float, ...]) -> Ends | None:
    """When the first pass of each rank begins and its last one ends. `hops`: from each rank to the next."""
    m, costs = step.mapping, step.costs()
    if m.folding.pp == 1:
        return None
    forward, backward, weight = _mean(costs)
    way = m.schedule, m.folding.pp, m.virtual, step.m, weight / backward if backward else 0.5, m.extra_warmup
    busy = max(step.m * sum(sum(stage.seconds) for stage in stages) for stages in step.by_rank())
    last_s = busy + bubble_share(*way) * (forward + backward) * m.virtual + 2 * sum(hops)
    ways = [0.0, *accumulate(hops)]
    back = [0.0] * len(ways) if m.splits_backward else ways  # where weights come last, all wait for no transfer
    return Ends(
        [rank * forward + before for rank, before in enumerate(ways)],
        [last_s - passes * backward - after for passes, after in zip(idle_passes(*way), back, strict=True)],
    )


def _mean(costs: ScheduleCosts) -> tuple[float, float, float]:
    """Seconds of the mean stage: forward, backward, and the weights' part of it."""
    n = len(costs.forward)
    return sum(costs.forward) / n, sum(costs.backward) / n, sum(costs.weight_grad) / n


def fullest_bytes(job: Job, mapping: Mapping) -> float:
    """Bytes on the fullest rank of the pipeline."""
    return max(stage.total for stage in memory_of(job, mapping))
