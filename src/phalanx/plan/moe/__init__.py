"""How the tokens of a batch reach their experts and come back: who sends how many rows to which slot.

`plan_dispatch` decides which replica serves which row and the splits of both all-to-alls (`DispatchPlan`), from counts that all sources share; `capacity` and `kept_pairs` decide which rows are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.moe.deepep import (
        deepep_bytes as deepep_bytes,
        host_problems as host_problems,
        transport_problems as transport_problems,
    )
    from phalanx.plan.moe.dispatch import (
        Chunks as Chunks,
        DispatchPlan as DispatchPlan,
        DispatchSpec as DispatchSpec,
        Ints as Ints,
        capacity as capacity,
        dispatch_spec as dispatch_spec,
        kept_pairs as kept_pairs,
        plan_dispatch as plan_dispatch,
        plan_static_dispatch as plan_static_dispatch,
        rows_of_source as rows_of_source,
    )
    from phalanx.plan.moe.dispatch_local import plan_local_dispatch as plan_local_dispatch
    from phalanx.plan.moe.workload import forced_experts as forced_experts
else:
    __getattr__ = lazy(__name__)
