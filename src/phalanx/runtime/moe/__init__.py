"""Carries out one MoE layer: dispatch, experts, combine; one after the other, in chunks, tile by tile, or by fused kernels.

The way of a layer is chosen once, when the model is built (`routed_experts`); a call (`MoeCall`) then carries tensors only. Which schedule `auto` takes, `Tuner` measures and the planner decides.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.moe.co_schedule import CoScheduler as CoScheduler
    from phalanx.runtime.moe.dispatch import (
        Dispatcher as Dispatcher,
        KnownCounts as KnownCounts,
        count_keys as count_keys,
    )
    from phalanx.runtime.moe.experts import ExpertWeights as ExpertWeights, MoeCall as MoeCall
    from phalanx.runtime.moe.fused import FusedMemory as FusedMemory
    from phalanx.runtime.moe.overlap_tuner import Tuner as Tuner
    from phalanx.runtime.moe.routed import RoutedExperts as RoutedExperts, routed_experts as routed_experts
    from phalanx.runtime.moe.streams import leave_free as leave_free
else:
    __getattr__ = lazy(__name__)
