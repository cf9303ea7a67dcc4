"""One rank's part of a reshard plan, with the place of every byte: which message, which tensor, which elements of it.

Decides nothing: what travels, between whom and in which order is the plan's. Must never change: the steps stand in the plan's order; a message is its parts
end to end; what a rank sends lies, by this order of preference, in its own source tensor, in its destination tensor, or in a sum that it made.

    source   whole values that the rank had from the start, or its term of a partial tensor
    dest     what came by an earlier message (or a sum) and is the rank's to keep; it may be sent on
    sum      the sum of all terms of a box that the rank does not need itself
    term     one term of a sum, on its way in
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from phalanx.core.errors import PlanError, Problem
from phalanx.plan.layout import Box, TensorLayout
from phalanx.plan.reshard import WHOLE, Hop, Move, MovePart, Reduction, ReshardPlan

Store = Literal["source", "dest", "sum", "term"]


class PartPiece(NamedTuple):
    """Elements of a part that lie together: box `local` of tensor `number` of a store, and where they stand in the part."""

    store: Store
    number: int
    """Number of the move, or of the rank's sum."""
    local: Box
    within: Box


class Placed(NamedTuple):
    """A part of a message, from byte `start` on, and its pieces."""

    part: MovePart
    start: int
    stop: int
    pieces: tuple[PartPiece, ...]


class Step(NamedTuple):
    """A message that the rank sends or receives."""

    sends: bool
    peer: int
    """Global rank."""
    tag: int
    """How many messages went from the one to the other before."""
    nbytes: int
    placed: tuple[Placed, ...]
    needs: tuple[int, ...]
    """Numbers of the steps that bring what a message that is sent carries."""
    reads: tuple[int, ...]
    """Sums that it carries parts of."""


class LocalCopy(NamedTuple):
    """Elements that the rank has and keeps: from box `source` of its source tensor to box `dest` of its destination."""

    move: int
    source: Box
    dest: Box


@dataclass(frozen=True)
class SumPlace:
    """A box that the rank adds up: its own term, if it holds one, and where the sum goes."""

    reduction: Reduction
    own_term: int
    """-1 where it holds none."""
    own: tuple[PartPiece, ...]
    kept: tuple[PartPiece, ...]
    """Places in the destination; none where the rank does not need the box."""
    readers: int
    """Messages that carry (part of) the sum out of its own store."""


@dataclass(frozen=True)
class RankProgram:
    """What `rank` does, in order."""

    rank: int
    steps: tuple[Step, ...]
    copies: tuple[LocalCopy, ...]
    sums: tuple[SumPlace, ...]
    entering_steps: frozenset[int]

    @property
    def largest_bytes(self) -> int:
        """Largest number of bytes of a message."""
        return max((s.nbytes for s in self.steps), default=0)


def rank_program(plan: ReshardPlan, rank: int) -> RankProgram:
    """Find the place of everything that `rank` sends, receives, copies and adds. Raises `PlanError` where the plan does not fit its layouts."""
    return _Placing(plan, rank).program()


def inside(box: Box, origin: Sequence[int], *, at: Sequence[int] | None = None) -> Box:
    """`box`, counted from `origin` (which stands at `at`)."""
    base = at if at is not None else (0,) * len(box.offsets)
    return Box(tuple(o - b + a for o, b, a in zip(box.offsets, origin, base, strict=True)), box.sizes)


@dataclass
class _Holding:
    """Boxes of one rank in one layout, by move."""

    held: list[tuple[tuple[Box, tuple[int, ...]], ...]]

    def pieces(self, store: Store, move: int, box: Box) -> tuple[PartPiece, ...]:
        """Where the elements of `box` lie, as far as they are there."""
        found = []
        for own, local in self.held[move]:
            common = box.intersection(own)
            if common is not None:
                found.append(PartPiece(store, move, inside(common, own.offsets, at=local), inside(common, box.offsets)))
        return tuple(found)


def _holding(layouts: Iterable[TensorLayout], position: Mapping[tuple[int, ...], int | None]) -> _Holding:
    held = []
    for layout in layouts:
        at = position[layout.ranks]
        held.append(() if at is None else tuple((h.box, h.local) for h in layout.held[at]))
    return _Holding(held)


@dataclass
class _Arrivals:
    """Which steps bring which boxes of a move."""

    exact: dict[Box, int] = field(default_factory=dict)

    def bringing(self, box: Box) -> set[int]:
        """Steps that bring elements of `box`."""
        if box in self.exact:
            return {self.exact[box]}
        return {step for other, step in self.exact.items() if box.intersection(other) is not None}


