"""Waits of a rank whose peer left in the middle of a message, which gloo never ends (`runtime/comm/abortable.py` has the reason): who asks, and what follows.

In a run of a fixed number of ranks, which ends when one is lost, the process ends with the error (`LostPeers`). On one machine the launcher sees it; a rank on another machine has nobody to
tell it. In an elastic run membership tells of members that are lost; that one has left its groups because of an error of its own, or that a link is cut between two whom the service reaches,
it does not: there the wait asks, and is given up (`AbortableCall`).

A group of gloo refuses a new message to a peer that is gone. So where a wait goes on, a thread sends everybody in its group an empty one, which nobody receives (some 80 bytes for each of
them stay until the group ends, so it is asked less and less often).
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError, first_line, printable
from phalanx.runtime.comm.abortable import ASK_S
from phalanx.runtime.comm.groups import Axis

T = TypeVar("T")
OFTEN, SELDOM_S = 8, 60.0
"""After so many questions to a group the next waits a second longer; so long at most."""
SAY_S = 5.0
"""How long the process may take for its last words."""
_PROBE_TAG = 2**31 - 5
"""Tag of messages that nobody receives."""
_OUR_OWN = "Application timeout"
"""What gloo says where this process closed the connections itself: a wait of it timed out (`Collectives.break_off`)."""


class PeerQuestions:
    """Asks groups whether everybody is still in them, less and less often."""

    def __init__(self) -> None:
        self._asked: dict[int, tuple[int, float]] = {}
        """How often each group was asked, and when last."""

    def left(self, axis: Axis, op_id: str = "") -> str:
        """What to say of a wait for messages over `axis` of which a rank is gone; empty where all are there, and where the group was asked a moment ago."""
        why = _gone(axis) if self._is_due(axis) else ""
        name = f" [{op_id}]" if op_id else ""
        return why and (
            f"a message{name} over axis {axis.name}, ranks {axis.ranks}, failed on rank {axis.ranks[axis.index]}: a rank left or failed in the "
            f"middle of it ({why})"
        )

    def _is_due(self, axis: Axis) -> bool:
        now_s = time.monotonic()
        times, last_s = self._asked.get(id(axis.group), (0, -math.inf))
        if now_s - last_s < min(SELDOM_S, (0.5 + times / OFTEN) * ASK_S):
            return False
        self._asked[id(axis.group)] = times + 1, now_s
        return True


def _gone(axis: Axis) -> str:
    """Which rank of the axis is gone, and what the transport says of it; empty where all are there."""
    for rank in axis.ranks:
        if rank != axis.ranks[axis.index]:
            try:
                dist.isend(torch.empty(0), rank, axis.group, _PROBE_TAG)
            except RuntimeError as err:  # torch's DistError and its children derive from it
                if _OUR_OWN not in str(err):
                    return f"rank {rank}: {first_line(err)}"
            except ValueError:  # the group has ended
                return ""
    return ""


@dataclass(frozen=True, eq=False)
class _Wait:
    axis: Axis
    op_id: str


class LostPeers:
    """Ends the process where one of its threads waits for a rank that is gone, and gloo has not said so."""

    def __init__(self, ended: Callable[[PeerError], None] | None = None) -> None:
        """`ended`: instead of the end of the process."""
        self._tell: Callable[[PeerError], None] = lambda _: None
        self._is_over = False
        self._ended = self._end if ended is None else ended
        self._waits: dict[int, _Wait] = {}
        """By thread."""
        self._questions = PeerQuestions()
        self._thread: threading.Thread | None = None

    def during(self, wait: Callable[[], T], axis: Axis, op_id: str = "") -> T:
        """What `wait`, for messages over `axis`, returns or raises."""
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
    def telling(self, tell: Callable[[PeerError], None]) -> Iterator[None]:
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
                        self._ended(PeerError(why))
            before = now

    def _end(self, error: PeerError) -> None:
        late = threading.Timer(SAY_S, os._exit, (error.exit_code,))
        late.daemon = True
        late.start()
        with suppress(OSError, ValueError):
            print(printable(f"phalanx: {error}"), file=sys.stderr, flush=True)
        with suppress(Exception):
            self._tell(error)
        os._exit(error.exit_code)
