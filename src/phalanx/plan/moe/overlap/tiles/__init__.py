"""A MoE layer cut into tiles: which rows a tile has, in which order tiles are sent, computed and returned, and which messages carry them, between hosts too.

The room decides one layer's plan on one rank (`plan_overlap` gives a `RankPlan` of `TileOp`s, by a `TileSchedule`); `backward_of` is its way back. Its face is long because two others work
tile by tile: the executor in `runtime/moe` and the cost model in `prediction/`, which compares many schedules by a `TileOutline`, without their plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.moe.overlap.tiles.hosts import (
        can_forward as can_forward,
        gateway as gateway,
        gateways as gateways,
        members as members,
    )
    from phalanx.plan.moe.overlap.tiles.order import tile_schedule_problems as tile_schedule_problems
    from phalanx.plan.moe.overlap.tiles.outline import TileOutline as TileOutline, TileRows as TileRows
    from phalanx.plan.moe.overlap.tiles.plan import (
        backward_of as backward_of,
        joint_slots as joint_slots,
        part_ends as part_ends,
        parts_of as parts_of,
        plan_overlap as plan_overlap,
        slot_orders as slot_orders,
        tile_sizes as tile_sizes,
        tiles_of as tiles_of,
    )
    from phalanx.plan.moe.overlap.tiles.rounds import (
        MessageEnd as MessageEnd,
        MessageKind as MessageKind,
        Round as Round,
        rounds_of as rounds_of,
    )
    from phalanx.plan.moe.overlap.tiles.types import (
        ALL as ALL,
        Order as Order,
        RankPlan as RankPlan,
        Tile as Tile,
        TileOp as TileOp,
        TileSchedule as TileSchedule,
        Transport as Transport,
    )
else:
    __getattr__ = lazy(__name__)
