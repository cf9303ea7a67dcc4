"""The best mapping of a job on a cluster.

The room decides which mappings are tried (`Space`), bounds what need not be, and ranks the rest by the step that `simulate/step` predicts, dropping what does not fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.search.best import (
        CLOCKED as CLOCKED,
        RERANKED as RERANKED,
        SearchResult as SearchResult,
        base_mapping as base_mapping,
        may_fit as may_fit,
        reasons as reasons,
        search as search,
        with_slow_ranks as with_slow_ranks,
    )
    from phalanx.simulate.search.space import BF16_OVERLAPS as BF16_OVERLAPS, EpOverlap as EpOverlap, Space as Space
    from phalanx.simulate.search.to_recipe import recipe_of_mapping as recipe_of_mapping
else:
    __getattr__ = lazy(__name__)
