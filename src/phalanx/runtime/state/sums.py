"""Sums of the state at rest: is what is read what was written?

    parameters                 summed by the update that rounds them, or as they are published, and again at the vote of the step that used them
    master weights, moments    summed by the update that writes them, or as they were restored, and again by the one that reads them next, in the same pass over memory,
                               and before they are saved

Word sums (`kernels/cpu/words.py`) see every flipped bit. Must never change: whoever writes state elsewhere calls `forget`, or sound state looks wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from phalanx.kernels.cpu.words import WORDS, on_host, phase_of, word_sum
from phalanx.kernels.native import CompiledRows

Ranges = Sequence[tuple[int, int]]
"""`[start, stop)` each, of a flat buffer; none overlap."""


class StateSums:
    """What is known of one rank's state, by family and kind."""

    def __init__(self, *, rows: CompiledRows | None = None) -> None:
        self.rows = rows
        self._known: dict[str, int] = {}
        self._rounded: dict[str, int] = {}
        """By family, of the parameters that its last update has written."""
        self._wrong: list[str] = []

    def forget(self) -> None:
        """The state was written by somebody who does not sum."""
        self._known.clear()
        self._rounded.clear()
        self._wrong.clear()

    def published(self, parameters: Mapping[str, torch.Tensor], kept: Mapping[str, Ranges]) -> None:
        """Take down the parameters (and what else is read in a step), by name, as they are now, but for the ranges `kept` of a family that an update has written: as
        they were then."""
        parts = {
            name: _without(x, kept[name]) if name in self._rounded.keys() & kept.keys() else [x]
            for name, x in parameters.items()
        }
        totals = iter(
            on_host([word_sum(x, rows=self.rows, phase=phase_of(x)) for each in parts.values() for x in each])
        )
        for name, each in parts.items():
            total = sum(next(totals) for _ in each) + (
                self._rounded[name] if name in kept and name in self._rounded else 0
            )
            self._known[_place(name)] = total % WORDS

    def compare(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Look whether they still are; what was never taken down is now."""
        for place, now in self._sums_of(parameters).items():
            self._compare(place, now)

    def updated(self, family: str, kinds: tuple[str, ...], sums: torch.Tensor) -> None:
        """An update has read and written the state of a family; `sums` (7,): those of the three kinds before, and after, and of the parameters that it rounded."""
        found = [int(n) % WORDS for n in sums.tolist()]  # SYNC: on a device, once a family and step
        self._rounded[family] = found[6]
        for kind, before, after in zip(kinds, found[:3], found[3:6], strict=True):
            place = _kept(kind, family)
            self._compare(place, before)
            self._known[place] = after

    def at_rest(self, family: str, kinds: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """The same of what an update reads of the masters and moments of a family, by kind."""
        totals = iter(on_host([word_sum(x, rows=self.rows) for each in kinds.values() for x in each]))
        for kind, each in kinds.items():
            self._compare(_kept(kind, family), sum(next(totals) for _ in each) % WORDS)

    def take(self) -> list[str]:
        """Places whose bits changed although nobody wrote there, since the last call."""
        wrong, self._wrong = self._wrong, []
        return wrong

    def _sums_of(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
        totals = on_host([word_sum(x, rows=self.rows) for x in parameters.values()])
        return {_place(name): total for name, total in zip(parameters, totals, strict=True)}

    def _compare(self, place: str, now: int) -> None:
        known = self._known.setdefault(place, now)
        if known != now:
            self._wrong.append(f"{place}: {_difference(known, now)}")


def _place(name: str) -> str:
    return f"parameters of {name}"


def _kept(kind: str, family: str) -> str:
    return f"{kind} of {family}"


def _without(flat: torch.Tensor, ranges: Ranges) -> list[torch.Tensor]:
    """What lies between the ranges."""
    starts = [0, *(stop for _, stop in sorted(ranges))]
    stops = [*(start for start, _ in sorted(ranges)), len(flat)]
    return [flat[start:stop] for start, stop in zip(starts, stops, strict=True) if start < stop]


def _difference(known: int, now: int) -> str:
    """A single flip changes a word by a power of two."""
    off = (now - known) % WORDS
    least = min(off, WORDS - off)
    return (
        f"bit {least.bit_length() - 1} of a 32-bit word has flipped"
        if least & (least - 1) == 0
        else "bits have changed"
    )
