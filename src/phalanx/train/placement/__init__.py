"""Experts that move while training runs: when the state of an expert goes to another rank, and how it gets there beside a step.

The room decides at which step an expert moves and what its ranks do meanwhile; whether a move pays is decided in `plan/placement`. `Rebalancer` is asked between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.placement.rebalancer import Rebalancer as Rebalancer
    from phalanx.train.placement.state_transfer import (
        Everyone as Everyone,
        Examined as Examined,
        HeldState as HeldState,
        Moved as Moved,
        examine as examine,
        take_state as take_state,
    )
else:
    __getattr__ = lazy(__name__)
