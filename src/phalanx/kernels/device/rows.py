"""Rows to experts and back, one launch each: rows picked by an index, and their sums in a fixed order. Each is the other's backward pass.

Legend: T tokens, K copies per token, M rows, H hidden.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from phalanx.kernels.device.launch import Kernel, block_of, warps_of, wide_of

BLOCK = 2048
"""Columns that a program takes at once."""


Along = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def take_rows(x_TH: torch.Tensor, index_M: torch.Tensor, *, along: Along | None = None) -> torch.Tensor:
    """(M, H) `x[index]`, zero where the index is -1. `along`: pairs (M,), weights (contiguous) of all pairs, and (M,) where those of these pairs go."""
    out_MH = x_TH.new_empty(index_M.shape[0], x_TH.shape[1])
    if out_MH.numel():
        rows, width = out_MH.shape
        x_TH = dense_rows(x_TH)
        kernel, blocks = _taking(width, along is not None)
        kernel((rows, blocks), x_TH, x_TH.stride(0), index_M.contiguous(), out_MH, *(along or 3 * (index_M,)), width)
    return out_MH


def sum_rows(
    y_MH: torch.Tensor,
    places_TK: torch.Tensor,
    out_TH: torch.Tensor | None = None,
    *,
    along: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """(T, H) sums over k of `y[places[:, k]]`, k ascending, in fp32 at least; nothing for a place of -1. `out_TH`: contiguous.

    `along`: numbers of rows (M,), and (T, K) where those at the places go.
    """
    tokens, copies = places_TK.shape
    if out_TH is None:
        out_TH = y_MH.new_empty(tokens, y_MH.shape[1])
    if out_TH.numel():
        y_MH, width = dense_rows(y_MH), y_MH.shape[1]
        kernel, blocks = _summing(width, copies, y_MH.dtype, along is not None)
        kernel(
            (tokens, blocks), y_MH, y_MH.stride(0), places_TK.contiguous(), out_TH, *(along or 2 * (places_TK,)), width
        )
    return out_TH


@cache
def _taking(width: int, weighted: bool) -> tuple[Kernel, int]:
    """The kernel, and how many of its programs share a row."""
    from phalanx.kernels.device.programs import rows as programs

    block = block_of(width, BLOCK)
    return Kernel(programs.take_rows, WEIGHTED=weighted, BLOCK=block, num_warps=warps_of(block)), -(-width // block)


@cache
def _summing(width: int, copies: int, dtype: torch.dtype, weighted: bool) -> tuple[Kernel, int]:
    from phalanx.kernels.device.programs import rows as programs

    block = block_of(width, BLOCK)
    shape = {"COPIES": copies, "WIDE": wide_of(dtype), "BLOCK": block}
    return Kernel(programs.sum_rows, WEIGHTED=weighted, **shape, num_warps=warps_of(block)), -(-width // block)


class TakeWeighted(torch.autograd.Function):
    """(M, H) rows of tokens and (M,) the weight of each, nothing for a fill row (-1): from x (T, H), weights (T, K), and of rows their tokens (M,), their pairs (M,) and the inverse of
    these (T, K)."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        token_of_row_M: torch.Tensor,
        pair_of_row_M: torch.Tensor,
        rows_of_token_TK: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(rows_of_token_TK)
        weights_M = weights_TK.new_empty(len(pair_of_row_M))
        return take_rows(x_TH, token_of_row_M, along=(pair_of_row_M, weights_TK.contiguous(), weights_M)), weights_M

    @staticmethod
    def backward(ctx: Any, grad_MH: torch.Tensor, grad_M: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows_of_token_TK,) = ctx.saved_tensors
        d_weights_TK = grad_M.new_empty(rows_of_token_TK.shape)
        d_x_TH = sum_rows(grad_MH, rows_of_token_TK, along=(grad_M.contiguous(), d_weights_TK))
        return d_x_TH, d_weights_TK, None, None, None


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` whose last dim has neighbours in memory, copied where it has not (the gradient of `sum`)."""
    return x if x.stride(-1) == 1 else x.contiguous()
