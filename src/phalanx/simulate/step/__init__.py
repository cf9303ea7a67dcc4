"""How long a step takes on a cluster, and what it holds in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.step.activations import (
        Local as Local,
        batch_bytes as batch_bytes,
        experts_forward as experts_forward,
        head_forward as head_forward,
        kept_layer as kept_layer,
    )
    from phalanx.simulate.step.balance import (
        SETTLED_STEPS as SETTLED_STEPS,
        Balance as Balance,
        expected_balance as expected_balance,
        worst_balance as worst_balance,
    )
    from phalanx.simulate.step.block_time import COMMUNICATION as COMMUNICATION, Blocks as Blocks, Ledger as Ledger
    from phalanx.simulate.step.bubble import bubble_share as bubble_share, idle_passes as idle_passes, tenths as tenths
    from phalanx.simulate.step.device_memory import (
        LayerBytes as LayerBytes,
        Places as Places,
        StageMemory as StageMemory,
        fits as fits,
        fullest_of as fullest_of,
        layer_bytes as layer_bytes,
        parameters_of_rank as parameters_of_rank,
        places_of as places_of,
        usable_bytes as usable_bytes,
    )
    from phalanx.simulate.step.fused_time import fused_run_problems as fused_run_problems
    from phalanx.simulate.step.generated import Generated as Generated, generated_code as generated_code
    from phalanx.simulate.step.passes import (
        PassMoment as PassMoment,
        RankPasses as RankPasses,
        pass_moments as pass_moments,
    )
    from phalanx.simulate.step.replicas import ReplicaTraffic as ReplicaTraffic
    from phalanx.simulate.step.stage_layers import StageContent as StageContent, run_layers as run_layers
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
    from phalanx.simulate.step.warmup_choice import with_warmup as with_warmup
else:
    __getattr__ = lazy(__name__)
