"""Computing replaced by timed waits: a rank's time as it would pass if every operation of its own lasted what it is given.

Decides when an operation ends: its seconds after what the rank did before it (the operation before it, or the end of its last wait for others), whatever
it really computed in between. So time that no operation records (norms, sums, autograd, recording itself) is part of the next operation, and being
woken late does not add up. Must never change: nothing ends early; an operation that really took longer is counted as late, and what follows begins then.
"""

from __future__ import annotations

import time
from collections.abc import Callable

THERE_S = 2e-4
"""Seconds within which a message that is there answers when asked for; to be woken by one takes more."""


class Pace:
    """Pace of one rank. `seconds` says how long an operation lasts, by id."""

    def __init__(
        self,
        seconds: Callable[[str], float],
        *,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.seconds, self._now, self._sleep = seconds, now, sleep
        self.free_s = 0.0
        """When the rank is through with what it has done so far, on `time.monotonic`."""
        self._done: dict[str, float] = {}
        """Shares of operations that have passed already."""
        self.recorded = self.late = 0
        self.late_s = 0.0

    def hold(self, op_id: str, begin_s: float) -> None:
        """Return when the operation, which really began at `begin_s` and has computed all it does, is over."""
        lasts = self.seconds(op_id) * max(0.0, 1.0 - self._done.pop(op_id, 0.0))
        end_s = (self.free_s or begin_s) + lasts
        self.recorded += 1
        late_s = self._until(end_s)
        self.late += bool(lasts and late_s)
        self.late_s += late_s if lasts else 0.0

    def hold_part(self, op_id: str, share: float) -> None:
        """A share of an operation that is recorded later is done: return when it would be."""
        self._done[op_id] = self._done.get(op_id, 0.0) + share
        self._until((self.free_s or self._now()) + share * self.seconds(op_id))

    def _until(self, end_s: float) -> float:
        """Wait; by how much it was over already."""
        left = end_s - self._now()
        if left > 0:
            self._sleep(left)
        self.free_s = max(end_s, end_s - left)
        return max(0.0, -left)

    def waited(self, end_s: float, *, since_s: float, held: bool = False) -> None:
        """A wait for other ranks has ended. What was there before anyone asked is no wait, unless the rank was `held` by it from its posting on."""
        if held or end_s - since_s > THERE_S:
            self.free_s = max(self.free_s, end_s)
