"""Forward and backward pass of the rows of one expert on a CPU, in one thread: functions that TorchScript compiles (`scripted.py`), and the memory that they work in.

Legend: H hidden, f expert width, F = 2f, r rows of the slot, m with the padding: zeros, so that it adds nothing to any product; b rows of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phalanx.kernels.cpu.shapes import spaced

BLOCK_ROWS = 256
"""Rows that elementwise operations take through all their passes while they are in a core's cache."""
SMALL = 1e-6
"""Row weights below this are not divided by."""
DOT_ROWS = 16
"""Row products are taken as the diagonals of small square products, which accumulate in fp32 without a temporary."""


class Scratch(NamedTuple):
    """What one lane needs for one piece; allocated by the caller's thread, used again for every piece."""

    x_mH: torch.Tensor
    y_mH: torch.Tensor
    h_mf: torch.Tensor
    gate_up_mF: torch.Tensor


class BackwardScratch(NamedTuple):
    dy_mH: torch.Tensor
    dh_mf: torch.Tensor
    d_gate_up_mF: torch.Tensor
    silu_bf: torch.Tensor
    t_bf: torch.Tensor
    dots_m: torch.Tensor


def forward_scratch(like: torch.Tensor, rows: int, width: int) -> Scratch:
    hidden = like.shape[1]
    x_mH, y_mH, gate_up_mF = (spaced(rows, columns, like) for columns in (hidden, hidden, 2 * width))
    return Scratch(x_mH, y_mH, like.new_empty(rows, width), gate_up_mF)


def backward_scratch(like: torch.Tensor, rows: int, width: int) -> BackwardScratch:
    silu_bf, t_bf = like.new_empty(2, min(rows, BLOCK_ROWS), width)
    dy_mH, d_gate_up_mF = spaced(rows, like.shape[1], like), spaced(rows, 2 * width, like)
    dots_m = like.new_empty(rows, dtype=torch.promote_types(like.dtype, torch.float32))
    return BackwardScratch(dy_mH, like.new_empty(rows, width), d_gate_up_mF, silu_bf, t_bf, dots_m)


def forward_piece(
    x_rH: torch.Tensor,
    w13_FH: torch.Tensor,
    w2_Hf: torch.Tensor,
    scale_r1: torch.Tensor | None,
    gate_up_mF: torch.Tensor,
    y_rH: torch.Tensor,
    s: Scratch,
    block: int,
) -> None:
    """Scripted. `r` rows of the slot, `m` with the padding: zeros, so that it adds nothing to any product."""
    h_mf = s.h_mf[: gate_up_mF.shape[0]]
    first_projection(x_rH, w13_FH, gate_up_mF, s)
    activation(gate_up_mF, h_mf, block)
    second_projection(h_mf, w2_Hf, scale_r1, y_rH, s)


def activation(gate_up_mF: torch.Tensor, h_mf: torch.Tensor, block: int) -> None:
    """Scripted."""
    size, width = h_mf.shape[0], h_mf.shape[1]
    for start in range(0, size, block):
        gate_up_bF, h_bf = gate_up_mF[start : start + block], h_mf[start : start + block]
        torch.ops.aten.silu(gate_up_bF[:, :width], out=h_bf)
        h_bf.mul_(gate_up_bF[:, width:])


def first_projection(x_rH: torch.Tensor, w13_FH: torch.Tensor, gate_up_mF: torch.Tensor, s: Scratch) -> None:
    """Scripted."""
    rows, size = x_rH.shape[0], gate_up_mF.shape[0]
    s.x_mH[:rows].copy_(x_rH)
    s.x_mH[rows:size].zero_()
    torch.mm(s.x_mH[:size], w13_FH.t(), out=gate_up_mF)


def second_projection(
    h_mf: torch.Tensor, w2_Hf: torch.Tensor, scale_r1: torch.Tensor | None, y_rH: torch.Tensor, s: Scratch
) -> None:
    """Scripted."""
    y_mH = s.y_mH[: h_mf.shape[0]]
    torch.mm(h_mf, w2_Hf.t(), out=y_mH)
    scaled_rows(y_mH, scale_r1, y_rH)


def scaled_rows(y_mH: torch.Tensor, scale_r1: torch.Tensor | None, y_rH: torch.Tensor) -> None:
    """Scripted."""
    rows = y_rH.shape[0]
    if scale_r1 is None:
        y_rH.copy_(y_mH[:rows])
    else:
        torch.mul(y_mH[:rows], scale_r1, out=y_rH)


def backward_piece(
    operands: list[torch.Tensor],
    scale_r1: torch.Tensor | None,
    dx_rH: torch.Tensor,
    d_scale_r: torch.Tensor | None,
    d_weights: list[torch.Tensor],
    s: Scratch,
    t: BackwardScratch,
    block: int,
) -> None:
    """Scripted. `operands`: x and dy (r, H), w13, w2, gate_up (m, F); `d_weights`: those of w13 and w2, if wanted."""
    gradient_of_h(operands, scale_r1, s, t)
    dots_m = gradient_of_activation(operands[4], d_scale_r is not None, s, t, block)
    gradients_of_piece(operands, scale_r1, dots_m, dx_rH, d_scale_r, d_weights, s, t)


