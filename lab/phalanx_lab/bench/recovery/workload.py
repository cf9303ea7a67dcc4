"""What both systems of `phalanx bench recovery` train, and what they have in common: a folder, a process group that is ended as a whole, event logs.

Must never change: both run the same `phalanx train` on the same model, text and global batch; only how they meet a lost slot differs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from phalanx.core.errors import RunError
from phalanx.observe.event_log import log_path

WAIT_S = 600.0
"""Longest wait for a run to begin."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of a few million parameters with the shape of one of the paper's (arXiv 2407.04656, table 1), and the paper's figures of it."""

    name: str
    layers: int
    hidden: int
    expert_hidden: int
    num_experts: int
    ep: int
    """Degree of expert parallelism: the baseline runs on multiples of it."""
    paper_step_s: float
    """Of the order of (issue: 0.6 s and 0.9 s)."""
    paper_params: float
    seq_len: int = 32
    global_batch: int = 8
    """A multiple of all numbers of ranks that the baseline runs on, times the micro-batch."""
    micro_batch: int = 2
    skew: float | None = None
    """Zipf exponent of a forced routing, the same for both systems; None: the router's own choice."""
    write_rate: float = 0.0
    """MB/s of checkpoints, 0 for no limit."""

    def settings(self) -> dict[str, str]:
        """Of `phalanx train`, for both systems."""
        forced = {} if self.skew is None else {"router.force": "imbalanced", "router.force_skew": str(self.skew)}
        return {
            **forced,
            "model.preset": "tiny",
            "model.num_layers": str(self.layers),
            "model.hidden": str(self.hidden),
            "model.num_experts": str(self.num_experts),
            "model.expert_ffn": str(self.expert_hidden),
            "model.top_k": "1",
            "router.renormalize": "false",
            "folding.ep": str(self.ep),
            "data.tokenizer": "byte",
            "data.builtin_bytes": "1000000",
            "train.steps": "1000000",
            "train.seq_len": str(self.seq_len),
            "train.global_batch": str(self.global_batch),
            "train.micro_batch": str(self.micro_batch),
            "train.dtype": "float32",
            "train.eval_interval": "0",
            "train.eval_batches": "1",
            "checkpoint.keep_last": "2",
            "checkpoint.write_rate": str(self.write_rate),
            "observe.console": "none",
            "observe.tensorboard": "false",
            "launch.threads": "1",
        }


def workloads(slots: int) -> dict[str, Workload]:
    """GPT-S and GPT-L of the paper in small. `ep` is the paper's where the slots allow two expert-parallel groups."""
    large_ep = 4 if slots >= 8 else 2
    micro_batch = 1 if slots >= 8 else 2
    batch = micro_batch * math.lcm(*range(2, slots + 1, 2))  # 8: 24 sequences
    small = Workload(
        name="small", layers=2, hidden=96, expert_hidden=384, num_experts=8, ep=2, global_batch=batch, micro_batch=micro_batch,
        paper_step_s=0.6, paper_params=521e6,
    )  # fmt: skip
    large = Workload(
        name="large", layers=2, hidden=128, expert_hidden=512, num_experts=16, ep=large_ep, global_batch=batch, micro_batch=micro_batch,
        paper_step_s=0.9, paper_params=1.7e9,
    )  # fmt: skip
    return {"small": small, "large": large}


class System(Protocol):
    """One way to train on slots that come and go."""

    name: str
    folder: Path
    """Of its run."""

    def start(self) -> None:
        """Begin on all slots."""

    def change(self, there: frozenset[int], lost: frozenset[int], back: frozenset[int]) -> None:
        """`lost` slots are gone at this moment, `back` are to be had, and `there` is what there is now."""

    def workers(self) -> dict[int, int]:
        """Slot -> process of its rank, of those that there are."""

    def look(self) -> None:
        """Called again and again between changes. Raises `RunError` where the run has ended."""

    def stop(self) -> None:
        """End everything at once."""


class Logs:
    """Event logs of a run as they grow: new records since the last look."""

    def __init__(self, folder: Path, *, slots: int) -> None:
        self.folder, self.slots = folder, slots
        self._read = dict.fromkeys(range(slots), 0)

    def new(self) -> list[dict[str, Any]]:
        """Complete lines since the last call, of all slots, each with its `slot`."""
        found = []
        for slot in range(self.slots):
            with contextlib.suppress(FileNotFoundError), log_path(self.folder, slot).open("rb") as file:
                file.seek(self._read[slot])
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                self._read[slot] += len(whole)
                found += [{**json.loads(line), "slot": slot} for line in whole.splitlines()]
        return found


class ProcessTree:
    """A command in a session of its own."""

    def __init__(self, command: Sequence[str], *, out: Path) -> None:
        with out.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
        self.out = out
        self.pid = self.process.pid

    def ended(self) -> bool:
        return self.process.poll() is not None

    def children(self) -> list[int]:
        """All processes under it."""
        return children_of(self.pid)

    def kill(self) -> None:
        """End it and everything under it, and wait until they are gone."""
        pids = [self.pid, *self.children()]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        end_s = time.monotonic() + 30.0
        while any(is_running(pid) for pid in pids):
            if time.monotonic() > end_s:
                raise RunError(f"processes {pids} did not exit")
            time.sleep(0.005)

    def last_words(self) -> str:
        """The end of what it printed."""
        return self.out.read_text(errors="replace")[-3000:]


def children_of(pid: int) -> list[int]:
    """All processes under one."""
    found, todo = [], [pid]
    while todo:
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{(at := todo.pop())}/task"):
                own = [int(p) for p in Path(f"/proc/{at}/task/{task}/children").read_text().split()]
                found += own
                todo += own
    return found


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


@contextlib.contextmanager
def running(system: System) -> Iterator[System]:
    """Started, and ended whatever happens."""
    system.start()
    try:
        yield system
    finally:
        system.stop()
