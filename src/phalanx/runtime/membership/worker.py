"""One worker process as its supervisor sees it: forked, read through a pipe, reaped.

The worker writes lines: what begins with `.` is a heartbeat (`watcher.BEATS`), anything else a JSON object (`announced`, `leave`, `formed`, `begun`, `step`, `stands`, `finished`, `error`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from typing import Any

from phalanx.core import messages
from phalanx.core.errors import PhalanxError, RunError, first_line
from phalanx.core.process import name_process
from phalanx.core.reading import parse_table
from phalanx.runtime.membership.membership import Member, StaleMember
from phalanx.runtime.processes import ANSWER_STOP, STOP_SIGNALS, die_with_parent

ERROR_CHARACTERS = 30_000
"""An error report must fit the pipe (64 KiB) that the supervisor may not be reading."""
SENT_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that come from outside of a process; its own faults end it with others."""
STALE_CODE = 75
"""Exit code of a worker that was refused: it was excluded from the run before."""


class Worker:
    """A running or ended worker."""

    def __init__(self, member: Member, *, slot: int, pid: int, pipe: int) -> None:
        if pid <= 0:  # kill(-1) would end every process of the user
            raise ValueError(f"{pid} is not the id of a process")
        self.member, self.slot, self.pid, self.pipe = member, slot, pid, pipe
        self.uid = member.uid
        self.last_read_s = time.monotonic()
        self.was_heard = False
        """It has written something."""
        self.waits_since_s = self.still_since_s = 0.0
        """Since when its own thread waits for other ranks, or neither waits nor comes on; 0: it does not."""
        self.quick = False
        """It is inside a step (`RankProgress.quick`)."""
        self.pause_s = 0.0
        """`RankProgress.pause_s`."""
        self.holders = 0
        """`RankProgress.holders`, as of the last step."""
        self.joins = False
        """It came to a run that had begun, and has formed no generation with others yet: it holds nothing."""
        self.stands = ""
        """Where it was when it was still."""
        self.removed_s = 0.0
        """When it was removed from the run while its process still ran; 0: it was not."""
        self.status: int | None = None
        self.killed = False
        """This program has ended it, and does not wait until it is gone."""
        self._rest = b""
        self._error: str | None = None

    @property
    def ended(self) -> bool:
        return self.status is not None or self.killed

    @property
    def code(self) -> int:
        if self.status is None:
            return -signal.SIGKILL if self.killed else -1
        return os.waitstatus_to_exitcode(self.status)

    @property
    def left_well(self) -> bool:
        return self.code == 0

    @property
    def failed(self) -> bool:
        """Whether it failed by itself: it was neither refused nor ended by a signal from outside."""
        return self.ended and self.code not in (0, STALE_CODE, *(-number for number in SENT_SIGNALS))

    def read(self) -> list[dict[str, Any]]:
        """Messages since the last call; heartbeats only update `last_read_s`."""
        if self.pipe < 0:
            return []
        data = b""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.pipe, 65536):
                data += chunk
            os.close(self.pipe)  # its end: the worker has closed it
            self.pipe = -1
        if data:
            self.last_read_s, self.was_heard = time.monotonic(), True
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"."):
                self._beat(line)
        messages = [parse_table(line, where="a message of a worker") for line in lines if not line.startswith(b".")]
        for message in messages:
            self._error = message.get("error", self._error)
            self.pause_s = message.get("pause", self.pause_s)
            self.stands = message.get("stands", self.stands)
            self.holders = message.get("holders", self.holders)
            self.joins = "formed" not in message and message.get("joins", self.joins)
        return [message for message in messages if "error" not in message]

    def _beat(self, line: bytes) -> None:
        waits, still = line[1:2] == b"w", line[1:2] == b"s"
        self.waits_since_s = (self.waits_since_s or self.last_read_s) if waits else 0.0
        self.still_since_s = (self.still_since_s or self.last_read_s) if still else 0.0
        self.quick = line.endswith(b"q")

    def forgive(self) -> None:
        """Whoever reads this was stopped: what it has not read says nothing."""
        self.last_read_s = time.monotonic()
        self.waits_since_s = self.still_since_s = 0.0

    def reap(self) -> bool:
        """Whether it has ended; collects its status."""
        if self.status is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.status = status
        return self.ended

    @property
    def gone(self) -> bool:
        """Whether its status is collected, so that nothing is left of it."""
        self.reap()
        return self.status is not None

    def error(self) -> PhalanxError | None:
        """The error that ended it, where it could report one."""
        if self._error is None or self.code == STALE_CODE:
            return None
        found: PhalanxError = messages.decode(b64decode(self._error))
        return found

    def cause(self) -> str:
        """Cause in words."""
        if self.status is None:
            return "was killed by its supervisor" if self.killed else "still runs"
        if os.WIFSIGNALED(self.status):
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(os.WTERMSIG(self.status)).name}"
        if self.code == STALE_CODE:
            return "refused: it was excluded from the run before"
        if (error := self.error()) is not None:
            return first_line(error)
        return f"ended with exit code {self.code}"

    def send(self, number: signal.Signals) -> None:
        """A signal, where it has not ended."""
        if not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once. It counts as ended from here on: a process in a call that cannot be interrupted (a dead network file system) is gone only when that returns.
        A signal handler may call this while `reap` or `kill` runs."""
        if not self.reap():
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipe."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


def fork_worker(work: Callable[[Member, int], int], member: Member, *, slot: int, close: Sequence[int] = ()) -> Worker:
    """Fork a process that runs `work(member, pipe)`. It ends with this process and shares no pipe (`close`) of its siblings. Raises `OSError` where there is no room for it."""
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, True)
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, ANSWER_STOP})
    try:
        try:
            pid = os.fork()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            raise
        if pid == 0:
            try:
                for fd in (read_end, *(f for f in close if f >= 0)):
                    os.close(fd)
                os.setsid()
                die_with_parent(parent)
                name_process(f"phalanx-rank-{slot}")
                _run(work, member, write_end)
            finally:  # never return into the parent's stack
                os._exit(1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    os.close(write_end)
    return Worker(member, slot=slot, pid=pid, pipe=read_end)


def _run(work: Callable[[Member, int], int], member: Member, pipe: int) -> None:
    code = 1
    try:
        code = work(member, pipe)
    except StaleMember as err:
        os.write(2, f"{err}\n".encode())
        code = STALE_CODE
    except BaseException as err:
        with contextlib.suppress(OSError):
            os.write(pipe, json.dumps({"error": b64encode(_error(err)).decode()}).encode() + b"\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _error(err: BaseException) -> bytes:
    if isinstance(err, PhalanxError):
        data = messages.encode(err)
        return data if len(data) < ERROR_CHARACTERS else messages.encode(RunError(str(err)[: ERROR_CHARACTERS // 8]))
    text = "".join(traceback.format_exception(err))
    return messages.encode(RunError(f"a worker failed\n{text[-ERROR_CHARACTERS // 8 :]}"))
