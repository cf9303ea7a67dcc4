"""`expert_pieces.py` where products are checked (`products.py`): each is, before it is used, or on the way where a compiled kernel reads it anyway."""

from __future__ import annotations

import torch

from phalanx.kernels.cpu.expert_pieces import (
    BLOCK_ROWS,
    SMALL,
    BackwardScratch,
    Scratch,
    activation,
    first_projection,
    gradient_of_activation,
    gradient_of_h,
    scale_gradient,
    scaled_rows,
)
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.products import Factors
from phalanx.kernels.cpu.scripted import scripted
from phalanx.kernels.native import CompiledRows

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def checked_forward(
    operands: Operands,
    scale_r1: torch.Tensor | None,
    y_rH: torch.Tensor,
    s: Scratch,
    native: CompiledRows | None,
    lanes: Lanes,
) -> None:
    """`forward_piece`, the same operations, each product checked before it is used. `operands`: x (r, H), w13, w2, gate_up (m, F)."""
    x_rH, w13_FH, w2_Hf, gate_up_mF = operands
    size = len(gate_up_mF)
    h_mf, y_mH = s.h_mf[:size], s.y_mH[:size]
    scripted(first_projection)(x_rH, w13_FH, gate_up_mF, s)
    seen, factors = lanes.late_look(native), (s.x_mH[:size], w13_FH.T)
    if seen is None:
        lanes.check("experts, first projection, forward", gate_up_mF, factors)
    if native is None:
        scripted(activation)(gate_up_mF, h_mf, BLOCK_ROWS)
    else:
        native.swiglu_forward(gate_up_mF, h_mf, seen=seen)
    if seen is not None:
        lanes.check("experts, first projection, forward", gate_up_mF, factors, seen=seen)
    torch.mm(h_mf, w2_Hf.T, out=y_mH)
    place = "experts, second projection, forward"
    _checked_rows(lanes, place, y_mH=y_mH, factors=(h_mf, w2_Hf.T), scale_r1=scale_r1, out_rH=y_rH)


def checked_backward(
    operands: list[torch.Tensor],
    scale_r1: torch.Tensor | None,
    dx_rH: torch.Tensor,
    d_scale_r: torch.Tensor | None,
    d_weights: list[torch.Tensor],
    s: Scratch,
    t: BackwardScratch,
    lanes: Lanes,
) -> None:
    """`backward_piece`, the same operations, each product checked before it is used."""
    x_rH, dy_rH, w13_FH, w2_Hf, gate_up_mF = operands
    rows, size, native = x_rH.shape[0], gate_up_mF.shape[0], lanes.rows_for(x_rH, dy_rH)
    x_mH, y_mH, h_mf = s.x_mH[:size], s.y_mH[:size], s.h_mf[:size]
    dy_mH, dh_mf, d_gate_up_mF, dots_m = t.dy_mH[:size], t.dh_mf[:size], t.d_gate_up_mF[:size], t.dots_m[:size]
    scripted(gradient_of_h)(operands, scale_r1, s, t)
    seen = lanes.late_look(native)
    if seen is None:
        lanes.check("experts, second projection, input gradient", dh_mf, (dy_mH, w2_Hf))
    if native is None:
        dots_m = scripted(gradient_of_activation)(gate_up_mF, d_scale_r is not None, s, t, BLOCK_ROWS)
    else:
        native.swiglu_backward(gate_up_mF, dh_mf, h_mf, d_gate_up_mF, dots_m, seen=seen)
    if seen is not None:
        lanes.check("experts, second projection, input gradient", dh_mf, (dy_mH, w2_Hf), seen=seen)
    if d_scale_r is not None and scale_r1 is not None:
        scripted(scale_gradient)(dots_m[:rows], scale_r1.squeeze(1), dy_rH, w2_Hf, h_mf, d_scale_r, SMALL)
    if d_weights:
        torch.mm(dy_mH.T, h_mf, out=d_weights[1])
        lanes.check("experts, second projection, weight gradient", d_weights[1], (dy_mH.T, h_mf))
        torch.mm(d_gate_up_mF.T, x_mH, out=d_weights[0])
        lanes.check("experts, first projection, weight gradient", d_weights[0], (d_gate_up_mF.T, x_mH))
    torch.mm(d_gate_up_mF, w13_FH, out=y_mH)
    place = "experts, first projection, input gradient"
    _checked_rows(lanes, place, y_mH=y_mH, factors=(d_gate_up_mF, w13_FH), scale_r1=None, out_rH=dx_rH)


def _checked_rows(
    lanes: Lanes,
    place: str,
    *,
    y_mH: torch.Tensor,
    factors: Factors,
    scale_r1: torch.Tensor | None,
    out_rH: torch.Tensor,
) -> None:
    """`scaled_rows` of a product that is checked: on the way, where a compiled kernel can look at it."""
    native = lanes.rows_for(y_mH, out_rH, scale_r1)
    seen = lanes.late_look(native)
    if native is None or seen is None:
        lanes.check(place, y_mH, factors)
        scripted(scaled_rows)(y_mH, scale_r1, out_rH)
        return
    native.scale_rows(y_mH, scale_r1, out_rH, seen=seen)
    lanes.check(place, y_mH, factors, seen=seen)
