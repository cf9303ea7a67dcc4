"""Which pipeline rank runs which pass of which stage and micro-batch, in which order, and what crosses between stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.pipeline.boundary import (
        BoundaryMessage as BoundaryMessage,
        EdgePlan as EdgePlan,
        Relay as Relay,
        Route as Route,
        direct_edge as direct_edge,
    )
    from phalanx.plan.pipeline.clock import (
        ActionSpan as ActionSpan,
        Edge as Edge,
        Pair as Pair,
        ScheduleCosts as ScheduleCosts,
        Timeline as Timeline,
        chain as chain,
        cost_problems as cost_problems,
        simulate as simulate,
        uniform_costs as uniform_costs,
    )
    from phalanx.plan.pipeline.comm import (
        AHEAD as AHEAD,
        Direction as Direction,
        PipelinePlan as PipelinePlan,
        Recv as Recv,
        Run as Run,
        Send as Send,
        Transfer as Transfer,
        batches as batches,
        plan_pipeline as plan_pipeline,
    )
    from phalanx.plan.pipeline.eager import WarmupChoice as WarmupChoice, choose_warmup as choose_warmup
    from phalanx.plan.pipeline.many import ends_of_ranks as ends_of_ranks
    from phalanx.plan.pipeline.orders import (
        Action as Action,
        Kind as Kind,
        Order as Order,
        looped_ranks as looped_ranks,
        vee_ranks as vee_ranks,
    )
    from phalanx.plan.pipeline.pairs import why_no_pairs as why_no_pairs
    from phalanx.plan.pipeline.run import (
        Pipeline as Pipeline,
        choose_schedule as choose_schedule,
        make_pipeline as make_pipeline,
        pairing_problems as pairing_problems,
        pipeline_problems as pipeline_problems,
        plain_pipeline as plain_pipeline,
        schedule_setting_problems as schedule_setting_problems,
    )
    from phalanx.plan.pipeline.schedule import (
        SCHEDULES as SCHEDULES,
        Schedule as Schedule,
        make_schedule as make_schedule,
        most_extra as most_extra,
        nearest_extra as nearest_extra,
        nearest_schedule as nearest_schedule,
        schedule_problems as schedule_problems,
    )
    from phalanx.plan.pipeline.stage_edges import (
        Activation as Activation,
        edges_for as edges_for,
        on_one_host as on_one_host,
        staged_edges as staged_edges,
    )
    from phalanx.plan.pipeline.weight_waves import (
        Wave as Wave,
        divide as divide,
        read_layout as read_layout,
        rows_of as rows_of,
    )
else:
    __getattr__ = lazy(__name__)
