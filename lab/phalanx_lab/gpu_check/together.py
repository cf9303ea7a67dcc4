"""A2 and C: several ranks over NCCL (gloo in the self-test), each on a card of its own where there are as many."""

from __future__ import annotations

import shutil

import torch
import torch.distributed as dist

from phalanx.kernels.triton import ArenaSpec, symmetric_arena
from phalanx.runtime.processes import StopRequest, WorldInfo, close_world, init_world
from phalanx_lab.gpu_check.cards import run_on_cards
from phalanx_lab.gpu_check.here import Here, Skipped
from phalanx_lab.gpu_check.right import compare

JOIN_S = 30.0


def check_sharing(here: Here) -> None:
    """A2.nccl: what all of stage C needs."""
    code = run_on_cards(lambda info, stop: _share(here, info, stop), ranks=2)
    here.tell("exit status of the ranks", code, most=0)


def _share(here: Here, info: WorldInfo, stop: StopRequest) -> int:
    device = init_world(info, device=here.device.type, timeout_s=JOIN_S)
    rank, total = info.rank, torch.full((1000,), float(info.rank + 1), device=device)
    dist.all_reduce(total)
    sizes = [[1, 3], [0, 2]]  # rows from each rank to each
    sent = torch.arange(sum(sizes[rank]), device=device, dtype=torch.float32) + 10 * rank
    coming = [row[rank] for row in sizes]
    got = torch.full((sum(coming),), torch.nan, device=device)
    dist.all_to_all_single(got, sent, coming, sizes[rank])
    want = [[0.0], [1.0, 2.0, 3.0, 10.0, 11.0]][rank]
    here.tell(f"all-reduce wrong, rank {rank}", int((total != 3).sum()), most=0)
    here.tell(f"all-to-all wrong, rank {rank}", int(got.cpu().tolist() != want), most=0)
    close_world()
    return 0


def check_symmetric(here: Here) -> None:
    """A2.symmetric: whether two processes can write into each other's memory on one card (of fused kernels, stage C), and whether MPS is there. Both are recorded; a no is no failure."""
    here.tell("nvidia-cuda-mps-control", shutil.which("nvidia-cuda-mps-control") or "is not there")
    here.needs_gpu("symmetric memory")
    code = run_on_cards(lambda info, stop: _write_into_other(here, info), ranks=2)
    here.tell("exit status of the ranks", code)


def _write_into_other(here: Here, info: WorldInfo) -> int:
    device = init_world(info, device=here.device.type, timeout_s=JOIN_S)
    dist.all_reduce(torch.ones(1, device=device))  # makes the communicator
    try:
        memory = symmetric_arena(
            ArenaSpec(ranks=2, capacity=64, columns=128, dtype=torch.float32), dist.group.WORLD, device
        )
        memory.peers()[1 - info.rank].received_PCH.fill_(info.rank + 1)
        torch.cuda.synchronize()
        dist.all_reduce(torch.ones(1, device=device))
        wrong = int((memory.received_PCH != 2 - info.rank).sum())
        here.tell(f"symmetric memory, rank {info.rank}", "yes" if not wrong else f"no: {wrong} elements are others")
    except Exception as error:
        here.tell(f"symmetric memory, rank {info.rank}", f"no: {type(error).__name__}: {str(error)[:300]}")
        return 1  # ends the other rank, should it wait
    close_world()
    return 0


def check_two(here: Here) -> None:
    """C1.two."""
    compare(here, world=2, most_cases=here.pick(20, 2))


def check_four(here: Here) -> None:
    """C1.four."""
    compare(here, world=4, most_cases=here.pick(12, 1))


def check_eight(here: Here) -> None:
    """C1.eight: whole nodes only, for one card would be full of contexts."""
    if here.on_gpu and torch.cuda.device_count() < 8:
        raise Skipped(f"needs 8 GPUs, and this machine has {torch.cuda.device_count()}")
    compare(here, world=8, most_cases=here.pick(12, 1))
