"""Sums of what collectives move: is what was received what was sent?

Every rank notes the word sum (`kernels/cpu/words.py`) of each tensor that it gives to a rank and of each that it gets. All that was sent less all that was received, over all
ranks, is zero, modulo 2^32; one number of each rank tells, at the vote of the step, before anything made of a message is committed. Where it is not zero, the
notes of all ranks say which message it was.

Whole numbers that are few decide sizes as soon as they arrive, so they cannot wait for a vote: they travel three times, and what two of the three say counts.

Decides nothing about what follows (`train/step/check.py`). Must never change: nothing that travels depends on what is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from phalanx.core.messages import message
from phalanx.kernels.cpu.words import WORDS, on_host, word_sum
from phalanx.kernels.native import CompiledRows

FEW = 1 << 14
"""Whole numbers that travel three times."""


@message
class MessageNote(NamedTuple):
    """One tensor that went from `sender` to `receiver` (global ranks), as one of the two noted it."""

    place: str
    sender: int
    receiver: int
    total: int


class Passed(NamedTuple):
    """A tensor given to, or got from, the rank `peer` (global)."""

    peer: int
    tensor: torch.Tensor
    total: int | None = None
    """Its word sum, where whoever wrote it knows that."""


class MessageSums:
    """What one rank has sent and received since `take`. Threads may note beside one another."""

    def __init__(self, rank: int, *, rows: CompiledRows | None = None) -> None:
        self.rank, self.rows = rank, rows
        self.outvoted = 0
        """Whole numbers that one of three copies had otherwise."""
        self._sent: list[tuple[str, int, int | torch.Tensor]] = []
        self._received: list[tuple[str, int, int | torch.Tensor]] = []
        self._made: list[tuple[torch.Tensor, int, int]] = []
        """Sums that `add` has made: the tensor, its version, its word sum."""

    def sent(self, place: str, passed: Sequence[Passed]) -> None:
        """Note what leaves, before it does."""
        known: dict[tuple[int, int], int | torch.Tensor] = {}  # a gather gives all the same tensor
        for peer, x, total in passed:
            key = (x.data_ptr(), x.numel())
            if key not in known:
                known[key] = total if total is not None else self._total_of(x)
            self._sent.append((place, peer, known[key]))

    def _total_of(self, x: torch.Tensor) -> int | torch.Tensor:
        """Word sum of what leaves: that of a sum was taken down when it was made, unless an operation has written there since."""
        for made, version, total in self._made:
            if made.data_ptr() == x.data_ptr() and made.numel() == x.numel() and x._version == version == made._version:
                return total
        return word_sum(x, rows=self.rows)

    def received(self, place: str, passed: Sequence[Passed]) -> None:
        """Note what came, before it is used."""
        self._received += [(place, peer, word_sum(x, rows=self.rows)) for peer, x, _ in passed]

    def adds(self, x: torch.Tensor) -> bool:
        """Whether `add` takes such tensors."""
        return self.rows is not None and self.rows.has_add_parts(x)

    def add(
        self, place: str, ranks: Sequence[int], parts_PN: torch.Tensor, own_N: torch.Tensor, out_N: torch.Tensor
    ) -> None:
        """`out`, the sum of this rank's own part and of those that came from the others, which are noted in the same reading."""
        assert self.rows is not None  # `adds` says so
        *totals, total = self.rows.add_parts(parts_PN, ranks.index(self.rank), own_N, out_N)
        if not out_N.is_inference():  # such have no version
            self._made.append((out_N, out_N._version, total))
        for peer, came in zip(ranks, totals, strict=True):
            if peer != self.rank:
                self._received.append((place, peer, came))

    def take(self) -> tuple[int, list[MessageNote], list[MessageNote]]:
        """What was sent less what was received, and the notes of both; then forget them."""
        sent, received, self._sent, self._received = self._sent, self._received, [], []
        self._made.clear()
        totals = iter(on_host([total for *_, total in (*sent, *received)]))
        gone = [MessageNote(place, self.rank, peer, next(totals)) for place, peer, _ in sent]
        came = [MessageNote(place, peer, self.rank, next(totals)) for place, peer, _ in received]
        return (sum(n.total for n in gone) - sum(n.total for n in came)) % WORDS, gone, came

    def majority(self, copies_3N: torch.Tensor) -> torch.Tensor:
        """(..., N) bit by bit what two of the three copies in dim -2 say."""
        a, b, c = copies_3N.unbind(-2)
        if not copies_3N.is_cuda and not (torch.equal(a, b) and torch.equal(b, c)):
            self.outvoted += 1
        return (a & b) | (a & c) | (b & c)


def wrong_messages(sent: Sequence[MessageNote], received: Sequence[MessageNote]) -> list[tuple[int, int, str]]:
    """(sender, receiver, text) of each message that was received otherwise than it was sent, from the notes of all ranks."""
    left, right = Counter(sent), Counter(received)
    lost, odd = list((left - right).elements()), list((right - left).elements())
    pairs = dict.fromkeys((n.place, n.sender, n.receiver) for n in (*lost, *odd))
    return [(a, b, f"{place} from rank {a} to rank {b} arrived with other bits") for place, a, b in pairs]
