"""How long an overlapped layer takes: a clock over the very operations that the executor carries out.

Decides nothing. The clock takes the other ranks to be busy in the same way at the same time: a message from a peer takes its turn on the peer's link and on this
rank's, and a result comes back when this rank's own result for the mirrored peer has left. That is quick enough to compare schedules for every batch; the
tests hold it against a clock over the plans of all ranks (`tests/oracles/overlap_clock.py`).

Links are full duplex, messages of a rank leave one after the other in the order in which they are posted. While bytes move, compute is slower by `interference` (on a
CPU the transport takes cycles, on a GPU processors). All times are seconds, rates bytes or floating-point operations per second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from phalanx.plan.moe import Ints
from phalanx.plan.moe.overlap.prediction.bytes import WireBytes
from phalanx.plan.moe.overlap.prediction.cost import LayerWork, OverlapCost
from phalanx.plan.moe.overlap.tiles import TileOp


def seconds_of(ops: Sequence[TileOp], work: LayerWork, cost: OverlapCost, wire: WireBytes) -> float:
    """Seconds of one rank's operations if all ranks are as busy as it."""
    clock, at = RankClock(work, cost, wire), 0.0
    for op in ops:
        at, _ = clock.after(op, at)
    return at


class RankClock:
    """The clock of one rank whose peers do what it does when it does."""

    def __init__(self, work: LayerWork, cost: OverlapCost, wire: WireBytes) -> None:
        self.work, self.cost, self.wire = work, cost, wire
        rank, per_byte = work.rank, 1 / cost.bytes_per_s
        leaving = wire.leaving_PP
        near_s = per_byte if cost.near_bytes_per_s is None else 1 / cost.near_bytes_per_s
        hosts = wire.host_of_rank
        apart = np.asarray(hosts)[:, None] != np.asarray(hosts)
        on_link = leaving if cost.near_bytes_per_s is None else np.where(apart, leaving, 0)
        self.arrival, self.came_until = _arrivals(work, cost, on_link)
        if cost.near_bytes_per_s is not None:
            self.arrival |= self._near_arrivals(leaving, near_s)
        self.per_byte = [per_byte if host != hosts[rank] else near_s for host in hosts]
        self.is_far = [wire.legs is not None and host != hosts[rank] for host in hosts]
        self.through_s = near_s
        self.leaving_in, self.inbound = leaving[:, rank].tolist(), wire.last_inbound_PP[rank].tolist()
        self.back_in = wire.inbound_PP[:, rank].tolist()
        self.out_free = float(on_link[rank].sum()) * per_byte
        self.returned: dict[tuple[int, int, int], float] = {}
        """Own results by (rank, part, block): when they are there."""
        self.passed: dict[int, float] = {}
        """When what this rank passed on was there, by part."""
        self.sums: dict[tuple[int, int], float] = {}
        """When partial sums were at their gateway, by (part, block)."""
        self.merged: dict[tuple[int, int], float] = {}

    def _near_arrivals(self, leaving_PP: Ints, near_s: float) -> dict[tuple[int, int], float]:
        """When parts of this host's ranks are there, which do not take the link between hosts."""
        hosts, rank, work = self.wire.host_of_rank, self.work.rank, self.work
        near = [p for p, host in enumerate(hosts) if host == hosts[rank] and p != rank]
        return {
            (p, part): self.cost.latency_s + float(leaving_PP[p, rank]) * near_s * math.fsum(work.share[p][: part + 1])
            for p in near
            for part in range(work.come[p])
        }

    def after(self, op: TileOp, at: float) -> tuple[float, float]:
        """When an operation ends that begins at `at`, and the seconds of the message that it waited for, by itself."""
        kind, peer, part, work, latency_s = op.kind, op.peer, op.part, self.work, self.cost.latency_s
        if kind == "wait" and not self.is_far[peer]:
            seconds = self.leaving_in[peer] * self.per_byte[peer] * work.share[peer][part]
            return max(at, self.arrival[peer, part]), latency_s + seconds
        if kind == "wait":
            return max(at, self.passed.get(part, at)), latency_s if self.passed else 0.0
        if kind == "wait_return":
            seconds = self.back_in[peer] * self.per_byte[peer] / (work.go[peer] * work.blocks)
            late = self.out_free + latency_s
            if self.is_far[peer]:
                return max(at, self.merged.get((part, op.block), late)), latency_s + seconds
            mirrored = (2 * work.rank - peer) % work.size, part, op.block
            return max(at, self.returned.get(mirrored, late)), latency_s + seconds
        start = at
        if kind == "relay":
            start = max(at, self.arrival[peer, part])
        elif kind == "merge":
            start = max([at, *(end for (k, block), end in self.sums.items() if k <= part and block == op.block)])
        return self._compute(op, start), 0.0

    def _compute(self, op: TileOp, at: float) -> float:
        """The operation itself, and what it posts."""
        busy_until = max(self.out_free, self.came_until)
        seconds, work = self.work.seconds(op, self.cost), self.work
        at = at + seconds if busy_until <= at else self.cost.slowed(seconds, at=at, busy_until=busy_until)
        if op.kind == "return" and op.peer != work.rank:
            num_bytes = self.inbound[op.peer] * work.share[op.peer][op.part] / work.blocks
            if self.is_far[op.peer]:
                there = self._posted(num_bytes * self.through_s, at, on_link=self.cost.near_bytes_per_s is None)
                key = (op.part, op.block)
                self.sums[key] = max(self.sums.get(key, 0.0), there)
            else:
                per_byte = self.per_byte[op.peer]
                on_link = per_byte == 1 / self.cost.bytes_per_s
                self.returned[op.peer, op.part, op.block] = self._posted(num_bytes * per_byte, at, on_link=on_link)
        elif op.kind == "relay":
            num_bytes = self.leaving_in[op.peer] / work.relay[op.peer]  # about as much goes on as has come
            there = self._posted(num_bytes * self.through_s, at, on_link=self.cost.near_bytes_per_s is None)
            self.passed[op.part] = max(self.passed.get(op.part, 0.0), there)
        elif op.kind == "merge":
            num_bytes = float(self.wire.inbound_PP[work.rank, op.peer]) / (work.relay[op.peer] * work.blocks)
            there = self._posted(num_bytes / self.cost.bytes_per_s, at, on_link=True)
            self.merged[op.part, op.block] = max(self.merged.get((op.part, op.block), 0.0), there)
        return at

    def _posted(self, seconds: float, at: float, *, on_link: bool) -> float:
        """When a message is there that is posted at `at`."""
        if not on_link:
            return at + seconds + self.cost.latency_s
        self.out_free = max(at, self.out_free) + seconds
        return self.out_free + self.cost.latency_s


