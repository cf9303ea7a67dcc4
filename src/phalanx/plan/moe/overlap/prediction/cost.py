"""What the operations of an overlapped layer cost by themselves: products by their rows, overheads, copies, and the rates of links.

Decides nothing. `clock.py` puts operations on a clock with it, `choose.py` chooses a schedule and fits its numbers to measurements. All times are
seconds, rates bytes or floating-point operations per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.messages import message
from phalanx.plan.moe.overlap.tiles import RankPlan, Tile, TileOp, TileSchedule, parts_of

__all__ = ["LayerShape", "OverlapCost", "LayerWork", "TileTimes", "work_of"]


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One MoE layer as its rank holds it."""

    tokens: int
    """Tokens of this rank."""
    hidden: int
    ffn: int
    """Width of an expert on this rank (an `etp` slice)."""
    element_bytes: int
    slots: int
    gated: bool = True
    """Two first projections, as in SwiGLU."""
    shared_ffn: int = 0
    """Width of the shared expert, 0 for none; with tp a rank computes a part of it, for the tokens of all."""

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.element_bytes

    def row_flop(self, direction: Literal["forward", "backward"]) -> tuple[int, int, int]:
        """FLOP of one row: first product, second product, gradients of weights (none forward)."""
        product = 2 * self.hidden * self.ffn
        up = product * (2 if self.gated else 1)
        return (up, product, 0) if direction == "forward" else (product, up, product + up)

    def shared_flop(self, direction: Literal["forward", "backward"]) -> int:
        products = 3 if self.gated else 2
        return self.tokens * 2 * self.hidden * self.shared_ffn * products * (1 if direction == "forward" else 2)


