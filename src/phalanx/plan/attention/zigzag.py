"""Which part of a sequence each context-parallel rank holds, and which blocks of attention it computes against each other rank's part.

Decides positions and blocks. Must never change: every rank's positions ascend, so that a document's tokens lie together on every rank
and the local causal mask of a rank's own part is the plain triangle; and over all (query rank, key rank) pairs the blocks cover every
pair that may attend (same document, key not after query) exactly once and no other.

    zigzag      2*cp equal chunks, rank c holds chunks c and 2cp-1-c: all ranks compute equally much at every step of the ring
    contiguous  cp equal chunks, rank c holds chunk c: the last rank computes most; for tests and for what needs whole stretches

In step t of the ring, rank c computes its queries against the keys of rank (c - t) mod cp, which have travelled t hops upwards.
S sequence length, L = S/cp tokens of a rank. `segments` are the lengths of the documents packed in one sequence, in order (sum S).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PlanError, Problem, nearest, raise_if
from phalanx.core.hashed import Hashed

LayoutName = Literal["zigzag", "contiguous"]
CHUNKS = {"zigzag": 2, "contiguous": 1}
"""Chunks that each rank holds."""
EARLY_KEYS = 1 - 3**-0.5
"""Share of the keys of a causal block that two thirds of its pairs have."""


class AttentionBlock(NamedTuple):
    """Queries [q_start, q_stop) of one rank against keys [k_start, k_stop) of another, both counted within the rank.

    `causal`: query i sees key j of the block only if i >= j (both parts are then the same tokens); else every query sees every key.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool

    @property
    def num_pairs(self) -> int:
        """Pairs that attend."""
        queries, keys = self.q_stop - self.q_start, self.k_stop - self.k_start
        return queries * (queries + 1) // 2 if self.causal else queries * keys


class _Piece(NamedTuple):
    """Tokens of one document in one chunk: where they start in the sequence, and where they lie on the rank."""

    position: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class SequenceLayout(Hashed):
    """A sequence of `seq_len` tokens over `cp` ranks. Construct with `make_layout`, which checks it."""

    name: LayoutName
    seq_len: int
    cp: int

    @property
    def local_len(self) -> int:
        """Tokens of each rank."""
        return self.seq_len // self.cp

    @property
    def chunk_len(self) -> int:
        return self.local_len // CHUNKS[self.name]

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Chunks that a rank holds, ascending."""
        return (rank,) if self.name == "contiguous" else (rank, 2 * self.cp - 1 - rank)

    def positions(self, rank: int) -> NDArray[np.int64]:
        """(L,) places in the sequence of a rank's tokens, ascending."""
        size = self.chunk_len
        return np.concatenate([np.arange(c * size, (c + 1) * size, dtype=np.int64) for c in self.chunks(rank)])

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """(S,) the positions of rank 0, then of rank 1, ...: `x[order]` puts a sequence in the ranks' order."""
        return np.concatenate([self.positions(rank) for rank in range(self.cp)])

    @cached_property
    def inverse(self) -> NDArray[np.int64]:
        """(S,) the way back: `gathered[inverse]` puts what the ranks hold, one after the other, in the order of the sequence."""
        return np.argsort(self.order, kind="stable")

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        raise_if(layout_problems(self.name, seq_len=self.seq_len, cp=self.cp), PlanError, subject="sequence layout")

    def explain(self) -> str:
        """The layout in a few lines that a person reads."""
        lines = [f"{self.name}: {self.seq_len} tokens over {self.cp} ranks, {self.local_len} each"]
        for rank in range(self.cp):
            spans = [f"{c * self.chunk_len}-{(c + 1) * self.chunk_len - 1}" for c in self.chunks(rank)]
            lines.append(f"  rank {rank}: {' and '.join(spans)}")
        return "\n".join(lines)


def layout_problems(name: str, *, seq_len: int, cp: int) -> list[Problem]:
    """Why a sequence cannot lie so; all reasons, each with the nearest legal value."""
    problems = []
    if name not in CHUNKS:
        problems.append(Problem(where="cp.layout", value=name, rule="is not a layout", hint=nearest(name, CHUNKS)))
    if cp < 1:
        problems.append(Problem(where="cp", value=cp, rule="a degree is at least 1", hint="nearest legal: 1"))
    chunks = max(1, cp) * CHUNKS.get(name, 1) if cp != 1 else 1
    if seq_len < 1 or seq_len % chunks:
        legal = max(1, round(seq_len / chunks)) * chunks
        rule = f"must be a positive multiple of the {chunks} equal chunks of {name} over cp {cp}"
        problems.append(Problem(where="seq_len", value=seq_len, rule=rule, hint=f"nearest legal: {legal}"))
    return problems


def make_layout(name: str, *, seq_len: int, cp: int) -> SequenceLayout:
    """The layout of that name; over one rank it is always contiguous. Raises `PlanError` naming every problem."""
    raise_if(layout_problems(name, seq_len=seq_len, cp=cp), PlanError, subject="sequence layout")
    zigzag = name == "zigzag" and cp > 1
    return SequenceLayout(name="zigzag" if zigzag else "contiguous", seq_len=seq_len, cp=cp)


