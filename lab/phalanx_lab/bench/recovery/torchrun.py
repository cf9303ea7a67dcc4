"""System (b) of `phalanx bench recovery`: the same training under torchrun, which starts all ranks again from the newest checkpoint.

It runs on a multiple of its expert-parallel degree, as DeepSpeed-MoE does in the paper (arXiv 2407.04656, section 6): of what slots there are, the lowest. A slot that idles
is lost without harm.

    another number of ranks    the launcher is ended and one for the new number is started, at once. (Elastic agents keep running, but wait 30 s for late ones by
                               default and 15 s until a silent one counts as lost; ending them is quicker.)
    the same number            a worker is killed, and torchrun restarts all in place (`--max-restarts`), another slot having its place
    more ranks to be had       SIGTERM: the run saves, ends, and is started on more ranks

With gloo, torch 2.13 never restarts in place unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (stale addresses in the store that agent and workers share).
"""

from __future__ import annotations

import contextlib
import signal
import time
from pathlib import Path

from phalanx.core.errors import RunError
from phalanx_lab.bench.cluster import TrainingCluster, is_running, send, train_command
from phalanx_lab.bench.recovery.workload import Workload

AGENT = "torchrun"
STOP_S = 20.0
"""How long a run that is told to end may take; then it is killed."""


class Torchrun:
    """`torchrun -m phalanx train`, restarted where slots are lost."""

    def __init__(
        self, workload: Workload, folder: Path, *, slots: int, interval: int, asynchronous: bool, name: str
    ) -> None:
        self.name = name
        self.folder, self.out = folder / "run", folder / "printed"
        self.step_of, self.launches, self.restarts = workload.ep, 0, 0
        self.there = frozenset(range(slots))
        self.active: tuple[int, ...] = ()
        self.settings = workload.settings(folder) | {
            "checkpoint.interval": interval,
            "checkpoint.asynchronous": str(asynchronous).lower(),
        }
        self.cluster = TrainingCluster(self.folder, ranks=slots)

    def start(self) -> None:
        self._launch(self._legal())

    def _legal(self) -> tuple[int, ...]:
        """Slots to run on: as many of the lowest as make whole expert-parallel groups."""
        slots = sorted(self.there)
        return tuple(slots[: len(slots) // self.step_of * self.step_of])

    def _launch(self, active: tuple[int, ...]) -> None:
        self.active = active
        if not active:
            return
        self.launches += 1
        gloo = ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "GLOO_SOCKET_IFNAME=lo", "OMP_NUM_THREADS=1"]
        agent = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={len(active)}",
            "--max-restarts=1000",
        ]
        command = train_command(self.settings, *agent, "--monitor-interval=0.1")
        self.cluster.start(AGENT, ["env", *gloo, *command], out=self.out)

    def change(self, there: frozenset[int], lost: frozenset[int], back: frozenset[int]) -> None:
        hit = [slot for slot in self.active if slot in lost]
        self.there = there
        wanted = self._legal()
        if hit and len(wanted) == len(self.active):
            self._kill_worker(self.active.index(hit[0]))
            self.active, self.restarts = wanted, self.restarts + 1
        elif hit:
            self.stop()
            self._launch(wanted)
        elif len(wanted) > len(self.active):
            self._ask_to_end()
            self._launch(wanted)

    def _kill_worker(self, rank: int) -> None:
        """Where a rank has no process yet, the restart under way serves as well."""
        pid = self.workers().get(self.active[rank])
        if pid is not None:
            send(pid, signal.SIGKILL)

    def workers(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for pid in self._processes():
            rank = self._rank(pid)
            if rank is not None and rank < len(self.active):
                found.setdefault(self.active[rank], pid)
        return found

    def _processes(self) -> list[int]:
        return self.cluster.processes(AGENT) if AGENT in self.cluster.pids else []

    def _rank(self, pid: int) -> int | None:
        """Rank of a worker, as torchrun told it."""
        with contextlib.suppress(OSError):
            for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if word.startswith(b"RANK="):
                    return int(word[5:])
        return None

    def _ask_to_end(self) -> None:
        workers = [pid for pid in self._processes() if self._rank(pid) is not None]
        for pid in workers:  # an agent that is told to end gives them no time to save
            send(pid, signal.SIGTERM)
        end_s = time.monotonic() + STOP_S
        while any(is_running(pid) for pid in workers) and time.monotonic() < end_s:
            time.sleep(0.005)
        self.stop()

    def look(self) -> None:
        if self.active and not self.cluster.running():
            raise RunError(f"torchrun has ended\n{self.cluster.last_words()}")

    def stop(self) -> None:
        self.cluster.stop()
