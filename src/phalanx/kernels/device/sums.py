"""Sums over tensors of a list, one launch each and one in the end: of squares, and checksums.

Must never change: how a tensor is cut follows from its size alone, so its sum has the same bits on every card.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.kernels.device.launch import launch, warps_of

BLOCK = 1024
"""Elements that a program takes at once."""
PARTS = 1024
"""Programs that share a tensor, at most."""


def device_square_sums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """0-d fp64 sum of the squares of all elements of contiguous `tensors` of any float type, which may be none."""
    cuts = [_cut(x.numel()) for x in tensors]
    parts_P = tensors[0].new_empty(sum(parts for parts, _ in cuts), dtype=torch.float64)
    if len(parts_P):
        from phalanx.kernels.device.programs import sums as programs

        for x, (parts, tiles), own in zip(tensors, cuts, parts_P.split([n for n, _ in cuts]), strict=True):
            if parts:
                launch(
                    programs.square_parts, (parts,), x, own, x.numel(), tiles, BLOCK=BLOCK, num_warps=warps_of(BLOCK)
                )
    return parts_P.sum()


def device_checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """(n,) int64: `reference_checksum` of each of the contiguous `tensors`, all on one device."""
    totals_N = tensors[0].new_zeros(len(tensors), dtype=torch.int64)
    for x, total in zip(tensors, totals_N.split(1), strict=True):
        if x.numel():
            from phalanx.kernels.device.programs import sums as programs

            kind = {1: torch.uint8, 2: torch.int16}.get(x.element_size(), torch.int32)
            whole = x.detach().view(-1).view(kind)
            parts, tiles = _cut(whole.numel())
            launch(
                programs.add_checksum, (parts,),
                whole, total, whole.numel(), tiles, BYTES=whole.element_size(), BLOCK=BLOCK, num_warps=warps_of(BLOCK),
            )  # fmt: skip
    return totals_N


def _cut(size: int) -> tuple[int, int]:
    """Programs that share `size` elements, and how many blocks each takes."""
    blocks = -(-size // BLOCK)
    tiles = max(1, -(-blocks // PARTS))
    return -(-blocks // tiles), tiles
