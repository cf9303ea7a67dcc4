"""Layouts over an N-dimensional mesh of ranks, one placement a mesh axis, as torch's DTensor and `phalanx plan reshard` say them.

The room decides how placements, words such as `2x3 S01`, and uneven shards become boxes (`mesh_layout`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.layout.mesh.placements import (
        Partial as Partial,
        Placement as Placement,
        Replicate as Replicate,
        Shard as Shard,
        Strided as Strided,
        mesh_layout as mesh_layout,
        mesh_sizes as mesh_sizes,
        read_layout as read_layout,
    )
else:
    __getattr__ = lazy(__name__)
