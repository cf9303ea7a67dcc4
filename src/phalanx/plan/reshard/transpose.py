"""Moves made of other moves: the way back (for gradients), and what is left when ranks are lost.

Decides layouts only. Must never change: what a move copies to several ranks comes back either as one value that each of them has (any is a source), or as
terms that must be added; a move whose source was partial comes back to every holder of a term, for the gradient of a sum is that of each term.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.layout import Box, TensorLayout, overlapping_pair
from phalanx.plan.reshard.types import Move


def transposed(moves: Sequence[Move], *, partial: bool) -> tuple[Move, ...]:
    """Sources and destinations swapped. `partial`: replicas of a destination hold terms. Raises `PlanError` where they cannot be numbered."""
    made: dict[int, TensorLayout] = {}
    problems: list[Problem] = []

    def back(layout: TensorLayout, name: str) -> TensorLayout:
        if id(layout) not in made:
            terms = _replica_terms(layout) if partial else ()
            if terms is None:
                rule = "cannot be partial on its way back: replicas are not cut alike, or not equally many everywhere"
                hint = "use inverse(partial=False)"
                problems.append(Problem(where=f"{name}.dst", value=None, rule=rule, hint=hint))
            made[id(layout)] = replace(layout, terms=terms or ())
        return made[id(layout)]

    whole: dict[int, TensorLayout] = {}
    out = []
    for move in moves:
        if id(move.src) not in whole:
            whole[id(move.src)] = replace(move.src, terms=()) if move.src.terms else move.src
        out.append(replace(move, src=back(move.dst, move.name), dst=whole[id(move.src)]))
    raise_if(problems, PlanError, subject="the transposed move")
    return tuple(out)


def _replica_terms(layout: TensorLayout) -> tuple[int, ...] | None:
    """Each rank's number among those with the same boxes; None where the numbers of replicas differ, or replicas are cut differently. Ranks with nothing are term 0."""
    count: dict[frozenset[Box], int] = {}
    terms = []
    for held in layout.held:
        boxes = frozenset(one.box for one in held if one.box.num_elements)
        terms.append(count.get(boxes, 0) if boxes else 0)
        if boxes:
            count[boxes] = count.get(boxes, 0) + 1
    if len(set(count.values())) > 1 or overlapping_pair([box for boxes in count for box in boxes]) is not None:
        return None
    return tuple(terms) if max(terms, default=0) else ()


def surviving(moves: Sequence[Move], ranks: Iterable[int]) -> tuple[Move, ...]:
    """The moves without what these ranks hold or need."""
    lost = frozenset(ranks)
    made: dict[int, TensorLayout] = {}

    def left(layout: TensorLayout) -> TensorLayout:
        if id(layout) not in made:
            made[id(layout)] = _remaining(layout, lost)
        return made[id(layout)]

    return tuple(replace(move, src=left(move.src), dst=left(move.dst)) for move in moves)


def _remaining(layout: TensorLayout, lost: frozenset[int]) -> TensorLayout:
    """A layout without some ranks; the number of terms stays, so that a lost term is missed."""
    keep = [i for i, rank in enumerate(layout.ranks) if rank not in lost]
    if len(keep) == len(layout.ranks):
        return layout
    terms = layout.terms
    if terms and max((terms[i] for i in keep), default=0) < max(terms):
        # a rank that holds nothing stands for the last term, which nobody holds any more
        ghost = next(i for i, rank in enumerate(layout.ranks) if rank in lost and terms[i] == max(terms))
        empty = (0,) * max(1, len(layout.shape))
        return replace(
            layout,
            ranks=(*(layout.ranks[i] for i in keep), layout.ranks[ghost]),
            held=(*(layout.held[i] for i in keep), ()),
            local_shapes=(*(layout.local_shapes[i] for i in keep), empty),
            terms=(*(terms[i] for i in keep), terms[ghost]),
        )
    return replace(
        layout,
        ranks=tuple(layout.ranks[i] for i in keep),
        held=tuple(layout.held[i] for i in keep),
        local_shapes=tuple(layout.local_shapes[i] for i in keep),
        terms=tuple(terms[i] for i in keep) if terms else (),
    )
