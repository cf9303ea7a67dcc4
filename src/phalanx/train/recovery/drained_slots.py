"""Slots of a host that are to have no worker for now: a file that whoever owns the machine writes, and the supervisor reads again and again.

    echo "1 3" > runs/NAME/away     workers of slots 1 and 3 are not started again once they end, however they end
    rm runs/NAME/away               both are started at once and join at the next step boundary

On several hosts each has a file of its own, `away-HOST`, with the numbers of its own slots. A scheduler that takes a part of a machine back, or a test that loses a host for good, says so here. Whoever writes the file ends the worker.
"""

from __future__ import annotations

import os
from pathlib import Path

from phalanx.core.reading import is_count, read_file

DRAINED_SLOTS_FILE = "away"


class DrainedSlotsFile:
    """Slot numbers in a text file, parted by blanks. No file: none. What is no number is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamp: tuple[int, int] | None = None
        self._slots: frozenset[int] = frozenset()

    def __call__(self) -> frozenset[int]:
        """The slots that are away now. Reads the file only where it has changed."""
        try:
            found = os.stat(self.path)
            stamp = found.st_mtime_ns, found.st_ino
            if stamp != self._stamp:
                words = read_file(self.path, most=1 << 20).decode("utf-8", "replace").split()
                self._slots = frozenset(int(w) for w in words if is_count(w))
                self._stamp = stamp
        except OSError:
            self._stamp, self._slots = None, frozenset()
        return self._slots


def write_drained_slots(folder: Path, slots: frozenset[int]) -> None:
    """Say which slots of the run in `folder` are away, all at once."""
    new = folder / f".{DRAINED_SLOTS_FILE}"
    new.write_text(" ".join(map(str, sorted(slots))) + "\n")
    new.replace(folder / DRAINED_SLOTS_FILE)
