"""Jobs and mappings on a cluster that is not here: shapes of models, degrees, stages."""

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
    )
    from phalanx.simulate.mapping.models import known_models as known_models, shape_from as shape_from
    from phalanx.simulate.mapping.shape import (
        Convention as Convention,
        Shape as Shape,
        core_flops as core_flops,
        flops_per_token as flops_per_token,
        shape_of as shape_of,
        spec_of as spec_of,
    )
    from phalanx.simulate.mapping.slow_ranks import (
        Floats as Floats,
        Stragglers as Stragglers,
        paces as paces,
        parse_stragglers as parse_stragglers,
        straggler_problems as straggler_problems,
    )
    from phalanx.simulate.mapping.stage_mappings import (
        AnyMapping as AnyMapping,
        StagedMapping as StagedMapping,
        edge_seconds as edge_seconds,
        hop_of as hop_of,
        hop_seconds as hop_seconds,
        like_stage as like_stage,
        of_places as of_places,
        shares_of as shares_of,
        with_extra_warmup as with_extra_warmup,
    )
else:
    __getattr__ = lazy(__name__)
