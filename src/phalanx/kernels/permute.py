"""Rows to experts and back: copies of tokens gathered into sorted rows, and rows summed back into tokens.

Both directions, forward and backward, are gathers through the same pair of index maps, so every sum has a fixed order and no
scatter-add (whose order on a GPU is a race) is needed. `token_of_row_M[m]` is the token of row m (-1: a fill row);
`rows_of_token_TK[t, k]` the row of the k-th copy of token t (-1: dropped). Each is the inverse of the other.

Legend: T tokens, K copies per token, M rows, H hidden.
"""

from __future__ import annotations

import torch

from phalanx.kernels.choice import Impl


def gather_rows(
    x_TH: torch.Tensor, token_of_row_M: torch.Tensor, *, rows_of_token_TK: torch.Tensor, impl: Impl = "fast"
) -> torch.Tensor:
    """(M, H) rows `x[token_of_row]`, zero for fill rows. Backward: each token sums the gradients of its rows, k ascending."""
    return _take(x_TH, token_of_row_M)


def combine_rows(
    y_MH: torch.Tensor, rows_of_token_TK: torch.Tensor, *, token_of_row_M: torch.Tensor, impl: Impl = "fast"
) -> torch.Tensor:
    """(T, H) sums over k of `y[rows_of_token[:, k]]`, added in fp32 at least. Backward: each row takes its token's gradient."""
    return _sum_rows(y_MH, rows_of_token_TK)


def _take(x_TH: torch.Tensor, index_M: torch.Tensor) -> torch.Tensor:
    """Rows of `x_TH`, zero where the index is -1."""
    if x_TH.shape[0] == 0:
        return x_TH.new_zeros(index_M.shape[0], x_TH.shape[1]) + 0 * x_TH.sum()
    rows_MH = x_TH.index_select(0, index_M.clamp(min=0))
    return rows_MH * (index_M >= 0).unsqueeze(-1).to(x_TH.dtype)


def _sum_rows(y_MH: torch.Tensor, rows_of_token_TK: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(y_MH.dtype, torch.float32)
    parts = [_take(y_MH, index_T).to(wide) for index_T in rows_of_token_TK.unbind(1)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(y_MH.dtype)
