"""System (a) of `phalanx bench recovery`: an elastic `phalanx train`. A lost slot's process is killed from outside, and its slot stays empty (`train/recovery/drained_slots.py`)
until it is given back; nothing else is told to the run."""

from __future__ import annotations

from pathlib import Path

from phalanx.core.errors import RunError
from phalanx_lab.bench.cluster import TrainingCluster, train_command
from phalanx_lab.bench.recovery.workload import Workload


class PhalanxSystem:
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
        self.cluster = TrainingCluster(self.folder, ranks=slots)
        self.settings = workload.settings(folder) | {
            "launch.ranks": slots,
            "resilience.heal": "true",
            "resilience.mode": mode,
            "optim.zero": 0,
            "checkpoint.interval": interval,
        }
        if replica_slots is not None:  # one group of all ranks: no `ep` of its own
            del self.settings["folding.ep"]
            self.settings["resilience.slots_per_rank"] = replica_slots

    def start(self) -> None:
        self.cluster.start(self.name, train_command(self.settings), out=self.out)

    def change(self, there: frozenset[int], lost: frozenset[int], back: frozenset[int]) -> None:
        self.cluster.lose(lost, there=there)

    def workers(self) -> dict[int, int]:
        return self.cluster.workers()

    def look(self) -> None:
        if not self.cluster.running():
            raise RunError(f"the elastic run has ended\n{self.cluster.last_words()}")

    def stop(self) -> None:
        self.cluster.stop()
