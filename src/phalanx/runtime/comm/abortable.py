"""A way out of calls that gloo never ends.

gloo (torch 2.13) reports an error to whoever waits for a message that has not begun, and to neither side of one that has partly gone: a peer that dies, or a socket that is
shut, in the middle of a message makes the other wait for the whole timeout of the collective (`tests/ranks/test_escape.py` shows it; `Pair::signalException` of gloo's transport/tcp/pair.cc
passes over what is being written or read). Nothing in the process can end that wait.

    elastic runs    a helper thread makes the call, and is abandoned once the process group is aborted, or a peer has left it (`AbortableCall`)
    other runs      the rank's own thread makes it, which costs less; where its peer has left, the process ends (`runtime/comm/lost.py`)

Must never change: an abandoned thread is never used again, and nothing it may still write is read.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.core.errors import PeerError
from phalanx.runtime.comm.progress import RankProgress

T = TypeVar("T")
LOOK_S = 0.02
"""How often the rank's own thread checks whether the process group was aborted."""
GRACE_S = 0.1
"""How long after the abort a call may still end by itself, with an error that says more."""
ASK_S = 1.0
"""How often a wait asks whether a peer has left; how long it may then still end by itself."""

_Call = Callable[[], Any]


class AbortableCall:
    """Runs calls of any thread until `aborted` is true. One for each group epoch; `close` it with the epoch.

    An abandoned thread holds what `keep` returns until its call ends: the destructor of a process group waits for the threads in it.
    """

    def __init__(
        self,
        aborted: Callable[[], bool],
        *,
        keep: Callable[[], object] = lambda: None,
        progress: RankProgress | None = None,
        asks: Callable[..., str] | None = None,
    ) -> None:
        """`asks` tells of ranks that have left a group (`PeerQuestions.left`); None where nobody does."""
        self.aborted, self.keep, self.asks = aborted, keep, asks
        self.progress = RankProgress() if progress is None else progress
        """Of the thread that makes this: calls are waits for other ranks."""
        self.waited_s = 0.0
        """Total time for which the thread that made this waited for calls."""
        self._thread = threading.get_ident()
        self._own = threading.local()
        self._open: list[_CallThread] = []
        self._begun: dict[int, _Call] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def run(self, work: Callable[[], T], *, left: Callable[[], str] = lambda: "") -> T:
        """What `work` returns or raises. Raises `PeerError` where it does not end after an abort, or after `left`, which is asked now and then, has said which peer left the group; and after `close`."""
        with self.progress.waiting():
            return self._run(work, left)

    def _run(self, work: Callable[[], T], left: Callable[[], str]) -> T:
        with self._lock:  # a call behind the end of its thread would never be made
            if self._is_closed:  # another thread of the rank may not know yet
                raise PeerError("the process group was aborted")
            thread = getattr(self._own, "thread", None)
            if thread is None:
                thread = self._own.thread = _CallThread()
                self._open.append(thread)
            thread.calls.put(work)
        begin_s = time.monotonic()
        looks, asks_s, why = round(GRACE_S / LOOK_S), begin_s + ASK_S, ""
        while True:
            try:
                value, error = thread.answers.get(timeout=LOOK_S)
            except queue.Empty:
                looks -= self.aborted()
                text = "a message did not end after the process group was aborted" if looks < 0 else ""
                if (now_s := time.monotonic()) >= asks_s:
                    asks_s = now_s + ASK_S
                    text, why = text or why, left()
                if text:
                    self._own.thread, thread.kept = None, self.keep()
                    raise PeerError(text) from None
                continue
            if threading.get_ident() == self._thread:
                self.waited_s += time.monotonic() - begin_s
            if error is not None:
                raise error
            return value

    def begun(self, work: object, wait: _Call) -> None:
        """`work` is under way, and `wait` returns when it has ended. Call `ended` after waiting for it."""
        self._begun[id(work)] = wait
        if self._is_closed:
            self._wait_for_all()

    def ended(self, work: object) -> None:
        """The wait for `work` is over."""
        self._begun.pop(id(work), None)

    def leave(self) -> None:
        """The thread that calls this makes no more calls: its helper thread ends. For threads that end before the group epoch does."""
        thread, self._own.thread = getattr(self._own, "thread", None), None
        if thread is not None:
            thread.calls.put(None)
            with self._lock, contextlib.suppress(ValueError):  # closed meanwhile
                self._open.remove(thread)

    def close(self) -> None:
        """End the threads that are not in a call; one that is ends with its call, or with the process.

        Each operation under way that has not been waited for gets a thread that waits and keeps the groups until then: else the rank's own thread would wait, in their destructor.
        """
        with self._lock:
            self._is_closed = True
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        with self._lock:
            for number in list(self._begun):  # other threads may still begin or end something
                wait = self._begun.pop(number, None)
                if wait is not None:
                    thread = _CallThread()
                    thread.kept = self.keep()
                    thread.calls.put(wait)
                    self._open.append(thread)
            for thread in self._open:
                thread.calls.put(None)
            self._open.clear()


def run_abortable(escape: AbortableCall | None, work: Callable[[], T], *, left: Callable[[], str] = lambda: "") -> T:
    """Runs `work` through `escape` where there is one, else directly."""
    return work() if escape is None else escape.run(work, left=left)


class _CallThread:
    """A thread that makes one call at a time."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self.kept: object = None
        threading.Thread(target=self._work, name="escape", daemon=True).start()

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            answer: tuple[Any, BaseException | None]
            try:
                answer = call(), None
            except BaseException as err:
                answer = None, err
            self.answers.put(answer)
            del call, answer  # they hold messages, which hold groups
