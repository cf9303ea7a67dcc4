"""Fused kernels on a device: how its multiprocessors are divided between messages and products, how long a layer then takes, and where parts lie in memory.

`fused_launch` decides the division; the seconds of one are `predicted_s`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.moe.overlap.fused.device import (
        EMPTY as EMPTY,
        SecondCost as SecondCost,
        part_places as part_places,
        predicted_s as predicted_s,
        problem_room as problem_room,
        row_room as row_room,
    )
    from phalanx.plan.moe.overlap.fused.launch import FusedLaunch as FusedLaunch, fused_launch as fused_launch
else:
    __getattr__ = lazy(__name__)
