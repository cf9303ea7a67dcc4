"""Local ranks: fork them, watch them, end them together.

The parent imports everything, runs no tensor operation, and forks: a rank starts in milliseconds, not in the seconds an import of torch
takes. It then waits for processes, nothing else. Must never change: no rank outlives the parent (the kernel ends them), no rank is
left waiting for a dead one, and the first cause is what the user reads.

    Ctrl-C, SIGTERM    every rank is asked to finish the step, save and end (`StopRequest`); Ctrl-C after that ends all at once
    a rank dies        the others are ended; the error names rank and signal
    a rank raises      the others are ended; its error is raised here, of the same type
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from phalanx.core.errors import PhalanxError, RunError
from phalanx.core.files import private_folder
from phalanx.core.process import name_process, usable_cores
from phalanx.runtime.processes.reports import distance, free_screen, killed, read_report, report_error, report_through
from phalanx.runtime.processes.world import WorldInfo

STOPPED = 130
"""Exit code of a run that was stopped at once (128 + SIGINT, as shells have it)."""
SETTLE_S = 0.5
"""How long to listen for other causes after the first rank failed: a killed rank makes its peers fail too, a little later."""


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a run in good order. A terminal that closes sends the last one, to a run under `nohup` in vain. Only Ctrl-C ends anything at once (`ends_at_once`)."""
STOPPING = "Finishing the step and saving a checkpoint. Press Ctrl-C again to stop immediately."
"""The answer to the first one."""
ANSWER_STOP = signal.SIGUSR1
"""Sent to the worker that draws on the terminal, so that it tells there that the run stops: what another process writes would tear the picture. Held back in every worker, for a thread that waits for it."""


def ends_at_once(number: int) -> bool:
    """Whether a stop signal that follows another one ends everything at once. SIGTERM does not: schedulers send it to every process of a job and launchers pass
    theirs on, so that it comes twice, and it comes again before SIGKILL does. A hang-up may come twice, too."""
    return number == signal.SIGINT


