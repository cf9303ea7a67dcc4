"""Experts that move while training runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.train.placement.rebalancer import Rebalancer as Rebalancer
    from phalanx.train.placement.state_transfer import (
        Everyone as Everyone,
        Examined as Examined,
        Moved as Moved,
        examine as examine,
        take_state as take_state,
    )
else:
    __getattr__ = lazy(__name__)
