"""The experts on a device: grouped products (`F.grouped_mm`, bf16), forward and backward in one autograd function.

It keeps the rows, the weights, the row weights and, unless `recompute`, the first projection's output; the activation is computed again in the backward pass, which costs one
elementwise pass and saves `f` numbers a row. `F.grouped_mm` leaves unwritten what belongs to no group, so what is read is written by somebody here:

    rows beyond the last group       none: the counts must sum to the rows, or the call is refused
    gradients of groups without rows are set to zero: on Blackwell they are whatever the memory held (pytorch #172439)
    no rows at all                   no product is launched: no stride satisfies one of K = 0 (pytorch PR 192497)

None of this waits for the device: counts are integers of the host, or only where groups end is known, on the device (`runtime/moe/dispatch.py` on one rank).

Legend: M rows, H hidden, e groups (local slots), f local expert width, N and K columns of two matrices of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.kernels.device import WeightSum, runs_programs, swiglu_backward, zero_empty_groups
from phalanx.kernels.ops.deferred import Target
from phalanx.kernels.ops.swiglu import swiglu


def can_group(*tensors: torch.Tensor) -> bool:
    """Whether grouped products take these: bf16, with rows of a multiple of 16 bytes."""
    return all(x.dtype == torch.bfloat16 and x.shape[-1] % 8 == 0 for x in tensors)


def grouped_ffn(
    x_MH: torch.Tensor,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    counts: Sequence[int] | None,
    *,
    row_weights_M: torch.Tensor | None = None,
    ends_e: torch.Tensor | None = None,
    recompute: bool = False,
    target: Target | None = None,
    into: tuple[WeightSum, ...] = (),
) -> torch.Tensor:
    """What `expert_ffn` computes, (M, H). With `target` the weights are constants, whose gradients it is left. `into`: sums to which those of `w13` and `w2` are added, of groups that
    `counts` tells; () where they are returned. Without `counts` the programs of a device are there.

    Raises `ValueError` where `counts` do not sum to M.
    """
    if counts is not None and sum(counts) != len(x_MH):
        raise ValueError(
            f"counts {list(counts)}: must sum to the number of rows, and sum to {sum(counts)} for {len(x_MH)} rows; "
            "rows of no group would be read without having been written"
        )
    out: torch.Tensor = _GroupedFfn.apply(
        x_MH, w13_e2fH, w2_eHf, row_weights_M, counts, ends_e, recompute, target, into
    )
    return out


def products_of_groups(
    a_MN: torch.Tensor, b_MK: torch.Tensor, counts: Sequence[int], ends_e: torch.Tensor | None = None
) -> torch.Tensor:
    """(e, N, K) `a.T @ b` over the rows of each group, zero for one without rows. `ends_e` of the groups, where they are on the device."""
    if not len(a_MN):
        return a_MN.new_zeros(len(counts), a_MN.shape[1], b_MK.shape[1])
    ends_e = ends_of(counts, a_MN.device) if ends_e is None else ends_e
    out_eNK = F.grouped_mm(a_MN.T, b_MK, offs=ends_e)
    unwritten = [out_eNK[group] for group, count in enumerate(counts) if not count]
    if unwritten:
        torch._foreach_zero_(unwritten)
    return out_eNK


def ends_of(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """(e,) int32, row behind the last one of each group. The host does not wait."""
    return torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32).to(device, non_blocking=True)


class _GroupedFfn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MH: torch.Tensor,
        w13_e2fH: torch.Tensor,
        w2_eHf: torch.Tensor,
        row_weights_M: torch.Tensor | None,
        counts: Sequence[int] | None,
        ends_e: torch.Tensor | None,
        recompute: bool,
        target: Target | None,
        into: tuple[WeightSum, ...],
    ) -> torch.Tensor:
        x_MH, gate_up_MF = x_MH.contiguous(), None
        y_MH = x_MH.new_empty(x_MH.shape)
        if len(x_MH):
            if ends_e is None:
                assert counts is not None
                ends_e = ends_of(counts, x_MH.device)
            gate_up_MF = _gate_up(x_MH, w13_e2fH, ends_e)
            h_Mf = swiglu(gate_up_MF.unflatten(1, (2, -1)), row_weights_M=row_weights_M)
            y_MH = F.grouped_mm(h_Mf, w2_eHf.transpose(1, 2), offs=ends_e)
        ctx.save_for_backward(x_MH, w13_e2fH, w2_eHf, row_weights_M, ends_e, None if recompute else gate_up_MF)
        ctx.counts, ctx.target, ctx.into = counts, target, into
        return y_MH

    @staticmethod
    def backward(ctx: Any, dy_MH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MH, w13_e2fH, w2_eHf, row_weights_M, ends_e, gate_up_MF = ctx.saved_tensors
        dy_MH = dy_MH.contiguous()  # grouped products refuse an expanded one (that of `sum`)
        if len(x_MH):
            again = gate_up_MF is None
            gate_up_MF = _gate_up(x_MH, w13_e2fH, ends_e) if again else gate_up_MF
            dh_Mf = F.grouped_mm(dy_MH, w2_eHf, offs=ends_e)
            h_Mf, d_gate_up_MF, d_row_weights_M = through_swiglu(gate_up_MF, row_weights_M, dh_Mf, in_place=again)
            dx_MH = F.grouped_mm(d_gate_up_MF, w13_e2fH.flatten(1, 2), offs=ends_e) if ctx.needs_input_grad[0] else None
        else:
            h_Mf, d_gate_up_MF = (dy_MH.new_empty(0, n) for n in (w2_eHf.shape[2], 2 * w2_eHf.shape[2]))
            dx_MH, d_row_weights_M = torch.zeros_like(x_MH), None

        pairs = (d_gate_up_MF, x_MH), (dy_MH, h_Mf)

        def of_weights() -> tuple[torch.Tensor, torch.Tensor]:
            if ctx.counts is None and len(x_MH):
                d_w13_eFH, d_w2_eHf = (F.grouped_mm(a.T, b, offs=ends_e) for a, b in pairs)
                zero_empty_groups(ends_e, d_w13_eFH, d_w2_eHf)
            else:
                counts = ctx.counts or len(w2_eHf) * (0,)
                d_w13_eFH, d_w2_eHf = (products_of_groups(a, b, counts, ends_e) for a, b in pairs)
            return d_w13_eFH.view(w13_e2fH.shape), d_w2_eHf

        d_weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if ctx.target is not None:
            ctx.target.put(of_weights)
        elif ctx.into:
            for total, (a_MN, b_MK) in zip(ctx.into, pairs, strict=True):
                total.add_groups(a_MN, b_MK, ctx.counts)
        elif ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            d_weights = of_weights()
        return dx_MH, *d_weights, d_row_weights_M, None, None, None, None, None


def _gate_up(x_MH: torch.Tensor, w13_e2fH: torch.Tensor, ends_e: torch.Tensor) -> torch.Tensor:
    """(M, 2f) the first projection."""
    return F.grouped_mm(x_MH, w13_e2fH.flatten(1, 2).transpose(1, 2), offs=ends_e)


def through_swiglu(
    gate_up_MF: torch.Tensor, row_weights_M: torch.Tensor | None, dh_Mf: torch.Tensor, *, in_place: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What the second projection took, (M, f), computed again; the gradient of the first one's result; that of the row weights.

    The first is written over `dh_Mf` and, if `in_place`, the second over `gate_up_MF`, where one program makes all of them.
    """
    if runs_programs(gate_up_MF):
        gate_up_M2f = gate_up_MF.unflatten(1, (2, -1))
        weights_M = None if row_weights_M is None else row_weights_M.contiguous()
        where = gate_up_M2f if in_place else None
        d_gate_up_M2f, d_weights_M = swiglu_backward(gate_up_M2f, weights_M, dh_Mf, d_gate_up_M2F=where, y_MF=dh_Mf)
        return dh_Mf, d_gate_up_M2f.flatten(1), d_weights_M
    with torch.enable_grad():
        gate_up_M2f = gate_up_MF.detach().unflatten(1, (2, -1)).requires_grad_()
        weights = [] if row_weights_M is None else [row_weights_M.detach().requires_grad_()]
        h_Mf = swiglu(gate_up_M2f, row_weights_M=weights[0] if weights else None)
    d_gate_up_M2f, *d_weights = torch.autograd.grad(h_Mf, [gate_up_M2f, *weights], dh_Mf)
    return h_Mf.detach(), d_gate_up_M2f.flatten(1).contiguous(), d_weights[0] if d_weights else None
