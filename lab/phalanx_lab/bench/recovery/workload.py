"""What both systems of `phalanx bench recovery` train, and what each of them is asked for.

Must never change: both run the same `phalanx train` on the same model, text and global batch; only how they meet a lost slot differs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phalanx_lab.bench.cluster import tiny_run

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
    """Seconds of a step in the paper (issue: 0.6 s and 0.9 s)."""
    paper_params: float
    seq_len: int = 32
    global_batch: int = 8
    """A multiple of all numbers of ranks that the baseline runs on, times the micro-batch."""
    micro_batch: int = 2
    skew: float | None = None
    """Zipf exponent of a forced routing, the same for both systems; None: the router's own choice."""
    write_rate: float = 0.0
    """MB/s of checkpoints, 0 for no limit."""

    def settings(self, folder: Path) -> dict[str, object]:
        """Settings of `phalanx train` in `folder`, for both systems."""
        forced = {} if self.skew is None else {"router.force": "imbalanced", "router.force_skew": self.skew}
        own = {
            "model.num_layers": self.layers,
            "model.hidden": self.hidden,
            "model.num_experts": self.num_experts,
            "model.expert_ffn": self.expert_hidden,
            "model.top_k": 1,
            "router.renormalize": "false",
            "folding.ep": self.ep,
            "data.builtin_bytes": 1_000_000,
            "train.steps": 1_000_000,
            "train.seq_len": self.seq_len,
            "train.global_batch": self.global_batch,
            "train.micro_batch": self.micro_batch,
            "checkpoint.keep_last": 2,
            "checkpoint.write_rate": self.write_rate,
            "launch.threads": 1,
        }
        return tiny_run(folder, "run", folder.parent / "cache", {**own, **forced})


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
    """Folder of its run."""

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


@contextlib.contextmanager
def running(system: System) -> Iterator[System]:
    """Started, and ended whatever happens."""
    system.start()
    try:
        yield system
    finally:
        system.stop()
