"""Several hosts that share one run folder: who may be in it, who prepares it, which numbers the ranks of each host have in its logs.

    .lock              a run of one machine holds it alone; the hosts of a run on several hold it together, and it names their service
    hosts/NAME.lock    held by the one program that is host NAME
    hosts/prepare.lock held while a host prepares text and folder, one after the other: the second one finds everything done
    hosts/places.json  host -> number of its first rank in the logs, for ever: a host that comes back goes on with its own

Locks are the file system's (`flock`): the kernel gives them back however a process ends. A file system without them grants everything; then nothing keeps
two programs from being the same host, as it says in docs/explanation/elastic-recovery.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from phalanx.core.errors import RunError
from phalanx.core.files import write_json
from phalanx.core.reading import load_json, typed
from phalanx.train.setup import RunFolder

PATIENCE_S = 1.0
"""Patience for a host that takes its place at the same moment."""


class RunHosts:
    """One host's claim on a run folder; `close` gives it back."""

    def __init__(self, folder: RunFolder, *, host: str, service: str) -> None:
        """Raises `RunError` where a run of one machine, a run with another service, or the same host is there already."""
        self.folder, self.host = folder, host
        self.path = folder.path / "hosts"
        self.path.mkdir(exist_ok=True)
        self._files: list[IO[str]] = []
        try:
            self._share(f"service {service}")
            self._be_host()
        except BaseException:
            self.close()
            raise

    def _share(self, words: str) -> None:
        file = self._open(self.folder.path / ".lock")
        end_s = time.monotonic() + PATIENCE_S
        while True:
            if _try(file, fcntl.LOCK_EX):  # no other host is there
                file.truncate(0)
                file.write(f"{words}\n")
                file.flush()
                taken = _try(file, fcntl.LOCK_SH)
            else:
                taken = _try(file, fcntl.LOCK_SH)
            if taken or time.monotonic() > end_s:
                break
            time.sleep(0.01)  # another host is just writing its name
        file.seek(0)
        there = file.read().strip()
        if not taken or there != words:
            raise RunError(
                f"{self.folder.path} is in use by another run ({there or 'unknown'}); this host belongs to one with {words}. Stop that run, or give "
                "this one another --run.name"
            )

    def _be_host(self) -> None:
        if not _try(self._open(self.path / f"{self.host}.lock"), fcntl.LOCK_EX):
            raise RunError(
                f"{self.folder.path}: another program is host {self.host} of this run; give every host a name of its own (launch.host)"
            )

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Alone among the hosts of the run."""
        with (self.path / "prepare.lock").open("a") as file:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def first_place(self, slots: int) -> int:
        """Number of this host's first rank in the logs of the run. Call it while `preparing`."""
        path = self.path / "places.json"
        places: dict[str, tuple[int, int]] = {}
        if path.exists():
            places = typed(load_json(path), dict[str, tuple[int, int]], where=str(path))
        first, known = places.get(self.host, (0, 0))
        if known < slots:
            first = max((begin + count for begin, count in places.values()), default=0)
            temporary = path.with_suffix(".new")
            write_json(temporary, {**places, self.host: (first, slots)})
            os.replace(temporary, path)
        return first

    def close(self) -> None:
        """Give everything back."""
        while self._files:
            self._files.pop().close()

    def _open(self, path: Path) -> IO[str]:
        self._files.append(path.open("a+"))
        return self._files[-1]


def _try(file: IO[str], mode: int) -> bool:
    try:
        fcntl.flock(file, mode | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
