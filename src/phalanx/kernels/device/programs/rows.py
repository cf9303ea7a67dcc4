"""Rows picked by an index, and sums of picked rows. An index below zero stands for a row of zeros.

Legend: T tokens, K copies per token, H hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take_rows(x, x_stride, index, out, pairs, weights, out_weights, width, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of columns). `out[m] = x[index[m]]`; `WEIGHTED`: and `out_weights[m] = weights[pairs[m]]`."""
    row = tl.program_id(0).to(tl.int64)
    col_H = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here_H = col_H < width
    source = tl.load(index + row).to(tl.int64)
    x_H = tl.load(x + source * x_stride + col_H, mask=here_H & (source >= 0), other=0.0)
    tl.store(out + row * width + col_H, x_H, mask=here_H)
    if WEIGHTED:
        pair, is_first = tl.load(pairs + row), tl.program_id(1) == 0
        weight = tl.load(weights + pair, mask=is_first & (pair >= 0), other=0.0)
        tl.store(out_weights + row, weight, mask=is_first)


@triton.jit
def sum_rows(
    y, y_stride, index, out, numbers, out_numbers, width,
    WEIGHTED: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of columns). `out[t]` is the sum of `y[index[t, k]]`, k ascending, rounded once; `WEIGHTED`: and `out_numbers[t, k] = numbers[index[t, k]]`."""
    token = tl.program_id(0).to(tl.int64)
    col_H = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here_H = col_H < width
    total_H = tl.zeros((BLOCK,), dtype=WIDE)
    for k in tl.static_range(COPIES):
        source = tl.load(index + token * COPIES + k).to(tl.int64)
        total_H += tl.load(y + source * y_stride + col_H, mask=here_H & (source >= 0), other=0.0).to(WIDE)
        if WEIGHTED:
            is_first = tl.program_id(1) == 0
            number = tl.load(numbers + source, mask=is_first & (source >= 0), other=0.0)
            tl.store(out_numbers + token * COPIES + k, number, mask=is_first)
    tl.store(out + token * width + col_H, total_H.to(out.dtype.element_ty), mask=here_H)
