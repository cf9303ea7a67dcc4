"""Levels the load of hosts at no cost in recovery.

Decides what a table of copies leaves open: which of the experts with equally many replicas takes which of its rows (`name_rows`), and, where sets of
hosts can be listed, swaps of copies that make no loss fatal which was not (`levelled`), or that save
losses within a bound on the load (`safest`), or load within a bound on losses (`relieved`). Must never change: but for `relieved`, the fatal losses of all
layers together are what they were, or fewer.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.placement.search.local_search import Counts, FatalTable, holder_sets, local_search
from phalanx.plan.placement.search.rules import Copies

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class _Rows:
    """The different rows of one count: hosts of each, copies on them, and how many rows are still free."""

    def __init__(self, rows: Copies, free: Ints) -> None:
        self.rows, self.free = rows, free.copy()
        width = int((rows > 0).sum(1).max())
        self.hosts = np.argsort(-rows, axis=1, kind="stable")[:, :width]
        self.copies = np.take_along_axis(rows, self.hosts, axis=1).astype(np.float64)
        self.unused = np.where(self.copies > 0, 0.0, -np.inf)  # a row with fewer hosts than the widest

    def take(self, load: Floats, share: float) -> int:
        """The free row whose busiest host is least busy, then with least load on its hosts; its hosts are charged."""
        after = load[self.hosts] + self.copies * share
        busiest = (after + self.unused).max(1) + 1e-9 * (after * (self.copies > 0)).sum(1)
        busiest[self.free == 0] = np.inf
        best = int(busiest.argmin())
        self.free[best] -= 1
        load[self.hosts[best]] = after[best]
        return best


def _rows(table: Copies) -> _Rows:
    """Equal rows counted, in the order of their first."""
    free = Counter(row.tobytes() for row in table)
    rows = np.frombuffer(b"".join(free), dtype=table.dtype).reshape(len(free), -1)
    return _Rows(rows, np.array(list(free.values()), dtype=np.int64))


def name_rows(table: Copies, loads_E: Floats) -> Copies:
    """The same rows, each for an expert of its count; `loads_E` belong to experts, row i of `table` being one that expert i could have.

    Heaviest experts first, each to the free row of its count whose busiest host is least busy. Rows of the same hosts are alike, so
    only different ones are looked at.
    """
    counts = table.sum(1)
    kinds = {count: _rows(table[counts == count]) for count in set(counts.tolist())}
    out = np.empty_like(table)
    load = np.zeros(table.shape[1])
    share = loads_E / counts
    for expert in np.argsort(-share, kind="stable").tolist():
        kind = kinds[int(counts[expert])]
        out[expert] = kind.rows[kind.take(load, float(share[expert]))]
    return out


def levelled(copies_LEN: NDArray[np.int64], loads: Floats, *, swaps: int, seed: int) -> NDArray[np.int64]:
    """Random swaps in each layer, kept where neither the fatal losses of all layers nor the load of the busiest host rise."""
    return _swapped(copies_LEN, loads, swaps=swaps, seed=seed)


def relieved(
    copies_LEN: NDArray[np.int64], loads: Floats, *, allowed: Counts, swaps: int, seed: int
) -> NDArray[np.int64]:
    """Random swaps in each layer that do not raise its busiest host, while no more losses of k hosts are fatal than `allowed[k]`."""
    return _swapped(copies_LEN, loads, swaps=swaps, seed=seed, allowed=allowed)


def safest(copies_LEN: NDArray[np.int64], loads: Floats, *, most: float, swaps: int, seed: int) -> NDArray[np.int64]:
    """Random swaps in each layer for fewer fatal losses of all layers, while its busiest host has at most `most` times the mean load.

    Where a layer starts above that, it does not rise.
    """
    return _swapped(copies_LEN, loads, swaps=swaps, seed=seed, most=most)


def _swapped(
    copies_LEN: NDArray[np.int64],
    loads: Floats,
    *,
    swaps: int,
    seed: int,
    most: float = 0.0,
    allowed: Counts | None = None,
) -> NDArray[np.int64]:
    """`local_search` layer by layer, with the fatal losses of all layers."""
    num_hosts = copies_LEN.shape[2]
    table = FatalTable(num_hosts, (mask for copies in copies_LEN for mask in holder_sets(copies)))
    out = copies_LEN.copy()
    for layer, copies in enumerate(copies_LEN):
        shares, limit = loads[layer] / copies.sum(1), most * float(loads[layer].sum()) / num_hosts
        out[layer] = local_search(
            copies, table, moves=swaps, shares=shares, most=limit, allowed=allowed, seed=seed + layer
        )
    return out
