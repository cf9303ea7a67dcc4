"""How much memory each rank of a run on this machine needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.memory.memory import (
        TERMS as TERMS,
        MemoryEstimate as MemoryEstimate,
        estimate_memory as estimate_memory,
    )
else:
    __getattr__ = lazy(__name__)
