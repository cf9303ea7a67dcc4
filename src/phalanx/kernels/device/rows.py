"""Rows to experts and back, one launch each: rows picked by an index, and their sums in a fixed order. Each is the other's backward pass.

Legend: T tokens, K copies per token, M rows, H hidden.
"""

from __future__ import annotations

import torch

from phalanx.kernels.device.launch import block_of, launch, warps_of, wide_of

BLOCK = 2048
"""Columns that a program takes at once."""


def take_rows(x_TH: torch.Tensor, index_M: torch.Tensor) -> torch.Tensor:
    """(M, H) `x[index]`, zero where the index is -1."""
    out_MH = x_TH.new_empty(index_M.shape[0], x_TH.shape[1])
    if out_MH.numel():
        from phalanx.kernels.device.programs import rows as programs

        rows, width = out_MH.shape
        x_TH, block = dense_rows(x_TH), block_of(width, BLOCK)
        launch(
            programs.take_rows, (rows, -(-width // block)),
            x_TH, x_TH.stride(0), index_M.contiguous(), out_MH, width, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
    return out_MH


def sum_rows(y_MH: torch.Tensor, places_TK: torch.Tensor, out_TH: torch.Tensor | None = None) -> torch.Tensor:
    """(T, H) sums over k of `y[places[:, k]]`, k ascending, in fp32 at least; nothing for a place of -1. `out_TH`: contiguous."""
    tokens, copies = places_TK.shape
    if out_TH is None:
        out_TH = y_MH.new_empty(tokens, y_MH.shape[1])
    if out_TH.numel():
        from phalanx.kernels.device.programs import rows as programs

        y_MH, block = dense_rows(y_MH), block_of(y_MH.shape[1], BLOCK)
        launch(
            programs.sum_rows, (tokens, -(-y_MH.shape[1] // block)),
            y_MH, y_MH.stride(0), places_TK.contiguous(), out_TH, y_MH.shape[1],
            COPIES=copies, WIDE=wide_of(y_MH), BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
    return out_TH


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """`x` whose last dim has neighbours in memory, copied where it has not (the gradient of `sum`)."""
    return x if x.stride(-1) == 1 else x.contiguous()
