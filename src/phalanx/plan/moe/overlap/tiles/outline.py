"""What a schedule makes of one rank's tiles, from counts alone: their sizes, their parts and the operations, without the plan itself.

For whoever compares many schedules of one batch. Must never change: the operations are those of `plan_overlap` for the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.plan.moe import DispatchPlan
from phalanx.plan.moe.overlap.tiles.hosts import members, message_parts, relay_parts
from phalanx.plan.moe.overlap.tiles.order import Parts, forward_order, with_weights
from phalanx.plan.moe.overlap.tiles.plan import (
    cut_rows,
    ends_of_sizes,
    joint_parts,
    joint_slots,
    joint_tiles,
    part_counts,
    rows_of,
    slot_orders,
    slots_of,
)
from phalanx.plan.moe.overlap.tiles.types import Tile, TileOp, TileSchedule


@dataclass(frozen=True, kw_only=True)
class TileRows:
    """Rows of the tiles in one order of the slots."""

    come: list[list[int]]
    go: list[list[int]]
    slots: list[list[int]]
    """Slots of the tiles that come."""
    joint: tuple[Tile, ...]
    """Tiles of the rows of all sources."""
    joint_slots: tuple[int, ...]


class TileParts(NamedTuple):
    """The same in the parts of one schedule."""

    ends: list[tuple[int, ...]]
    """Ends of the tiles that come, by source."""
    go: tuple[int, ...]
    is_far: tuple[bool, ...]
    relay: tuple[int, ...]


class TileOutline:
    """One batch on one rank."""

    def __init__(self, dispatch: DispatchPlan, *, rank: int, tile_rows: int) -> None:
        self.dispatch, self.rank, self.tile_rows = dispatch, rank, tile_rows
        self._rows = rows_of(dispatch, rank=rank)

    def rows(self, schedule: TileSchedule, *, through_hosts: bool) -> TileRows:
        """Rows in the order of the slots, or the most loaded first: the same for all schedules that agree in that."""
        ep = self.rank // self.dispatch.etp
        joint = [] if through_hosts else joint_slots(self.dispatch, tile_rows=self.tile_rows)
        orders = slot_orders(self.dispatch, schedule, joint=joint)
        own, here = orders[ep], joint[ep] if joint else ()
        come = [cut_rows(rows, self.tile_rows, own) for rows in self._rows.come]
        slots = [slots_of(rows, self.tile_rows, own) for rows in self._rows.come]
        go = [cut_rows(rows, self.tile_rows, order) for rows, order in zip(self._rows.go, orders, strict=True)]
        together = joint_tiles(self._rows.come, here, tile_rows=self.tile_rows, slots=own)
        order = tuple(dict.fromkeys(tile.slot for tile in together))
        return TileRows(come=come, go=go, slots=slots, joint=together, joint_slots=order)

    def parts(self, rows: TileRows, schedule: TileSchedule, *, gateways: Sequence[int] | None = None) -> TileParts:
        """`gateways`: the host of each rank of the group, where tokens go through one rank of each host; None: all ranks are taken to be on one."""
        ends = [ends_of_sizes(sizes, schedule.parts) for sizes in rows.come]
        go_ends = [len(ends_of_sizes(sizes, schedule.parts)) for sizes in rows.go]
        size = self.dispatch.ep * self.dispatch.etp
        go = tuple(go_ends[peer // self.dispatch.etp] for peer in range(size))
        if gateways is None:
            return TileParts(ends=ends, go=go, is_far=(False,) * size, relay=())
        here = members(gateways, gateways[self.rank])
        counts = part_counts(self.dispatch, schedule, tile_rows=self.tile_rows, ranks=here)
        return TileParts(
            ends=ends,
            go=message_parts(gateways, self.rank, go),
            is_far=tuple(host != gateways[self.rank] for host in gateways),
            relay=relay_parts(gateways, self.rank, lambda source, peer: counts[source, peer]),
        )

    def operations(
        self,
        rows: TileRows,
        parts: TileParts,
        schedule: TileSchedule,
        *,
        has_shared: bool,
        direction: Literal["forward", "backward"],
    ) -> Sequence[TileOp]:
        """Operations in the order in which the rank does them."""
        known = Parts(
            rank=self.rank,
            come=tuple(map(len, parts.ends)),
            go=parts.go,
            is_far=parts.is_far,
            blocks=schedule.blocks,
            num_slots=self.dispatch.slots_per_rank,
            relay=parts.relay,
            joint=tuple(joint_parts(rows.joint_slots, rows.slots, parts.ends)),
        )
        ops = forward_order(schedule, known, has_shared=has_shared)
        return with_weights(ops, known, schedule=schedule) if direction == "backward" else ops
