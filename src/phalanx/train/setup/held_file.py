"""A claim on a run folder where the file system has no locks: a file that only one process can make."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import IO

from phalanx.core.errors import RunError
from phalanx.core.process import begun
from phalanx.core.reading import is_count


class HeldFile:
    """A file that holds a run as long as this is open."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._file = path, file

    def close(self) -> None:
        """Give it back."""
        self._path.unlink(missing_ok=True)
        self._file.close()


def hold(folder: Path) -> HeldFile:
    """Claim a run for this process until the file is closed. Of a process of this machine that was killed it is taken over. Raises `RunError` naming the process that has it."""
    there, path, mine = "", folder / ".held", f"{socket.gethostname()} {os.getpid()} {begun(os.getpid())}"
    for _ in range(3):
        with contextlib.suppress(FileExistsError):
            file = os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w")
            file.write(mine)
            file.flush()
            return HeldFile(path, file)
        with contextlib.suppress(FileNotFoundError):  # whoever had it has just left
            there = path.read_text()
            if _is_held(there):
                break
            aside = path.with_name(f".held-{os.getpid()}")
            os.rename(path, aside)
            if aside.read_text() != there:  # another process was faster, and this is its own
                with contextlib.suppress(FileExistsError):
                    os.link(aside, path)
                there = aside.read_text()
                aside.unlink()
                break
            aside.unlink()
    raise RunError(
        f"{folder}: process {there} (host, process, when it began) trains this run; stop it, give this one another --run.name, or remove {path} where that process is gone "
        "(the file system has no locks)"
    )


def _is_held(text: str) -> bool:
    """Whether the process that wrote this may still run: one of another machine is not seen."""
    host, _, process = text.partition(" ")
    pid, _, began = process.partition(" ")
    return host != socket.gethostname() or (is_count(pid) and began == begun(int(pid)) != "")
