"""Root-mean-square normalisation (arXiv 1910.07467), over the last dim.

Must never change: the mean of squares is taken in fp32 (fp64 for fp64 input), whatever the storage type.

Legend: T rows, H size of the normalised dim, r rows of a block that fits a core's cache in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.scripted import scripted
from phalanx.kernels.cpu.shapes import cache_blocks
from phalanx.kernels.device import WIDEST_NORM, fused_norm, runs_programs

BLOCK_ROWS = 256
"""Rows that go through all passes while they are in a core's cache."""


def rms_norm(
    x: torch.Tensor, w_H: torch.Tensor, eps: float, *, impl: Impl = "fast", lanes: Lanes = SERIAL
) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * w` over the last dim, any leading dims; result in the type of `x`."""
    if impl == "reference":
        return _reference(x, w_H, eps)
    if x.device.type == "cpu":
        out: torch.Tensor = _CpuRmsNorm.apply(x.reshape(-1, x.shape[-1]), None, w_H, eps, lanes)[1]
        return out.view(x.shape)
    if _has_program(x):
        return fused_norm(x.reshape(-1, x.shape[-1]), None, w_H, eps)[1].view(x.shape)
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
    if impl != "reference" and _has_program(x_TH):
        return fused_norm(x_TH, delta_TH, w_H, eps)
    if impl == "reference" or x_TH.device.type != "cpu":
        stream_TH = x_TH if delta_TH is None else x_TH + delta_TH
        return stream_TH, rms_norm(stream_TH, w_H, eps, impl=impl)
    out: tuple[torch.Tensor, torch.Tensor] = _CpuRmsNorm.apply(x_TH, delta_TH, w_H, eps, lanes)
    return out


def _has_program(x: torch.Tensor) -> bool:
    return runs_programs(x) and x.shape[-1] <= WIDEST_NORM


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
        weight_H, work = w_H.to(wide), scripted(_forward_rows)
        native = lanes.rows_for(x_TH, delta_TH) if _is_dense(x_TH, delta_TH, weight_H) else None

        def run(rows: slice, lane: int) -> None:
            delta_rH = None if delta_TH is None else delta_TH[rows]
            if native is not None:
                native.norm_forward(x_TH[rows], delta_rH, stream_TH[rows], weight_H, eps, scale_T1[rows], out_TH[rows])
                return
            work(x_TH[rows], delta_rH, stream_TH[rows], weight_H, eps, scale_T1[rows], out_TH[rows], BLOCK_ROWS)

        lanes.run(run, cache_blocks(*x_TH.shape))
        ctx.save_for_backward(stream_TH, w_H, scale_T1)
        ctx.lanes, ctx.has_delta = lanes, delta_TH is not None
        return stream_TH, out_TH

    @staticmethod
    def backward(ctx: Any, d_stream_TH: torch.Tensor | None, dy_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TH, w_H, scale_T1 = ctx.saved_tensors
        weight_H, work = w_H.to(scale_T1.dtype), scripted(_backward_rows)
        dx_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
        blocks = cache_blocks(*x_TH.shape)
        dw_bH = scale_T1.new_zeros((len(blocks), x_TH.shape[1]))
        native = ctx.lanes.rows_for(x_TH, dy_TH, d_stream_TH) if _is_dense(x_TH, dy_TH, d_stream_TH, weight_H) else None

        def run(block: tuple[int, slice], lane: int) -> None:
            index, rows = block
            d_stream_rH = None if d_stream_TH is None else d_stream_TH[rows]
            if native is not None:
                own = (d_stream_rH, dx_TH[rows], dw_bH[index])
                native.norm_backward(x_TH[rows], scale_T1[rows], weight_H, dy_TH[rows], *own)
                return
            work(x_TH[rows], scale_T1[rows], weight_H, dy_TH[rows], d_stream_rH, dx_TH[rows], dw_bH[index], BLOCK_ROWS)

        ctx.lanes.run(run, list(enumerate(blocks)))
        return dx_TH, dx_TH if ctx.has_delta else None, dw_bH.sum(0).to(w_H.dtype), None, None


def _is_dense(*tensors: torch.Tensor | None) -> bool:
    return all(t is None or t.is_contiguous() for t in tensors)


def _forward_rows(
    x_RH: torch.Tensor,
    delta_RH: torch.Tensor | None,
    stream_RH: torch.Tensor,
    weight_H: torch.Tensor,
    eps: float,
    scale_R1: torch.Tensor,
    out_RH: torch.Tensor,
    block: int,
) -> None:
    for start in range(0, x_RH.shape[0], block):
        stop = start + block
        stream_rH, scale_r1 = stream_RH[start:stop], scale_R1[start:stop]
        if delta_RH is not None:
            torch.add(x_RH[start:stop], delta_RH[start:stop], out=stream_rH)
        x_rH = stream_rH.to(weight_H.dtype)
        mean_r1 = torch.linalg.vector_norm(x_rH, dim=[-1], keepdim=True).square_().div_(x_rH.shape[1])
        torch.rsqrt(mean_r1.add_(eps), out=scale_r1)
        out_RH[start:stop].copy_((x_rH * scale_r1).mul_(weight_H))


def _backward_rows(
    x_RH: torch.Tensor,
    scale_R1: torch.Tensor,
    weight_H: torch.Tensor,
    dy_RH: torch.Tensor,
    d_stream_RH: torch.Tensor | None,
    dx_RH: torch.Tensor,
    dw_H: torch.Tensor,
    block: int,
) -> None:
    """Gradients of the rows: with n = x * scale, dw = sum_rows dy n and dx = scale * (w dy - n * mean(w dy n)) + the stream's own
    gradient."""
    for start in range(0, x_RH.shape[0], block):
        stop = start + block
        x_rH, dy_rH = x_RH[start:stop].to(weight_H.dtype), dy_RH[start:stop].to(weight_H.dtype)
        scale_r1 = scale_R1[start:stop]
        product_rH = x_rH * dy_rH
        dw_H.add_(torch.mv(product_rH.t(), scale_r1.squeeze(1)))
        mean_r = torch.mv(product_rH, weight_H).div_(x_rH.shape[1])
        factor_r1 = (mean_r.unsqueeze(1) * scale_r1.square()).neg_()
        inner_rH = torch.mul(dy_rH, weight_H, out=product_rH).addcmul_(x_rH, factor_r1).mul_(scale_r1)
        if d_stream_RH is not None:
            inner_rH.add_(d_stream_RH[start:stop].to(weight_H.dtype))
        dx_RH[start:stop].copy_(inner_rH)
