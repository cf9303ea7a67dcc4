"""How communication and expert compute overlap inside one MoE layer, tile by tile: tiles, order, bytes, costs and the choice between schedules (arXiv 2502.19811)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.moe.overlap.bytes import (
        Route as Route,
        Traffic as Traffic,
        WireBytes as WireBytes,
        choose_transport as choose_transport,
        traffic_of as traffic_of,
        wire_bytes as wire_bytes,
    )
    from phalanx.plan.moe.overlap.choose import (
        MARGIN as MARGIN,
        SERIAL as SERIAL,
        Chooser as Chooser,
        LayerSample as LayerSample,
        MatmulSample as MatmulSample,
        MessageSample as MessageSample,
        Sample as Sample,
        fit as fit,
    )
    from phalanx.plan.moe.overlap.clock import seconds_of as seconds_of
    from phalanx.plan.moe.overlap.cost import (
        LayerShape as LayerShape,
        LayerWork as LayerWork,
        OverlapCost as OverlapCost,
    )
    from phalanx.plan.moe.overlap.device import (
        EMPTY as EMPTY,
        SecondCost as SecondCost,
        part_places as part_places,
        predicted_s as predicted_s,
        problem_room as problem_room,
        row_room as row_room,
    )
    from phalanx.plan.moe.overlap.fused import FusedLaunch as FusedLaunch, fused_launch as fused_launch
    from phalanx.plan.moe.overlap.hosts import (
        can_forward as can_forward,
        gateway as gateway,
        gateways as gateways,
        members as members,
    )
    from phalanx.plan.moe.overlap.pair import (
        PassTime as PassTime,
        link_s as link_s,
        pair_s as pair_s,
        paired_share as paired_share,
    )
    from phalanx.plan.moe.overlap.plan import (
        backward_of as backward_of,
        joint_slots as joint_slots,
        part_ends as part_ends,
        parts_of as parts_of,
        plan_overlap as plan_overlap,
        slot_orders as slot_orders,
        tile_sizes as tile_sizes,
        tiles_of as tiles_of,
    )
    from phalanx.plan.moe.overlap.rounds import (
        MessageEnd as MessageEnd,
        MessageKind as MessageKind,
        Round as Round,
        rounds_of as rounds_of,
    )
    from phalanx.plan.moe.overlap.settings import (
        BLOCK_COLUMNS as BLOCK_COLUMNS,
        CANDIDATES as CANDIDATES,
        FINE as FINE,
        MOST_BLOCKS as MOST_BLOCKS,
        OverlapSetting as OverlapSetting,
        block_problems as block_problems,
        fused_setting_problems as fused_setting_problems,
        most_blocks as most_blocks,
        overlap_problems as overlap_problems,
        parse_overlap as parse_overlap,
        replica_problems as replica_problems,
        setting_problems as setting_problems,
    )
    from phalanx.plan.moe.overlap.types import (
        ALL as ALL,
        RankPlan as RankPlan,
        Tile as Tile,
        TileOp as TileOp,
        TileSchedule as TileSchedule,
    )
else:
    __getattr__ = lazy(__name__)
