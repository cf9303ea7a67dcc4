"""Several ranks on one card: NCCL refuses two ranks of a host on one device, so each rank is told to be a host of its own."""

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
    "NCCL_DEBUG": "WARN",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Messages go over sockets; symmetric memory may lie on the same device."""
RankMain = Callable[[WorldInfo, StopRequest], int]


def run_shared(main: RankMain, *, ranks: int, threads: int) -> int:
    """As `run_local`, all ranks on the first device. Call it before any call of CUDA."""
    return run_local(lambda info, stop: main(_apart(info), stop), ranks=ranks, threads=threads)


def _apart(info: WorldInfo) -> WorldInfo:
    os.environ.update(APART, NCCL_HOSTID=f"rank-{info.rank}")
    return replace(info, local_rank=0, local_world=1)


@contextlib.contextmanager
def sharing() -> Iterator[None]:
    """Inside, all ranks of an elastic run have the first device; its supervisor is told nothing else than on a machine with a device for each."""

    def first_device(info: WorldInfo, device: str) -> torch.device:
        return own_device(_apart(info), device)

    with (
        mock.patch.object(supervisor, "own_device", first_device),
        mock.patch.object(elastic_run, "own_device", first_device),
    ):
        yield
