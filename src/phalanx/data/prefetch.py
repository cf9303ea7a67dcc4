"""Loads the next steps in a thread while the current one computes.

NumPy and the page cache do the work outside the interpreter lock, so one thread is enough. At most `depth` steps are held; an error in
the thread is raised where the batch is asked for; `close` ends the thread at once, wherever it stands.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

_WAIT_S = 0.1


class Prefetch(Generic[T]):
    """Iterates over `load(step)` for `steps`, in order, with up to `depth` results ready ahead. A context manager."""

    def __init__(self, load: Callable[[int], T], steps: Iterable[int], *, depth: int = 2) -> None:
        self._queue: queue.Queue[tuple[bool, T | BaseException | None]] = queue.Queue(maxsize=max(depth, 1))
        self._closed = threading.Event()
        self._ended = False
        self._thread = threading.Thread(target=self._work, args=(load, steps), name="phalanx-prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._ended or self._closed.is_set():
            raise StopIteration
        loaded, item = self._queue.get()
        if loaded:
            return item  # type: ignore[return-value]  # True marks a T
        self._ended = True
        if isinstance(item, BaseException):
            raise item
        raise StopIteration

    def __enter__(self) -> Prefetch[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the thread and drops what it holds. May be called twice."""
        self._closed.set()
        while self._thread.is_alive():
            self._drain()  # a thread that waits for room goes on, and ends, at once
            self._thread.join(timeout=_WAIT_S)
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._queue.get_nowait()

    def _work(self, load: Callable[[int], T], steps: Iterable[int]) -> None:
        try:
            for step in steps:
                if self._closed.is_set() or not self._put((True, load(step))):
                    return
            self._put((False, None))
        except BaseException as error:  # handed to the reader, who raises it
            self._put((False, error))

    def _put(self, entry: tuple[bool, T | BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=_WAIT_S)
            except queue.Full:
                continue
            return True
        return False
