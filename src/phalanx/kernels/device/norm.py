"""Addition to the residual stream and root-mean-square normalisation in one launch; the gradients in two, the second of which adds up the weight's.

Must never change: sums are taken in fp32 (fp64 for fp64 input), in an order that follows from shapes alone.

Legend: T rows, H size of the normalised dim.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.kernels.device.launch import block_of, launch, warps_of, wide_of
from phalanx.kernels.device.rows import dense_rows

WIDEST_NORM = 8192
"""Elements of a row, which stays in the registers of one program (16,384 would spill)."""
TILE = 2048
"""Elements that a program takes at once, one row at least."""
PARTS = 512
"""Programs that share the rows in the backward pass, at most: each writes a sum of the weight's gradient."""
SUMS, COLUMNS = 32, 32
"""Rows and columns of these sums that a program of the last addition takes at once."""


def fused_norm(
    x_TH: torch.Tensor, delta_TH: torch.Tensor | None, w_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stream `x + delta` (`x` where nothing is added) and its norm times `w_H`, (T, H) each in the type of `x_TH`; H <= `WIDEST_NORM`."""
    out: tuple[torch.Tensor, torch.Tensor] = _FusedNorm.apply(x_TH, delta_TH, w_H, eps)
    return out


def norm_forward(
    x_TH: torch.Tensor, delta_TH: torch.Tensor | None, w_H: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stream, norm, and 1 / sqrt(mean square + eps) of each row (T,) in the wide type."""
    rows, width = x_TH.shape
    out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    stream_TH = x_TH if delta_TH is None else torch.empty_like(out_TH)
    scale_T = x_TH.new_empty(rows, dtype=torch.promote_types(x_TH.dtype, torch.float32))
    if out_TH.numel():
        from phalanx.kernels.device.programs import norm as programs

        shape = _shape(width, scale_T)
        delta = x_TH if delta_TH is None else delta_TH.contiguous()
        launch(
            programs.norm_forward, (-(-rows // shape["ROWS"]),),
            x_TH, x_TH.stride(0), delta, w_H, eps, stream_TH, scale_T, out_TH, rows, width,
            ADDS=delta_TH is not None, **shape,
        )  # fmt: skip
    return stream_TH, out_TH, scale_T


def norm_backward(
    stream_TH: torch.Tensor,
    scale_T: torch.Tensor,
    w_H: torch.Tensor,
    dy_TH: torch.Tensor,
    d_stream_TH: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of each summand of the stream and of the weight, in their types."""
    rows, width = stream_TH.shape
    if not stream_TH.numel():
        return torch.empty_like(dy_TH), torch.zeros_like(w_H)
    from phalanx.kernels.device.programs import norm as programs

    shape = _shape(width, scale_T)
    tiles = -(-rows // (shape["ROWS"] * PARTS))
    parts = -(-rows // (shape["ROWS"] * tiles))
    dx_TH = torch.empty_like(stream_TH, memory_format=torch.contiguous_format)
    dw_H, dw_PH = torch.empty_like(w_H), scale_T.new_empty(parts, width)
    dy_TH = dy_TH.contiguous()
    d_stream = dy_TH if d_stream_TH is None else d_stream_TH.contiguous()
    launch(
        programs.norm_backward, (parts,),
        stream_TH, stream_TH.stride(0), scale_T, w_H, dy_TH, d_stream, dx_TH, dw_PH, rows, width, tiles,
        ADDS=d_stream_TH is not None, **shape,
    )  # fmt: skip
    launch(
        programs.sum_parts, (-(-width // COLUMNS),), dw_PH, dw_H, parts, width, ROWS=SUMS, BLOCK=COLUMNS, num_warps=4
    )
    return dx_TH, dw_H


def _shape(width: int, wide: torch.Tensor) -> dict[str, Any]:
    """How many rows of `width` elements a program takes at once."""
    block = block_of(width, WIDEST_NORM)
    rows = max(1, TILE // block)
    return {"WIDE": wide_of(wide.dtype), "ROWS": rows, "BLOCK": block, "num_warps": warps_of(rows * block)}


class _FusedNorm(torch.autograd.Function):
    """Keeps the stream and one scale a row."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, w_H: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream_TH, out_TH, scale_T = norm_forward(dense_rows(x_TH), delta_TH, w_H, eps)
        if delta_TH is None:
            stream_TH = x_TH.view_as(x_TH)
        ctx.save_for_backward(stream_TH, w_H, scale_T)
        ctx.has_delta = delta_TH is not None
        ctx.set_materialize_grads(False)
        return stream_TH, out_TH

    @staticmethod
    def backward(
        ctx: Any, d_stream_TH: torch.Tensor | None, dy_TH: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        stream_TH, w_H, scale_T = ctx.saved_tensors
        dx_TH, dw_H = d_stream_TH, None
        if dy_TH is not None:
            dx_TH, dw_H = norm_backward(dense_rows(stream_TH), scale_T, w_H, dy_TH, d_stream_TH)
        return dx_TH, dx_TH if ctx.has_delta else None, dw_H, None
