"""What of the experts that are placed anew comes to a rank, and where everything that it is to hold is then taken from.

Decides what travels beside a step: of each parameter the experts that a rank is to hold and does not, one after the other in a tensor that has room for these alone (*staging*). Masters and
moments come there first, the gradients of the same experts afterwards, from the same holders by the same boxes.

Must never change: what a rank holds already does not travel; every expert of the new place has one source on its rank, what was held there or what came.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from phalanx.plan.layout import STATE_KINDS, Box, Held, TensorLayout
from phalanx.plan.reshard import Move


class Taking(NamedTuple):
    """One expert on its way into the new place of its rank. Boxes are of local tensors."""

    came: bool
    """Whether it came from staging; else from what the rank held."""
    source: Box
    dest: Box


def coming_moves(moves: Sequence[Move]) -> list[Move]:
    """What comes, into staging, of `moves` between the present and the new place. Parameters of which nothing comes to any rank
    are left out."""
    staged = [replace(move, dst=_staging(move)) for move in moves]
    return [move for move in staged if move.dst.ranks]


def of_all_kinds(moves: Sequence[Move], *, moment_bytes: int | None = None) -> list[Move]:
    """The same for master weights and both moments, called `KIND/NAME`. `moment_bytes` of an element of a moment; None: as many as of a master."""
    items = {kind: None if kind == "master" else moment_bytes for kind in STATE_KINDS}
    return [
        replace(move, name=f"{kind}/{move.name}", itemsize=item or move.itemsize)
        for kind, item in items.items()
        for move in moves
    ]


def takings(move: Move, coming: Move | None, rank: int) -> list[Taking]:
    """Where `rank` takes each expert of the new place from. `coming`: of `coming_moves`, None where nothing comes. Raises `KeyError` for one that is neither held nor comes."""
    held = {h.box: (False, h.local_box()) for h in _experts(move.src.of_rank(rank))}
    came = {} if coming is None else {h.box: (True, h.local_box()) for h in _experts(coming.dst.of_rank(rank))}
    found = {**came, **held}
    return [Taking(*found[h.box], dest=h.local_box()) for h in _experts(move.dst.of_rank(rank))]


def _staging(move: Move) -> TensorLayout:
    ranks, held, shapes = [], [], []
    for rank, shape in zip(move.dst.ranks, move.dst.local_shapes, strict=True):
        has = {h.box for h in _experts(move.src.of_rank(rank))}
        lacks = sorted((h for h in _experts(move.dst.of_rank(rank)) if h.box not in has), key=lambda h: h.box.offsets)
        if lacks:
            ranks.append(rank)
            held.append(tuple(Held(h.box, (i, *(0,) * (len(shape) - 1))) for i, h in enumerate(lacks)))
            shapes.append((len(lacks), *shape[1:]))
    return TensorLayout(shape=move.dst.shape, ranks=tuple(ranks), held=tuple(held), local_shapes=tuple(shapes))


def _experts(held: Sequence[Held]) -> Iterator[Held]:
    """Boxes of several experts, one by one."""
    for of in held:
        (first, *rest), (many, *sizes), (at, *local) = of.box.offsets, of.box.sizes, of.local
        for i in range(many):
            yield Held(Box((first + i, *rest), (1, *sizes)), (at + i, *local))
