"""First product of a MoE layer, begun while rows are still coming: each program waits for the flags that its next problem needs, then computes a tile.

Grid: at most one program for each multiprocessor that is not left to communication. All programs are resident at once, and those that bring the rows need
none of their room, so waiting cannot keep out what it waits for.

Tile numbers run through the columns of a problem with its row tiles innermost: programs at work at the same time share columns of the weights
and rows of the problem in the second-level cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.triton.programs.flags import wait_flags
from phalanx.kernels.triton.programs.product import product_tile


@triton.jit
def first_kernel(
    x, x_stride, entry_of_row, w, w_slot_stride, w_col_stride, w_depth_stride, y, y_stride,
    problems, num_problems, flags, num_flags, epoch_at, patience, status, depth, columns,
    ROW_TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, BY_DEPTH: tl.constexpr, WAIT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """`y[m] = x[entry_of_row[m]] @ w[slot of m].T` for the rows of all problems. WAIT = False is the same product without looking at flags."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(epoch_at)
    tiles_of_problem = ROW_TILES * tl.cdiv(columns, BLOCK_N)
    arrived = 0
    for tile in range(program, tl.load(num_problems) * tiles_of_problem, programs):
        problem = problems + (tile // tiles_of_problem) * 4
        slot = tl.load(problem)
        first = tl.load(problem + 1)
        rows = tl.load(problem + 2)
        needed = tl.load(problem + 3)
        if WAIT:
            wait_flags(flags, arrived, needed, epoch, patience, status)
            arrived = tl.maximum(arrived, needed)
        row0 = (tile % ROW_TILES) * BLOCK_M
        if row0 < rows:
            row_M = row0 + tl.arange(0, BLOCK_M)
            entry_M = tl.load(entry_of_row + first + tl.minimum(row_M, rows - 1))
            col_N = (tile % tiles_of_problem) // ROW_TILES * BLOCK_N + tl.arange(0, BLOCK_N)
            w_slot = w + slot.to(tl.int64) * w_slot_stride
            total_MN = product_tile(
                x, entry_M, x_stride, w_slot, col_N, columns, w_col_stride, w_depth_stride, depth,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, BY_DEPTH, WIDEN,
            )  # fmt: skip
            y_ptrs = y + (first + row_M).to(tl.int64)[:, None] * y_stride + col_N[None, :]
            here = (row_M < rows)[:, None] & (col_N < columns)[None, :]
            tl.store(y_ptrs, total_MN.to(y.dtype.element_ty), mask=here)
    if WAIT:
        # Also sources that sent nothing must have begun this call: then they are done with what they received in the last one,
        # and this rank may write there. That is why no barrier stands between calls.
        wait_flags(flags, arrived, num_flags, epoch, patience, status)
