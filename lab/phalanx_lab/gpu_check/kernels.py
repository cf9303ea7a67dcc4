"""D: `benchmarks/gpu/overlap.py`, the kernels that overlap messages and products, with its own checks and bars."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from phalanx_lab.gpu_check.here import Here, Skipped

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu" / "overlap.py"


def check_overlap(here: Here) -> None:
    """D1: everything on a GPU; its checks alone, under Triton's interpreter, in the self-test."""
    if not SCRIPT.exists():
        raise Skipped(f"needs a checkout of the project: there is no {SCRIPT}")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "overlap.json")
        line = [sys.executable, str(SCRIPT), "--json", str(file), *([] if here.on_gpu else ["--interpret"])]
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        print(done.stdout[-4000:])
        if file.exists():
            here.tell("found", json.loads(file.read_text()))
        here.tell("exit status", done.returncode, most=0)
