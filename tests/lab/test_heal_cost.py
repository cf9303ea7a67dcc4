"""`phalanx bench heal-cost`: its arithmetic, its options, and one tiny run of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from train_help import phalanx

from phalanx_lab.bench.heal_cost import MODES, ORDERS, HealCostCase, evaluate, ratio_of_medians


@pytest.mark.unit
def test_ratio_and_interval() -> None:
    rng = np.random.default_rng(3)
    below = rng.normal(1.0, 0.02, 200)
    ratio, low, high = ratio_of_medians(list(1.3 * below), list(below))
    assert ratio == pytest.approx(1.3) and low == pytest.approx(1.3) and high == pytest.approx(1.3), "rounds are paired"
    ratio, low, high = ratio_of_medians(list(rng.normal(1.1, 0.05, 200)), list(below))
    assert low < ratio < high and low == pytest.approx(1.1, abs=0.03) and high - low < 0.05


@pytest.mark.unit
def test_the_report_has_what_is_asked_for() -> None:
    times = {mode: {"step_s": [t] * 5, "cpu_s": [2 * t] * 5} for mode, t in zip(MODES, (1.0, 1.02, 1.5), strict=True)}
    report = evaluate(times, HealCostCase())
    assert [report[k] for k in ("fast_over_plain", "fast_ci_low", "fast_ci_high", "exact_over_plain")] == pytest.approx(
        [1.02, 1.02, 1.02, 1.5]
    )
    assert len(set(ORDERS)) == 6, "every mode stands in every place"


@pytest.mark.unit
def test_shares_that_are_not_equal_are_refused() -> None:
    found = phalanx("bench", "heal-cost", "--samples", "3", "--rounds", "2")
    assert found.returncode == 2 and "--rounds = 2: must be at least 4" in found.stderr
    found = phalanx("bench", "heal-cost", "--samples", "3")
    assert found.returncode == 2 and "must be a multiple of --ranks = 4" in found.stderr


@pytest.mark.ranks
def test_a_tiny_run(tmp_path: Path) -> None:
    out = tmp_path / "cost.json"
    done = phalanx(
        "bench",
        "heal-cost",
        "--preset",
        "tiny",
        "--ranks",
        "2",
        "--ep",
        "1",
        "--rounds",
        "4",
        "--seq-len",
        "16",
        "--json",
        str(out),
    )
    assert done.returncode in (0, 1), done.stderr
    report = json.loads(out.read_text())
    for mode in MODES:
        assert len(report["samples"][mode]["step_s"]) == 4 and report[f"{mode}_step_s"] > 0
    assert 0.2 < report["fast_over_plain"] < 20
