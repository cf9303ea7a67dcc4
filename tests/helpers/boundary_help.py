"""Stages with several ranks each: layouts of what crosses, and plans for it that are put together by hand."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.plan.layout.parameters import Box
from phalanx.plan.layout.tensors import Held, TensorLayout, whole_layout
from phalanx.plan.pipeline.boundary.edges import EdgePlan, planned_edge
from phalanx.plan.pipeline.schedule.clock import Edge
from phalanx.plan.reshard.types import Hop, Move, MovePart, Reduction


def rows_layout(shape: tuple[int, ...], ranks: Sequence[int]) -> TensorLayout:
    """Rows divided among the ranks, the first ones having one more where they do not divide evenly."""
    size, more = divmod(shape[0], len(ranks))
    counts = [size + (i < more) for i in range(len(ranks))]
    return _rows(shape, ranks, [[(sum(counts[:i]), count)] for i, count in enumerate(counts)])


def zigzag_layout(shape: tuple[int, ...], ranks: Sequence[int]) -> TensorLayout:
    """Rank i of n has the i-th and the i-th last of 2n chunks of rows."""
    chunk = shape[0] // (2 * len(ranks))
    ends = [[(i * chunk, chunk), (shape[0] - (i + 1) * chunk, chunk)] for i in range(len(ranks))]
    return _rows(shape, ranks, ends)


def _rows(shape: tuple[int, ...], ranks: Sequence[int], runs: list[list[tuple[int, int]]]) -> TensorLayout:
    held = []
    for own in runs:
        starts = itertools.accumulate((count for _, count in own), initial=0)
        held.append(tuple(
            Held(Box((first, 0), (count, shape[1])), (at, 0)) for (first, count), at in zip(own, starts, strict=False)
        ))  # fmt: skip
    shapes = tuple((sum(count for _, count in own), shape[1]) for own in runs)
    return TensorLayout(shape=shape, ranks=tuple(ranks), held=tuple(held), local_shapes=shapes)


@dataclass(frozen=True)
class ByHand:
    """One entry into each group of replicas, in chunks of rows, passed on from replica to replica."""

    src: TensorLayout
    dst: TensorLayout
    chunk: int = 3

    @property
    def moves(self) -> tuple[Move, ...]:
        return (Move(name="x", itemsize=8, src=self.src, dst=self.dst),)

    @property
    def reductions(self) -> tuple[Reduction, ...]:
        return ()

    @cached_property
    def hops(self) -> tuple[Hop, ...]:
        out = []
        for box in dict.fromkeys(held.box for own in self.dst.held for held in own):
            needers = [rank for rank in self.dst.ranks if any(h.box == box for h in self.dst.of_rank(rank))]
            for sender, part in self._sources(box):
                out += [Hop(a, b, (MovePart(0, part),)) for a, b in itertools.pairwise([sender, *needers])]
        return tuple(out)

    def _sources(self, box: Box) -> list[tuple[int, Box]]:
        """Who sends which part of a box: of those that have it the one whose turn it is."""
        found = []
        low, high = box.offsets[0], box.offsets[0] + box.sizes[0]
        for turn, at in enumerate(range(low, high, self.chunk)):
            stop = min(at + self.chunk, high)
            while at < stop:
                holders = [
                    (rank, held.box) for rank in self.src.ranks for held in self.src.of_rank(rank)
                    if held.box.offsets[0] <= at < held.box.offsets[0] + held.box.sizes[0]
                ]  # fmt: skip
                rank, has = holders[turn % len(holders)]
                end = min(stop, has.offsets[0] + has.sizes[0])
                found.append((rank, Box((at, 0), (end - at, box.sizes[1]))))
                at = end
        return found

    @property
    def hash(self) -> str:
        return hashlib.sha256(repr((self.src, self.dst, self.chunk)).encode()).hexdigest()[:16]


def edge_by_hand(edge: Edge, below: TensorLayout, above: TensorLayout) -> EdgePlan:
    return planned_edge(edge, ByHand(below, above), ByHand(above, below))


def stage_layouts(shape: tuple[int, int], words: Sequence[str]) -> list[TensorLayout]:
    """Of stages like `rows2`, `whole3`, `zigzag2`: so many ranks each, one stage after the other."""
    kinds = {"rows": rows_layout, "whole": whole_layout, "zigzag": zigzag_layout}
    counts = [int(word.lstrip("abcdefghijklmnopqrstuvwxyz")) for word in words]
    firsts = itertools.accumulate(counts, initial=0)
    return [
        kinds[word.rstrip("0123456789")](shape, range(first, first + count))
        for word, first, count in zip(words, firsts, counts, strict=False)
    ]


def ranks_of(layouts: Sequence[TensorLayout]) -> int:
    return sum(len(layout.ranks) for layout in layouts)
