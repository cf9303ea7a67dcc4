"""What should happen: pure functions of NumPy and the standard library that return frozen plans. Never torch.

A room is a subject, and `recipe.py` stands on top of them all: it decides whether a recipe can be carried out. What rooms above need of it is on this face."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.plan.learning_rate import default_lr as default_lr
    from phalanx.plan.recipe import (
        equal_shares as equal_shares,
        microbatches_per_rank as microbatches_per_rank,
        resolve_shape as resolve_shape,
        run_problems as run_problems,
    )
    from phalanx.plan.recovery_choice import choose_recovery as choose_recovery, with_recovery as with_recovery
else:
    __getattr__ = lazy(__name__)
