"""How routed tokens travel inside one expert-parallel group: who sends how many rows to which slot.

Everything here is a pure function of gathered counts, so that every rank computes the same schedule without asking.
The per-batch indices are built on the device by the same rule (`runtime/dispatch.py`); this file is its NumPy twin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DispatchSpec:
    """Policy of the one dispatcher (see `core.config.DispatchConfig` for the words), fully resolved."""

    policy: Literal["dropless", "drop"] = "dropless"
    capacity_factor: float = 1.0
    drop_by: Literal["probability", "position"] = "probability"
    drop_scope: Literal["sub_sequence", "full_sequence"] = "sub_sequence"
    pad_to_capacity: bool = False
    transport: Literal["all_to_all", "all_gather"] = "all_to_all"


def capacity(spec: DispatchSpec, *, num_tokens: int, top_k: int, num_experts: int) -> int:
    """Rows that one expert takes from `num_tokens` tokens: `ceil(factor * n * K / E)`, at most `n`."""
    return min(num_tokens, math.ceil(spec.capacity_factor * num_tokens * top_k / num_experts))
