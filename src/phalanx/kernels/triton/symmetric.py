"""Memory that the ranks of a group write into for each other: two buffers and their flags, cut out of one allocation on each rank.

    received_PCH   entries that come to this rank, a place for each source: written by the sources (send_entries) or a copy engine
    returned_PCH   partial sums of this rank's tokens, a place for each rank that computed with them: written by the second product there
    arrived_F      one flag for each (stage, part) of `received`
    done_F         one flag for each (rank, block of columns) of `returned`

Two makers of the same thing: `virtual_arenas` of the lab puts all ranks into one process on one device (a CPU under Triton's interpreter, or one GPU, where copies on a side
stream stand in for the links); `symmetric_arena` shares memory between the processes of a group through `torch.distributed._symmetric_memory`,
which torch calls alpha, so all use of it is in that function. Not yet run between GPUs.

The flags are memory of our own and not the signal pad of the handle: all groups and torch's own operations share that pad (pytorch #192581). Flags hold call numbers
(epochs) that only grow. The number is a tensor on the device, so that a captured graph counts on at every replay.

No barrier stands between calls: a rank that has its results back knows that every rank has read what it sent (docs/explanation/overlap-gpu.md).

Legend: P ranks, C entries of a source (capacity), H columns, F flags.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.core.errors import PlanError, Problem, RunError, first_line, raise_if
from phalanx.kernels.triton.tiles import new_status
from phalanx.plan.moe.overlap.fused import part_places

ALIGNMENT = 256
"""Bytes: regions begin where any load is aligned."""


@dataclass(frozen=True, kw_only=True)
class ArenaSpec:
    """Sizes, the same on all ranks."""

    ranks: int
    capacity: int
    columns: int
    dtype: torch.dtype
    parts: int = 1
    """Flags for each source's entries."""
    blocks: int = 1
    """Number of blocks of columns on the way back."""

    def __post_init__(self) -> None:
        names = ("ranks", "capacity", "columns", "parts", "blocks")
        found = [
            Problem(where=f"arena.{n}", value=getattr(self, n), rule="must be at least 1")
            for n in names
            if getattr(self, n) < 1
        ]
        if not found and self.parts > self.capacity:
            hint = f"at most {self.capacity}"
            found.append(Problem(where="arena.parts", value=self.parts, rule="more parts than entries", hint=hint))
        if not found and self.blocks > self.columns:
            hint = f"at most {self.columns}"
            found.append(Problem(where="arena.blocks", value=self.blocks, rule="more blocks than columns", hint=hint))
        raise_if(found, PlanError, subject="the shared memory of a group")

    @property
    def block_columns(self) -> int:
        return math.ceil(self.columns / self.blocks)

    def regions(self) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        """Name -> (first byte, shape, type)."""
        buffer = (self.ranks, self.capacity, self.columns)
        wanted = {
            "received_PCH": (buffer, self.dtype),
            "returned_PCH": (buffer, self.dtype),
            "arrived_F": ((self.ranks * self.parts,), torch.int32),
            "done_F": ((self.ranks * self.blocks,), torch.int32),
        }
        out, at = {}, 0
        for name, (shape, dtype) in wanted.items():
            out[name] = (at, shape, dtype)
            at += math.ceil(math.prod(shape) * dtype.itemsize / ALIGNMENT) * ALIGNMENT
        return out

    @property
    def num_bytes(self) -> int:
        first, shape, dtype = list(self.regions().values())[-1]
        return math.ceil((first + math.prod(shape) * dtype.itemsize) / ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class RankMemory:
    """One rank's part as tensors of this process: its own, or a peer's that is mapped here."""

    rank: int
    received_PCH: torch.Tensor
    returned_PCH: torch.Tensor
    arrived_F: torch.Tensor
    done_F: torch.Tensor


class SymmetricMemory:
    """What one rank sees of the memory of all. Tables hold the address of a region on each rank (int64), for kernels."""

    def __init__(self, spec: ArenaSpec, rank: int, whole: Sequence[torch.Tensor]) -> None:
        """`whole`: every rank's allocation as uint8 of at least `spec.num_bytes`, as this process sees it."""
        self.spec, self.rank = spec, rank
        self._memory = [_cut(spec, i, x) for i, x in enumerate(whole)]
        own = self._memory[rank]
        self.received_PCH, self.returned_PCH, self.arrived_F, self.done_F = (
            own.received_PCH,
            own.returned_PCH,
            own.arrived_F,
            own.done_F,
        )
        device = own.done_F.device
        self.received_table_P, self.returned_table_P, self.arrived_table_P, self.done_table_P = (
            torch.tensor([getattr(m, name).data_ptr() for m in self._memory], dtype=torch.int64, device=device)
            for name in spec.regions()
        )
        self.epoch_1 = torch.zeros(1, dtype=torch.int32, device=device)
        self.status_2 = new_status(device)

    def peers(self) -> list[RankMemory]:
        """All ranks, this one included."""
        return self._memory

    def next_call(self) -> None:
        """Begin the next call. On the current stream, before anything of that call, on every rank."""
        self.epoch_1.add_(1)

    def copy_part(self, packed_PCH: torch.Tensor, stage: int, part: int) -> None:
        """Copy one part of the entries to the rank that expects this one at `stage`, then its flag, in the order of the current stream.

        The producer for copy engines: no program of ours takes part. All places of the part travel, filled or not, since only the
        device knows how many are filled. `packed_PCH`: entries by receiver.
        """
        peer = self._memory[(self.rank - stage) % self.spec.ranks]
        size = part_places(self.spec.capacity, self.spec.parts)
        places = slice(part * size, min((part + 1) * size, self.spec.capacity))
        peer.received_PCH[self.rank, places].copy_(packed_PCH[peer.rank, places], non_blocking=True)
        flag = stage * self.spec.parts + part
        peer.arrived_F[flag : flag + 1].copy_(self.epoch_1, non_blocking=True)


def _cut(spec: ArenaSpec, rank: int, whole: torch.Tensor) -> RankMemory:
    views = {}
    for name, (first, shape, dtype) in spec.regions().items():
        views[name] = whole[first : first + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
    return RankMemory(rank, **views)


def symmetric_arena(spec: ArenaSpec, group: Any, device: torch.device, *, symm_mem: Any = None) -> SymmetricMemory:
    """This rank's arena in a process group whose devices reach each other's memory. Collective.

    `symm_mem` stands in for `torch.distributed._symmetric_memory` (tests). Raises `RunError` on devices that torch cannot share.
    """
    if symm_mem is None:
        if device.type != "cuda":
            raise RunError(f"symmetric memory needs CUDA devices, not {device.type}; ranks of one process need none")
        import torch.distributed._symmetric_memory as symm_mem
    try:
        own = symm_mem.empty(spec.num_bytes, dtype=torch.uint8, device=device)
        handle = symm_mem.rendezvous(own, group)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as err:
        text = (
            "the GPUs of this group do not share memory, as fused kernels need it (NVLink, or peers on one PCIe switch)"
        )
        raise RunError(f'{text}: {first_line(err)}; use dispatch.overlap = "serial" or "fine"') from err
    if handle.world_size != spec.ranks:
        raise RunError(f"the group has {handle.world_size} ranks, the plan {spec.ranks}")
    whole = [
        own if rank == handle.rank else handle.get_buffer(rank, (spec.num_bytes,), torch.uint8, 0)
        for rank in range(spec.ranks)
    ]
    own.zero_()
    handle.barrier()  # no flag may be raised before all are down; once, not once a call
    return SymmetricMemory(spec, handle.rank, whole)
