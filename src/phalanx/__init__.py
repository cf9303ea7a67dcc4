"""Phalanx trains mixture-of-experts language models. See docs/architecture.md, and docs/reference/api.md for the names below.

Each is imported when it is asked for, and torch not before one of them needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.api import (
        load_recipe as load_recipe,
        make_plan as make_plan,
        open_run as open_run,
        predict as predict,
        search as search,
        train_model as train_model,
        verify_mapping as verify_mapping,
    )
    from phalanx.core.config import Recipe as Recipe
    from phalanx.core.errors import PhalanxError as PhalanxError
    from phalanx.runtime.reshard import WeightSync as WeightSync, open_resharder as open_resharder, reshard as reshard
else:
    __getattr__ = lazy(__name__)
