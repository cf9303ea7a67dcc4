"""A prepared data set: pools of token streams, and the windows that they are cut into.

A pool is what the mixture draws from: all sources together where no weights are given (every window once per epoch, whichever source it
is from), else one pool per source. A window's id counts through the pools and their streams in order; it depends on the data and the
sequence length alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import DataError
from phalanx.data.packing import IGNORE, Packed, TokenStream, pack

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """One side (train or validation) of the prepared data."""

    name: str
    pools: tuple[tuple[TokenStream, ...], ...]
    weights: tuple[float, ...]
    """Share of samples from each pool; any positive scale."""
    fingerprint: str
    """Equal where content, tokenizer, split and mixture are equal, wherever the files lie."""
    vocab_size: int
    eos_id: int

    @property
    def num_tokens(self) -> int:
        """End-of-document tokens included."""
        return sum(s.num_tokens for pool in self.pools for s in pool)

    @property
    def num_documents(self) -> int:
        return sum(s.num_documents for pool in self.pools for s in pool)

    def pool_sizes(self, seq_len: int) -> tuple[int, ...]:
        """Windows in each pool. Raises `DataError` where one has none: conversations may be too long for any."""
        sizes = tuple(sum(s.num_windows(seq_len) for s in pool) for pool in self.pools)
        if not all(sizes):
            rule = f"leaves no {self.name} conversation an answer: all begin later"
            raise DataError.of("train.seq_len", seq_len, rule, "use longer sequences", subject="the data")
        return sizes

    def cut(self, seq_len: int) -> tuple[int, int]:
        """Conversations that lose their end, and those that are left out, in sequences of this length."""
        found = [s.fitted(seq_len) for pool in self.pools for s in pool if s.first is not None]
        return sum(f.num_cut for f in found), sum(f.num_left_out for f in found)


def pack_ids(dataset: Dataset, ids: Ints, *, seq_len: int) -> Packed:
    """The sequences with these window ids (b,). Id -1 is a filler: a sequence of padding."""
    streams = [s for pool in dataset.pools for s in pool]
    ends = np.cumsum([s.num_windows(seq_len) for s in streams])
    owner = np.searchsorted(ends, ids, side="right")
    shape = (len(ids), seq_len)
    tokens, labels = np.full(shape, dataset.eos_id, np.int64), np.full(shape, IGNORE, np.int64)
    positions = np.tile(np.arange(seq_len), (len(ids), 1))
    segments: list[tuple[int, ...]] = [(seq_len,)] * len(ids)
    padding = [seq_len] * len(ids)
    for number in np.unique(owner[ids >= 0]):
        rows = np.flatnonzero((owner == number) & (ids >= 0))
        first = int(ends[number]) - streams[number].num_windows(seq_len)
        packed = pack(streams[number], ids[rows] - first, seq_len=seq_len)
        tokens[rows], labels[rows], positions[rows] = packed.tokens, packed.labels, packed.positions
        for row, lengths, behind in zip(rows.tolist(), packed.segments, packed.padding, strict=True):
            segments[row], padding[row] = lengths, behind
    return Packed(tokens=tokens, labels=labels, positions=positions, segments=tuple(segments), padding=tuple(padding))
