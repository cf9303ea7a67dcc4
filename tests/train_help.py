"""Whole runs in tests: small text, the tiny model, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "model.preset": "tiny",
    "data.tokenizer": "byte",
    "data.validation_fraction": "0.2",
    "train.steps": "8",
    "train.seq_len": "32",
    "train.global_batch": "16",
    "train.micro_batch": "2",
    "train.dtype": "float32",
    "train.eval_interval": "0",
    "train.eval_batches": "1",
    "checkpoint.interval": "4",
    "observe.console": "none",
    "observe.tensorboard": "false",
    "launch.ranks": "4",
}


def write_text(folder: Path, *, files: int = 12) -> Path:
    """A little of the standard library as text files."""
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.glob("*.py"))[:files]:
        (folder / f"{path.stem}.txt").write_text(path.read_text(encoding="utf-8")[:20_000])
    return folder


def train_args(base: Path, **changes: Any) -> list[str]:
    """Arguments of `phalanx train` for a run in `base/runs/NAME`; keys with `__` for the dot; None removes a setting."""
    settings: dict[str, Any] = {
        **SETTINGS,
        "run.folder": base / "runs",
        "run.name": "run",
        "data.cache": base / "cache",
        "data.sources": f'["{base / "text"}"]',
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    return [w for key, value in settings.items() if value is not None for w in (f"--{key}", str(value))]


def start(args: Sequence[str], *, env: dict[str, str] | None = None, **more: Any) -> subprocess.Popen[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT", "OMP_NUM_THREADS")}
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**clean, **(env or {})},
        **more,
    )


def phalanx(*args: str, timeout_s: float = 120.0, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    process = start(args, **more)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(args, process.returncode, out, err)
