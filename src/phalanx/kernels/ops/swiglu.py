"""The gated activation silu(gate) * up (arXiv 2002.05202).

Legend: M rows, F width. `gate_up_M2F[:, 0]` is the gate, `[:, 1]` the up projection.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.shapes import cache_blocks
from phalanx.kernels.device import fused_swiglu, runs_programs


def swiglu(
    gate_up_M2F: torch.Tensor,
    *,
    row_weights_M: torch.Tensor | None = None,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> torch.Tensor:
    """`silu(gate) * up [* row weight]`, (M, F) in the type of `gate_up_M2F`.

    The reference computes in fp32 (fp64 in fp64); the fast path on a CPU rounds silu(gate) and the product to the storage type, as
    the storage of each would. On devices the backward pass starts from `gate_up_M2F` and the row weights.
    """
    on_cpu = gate_up_M2F.device.type == "cpu"
    if impl == "reference" or (on_cpu and row_weights_M is not None):
        return reference_swiglu(gate_up_M2F, row_weights_M)
    if runs_programs(gate_up_M2F):
        return fused_swiglu(gate_up_M2F, row_weights_M)
    out: torch.Tensor
    out = _CpuSwiglu.apply(gate_up_M2F, lanes) if on_cpu else PlainSwiglu.apply(gate_up_M2F, row_weights_M)
    return out


def reference_swiglu(gate_up_M2F: torch.Tensor, row_weights_M: torch.Tensor | None) -> torch.Tensor:
    """Plain operations, differentiated by autograd."""
    wide = torch.promote_types(gate_up_M2F.dtype, torch.float32)
    gate, up = gate_up_M2F.to(wide).unbind(-2)
    out = torch.nn.functional.silu(gate) * up
    if row_weights_M is not None:
        out = out * row_weights_M.to(wide).unsqueeze(-1)
    return out.to(gate_up_M2F.dtype)


class PlainSwiglu(torch.autograd.Function):
    """The reference on devices without Triton: keeps its inputs, and nothing that is wider than they are."""

    @staticmethod
    def forward(ctx: Any, gate_up_M2F: torch.Tensor, row_weights_M: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(gate_up_M2F, row_weights_M)
        return reference_swiglu(gate_up_M2F, row_weights_M)

    @staticmethod
    def backward(ctx: Any, dy_MF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_up_M2F, row_weights_M = ctx.saved_tensors
        wide = torch.promote_types(gate_up_M2F.dtype, torch.float32)
        gate_MF, up_MF = gate_up_M2F.to(wide).unbind(1)
        dy_MF, d_weights_M = dy_MF.to(wide), None
        sigmoid_MF = gate_MF.sigmoid()
        silu_MF = gate_MF * sigmoid_MF
        if row_weights_M is not None:
            d_weights_M = (dy_MF * silu_MF * up_MF).sum(-1).to(row_weights_M.dtype)
            dy_MF = dy_MF * row_weights_M.to(wide).unsqueeze(-1)
        d_gate_MF = dy_MF * up_MF * (sigmoid_MF + silu_MF * (1 - sigmoid_MF))
        return torch.stack((d_gate_MF, dy_MF * silu_MF), 1).to(gate_up_M2F.dtype), d_weights_M


class _CpuSwiglu(torch.autograd.Function):
    """Keeps its input only."""

    @staticmethod
    def forward(ctx: Any, gate_up_M2F: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        out_MF = gate_up_M2F.new_empty(gate_up_M2F.shape[0], gate_up_M2F.shape[2])
        native = lanes.rows_for(gate_up_M2F) if gate_up_M2F.is_contiguous() else None

        def run(rows: slice, lane: int) -> None:
            if native is not None:
                native.swiglu_forward(gate_up_M2F[rows].flatten(1), out_MF[rows])
                return
            gate_rF, up_rF = gate_up_M2F[rows].unbind(1)
            torch.ops.aten.silu.out(gate_rF, out=out_MF[rows]).mul_(up_rF)

        lanes.run(run, cache_blocks(*out_MF.shape))
        ctx.save_for_backward(gate_up_M2F)
        ctx.lanes = lanes
        return out_MF

    @staticmethod
    def backward(ctx: Any, dy_MF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gate_up_M2F,) = ctx.saved_tensors
        d_gate_up_M2F = torch.empty_like(gate_up_M2F, memory_format=torch.contiguous_format)
        dense = gate_up_M2F.is_contiguous() and dy_MF.stride(-1) == 1
        native = ctx.lanes.rows_for(gate_up_M2F, dy_MF) if dense else None

        def run(rows: slice, lane: int) -> None:
            if native is not None:
                both = (gate_up_M2F[rows].flatten(1), dy_MF[rows])
                native.swiglu_backward(*both, torch.empty_like(dy_MF[rows]), d_gate_up_M2F[rows].flatten(1), None)
                return
            gate_rF, up_rF = gate_up_M2F[rows].unbind(1)
            d_gate_rF, d_up_rF = d_gate_up_M2F[rows].unbind(1)
            torch.ops.aten.silu.out(gate_rF, out=d_up_rF).mul_(dy_MF[rows])
            torch.ops.aten.silu_backward.grad_input(dy_MF[rows] * up_rF, gate_rF, grad_input=d_gate_rF)

        ctx.lanes.run(run, cache_blocks(*dy_MF.shape))
        return d_gate_up_M2F, None
