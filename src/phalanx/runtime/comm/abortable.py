"""A way out of calls that gloo never ends: the call is made by a thread beside, which is left behind once the team is aborted.

gloo (torch 2.13) tells an error to those who wait for a message that has not begun, and to nobody who waits for one that is partly there: a peer that dies, or a socket that is
shut, in the middle of a message makes its receiver wait for the whole timeout of the collective (`tests/ranks/test_escape.py` shows it). Nothing in the process can end that wait, so the
rank's own thread must not be the one in it.

Must never change: a thread that was left behind is never used again, and nothing it may still write is read.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from phalanx.core.errors import PeerError

T = TypeVar("T")
LOOK_S = 0.02
"""How often the rank's own thread looks whether the team was aborted."""
GRACE_S = 0.1
"""What a call has after the abort to end by itself, with an error that says more."""

_Call = Callable[[], Any]


class AbortableCall:
    """Runs calls of any thread until `aborted` says that nobody must wait any more. One for each team; `close` when it is over.

    A thread that is left behind holds what `keep` gives until its call ends: the destructor of a process group waits for the threads in it.
    """

    def __init__(self, aborted: Callable[[], bool], *, keep: Callable[[], object] = lambda: None) -> None:
        self.aborted, self.keep = aborted, keep
        self.waited_s = 0.0
        """How long the thread that made this stood waiting for calls, in all."""
        self._thread = threading.get_ident()
        self._own = threading.local()
        self._open: list[_Beside] = []
        self._begun: dict[int, _Call] = {}
        self._is_closed = False
        self._lock = threading.Lock()

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises. Raises `PeerError` where it does not end although the team was aborted, or nobody is to wait for anything any more."""
        with self._lock:  # a call behind the end of its thread would never be made
            if self._is_closed:  # a thread of the rank may hear of it late
                raise PeerError("the team is over")
            beside = getattr(self._own, "beside", None)
            if beside is None:
                beside = self._own.beside = _Beside()
                self._open.append(beside)
            beside.calls.put(work)
        begin_s = time.monotonic()
        looks = round(GRACE_S / LOOK_S)
        while True:
            try:
                value, error = beside.answers.get(timeout=LOOK_S)
            except queue.Empty:
                looks -= self.aborted()
                if looks < 0:
                    self._own.beside, beside.kept = None, self.keep()
                    raise PeerError("a message did not end after its connection was closed") from None
                continue
            if threading.get_ident() == self._thread:
                self.waited_s += time.monotonic() - begin_s
            if error is not None:
                raise error
            return value

    def begun(self, work: object, wait: _Call) -> None:
        """`work` is under way, and `wait` returns when it has ended. Whoever has waited says so (`ended`)."""
        self._begun[id(work)] = wait
        if self._is_closed:
            self._wait_for_all()

    def ended(self, work: object) -> None:
        """Somebody has waited for it."""
        self._begun.pop(id(work), None)

    def leave(self) -> None:
        """The thread that calls this makes no more calls: the one beside it ends. For threads that do not last as long as the team."""
        beside, self._own.beside = getattr(self._own, "beside", None), None
        if beside is not None:
            beside.calls.put(None)
            with self._lock, contextlib.suppress(ValueError):  # closed meanwhile
                self._open.remove(beside)

    def close(self) -> None:
        """End the threads that are not in a call; one that is ends with its call, or with the process.

        What is under way and nobody has waited for gets a thread that waits, and keeps the groups as long: else the rank's own thread would, in their destructor.
        """
        with self._lock:
            self._is_closed = True
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        with self._lock:
            for number in list(self._begun):  # other threads may still begin or end something
                wait = self._begun.pop(number, None)
                if wait is not None:
                    beside = _Beside()
                    beside.kept = self.keep()
                    beside.calls.put(wait)
                    self._open.append(beside)
            for beside in self._open:
                beside.calls.put(None)
            self._open.clear()


def run_escapable(escape: AbortableCall | None, work: Callable[[], T]) -> T:
    """Runs it by `escape` where there is one, else here."""
    return work() if escape is None else escape.run(work)


class _Beside:
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