def gradient_of_activation(
    gate_up_mF: torch.Tensor, dots: bool, s: Scratch, t: BackwardScratch, block: int
) -> torch.Tensor:
    """Scripted: `h` again and the gradient of gate and up; products of the rows of `h` and its gradient, if wanted."""
    size, width = gate_up_mF.shape[0], gate_up_mF.shape[1] // 2
    h_mf, dh_mf, d_gate_up_mF = s.h_mf[:size], t.dh_mf[:size], t.d_gate_up_mF[:size]
    dots_m = torch.empty([size if dots else 0], dtype=dh_mf.dtype)
    for start in range(0, size, block):
        stop = min(start + block, size)
        gate_bf, up_bf = gate_up_mF[start:stop, :width], gate_up_mF[start:stop, width:]
        dh_bf, h_bf, silu_bf, t_bf = (
            dh_mf[start:stop],
            h_mf[start:stop],
            t.silu_bf[: stop - start],
            t.t_bf[: stop - start],
        )
        torch.ops.aten.silu(gate_bf, out=silu_bf)
        torch.mul(silu_bf, up_bf, out=h_bf)
        if dots:
            dots_m[start:stop].copy_(_row_dots(dh_bf, h_bf))
        torch.mul(dh_bf, silu_bf, out=d_gate_up_mF[start:stop, width:])
        torch.mul(dh_bf, up_bf, out=t_bf)
        torch.ops.aten.silu_backward(t_bf, gate_bf, grad_input=d_gate_up_mF[start:stop, :width])
    return dots_m


def gradient_of_h(operands: list[torch.Tensor], scale_r1: torch.Tensor | None, s: Scratch, t: BackwardScratch) -> None:
    """Scripted: into `t.dh_mf`."""
    x_rH, dy_rH, w2_Hf = operands[0], operands[1], operands[3]
    rows, size = x_rH.shape[0], operands[4].shape[0]
    s.x_mH[:rows].copy_(x_rH)
    s.x_mH[rows:size].zero_()
    if scale_r1 is None:
        t.dy_mH[:rows].copy_(dy_rH)
    else:
        torch.mul(dy_rH, scale_r1, out=t.dy_mH[:rows])
    t.dy_mH[rows:size].zero_()
    torch.mm(t.dy_mH[:size], w2_Hf, out=t.dh_mf[:size])


def gradients_of_piece(
    operands: list[torch.Tensor],
    scale_r1: torch.Tensor | None,
    dots_m: torch.Tensor,
    dx_rH: torch.Tensor,
    d_scale_r: torch.Tensor | None,
    d_weights: list[torch.Tensor],
    s: Scratch,
    t: BackwardScratch,
) -> None:
    """Scripted: of the rows, their weights and the experts' weights, once `h` and the gradient of gate and up are there."""
    dy_rH, w13_FH, w2_Hf = operands[1], operands[2], operands[3]
    rows, size = dy_rH.shape[0], operands[4].shape[0]
    h_mf, d_gate_up_mF = s.h_mf[:size], t.d_gate_up_mF[:size]
    if d_scale_r is not None and scale_r1 is not None:
        scale_gradient(dots_m[:rows], scale_r1.squeeze(1), dy_rH, w2_Hf, h_mf, d_scale_r, 1e-6)
    if len(d_weights) > 0:
        torch.mm(t.dy_mH[:size].t(), h_mf, out=d_weights[1])
        torch.mm(d_gate_up_mF.t(), s.x_mH[:size], out=d_weights[0])
    torch.mm(d_gate_up_mF, w13_FH, out=s.y_mH[:size])
    dx_rH.copy_(s.y_mH[:rows])


def scale_gradient(
    dots_r: torch.Tensor,
    scale_r: torch.Tensor,
    dy_rH: torch.Tensor,
    w2_Hf: torch.Tensor,
    h_mf: torch.Tensor,
    d_scale_r: torch.Tensor,
    small: float,
) -> None:
    """Scripted. `dots` have the row weight in them already: it is divided out again, except where it is too small for that."""
    torch.div(dots_r.to(d_scale_r.dtype), scale_r.to(d_scale_r.dtype), out=d_scale_r)
    lost = (scale_r.abs() < small).nonzero().squeeze(1)
    if lost.numel() > 0:
        dh_lf = torch.mm(dy_rH.index_select(0, lost), w2_Hf).to(d_scale_r.dtype)
        d_scale_r.index_copy_(0, lost, (dh_lf * h_mf.index_select(0, lost).to(d_scale_r.dtype)).sum(-1))


def _row_dots(a_mf: torch.Tensor, b_mf: torch.Tensor, dots: int = DOT_ROWS) -> torch.Tensor:
    """(m,) dot products of equal rows."""
    if a_mf.dtype != torch.bfloat16 or a_mf.shape[0] % dots != 0:
        return (a_mf * b_mf).sum(-1)
    a, b = a_mf.view(-1, dots, a_mf.shape[1]), b_mf.view(-1, dots, b_mf.shape[1])
    return torch.bmm(a, b.transpose(1, 2)).diagonal(dim1=1, dim2=2).reshape(-1)
