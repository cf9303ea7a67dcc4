"""Seconds of planning on a processor that nothing slows down: a test's machine may run at half its speed for minutes, and the next machine is another.

A limit in these seconds is at least twice of what the work takes: processors differ by a third or so in how they run a plan and the loop here, and a
neighbour on the same core slows them unequally (0.058 to 0.087 for the same work within a minute). A cost that grows in another way is ten times off at these sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LOOP_S = 4.4e-3
"""Of `_loop` on a core of a Cascade Lake server at full speed (2026); the same core took 10 ms while its neighbours were busy."""


def full_speed_s(work: Callable[[], object], *, rounds: int) -> float:
    """Processor time of `work` in seconds at full speed: the least, over the rounds, of its time over that of the slower loop right before or after it."""
    least, before = float("inf"), slowness()
    for _ in range(rounds):
        spent_s, after = _spent_s(work), slowness()
        least, before = min(least, spent_s / max(before, after)), after
    return least


def slowness() -> float:
    """How much longer this processor takes now than at full speed."""
    return _spent_s(_loop) / LOOP_S


def _spent_s(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _loop() -> object:
    """Bound by the interpreter, as plans are."""
    found: dict[int, int] = {}
    for i in range(20_000):
        found[i % 97] = found.get(i % 89, 0) + divmod(i, 7)[1]
    return found