@message
@dataclass(frozen=True, kw_only=True)
class OverlapCost:
    """Costs of one kind of machine and link. Made by hand or by `choose.fit`."""

    latency_s: float
    bytes_per_s: float
    """Bytes per second of one rank's link, each way."""
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
    near_bytes_per_s: float | None = None
    """Bytes per second of a message inside a host, which leaves the link between hosts alone; None: it takes that link like any
    other."""
    timed: tuple[tuple[TileSchedule, float], ...] = ()
    """Schedules by which whole layers were timed, and measured over predicted seconds: what the clock does not know of each. Empty: the clock alone."""

    def __post_init__(self) -> None:
        raise_if([*self._problems()], ConfigError, subject="cost of overlap")

    def correction(self, schedule: TileSchedule) -> float:
        """What to multiply the clock's seconds of `schedule` by; 1 where it was not timed. Which slots come first makes no other schedule of it."""
        return dict(self.timed).get(replace(schedule, hot_first=False), 1.0)

    def _problems(self) -> list[Problem]:
        problems = [
            Problem(where=f"cost.{name}", value=value, rule="not negative")
            for name in ("latency_s", "op_s", "block_s", "interference")
            if not (value := getattr(self, name)) >= 0
        ]
        problems += [
            Problem(where=f"cost.{name}", value=value, rule="above 0")
            for name in ("bytes_per_s", "copy_bytes_per_s", "near_bytes_per_s")
            if (value := getattr(self, name)) is not None and not value > 0
        ]
        problems += [
            Problem(where=f"cost.timed[{at}]", value=ratio, rule="a ratio above 0")
            for at, (_, ratio) in enumerate(self.timed)
            if not ratio > 0
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
class LayerWork:
    """What a rank has to do, by part: all that a clock must know besides the order."""

    rank: int
    size: int
    come: tuple[int, ...]
    """Parts of each source."""
    go: tuple[int, ...]
    """Parts that each rank has of this rank's rows."""
    share: list[list[float]]
    """Share of each source's rows, by part."""
    first_s: list[list[float]]
    second_s: list[list[float]]
    """Seconds of all blocks."""
    copy_s: list[list[float]]
    """Rows gathered for the first product."""
    sum_s: list[list[float]]
    """Rows added up for the way back."""
    weights_s: list[float]
    shared_s: float
    blocks: int
    relay: tuple[int, ...] = ()
    """Parts of each source that this rank passes on, where messages go through gateways."""
    joint_s: Mapping[int, tuple[float, float, float]] = field(default_factory=dict)
    """Seconds of first product, second product of all blocks, and copies, by joint slot."""

    def seconds(self, op: TileOp, cost: OverlapCost) -> float:
        """Seconds of one operation by itself."""
        kind, p, part = op.kind, op.peer, op.part
        if kind == "first":
            return cost.op_s + self.first_s[p][part] + self.copy_s[p][part]
        if kind == "second":
            return cost.op_s + self.second_s[p][part] / self.blocks + (cost.block_s if op.block else 0.0)
        if kind == "first_all":
            first_s, _, copy_s = self.joint_s[part]
            return cost.op_s + first_s + copy_s
        if kind == "second_all":
            return cost.op_s + self.joint_s[part][1] / self.blocks + (cost.block_s if op.block else 0.0)
        if kind == "return":
            return cost.op_s + self.sum_s[p][part] / self.blocks
        if kind == "weights":
            return cost.op_s + self.weights_s[part]
        return cost.op_s + (self.shared_s if kind == "shared" else 0.0)


def work_of(plan: RankPlan, shape: LayerShape, cost: OverlapCost) -> LayerWork:
    """The work of a plan's parts on a machine."""
    sizes = [[tile.rows for tile in tiles] for tiles in plan.tiles]
    slots = [[tile.slot for tile in tiles] for tiles in plan.tiles]
    slot_rows = [0] * plan.num_slots
    for tiles in plan.tiles:
        for tile in tiles:
            slot_rows[tile.slot] += tile.rows
    joint = Joint(slots, plan.joint_tiles)
    timer = TileTimes(sizes, slot_rows, shape, cost, plan.direction, joint=joint)
    parts = parts_of(plan)
    return timer.work(plan.rank, plan.part_ends, parts.go, plan.blocks, relay=parts.relay)


@dataclass(frozen=True)
class Joint:
    """What is multiplied together on a rank."""

    slots: Sequence[Sequence[int]] = ()
    """Slots of the tiles of each source."""
    tiles: Sequence[Tile] = ()
    """Tiles of the joint slots."""


class TileTimes:
    """Seconds of all tiles of a rank, the same for every schedule."""

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        slot_rows: Sequence[int],
        shape: LayerShape,
        cost: OverlapCost,
        direction: Literal["forward", "backward"],
        *,
        joint: Joint = Joint(),
    ) -> None:
        first, second, weights = shape.row_flop(direction)
        flat = cost.row_seconds([rows for of_source in sizes for rows in of_source]).tolist()
        together = {tile.slot for tile in joint.tiles}
        if together:
            slots = [slot for of_source in joint.slots for slot in of_source]
            flat = [0.0 if slot in together else seconds for slot, seconds in zip(slots, flat, strict=True)]
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
        self.joint_s: dict[int, tuple[float, float, float]] = {}
        for tile, seconds in zip(
            joint.tiles, cost.row_seconds([tile.rows for tile in joint.tiles]).tolist(), strict=True
        ):
            before = self.joint_s.get(tile.slot, (0.0, 0.0, 0.0))
            more = seconds * first, seconds * second, tile.rows * self.copy_s
            self.joint_s[tile.slot] = before[0] + more[0], before[1] + more[1], before[2] + more[2]
        self.alone = (
            [
                [0, *accumulate(0 if slot in together else rows for rows, slot in zip(of_source, slots, strict=True))]
                for of_source, slots in zip(sizes, joint.slots, strict=True)
            ]
            if together
            else self.ends_of_tiles
        )

    def work(
        self,
        rank: int,
        ends: Sequence[Sequence[int]],
        go: tuple[int, ...],
        blocks: int,
        *,
        relay: tuple[int, ...] = (),
    ) -> LayerWork:
        share, first_s, second_s, copy_s, sum_s = [], [], [], [], []
        for rows, alone, flop_s, of_source in zip(self.ends_of_tiles, self.alone, self.flop_s, ends, strict=True):
            cuts = [*pairwise((0, *of_source))]
            share.append([(rows[b] - rows[a]) / rows[-1] for a, b in cuts])
            first_s.append([(flop_s[b] - flop_s[a]) * self.first for a, b in cuts])
            second_s.append([(flop_s[b] - flop_s[a]) * self.second for a, b in cuts])
            copy_s.append([(alone[b] - alone[a]) * self.copy_s for a, b in cuts])
            sum_s.append([(rows[b] - rows[a]) * self.copy_s for a, b in cuts])
        come = tuple(map(len, ends))
        return LayerWork(
            rank=rank,
            size=len(come),
            come=come,
            go=go,
            share=share,
            first_s=first_s,
            second_s=second_s,
            copy_s=copy_s,
            sum_s=sum_s,
            weights_s=self.weights_s,
            shared_s=self.shared_s,
            blocks=blocks,
            relay=relay,
            joint_s=self.joint_s,
        )
