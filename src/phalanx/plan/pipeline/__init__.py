"""The pipeline of a run: its schedule, the layers of its stages, and the messages between stages in an order in which no two ranks wait for each other.

`make_pipeline` decides both from a recipe (`Pipeline`); `plan_pipeline` lowers a schedule to the sends and receives of each rank (`PipelinePlan`). Which pass a rank runs when is in
`schedule/`, what crosses between two stages whose ranks differ in `boundary/`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
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
    from phalanx.plan.pipeline.run import (
        Pipeline as Pipeline,
        choose_schedule as choose_schedule,
        make_pipeline as make_pipeline,
        pairing_problems as pairing_problems,
        pipeline_problems as pipeline_problems,
        plain_pipeline as plain_pipeline,
        schedule_setting_problems as schedule_setting_problems,
    )
else:
    __getattr__ = lazy(__name__)
