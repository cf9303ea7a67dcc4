"""Weights of a run delivered to an inference mesh of another layout: which waves, who reads, who receives.

`deliver` decides how many bytes are on their way at once, so that no reader exceeds its cap; the plan of each wave is that of `plan/reshard`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.sync.weight_sync import (
        SyncPlan as SyncPlan,
        check_sync as check_sync,
        finish_sync as finish_sync,
        plan_sync as plan_sync,
        run_sync as run_sync,
    )
else:
    __getattr__ = lazy(__name__)
