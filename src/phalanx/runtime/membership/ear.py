"""A thread that waits at the membership service for a key, on a connection of its own, so that nobody has to ask again and again whether it is there.

Whoever waits still asks now and then (`Keys.hear`): a thread that hears nothing any more costs time until the next question, and nothing else.
torch tells of the end of a connection in a wait on standard error, whoever ended it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

END_S = 1.0
"""How long `close` waits for a thread that ends at once, as a rule."""


class Ear:
    """Hears of one key after another. `listen` blocks until a key is there and raises where the connection ends, as `shut` makes it."""

    def __init__(self, listen: Callable[[str], None], shut: Callable[[], None]) -> None:
        self.failed = False
        self._listen, self._shut = listen, shut
        self._key = ""
        self._rang = threading.Event()
        self._keys: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hear(self, key: str, timeout_s: float) -> bool | None:
        """Whether `key` came within the time; None where this cannot say, because it has failed or waits for another key."""
        if key != self._key and (not self._key or self._rang.is_set()) and not self.failed:
            self._rang.clear()
            self._key = key
            self._keys.put(key)
        if key != self._key or self.failed:
            return None
        rang = self._rang.wait(timeout_s)
        return None if self.failed else rang

    def close(self) -> None:
        """End the thread, and wait for it: one that comes back from C++ while the interpreter ends aborts the process. From any other; safe to call again."""
        self._keys.put("")
        self._shut()
        self._thread.join(END_S)

    def _run(self) -> None:
        try:
            while key := self._keys.get():
                self._listen(key)
                self._rang.set()
        except Exception:  # whatever the connection raises: who waits asks again
            self.failed = True
            self._rang.set()
