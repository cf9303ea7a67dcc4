"""Rows of the embedding, and their gradient with sums in fp32 (torch adds bf16 to bf16: a token that occurs 200 times loses most of it).

Legend: T tokens, V vocabulary, H hidden, U different tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.shapes import cache_blocks


def embed(
    tokens_T: torch.Tensor, weight_VH: torch.Tensor, *, impl: Impl = "fast", lanes: Lanes = SERIAL
) -> torch.Tensor:
    """(T, H) rows of `weight_VH`."""
    if weight_VH.device.type != "cpu":
        return F.embedding(tokens_T, weight_VH)
    if impl == "reference":
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        return F.embedding(tokens_T, weight_VH.to(wide)).to(weight_VH.dtype)
    out: torch.Tensor = _CpuEmbedding.apply(tokens_T, weight_VH, lanes)
    return out


class _CpuEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_T: torch.Tensor, weight_VH: torch.Tensor, lanes: Lanes) -> torch.Tensor:
        ctx.save_for_backward(tokens_T)
        ctx.shape, ctx.lanes = weight_VH.shape, lanes
        return weight_VH.index_select(0, tokens_T)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (tokens_T,) = ctx.saved_tensors
        wide = torch.promote_types(grad_TH.dtype, torch.float32)
        seen_U, place_T = torch.unique(tokens_T, return_inverse=True)
        sums_UH = torch.zeros((len(seen_U), grad_TH.shape[1]), dtype=wide)
        columns = [slice(i, i + 64) for i in range(0, grad_TH.shape[1], 64)]
        ctx.lanes.run(lambda c, _: sums_UH[:, c].index_add_(0, place_T, grad_TH[:, c].to(wide)), columns)
        out_VH = grad_TH.new_empty(ctx.shape)
        ctx.lanes.run(lambda rows, _: out_VH[rows].zero_(), cache_blocks(*ctx.shape))
        out_VH.index_copy_(0, seen_U, sums_UH.to(out_VH.dtype))
        return None, out_VH, None
