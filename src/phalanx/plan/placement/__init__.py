"""How many replicas each expert has, on which hosts they live, what losses that survives, and when experts should move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.placement.arrivals import (
        coming_moves as coming_moves,
        of_all_kinds as of_all_kinds,
        takings as takings,
    )
    from phalanx.plan.placement.fleet import (
        Fleet as Fleet,
        equal_fleet as equal_fleet,
        fleet_problems as fleet_problems,
    )
    from phalanx.plan.placement.front import (
        CostWeights as CostWeights,
        Point as Point,
        choose as choose,
        parted_placement as parted_placement,
        patched_placement as patched_placement,
        placement_front as placement_front,
    )
    from phalanx.plan.placement.hosts import HostPlacement as HostPlacement, read_host_placement as read_host_placement
    from phalanx.plan.placement.migration import Migration as Migration, plan_migration as plan_migration
    from phalanx.plan.placement.probability import Certificate as Certificate
    from phalanx.plan.placement.rebalancing import (
        Costs as Costs,
        Replacement as Replacement,
        StageNow as StageNow,
        hosts_of_placement as hosts_of_placement,
        placement_of_hosts as placement_of_hosts,
        plan_replacement as plan_replacement,
        smoothed_loads as smoothed_loads,
    )
    from phalanx.plan.placement.replicas import (
        Floats as Floats,
        ReplicaCounts as ReplicaCounts,
        read_loads as read_loads,
        replica_counts as replica_counts,
        zipf_loads as zipf_loads,
    )
    from phalanx.plan.placement.run import (
        ReplicaSettings as ReplicaSettings,
        StageReplicas as StageReplicas,
        asked_of as asked_of,
        replicas_of as replicas_of,
        run_placement as run_placement,
        stage_replicas as stage_replicas,
    )
    from phalanx.plan.placement.search import plan_placement as plan_placement, rule_placement as rule_placement
else:
    __getattr__ = lazy(__name__)
