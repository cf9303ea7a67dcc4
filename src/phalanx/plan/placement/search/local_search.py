"""Improves a table of copies by swapping two of them between hosts, as long as nothing gets worse.

Decides which swaps are kept. `FatalTable` knows for every set of lost hosts how many experts it kills, over all layers at once, so a swap costs a few
operations on 2^N small integers (N <= 16). Must never change: the result is never worse than the start by (fatal sets of 1, 2, 3, ... hosts, then load of the
busiest host), and the same seed gives the same result on every rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.placement.search.host_sets import mask_of, popcounts
from phalanx.plan.placement.search.rules import Copies, host_loads

MAX_HOSTS = 16
"""Beyond, a table of all sets is too slow to be asked a thousand times."""

Counts = tuple[int, ...]


class FatalTable:
    """Number of experts without a live holder for every set of lost hosts. Experts of any number of layers."""

    def __init__(self, num_hosts: int, sets: Iterable[int] = ()) -> None:
        self.num_hosts = num_hosts
        self._all = np.arange(1 << num_hosts, dtype=np.uint32)
        self._sizes = popcounts(num_hosts)
        self._killed = np.zeros(1 << num_hosts, dtype=np.int32)
        self._seen: dict[int, NDArray[np.bool_]] = {}
        for mask in sets:
            self.add(mask)

    def _supersets(self, mask: int) -> NDArray[np.bool_]:
        if mask not in self._seen:
            if len(self._seen) * len(self._all) > 1 << 26:  # 64 MiB of remembered sets
                self._seen.clear()
            self._seen[mask] = (self._all & mask) == mask
        return self._seen[mask]

    def add(self, mask: int) -> None:
        """An expert whose holders are `mask`."""
        self._killed += self._supersets(mask)

    def remove(self, mask: int) -> None:
        self._killed -= self._supersets(mask)

    def fatal(self) -> Counts:
        """How many sets of k hosts kill some expert, k = 0 .. N."""
        return tuple(np.bincount(self._sizes[self._killed > 0], minlength=self.num_hosts + 1).tolist())


def holder_sets(copies: Copies) -> list[int]:
    """Holders of each expert, as bits."""
    held = np.packbits(copies > 0, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in held]


def busiest(copies: Copies, shares: NDArray[np.float64]) -> float:
    """Load of the busiest host; `shares` = load of one copy of each expert."""
    return float(host_loads(shares, copies).max())


def local_search(
    copies: Copies,
    table: FatalTable,
    *,
    moves: int,
    shares: NDArray[np.float64] | None = None,
    most: float = 0.0,
    allowed: Counts | None = None,
    enough: Counts | None = None,
    seed: int = 0,
) -> Copies:
    """`moves` random swaps, kept where the objective does not rise. `table` holds the sets of `copies` and may hold other layers.

    The objective is (fatal sets, busiest host), with `shares` given; a load of up to `most` is as good as none, and one that is above
    it may not rise for fewer fatal sets either. With `allowed` it is the load alone, among tables with at most so many fatal sets of
    each size. It stops at `enough` where no load counts. `table` follows the changes.
    """
    copies = copies.copy()
    rng = random.Random(seed)
    fatal = table.fatal()
    load = 0.0 if shares is None else busiest(copies, shares)
    for _ in range(moves):
        if enough is not None and fatal == enough and shares is None:
            break
        swap = _random_swap(copies, rng)
        if swap is None:
            continue
        before = [mask_of(np.flatnonzero(copies[e])) for e in (swap[0], swap[2])]
        _apply(copies, swap)
        after = [mask_of(np.flatnonzero(copies[e])) for e in (swap[0], swap[2])]
        new_load = load if shares is None else busiest(copies, shares)
        _exchange(table, before, after)
        new = table.fatal()
        if allowed is not None:
            better = new_load <= load and all(n <= a for n, a in zip(new, allowed, strict=True))
        else:
            better = (new, max(new_load, most)) <= (fatal, max(load, most)) and (
                not most or new_load <= max(load, most)
            )
        if better:
            fatal, load = new, new_load
        else:
            _exchange(table, after, before)
            _apply(copies, (swap[0], swap[3], swap[2], swap[1]))
    return copies


def _exchange(table: FatalTable, out: Sequence[int], into: Sequence[int]) -> None:
    for old, new in zip(out, into, strict=True):
        if old != new:
            table.remove(old)
            table.add(new)


def _random_swap(copies: Copies, rng: random.Random) -> tuple[int, int, int, int] | None:
    """(expert a, its host i, expert b, its host j): a goes to j and b to i. None where the two are the same expert.

    A copy may come to lie beside another of its expert: fewer hosts for a common expert can mean the same hosts for two rare ones.
    """
    num_hosts = copies.shape[1]
    if num_hosts < 2:
        return None
    i = rng.randrange(num_hosts)
    j = rng.randrange(num_hosts - 1)
    j += j >= i
    mine, theirs = np.flatnonzero(copies[:, i]), np.flatnonzero(copies[:, j])
    a, b = int(mine[rng.randrange(len(mine))]), int(theirs[rng.randrange(len(theirs))])
    return None if a == b else (a, i, b, j)


def _apply(copies: Copies, swap: tuple[int, int, int, int]) -> None:
    a, i, b, j = swap
    copies[a, i] -= 1
    copies[a, j] += 1
    copies[b, j] -= 1
    copies[b, i] += 1


def least_fatal(counts: Sequence[int], num_hosts: int) -> Counts:
    """No placement has fewer fatal sets than those that kill its rarest expert: C(N - r, k - r)."""
    rarest = min(*counts, num_hosts)
    out = [0] * (num_hosts + 1)
    value = 1
    for k in range(rarest, num_hosts + 1):  # C(N - r, k - r), each from the last
        out[k] = value
        value = value * (num_hosts - k) // (k - rarest + 1)
    return tuple(out)