# ---- blocks of attention --------------------------------------------------------------------------------------------------------


def segment_problems(layout: SequenceLayout, segments: Sequence[int]) -> list[Problem]:
    """Why these cannot be the documents of a sequence."""
    bad = [length for length in segments if length < 1]
    if not bad and sum(segments) == layout.seq_len:
        return []
    if bad:
        return [Problem(where="segments", value=bad[0], rule="a document has at least one token")]
    return [Problem(where="segments", value=sum(segments), rule=f"sum to the {layout.seq_len} tokens of the sequence")]


def attention_blocks(
    layout: SequenceLayout, segments: Sequence[int], *, q_rank: int, kv_rank: int
) -> tuple[AttentionBlock, ...]:
    """Blocks of one sequence that `q_rank` computes when it has the keys of `kv_rank`: at most one for each document.

    Raises `PlanError` where `segments` are not the documents of a sequence.
    """
    raise_if(segment_problems(layout, segments), PlanError, subject="packed documents")
    out: list[AttentionBlock] = []
    q_docs, k_docs = _documents(layout, segments, q_rank), _documents(layout, segments, kv_rank)
    for document in sorted(q_docs.keys() & k_docs.keys()):
        out += _document_blocks(q_docs[document], k_docs[document], is_own=q_rank == kv_rank)
    return tuple(out)


def _documents(layout: SequenceLayout, segments: Sequence[int], rank: int) -> dict[int, list[_Piece]]:
    """Number of each document of which `rank` holds tokens -> its pieces, one for each chunk."""
    bounds = np.concatenate([[0], np.cumsum(np.asarray(segments, dtype=np.int64))])
    out: dict[int, list[_Piece]] = {}
    for local, chunk in enumerate(layout.chunks(rank)):
        begin, end = chunk * layout.chunk_len, (chunk + 1) * layout.chunk_len
        shift = local * layout.chunk_len - begin
        first = int(np.searchsorted(bounds, begin, side="right")) - 1
        for document in range(first, len(segments)):
            start, stop = max(begin, int(bounds[document])), min(end, int(bounds[document + 1]))
            if start >= end:
                break
            out.setdefault(document, []).append(_Piece(start, start + shift, stop + shift))
    return out


def _document_blocks(queries: Sequence[_Piece], keys: Sequence[_Piece], *, is_own: bool) -> Iterator[AttentionBlock]:
    """Blocks of one document. Pieces of a document lie together on a rank, and so do the keys that a query piece sees (the early ones)."""
    if is_own:
        yield AttentionBlock(queries[0].start, queries[-1].stop, keys[0].start, keys[-1].stop, causal=True)
        return
    open_block: AttentionBlock | None = None
    for piece in queries:
        seen = [
            key for key in keys if key.position < piece.position
        ]  # other rank, other chunk: wholly before or wholly after
        if not seen:
            continue
        span = (seen[0].start, seen[-1].stop)
        if open_block is not None and open_block[2:4] == span and open_block.q_stop == piece.start:
            open_block = open_block._replace(q_stop=piece.stop)
            continue
        if open_block is not None:
            yield open_block
        open_block = AttentionBlock(piece.start, piece.stop, *span, causal=False)
    if open_block is not None:
        yield open_block


def gathered_blocks(layout: SequenceLayout, segments: Sequence[int], *, q_rank: int) -> tuple[AttentionBlock, ...]:
    """Blocks of one sequence that `q_rank` computes when it has all keys, in the order of the sequence: at most two for each chunk of a document.

    Raises `PlanError` where `segments` are not the documents of a sequence.
    """
    raise_if(segment_problems(layout, segments), PlanError, subject="packed documents")
    starts = np.cumsum([0, *segments])
    out = []
    for document, pieces in sorted(_documents(layout, segments, q_rank).items()):
        first = int(starts[document])
        for piece in pieces:
            length = piece.stop - piece.start
            if piece.position > first:
                out.append(AttentionBlock(piece.start, piece.stop, first, piece.position, causal=False))
            out.append(AttentionBlock(piece.start, piece.stop, piece.position, piece.position + length, causal=True))
    return tuple(out)


def first_and_last(blocks: Sequence[AttentionBlock]) -> tuple[tuple[AttentionBlock, ...], tuple[AttentionBlock, ...]]:
    """The same pairs in two parts: of each causal block the late keys, a third of its work, and then the early ones.

    So a rank computes its own keys in two goes: there is work to do while the next keys come, and while gradients go home, which takes
    about twice as long where they are summed in a type twice as wide.
    """
    first, last = [], []
    for block in blocks:
        early = round(EARLY_KEYS * (block.k_stop - block.k_start))
        if not (block.causal and early):
            first.append(block)
            continue
        q_middle, k_middle = block.q_start + early, block.k_start + early
        first.append(block._replace(q_start=q_middle, k_start=k_middle))
        last.append(block._replace(q_stop=q_middle, k_stop=k_middle))
        last.append(AttentionBlock(q_middle, block.q_stop, block.k_start, k_middle, causal=False))
    return tuple(first), tuple(last)


def ring_source(rank: int, step: int, *, cp: int) -> int:
    """Rank whose keys `rank` computes with in a step of the ring; step 0 is its own."""
    return (rank - step) % cp
