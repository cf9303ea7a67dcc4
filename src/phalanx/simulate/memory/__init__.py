"""How much memory each rank of a run on this machine needs: what its tensors hold, and what no tensor does.

The room decides what is counted as held when, phase by phase of a step; the counts come from the run's own layouts and kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.memory.balance import fresh_load as fresh_load, worst_balance as worst_balance
    from phalanx.simulate.memory.kernel_facts import PREPARE_BYTES as PREPARE_BYTES
    from phalanx.simulate.memory.memory import (
        TERMS as TERMS,
        MemoryEstimate as MemoryEstimate,
        estimate_memory as estimate_memory,
    )
else:
    __getattr__ = lazy(__name__)
