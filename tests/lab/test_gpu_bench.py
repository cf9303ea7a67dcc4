"""benchmarks/gpu where there is no GPU: checks run, and nothing claims to be a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "overlap.py"
STREAMS = SCRIPT.with_name("streams.py")


def run(*args: str, script: Path = SCRIPT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True, timeout=280)


def test_it_lists_what_it_would_measure() -> None:
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ran"] == "nothing" and set(said["sections"]) >= {
        "check",
        "first",
        "hide",
        "divide",
        "graph",
        "launches",
    }


def test_its_checks_run_under_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")
    done = run("--interpret", "--json", str(tmp_path / "overlap.json"))
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads((tmp_path / "overlap.json").read_text())
    assert "no figure is a time" in said["ran_on"]
    assert said["check"]["float32"]["largest_error"] <= 1e-5
    assert said["check"]["bfloat16"]["largest_error"] <= 2e-2
    assert not set(said) & {"first", "hide", "divide"}


def test_without_a_gpu_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")
    done = run()
    assert done.returncode == 1 and "no CUDA device here; --interpret runs the checks without one" in done.stderr


def test_the_script_of_streams_runs_on_a_host() -> None:
    assert json.loads(run("--dry-run", script=STREAMS).stdout)["ran"] == "nothing"
    done = run("--cpu", script=STREAMS)
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert "no figure is a time" in said["ran_on"] and said["check"]["largest_error"] <= 1e-4
    assert "left_out" in said["left_free"]
    alone = run(script=STREAMS)
    assert alone.returncode == 1 and "torchrun" in alone.stderr
