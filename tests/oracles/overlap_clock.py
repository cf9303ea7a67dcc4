"""All ranks' plans of overlap on one clock: what the clock of a single rank (`plan/moe/overlap/prediction/clock.py`) is held against.

`predict` of the plans of all ranks lets `overlap_events.simulate` carry them out; `predict` of one plan uses the product's own clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from overlap_events import WAITS, simulate

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe.overlap.prediction.bytes import WireBytes
from phalanx.plan.moe.overlap.prediction.clock import RankClock
from phalanx.plan.moe.overlap.prediction.cost import LayerShape, LayerWork, OverlapCost, work_of
from phalanx.plan.moe.overlap.tiles.hosts import gateway
from phalanx.plan.moe.overlap.tiles.types import Kind, RankPlan, TileOp


@dataclass(frozen=True, slots=True)
class OpTime:
    """One operation on the clock. For waits: the message's own seconds on the link, and how many of them the rank stood still."""

    rank: int
    op: TileOp
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

    `wire` says how many bytes go between which ranks (`phalanx.plan.moe.overlap.prediction.bytes.wire_bytes`); a part has its share of the rows.
    """
    several = [plans] if isinstance(plans, RankPlan) else list(plans)
    size = several[0].size if several else 0
    if len(several) not in (1, size) or wire.outbound_PP.shape != (size, size):
        rule = f"one plan, or those of all {size} ranks, and bytes between as many"
        raise_if([Problem(where="plans", value=len(several), rule=rule)], PlanError, subject="prediction")
    works = [work_of(plan, shape, cost) for plan in several]
    if len(several) == 1 < size:
        ops = _of_one(several[0].ops, works[0], cost, wire)
        return Prediction(ops[-1].end_s if ops else 0.0, tuple(ops))
    timing = _LinkTiming(works, cost, wire)
    trace = simulate(several, timing)
    ops = [OpTime(e.rank, e.op, e.start_s, e.end_s, timing.message_s(e.rank, e.op)) for e in trace.events]
    return Prediction(trace.seconds, tuple(ops))


def _of_one(ops: Sequence[TileOp], work: LayerWork, cost: OverlapCost, wire: WireBytes) -> list[OpTime]:
    """The operations on the clock that a run chooses by (`RankClock`)."""
    clock, at, found = RankClock(work, cost, wire), 0.0, []
    for op in ops:
        start = at
        at, message_s = clock.after(op, start)
        found.append(OpTime(work.rank, op, start, at, message_s))
    return found


class _LinkTiming:
    """Times of operations and messages for all ranks together: each rank has one way out and one way in."""

    def __init__(self, works: Sequence[LayerWork], cost: OverlapCost, wire: WireBytes) -> None:
        self.works, self.cost, self.wire = works, cost, wire
        self.out_free = [0.0] * len(works)
        self.taken: list[list[tuple[float, float]]] = [[] for _ in works]
        """Of each rank's way in: when it is busy, ascending."""

    def message(self, rank: int, op: TileOp, *, to: int = -1) -> tuple[int, float]:
        """Whom a message goes to that `rank` posts in `op`, and its bytes. `to`: to which rank a relay passes it on."""
        wire, peer, part, work = self.wire, op.peer, op.part, self.works[rank]
        hosts, legs = wire.host_of_rank, wire.legs
        far = legs is not None and hosts[peer] != hosts[rank]
        if op.kind == "relay":
            return to, float(wire.last_outbound_PP[peer, to]) * self.works[to].share[peer][part]
        if op.kind == "send":
            if legs is not None and far:
                return peer, float(legs.first_outbound_PP[rank, peer]) / self.works[peer].relay[rank]
            return peer, float(wire.last_outbound_PP[rank, peer]) * self.works[peer].share[rank][part]
        if op.kind == "merge" and legs is not None:
            return peer, float(legs.first_inbound_PP[rank, peer]) / (work.relay[peer] * work.blocks)
        to = gateway(hosts, peer, hosts[rank]) if far else peer
        return to, float(wire.last_inbound_PP[rank, peer]) * work.share[peer][part] / work.blocks

    def message_s(self, rank: int, op: TileOp) -> float:
        """Of the message that an operation waits for, by itself."""
        if op.kind not in WAITS:
            return 0.0
        hosts, peer = self.wire.host_of_rank, op.peer
        far = self.wire.legs is not None and hosts[peer] != hosts[rank]
        if op.kind == "wait" and far:
            through = gateway(hosts, peer, hosts[rank])
            num_bytes = self.message(through, TileOp("relay", peer, op.part), to=rank)[1]
            return 0.0 if through == rank else self.cost.latency_s + self._rate_s(through, rank, num_bytes)
        if op.kind == "merge":
            return 0.0  # several, at once: what is exposed of them shows as time
        posts: dict[str, Kind] = {"wait": "send", "relay": "send", "wait_return": "merge" if far else "return"}
        num_bytes = self.message(peer, TileOp(posts[op.kind], rank, op.part, op.block))[1]
        return self.cost.latency_s + self._rate_s(peer, rank, num_bytes)

    def _rate_s(self, rank: int, to: int, num_bytes: float) -> float:
        return num_bytes / (self.cost.bytes_per_s if self._on_link(rank, to) else self.cost.near_bytes_per_s or inf)

    def _on_link(self, rank: int, to: int) -> bool:
        hosts = self.wire.host_of_rank
        return self.cost.near_bytes_per_s is None or hosts[rank] != hosts[to]

    def ends(self, plan: RankPlan, op: TileOp, at: float) -> float:
        taken = self.taken[plan.rank]
        busy = max(self.out_free[plan.rank], taken[-1][1] if taken else 0.0)
        return self.cost.slowed(self.works[plan.rank].seconds(op, self.cost), at=at, busy_until=busy)

    def arrives(self, plan: RankPlan, op: TileOp, at: float) -> float:
        return self._arrives(plan.rank, *self.message(plan.rank, op), at)

    def forwards(self, plan: RankPlan, op: TileOp, at: float, to: int) -> float:
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
