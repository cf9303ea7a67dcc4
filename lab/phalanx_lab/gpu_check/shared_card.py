"""Several ranks on one card: NCCL refuses two ranks of a host on one device, so each rank is told to be a host of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from phalanx.runtime.processes import StopRequest, WorldInfo, run_local

APART = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_NCHANNELS": "2",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}
"""Messages go over sockets; symmetric memory may lie on the same device."""
RankMain = Callable[[WorldInfo, StopRequest], int]


def run_shared(main: RankMain, *, ranks: int, threads: int) -> int:
    """As `run_local`, all ranks on the first device. Call it before any call of CUDA."""

    def apart(info: WorldInfo, stop: StopRequest) -> int:
        os.environ.update(APART, NCCL_HOSTID=f"rank-{info.rank}")
        return main(replace(info, local_rank=0, local_world=1), stop)

    return run_local(apart, ranks=ranks, threads=threads)
