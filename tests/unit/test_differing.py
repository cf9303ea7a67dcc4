"""Who received state otherwise than it was sent."""

from __future__ import annotations

import numpy as np
import pytest

from phalanx.train.placement.state_transfer import differing
from phalanx.train.placement.suspects import NONE

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("told", "now", "wrong"),
    [
        ([[7, NONE], [NONE, 8]], [[7, 8], [7, 8]], []),
        ([[7], [NONE], [NONE]], [[7], [7], [9]], [2]),
        ([[7], [7], [NONE]], [[9], [7], [9]], [0, 2]),
        ([[NONE], [NONE], [NONE]], [[5], [4], [5]], [1]),  # nobody held it: the majority
        ([[NONE], [NONE]], [[5], [4]], []),  # and who knows?
        ([[7, NONE], [NONE, NONE]], [[1, 5], [7, 4]], []),
        ([[NONE, 3], [2, NONE]], [[NONE, NONE], [2, 4]], [1]),
    ],
)
def test_who_differs_from_what_was_sent_is_wrong(told: list[list[int]], now: list[list[int]], wrong: list[int]) -> None:
    assert differing(np.array(told, dtype=np.int64), np.array(now, dtype=np.int64)) == wrong
