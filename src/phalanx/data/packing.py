"""Token streams cut into training sequences that respect document boundaries.

A stream is the documents of one source end to end, each closed by the end-of-document token (EOS). Window w covers stream positions
[w*S, w*S + S]: S inputs and the token after each, so that neighbours share one token and every token but the first is predicted once
per epoch. The last window is padded with EOS that is not predicted: no text is lost, however short.

Must never happen: a label from another document than its input, attention across a boundary (segments), a position that depends on
anything but the distance from the start of its segment.

Legend: b sequences, S sequence length, n documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.data.token_file import TokenFile

Ints = NDArray[np.int64]

IGNORE = -100
"""Label of an input whose next token must not be predicted."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStream:
    """Documents of one source, of one side of the split; arrays are usually memory-mapped."""

    tokens: NDArray[np.unsignedinteger] | NDArray[np.signedinteger] | TokenFile
    """Token file, documents of both sides in it."""
    begin: Ints
    """(n,) where each document begins in `tokens`."""
    offset: Ints
    """(n + 1,) where each document begins in the stream; the last entry is the stream's length."""
    bare: NDArray[np.bool_] | None
    """(n,) documents whose closing EOS is not in the file; None where all have it."""
    eos_id: int

    @property
    def num_documents(self) -> int:
        return len(self.begin)

    @property
    def num_tokens(self) -> int:
        """EOS included."""
        return int(self.offset[-1])

    def num_windows(self, seq_len: int) -> int:
        return -(-(self.num_tokens - 1) // seq_len) if self.num_tokens > 1 else 0

    def document(self, number: int) -> Ints:
        """Its tokens, the closing EOS among them."""
        return gather(self, np.arange(self.offset[number], self.offset[number + 1]))[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """`tokens`, `labels`, `positions` are int64 (b, S); `segments[i]` the lengths of the documents in sequence i (sum S), plain ints."""

    tokens: Ints
    labels: Ints
    positions: Ints
    segments: tuple[tuple[int, ...], ...]


def pack(stream: TokenStream, windows: Ints, *, seq_len: int) -> Packed:
    """The sequences of `windows` (b,)."""
    at = windows[:, None] * seq_len + np.arange(seq_len + 1)
    tokens, documents = gather(stream, at)
    labels = np.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], IGNORE)
    labels[at[:, 1:] >= stream.num_tokens] = IGNORE
    starts = np.ones((len(windows), seq_len), np.bool_)
    starts[:, 1:] = documents[:, 1:-1] != documents[:, :-2]
    steps = np.arange(seq_len)
    positions = steps - np.maximum.accumulate(np.where(starts, steps, 0), axis=1)
    return Packed(tokens=tokens[:, :-1], labels=labels, positions=positions, segments=segments_of(starts))


def gather(stream: TokenStream, at: Ints) -> tuple[Ints, Ints]:
    """Tokens and document numbers at stream positions `at` (any shape). Past the end: EOS of a document of its own."""
    inside = np.minimum(at, stream.num_tokens - 1)
    documents = np.searchsorted(stream.offset, inside, side="right") - 1
    within = inside - stream.offset[documents]
    where = stream.begin[documents] + within
    if stream.bare is None:
        tokens = stream.tokens[where].astype(np.int64)
    else:
        virtual = stream.bare[documents] & (inside == stream.offset[documents + 1] - 1)
        tokens = stream.tokens[np.where(virtual, where - 1, where)].astype(np.int64)
        tokens[virtual] = stream.eos_id
    outside = at >= stream.num_tokens
    tokens[outside] = stream.eos_id
    documents[outside] = stream.num_documents
    return tokens, documents


def segments_of(starts: NDArray[np.bool_]) -> tuple[tuple[int, ...], ...]:
    """Lengths of the runs that begin where `starts` (b, S) is set; column 0 always is."""
    width = starts.shape[1]
    return tuple(tuple(np.diff(np.flatnonzero(row), append=width).tolist()) for row in starts)
