"""Two sizes of the suite. `make test` takes every subject with some of its cases; `make test-all` takes all cases, and the tests marked `slow`.

Which cases are some is drawn once and for all from their number: a failure is repeated by running the test again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

ALL = os.environ.get("PHALANX_TESTS") == "all"


def times(every: int, few: int) -> int:
    """How many cases a test draws: `every` with all tests, else `few`."""
    return every if ALL else few


def some(cases: Sequence[T], few: int) -> list[T]:
    """All of them with all tests, else `few` (at most), in their order."""
    if ALL or few >= len(cases):
        return list(cases)
    kept = random.Random(len(cases)).sample(range(len(cases)), few)
    return [cases[i] for i in sorted(kept)]
