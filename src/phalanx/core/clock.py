"""One clock for all times in events: seconds since the epoch that never run backwards within a process.

Processes of one machine read the same counter, so their times differ by what their `ANCHOR_S` differ, and by nothing else; those of several
machines are compared before a trace (`train/setup/machine.py`).
"""

from __future__ import annotations

import time

ANCHOR_S = time.time() - time.monotonic()
"""The epoch, as this process saw it when it began. A wall clock that is set later changes no time of ours."""


def now_s() -> float:
    """Seconds since the epoch."""
    return ANCHOR_S + time.monotonic()
