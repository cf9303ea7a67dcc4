"""Sums of the state at rest: is what is read what was written?

    parameters                 summed when they were published, and again at the vote of the step that used them
    master weights, moments    summed by the update that writes them, and again by the one that reads them next, in the same pass over memory

Word sums (`kernels/cpu/words.py`) see every flipped bit. Must never change: whoever writes state elsewhere calls `forget`, or sound state looks wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from phalanx.kernels.cpu.words import WORDS, on_host, word_sum
from phalanx.kernels.native import CompiledRows


class StateSums:
    """What is known of one rank's state, by family and kind."""

    def __init__(self, *, rows: CompiledRows | None = None) -> None:
        self.rows = rows
        self._known: dict[str, int] = {}
        self._wrong: list[str] = []

    def forget(self) -> None:
        """The state was written by somebody who does not sum."""
        self._known.clear()
        self._wrong.clear()

    def published(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Take down the parameters (and what else is read in a step), by name, as they are now."""
        self._known.update(self._sums_of(parameters))

    def compare(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Look whether they still are; what was never taken down is now."""
        for place, now in self._sums_of(parameters).items():
            self._compare(place, now)

    def updated(self, family: str, kinds: tuple[str, ...], sums: torch.Tensor) -> None:
        """An update has read and written the state of a family; `sums` (6,): those of the three kinds before, and after."""
        found = [int(n) % WORDS for n in sums.tolist()]  # SYNC: on a device, once a family and step
        for kind, before, after in zip(kinds, found[:3], found[3:], strict=True):
            place = f"{kind} of {family}"
            self._compare(place, before)
            self._known[place] = after

    def take(self) -> list[str]:
        """Places whose bits changed although nobody wrote there, since the last call."""
        wrong, self._wrong = self._wrong, []
        return wrong

    def _sums_of(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
        totals = on_host([word_sum(x, rows=self.rows) for x in parameters.values()])
        return {f"parameters of {name}": total for name, total in zip(parameters, totals, strict=True)}

    def _compare(self, place: str, now: int) -> None:
        known = self._known.setdefault(place, now)
        if known != now:
            self._wrong.append(f"{place}: {_difference(known, now)}")


def _difference(known: int, now: int) -> str:
    """A single flip changes a word by a power of two."""
    off = (now - known) % WORDS
    least = min(off, WORDS - off)
    return (
        f"bit {least.bit_length() - 1} of a 32-bit word has flipped"
        if least & (least - 1) == 0
        else "bits have changed"
    )
