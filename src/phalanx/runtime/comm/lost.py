"""Waits of a rank whose peer left in the middle of a message, which gloo never ends (`runtime/comm/abortable.py` has the reason): the process ends with the error.

For runs of a fixed number of ranks, which end when one is lost. On one machine their launcher sees it; a rank on another machine has nobody to tell it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError, first_line, printable
from phalanx.runtime.comm.groups import Axis

T = TypeVar("T")
LOOK_S = 1.0
"""How often somebody looks whether a wait has gone on since the last time, and asks after its peers; how long it may then still end by itself."""
OFTEN = 8
"""So many times in a row; later only every so many."""
_PROBE_TAG = 2**31 - 5
"""Tag of messages that nobody receives."""


@dataclass(frozen=True, eq=False)
class _Wait:
    axis: Axis
    op_id: str


class LostPeers:
    """Ends the process (`ended`) where one of its threads waits for a rank that is gone, and gloo has not said so.

    A group of gloo refuses a new message to a peer that is gone. So where a wait goes on, a thread sends everybody on its axis an empty one that nobody receives.
    """

    def __init__(self, ended: Callable[[PeerError], None] | None = None) -> None:
        self._ended = _end_process if ended is None else ended
        self._waits: dict[int, _Wait] = {}
        """By thread."""
        self._thread: threading.Thread | None = None

    def during(self, wait: Callable[[], T], axis: Axis, op_id: str) -> T:
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

    def _look(self) -> None:
        looks: dict[_Wait, int] = {}
        while True:
            time.sleep(LOOK_S)
            looks = {wait: looks.get(wait, -1) + 1 for wait in self._waits.copy().values()}
            for wait, times in looks.items():
                if times and (times <= OFTEN or times % OFTEN == 0) and (why := _gone(wait.axis)):
                    time.sleep(LOOK_S)
                    if wait in self._waits.copy().values():
                        self._ended(_error(wait, why))


def _gone(axis: Axis) -> str:
    """Which rank of the axis is gone, and what the transport says of it; empty where all are there."""
    for rank in axis.ranks:
        if rank != axis.ranks[axis.index]:
            try:
                dist.isend(torch.empty(0), rank, axis.group, _PROBE_TAG)
            except RuntimeError as err:  # torch's DistError and its children derive from it
                return f"rank {rank}: {first_line(err)}"
    return ""


def _error(wait: _Wait, why: str) -> PeerError:
    name, axis = f" [{wait.op_id}]" if wait.op_id else "", wait.axis
    return PeerError(
        f"a message{name} over axis {axis.name}, ranks {axis.ranks}, failed on rank {axis.ranks[axis.index]}: a rank left or failed in the "
        f"middle of it ({why})"
    )


def _end_process(error: PeerError) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(printable(f"phalanx: {error}"), file=sys.stderr, flush=True)
    os._exit(error.exit_code)
