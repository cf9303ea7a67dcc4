"""A layer of kernels that wait on flags, for all ranks of one process, one after the other: how it is checked on a CPU and on one GPU, against `reference_layer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.kernels.triton.index import SendIndex
from phalanx.kernels.triton.layer import ArrivalCounts, LaunchShape, begin, compute, finish, pack_weights, route, send
from phalanx.kernels.triton.symmetric import ArenaSpec, SymmetricMemory
from phalanx.kernels.triton.tiles import check_status


def virtual_arenas(spec: ArenaSpec, device: torch.device | str = "cpu") -> list[SymmetricMemory]:
    """One arena for each of `spec.ranks` ranks that live in this process."""
    whole = [torch.zeros(spec.num_bytes, dtype=torch.uint8, device=device) for _ in range(spec.ranks)]
    return [SymmetricMemory(spec, rank, whole) for rank in range(spec.ranks)]


def tell_virtual(indices: Sequence[SendIndex], weights: Sequence[torch.Tensor]) -> list[ArrivalCounts]:
    """What an all-to-all of fixed size does between processes, for ranks of one process."""
    packed = [pack_weights(w, to) for w, to in zip(weights, indices, strict=True)]
    return [
        ArrivalCounts(
            torch.stack([to.slots_PCK[rank] for to in indices]),
            torch.stack([p[rank] for p in packed]),
            torch.stack([to.counts_P[rank] for to in indices]),
        )
        for rank in range(len(indices))
    ]


@dataclass(frozen=True, eq=False)
class VirtualLayer:
    """Operands of one layer on all ranks of one process. Lists by rank."""

    x: Sequence[torch.Tensor]
    slots: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    w13: Sequence[torch.Tensor]
    w2: Sequence[torch.Tensor]


def enqueue_virtual(
    layer: VirtualLayer, arenas: Sequence[SymmetricMemory], *, shape: LaunchShape
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The layer's output on each rank, and what found no room. Reads nothing on the host, so all of it can be captured in a CUDA graph."""
    spec = arenas[0].spec
    indices = [route(s, shape=shape, spec=spec) for s in layer.slots]
    told = tell_virtual(indices, layer.weights)
    orders = [begin(t, arena, shape=shape) for t, arena in zip(told, arenas, strict=True)]
    for arena in arenas:
        arena.next_call()
    for rank, arena in enumerate(arenas):
        send(layer.x[rank], indices[rank], arena, shape=shape)
    for rank, arena in enumerate(arenas):
        compute(arena, told[rank], orders[rank], layer.w13[rank], layer.w2[rank], shape=shape)
    out = [finish(to, arena, shape=shape) for to, arena in zip(indices, arenas, strict=True)]
    return out, [to.overflow for to in indices] + [order.overflow for order in orders]


def run_virtual(layer: VirtualLayer, arenas: Sequence[SymmetricMemory], *, shape: LaunchShape) -> list[torch.Tensor]:
    """The layer's output on each rank. Raises `RunError` if anything found no room or a flag never came."""
    out, overflows = enqueue_virtual(layer, arenas, shape=shape)
    for arena in arenas:
        check_status(arena.status_2, *overflows)
    return out
