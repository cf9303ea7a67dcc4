"""Which of several membership services keeps the values of a run, and from when until when: rules over what quorums of a lighthouse have said.

Values are in one place at a time. Each service takes part in one quorum after another (`runtime/membership/lighthouse.py`) and says there whom it knows as keeper.
All members of a quorum see what all of them said, so all find the same keeper.

Must never change: whoever keeps values stops a *lease* after it asked for the last quorum that named it, by its own clock; whoever is to keep them waits longer
than the longest lease that it has heard of from when it first heard of a quorum that names it, and begins to wait anew whenever it may have missed one. So no two keep values at the
same time, whatever is cut off from whom, as long as clocks run equally fast within `WAIT - 1`. (A longer lease of a service of which nobody in the quorum has ever heard is not known: all should have the same.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WAIT = 1.25
"""Leases, of the longest, that a new keeper waits."""


@dataclass(frozen=True)
class Claim:
    """What one service says in a quorum: `keeper` is the last one that it heard of, the `term`-th (0: none), `longest_s` the longest lease, its own or another's."""

    name: str
    keeper: str = ""
    term: int = 0
    longest_s: float = 0.0


def keeper_of(claims: Sequence[Claim]) -> tuple[str, int]:
    """(keeper, term) of a quorum: the latest keeper that anybody knows while it takes part, else the first by name, one term later."""
    latest = max(claims, key=lambda c: (c.term, c.keeper))
    names = sorted(c.name for c in claims)
    return (latest.keeper, latest.term) if latest.keeper in names else (names[0], latest.term + 1)


def longest_lease(claims: Sequence[Claim]) -> float:
    """That anybody in a quorum has heard of: also of one who is not in it, and may still keep values."""
    return max(c.longest_s for c in claims)


@dataclass
class Tenure:
    """Whether the service `name` may keep values. Seconds are those of one clock that never stands still."""

    name: str
    lease_s: float
    until_s: float = 0.0
    """Values must be given up then."""
    holds: bool = False
    longest_s: float = 0.0
    """Longest lease of another service that this one has ever heard of."""
    _since_s: float | None = None
    _quorum: int = 0

    def hear(self, keeper: str, *, quorum: int, asked_s: float, now_s: float, longest_s: float = 0.0) -> None:
        """A quorum with this number, asked for at `asked_s`, names `keeper`; the longest lease known there is `longest_s`."""
        self.longest_s = max(self.longest_s, longest_s)
        self.look(now_s)
        if keeper != self.name:
            self._end()
            return
        if not self.holds and (self._since_s is None or quorum != self._quorum):
            self._since_s = now_s
        self._quorum, self.until_s = quorum, asked_s + self.lease_s

    def look(self, now_s: float) -> bool:
        """Whether values may be kept now."""
        if now_s >= self.until_s:
            self._end()
        elif self._since_s is not None and now_s >= self._since_s + WAIT * max(self.lease_s, self.longest_s):
            self.holds = True
        return self.holds

    def _end(self) -> None:
        self.holds, self._since_s, self.until_s = False, None, 0.0
