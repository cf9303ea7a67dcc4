"""What is different where a rank's tensors live on a GPU and its messages are NCCL's. Not run on one yet: tested with stand-ins (docs/explanation/elastic-recovery.md).

A call of gloo fails where a peer is lost. NCCL's calls return before anything has travelled, its kernels wait for a peer for ever, and an abort from another thread ends them
without a word, with anything in their results. So in an elastic run:

    abort      all communicators of the team together, from a thread of its own: an abort may itself block; nothing is posted any more
    complete   whoever is about to rely on what a device has computed waits for it, and then asks whether the team was aborted: it was before the abort
    nonsense   numbers that nobody sent may also fail by themselves, whatever the error: where the team was aborted, that is a lost peer (`runtime/membership/member.py`)
    stuck      a call that no abort ends (making a communicator is one), or an abort that does not end, is ended with its process; the supervisor starts another one

Must never change: no member votes for a step, and none compares state, before `complete` has let it through.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.core.errors import PeerError


def synchronize(device: torch.device) -> None:
    """Wait for everything that the device was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # SYNC: who calls it says why


def complete(device: torch.device, aborted: Callable[[], bool] | None) -> None:
    """Wait until what `device` has computed is there. Raises `PeerError` where the team was aborted meanwhile, so that it may be anything.

    On a CPU it does nothing: every call there has failed by itself.
    """
    if device.type == "cpu":
        return
    synchronize(device)  # SYNC: once a step, before the vote
    if aborted is not None and aborted():
        raise PeerError("the connections were closed while the device computed, and what came over them is not used")


class DeviceAbort:
    """The end of all NCCL communicators of some groups, of each once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ended: list[Any] = []

    def start(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Starts from any thread; returns at once. Groups without NCCL are left alone, and those that were given before."""
        with self._lock:
            new = [b for b in nccl_backends(groups) if not any(b is old for old in self._ended)]
            self._ended += new
            if new:
                self._threads.append(threading.Thread(target=_abort, args=(new,), name="abort", daemon=True))
                self._threads[-1].start()

    def wait(self, limit_s: float | None = None) -> bool:
        """Waits until all that was begun has ended; whether it has after `limit_s` (None: as long as it takes, for nothing can be
        destroyed before)."""
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(limit_s)
        return not any(thread.is_alive() for thread in threads)


def nccl_backends(groups: Sequence[dist.ProcessGroup]) -> list[Any]:
    """Backends of those groups that have one."""
    if not dist.is_nccl_available():
        return []
    found = []
    for group in groups:
        with contextlib.suppress(RuntimeError):  # none for this device
            backend: Any = group._get_backend(torch.device("cuda"))
            if isinstance(backend, dist.ProcessGroupNCCL):
                found.append(backend)
    return found


def _abort(backends: Sequence[Any]) -> None:
    """Aborts in one group call, the newest first: aborts one after the other can wait for each other (pytorch issue 119797)."""
    with contextlib.suppress(RuntimeError):  # what it complains about is being ended
        backends[0]._group_start()
        try:
            for backend in reversed(backends):
                backend.abort()
        finally:
            backends[0]._group_end()
