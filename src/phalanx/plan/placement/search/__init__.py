"""How many replicas each expert has, on which hosts they live, and what losses that survives.

The room decides placements by search (`plan_placement`), by published rules (`rule_placement`), and what recovery, load and copies cost each other (`placement_front`). Its other names are
what goes in (`HostPool`, loads) and what comes out (`HostPlacement`, `ReplicaCounts`, `Certificate`, `Point`, `Migration`), which `phalanx plan placement` prints one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.placement.search.balance import Floats as Floats
    from phalanx.plan.placement.search.front import (
        CostWeights as CostWeights,
        Point as Point,
        choose as choose,
        parted_placement as parted_placement,
        patched_placement as patched_placement,
        placement_front as placement_front,
    )
    from phalanx.plan.placement.search.host_pool import (
        HostPool as HostPool,
        equal_pool as equal_pool,
        pool_problems as pool_problems,
    )
    from phalanx.plan.placement.search.hosts import (
        HostPlacement as HostPlacement,
        max_over_mean as max_over_mean,
        read_host_placement as read_host_placement,
    )
    from phalanx.plan.placement.search.migration import Migration as Migration, plan_migration as plan_migration
    from phalanx.plan.placement.search.plan import (
        Effort as Effort,
        apart_placement as apart_placement,
        plan_placement as plan_placement,
        rule_placement as rule_placement,
    )
    from phalanx.plan.placement.search.probability import Certificate as Certificate
    from phalanx.plan.placement.search.replicas import (
        ReplicaCounts as ReplicaCounts,
        read_loads as read_loads,
        replica_counts as replica_counts,
        smoothed as smoothed,
        zipf_loads as zipf_loads,
    )
else:
    __getattr__ = lazy(__name__)
