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
        out: torch.Tensor = _CpuRmsNorm.apply(x.reshape(-1, x.shape[-1]), w_H, eps, lanes)
        return out.view(x.shape)
    return F.rms_norm(x, w_H.shape, w_H, eps)


def _reference(x_TH: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    x = x_TH.to(wide)
    scale_T1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale_T1 * w_H.to(wide)).to(x_TH.dtype)


class _CpuRmsNorm(torch.autograd.Function):
    """Keeps `x` and one scale per row."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, w_H: torch.Tensor, eps: float, lanes: Lanes) -> torch.Tensor:
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        scale_T1 = x_TH.new_empty((x_TH.shape[0], 1), dtype=wide)
        weight_H = w_H.to(wide)

        def run(rows: slice, lane: int) -> None:
            x_rH = x_TH[rows].to(wide)
            mean_r1 = torch.linalg.vector_norm(x_rH, dim=-1, keepdim=True).square_().div_(x_rH.shape[-1])
            scale_r1 = torch.rsqrt(mean_r1.add_(eps), out=scale_T1[rows])
            out_TH[rows].copy_((x_rH * scale_r1).mul_(weight_H))

        lanes.run(run, cache_blocks(*x_TH.shape))
        ctx.save_for_backward(x_TH, w_H, scale_T1)
        ctx.lanes = lanes
        return out_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With n = x * scale: dw = sum_rows dy n; dx = scale * (w dy - n * mean(w dy n))."""
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
            inner_rH = torch.mul(dy_rH, weight_H, out=product_rH).addcmul_(x_rH, factor_r1)
            dx_TH[rows].copy_(inner_rH.mul_(scale_r1))

        ctx.lanes.run(run, list(enumerate(blocks)))
        return dx_TH, dw_bH.sum(0).to(w_H.dtype), None, None
