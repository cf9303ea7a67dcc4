"""C4: a layer that overlaps its messages, tile by tile and by fused kernels, on two ranks that share the card: the checks of `benchmarks/gpu/streams.py`."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from phalanx.runtime.processes import StopRequest, WorldInfo
from phalanx_lab.gpu_check.cards import run_on_cards
from phalanx_lab.gpu_check.here import Here, Skipped
from phalanx_lab.gpu_check.whole_runs import PATIENCE_S, run_bounded, tell_end

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "gpu" / "streams.py"
RANKS = 2
LIMIT_S = 40.0
SHAPE = ("--tokens", "256", "--hidden", "512", "--ffn", "1024", "--experts-per-rank", "2", "--schedules", "10")


def check_tiles(here: Here) -> None:
    """C4.tiles: bits over schedules, and against the serial layer."""
    found = _section(here, "check", "--passes", "5")
    here.tell("largest error", found["largest_error"], most=found["limit"])


def check_fused(here: Here) -> None:
    """C4.fused: through symmetric memory, with new routing in each call."""
    here.needs_gpu("the fused layer stores rows in memory of other devices")
    found = _section(here, "fused", "--passes", "50")
    if "left_out" in found:
        raise Skipped(found["left_out"])
    here.tell("calls", found["passes"])
    here.tell("median ms of a call", 1e3 * found["median_s"])
    here.tell("largest error", found["largest_error"], most=found["limit"])


def _section(here: Here, name: str, *more: str) -> dict[str, Any]:
    """What the script finds in a section of it; where its ranks fail or hang, that is told, and the check ends."""
    if not SCRIPT.exists():
        raise Skipped(f"needs a checkout of the project: there is no {SCRIPT}")
    with tempfile.TemporaryDirectory(prefix="phalanx-streams-") as folder, socket.socket() as free:
        file = Path(folder, "found.json")
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        words = ["--only", name, "--json", str(file), *SHAPE, *more, *([] if here.on_gpu else ["--cpu"])]

        def program() -> int:
            return run_on_cards(partial(_run_script, words, port), ranks=RANKS)

        still_s = here.pick(LIMIT_S, PATIENCE_S)  # in all: nothing tells how far it is
        ended = run_bounded(program, folder=Path(folder), marks=lambda: 0, still_s=still_s)
        tell_end(here, name, ended)
        if not file.exists():
            raise RuntimeError(f"the ranks of {name} found nothing: {ended.words[-1000:]}")
        found: dict[str, Any] = json.loads(file.read_text())[name]
        return found


def _run_script(words: Sequence[str], port: int, info: WorldInfo, stop: StopRequest) -> int:
    """One rank, as a launcher of several hosts would start it."""
    os.environ |= {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_MODULE_LOADING": "EAGER",  # a kernel loaded late could wait behind one that waits for it
    }
    sys.argv = [str(SCRIPT), *words]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return 0
