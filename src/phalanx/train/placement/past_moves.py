"""What moves of experts have taken on a rank, for the next decision."""

from __future__ import annotations

from dataclasses import dataclass

BYTES_PER_S = 1e9
"""Of a move for which all stand still, until one was measured."""
BESIDE_BYTES_PER_S = 3 * BYTES_PER_S
"""Of a move beside a step: training stands still for the gradients alone, a third as much as the state."""
LAST = 5
"""Moves whose figures are kept."""
MEMORY = 10
"""Decisions for which they are."""


class PastMoves:
    """What moves have taken on this rank. A busy moment is no property of the machine: the quickest of the last few counts, and each of them for some decisions only,
    so that one slow move cannot keep experts where they are for good. A machine whose moves are all slow pays for one that is not worth it in `MEMORY` decisions."""

    def __init__(self) -> None:
        self._moves: list[_Past] = []
        """The oldest first."""
        self._decisions = 0

    def decided(self) -> None:
        """A decision is being made."""
        self._decisions += 1
        self._moves = [m for m in self._moves[-LAST:] if self._decisions - m.at < MEMORY]

    def took(self, *, rebuild_s: float, bytes_per_s: float | None, beside: bool = False) -> None:
        """A move is done. `bytes_per_s`: state that came to a rank, by the seconds for which training stood still for it; None: nothing came to any rank. `beside`: beside a step."""
        past = _Past(at=self._decisions, rebuild_s=rebuild_s, bytes_per_s=bytes_per_s, beside=beside)
        self._moves = [*self._moves, past][-LAST:]

    @property
    def rebuild_s(self) -> float:
        """To build modules and buffers; 0 where nothing is known."""
        return min((m.rebuild_s for m in self._moves), default=0.0)

    def bytes_per_s(self, *, beside: bool) -> float:
        """Of state, in moves of that way."""
        found = [m.bytes_per_s for m in self._moves if m.bytes_per_s is not None and m.beside == beside]
        return max(found, default=BESIDE_BYTES_PER_S if beside else BYTES_PER_S)


@dataclass(frozen=True, kw_only=True)
class _Past:
    at: int
    rebuild_s: float
    bytes_per_s: float | None
    beside: bool
