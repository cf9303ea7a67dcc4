"""A run that is killed again and again ends as an undisturbed one: the same losses bit for bit, every sample once.

`phalanx bench kill --kills 20` is the long version.
"""

from pathlib import Path

import pytest

from phalanx_lab.bench.kill import kill_and_compare, report

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def test_killed_four_times(tmp_path: Path) -> None:
    result = kill_and_compare(tmp_path, kills=4, ranks=4, interval=3, seed=1)
    assert result.failures == [], report(result)
    assert result.kills_while_saving >= 1 and result.starts == 5
