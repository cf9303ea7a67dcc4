"""How long an overlapped layer takes: a clock over the very operations that the executor carries out.

Decides nothing. Two clocks share all times of operations and links:

- `predict` of the plans of all ranks lets `overlap_events.simulate` carry them out;
- `predict` of one plan takes the others to be busy in the same way at the same time: a message from a peer takes its turn on the peer's link and on this
  rank's, and a result comes back when this rank's own result for the mirrored peer has left. That is quick enough to compare schedules for every batch.

Links are full duplex, messages of a rank leave one after the other in the order in which they are posted. While bytes move, compute is slower by `interference` (on a
CPU the transport takes cycles, on a GPU processors). All times are seconds, rates bytes or floating-point operations per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe import Ints
from phalanx.plan.moe.overlap.bytes import WireBytes
from phalanx.plan.moe.overlap.cost import LayerShape, OverlapCost, RankWork, work_of
from phalanx.plan.moe.overlap.events import WAITS, simulate
from phalanx.plan.moe.overlap.hosts import gateway
from phalanx.plan.moe.overlap.types import Kind, Op, RankPlan

__all__ = ["OpTime", "Prediction", "predict", "seconds_of"]


@dataclass(frozen=True, slots=True)
class OpTime:
    """One operation on the clock. For waits: the message's own seconds on the link, and how many of them the rank stood still."""

    rank: int
    op: Op
    start_s: float
    end_s: float
    communication_s: float = 0.0

    @property
    def exposed_s(self) -> float:
        """Stood still, for the link or for a peer that was not ready."""
        return self.end_s - self.start_s if self.op.kind in WAITS else 0.0

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.communication_s - self.exposed_s)


@dataclass(frozen=True)
class Prediction:
    """Seconds of one pass of one layer until the slowest rank is done, and its operations."""

    seconds: float
    ops: tuple[OpTime, ...]
    """Of all ranks that were put on the clock."""

    @property
    def slowest(self) -> int:
        return max(self.ops, key=lambda op: (op.end_s, -op.rank)).rank

    @property
    def communication_s(self) -> float:
        """Of the slowest rank's messages on the link."""
        return sum(op.communication_s for op in self.ops if op.rank == self.slowest)

    @property
    def exposed_s(self) -> float:
        return sum(op.exposed_s for op in self.ops if op.rank == self.slowest)

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.communication_s - self.exposed_s)

    def explain(self) -> str:
        return f"{self.seconds * 1e3:.3f} ms; communication {self.communication_s * 1e3:.3f} ms, of which {self.exposed_s * 1e3:.3f} ms exposed (rank {self.slowest})"


def predict(plans: Sequence[RankPlan] | RankPlan, shape: LayerShape, cost: OverlapCost, wire: WireBytes) -> Prediction:
    """Seconds of the plans of all ranks together, or of one rank's plan if all are as busy as it.

    `wire` says how many bytes go between which ranks (`overlap_bytes.wire_bytes`); a part has its share of the rows.
    """
    several = [plans] if isinstance(plans, RankPlan) else list(plans)
    size = several[0].size if several else 0
    if len(several) not in (1, size) or wire.going_PP.shape != (size, size):
        rule = f"one plan, or those of all {size} ranks, and bytes between as many"
        raise_if([Problem(where="plans", value=len(several), rule=rule)], PlanError, subject="prediction")
    works = [work_of(plan, shape, cost) for plan in several]
    if len(several) == 1 < size:
        ops: list[OpTime] = []
        return Prediction(seconds_of(several[0].ops, works[0], cost, wire, record=ops), tuple(ops))
    timing = _LinkTiming(works, cost, wire)
    trace = simulate(several, timing)
    ops = [OpTime(e.rank, e.op, e.start_s, e.end_s, timing.message_s(e.rank, e.op)) for e in trace.events]
    return Prediction(trace.seconds, tuple(ops))


