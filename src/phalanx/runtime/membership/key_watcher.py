"""A thread that waits at the membership service for a key, on a connection of its own, so that nobody has to ask again and again whether it is there.

Whoever waits still asks now and then (`Keys.hear`): a thread that hears nothing any more costs time until the next question, and nothing else.
Where a connection ends in a wait, torch writes a C++ stack trace to standard error, whoever ended it; so the end of a wait is asked of the service first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

END_S = 1.0
"""How long `close` waits for a thread that ends at once, as a rule: after it has asked the service, and again after it has ended the connection."""


class KeyWatcher:
    """Hears of one key after another. `listen` blocks until a key is there and raises where the connection ends, as `shut` makes it.

    `cancel` asks the service to end the wait, without waiting for the answer.
    """

    def __init__(
        self, listen: Callable[[str], None], shut: Callable[[], None], *, cancel: Callable[[], None] | None = None
    ) -> None:
        self.failed = False
        self._listen, self._shut, self._cancel = listen, shut, cancel
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
        if self._cancel is not None and self._thread.is_alive():
            self._cancel()
            self._thread.join(END_S)
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
