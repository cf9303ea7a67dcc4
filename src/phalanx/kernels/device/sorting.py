"""A stable sort of the experts of routed pairs, in two launches, which also say where each expert's rows end; for counts of several sources in one. The host waits for nothing.

Legend: N pairs, E experts, P programs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from phalanx.kernels.device.launch import Kernel, block_of

TILE = 4096
"""Comparisons that a program makes at once."""
PROGRAMS = 128
"""At most: each of them reads the counts of all."""
SUMMED = 16
"""Rows of counts that a program adds up at once."""
ZEROS = 4096
"""Numbers of a group that a program sets to zero at once."""
PARTS = 32
"""Programs that share a group."""


@dataclass(frozen=True, eq=False)
class SortedKeys:
    """Each number's place among all, smaller ones first, equal ones in their order. Numbers from `values` on come last and have no place."""

    counts_E: torch.Tensor | None
    """int64; None: not made."""
    order_N: torch.Tensor
    """int64; what is behind the numbers that have a place is not written."""
    places_N: torch.Tensor | None
    """int64, -1 where there is none; None: not made."""
    tokens_N: torch.Tensor | None
    """int64 `order_N // copies`; None: not made."""
    ends_E: torch.Tensor | None = None
    """int32 place behind the last one of each; None: not made."""


def sort_keys(keys_N: torch.Tensor, values: int, *, copies: int = 1) -> SortedKeys:
    """Of int64 `keys_N` (contiguous, not negative), `copies` for each token, one after the other."""
    size = keys_N.shape[0]
    order_N, places_N, tokens_N = torch.empty((3, size), dtype=torch.int64, device=keys_N.device).unbind()
    count, place, block = _sorting(values, copies, TILE, SUMMED)
    tiles = max(1, -(-size // (block * PROGRAMS)))
    programs = -(-size // (block * tiles))
    counts_PE = torch.empty((programs, values), dtype=torch.int32, device=keys_N.device)
    make = torch.empty if size else torch.zeros
    counts_E, ends_E = (make(values, dtype=dtype, device=keys_N.device) for dtype in (torch.int64, torch.int32))
    if size:
        count((programs,), keys_N, counts_PE, size, values, tiles)
        place(
            (programs,), keys_N, counts_PE, order_N, places_N, tokens_N, counts_E, ends_E, size, values, tiles, programs
        )
    return SortedKeys(counts_E, order_N, places_N, tokens_N, ends_E)


@cache
def _sorting(values: int, copies: int, most: int, summed: int) -> tuple[Kernel, Kernel, int]:
    """The two kernels, for tiles of `most` comparisons, and how many numbers such a tile has."""
    from phalanx.kernels.device.programs import sorting as own

    wide = block_of(values, 1 << 14)
    shape = {"BLOCK": max(1, min(256, most // wide)), "E2": wide}
    rows = max(1, min(summed, most // wide))
    return Kernel(own.count_values, **shape), Kernel(own.place_values, COPIES=copies, **shape, P2=rows), shape["BLOCK"]


def ends_of_groups(counts_PX: torch.Tensor, first: int, groups: int) -> torch.Tensor:
    """(groups,) int32 row behind the last one of each group, of int64 counts by source (contiguous) whose columns for these groups begin at `first`."""
    sources, stride = counts_PX.shape
    ends_e = torch.empty(groups, dtype=torch.int32, device=counts_PX.device)
    _adding(groups, TILE, SUMMED)((1,), counts_PX.narrow(1, first, groups), ends_e, sources, stride, groups)
    return ends_e


@cache
def _adding(groups: int, most: int, summed: int) -> Kernel:
    from phalanx.kernels.device.programs import sorting as own

    wide = block_of(groups, 1 << 14)
    return Kernel(own.ends_of_groups, E2=wide, P2=max(1, min(summed, most // wide)))


def zero_empty_groups(ends_e: torch.Tensor, a_eX: torch.Tensor, b_eX: torch.Tensor) -> None:
    """Set both (contiguous, of one type) to zero where a group has no row, by int32 `ends_e` of the device alone."""
    groups = len(ends_e)
    _emptying(PARTS, ZEROS)((groups, PARTS), ends_e, a_eX, b_eX, a_eX.numel() // groups, b_eX.numel() // groups)


@cache
def _emptying(parts: int, block: int) -> Kernel:
    from phalanx.kernels.device.programs import sorting as own

    return Kernel(own.zero_empty_groups, PARTS=parts, BLOCK=block, num_warps=8)
