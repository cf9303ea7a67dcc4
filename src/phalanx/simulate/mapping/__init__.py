"""Jobs and mappings on a cluster that is not here: models, degrees, stages, how tokens meet experts, ranks that are slow.

The room decides what a recipe or a choice of a search comes to as a `Job` and a `Mapping`, and what the ranks of a stage hold and route; it puts no clock on them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.mapping.mapping import (
        RECOMPUTES as RECOMPUTES,
        Job as Job,
        Mapping as Mapping,
        Overlap as Overlap,
        Precision as Precision,
        Recompute as Recompute,
        Sharding as Sharding,
    )
    from phalanx.simulate.mapping.models import known_models as known_models, published_model as published_model
    from phalanx.simulate.mapping.routing import RouterModel as RouterModel, forced_loads as forced_loads
    from phalanx.simulate.mapping.slots import (
        ExpertSlots as ExpertSlots,
        RoutedRows as RoutedRows,
        expert_slots as expert_slots,
    )
    from phalanx.simulate.mapping.slow_ranks import (
        Stragglers as Stragglers,
        paces as paces,
        parse_stragglers as parse_stragglers,
        straggler_problems as straggler_problems,
    )
    from phalanx.simulate.mapping.stage_mappings import AnyMapping as AnyMapping, StagedMapping as StagedMapping
else:
    __getattr__ = lazy(__name__)
