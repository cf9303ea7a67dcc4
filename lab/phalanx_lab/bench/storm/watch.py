"""What a storm hears from inside the trainer's processes: phases on its board, events in files of their own, one for each process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from phalanx.core.events import Event
from phalanx.runtime.membership.worker import Worker
from phalanx.runtime.state.views import ShardView
from phalanx.train.placement import state_transfer
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
        delay_kills(lambda slot: board.is_kept(first + slot))

    def member(self, slot: int) -> StormMember:
        """Watches in the worker's own process."""
        spoil_received_state(partial(self.board.spoils, self.first + slot, take=True))
        name = f"worker-{self.host_name}-{slot}-{self._start}-{os.getpid()}.jsonl"
        return StormMember(self.board, self.first + slot, EventFile(self.folder / name))


def spoil_received_state(due: Callable[[], bool]) -> None:
    """From now on, in this process: one bit of state that has come from others is wrong whenever `due()` says so."""
    move = state_transfer.move_state

    def moving(resharder: Any, moves: Any, source: Mapping[str, Any], dest: Mapping[str, Any], **words: Any) -> int:
        received = move(resharder, moves, source, dest, **words)
        came = [view for view in dest.values() if isinstance(view, ShardView)]
        if received and not source and came and due():  # this member had nothing
            came[0]._kept[:1].view(torch.uint8)[0] ^= 1
        return received

    state_transfer.move_state = moving


def delay_kills(kept: Callable[[int], bool]) -> None:
    """From now on, in this supervisor's process: a worker whose slot is `kept` survives what is done to end it."""
    kill = Worker.kill

    def killing(worker: Worker) -> None:
        if kept(worker.slot) and not worker.reap():
            worker.killed = True
        else:
            kill(worker)

    Worker.kill = killing  # type: ignore[assignment, method-assign]


class StormMember:
    """A `MemberWatch`."""

    def __init__(self, board: PhaseBoard, place: int, file: EventFile) -> None:
        self._board, self._place, self._file, self._pid = board, place, file, os.getpid()

    def phase(self, name: Phase, step: int) -> None:
        self._board.write(self._place, self._pid, name, step)

    def tell(self, event: Event, /) -> None:
        if type(event).__name__ in TOLD:
            self._file(event)
