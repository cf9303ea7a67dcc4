"""How long a step takes on a cluster, and what it holds in the memory of devices.

`predict` decides the time of a step from costs by closed forms and the schedule's own clock, and names what each second is spent on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.step.device_memory import (
        FIXED_BYTES as FIXED_BYTES,
        WASTE as WASTE,
        StageMemory as StageMemory,
        fits as fits,
        least_bytes as least_bytes,
        usable_bytes as usable_bytes,
    )
    from phalanx.simulate.step.fused_time import fused_run_problems as fused_run_problems
    from phalanx.simulate.step.nccl import nccl_bytes as nccl_bytes
    from phalanx.simulate.step.quick import QuickPredictor as QuickPredictor
    from phalanx.simulate.step.stage_layers import run_layers as run_layers
    from phalanx.simulate.step.tile_time import TILE_WAYS as TILE_WAYS
    from phalanx.simulate.step.timing import (
        Ledgers as Ledgers,
        Prediction as Prediction,
        StepTime as StepTime,
        predict as predict,
        predict_many as predict_many,
        slow_steps as slow_steps,
        step_time as step_time,
    )
    from phalanx.simulate.step.trace import chrome_trace as chrome_trace
    from phalanx.simulate.step.traced import (
        TracedExchange as TracedExchange,
        TracedPhase as TracedPhase,
        TracedRank as TracedRank,
        TracedStep as TracedStep,
        TracedTime as TracedTime,
    )
    from phalanx.simulate.step.warmup_choice import with_warmup as with_warmup
else:
    __getattr__ = lazy(__name__)
