"""System (a) of `phalanx bench recovery`: an elastic `phalanx train`. A lost slot's process is killed from outside, and its slot stays empty (`runtime/comm/drained_slots.py`)
until it is given back; nothing else is told to the run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from phalanx.core.errors import RunError
from phalanx.observe.event_log import log_path
from phalanx.runtime.comm.drained_slots import write_away
from phalanx_lab.bench.recovery.workload import ProcessTree, Workload

KILL_S = 10.0
"""How long a slot that is to be killed may have no process yet (a joiner that still starts)."""


class Ours:
    """A run of local ranks with `resilience.heal`."""

    name = "heals"

    def __init__(
        self,
        workload: Workload,
        folder: Path,
        *,
        slots: int,
        mode: str,
        interval: int,
        replica_slots: int | None = None,
    ) -> None:
        self.folder = folder / "run"
        self.slots, self.out = slots, folder / "printed"
        self.settings = {
            **workload.settings(),
            "run.folder": str(folder),
            "run.name": "run",
            "data.cache": str(folder.parent / "cache"),
            "launch.ranks": str(slots),
            "resilience.heal": "true",
            "resilience.mode": mode,
            "optim.zero": "0",
            "checkpoint.interval": str(interval),
        }
        if replica_slots is not None:  # one group of all ranks: no `ep` of its own
            del self.settings["folding.ep"]
            self.settings["resilience.slots_per_rank"] = str(replica_slots)
        self.tree: ProcessTree | None = None

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [w for key, value in self.settings.items() for w in (f"--{key}", value)]
        clean = ["env", *(w for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") for w in ("-u", name))]
        self.tree = ProcessTree([*clean, sys.executable, "-m", "phalanx", "train", *words], out=self.out)

    def change(self, there: frozenset[int], lost: frozenset[int], back: frozenset[int]) -> None:
        """The slots are away before their processes die, so that none is started again by chance."""
        victims = [self._worker(slot) for slot in sorted(lost)]
        write_away(self.folder, frozenset(range(self.slots)) - there)
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def workers(self) -> dict[int, int]:
        """The processes that have the event logs of slots open."""
        logs = {str(log_path(self.folder, slot).resolve()): slot for slot in range(self.slots)}
        found: dict[int, int] = {}
        for pid in self.tree.children() if self.tree is not None else ():
            with contextlib.suppress(OSError):
                opened = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
                found |= {logs[path]: pid for path in opened & logs.keys()}
        return found

    def _worker(self, slot: int) -> int:
        assert self.tree is not None
        end_s = time.monotonic() + KILL_S
        while time.monotonic() < end_s:
            pid = self.workers().get(slot)
            if pid is not None:
                return pid
            self.look()
            time.sleep(0.01)
        raise RunError(f"slot {slot} has no process\n{self.tree.last_words()}")

    def look(self) -> None:
        if self.tree is not None and self.tree.ended():
            raise RunError(f"the elastic run has ended\n{self.tree.last_words()}")

    def stop(self) -> None:
        if self.tree is not None:
            self.tree.kill()
