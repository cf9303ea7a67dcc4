"""Token streams cut into training sequences that respect document boundaries.

A stream is the documents of one source end to end, each closed by the end-of-document token (EOS). Window w covers stream positions
[w*S, w*S + S]: S inputs and the token after each, so that neighbours share one token and every token but the first is predicted once
per epoch. The last window is padded with EOS that is not predicted: no text is lost, however short.

A stream of conversations is not cut: a window holds whole ones (best fit decreasing), each without its last token, which no input is, and EOS behind them. One that is too long
for a window loses its end, and is left out where no answer remains; so every window has something to predict, and no answer lacks its question.

Must never happen: a label from another document than its input, attention across a boundary (segments), a position that depends on
anything but the distance from the start of its segment.

Legend: b sequences, S sequence length, n documents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

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
    answers: TokenFile | NDArray[np.uint8] | None = None
    """Of conversations: 1 for each token of `tokens` that is predicted."""
    first: Ints | None = None
    """(n,) of conversations: place of the first token in each that is."""
    _fitted: dict[int, Fitted] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_documents(self) -> int:
        return len(self.begin)

    @property
    def num_tokens(self) -> int:
        """EOS included."""
        return int(self.offset[-1])

    def num_windows(self, seq_len: int) -> int:
        if self.first is not None:
            return self.fitted(seq_len).num_windows
        return -(-(self.num_tokens - 1) // seq_len) if self.num_tokens > 1 else 0

    def document(self, number: int) -> Ints:
        """Its tokens, the closing EOS among them."""
        return gather(self, np.arange(self.offset[number], self.offset[number + 1]))[0]

    def fitted(self, seq_len: int) -> Fitted:
        """Which conversations each window holds. Computed once: the same for everybody who asks."""
        assert self.first is not None
        if seq_len not in self._fitted:
            self._fitted[seq_len] = fit(np.diff(self.offset), self.first, seq_len=seq_len)
        return self._fitted[seq_len]


@dataclass(frozen=True, kw_only=True, eq=False)
class Fitted:
    """Conversations of each window."""

    documents: Ints
    """Those of window 0, then those of window 1, ..."""
    bounds: Ints
    """(windows + 1,) where those of each window begin."""
    num_cut: int
    """Lost their end."""
    num_left_out: int
    """Have no answer within a window."""

    @property
    def num_windows(self) -> int:
        return len(self.bounds) - 1


def fit(lengths: Ints, first: Ints, *, seq_len: int) -> Fitted:
    """Best fit decreasing: the longest first, each into the window that it leaves the least room in. `lengths` (n,), `first` (n,) in tokens."""
    kept = np.flatnonzero(first <= seq_len)
    sizes = np.minimum(lengths[kept] - 1, seq_len)
    windows: list[list[int]] = []
    rooms: list[int] = []
    """Different rooms that are left, ascending."""
    with_room: dict[int, list[int]] = {}
    for at in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[at])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            room, window = seq_len, len(windows)
            windows.append([])
        else:
            room = rooms[place]
            window = with_room[room].pop()
            if not with_room[room]:
                rooms.pop(place)
        windows[window].append(int(kept[at]))
        left = room - size
        if left and not with_room.setdefault(left, []):
            insort(rooms, left)
        if left:
            with_room[left].append(window)
    return Fitted(
        documents=np.array([document for window in windows for document in window], np.int64),
        bounds=np.append(0, np.cumsum([len(window) for window in windows])).astype(np.int64),
        num_cut=int((lengths[kept] - 1 > seq_len).sum()),
        num_left_out=len(lengths) - len(kept),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Packed:
    """`tokens`, `labels`, `positions` are int64 (b, S); `segments[i]` the lengths of the documents in sequence i (sum S), plain ints.

    `padding[i]`: so many tokens at the end of sequence i are no text. They are a segment of their own.
    """

    tokens: Ints
    labels: Ints
    positions: Ints
    segments: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...]


def pack(stream: TokenStream, windows: Ints, *, seq_len: int) -> Packed:
    """The sequences of `windows` (b,)."""
    if stream.first is not None:
        return _pack_whole(stream, windows, seq_len=seq_len)
    at = windows[:, None] * seq_len + np.arange(seq_len + 1)
    tokens, documents = gather(stream, at)
    labels = np.where(documents[:, 1:] == documents[:, :-1], tokens[:, 1:], IGNORE)
    labels[at[:, 1:] >= stream.num_tokens] = IGNORE
    starts = np.ones((len(windows), seq_len), np.bool_)
    starts[:, 1:] = documents[:, 1:-1] != documents[:, :-2]
    steps = np.arange(seq_len)
    positions = steps - np.maximum.accumulate(np.where(starts, steps, 0), axis=1)
    padding = tuple((at[:, :-1] >= stream.num_tokens).sum(1).tolist())
    return Packed(
        tokens=tokens[:, :-1], labels=labels, positions=positions, segments=segments_of(starts), padding=padding
    )


def _pack_whole(stream: TokenStream, windows: Ints, *, seq_len: int) -> Packed:
    assert stream.answers is not None
    fitted, shape = stream.fitted(seq_len), (len(windows), seq_len)
    tokens, labels = np.full(shape, stream.eos_id, np.int64), np.full(shape, IGNORE, np.int64)
    positions, segments, padding = np.zeros(shape, np.int64), [], []
    for row, window in enumerate(windows.tolist()):
        documents = fitted.documents[fitted.bounds[window] : fitted.bounds[window + 1]]
        sizes = np.minimum(stream.offset[documents + 1] - stream.offset[documents] - 1, seq_len)
        total = int(sizes.sum())
        within = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        at = np.repeat(stream.begin[documents], sizes) + within
        tokens[row, :total] = stream.tokens[at]
        labels[row, :total] = np.where(stream.answers[at + 1] == 1, stream.tokens[at + 1].astype(np.int64), IGNORE)
        positions[row] = np.append(within, np.arange(seq_len - total))
        segments.append((*sizes.tolist(), *([seq_len - total] if total < seq_len else [])))
        padding.append(seq_len - total)
    return Packed(tokens=tokens, labels=labels, positions=positions, segments=tuple(segments), padding=tuple(padding))


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
