"""How many distinct tokens of a source each rank needs, in NumPy: what `runtime/moe/overlap_transport.py` counts with torch."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]


def count_copies(slots_TK: ArrayLike, *, ep: int, etp: int, slots_per_rank: int) -> Ints:
    """(P,) distinct tokens of one source for each rank; `slots_TK` is the slot of the group for each pair, -1 where it was dropped."""
    slots = np.asarray(slots_TK, dtype=np.int64)
    return np.repeat(_distinct(slots, np.repeat(np.arange(ep), slots_per_rank), ep), etp)


def _distinct(slots_TK: Ints, place_of_slot_G: Ints, num_places: int) -> Ints:
    """(places,) tokens that have a slot at each place."""
    token, k = np.nonzero(slots_TK >= 0)
    seen = np.zeros((len(slots_TK), num_places), dtype=bool)
    seen[token, place_of_slot_G[slots_TK[token, k]]] = True
    found: Ints = seen.sum(0).astype(np.int64)
    return found
