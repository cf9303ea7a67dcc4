"""The cards of several ranks: each has its own where there are as many. Else all have the first one; NCCL refuses two ranks of a host on one device, so each is told to be a host of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

import torch

from phalanx.runtime.membership import supervisor
from phalanx.runtime.processes import StopRequest, WorldInfo, own_device, run_local
from phalanx.train.recovery import run as elastic_run

APART = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "2",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Of ranks on one card: messages go over sockets; symmetric memory may lie on the same device."""
RankMain = Callable[[WorldInfo, StopRequest], int]


def run_on_cards(main: RankMain, *, ranks: int, threads: int = 1) -> int:
    """As `run_local`. Call it before any call of CUDA."""
    return run_local(lambda info, stop: main(own_card(info), stop), ranks=ranks, threads=threads)


def own_card(info: WorldInfo) -> WorldInfo:
    """Where a rank is, in its own process."""
    if torch.cuda.device_count() >= info.local_world:
        return info
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    os.environ.update(APART, NCCL_HOSTID=f"rank-{info.rank}")
    return replace(info, local_rank=0, local_world=1)


@contextlib.contextmanager
def on_cards() -> Iterator[None]:
    """Inside, the same holds for the ranks of an elastic run; its supervisor is told nothing else than on a machine with a device for each."""

    def device_of(info: WorldInfo, device: str) -> torch.device:
        return own_device(own_card(info), device)

    with (
        mock.patch.object(supervisor, "own_device", device_of),
        mock.patch.object(elastic_run, "own_device", device_of),
    ):
        yield
