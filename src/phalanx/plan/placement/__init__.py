"""Replicas of experts in a run: which rank holds which copy at the start, which experts have become worth moving, and what state comes with them.

The room decides for a run that trains; which experts on which hosts survive most is decided in `search/`, which `phalanx plan placement` shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.placement.arrivals import (
        coming_moves as coming_moves,
        of_all_kinds as of_all_kinds,
        takings as takings,
    )
    from phalanx.plan.placement.rebalancing import (
        Costs as Costs,
        Replacement as Replacement,
        StageNow as StageNow,
        hosts_of_placement as hosts_of_placement,
        placement_of_hosts as placement_of_hosts,
        plan_replacement as plan_replacement,
        smoothed_loads as smoothed_loads,
    )
    from phalanx.plan.placement.run import (
        ReplicaSettings as ReplicaSettings,
        StageReplicas as StageReplicas,
        asked_of as asked_of,
        replicas_of as replicas_of,
        run_placement as run_placement,
        stage_replicas as stage_replicas,
    )
else:
    __getattr__ = lazy(__name__)
