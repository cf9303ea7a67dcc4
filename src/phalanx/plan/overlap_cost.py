"""How long an overlapped layer takes: a clock over the very operations that the executor carries out.

Decides nothing by itself; `overlap_choose.py` chooses a schedule with it and fits its numbers to measurements. Two clocks share all times of operations and links:

- `predict` of the plans of all ranks lets `overlap_events.simulate` carry them out;
- `predict` of one plan takes the others to be busy in the same way at the same time: a message from a peer takes its turn on the peer's link and on this
  rank's, and a result comes back when this rank's own result for the mirrored peer has left. That is quick enough to compare schedules for every batch.

Links are full duplex, messages of a rank leave one after the other in the order in which they are posted. While bytes move, compute is slower by `interference` (on a
CPU the transport takes cycles, on a GPU processors). All times are seconds, rates bytes or floating-point operations per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import ConfigError, PlanError, Problem, raise_if
from phalanx.plan.overlap_bytes import WireBytes
from phalanx.plan.overlap_events import simulate
from phalanx.plan.overlap_types import Op, RankPlan

__all__ = ["LayerShape", "OpTime", "OverlapCost", "Prediction", "RankWork", "predict", "seconds_of", "work_of"]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One MoE layer as its rank holds it."""

    tokens: int
    """Of this rank."""
    hidden: int
    ffn: int
    """Width of an expert on this rank (an `etp` slice)."""
    element_bytes: int
    slots: int
    gated: bool = True
    """Two first projections, as in SwiGLU."""
    shared_ffn: int = 0
    """Width of the shared expert on this rank, 0 for none."""

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.element_bytes

    def row_flop(self, direction: Literal["forward", "backward"]) -> tuple[int, int, int]:
        """Of one row: first product, second product, gradients of weights (none forward)."""
        product = 2 * self.hidden * self.ffn
        up = product * (2 if self.gated else 1)
        return (up, product, 0) if direction == "forward" else (product, up, product + up)

    def shared_flop(self, direction: Literal["forward", "backward"]) -> int:
        products = 3 if self.gated else 2
        return self.tokens * 2 * self.hidden * self.shared_ffn * products * (1 if direction == "forward" else 2)


