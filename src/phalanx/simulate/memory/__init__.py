"""How much memory each rank of a run on this machine needs: what its tensors hold, and what no tensor does.

The room decides what is counted as held when, phase by phase of a step; the counts come from the run's own layouts and kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from phalanx.core.faces import lazy

if TYPE_CHECKING:
    from phalanx.simulate.memory.activations import Local as Local
    from phalanx.simulate.memory.balance import fresh_load as fresh_load, worst_balance as worst_balance
    from phalanx.simulate.memory.device_activations import (
        attention_backward as attention_backward,
        experts_backward as experts_backward,
        head_forward as head_forward,
        kept_layer as kept_layer,
        owed_layer as owed_layer,
    )
    from phalanx.simulate.memory.kernel_facts import LEAST_OPEN as LEAST_OPEN, PREPARE_BYTES as PREPARE_BYTES
    from phalanx.simulate.memory.memory import (
        TERMS as TERMS,
        MemoryEstimate as MemoryEstimate,
        estimate_memory as estimate_memory,
    )
else:
    __getattr__ = lazy(__name__)
