"""Builds the CUDA that computes nothing, and runs traces in a process that has loaded it before torch.

The compiled library is kept in the user's cache by the hash of its source and of torch's version, so that a machine builds it once (about 15 s of g++).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from phalanx.core.errors import RunError

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
TRACES_S = 3600.0
_RUN = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); from phalanx_lab.bench.trace.child import main; main(sys.argv[2], sys.argv[3])"


def why_not() -> str:
    """Why this environment cannot trace; empty where it can."""
    if not (_home() / "lib" / "libtorch_cuda.so").exists():
        return ""
    version = metadata.version("torch").split("+")[0]
    return f"this build of torch has CUDA, and a trace takes its place: use an environment with the build for CPUs (torch {version}+cpu)"


def _home() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.submodule_search_locations is not None  # torch is a dependency
    return Path(found.submodule_search_locations[0])


def build_shim(folder: Path) -> Path:
    """The compiled library, built into `folder` where it is not there yet. Raises `RunError` where it would be of no use, and with what the compiler said."""
    if problem := why_not():
        raise RunError(problem)
    torch_version = metadata.version("torch")
    key = hashlib.sha256(SOURCE.read_bytes() + torch_version.encode()).hexdigest()[:16]
    target = folder / f"fake-cuda-{key}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    home = _home()
    include = ["-I", str(home / "include"), "-I", str(home / "include/torch/csrc/api/include")]
    libraries = ["-L", str(home / "lib"), "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home / 'lib'}"]
    made = target.with_suffix(f".{os.getpid()}")
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", *include, str(SOURCE), "-o", str(made), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"g++ could not build the stand-in for CUDA: {done.stderr.strip()[:400]}")
    made.replace(target)
    return target


def run_traces(cases: Sequence[dict[str, Any]], *, cache: Path) -> list[dict[str, Any]]:
    """What each case says of itself, in order (`child.py`). Raises `RunError` where the process ends with an error, with its last words."""
    shim = build_shim(cache)
    with tempfile.TemporaryDirectory(prefix="phalanx-trace-") as scratch:
        asked, told = Path(scratch) / "cases.json", Path(scratch) / "traces.json"
        asked.write_text(json.dumps(list(cases)))
        # what a trace would find out about this machine is nothing to keep
        env = os.environ | {"PYTHONHASHSEED": "0", "TRITON_INTERPRET": "0", "HOME": scratch}
        done = subprocess.run(
            [sys.executable, "-c", _RUN, str(shim), str(asked), str(told)],
            env=env, capture_output=True, text=True, timeout=TRACES_S,
        )  # fmt: skip
        if done.returncode or not told.exists():
            raise RunError(f"the trace ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
        found: list[dict[str, Any]] = json.loads(told.read_text())
        return found
