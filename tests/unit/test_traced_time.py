"""What a counted step would take on a GPU: each count at one rate, and what a file may say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.predicting.traced import read_step, traced
from phalanx.core.errors import ConfigError, DataError
from phalanx.plan.model import PRESETS, flops_per_token
from phalanx.simulate.step import TracedPhase, traced_time
from phalanx.simulate.step.traced import DeviceRates

RATES = DeviceRates()
SPEC = PRESETS["qwen3-30b-a3b"]
PHASE = {
    "launches": 10,
    "product_flops": 10**12,
    "attention_flops": 0,
    "flash_flops": 0,
    "moved_bytes": 0,
    "sent_bytes": 0,
    "waits": 0,
}
STEP = {"model": SPEC.name, "seq_len": 4096, "tokens": 4096, "ranks": 1, "phases": {"forward": PHASE}}


@pytest.mark.parametrize(
    ("phase", "part", "seconds"),
    [
        ({"product_flops": 550 * 10**12}, "products", 1.0),
        ({"attention_flops": 1020 * 10**12}, "attention", 1.0),
        ({"flash_flops": 600 * 10**12}, "attention", 1.0),
        ({"moved_bytes": 25 * 10**11}, "elementwise", 1.0),
        ({"sent_bytes": 3 * 10**11}, "exchange", 1.0),
        ({"waits": 5000}, "waits", 1.0),
        ({"launches": 10**6}, "launches", 4.5),
        ({"launches": 10**6, "product_flops": 550 * 10**12}, "launches", 3.5),
        ({"launches": 10**5, "product_flops": 550 * 10**12}, "launches", 0.0),
    ],
)
def test_each_count_has_its_rate(phase: dict[str, int], part: str, seconds: float) -> None:
    found = traced_time({"forward": TracedPhase(**phase)}, SPEC, seq_len=4096, tokens=4096)
    assert found.parts[part] == pytest.approx(seconds)


def test_launches_of_one_phase_are_not_hidden_by_the_work_of_another() -> None:
    phases = {"loss": TracedPhase(launches=10**6), "forward": TracedPhase(product_flops=550 * 10**13)}
    assert traced_time(phases, SPEC, seq_len=4096, tokens=1).parts["launches"] == pytest.approx(4.5)


def test_mfu_is_the_model_over_the_peak_whatever_else_is_computed() -> None:
    found = traced_time({"forward": TracedPhase(waits=5000)}, SPEC, seq_len=4096, tokens=8192, ranks=2)
    assert found.seconds == pytest.approx(1.0) and found.tokens_per_s == pytest.approx(4096)
    assert found.mfu == pytest.approx(flops_per_token(SPEC, 4096) * 4096 / RATES.peak_flops_per_s)


def test_the_command_prints_a_line_for_each_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "before.json", tmp_path / "out.json"
    path.write_text(json.dumps({"step": STEP}))
    assert traced([str(path), "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "before.json" in text and "predicted, not measured" in text and "MFU" in text
    assert json.loads(out.read_text())[str(path)]["seconds"] == pytest.approx(10**12 / RATES.product_flops_per_s)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([], "it is no trace"),
        ({"step": 3}, "it is no trace"),
        ({"step": STEP | {"model": "nobody"}}, "is no known model"),
        ({"step": STEP | {"model": []}}, "is no known model"),
        ({"step": STEP | {"tokens": 0}}, "tokens"),
        ({"step": STEP | {"phases": []}}, "must be a table of phases"),
        ({"step": STEP | {"phases": {"forward": PHASE | {"launches": -1}}}}, "phases.forward.launches"),
        ({"step": STEP | {"phases": {"forward": {"launches": 1.5}}}}, "phases.forward.moved_bytes"),
        ({"step": STEP | {"phases": {}}}, "launch nothing"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_place(tmp_path: Path, said: Any, words: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=words):
        read_step(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_step(tmp_path / "none.json")