class _LinkTiming:
    """Times of operations and messages for all ranks together: each rank has one way out and one way in."""

    def __init__(self, works: Sequence[RankWork], cost: OverlapCost, wire: WireBytes) -> None:
        self.works, self.cost, self.wire = works, cost, wire
        self.out_free = [0.0] * len(works)
        self.taken: list[list[tuple[float, float]]] = [[] for _ in works]
        """Of each rank's way in: when it is busy, ascending."""

    def message(self, rank: int, op: Op, *, to: int = -1) -> tuple[int, float]:
        """Whom a message goes to that `rank` posts in `op`, and its bytes. `to`: to which rank a relay passes it on."""
        wire, peer, part, work = self.wire, op.peer, op.part, self.works[rank]
        hosts, legs = wire.host_of_rank, wire.legs
        far = legs is not None and hosts[peer] != hosts[rank]
        if op.kind == "relay":
            return to, float(wire.last_going_PP[peer, to]) * self.works[to].share[peer][part]
        if op.kind == "send":
            if legs is not None and far:
                return peer, float(legs.first_going_PP[rank, peer]) / self.works[peer].relay[rank]
            return peer, float(wire.last_going_PP[rank, peer]) * self.works[peer].share[rank][part]
        if op.kind == "merge" and legs is not None:
            return peer, float(legs.first_coming_PP[rank, peer]) / (work.relay[peer] * work.blocks)
        to = gateway(hosts, peer, hosts[rank]) if far else peer
        return to, float(wire.last_coming_PP[rank, peer]) * work.share[peer][part] / work.blocks

    def message_s(self, rank: int, op: Op) -> float:
        """Of the message that an operation waits for, by itself."""
        if op.kind not in WAITS:
            return 0.0
        hosts, peer = self.wire.host_of_rank, op.peer
        far = self.wire.legs is not None and hosts[peer] != hosts[rank]
        if op.kind == "wait" and far:
            through = gateway(hosts, peer, hosts[rank])
            num_bytes = self.message(through, Op("relay", peer, op.part), to=rank)[1]
            return 0.0 if through == rank else self.cost.latency_s + self._rate_s(through, rank, num_bytes)
        if op.kind == "merge":
            return 0.0  # several, at once: what is exposed of them shows as time
        posts: dict[str, Kind] = {"wait": "send", "relay": "send", "wait_return": "merge" if far else "return"}
        num_bytes = self.message(peer, Op(posts[op.kind], rank, op.part, op.block))[1]
        return self.cost.latency_s + self._rate_s(peer, rank, num_bytes)

    def _rate_s(self, rank: int, to: int, num_bytes: float) -> float:
        return num_bytes / (self.cost.bytes_per_s if self._on_link(rank, to) else self.cost.near_bytes_per_s or inf)

    def _on_link(self, rank: int, to: int) -> bool:
        hosts = self.wire.host_of_rank
        return self.cost.near_bytes_per_s is None or hosts[rank] != hosts[to]

    def ends(self, plan: RankPlan, op: Op, at: float) -> float:
        taken = self.taken[plan.rank]
        busy = max(self.out_free[plan.rank], taken[-1][1] if taken else 0.0)
        return self.cost.slowed(self.works[plan.rank].seconds(op, self.cost), at=at, busy_until=busy)

    def arrives(self, plan: RankPlan, op: Op, at: float) -> float:
        return self._arrives(plan.rank, *self.message(plan.rank, op), at)

    def forwards(self, plan: RankPlan, op: Op, at: float, to: int) -> float:
        return self._arrives(plan.rank, *self.message(plan.rank, op, to=to), at)

    def _arrives(self, rank: int, to: int, num_bytes: float, at: float) -> float:
        if rank == to:
            return at
        seconds = self._rate_s(rank, to, num_bytes)
        if not self._on_link(rank, to):
            return at + seconds + self.cost.latency_s
        begins = max(at, self.out_free[rank])
        self.out_free[rank] = begins + seconds
        return self._in(self.taken[to], begins, seconds) + self.cost.latency_s

    @staticmethod
    def _in(taken: list[tuple[float, float]], begins: float, seconds: float) -> float:
        """When a message is through the first gap of a way in that holds it. Messages are posted long before they leave, so gaps are filled later."""
        at = len(taken)
        while at and taken[at - 1][1] > begins:
            at -= 1
        while at < len(taken) and taken[at][0] - begins < seconds:
            begins = max(begins, taken[at][1])
            at += 1
        taken.insert(at, (begins, begins + seconds))
        return begins + seconds


