"""Progress of one rank's own thread, for whoever asks from another one: a thread that heartbeats shows life, and no more.

    at        the thread has come to a place of the step, by name
    waiting   it waits inside for other ranks, on the host; on a device, for the last message that it handed over

A rank that neither comes on nor waits is *still*. Its supervisor decides what that means (`runtime/membership/supervisor.py`).

Must never change: only the rank's own thread writes here, and each call costs less than a microsecond or two.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

SUCCESS = 0
"""What torch calls a message that has come (its `WorkResult`)."""
FADES = 0.98
"""What a pause of a step before counts for: half after 34 steps."""
State = Literal["moves", "waits", "still"]


class RankProgress:
    """Made by the thread that it tells of, until another one takes over."""

    def __init__(self) -> None:
        self.place = "start"
        """Where the thread is, as a person would say it."""
        self.quick = False
        """Whether the place is inside a step, so that the thread should soon come to the next one: neither loading, saving nor the first step of its kind."""
        self.pause_s = 0.0
        """Longest time without a sign inside a step that was committed, waits apart: what is normal here. Of older steps it counts for less."""
        self.holders = 0
        """Hosts (on one machine: ranks) that hold each piece of state now, at least; 0: not known."""
        self._thread = threading.get_ident()
        self._marks = self._seen = 0
        self._mark_s = time.monotonic()
        self._longest_s = 0.0
        self._waits = 0
        self._message: Any = None

    # -- from the thread itself

    def take_over(self) -> None:
        """It tells of the thread that calls this, from now on."""
        self._thread = threading.get_ident()

    def at(self, place: str, *, quick: bool = False) -> None:
        """It has come to `place`."""
        self._mark()
        self.place, self.quick = place, quick
        if not quick:
            self._longest_s = 0.0

    def committed(self) -> None:
        """The step counts, and so do its pauses."""
        self.pause_s, self._longest_s = max(FADES * self.pause_s, self._longest_s), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """It waits for other ranks inside. Of another thread it says nothing."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._mark()
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            self._mark_s = time.monotonic()
            self._marks += 1

    def handed_over(self, message: Any) -> None:
        """A device has a message (a `Work` of NCCL); the thread goes on meanwhile."""
        if threading.get_ident() == self._thread:
            self._mark()
            self._message = message

    def forget(self) -> None:
        """The groups of its messages are dropped: a reference would keep their descriptors and threads."""
        self._message = None

    def _mark(self) -> None:
        now_s = time.monotonic()
        if self.quick and not self._waits:
            self._longest_s = max(self._longest_s, now_s - self._mark_s)
        self._mark_s = now_s
        self._marks += 1

    # -- from another thread

    def look(self) -> State:
        """What it has done since the last look."""
        seen, self._seen = self._seen, self._marks
        if self._marks != seen:
            return "moves"
        return "waits" if self._waits or self._message_waits() else "still"

    @property
    def still_s(self) -> float:
        """Seconds since its last sign."""
        return time.monotonic() - self._mark_s

    def stands(self) -> str:
        """The line of code that it is in, and the place."""
        frame = sys._current_frames().get(self._thread)
        if frame is None:
            return self.place
        code = frame.f_code
        return f"{self.place}, {Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"

    @property
    def message_failed(self) -> bool:
        """Whether torch's own thread has noted of the last message that was handed over that its communicator has an error, or that it is under way for longer than its group allows. In an elastic run
        it does no more than that (`LEFT_TO_RUN`): the device waits for the message for ever."""
        message = self._message
        try:
            result = None if message is None else message.get_future_result()
            return result is not None and bool(result.done() and result.value() != SUCCESS)
        except RuntimeError:  # it has none
            return False

    def _message_waits(self) -> bool:
        """As torch's own thread has noted it. `is_completed` asks the driver and takes the communicator's lock, with Python's lock in its hands (torch 2.13): where either is held by a call that only
        an abort ends, the thread that aborts could not run."""
        message = self._message
        try:
            return message is not None and not message.get_future_result().done()
        except RuntimeError:  # it has none
            return False