@dataclass(frozen=True, kw_only=True)
class OverlapCost:
    """Of one kind of machine and link. Made by hand or by `overlap_choose.fit`."""

    latency_s: float
    bytes_per_s: float
    """Of one rank's link, each way."""
    flops_by_rows: tuple[tuple[int, float], ...]
    """(rows of a product, floating-point operations per second), rows ascending."""
    op_s: float = 0.0
    """Overhead of any operation."""
    block_s: float = 0.0
    """Overhead of each further block of columns of a part."""
    interference: float = 0.0
    """Compute takes 1 + this times as long while bytes move."""
    copy_bytes_per_s: float = inf
    """Rows that are gathered or added up in memory."""

    def __post_init__(self) -> None:
        raise_if([*self._problems()], ConfigError, subject="cost of overlap")

    def _problems(self) -> list[Problem]:
        problems = [
            Problem(where=f"cost.{name}", value=value, rule="not negative")
            for name in ("latency_s", "op_s", "block_s", "interference")
            if not (value := getattr(self, name)) >= 0
        ]
        problems += [
            Problem(where=f"cost.{name}", value=value, rule="above 0")
            for name in ("bytes_per_s", "copy_bytes_per_s")
            if not (value := getattr(self, name)) > 0
        ]
        rows = [rows for rows, _ in self.flops_by_rows]
        if not rows or any(b <= a for a, b in pairwise((0, *rows))) or any(not f > 0 for _, f in self.flops_by_rows):
            rule = "at least one entry, rows ascending from 1, rates above 0"
            problems.append(Problem(where="cost.flops_by_rows", value=self.flops_by_rows, rule=rule))
        return problems

    @cached_property
    def _table(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        rows, rates = zip(*self.flops_by_rows, strict=True)
        return np.log2(rows), np.asarray(rates, dtype=np.float64)

    def row_seconds(self, rows: Sequence[int]) -> NDArray[np.float64]:
        """Seconds per floating-point operation of a row times rows, for products of these rows; between table entries linear in log(rows)."""
        sizes = np.asarray(rows, dtype=np.float64)
        seconds: NDArray[np.float64] = sizes / np.interp(np.log2(np.maximum(sizes, 1)), *self._table)
        return seconds

    def slowed(self, seconds: float, *, at: float, busy_until: float) -> float:
        """When compute of `seconds` ends that begins `at` while bytes move until `busy_until`."""
        slow, busy = 1 + self.interference, busy_until - at
        if busy <= 0:
            return at + seconds
        return at + seconds * slow if seconds * slow <= busy else at + busy + seconds - busy / slow


@dataclass(frozen=True)
class RankWork:
    """What a rank has to do, by part: all that a clock must know besides the order."""

    rank: int
    size: int
    come: tuple[int, ...]
    """Parts of each source."""
    go: tuple[int, ...]
    """Parts that each rank has of this rank's rows."""
    share: list[list[float]]
    """Of the rows of each source, by part."""
    first_s: list[list[float]]
    second_s: list[list[float]]
    """Of all blocks."""
    copy_s: list[list[float]]
    weights_s: list[float]
    shared_s: float
    blocks: int

    def seconds(self, op: Op, cost: OverlapCost) -> float:
        """Of one operation by itself."""
        kind, p, part = op.kind, op.peer, op.part
        if kind == "first":
            return cost.op_s + self.first_s[p][part] + self.copy_s[p][part]
        if kind == "second":
            return cost.op_s + self.second_s[p][part] / self.blocks + (cost.block_s if op.block else 0.0)
        if kind == "return":
            return cost.op_s + self.copy_s[p][part] / self.blocks
        if kind == "weights":
            return cost.op_s + self.weights_s[part]
        return cost.op_s + (self.shared_s if kind == "shared" else 0.0)


def work_of(plan: RankPlan, shape: LayerShape, cost: OverlapCost) -> RankWork:
    """The work of a plan's parts on a machine."""
    sizes = [[tile.rows for tile in tiles] for tiles in plan.tiles]
    slot_rows = [0] * plan.num_slots
    for tiles in plan.tiles:
        for tile in tiles:
            slot_rows[tile.slot] += tile.rows
    timer = TileTimes(sizes, slot_rows, shape, cost, plan.direction)
    return timer.work(plan.rank, plan.part_ends, tuple(map(len, plan.peer_part_ends)), plan.blocks)


class TileTimes:
    """Seconds of all tiles of a rank, the same for every schedule."""

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        slot_rows: Sequence[int],
        shape: LayerShape,
        cost: OverlapCost,
        direction: Literal["forward", "backward"],
    ) -> None:
        first, second, weights = shape.row_flop(direction)
        flat = cost.row_seconds([rows for of_source in sizes for rows in of_source]).tolist()
        self.ends_of_tiles, self.flop_s, at = [], [], 0
        for of_source in sizes:
            self.ends_of_tiles.append([0, *accumulate(of_source)])
            self.flop_s.append([0.0, *accumulate(flat[at : at + len(of_source)])])
            at += len(of_source)
        self.first, self.second = first, second
        self.weights_s = (cost.row_seconds(slot_rows) * weights).tolist() if weights else []
        shared_rate = cost.flops_by_rows[-1][1]
        self.shared_s = shape.shared_flop(direction) / shared_rate
        self.copy_s = shape.row_bytes / cost.copy_bytes_per_s

    def work(self, rank: int, ends: Sequence[Sequence[int]], go: tuple[int, ...], blocks: int) -> RankWork:
        share, first_s, second_s, copy_s = [], [], [], []
        for rows, flop_s, of_source in zip(self.ends_of_tiles, self.flop_s, ends, strict=True):
            cuts = [*pairwise((0, *of_source))]
            share.append([(rows[b] - rows[a]) / rows[-1] for a, b in cuts])
            first_s.append([(flop_s[b] - flop_s[a]) * self.first for a, b in cuts])
            second_s.append([(flop_s[b] - flop_s[a]) * self.second for a, b in cuts])
            copy_s.append([(rows[b] - rows[a]) * self.copy_s for a, b in cuts])
        come = tuple(map(len, ends))
        return RankWork(
            rank, len(come), come, go, share, first_s, second_s, copy_s, self.weights_s, self.shared_s, blocks
        )


