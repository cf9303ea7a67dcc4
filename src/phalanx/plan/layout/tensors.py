"""Which boxes of one logical tensor each rank of a set holds, whatever put them there.

Decides nothing about moving them (`plan/reshard/plan.py`). Must never change: a layout is its shape, its ranks and their boxes, and nothing else; two layouts
with the same boxes are equal, whoever built them. A rank may hold any number of boxes, they may be ragged, strided (several boxes a rank), replicated (the
same box on several ranks) or differently cut on different ranks.

*Partial* (unreduced): the logical tensor is the sum of `num_terms` terms; each rank holds its boxes of one of them (`terms`), and ranks with the same term are
replicas of it. A layout of whole values has one term.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from phalanx.plan.layout.parameters import Box


@dataclass(frozen=True)
class Held:
    """A box of the logical tensor, and where it begins in the holder's local tensor (same sizes)."""

    box: Box
    local: tuple[int, ...]

    def local_box(self) -> Box:
        """The part of the local tensor that it is."""
        return Box(self.local, self.box.sizes)

    def place(self, box: Box) -> Box:
        """Where a box inside it lies in the local tensor."""
        offsets = (o - h + at for o, h, at in zip(box.offsets, self.box.offsets, self.local, strict=True))
        return Box(tuple(offsets), box.sizes)


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """What each rank holds of a logical tensor; `held`, `local_shapes` and `terms` go with `ranks` position by position.

    The boxes of one rank do not overlap. A rank that holds nothing has no boxes, and a local shape with a zero in it.
    """

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Global ranks, each once, in the order of whoever built the layout."""
    held: tuple[tuple[Held, ...], ...]
    local_shapes: tuple[tuple[int, ...], ...]
    terms: tuple[int, ...] = ()
    """Term of the sum that each rank holds, 0 .. num_terms-1; empty: whole values."""

    def __hash__(self) -> int:
        """Hash of its fields; worked out once, for whoever plans asks for it again and again."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.ranks, self.held, self.local_shapes, self.terms))

    @property
    def num_terms(self) -> int:
        """1 for whole values, and for a partial layout of one term."""
        return max(self.terms, default=0) + 1

    def of_rank(self, rank: int) -> tuple[Held, ...]:
        """Boxes of a global rank; none where it has no part in the layout."""
        return self.held[self.ranks.index(rank)] if rank in self.ranks else ()

    def term_of(self, rank: int) -> int:
        """Term that a rank of the layout holds; 0 for whole values."""
        return self.terms[self.ranks.index(rank)] if self.terms else 0


def whole_layout(shape: Sequence[int], ranks: Sequence[int]) -> TensorLayout:
    """Everything on each of `ranks`."""
    box = Box((0,) * len(shape), tuple(shape))
    held = (Held(box, (0,) * len(shape)),)
    return TensorLayout(
        shape=tuple(shape), ranks=tuple(ranks), held=(held,) * len(ranks), local_shapes=(tuple(shape),) * len(ranks)
    )
