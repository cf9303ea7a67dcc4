"""Elastic recovery: when members come and go, the mapping that the others can run, which member takes which rank, what state moves, and which member is too slow to stay.

`RecoveryPlanner.plan` decides a generation from what its members report (`Fact`) as a `GenerationPlan`. Beside it the room has the orders in which moves carry ids, and the rule of stragglers
(`judge` over `RankPace` and `Streaks`), which a run and the simulator of failures both follow step by step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.recovery.generation import GenerationPlan as GenerationPlan
    from phalanx.plan.recovery.memory import (
        FIXED_POINT_ITEM as FIXED_POINT_ITEM,
        ITEM as ITEM,
        StateRoom as StateRoom,
        moment_bytes as moment_bytes,
        optimizer_bytes as optimizer_bytes,
    )
    from phalanx.plan.recovery.move_order import (
        GRADIENT_ID as GRADIENT_ID,
        REPLACE_ID as REPLACE_ID,
        STATE_ID as STATE_ID,
        expert_moves as expert_moves,
        expert_order as expert_order,
        moves_again as moves_again,
        state_move_order as state_move_order,
        wave_id as wave_id,
    )
    from phalanx.plan.recovery.planner import RecoveryPlanner as RecoveryPlanner
    from phalanx.plan.recovery.recipe import (
        per_host as per_host,
        recovery_planner as recovery_planner,
        recovery_problems as recovery_problems,
        room_problems as room_problems,
        straggler_rule as straggler_rule,
        wanted_ranks as wanted_ranks,
    )
    from phalanx.plan.recovery.state_descriptor import (
        Fact as Fact,
        StateDescriptor as StateDescriptor,
        StateReport as StateReport,
    )
    from phalanx.plan.recovery.stragglers import (
        RankPace as RankPace,
        StragglerRule as StragglerRule,
        Streaks as Streaks,
        Verdict as Verdict,
        judge as judge,
        slowness as slowness,
        work_of_ranks as work_of_ranks,
    )
else:
    __getattr__ = lazy(__name__)