def _arrivals(work: LayerWork, cost: OverlapCost, leaving_PP: Ints) -> tuple[dict[tuple[int, int], float], float]:
    """When each (source, part) is there, and when the last is: every source sends part by part, round the ring from its next rank on."""
    rank, size = work.rank, work.size
    shares = list(work.share)
    for source, number in enumerate(work.relay):
        if number:
            shares[source] = [1 / number] * number
    parts = max(map(len, shares), default=0)
    others = [p for p in range(size) if p != rank and shares[p] and (not work.relay or leaving_PP[p, rank])]
    if not others:
        return {}, 0.0
    ring = (np.arange(size)[:, None] + np.arange(1, size)) % size
    round_s = np.take_along_axis(leaving_PP, ring, 1) / (parts * cost.bytes_per_s)
    ends, rounds = np.cumsum(round_s, 1), round_s.sum(1)
    left = {
        (p, part): float(rounds[p] * parts * math.fsum(shares[p][:part]) + ends[p, (rank - p - 1) % size])
        for p in others
        for part in range(len(shares[p]))
    }
    arrival, free = {}, 0.0
    for (p, part), out_s in sorted(left.items(), key=lambda item: (item[1], item[0])):
        free = max(free + float(leaving_PP[p, rank]) * shares[p][part] / cost.bytes_per_s, out_s)
        arrival[p, part] = free + cost.latency_s
    return arrival, free
