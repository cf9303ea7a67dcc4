"""Gradients, master weights and moments of what a rank keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.runtime.state.boxes import BoxTensor as BoxTensor
    from phalanx.runtime.state.gradients import (
        NORM_BITS as NORM_BITS,
        GradientBuffers as GradientBuffers,
        ReducedGradients as ReducedGradients,
        borrowable as borrowable,
    )
    from phalanx.runtime.state.optimizer import ShardedState as ShardedState
    from phalanx.runtime.state.views import shard_views as shard_views, views_of as views_of
else:
    __getattr__ = lazy(__name__)
