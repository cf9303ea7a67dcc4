"""First product of a MoE layer over rows that are still coming: a grouped product with picked rows that waits on flags.

Must never change: rows are computed by problems in the plan's order (`plan/moe/overlap/fused/device.py`); a tile starts only when the flags that its problem
needs have reached this call's number; a row's bits do not depend on the order. Two versions: Triton (a GPU, or Triton's interpreter on a
CPU) and plain torch, which looks at the flags once and raises where the kernel would wait. Forward only; the backward pass of a layer uses the same kernel with
the other weights, transposed (`w2.transpose(1, 2)`).

Legend: R rows of the receive buffer, M rows in slot order, K depth, N columns, e local slots, J problems, F flags.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.core.errors import RunError
from phalanx.kernels.choice import Impl
from phalanx.kernels.triton.index import Arranged
from phalanx.kernels.triton.tiles import PATIENCE, TileShape, is_interpreted, product_problems, raise_problems


@dataclass(frozen=True, eq=False)
class Arrivals:
    """How a kernel learns that rows are there."""

    flags_F: torch.Tensor
    """int32, in the order of `plan/moe/overlap/fused/device.py`: stage by stage, part by part. Raised by other ranks while the kernel runs."""
    epoch_1: torch.Tensor
    """int32 (1,): number of this call. On the device, so that a captured graph counts on."""
    status_2: torch.Tensor
    """int32 (2,), see `tiles.new_status`."""


def fused_first(
    x_RK: torch.Tensor,
    w_eNK: torch.Tensor,
    order: Arranged,
    arrivals: Arrivals,
    *,
    programs: int,
    tile: TileShape | None = None,
    out_MN: torch.Tensor | None = None,
    wait: bool = True,
    patience: int = PATIENCE,
    impl: Impl = "fast",
) -> torch.Tensor:
    """`out[m] = x[entry_of_row[m]] @ w[slot of m].T`, (M, N) in the type of `x`; rows beyond `order.num_rows` are left as they are.

    `order` must have been arranged with `tile.problem_rows`. `programs`: how many thread blocks compute; the multiprocessors of the
    device less those left to communication (the division between the two, chosen at each launch). `wait = False` takes all rows for there.
    Raises `PlanError` with everything that is wrong with the operands. A flag that stays down shows in `arrivals.status_2`.
    """
    tile = TileShape() if tile is None else tile
    found = product_problems(x_RK, w_eNK, order.problems_J4, tile, name="x")
    raise_problems(found, subject="the first product")
    if programs < 1:
        raise ValueError(f"programs = {programs}: at least 1 must compute")
    if out_MN is None:
        out_MN = x_RK.new_empty(order.entry_of_row_M.shape[0], w_eNK.shape[1])
    if impl == "reference":
        return _reference(x_RK, w_eNK, order, arrivals, out_MN, wait=wait)

    from phalanx.kernels.triton.programs.first import first_kernel

    first_kernel[(programs,)](
        x_RK, x_RK.stride(0), order.entry_of_row_M, w_eNK, *w_eNK.stride(), out_MN, out_MN.stride(0),
        order.problems_J4, order.num_problems, arrivals.flags_F, arrivals.flags_F.numel(), arrivals.epoch_1, patience,
        arrivals.status_2, x_RK.shape[1], w_eNK.shape[1],
        ROW_TILES=tile.row_tiles, BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth,
        EVEN_K=x_RK.shape[1] % tile.depth == 0, BY_DEPTH=w_eNK.stride(2) == 1, WAIT=wait,
        WIDEN=is_interpreted(), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out_MN


def _reference(
    x_RK: torch.Tensor, w_eNK: torch.Tensor, order: Arranged, arrivals: Arrivals, out_MN: torch.Tensor, *, wait: bool
) -> torch.Tensor:
    """Problem by problem, on the host."""
    wide = torch.promote_types(x_RK.dtype, torch.float32)
    flags, epoch = arrivals.flags_F.tolist(), int(arrivals.epoch_1)
    for slot, first, rows, needed in order.problems_J4[: int(order.num_problems)].tolist():
        missing = [i for i in range(needed) if flags[i] < epoch]
        if wait and missing:
            raise RunError(f"rows of slot {slot} are not there: flags {missing} are below {epoch}")
        picked = x_RK[order.entry_of_row_M[first : first + rows].long()].to(wide)
        out_MN[first : first + rows] = (picked @ w_eNK[slot].T.to(wide)).to(out_MN.dtype)
    return out_MN
