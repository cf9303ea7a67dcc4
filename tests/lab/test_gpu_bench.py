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


def test_what_runs_on_a_lent_machine_leaves_two_files_with_all_lines(tmp_path: Path) -> None:
    """As many as come back from one, with a part that was killed, and with nothing else killed that has the program's name in its line."""
    stand_in = tmp_path / "bin"
    stand_in.mkdir()
    (stand_in / "python3").write_text(
        '#!/bin/sh\nwhile [ "$1" != --json ]; do case "$1" in C4) exit 9;; esac; shift; done\necho "{\\"json\\": \\"$2\\"}" > "$2"\necho said\n'
    )
    (stand_in / "python3").chmod(0o755)
    env = {"PATH": f"{stand_in}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    line = f"bash {SCRIPT.with_name('lent.sh')} {tmp_path / 'out'}; echo phalanx gpu-check goes on"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0 and "goes on" in done.stdout and "layers ended with 9" in done.stdout, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"lines.json", "logs.tgz"}
    lines = (tmp_path / "out" / "lines.json").read_text().splitlines()
    assert len(lines) == 7 and json.loads(done.stdout.splitlines()[-2])["json"].endswith("/heal.json")
