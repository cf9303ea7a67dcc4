"""The gated activation times a row weight in one launch forward and one backward, from `gate_up` and the row weights alone.

Legend: M rows, F width. `gate_up_M2F[:, 0]` is the gate, `[:, 1]` the up projection.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from phalanx.kernels.device.launch import Kernel, block_of, warps_of, wide_of

BLOCK = 1024
"""Columns that a program takes at once."""


def fused_swiglu(gate_up_M2F: torch.Tensor, row_weights_M: torch.Tensor | None) -> torch.Tensor:
    """`silu(gate) * up [* row weight]`, (M, F) in the type of `gate_up_M2F`, computed in fp32 (fp64 in fp64)."""
    if not torch.is_grad_enabled():
        return swiglu_forward(gate_up_M2F.contiguous(), None if row_weights_M is None else row_weights_M.contiguous())
    out: torch.Tensor = _FusedSwiglu.apply(gate_up_M2F, row_weights_M)
    return out


def swiglu_forward(gate_up_M2F: torch.Tensor, row_weights_M: torch.Tensor | None) -> torch.Tensor:
    """(M, F) from dense `gate_up_M2F` and `row_weights_M`."""
    rows, _, width = gate_up_M2F.shape
    out_MF = gate_up_M2F.new_empty(rows, width)
    if out_MF.numel():
        weights_M = gate_up_M2F if row_weights_M is None else row_weights_M
        kernel, blocks = _forward(width, gate_up_M2F.dtype, row_weights_M is not None)
        kernel((rows, blocks), gate_up_M2F, weights_M, out_MF, width)
    return out_MF


@cache
def _forward(width: int, dtype: torch.dtype, weighted: bool) -> tuple[Kernel, int]:
    """The kernel, and how many of its programs share a row."""
    from phalanx.kernels.device.programs import swiglu as programs

    block = block_of(width, BLOCK)
    constants = {"WEIGHTED": weighted, "WIDE": wide_of(dtype), "BLOCK": block}
    return Kernel(programs.swiglu_forward, **constants, num_warps=warps_of(block)), -(-width // block)


def swiglu_backward(
    gate_up_M2F: torch.Tensor,
    row_weights_M: torch.Tensor | None,
    dy_MF: torch.Tensor,
    *,
    d_gate_up_M2F: torch.Tensor | None = None,
    y_MF: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients (M, 2, F) and (M,), each in the type of its operand, from dense operands.

    Written where the caller says: the first to `d_gate_up_M2F`, which may be `gate_up_M2F`; and to `y_MF`, which may be `dy_MF`, what the forward pass computed.
    """
    rows, _, width = gate_up_M2F.shape
    d_gate_up_M2F = torch.empty_like(gate_up_M2F) if d_gate_up_M2F is None else d_gate_up_M2F
    d_weights_M = None if row_weights_M is None else torch.empty_like(row_weights_M)
    if rows:
        some = gate_up_M2F  # stands where no weights are, and where nothing is written
        _backward(width, gate_up_M2F.dtype, row_weights_M is not None, y_MF is not None)(
            (rows,),
            gate_up_M2F, some if row_weights_M is None else row_weights_M, dy_MF, d_gate_up_M2F,
            some if d_weights_M is None else d_weights_M, some if y_MF is None else y_MF, width,
        )  # fmt: skip
    return d_gate_up_M2F, d_weights_M


@cache
def _backward(width: int, dtype: torch.dtype, weighted: bool, again: bool) -> Kernel:
    from phalanx.kernels.device.programs import swiglu as programs

    block = block_of(width, BLOCK)
    constants = {"WEIGHTED": weighted, "AGAIN": again, "WIDE": wide_of(dtype), "BLOCK": block}
    return Kernel(programs.swiglu_backward, **constants, num_warps=warps_of(block))


class _FusedSwiglu(torch.autograd.Function):
    """Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, gate_up_M2F: torch.Tensor, row_weights_M: torch.Tensor | None) -> torch.Tensor:
        gate_up_M2F = gate_up_M2F.contiguous()
        row_weights_M = None if row_weights_M is None else row_weights_M.contiguous()
        ctx.save_for_backward(gate_up_M2F, row_weights_M)
        return swiglu_forward(gate_up_M2F, row_weights_M)

    @staticmethod
    def backward(ctx: Any, dy_MF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_up_M2F, row_weights_M = ctx.saved_tensors
        return swiglu_backward(gate_up_M2F, row_weights_M, dy_MF.contiguous())
