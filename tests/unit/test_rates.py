"""What utilisation is measured against: a rate that stays from start to start, and the data sheets of known GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from phalanx.core.processor import DATA_SHEET_BF16, data_sheet_flops_per_s
from phalanx.simulate.hardware import known_hardware, load_hardware
from phalanx.train.setup import machine

pytestmark = pytest.mark.unit


def lasting(measured: float, *, threads: int = 1, sharing: int = 4, dtype: torch.dtype = torch.float32) -> float:
    return machine.lasting_rate(measured, dtype=dtype, device=torch.device("cpu"), threads=threads, sharing=sharing)


def test_a_rate_stays_where_a_start_was_disturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "user_folder", lambda: tmp_path / "new" / "folder")
    assert [lasting(rate) for rate in (3.0e11, 1.2e11, 4.0e11, 2.0e11)] == [3.0e11, 3.0e11, 4.0e11, 4.0e11]
    assert lasting(1.0e11, threads=2) == 1.0e11, "other threads have a rate of their own"
    assert lasting(2.0e11, sharing=1) == 2.0e11 and lasting(5.0e10, dtype=torch.bfloat16) == 5.0e10
    kept = json.loads((tmp_path / "new" / "folder" / machine.RATES_FILE).read_text())
    assert len(kept) == 4 and list((tmp_path / "new" / "folder").iterdir()) == [
        tmp_path / "new" / "folder" / machine.RATES_FILE
    ]


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": "b"}', "\0"])
def test_a_damaged_file_of_rates_is_written_anew(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "user_folder", lambda: tmp_path)
    (tmp_path / machine.RATES_FILE).write_text(text)
    assert lasting(3.0e11) == 3.0e11 and lasting(1.0e11) == 3.0e11


def test_where_nothing_can_be_kept_the_measured_rate_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "user_folder", lambda: Path("/proc/nowhere"))
    assert [lasting(rate) for rate in (3.0e11, 1.0e11)] == [3.0e11, 1.0e11]


def test_data_sheets_are_those_of_the_simulator() -> None:
    of_clusters = {load_hardware(name).bf16_flops_per_s for name in known_hardware()}
    assert set(DATA_SHEET_BF16.values()) <= of_clusters
    for name, cluster in (
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
    ):
        assert data_sheet_flops_per_s(name) == load_hardware(cluster).bf16_flops_per_s, name
    for name in ("NVIDIA A100-PCIE-40GB", "NVIDIA L4", "NVIDIA H200 NVL", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"):
        assert data_sheet_flops_per_s(name) == 0.0, name
