"""What crosses between two pipeline stages: which rank sends which rows to whom, also where their meshes differ, with one copy into each host.

The room decides the messages of an edge (`staged_edges`) by the planner of `plan/reshard`, and their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.pipeline.boundary.edges import (
        BoundaryMessage as BoundaryMessage,
        EdgePlan as EdgePlan,
        Relay as Relay,
        Route as Route,
        direct_edge as direct_edge,
    )
    from phalanx.plan.pipeline.boundary.stage_edges import (
        Activation as Activation,
        edges_for as edges_for,
        on_one_host as on_one_host,
        staged_edges as staged_edges,
    )
else:
    __getattr__ = lazy(__name__)