def seconds_of(
    ops: Sequence[Op], work: RankWork, cost: OverlapCost, wire: WireBytes, *, record: list[OpTime] | None = None
) -> float:
    """Seconds of one rank's operations if all ranks are as busy as it; `record` gets them one by one."""
    clock = _Alone(work, cost, wire)
    at = 0.0
    for op in ops:
        start = at
        at, message_s = clock.after(op, start)
        if record is not None:
            record.append(OpTime(work.rank, op, start, at, message_s))
    return at


class _Alone:
    """The clock of one rank whose peers do what it does when it does."""

    def __init__(self, work: RankWork, cost: OverlapCost, wire: WireBytes) -> None:
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
        self.leaving_in, self.coming = leaving[:, rank].tolist(), wire.last_coming_PP[rank].tolist()
        self.back_in = wire.coming_PP[:, rank].tolist()
        self.out_free = float(on_link[rank].sum()) * per_byte
        self.returned: dict[tuple[int, int, int], float] = {}
        """Own results by (rank, part, block): when they are there."""
        self.passed: dict[int, float] = {}
        """By part: when what this rank passed on was there."""
        self.sums: dict[tuple[int, int], float] = {}
        """By (part, block): when partial sums were at their gateway."""
        self.merged: dict[tuple[int, int], float] = {}

    def _near_arrivals(self, leaving_PP: Ints, near_s: float) -> dict[tuple[int, int], float]:
        """When parts of this host's ranks are there, which do not take the link between hosts."""
        hosts, rank, work = self.wire.host_of_rank, self.work.rank, self.work
        near = [p for p, host in enumerate(hosts) if host == hosts[rank] and p != rank]
        return {
            (p, part): self.cost.latency_s + float(leaving_PP[p, rank]) * near_s * sum(work.share[p][: part + 1])
            for p in near
            for part in range(work.come[p])
        }

    def after(self, op: Op, at: float) -> tuple[float, float]:
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

    def _compute(self, op: Op, at: float) -> float:
        """The operation itself, and what it posts."""
        busy_until = max(self.out_free, self.came_until)
        seconds, work = self.work.seconds(op, self.cost), self.work
        at = at + seconds if busy_until <= at else self.cost.slowed(seconds, at=at, busy_until=busy_until)
        if op.kind == "return" and op.peer != work.rank:
            num_bytes = self.coming[op.peer] * work.share[op.peer][op.part] / work.blocks
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
            num_bytes = float(self.wire.coming_PP[work.rank, op.peer]) / (work.relay[op.peer] * work.blocks)
            there = self._posted(num_bytes / self.cost.bytes_per_s, at, on_link=True)
            self.merged[op.part, op.block] = max(self.merged.get((op.part, op.block), 0.0), there)
        return at

    def _posted(self, seconds: float, at: float, *, on_link: bool) -> float:
        """When a message is there that is posted at `at`."""
        if not on_link:
            return at + seconds + self.cost.latency_s
        self.out_free = max(at, self.out_free) + seconds
        return self.out_free + self.cost.latency_s


def _arrivals(work: RankWork, cost: OverlapCost, leaving_PP: Ints) -> tuple[dict[tuple[int, int], float], float]:
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
        (p, part): float(rounds[p] * parts * sum(shares[p][:part]) + ends[p, (rank - p - 1) % size])
        for p in others
        for part in range(len(shares[p]))
    }
    arrival, free = {}, 0.0
    for (p, part), out_s in sorted(left.items(), key=lambda item: (item[1], item[0])):
        free = max(free + float(leaving_PP[p, rank]) * shares[p][part] / cost.bytes_per_s, out_s)
        arrival[p, part] = free + cost.latency_s
    return arrival, free
