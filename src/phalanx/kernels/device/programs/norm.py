"""Root-mean-square normalisation of some whole rows a program, with the addition before it; and its gradients.

Legend: R rows of a tile, H size of a row. Sums run in the wide type.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x, x_stride, delta, weight, eps, stream, scales, out, rows, width,
    ADDS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows,). `stream = x + delta`, rounded; `scales = 1 / sqrt(mean(stream^2) + eps)`; `out = stream * scale * weight`."""
    row_R1 = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    col_1H = tl.arange(0, BLOCK)[None, :]
    here_RH = (row_R1 < rows) & (col_1H < width)
    at_RH = row_R1 * width + col_1H
    x_RH = tl.load(x + row_R1 * x_stride + col_1H, mask=here_RH, other=0.0)
    if ADDS:
        delta_RH = tl.load(delta + at_RH, mask=here_RH, other=0.0)
        x_RH = (x_RH.to(WIDE) + delta_RH.to(WIDE)).to(stream.dtype.element_ty)
        tl.store(stream + at_RH, x_RH, mask=here_RH)
    x_RH = x_RH.to(WIDE)
    scale_R = tl.rsqrt(tl.sum(x_RH * x_RH, axis=1) / width + eps)
    row_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(scales + row_R, scale_R, mask=row_R < rows)
    w_1H = tl.load(weight + col_1H, mask=col_1H < width, other=0.0).to(WIDE)
    tl.store(out + at_RH, (x_RH * scale_R[:, None] * w_1H).to(out.dtype.element_ty), mask=here_RH)


@triton.jit
def norm_backward(
    x, x_stride, scales, weight, dy, d_stream, dx, dw_parts, rows, width, tiles,
    ADDS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (parts,), each of `tiles` tiles of rows. With n = x * scale: `dx = scale * (w dy - n * mean(w dy n)) + d_stream`, and each part's sum of `dy n`."""
    col_1H = tl.arange(0, BLOCK)[None, :]
    w_1H = tl.load(weight + col_1H, mask=col_1H < width, other=0.0).to(WIDE)
    dw_H = tl.zeros((BLOCK,), dtype=WIDE)
    for tile in range(0, tiles):
        row_R1 = ((tl.program_id(0).to(tl.int64) * tiles + tile) * ROWS + tl.arange(0, ROWS))[:, None]
        here_RH = (row_R1 < rows) & (col_1H < width)
        at_RH = row_R1 * width + col_1H
        scale_R1 = tl.load(scales + row_R1, mask=row_R1 < rows, other=0.0).to(WIDE)
        n_RH = tl.load(x + row_R1 * x_stride + col_1H, mask=here_RH, other=0.0).to(WIDE) * scale_R1
        dy_RH = tl.load(dy + at_RH, mask=here_RH, other=0.0).to(WIDE)
        dw_H += tl.sum(dy_RH * n_RH, axis=0)
        dn_RH = dy_RH * w_1H
        mean_R = tl.sum(dn_RH * n_RH, axis=1) / width
        dx_RH = scale_R1 * (dn_RH - n_RH * mean_R[:, None])
        if ADDS:
            dx_RH += tl.load(d_stream + at_RH, mask=here_RH, other=0.0).to(WIDE)
        tl.store(dx + at_RH, dx_RH.to(dx.dtype.element_ty), mask=here_RH)
    col_H = tl.arange(0, BLOCK)
    tl.store(dw_parts + tl.program_id(0).to(tl.int64) * width + col_H, dw_H, mask=col_H < width)


@triton.jit
def sum_parts(
    parts, out, count, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of columns,). `out` is the sum over the `count` rows of `parts`, in one fixed order."""
    col_1H = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    total_RH = tl.zeros((ROWS, BLOCK), dtype=parts.dtype.element_ty)
    for start in range(0, count, ROWS):
        row_R1 = (start + tl.arange(0, ROWS))[:, None]
        total_RH += tl.load(parts + row_R1 * width + col_1H, mask=(row_R1 < count) & (col_1H < width), other=0.0)
    col_H = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + col_H, tl.sum(total_RH, axis=0).to(out.dtype.element_ty), mask=col_H < width)
