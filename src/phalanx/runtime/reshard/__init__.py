"""Carries out one rank's part of a reshard plan.

`Resharder` keeps plans from call to call and `reshard` is one call; the room decides how bytes are staged below a cap, and nothing about who sends what.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.reshard.call import open_resharder as open_resharder, reshard as reshard
    from phalanx.runtime.reshard.resharder import (
        PlanOptions as PlanOptions,
        Resharder as Resharder,
        hosts_by_name as hosts_by_name,
    )
    from phalanx.runtime.reshard.weight_sync import WeightSync as WeightSync
else:
    __getattr__ = lazy(__name__)
