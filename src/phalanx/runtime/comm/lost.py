"""Waits of a rank whose peer left in the middle of a message, which gloo never ends (`runtime/comm/abortable.py` has the reason): who asks, and what follows.

In a run of a fixed number of ranks, which ends when one is lost, the process ends with the error (`LostPeers`). On one machine the launcher sees it; a rank on another machine has nobody to
tell it. In an elastic run membership tells of members that are lost; that one has left its groups because of an error of its own, or that a link is cut between two whom the service reaches,
it does not: there the wait asks, and is given up (`AbortableCall`).

A group of gloo refuses a new message to a peer that is gone. So where a wait goes on, a thread sends ranks of its group an empty one, which nobody receives. Some 80 bytes for each of them
stay until the group ends, so a few are asked at a time, in turn, and less and less often. Of many ranks others ask the rest, and who finds that one is gone goes too.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError, PhalanxError, first_line, printable
from phalanx.runtime.comm.abortable import ASK_S
from phalanx.runtime.comm.exchange import is_departure
from phalanx.runtime.comm.groups import Axis

T = TypeVar("T")
OFTEN, SELDOM_S = 8, 10.0
"""After so many questions to a group the next waits a second longer; so long at most."""
AT_ONCE = 8
"""So many ranks are asked by a question."""
SAY_S = 5.0
"""How long the process may take for its last words."""
_PROBE_TAG = 2**31 - 5
"""Tag of messages that nobody receives."""
_OUR_OWN = "application timeout"
"""What gloo says where this process closed the connections itself: a wait of it timed out (`Collectives.break_off`)."""


class PeerQuestions:
    """Asks groups whether everybody is still in them, less and less often."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[int, float]] = {}
        """How often each group was asked, and when last."""

    def left(self, axis: Axis, op_id: str = "") -> str:
        """What to say of a wait for messages over `axis` of which a rank is gone; empty where all are there, and where the group was asked a moment ago."""
        why = _gone(axis, self._whom(axis))
        name = f" [{op_id}]" if op_id else ""
        return why and (
            f"a message{name} over axis {axis.name}, ranks {axis.ranks}, failed on rank {axis.ranks[axis.index]}: a rank left or failed in the "
            f"middle of it ({why})"
        )

    def _whom(self, axis: Axis) -> tuple[int, ...]:
        """Ranks of the axis to ask now."""
        now_s = time.monotonic()
        times, last_s = self._asked.get(id(axis.group), (0, -math.inf))
        if now_s - last_s < min(SELDOM_S, (0.5 + times / OFTEN) * ASK_S):
            return ()
        self._asked[id(axis.group)] = times + 1, now_s
        others = axis.ranks[axis.index + 1 :] + axis.ranks[: axis.index]
        at = times * AT_ONCE % len(others)
        return (others[at:] + others[:at])[:AT_ONCE]


def _gone(axis: Axis, ranks: Sequence[int]) -> str:
    """Which of these ranks of the axis is gone, and what the transport says of it; empty where all are there."""
    for rank in ranks:
        try:
            dist.isend(torch.empty(0), rank, axis.group, _PROBE_TAG)
        except Exception as err:  # of a group that has ended, or of a transport that sends no empty messages, too
            text = str(err).lower()
            if is_departure(text) and _OUR_OWN not in text:
                return f"rank {rank}: {first_line(err)}"
    return ""


@dataclass(frozen=True, eq=False)
class _Wait:
    axis: Axis
    op_id: str


class LostPeers:
    """Ends the process where one of its threads waits for a rank that is gone, and gloo has not said so."""

    def __init__(
        self,
        say: Callable[[BaseException], None] | None = None,
        *,
        asks: bool = True,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        """`say`: says why the process ends, on stderr by default. `asks`: whether it looks for ranks that are gone. `end`: with an exit code."""
        self._say, self._asks, self._exit = print_error if say is None else say, asks, end
        self._ends = threading.Lock()
        self._tell: Callable[[BaseException], None] = lambda _: None
        self._is_over = False
        self._waits: dict[int, _Wait] = {}
        """By thread."""
        self._questions = PeerQuestions()
        self._thread: threading.Thread | None = None

    def during(self, wait: Callable[[], T], axis: Axis, op_id: str = "") -> T:
        """What `wait`, for messages over `axis`, returns or raises."""
        if not self._asks:
            return wait()
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="lost-peers", daemon=True)
            self._thread.start()
        me = threading.get_ident()
        self._waits[me] = _Wait(axis, op_id)
        try:
            return wait()
        finally:
            del self._waits[me]

    @contextmanager
    def telling(self, tell: Callable[[BaseException], None]) -> Iterator[None]:
        """Inside the block `tell` is called before the end; behind it the run ends in its own way, and no wait is watched any more."""
        self._tell = tell
        try:
            yield
        finally:
            self._is_over = True

    def _look(self) -> None:
        before: Collection[_Wait] = ()
        while not self._is_over:
            time.sleep(ASK_S)
            now = self._waits.copy().values()
            for wait in now:
                if wait in before and (why := self._questions.left(wait.axis, wait.op_id)):
                    time.sleep(ASK_S)
                    if wait in self._waits.copy().values() and not self._is_over:
                        self.end(PeerError(why))
            before = now

    def end(self, error: BaseException) -> None:
        """End the process with an error that its own thread, which waits, cannot raise. From another thread; the first error counts."""
        if not self._ends.acquire(blocking=False):
            return
        code = error.exit_code if isinstance(error, PhalanxError) else 1
        late = threading.Timer(SAY_S, self._exit, (code,))
        late.daemon = True
        late.start()
        with suppress(OSError, ValueError):
            self._say(error)
        with suppress(Exception):
            self._tell(error)
        late.cancel()
        self._exit(code)


def print_error(error: BaseException) -> None:
    """As the command line does: the error where the user can act on it, else its traceback."""
    text = (
        f"phalanx: {error}" if isinstance(error, PhalanxError) else "".join(traceback.format_exception(error)).rstrip()
    )
    print(printable(text), file=sys.stderr, flush=True)
