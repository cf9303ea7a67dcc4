"""What a rank says of its end to the process that forked it, and what that process makes of it.

A report goes through a pipe of the rank's own: the error itself where the user can act on it, else its traceback.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback

from phalanx.core import messages
from phalanx.core.errors import PeerError, PhalanxError, RunError
from phalanx.runtime.comm import print_error

MAX_REPORT_BYTES = 32_000
"""An error report must fit a pipe (64 KiB) that is not being read yet."""
_pipe: list[int] = []
"""Of a rank that `run_local` forked."""
_reported = threading.Lock()
"""Taken by who says what went wrong."""


def report_through(pipe: int) -> None:
    """Reports of this process go into `pipe` from now on."""
    _pipe.append(pipe)


def report_error(err: BaseException) -> None:
    """Say what ends this rank, once: to its launcher where that is `run_local`, else on stderr."""
    if not _reported.acquire(blocking=False):
        return
    if _pipe:
        os.write(_pipe[0], _report(err))
    else:
        print_error(err)


def _report(err: BaseException) -> bytes:
    """The error itself where the user can act on it, else its traceback."""
    if isinstance(err, PhalanxError):
        data = messages.encode(err)
        return data if len(data) <= MAX_REPORT_BYTES else messages.encode(RunError(str(err)[: MAX_REPORT_BYTES // 8]))
    text = "".join(traceback.format_exception(err))
    return messages.encode(text[-MAX_REPORT_BYTES // 8 :])


def read_report(pipe: int) -> PhalanxError | str | None:
    """What a rank that has ended said through its pipe; None: nothing."""
    data = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(pipe, 65536):
            data += chunk
    if not data:
        return None
    report: PhalanxError | str = messages.decode(data)
    return report


def distance(report: PhalanxError | str | None) -> int:
    """How far a rank's report is from the cause: a problem, a failure, a traceback, nothing, a missing peer."""
    if isinstance(report, PhalanxError):
        return 4 if isinstance(report, PeerError) else 1 if isinstance(report, RunError) else 0
    return 2 if report is not None else 3


def killed(rank: int, pid: int, number: int) -> str:
    """That a signal ended a rank."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    why = " (was the machine out of memory? `dmesg` says so)" if number == signal.SIGKILL else ""
    return f"rank {rank} (process {pid}) was killed by {name}{why}; the other ranks were stopped"


def free_screen() -> None:
    """A rank that was killed while it drew a live table left its last line, and the cursor hidden."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stdout.isatty():
            print("\r\x1b[J\x1b[?25h", end="", flush=True)
