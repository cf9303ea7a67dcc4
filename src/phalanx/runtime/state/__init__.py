"""Gradients, master weights and moments of what a rank keeps.

The room decides how gradients of a family lie in one buffer, when their reduction begins, and which rank keeps which shard of the state; who sums what is the table of `plan/mapping`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.state.boxes import BoxTensor as BoxTensor, Segment as Segment
    from phalanx.runtime.state.gradients import (
        NORM_BITS as NORM_BITS,
        GradientBuffers as GradientBuffers,
        ReducedGradients as ReducedGradients,
        borrowable as borrowable,
    )
    from phalanx.runtime.state.optimizer import FamilyState as FamilyState, ShardedState as ShardedState
    from phalanx.runtime.state.sums import StateSums as StateSums
    from phalanx.runtime.state.views import shard_views as shard_views, views_of as views_of
else:
    __getattr__ = lazy(__name__)
