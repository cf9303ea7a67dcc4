"""`phalanx bench reshard`: its cases, its conclusions, its options, and a small run on emulated hosts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from phalanx.core.errors import ConfigError, TestbedError
from phalanx.plan.layout.parameters import Box
from phalanx_lab.bench.reshard.command import FASTER, METHODS, _case, failures, main, missed
from phalanx_lab.bench.reshard.nine import CASES, FIRST_DEST_RANK
from phalanx_lab.bench.reshard.rank import _held, _is_right, _values
from phalanx_lab.testbed.cluster import ClusterSpec
from phalanx_lab.testbed.testbed import Testbed


def test_cases_are_the_paper_s_at_the_size_asked_for() -> None:
    assert [c.number for c in CASES] == list(range(1, 10))
    for case in CASES:
        assert case.num_bytes(64) == pytest.approx(64 << 20, rel=0.005)
        move = case.move(4)
        assert math.prod(move.src.shape) * move.itemsize == case.num_bytes(4)
        assert max(move.src.ranks) < FIRST_DEST_RANK == min(move.dst.ranks)
    assert (CASES[6].src, CASES[6].dst) == (CASES[7].src, CASES[7].dst)  # as in the paper's suite
    assert len(CASES[5].move(4).dst.ranks) == 12


def test_every_element_is_its_own_number() -> None:
    shape = (4, 3, 5)
    whole = torch.arange(60, dtype=torch.int32).view(shape)
    box = Box((1, 0, 2), (2, 3, 3))
    assert torch.equal(_values(box, shape), whole[box.slices()])
    layout = CASES[0].move(1).dst
    held = _held(layout, 12)
    assert held is not None and _is_right(layout, 12, held) and _held(layout, 0) is None
    held.view(-1)[7] += 1
    assert not _is_right(layout, 12, held)


def row(
    number: int, *, ours: list[float], naive: list[float], send_recv: list[float], once: bool = True, right: bool = True
) -> dict:  # type: ignore[type-arg]
    def method(seconds: list[float], once: bool) -> dict:  # type: ignore[type-arg]
        return {"seconds": seconds, "once": once, "right": right, "entered_bytes": 10 << 20, "distinct_bytes": 8 << 20}

    found = {"ours": method(ours, once), "naive": method(naive, True), "sendrecv": method(send_recv, False)}
    return {
        **{"case": number, "src": "2x4 RRR", "dst": "2x4 S0RR", "shape": [8], "bytes": 32, "link_bit_per_s": 1e8, "bound_s": 1.0},
        "methods": {METHODS[name]: value for name, value in found.items()},
    }  # fmt: skip


def test_conclusions() -> None:
    good = _case(row(2, ours=[1.1, 1.0, 1.3], naive=[1.6, 2.0, 1.9], send_recv=[4.0, 4.0, 5.2]))
    assert good.seconds["ours"] == 1.1 and good.over_bound == 1.1
    assert good.faster_than == pytest.approx({"naive": 1.9 / 1.3, "sendrecv": 4.0})  # of turns that stood side by side
    assert missed(good) == [] and failures(good) == []
    slow = _case(row(2, ours=[1.2], naive=[1.2], send_recv=[3.6]))
    assert missed(slow) == [
        "case 2: 1.200 x the bound, more than 1.15",
        "case 2: 1.00 times faster than naive, less than 1.4",
        "case 2: 3.00 times faster than sendrecv, less than 3.5",
    ]
    assert missed(_case(row(4, ours=[1.1], naive=[1.1], send_recv=[1.1]))) == []  # no bar beside the bound
    bad = _case(row(1, ours=[1.0], naive=[2.0], send_recv=[4.0], once=False, right=False))
    assert failures(bad) == ["case 1: wrong elements arrived", "case 1: 2.00 MiB entered a host again"]
    assert FASTER["sendrecv"][7] == 7.0


def test_options_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError) as info:
        main(["--cases", "1", "12", "--mib", "0", "--methods", "naive", "--rounds", "-1"])
    text = str(info.value)
    for part in ("--mib = 0: must be at least 1", "--rounds = -1", "--cases = [12]: must be one or more of the list",
                 "--methods = ['naive']: must have ours"):  # fmt: skip
        assert part in text
    with pytest.raises(ConfigError, match="--rate = 'fast'"):
        main(["--rate", "fast"])


@pytest.mark.slow
@pytest.mark.testbed
def test_a_small_run_on_emulated_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Figures of so small a run mean nothing; what arrives and how often it enters a host does."""
    try:
        Testbed(ClusterSpec(hosts=1)).close()
    except TestbedError as error:
        pytest.skip(f"no emulated hosts on this machine: {error}")
    file = tmp_path / "result.json"
    words = ["--cases", "1", "7", "--mib", "2", "--rounds", "1", "--methods", "ours", "sendrecv", "--rate", "400mbit"]
    assert main([*words, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["failures"] == [] and [c["case"] for c in result["cases"]] == [1, 7]
    for case, times in zip(result["cases"], (4, 4), strict=True):
        ours, other = case["methods"]["ours"], case["methods"]["sendrecv"]
        assert case["right"] and case["entered_once"]
        assert ours["entered_bytes"] == ours["distinct_bytes"] == other["distinct_bytes"]
        assert other["entered_bytes"] == times * other["distinct_bytes"] and not other["once"]  # each rank for itself
        assert case["seconds"]["ours"] > 0.5 * case["bound_s"] > 0
    assert "S01RR" in capsys.readouterr().out
