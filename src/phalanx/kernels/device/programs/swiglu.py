"""The gated activation times a row weight, one program a row (of some columns).

Legend: M rows, F width. `gate_up` is (M, 2, F), dense: the gate, then the up projection.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_forward(
    gate_up, row_weights, out, width,
    WEIGHTED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of columns). `out[m] = silu(gate) * up [* weight[m]]`, rounded once."""
    row = tl.program_id(0).to(tl.int64)
    col_F = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here_F = col_F < width
    at_F = gate_up + row * 2 * width + col_F
    gate_F = tl.load(at_F, mask=here_F, other=0.0).to(WIDE)
    up_F = tl.load(at_F + width, mask=here_F, other=0.0).to(WIDE)
    y_F = gate_F / (1.0 + tl.exp(-gate_F)) * up_F
    if WEIGHTED:
        y_F = y_F * tl.load(row_weights + row).to(WIDE)
    tl.store(out + row * width + col_F, y_F.to(out.dtype.element_ty), mask=here_F)


@triton.jit
def swiglu_backward(
    gate_up, row_weights, dy, d_gate_up, d_row_weights, y, width,
    WEIGHTED: tl.constexpr, AGAIN: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): a row's sum over its columns stays in one program, so its order is fixed. `AGAIN`: `y` is what the forward pass wrote, in its bits.

    An element is read before it is written, by the program that writes it: `d_gate_up` may be `gate_up`, and `y` may be `dy`.
    """
    row = tl.program_id(0).to(tl.int64)
    sum_F = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, width, BLOCK):
        col_F = start + tl.arange(0, BLOCK)
        here_F = col_F < width
        at_F = row * 2 * width + col_F
        gate_F = tl.load(gate_up + at_F, mask=here_F, other=0.0).to(WIDE)
        up_F = tl.load(gate_up + at_F + width, mask=here_F, other=0.0).to(WIDE)
        dy_F = tl.load(dy + row * width + col_F, mask=here_F, other=0.0).to(WIDE)
        sigmoid_F = 1.0 / (1.0 + tl.exp(-gate_F))
        silu_F = gate_F / (1.0 + tl.exp(-gate_F))
        y_F = silu_F * up_F
        if WEIGHTED:
            sum_F += dy_F * y_F
            weight = tl.load(row_weights + row).to(WIDE)
            dy_F = dy_F * weight
            y_F = y_F * weight
        if AGAIN:
            tl.store(y + row * width + col_F, y_F.to(y.dtype.element_ty), mask=here_F)
        d_gate_F = dy_F * up_F * (sigmoid_F + silu_F * (1.0 - sigmoid_F))
        tl.store(d_gate_up + at_F, d_gate_F.to(d_gate_up.dtype.element_ty), mask=here_F)
        tl.store(d_gate_up + at_F + width, (dy_F * silu_F).to(d_gate_up.dtype.element_ty), mask=here_F)
    if WEIGHTED:
        tl.store(d_row_weights + row, tl.sum(sum_F).to(d_row_weights.dtype.element_ty))
