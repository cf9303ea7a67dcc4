"""One tile of a product whose left rows are picked by index, and sums of picked rows in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product_tile(
    x, row_B, x_stride, w, col_N, last_col, w_col_stride, w_depth_stride, depth,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    BY_DEPTH: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """fp32 (BLOCK_M, BLOCK_N): rows `row_B` of `x` times columns `col_N` of `w`.

    The sum runs over `depth` in steps of BLOCK_K from the start, whatever the other rows are: a row's bits do not depend on its tile. Row
    numbers stay in registers through all steps. WIDEN: multiply in fp32 (for Triton's interpreter, which takes bf16 for integers in a product).

    What columns from `last_col` on give is not to be used. BY_DEPTH: weights lie together along the depth, and such a column is read as the last one; else they lie together along the
    columns, where only a mask leaves Triton its loads of 16 bytes. Places of weights are 32-bit numbers from a base that moves: half the registers of pointers.
    """
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x + row_B[:, None].to(tl.int64) * x_stride + k[None, :]
    is_col_N = (col_N < last_col) | BY_DEPTH
    if BY_DEPTH:
        col_N = tl.minimum(col_N, last_col - 1)
    w_at = col_N[None, :] * w_col_stride + k[:, None] * w_depth_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for done in range(0, depth, BLOCK_K):
        if EVEN_K:
            x_MK = tl.load(x_ptrs)
            w_KN = tl.load(w + w_at, mask=is_col_N[None, :], other=0.0)
        else:
            x_MK = tl.load(x_ptrs, mask=k[None, :] < depth - done, other=0.0)
            w_KN = tl.load(w + w_at, mask=is_col_N[None, :] & (k[:, None] < depth - done), other=0.0)
        if WIDEN:
            x_MK = x_MK.to(tl.float32)
            w_KN = w_KN.to(tl.float32)
        total = tl.dot(x_MK, w_KN, total, input_precision="ieee")
        x_ptrs += BLOCK_K
        w += BLOCK_K * w_depth_stride
    return total


@triton.jit
def sum_rows(
    source, source_stride, index, copies, entry_E, is_entry_E, col_C, is_col_C,
    COPIES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """fp32 (BLOCK_E, BLOCK_C): for each entry the rows `index[entry, 0..copies)` of `source` added one after the other; a row of -1 adds nothing.

    COPIES is `copies` rounded up to what the loop is unrolled to.
    """
    total = tl.zeros((BLOCK_E, BLOCK_C), dtype=tl.float32)
    for j in tl.static_range(COPIES):
        row_E = tl.load(index + entry_E.to(tl.int64) * copies + j, mask=is_entry_E & (j < copies), other=-1)
        ptrs = source + row_E[:, None].to(tl.int64) * source_stride + col_C[None, :]
        here = (row_E >= 0)[:, None] & is_col_C[None, :]
        total += tl.load(ptrs, mask=here, other=0.0).to(tl.float32)
    return total
