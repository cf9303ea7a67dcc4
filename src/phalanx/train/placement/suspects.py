"""Which of several holders of the same piece of state have it wrong, by what they say of it.

Decides by majority: where holders differ and more than half of them agree, the others are *outvoted*; else it cannot be known which is right, and all of them are
doubted. Must never change: a piece of which holders differ is never a source without more than half of its holders behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.messages import message
from phalanx.plan.layout import Box

NONE = -1
"""Stands in a row of checksums where the member holds no such piece."""


@message
class StatePiece(NamedTuple):
    """A box of a logical tensor of the state, called `KIND/NAME`; of experts one by one."""

    name: str
    box: Box

    def __str__(self) -> str:
        if not self.box.sizes:
            return self.name
        ends = (f"{o}:{o + n}" for o, n in zip(self.box.offsets, self.box.sizes, strict=True))
        return f"{self.name}[{', '.join(ends)}]"


Sums = Mapping[StatePiece, int]
"""Piece -> checksum, of one member."""


def row_of(sums: Sums, pieces: Sequence[StatePiece]) -> NDArray[np.int64]:
    """Checksums in the order of `pieces`, (P,), which all members have alike and which name all that anybody holds: what travels has no names in it."""
    row = np.array([sums.get(piece, NONE) for piece in pieces], dtype=np.int64)
    if np.count_nonzero(row != NONE) != len(sums):
        raise ValueError(f"{_few([str(piece) for piece in sums.keys() - {*pieces}])} is not a piece of the plan")
    return row


def sums_of(row: NDArray[np.int64], pieces: Sequence[StatePiece]) -> Sums:
    """What `row_of` was given."""
    return {piece: value for piece, value in zip(pieces, row.tolist(), strict=True) if value != NONE}


def all_agree(rows: NDArray[np.int64]) -> bool:
    """Whether all holders of each piece have the same checksum of it. `rows` (M, P) of M members."""
    most = rows.max(axis=0)
    return bool(np.all((rows == most) | (rows == NONE)))


@dataclass(frozen=True, kw_only=True)
class Suspects:
    """Pieces that members must not give away. Numbers are places in what was told."""

    outvoted: tuple[tuple[int, StatePiece], ...] = ()
    doubted: tuple[tuple[int, StatePiece], ...] = ()

    @property
    def all(self) -> list[tuple[int, str, Box]]:
        """(member, name of the tensor, box) of all of them: no source, whatever the kind."""
        pairs = dict.fromkeys((who, p.name.split("/", 1)[1], p.box) for who, p in (*self.outvoted, *self.doubted))
        return list(pairs)

    def explain(self, names: Sequence[str]) -> list[str]:
        """Explains the suspects for people. `names` of the members."""
        out = []
        if self.outvoted:
            who = ", ".join(dict.fromkeys(names[i] for i, _ in self.outvoted))
            what = _few([str(piece) for _, piece in self.outvoted])
            out.append(f"{who} had other bits than most holders of {what}; they were replaced by those of the others")
        if self.doubted:
            who = ", ".join(dict.fromkeys(names[i] for i, _ in self.doubted))
            what = _few([str(piece) for _, piece in self.doubted])
            out.append(f"{who} differ in {what}, and it cannot be decided which are right")
        return out


def find_suspects(told: Sequence[Sums]) -> Suspects:
    """Finds suspects from what each member says of all that it holds."""
    found: dict[StatePiece, list[tuple[int, int]]] = {}
    for who, sums in enumerate(told):
        for piece, value in sums.items():
            found.setdefault(piece, []).append((who, value))
    outvoted, doubted = [], []
    for piece, holders in found.items():
        counts = Counter(value for _, value in holders)
        if len(counts) == 1:
            continue
        value, most = counts.most_common(1)[0]
        if 2 * most > len(holders):
            outvoted += [(who, piece) for who, own in holders if own != value]
        else:
            doubted += [(who, piece) for who, _ in holders]
    return Suspects(outvoted=tuple(outvoted), doubted=tuple(doubted))


def _few(names: Sequence[str], *, most: int = 3) -> str:
    unique = list(dict.fromkeys(names))
    return ", ".join(unique[:most]) + (f" and {len(unique) - most} more" if len(unique) > most else "")