# ---- predictions -----------------------------------------------------------------------------------------------------------


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
        return self.end_s - self.start_s if self.op.kind in ("wait", "wait_return") else 0.0

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

    def transfer_s(self, source: int, rank: int, part: int, *, back: bool) -> float:
        """Of the entries of `part` that `rank` has of `source`, on the link: there, or one block of them back."""
        work = self.works[rank]
        amount = self.wire.coming_PP[rank, source] / work.blocks if back else self.wire.going_PP[source, rank]
        return float(amount) * work.share[source][part] / self.cost.bytes_per_s

    def message_s(self, rank: int, op: Op) -> float:
        if op.kind == "wait":
            return self.cost.latency_s + self.transfer_s(op.peer, rank, op.part, back=False)
        if op.kind == "wait_return":
            return self.cost.latency_s + self.transfer_s(rank, op.peer, op.part, back=True)
        return 0.0

    def ends(self, plan: RankPlan, op: Op, at: float) -> float:
        taken = self.taken[plan.rank]
        busy = max(self.out_free[plan.rank], taken[-1][1] if taken else 0.0)
        return self.cost.slowed(self.works[plan.rank].seconds(op, self.cost), at=at, busy_until=busy)

    def arrives(self, plan: RankPlan, op: Op, at: float) -> float:
        back, rank = op.kind == "return", plan.rank
        source, target = (op.peer, rank) if back else (rank, op.peer)
        seconds = self.transfer_s(source, target, op.part, back=back)
        begins = max(at, self.out_free[rank])
        self.out_free[rank] = begins + seconds
        return self._in(self.taken[op.peer], begins, seconds) + self.cost.latency_s

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
    rank, size, per_byte, latency_s = work.rank, work.size, 1 / cost.bytes_per_s, cost.latency_s
    arrival, came_until = _arrivals(work, cost, wire)
    going, coming = (wire.going_PP[:, rank] * per_byte).tolist(), (wire.coming_PP[rank] * per_byte).tolist()
    back_in = (wire.coming_PP[:, rank] * per_byte).tolist()
    at, out_free = 0.0, float(wire.going_PP[rank].sum()) * per_byte
    returned: dict[tuple[int, int, int], float] = {}
    for op in ops:
        kind, peer, part, start, message_s = op.kind, op.peer, op.part, at, 0.0
        if kind == "wait":
            at = max(at, arrival[peer, part])
            message_s = latency_s + going[peer] * work.share[peer][part]
        elif kind == "wait_return":
            at = max(at, returned.get(((2 * rank - peer) % size, part, op.block), out_free + latency_s))
            message_s = latency_s + back_in[peer] / (work.go[peer] * work.blocks)
        else:
            busy_until = out_free if out_free > came_until else came_until
            seconds = work.seconds(op, cost)
            at = at + seconds if busy_until <= at else cost.slowed(seconds, at=at, busy_until=busy_until)
            if kind == "return" and peer != rank:
                out_free = max(at, out_free) + coming[peer] * work.share[peer][part] / work.blocks
                returned[peer, part, op.block] = out_free + latency_s
        if record is not None:
            record.append(OpTime(rank, op, start, at, message_s))
    return at


def _arrivals(work: RankWork, cost: OverlapCost, wire: WireBytes) -> tuple[dict[tuple[int, int], float], float]:
    """When each (source, part) is there, and when the last is: every source sends part by part, round the ring from its next rank on."""
    rank, size, parts = work.rank, work.size, max(work.come, default=0)
    others = [p for p in range(size) if p != rank and work.come[p]]
    if not others:
        return {}, 0.0
    ring = (np.arange(size)[:, None] + np.arange(1, size)) % size
    round_s = np.take_along_axis(wire.going_PP, ring, 1) / (parts * cost.bytes_per_s)
    ends, rounds = np.cumsum(round_s, 1), round_s.sum(1)
    left = {
        (p, part): float(rounds[p] * parts * sum(work.share[p][:part]) + ends[p, (rank - p - 1) % size])
        for p in others
        for part in range(work.come[p])
    }
    arrival, free = {}, 0.0
    for (p, part), out_s in sorted(left.items(), key=lambda item: (item[1], item[0])):
        free = max(free + float(wire.going_PP[p, rank]) * work.share[p][part] / cost.bytes_per_s, out_s)
        arrival[p, part] = free + cost.latency_s
    return arrival, free
