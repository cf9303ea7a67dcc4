from pathlib import Path

import pytest

from phalanx_lab.bench.stolen import StolenTime


def test_a_share_of_all_time_since_then(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 1000 5 0 5 40 7 0\ncpu0 1 1 1 1\n")
    stolen = StolenTime(stat)
    assert stolen.share() == 0
    stat.write_text("cpu  160 0 60 1020 5 0 5 50 9 0\n")
    assert stolen.share() == pytest.approx(10 / 100)


@pytest.mark.parametrize("text", ["", "cpu  1 2 3 4", "cpu x", "other"])
def test_a_system_that_does_not_tell(tmp_path: Path, text: str) -> None:
    stat = tmp_path / "stat"
    if text:
        stat.write_text(text)
    assert StolenTime(stat).share() == 0
