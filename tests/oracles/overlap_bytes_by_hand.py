"""Copies to other hosts, counted one by one and expected of even routing."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import numpy as np
from numpy.typing import ArrayLike

from phalanx.plan.moe import Ints
from phalanx.plan.moe.overlap.prediction.bytes import Route


def count_host_copies(slots_TK: ArrayLike, *, etp: int, slots_per_rank: int, host_of_rank: Sequence[int]) -> Ints:
    """(H,) distinct tokens of one source for each host. A slot is on all ETP ranks of its ep coordinate, so on all their hosts."""
    slots, hosts = np.asarray(slots_TK, dtype=np.int64), np.asarray(host_of_rank).reshape(-1, etp)
    num_hosts = int(hosts.max()) + 1
    needs = np.zeros((len(slots), num_hosts), dtype=bool)
    for column in range(etp):
        token, k = np.nonzero(slots >= 0)
        needs[token, hosts[slots[token, k] // slots_per_rank, column]] = True
    found: Ints = needs.sum(0).astype(np.int64)
    return found


def expected_rows(route: Route, *, tokens: int, ranks: int, experts: int, top_k: int) -> float:
    """Rows that a rank receives from others in one dispatch when tokens choose `top_k` different experts evenly.

    `tokens` of the whole group, `experts` a multiple of `ranks`; closed form: a token needs a rank unless all its experts are elsewhere.
    """
    away = 1 - 1 / ranks
    if route == "all_gather":
        return tokens * away
    if route == "all_to_all":
        return tokens * top_k / ranks * away
    return tokens * away * (1 - comb(experts - experts // ranks, top_k) / comb(experts, top_k))