class _Placing:
    def __init__(self, plan: ReshardPlan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        sides = [m.src.ranks for m in plan.moves] + [m.dst.ranks for m in plan.moves]
        position = {ranks: ranks.index(rank) if rank in ranks else None for ranks in dict.fromkeys(sides)}
        self.source = _holding([m.src for m in plan.moves], position)
        self.dest = _holding([m.dst for m in plan.moves], position)
        self.terms = [self._term(m, position[m.src.ranks]) for m in plan.moves]
        self.arrivals: dict[int, _Arrivals] = defaultdict(_Arrivals)
        self.reductions = [r for r in plan.reductions if r.rank == rank]
        self.by_move: dict[int, list[int]] = defaultdict(list)
        for number, reduction in enumerate(self.reductions):
            self.by_move[reduction.move].append(number)
        self.feeding: dict[int, set[int]] = defaultdict(set)
        self.readers: dict[int, int] = defaultdict(int)

    @staticmethod
    def _term(move: Move, at: int | None) -> int:
        if at is None or not move.src.held[at]:
            return -1
        return move.src.terms[at] if move.src.terms else 0

    def program(self) -> RankProgram:
        steps: list[Step] = []
        entering_steps = set()
        sent: dict[tuple[int, int], int] = defaultdict(int)
        hosts = self.plan.hosts.host_of_rank
        for hop in self.plan.program(self.rank):
            tag = sent[hop.src, hop.dst]
            sent[hop.src, hop.dst] += 1
            steps.append(self._send(hop, tag) if hop.src == self.rank else self._receive(hop, tag, len(steps)))
            if hop.dst == self.rank and hosts[hop.src] != hosts[hop.dst]:
                entering_steps.add(len(steps) - 1)
        return RankProgram(
            rank=self.rank,
            steps=tuple(steps),
            copies=tuple(c for part in self.plan.copies(self.rank) for c in self._copies(part)),
            sums=tuple(self._sum(number) for number in range(len(self.reductions))),
            entering_steps=frozenset(entering_steps),
        )

    # ---- messages ------------------------------------------------------------------------------------------------------

    def _send(self, hop: Hop, tag: int) -> Step:
        placed, needs, reads, at = [], set[int](), set[int](), 0
        for part in hop.parts:
            pieces = self._outgoing(part)
            for piece in pieces:
                if piece.store == "sum":
                    reads.add(piece.number)
                    needs |= self.feeding[piece.number]
                elif piece.store == "dest":
                    needs |= self._bringing(part)
            stop = at + part.num_bytes(self.plan.moves)
            placed.append(Placed(part, at, stop, pieces))
            at = stop
        for number in reads:
            self.readers[number] += 1
        return Step(True, hop.dst, tag, at, tuple(placed), tuple(sorted(needs)), tuple(sorted(reads)))

    def _receive(self, hop: Hop, tag: int, number: int) -> Step:
        placed, at = [], 0
        for part in hop.parts:
            stop = at + part.num_bytes(self.plan.moves)
            if part.term == WHOLE:
                pieces = self.dest.pieces("dest", part.move, part.box)
                self.arrivals[part.move].exact[part.box] = number
            else:
                pieces = self._into_sums(part, number)
            placed.append(Placed(part, at, stop, self._covered(part, pieces, "receives")))
            at = stop
        return Step(False, hop.src, tag, at, tuple(placed), (), ())

    def _outgoing(self, part: MovePart) -> tuple[PartPiece, ...]:
        """Where a part that is sent lies."""
        move = self.plan.moves[part.move]
        partial = move.src.num_terms > 1
        if part.term != WHOLE or not partial:
            pieces = self.source.pieces("source", part.move, part.box)
            if part.term != WHOLE and self.terms[part.move] != part.term:
                pieces = ()
            if _elements(pieces) == part.box.num_elements or part.term != WHOLE:
                return self._covered(part, pieces, "sends")
        pieces = self.dest.pieces("dest", part.move, part.box)
        if _elements(pieces) != part.box.num_elements:
            pieces = self._of_sums("sum", part)
        return self._covered(part, pieces, "sends")

    def _bringing(self, part: MovePart) -> set[int]:
        """Steps that bring a part into the destination: messages with it, or the terms of its sums."""
        found = self.arrivals[part.move].bringing(part.box)
        for number in self.by_move[part.move]:
            if part.box.intersection(self.reductions[number].box) is not None:
                found = found | self.feeding[number]
        return found

    def _into_sums(self, part: MovePart, step: int) -> tuple[PartPiece, ...]:
        pieces = self._of_sums("term", part)
        for piece in pieces:
            self.feeding[piece.number].add(step)
        return pieces

    def _of_sums(self, store: Store, part: MovePart) -> tuple[PartPiece, ...]:
        found = []
        for number in self.by_move[part.move]:
            box = self.reductions[number].box
            common = part.box.intersection(box)
            if common is not None:
                found.append(PartPiece(store, number, inside(common, box.offsets), inside(common, part.box.offsets)))
        return tuple(found)

    # ---- what stays on the rank ----------------------------------------------------------------------------------------

    def _copies(self, part: MovePart) -> list[LocalCopy]:
        found = []
        wanted = self._covered(part, self.dest.pieces("dest", part.move, part.box), "keeps")
        had = self._covered(part, self.source.pieces("source", part.move, part.box), "keeps")
        for a in had:
            for b in wanted:
                common = a.within.intersection(b.within)
                if common is not None:
                    source = inside(common, a.within.offsets, at=a.local.offsets)
                    found.append(LocalCopy(part.move, source, inside(common, b.within.offsets, at=b.local.offsets)))
        return found

    def _sum(self, number: int) -> SumPlace:
        reduction = self.reductions[number]
        own = self.source.pieces("source", reduction.move, reduction.box)
        whole = _elements(own) == reduction.box.num_elements
        kept = self.dest.pieces("dest", reduction.move, reduction.box)
        return SumPlace(
            reduction=reduction,
            own_term=self.terms[reduction.move] if whole else -1,
            own=own if whole else (),
            kept=kept,
            readers=self.readers[number],
        )

    def _covered(self, part: MovePart, pieces: tuple[PartPiece, ...], what: str) -> tuple[PartPiece, ...]:
        if _elements(pieces) == part.box.num_elements:
            return pieces
        name = self.plan.moves[part.move].name
        rule = (
            f"{what} it, but its tensors have a place for {_elements(pieces)} of its {part.box.num_elements} elements"
        )
        problem = Problem(
            where=f"rank {self.rank}, {name}",
            value=part.box,
            rule=rule,
            hint="the plan does not belong to these layouts",
        )
        raise PlanError([problem], subject="the reshard plan")


def _elements(pieces: Iterable[PartPiece]) -> int:
    return sum(p.local.num_elements for p in pieces)
