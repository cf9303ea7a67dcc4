"""Root-mean-square normalisation (arXiv 1910.07467), over the last dim.

Must never change: the mean of squares is taken in fp32 (fp64 for fp64 input), whatever the storage type.

Legend: T rows, H size of the normalised dim, r rows of a block that fits a core's cache in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from phalanx.kernels.choice import Impl
from phalanx.kernels.lanes import SERIAL, Lanes
from phalanx.kernels.shapes import cache_blocks


def rms_norm(
    x: torch.Tensor, w_H: torch.Tensor, eps: float, *, impl: Impl = "fast", lanes: Lanes = SERIAL
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * w` over the last dim, any leading dims; result in the type of `x`."""
    if impl == "reference":
        return _reference(x, w_H, eps)
    if x.device.type == "cpu":
        out: torch.Tensor = _CpuRmsNorm.apply(x.reshape(-1, x.shape[-1]), None, w_H, eps, lanes)[1]
        return out.view(x.shape)
    return F.rms_norm(x, w_H.shape, w_H, eps)


def residual_norm(
    x_TH: torch.Tensor,
    delta_TH: torch.Tensor | None,
    w_H: torch.Tensor,
    eps: float,
    *,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream `x + delta` (`x` where nothing is added) and its norm, in one pass forward and one backward."""
    if impl == "reference" or x_TH.device.type != "cpu":
        stream_TH = x_TH if delta_TH is None else x_TH + delta_TH
        return stream_TH, rms_norm(stream_TH, w_H, eps, impl=impl)
    out: tuple[torch.Tensor, torch.Tensor] = _CpuRmsNorm.apply(x_TH, delta_TH, w_H, eps, lanes)
    return out


def _reference(x_TH: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    x = x_TH.to(wide)
    scale_T1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale_T1 * w_H.to(wide)).to(x_TH.dtype)


class _CpuRmsNorm(torch.autograd.Function):
    """The stream (`x`, plus `delta`) and its norm. Keeps the stream and one scale per row."""

    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, delta_TH: torch.Tensor | None, w_H: torch.Tensor, eps: float, lanes: Lanes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        stream_TH = x_TH.view_as(x_TH) if delta_TH is None else torch.empty_like(out_TH)
        scale_T1 = x_TH.new_empty((x_TH.shape[0], 1), dtype=wide)
        weight_H = w_H.to(wide)

        def run(rows: slice, lane: int) -> None:
            if delta_TH is not None:
                torch.add(x_TH[rows], delta_TH[rows], out=stream_TH[rows])
            x_rH = stream_TH[rows].to(wide)
            mean_r1 = torch.linalg.vector_norm(x_rH, dim=-1, keepdim=True).square_().div_(x_rH.shape[-1])
            scale_r1 = torch.rsqrt(mean_r1.add_(eps), out=scale_T1[rows])
            out_TH[rows].copy_((x_rH * scale_r1).mul_(weight_H))

        lanes.run(run, cache_blocks(*x_TH.shape))
        ctx.save_for_backward(stream_TH, w_H, scale_T1)
        ctx.lanes, ctx.has_delta = lanes, delta_TH is not None
        return stream_TH, out_TH

    @staticmethod
    def backward(ctx: Any, d_stream_TH: torch.Tensor | None, dy_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With n = x * scale: dw = sum_rows dy n; dx = scale * (w dy - n * mean(w dy n)) + the stream's own gradient."""
        x_TH, w_H, scale_T1 = ctx.saved_tensors
        wide = scale_T1.dtype
        weight_H = w_H.to(wide)
        dx_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        blocks = cache_blocks(*x_TH.shape)
        dw_bH = scale_T1.new_empty((len(blocks), x_TH.shape[1]))

        def run(block: tuple[int, slice], lane: int) -> None:
            index, rows = block
            x_rH, dy_rH, scale_r1 = x_TH[rows].to(wide), dy_TH[rows].to(wide), scale_T1[rows]
            product_rH = x_rH * dy_rH
            torch.mv(product_rH.T, scale_r1.squeeze(1), out=dw_bH[index])
            mean_r = torch.mv(product_rH, weight_H).div_(x_rH.shape[1])
            factor_r1 = (mean_r.unsqueeze(1) * scale_r1.square()).neg_()
            inner_rH = torch.mul(dy_rH, weight_H, out=product_rH).addcmul_(x_rH, factor_r1).mul_(scale_r1)
            dx_TH[rows].copy_(inner_rH if d_stream_TH is None else inner_rH.add_(d_stream_TH[rows]))

        ctx.lanes.run(run, list(enumerate(blocks)))
        return dx_TH, dx_TH if ctx.has_delta else None, dw_bH.sum(0).to(w_H.dtype), None, None
