"""What each worker of a storm is doing, in memory that the storm and all workers share, and traps: a worker that enters a phase for which one is set waits there
to be struck. A worker may also be told to stand still for good, or that one bit of what comes to it next is to be wrong, and its
supervisor that its process cannot be killed for now.

A storm that only looked would strike a phase that is over: most of a step's phases last less than a millisecond. A trap holds its victim for `HOLD_S` at most.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

HOLD_S = 1.0
LOOK_S = 0.0002
_CELL = struct.Struct("<qqqqqqqq")
_FREE = 0


class PhaseBoard:
    """(process, phase, steps committed) by place, and one trap for each. `path`: a file, where workers are no children of the storm."""

    def __init__(self, places: int, phases: Sequence[str], *, path: Path | None = None) -> None:
        self.places, self.phases = places, tuple(phases)
        self._number = {name: i for i, name in enumerate(self.phases)}
        size = _CELL.size * places
        if path is None:
            self._memory = mmap.mmap(-1, size)  # anonymous: nothing to clean up
            return
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            self._memory = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    def write(self, place: int, pid: int, phase: str, step: int) -> None:
        """Called by the worker. Returns late where a trap is set for this phase."""
        number = self._number[phase]
        struct.pack_into("<qqq", self._memory, place * _CELL.size, pid, number, step)
        if self._field(place, 3) == number + 1:
            self._hold(place)
        while pid and self._field(place, 5) == pid:  # its heartbeats go on
            time.sleep(LOOK_S)

    def read(self, place: int) -> tuple[int, str, int]:
        pid, phase, step, *_ = _CELL.unpack_from(self._memory, place * _CELL.size)
        return pid, self.phases[phase], step

    # -- traps

    def set_trap(self, place: int, phase: str) -> None:
        """The worker stops when it enters the phase next, for `HOLD_S` or until `release`."""
        self._set(place, 4, _FREE)
        self._set(place, 3, self._number[phase] + 1)

    def caught(self, place: int) -> bool:
        """Whether it is in the trap."""
        return self._field(place, 4) != _FREE

    def release(self, place: int) -> None:
        self._set(place, 3, _FREE)
        self._set(place, 4, _FREE)

    # -- what else a worker is told

    def stand_still(self, place: int) -> None:
        """The worker that is there now never comes to another phase, or out of the one that it is held in."""
        self._set(place, 5, self._field(place, 0))

    def go_on(self, place: int) -> None:
        """Nobody stands still there: ids of processes come again where a host starts again."""
        self._set(place, 5, 0)

    def spoil_next(self, place: int) -> None:
        """One bit of the state that comes to the worker of this place next will be wrong."""
        self._set(place, 6, 1)

    def spoils(self, place: int, *, take: bool = False) -> bool:
        """Whether it is to be wrong still; `take`: it is now."""
        found = self._field(place, 6) == 1
        if found and take:
            self._set(place, 6, 0)
        return found

    def keep_alive(self, place: int, keep: bool) -> None:
        """Its supervisor cannot kill it, as if it were in a call of the kernel that nothing interrupts."""
        self._set(place, 7, int(keep))

    def is_kept(self, place: int) -> bool:
        """Whether `keep_alive` holds."""
        return self._field(place, 7) == 1

    def _hold(self, place: int) -> None:
        self._set(place, 3, _FREE)
        self._set(place, 4, 1)
        end_s = time.monotonic() + HOLD_S
        while self._field(place, 4) != _FREE and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        self._set(place, 4, _FREE)

    def _field(self, place: int, number: int) -> int:
        found: int = struct.unpack_from("<q", self._memory, place * _CELL.size + 8 * number)[0]
        return found

    def _set(self, place: int, number: int, value: int) -> None:
        struct.pack_into("<q", self._memory, place * _CELL.size + 8 * number, value)
