"""How long dispatch and combine of each MoE layer were under way, and for how much of that the rank stood waiting: sums, always on.

    posted ----------------- wait begins ======== wait ends          a message: under way, and the part of it that blocked (=)

A layer is under way while any of its messages is: overlapping messages count once. What is under way and does not block is hidden. It is impossible to
ask gloo whether a message has come (point-to-point work cannot be polled), so one counts until the end of the wait for it: hidden time is
the most that it can have been. A trace, which knows when the other rank sent, says it more closely (`observe/recorded/lanes.py`).

Must never change: a rank's own thread calls these, so a wait of it never overlaps another; a layer's waits lie within its time under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.core.op_ids import Direction, expert_exchange

Place = tuple[int, Direction]


@dataclass(frozen=True, kw_only=True)
class ExchangeTime:
    """Times of one layer in one direction, in seconds, on one rank."""

    under_way_s: float
    exposed_s: float
    """The rank stood waiting."""

    @property
    def hidden_s(self) -> float:
        """The rank did something else; at most."""
        return max(0.0, self.under_way_s - self.exposed_s)


class _Sums:
    __slots__ = ("exposed_s", "open", "since_s", "under_way_s")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.open = 0
        self.since_s = self.under_way_s = self.exposed_s = 0.0


class LayerTimes:
    """Sums of one rank since they were last taken. Times are of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._sums: dict[Place, _Sums] = {}
        self._by_id: dict[str, _Sums | None] = {}

    def posted(self, op_id: str, now_s: float) -> None:
        """A message or collective is under way from now on."""
        sums = self._of(op_id)
        if sums is not None:
            if sums.open == 0:
                sums.since_s = now_s
            sums.open += 1

    def ended(self, op_id: str, now_s: float, waited_s: float) -> None:
        """It is there. `waited_s` of the time up to now the rank could do nothing else."""
        sums = self._of(op_id)
        if sums is None or sums.open == 0:  # posted before the sums were taken
            return
        sums.exposed_s += waited_s
        sums.open -= 1
        if sums.open == 0:
            sums.under_way_s += now_s - sums.since_s

    def blocked(self, op_id: str, waited_s: float) -> None:
        """The rank stood waiting for another thread that waits for this operation."""
        sums = self._of(op_id)
        if sums is not None:
            sums.exposed_s += waited_s

    def absorb(self, other: LayerTimes) -> None:
        """Add the sums of a thread beside this one, and clear them there."""
        for place, found in other._sums.items():
            sums = self._sums.setdefault(place, _Sums())
            sums.under_way_s += found.under_way_s
            sums.exposed_s += found.exposed_s
            found.clear()

    def take(self) -> dict[Place, ExchangeTime]:
        """The sums so far, which begin anew; layers without any are left out."""
        found = {
            place: ExchangeTime(under_way_s=sums.under_way_s, exposed_s=sums.exposed_s)
            for place, sums in self._sums.items()
            if sums.under_way_s or sums.exposed_s
        }
        for sums in self._sums.values():
            sums.clear()
        return found

    def _of(self, op_id: str) -> _Sums | None:
        """None for what is no exchange of experts. Ids come again in every step, so each is read once."""
        try:
            return self._by_id[op_id]
        except KeyError:
            place = expert_exchange(op_id)
            sums = None if place is None else self._sums.setdefault(place, _Sums())
            self._by_id[op_id] = sums
            return sums