def on_stop(handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Call `handler` for each stop signal from now on, but for a hang-up that is ignored already; returns the handlers before."""
    heard = [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    return {n: signal.signal(n, handler) for n in heard}


def leave_terminal() -> None:
    """Output goes nowhere from now on where it went to a terminal that is gone: every word there would be an error."""
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(fd).st_mode) and not os.isatty(fd):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, fd)
                os.close(null)


class StopRequest:
    """Set by the first stop signal; Ctrl-C after that ends the process at once (`immediate` is called)."""

    def __init__(self, immediate: Callable[[], None] | None = None) -> None:
        self.requested = False
        self.on_request: Callable[[], None] | None = None
        """Called once by a thread of its own, so that it may wait for what the signal interrupted."""
        self._immediate = immediate if immediate is not None else _exit_now

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        if self.requested:
            if ends_at_once(number):
                self._immediate()
            return
        if self.on_request is not None:
            threading.Thread(target=self.on_request, daemon=True).start()
        self.requested = True

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Listen to stop signals inside the block."""
        before = on_stop(self)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _exit_now() -> None:
    os._exit(STOPPED)


RankMain = Callable[[WorldInfo, StopRequest], int]
"""Body of one rank; its return value is the exit code."""


def threads_per_rank(ranks: int, threads: int | None = None) -> int:
    """Compute threads of each of `ranks` local ranks: as asked, or an even share of the cores."""
    return threads if threads is not None else max(1, usable_cores() // ranks)


def run_one(main: RankMain, info: WorldInfo, *, threads: int) -> int:
    """Run `main` as a rank in this process (alone, or one that a launcher such as torchrun started)."""
    torch.set_num_threads(threads)
    with StopRequest().installed() as stop:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # `run_local` forks ranks with them held back
        return main(info, stop)


def run_local(main: RankMain, *, ranks: int, threads: int, after_kill: str = "") -> int:
    """Run `main` on `ranks` forked ranks of this machine; returns the largest exit code. `after_kill`: what to do where a rank was killed.

    Raises the first rank's error, or `RunError` naming a rank that was killed. Call it from the main thread, before any tensor operation.
    """
    children: list[_Child] = []
    with (
        tempfile.TemporaryDirectory(prefix="ranks-", dir=private_folder()) as folder,
        _Watch(children, after_kill) as watch,
    ):
        with _signals_held_back():
            sys.stdout.flush()
            sys.stderr.flush()
            gc.freeze()  # the collector must not touch, and so copy, pages shared with the ranks
            parent = os.getpid()
            for rank in range(ranks):
                info = WorldInfo(
                    rank=rank, world=ranks, local_rank=rank, local_world=ranks, meeting=Path(folder, "meeting")
                )
                children.append(_fork(main, info, threads=threads, parent=parent))
        return watch.until_end()


@contextlib.contextmanager
def _signals_held_back() -> Iterator[None]:
    """A stop requested while ranks are forked is delivered once all of them exist."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class _Child:
    rank: int
    pid: int
    report: int
    """Read end of the pipe through which the rank says what went wrong."""
    status: int | None = None
    """Status as `os.waitpid` gives it; None while it runs."""

    @property
    def failed(self) -> bool:
        return self.status not in (None, 0)

    @property
    def signal(self) -> int:
        return os.WTERMSIG(self.status) if self.status is not None and os.WIFSIGNALED(self.status) else 0

    @property
    def code(self) -> int:
        return os.WEXITSTATUS(self.status) if self.status is not None and os.WIFEXITED(self.status) else 1


def _fork(main: RankMain, info: WorldInfo, *, threads: int, parent: int) -> _Child:
    read_end, write_end = os.pipe()
    os.set_blocking(
        read_end, False
    )  # a process that the rank forked may hold the other end open for as long as it likes
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read_end)
            code = _child(main, info, threads=threads, parent=parent, report=write_end)
        finally:  # never return into the parent's stack
            os._exit(code)
    os.close(write_end)
    return _Child(info.rank, pid, read_end)


def _child(main: RankMain, info: WorldInfo, *, threads: int, parent: int, report: int) -> int:
    os.setsid()  # the terminal's Ctrl-C reaches the parent only, which passes it on once
    die_with_parent(parent)
    name_process(f"phalanx-rank-{info.rank}")
    report_through(report)
    try:
        code = run_one(main, info, threads=threads)
    except BaseException as err:
        report_error(err)
        code = 2 if isinstance(err, PhalanxError) else 1
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code


def end_with_parent(by: signal.Signals) -> None:
    """Ask the kernel for a signal to this process when its parent ends, however that happens (Linux; elsewhere there is no such call)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, by, 0, 0, 0)  # 1 = PR_SET_PDEATHSIG


def die_with_parent(parent: int) -> None:
    """End with the process `parent`, at once."""
    if sys.platform != "linux":
        return
    end_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


class _Watch:
    """Waits for the ranks; passes signals on."""

    def __init__(self, children: list[_Child], after_kill: str) -> None:
        self.children = children
        self.after_kill = after_kill
        self.stops = 0

    def __enter__(self) -> _Watch:
        self._before = on_stop(self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        for number, handler in self._before.items():
            signal.signal(number, handler)
        for child in self.children:
            os.close(child.report)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
            self._send(signal.SIGHUP)
        if self.stops and not ends_at_once(number):
            return
        self.stops += 1
        if number != signal.SIGHUP:
            self._send(signal.SIGTERM if self.stops == 1 else signal.SIGKILL)

    def _send(self, number: int) -> None:
        for child in self._running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def _running(self) -> list[_Child]:
        return [c for c in self.children if c.status is None]

    def _kill_all(self) -> None:
        self._send(signal.SIGKILL)
        for child in self._running():
            with contextlib.suppress(ChildProcessError):
                child.status = os.waitpid(child.pid, 0)[1]

    def until_end(self) -> int:
        while self._running():
            self._wait(None)
            if any(c.failed for c in self.children):
                self._settle()
                failed = [c for c in self.children if c.failed]
                self._kill_all()
                return self._verdict(failed)
        return max(c.code for c in self.children)

    def _wait(self, timeout_s: float | None) -> None:
        """Return when a rank has ended (its status is then known), or after the timeout."""
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            for child in self._running() if hasattr(os, "pidfd_open") else ():
                handle = os.pidfd_open(child.pid)
                stack.callback(os.close, handle)
                poll.register(handle, select.POLLIN)
            longest_s = None if hasattr(os, "pidfd_open") else 0.05
            limits_s = [s for s in (timeout_s, longest_s) if s is not None]
            poll.poll(min(limits_s) * 1000 if limits_s else None)
        for child in self._running():
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.status = status

    def _settle(self) -> None:
        end_s = time.monotonic() + SETTLE_S
        while self._running() and (left_s := end_s - time.monotonic()) > 0:
            self._wait(left_s)

    def _verdict(self, failed: list[_Child]) -> int:
        """Raise what went wrong first: a killed rank before one that complained, and that before one that missed a peer."""
        free_screen()
        if self.stops > 1 or any(c.code == STOPPED for c in failed):
            return STOPPED
        for child in failed:
            if child.signal:
                then = f". {self.after_kill}" if self.after_kill else ""
                raise RunError(killed(child.rank, child.pid, child.signal) + then)
        said = [(c, read_report(c.report)) for c in self.children]  # of those that were killed while they told, too
        child, report = min((x for x in said if x[0] in failed or x[1] is not None), key=lambda x: distance(x[1]))
        if isinstance(report, PhalanxError):
            raise report
        text = str(report).rstrip() if report is not None else f"it ended with exit code {child.code}"
        raise RunError(f"rank {child.rank} failed; the other ranks were stopped\n{text}")
