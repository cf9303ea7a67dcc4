"""Which pipeline rank runs which pass of which stage and micro-batch, in which order, how long that takes, and which passes may run in pairs.

The room decides orders (`make_schedule` by name, checked before it is returned) and puts costs on them (`simulate` gives a `Timeline`). Its names are the schedule as data (`Action`, `Order`,
`Schedule`), the clock over it (`ScheduleCosts`, `Edge`, `Pair`, `ActionSpan`), what is legal and what is near it, and how many forward passes a rank does ahead (`choose_warmup`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.pipeline.schedule.clock import (
        ActionSpan as ActionSpan,
        Edge as Edge,
        Pair as Pair,
        ScheduleCosts as ScheduleCosts,
        Timeline as Timeline,
        chain as chain,
        cost_problems as cost_problems,
        in_order as in_order,
        simulate as simulate,
        uniform_costs as uniform_costs,
    )
    from phalanx.plan.pipeline.schedule.eager import WarmupChoice as WarmupChoice, choose_warmup as choose_warmup
    from phalanx.plan.pipeline.schedule.make import (
        Schedule as Schedule,
        make_schedule as make_schedule,
        most_extra as most_extra,
        nearest_extra as nearest_extra,
        nearest_schedule as nearest_schedule,
        schedule_problems as schedule_problems,
        schedules as schedules,
        splits_backward as splits_backward,
        stage_ranks as stage_ranks,
    )
    from phalanx.plan.pipeline.schedule.many import ends_of_ranks as ends_of_ranks
    from phalanx.plan.pipeline.schedule.orders import (
        Action as Action,
        Kind as Kind,
        Order as Order,
    )
    from phalanx.plan.pipeline.schedule.pairs import choose_pairs as choose_pairs, why_no_pairs as why_no_pairs
else:
    __getattr__ = lazy(__name__)
