"""How long a plan takes and how much memory it needs. NumPy only, never torch.

The floor puts clocks and sizes on plans that others made; it never makes another plan. `from_recipe.py` decides what a recipe comes to on a cluster that is not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.from_recipe import (
        difference as difference,
        job_of_recipe as job_of_recipe,
        mapping_of_recipe as mapping_of_recipe,
        resolve_recipe as resolve_recipe,
    )
else:
    __getattr__ = lazy(__name__)
