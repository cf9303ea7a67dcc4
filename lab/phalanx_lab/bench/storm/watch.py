"""What a storm hears from inside the trainer's processes: phases on its board, events in files of their own, one for each process."""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.core.events import Event
from phalanx.train.recovery.watch import Phase
from phalanx_lab.bench.storm.board import PhaseBoard
from phalanx_lab.bench.storm.chaos_cluster import EventFile

TOLD = ("Reformed", "Committed", "StepEnded", "SamplesTaken", "TeamFormed", "Note", "WentBack")
"""Events of a worker that the storm keeps."""


class StormWatch:
    """A `Watch` (train/recovery/watch.py) of one start of one host; its first worker has the place `first` on the board."""

    def __init__(self, board: PhaseBoard, folder: Path, *, host: str, start: int, first: int) -> None:
        self.board, self.folder, self.host_name, self.first = board, folder, host, first
        self.host = EventFile(folder / f"host-{host}-{start}.jsonl")
        self._start = start

    def member(self, slot: int) -> StormMember:
        """Watches in the worker's own process."""
        name = f"worker-{self.host_name}-{slot}-{self._start}-{os.getpid()}.jsonl"
        return StormMember(self.board, self.first + slot, EventFile(self.folder / name))


class StormMember:
    """A `MemberWatch`."""

    def __init__(self, board: PhaseBoard, place: int, file: EventFile) -> None:
        self._board, self._place, self._file, self._pid = board, place, file, os.getpid()

    def phase(self, name: Phase, step: int) -> None:
        self._board.write(self._place, self._pid, name, step)

    def tell(self, event: Event, /) -> None:
        if type(event).__name__ in TOLD:
            self._file(event)
