"""Which window of which pool is sample number g: a pure function of (seed, g), with no state to store.

Decides the order in which training sees its data. What must never change for a given (sizes, weights, seed): the answer, whatever the
number of ranks, the NumPy version or the point of resumption. So nothing here uses NumPy's generators (their streams may change
between versions, and a shuffle of 1e9 windows would have to be kept in memory); a permutation is a small keyed Feistel network over
uint64, evaluated for just the samples asked for.

Legend: g global sample index (step * global_batch + position), n number of indices asked for, N size of a domain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError, Problem, raise_if

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

BLOCK = 10_000
"""Samples over which mixture weights are met exactly: weights are honoured to 0.01 %."""

_MASK = (1 << 64) - 1
_ROUNDS = 8
_BLOCK_DOMAIN = 0x6D6978  # keeps the shuffle inside blocks apart from the epochs' permutations
_KEPT_BLOCKS = 8


def mix(words: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of 64-bit words that looks random."""
    z = words + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def derive_key(*parts: int) -> int:
    """One 64-bit key from several integers (seed, pool, epoch, ...); order matters."""
    key = np.zeros(1, np.uint64)
    for part in parts:
        key = mix(key ^ np.asarray([part & _MASK], np.uint64))
    return int(key[0])


def permute(indices: Ints, *, size: int, key: int) -> Ints:
    """Where a keyed permutation of `range(size)` sends each of `indices`.

    A generalised Feistel network on Z_a x Z_b with a*b barely above `size`, and cycle walking for the few values that land
    outside (Black and Rogaway, CT-RSA 2002). Every round adds a function of one half to the other, so each round, hence the
    whole, is a bijection whatever the round function is.
    """
    high = math.isqrt(max(size - 1, 0)) + 1
    low = -(-size // high)
    round_keys = mix(np.arange(_ROUNDS, dtype=np.uint64) ^ mix(np.asarray([key & _MASK], np.uint64)))
    values = _feistel(indices.astype(np.uint64), high=high, low=low, round_keys=round_keys)
    outside = values >= size
    while outside.any():
        values[outside] = _feistel(values[outside], high=high, low=low, round_keys=round_keys)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: Words, *, high: int, low: int, round_keys: Words) -> Words:
    a, b = np.uint64(high), np.uint64(low)
    left, right = values // b, values % b
    for i, key in enumerate(round_keys):
        if i % 2:
            right = (right + mix(left ^ key) % b) % b
        else:
            left = (left + mix(right ^ key) % a) % a
    return left * b + right


def shares(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """`total` divided by `weights` into whole numbers that sum to it (largest remainders, ties to the first)."""
    exact = [w * total / math.fsum(weights) for w in weights]
    counts = [math.floor(x) for x in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def quotas(weights: Sequence[float]) -> tuple[int, ...]:
    """Samples of each pool in one block. Raises DataError where a weight is so small that its pool would never be seen."""
    counts = shares(weights, BLOCK)
    unseen = [
        Problem(
            where=f"data.weights[{i}]",
            value=weights[i],
            rule=f"is less than 1/{BLOCK} of the sum of the weights, so its source would never be drawn",
            hint=f"at least {math.fsum(weights) / BLOCK:.3g}, or leave the source out",
        )
        for i, c in enumerate(counts)
        if c == 0
    ]
    raise_if(unseen, DataError, subject="the data mixture")
    return counts


class Mixture:
    """Sample index -> (pool, window, epoch).

    Block k (samples [k*BLOCK, (k+1)*BLOCK)) holds exactly `quotas` samples of each pool, in an order shuffled by (seed, k). The j-th
    sample of a pool since step 0 is window `permute(j mod N)` of its epoch `j div N`, permuted by (seed, pool, epoch). With a single
    pool sample g is simply the g-th, so that samples [e*N, (e+1)*N) are each window exactly once.
    """

    def __init__(self, *, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        self.sizes = tuple(sizes)
        self.seed = seed
        self.quotas = quotas(weights) if len(self.sizes) > 1 else (BLOCK,)
        self._blocks: dict[int, tuple[Ints, Ints]] = {}

    def locate(self, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Pool, window in that pool, and epoch of that pool, each (n,), of global sample indices (n,)."""
        pools, order = self._turns(samples)
        windows, epochs = np.empty_like(samples), np.empty_like(samples)
        for pool in np.unique(pools):
            mine = np.flatnonzero(pools == pool)
            windows[mine], epochs[mine] = self._windows(int(pool), order[mine])
        return pools, windows, epochs

    def _windows(self, pool: int, order: Ints) -> tuple[Ints, Ints]:
        size = self.sizes[pool]
        epochs, positions = order // size, order % size
        windows = np.empty_like(order)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            windows[mine] = permute(positions[mine], size=size, key=derive_key(self.seed, pool, int(epoch)))
        return windows, epochs

    def _turns(self, samples: Ints) -> tuple[Ints, Ints]:
        """Pool of each sample, and how many samples of that pool came before it since step 0."""
        if len(self.sizes) == 1:
            return np.zeros_like(samples), samples.copy()
        pools, order = np.empty_like(samples), np.empty_like(samples)
        blocks, offsets = samples // BLOCK, samples % BLOCK
        per_block = np.asarray(self.quotas, np.int64)
        for block in np.unique(blocks):
            mine = blocks == block
            block_pools, before = self._block(int(block))
            pools[mine] = block_pools[offsets[mine]]
            order[mine] = before[offsets[mine]] + int(block) * per_block[pools[mine]]
        return pools, order

    def _block(self, block: int) -> tuple[Ints, Ints]:
        """Pool of each position of a block, and the count of earlier positions with the same pool. The last few are kept (a cache, no state)."""
        known = self._blocks.get(block)
        if known is not None:
            return known
        slots = permute(np.arange(BLOCK, dtype=np.int64), size=BLOCK, key=derive_key(self.seed, _BLOCK_DOMAIN, block))
        pools = np.searchsorted(np.cumsum(self.quotas), slots, side="right").astype(np.int64)
        before = np.empty(BLOCK, np.int64)
        for pool, quota in enumerate(self.quotas):
            before[pools == pool] = np.arange(quota)
        # Replaced whole, never changed: the prefetch thread and the caller may both be here.
        self._blocks = dict(list(self._blocks.items())[1 - _KEPT_BLOCKS :]) | {block: (pools, before)}
        return pools, before
