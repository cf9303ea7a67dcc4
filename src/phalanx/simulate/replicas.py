"""What replicas of the same parameters exchange in a step, and what of it is exposed; and the optimizer's own time.

Decides how much of gradients and parameters runs beside passes: all but a layer's, as far as the last backward and the first forward have
room. Must never change: what is hidden still takes multiprocessors from what it runs beside.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.simulate.collectives import Network, beside, span_of
from phalanx.simulate.cost import BF16, FP32, Oracle
from phalanx.simulate.device_memory import shards
from phalanx.simulate.mapping import Mapping

OPTIMIZER_BYTES = 34
"""Moved for a parameter that this rank updates: gradient twice (norm, update), three states in and out, the bf16 weight out."""


@dataclass(frozen=True)
class Replicas:
    """Data-parallel traffic of a mapping. Parameters of a rank are given as (dense, expert)."""

    mapping: Mapping
    network: Network

    def traffic(self, own: tuple[float, float]) -> tuple[float, float]:
        """Seconds of gathering parameters and of reducing gradients."""
        f, per_host = self.mapping.folding, self.network.hardware.ranks_per_host
        by_dense, by_expert = shards(self.mapping)
        stride = f.tp if by_dense == f.dp * f.cp else f.tp * f.cp
        dense = span_of(by_dense, stride, ranks_per_host=per_host)
        expert = span_of(by_expert, f.etp * f.ep * (f.edp // by_expert), ranks_per_host=per_host)
        gather, reduce = (
            self.network.all_gather(width * own[0], dense) + self.network.all_gather(width * own[1], expert)
            for width in (BF16, self.mapping.gradient_bytes)
        )
        return gather, reduce

    def exposed(self, own: tuple[float, float], *, forward: float, backward: float, layers: int, passes: int) -> float:
        """Seconds that the step is longer for it. `forward`, `backward`: passes of one micro-batch over this rank's layers."""
        overlap, sms = self.mapping.overlap, self.network.hardware.sms
        gather, reduce = self.traffic(own)
        last = 1 / max(1, layers)
        if self.mapping.sharding == "parameters":
            each = self.mapping.reshard_after_forward
            times, back = (passes, reduce + gather) if each else (1, reduce)
            if not overlap.fsdp:
                return times * (gather + back)
            return times * (gather * last + beside(gather, forward, sms) + beside(back, backward, sms))
        if not overlap.dp:
            return gather + reduce
        return sum(
            comm * last + beside(comm * (1 - last), room * (1 - last), sms)
            for comm, room in ((gather, forward), (reduce, backward))
        )

    def optimizer(self, own: tuple[float, float], oracle: Oracle) -> float:
        """Update of this rank's share, and gradients set to zero."""
        by_dense, by_expert = shards(self.mapping)
        mine = own[0] / by_dense + own[1] / by_expert
        return oracle.memory(mine * OPTIMIZER_BYTES + sum(own) * FP32, kernels=20)
