"""What replicas of the same parameters exchange in a step, and what of it is exposed; and the optimizer's own time.

Decides how much of gradients and parameters runs beside passes: all but a layer's, as far as the last backward and the first forward have
room. Must never change: what is hidden still takes multiprocessors from what it runs beside.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.plan.layout import GATHER_SHARE
from phalanx.simulate.hardware import FP32, NCCL_SMS, Network, Oracle, beside
from phalanx.simulate.mapping import Job, Mapping
from phalanx.simulate.step.device_memory import kept_state, shards

OPTIMIZER_BYTES = 32
"""Moved for a parameter that this rank updates: gradient twice (norm, update), three states in and out. Besides the weight in the compute type goes out."""

VOTE_TRIPS = 6
"""Round trips of a vote to the service, at most (docs/explanation/elastic-recovery.md)."""


@dataclass(frozen=True)
class ReplicaTraffic:
    """Data-parallel traffic of a mapping. Parameters of a rank are given as (dense, expert)."""

    job: Job
    mapping: Mapping
    network: Network

    def traffic(self, own: tuple[float, float]) -> tuple[float, float]:
        """Seconds of gathering parameters and of reducing gradients."""
        gather, reduce = self._over_ranks(own)
        back, there = self._over_holders(own[1])
        return gather + back, reduce + there

    def _over_holders(self, expert: float) -> tuple[float, float]:
        """The same of experts with replicas (`plan/layout/holders.py`): parts of gradients go to those who complete them; what comes back are sums, before the update, or updated parameters."""
        m, f = self.mapping, self.mapping.folding
        if m.slots is None or not m.slots.sent:
            return 0.0, 0.0
        span = m.span(f.ep, f.etp, ranks_per_host=self.network.hardware.ranks_per_host)
        elements = expert * m.slots.sent / m.slots.held * span.size / max(1, span.size - 1)
        there = self.network.all_to_all(m.gradient_bytes * elements, span)
        if m.slots.state == "whole":
            return 0.0, 2 * there
        return self.network.all_to_all(m.item_bytes * elements, span), there

    def _over_ranks(self, own: tuple[float, float]) -> tuple[float, float]:
        f, per_host = self.mapping.folding, self.network.hardware.ranks_per_host
        if self.mapping.sharding == "none":  # every rank makes every update, from whole sums
            ends = ((f.dp * f.cp, f.tp), (f.edp, f.etp * f.ep))
            spans = [self.mapping.span(size, stride, ranks_per_host=per_host) for size, stride in ends]
            sizes = [self.mapping.gradient_bytes * n for n in own]
            return 0.0, sum(self.network.all_reduce(size, span) for size, span in zip(sizes, spans, strict=True))
        by_dense, by_expert = shards(self.mapping)
        stride = f.tp if by_dense == f.dp * f.cp else f.tp * f.cp
        dense = self.mapping.span(by_dense, stride, ranks_per_host=per_host)
        expert = self.mapping.span(by_expert, f.etp * f.ep * (f.edp // by_expert), ranks_per_host=per_host)
        gather, reduce = (
            self.network.all_gather(width * own[0], dense) + self.network.all_gather(width * own[1], expert)
            for width in (self.mapping.item_bytes, self.mapping.gradient_bytes)
        )
        if self.mapping.holders > 1:
            gather = sum(
                self.network.all_gather(self.mapping.item_bytes * n, span) * self._published(span.size)
                for n, span in zip(own, (dense, expert), strict=True)
            )
        return gather, reduce

    def _published(self, shards: int) -> float:
        """Share of an all-gather that is left where holders round their own copies (`plan/layout/shard_copies.py: publication`)."""
        lacking = max(0, shards - self.mapping.holders) / max(1, shards - 1)
        return lacking if lacking <= GATHER_SHARE else 1.0

    @property
    def vote_s(self) -> float:
        """Round trips to the service that decides whether a step is committed."""
        h = self.network.hardware
        way = h.inside_latency_s if self.mapping.folding.world <= h.ranks_per_host else h.between_latency_s
        return 2 * VOTE_TRIPS * way if self.mapping.votes else 0.0

    def exposed(self, own: tuple[float, float], *, forward: float, backward: float, layers: int, passes: int) -> float:
        """Seconds that the step is longer for it. `forward`, `backward`: passes of one micro-batch over this rank's layers."""
        gather, reduce = self.traffic(own)
        if self.mapping.sharding != "parameters":
            return self.vote_s + sum(self.left(gather, reduce, forward=forward, backward=backward, layers=layers))
        each = self.mapping.reshard_after_forward
        times, back = (passes, reduce + gather) if each else (1, reduce)
        if not self.mapping.overlap.fsdp:
            return self.vote_s + times * (gather + back)
        taken, last = self.network.hardware.share_of(NCCL_SMS), 1 / max(1, layers)
        left = gather * last + beside(gather, forward, taken) + beside(back, backward, taken)
        return self.vote_s + times * left

    def ends(self, own: tuple[float, float], *, forward: float, backward: float, layers: int) -> tuple[float, float]:
        """Seconds of gathering parameters and of reducing gradients that the passes of one micro-batch do not hide, where parameters are not sharded."""
        return self.left(*self.traffic(own), forward=forward, backward=backward, layers=layers)

    def left(
        self, gather: float, reduce: float, *, forward: float, backward: float, layers: int
    ) -> tuple[float, float]:
        """What passes of one micro-batch leave of both; where gradients are sharded, every micro-batch reduces its own."""
        times = self.mapping.num_microbatches(self.job) if self.mapping.sharding == "gradients" else 1
        if not self.mapping.overlap.dp:
            return gather, times * reduce
        taken, last = self.network.hardware.share_of(NCCL_SMS), 1 / max(1, layers)

        def of(seconds: float, room: float) -> float:
            return seconds * last + beside(seconds * (1 - last), room * (1 - last), taken)

        return of(gather, forward), times * of(reduce, backward)

    def optimizer(self, own: tuple[float, float], oracle: Oracle) -> float:
        """Update of this rank's share, and gradients set to zero."""
        mine = sum(kept_state(self.job, self.mapping, own))
        narrower = 4 * (FP32 - self.mapping.moment_bytes)  # both moments, read and written
        each = OPTIMIZER_BYTES - narrower + self.mapping.item_bytes
        return oracle.memory(mine * each + sum(own) * FP32, kernels=20)
