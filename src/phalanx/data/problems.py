"""Collects what is wrong with data, so that a person sees many bad lines at once and not one per run."""

from __future__ import annotations

from phalanx.core.errors import DataError, Problem

MOST = 20
"""Problems after which reading stops: a file of the wrong kind would otherwise report each of its lines."""
ALIKE = 3
"""Places that are named where the same is wrong."""


class ProblemLog:
    """Problems found so far. `add` raises DataError at the `MOST`-th, `raise_if_any` at the end of reading.

    `whole`: with all of them, for another log that will take them in; else alike ones are counted.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self.found: list[Problem] = []
        self._whole = whole

    def add(self, problem: Problem) -> None:
        self.found.append(problem)
        if len(self.found) >= MOST:
            raise DataError(self._told(), subject=f"the data (reading stopped after {MOST} wrong places)")

    def report(self, where: str, value: object, rule: str, hint: str) -> None:
        self.add(Problem(where=where, value=value, rule=rule, hint=hint))

    def extend(self, error: DataError) -> None:
        for problem in error.problems:
            if problem not in self.found:
                self.add(problem)

    def raise_if_any(self) -> None:
        if self.found:
            raise DataError(self._told(), subject="the data")

    def _told(self) -> list[Problem]:
        """The first places of each kind of problem, and how many more there are."""
        if self._whole:
            return self.found
        kinds: dict[tuple[str, str], list[Problem]] = {}
        for problem in self.found:
            kinds.setdefault((problem.rule, problem.hint), []).append(problem)
        told = []
        for alike in kinds.values():
            told += alike[:ALIKE]
            if len(alike) > ALIKE:
                where = f"{len(alike) - ALIKE} more, the last of them {alike[-1].where}"
                told.append(Problem(where=where, value=None, rule=alike[-1].rule))
        return told
