"""Collects what is wrong with data, so that a person sees many bad lines at once and not one per run."""

from __future__ import annotations

from phalanx.core.errors import DataError, Problem

MOST = 20
"""Problems after which reading stops: a file of the wrong kind would otherwise report each of its lines."""


class ProblemLog:
    """Problems found so far. `add` raises DataError at the `MOST`-th, `raise_if_any` at the end of reading."""

    def __init__(self) -> None:
        self.found: list[Problem] = []

    def add(self, problem: Problem) -> None:
        self.found.append(problem)
        if len(self.found) >= MOST:
            raise DataError(self.found, subject=f"the data (reading stopped after {MOST} problems)")

    def extend(self, error: DataError) -> None:
        for problem in error.problems:
            if problem not in self.found:
                self.add(problem)

    def raise_if_any(self) -> None:
        if self.found:
            raise DataError(self.found, subject="the data")
