"""Rows to experts and back: copies of tokens gathered into sorted rows, and rows summed back into tokens.

Both directions, forward and backward, are gathers through the same pair of index maps, so every sum has a fixed order and no
scatter-add (whose order on a GPU is a race) is needed. `token_of_row_M[m]` is the token of row m (-1: a fill row);
`rows_of_token_TK[t, k]` the row of the k-th copy of token t (-1: dropped). Each is the inverse of the other.

Legend: T tokens, K copies per token, M rows, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.shapes import cache_blocks
from phalanx.kernels.device import TakeWeighted, runs_programs, sum_rows, take_rows

COPY_BLOCK = 1 << 19
"""Elements of a piece of a plain copy, which reads and writes everything once."""


def gather_rows(
    x_TH: torch.Tensor,
    token_of_row_M: torch.Tensor,
    *,
    rows_of_token_TK: torch.Tensor,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> torch.Tensor:
    """(M, H) rows `x[token_of_row]`, zero for fill rows. Backward: each token sums the gradients of its rows, k ascending."""
    if impl == "reference":
        return _reference_take(x_TH, token_of_row_M)
    out: torch.Tensor = _Gather.apply(x_TH, token_of_row_M, rows_of_token_TK, lanes)
    return out


def gather_weighted(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    *,
    token_of_row_M: torch.Tensor,
    pair_of_row_M: torch.Tensor,
    rows_of_token_TK: torch.Tensor,
    has_fill: bool = True,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gather_rows` and `pick_weights`, together one launch each way on a GPU. `pair_of_row_M[m]` is `t * K + k`."""
    if impl == "fast" and runs_programs(x_TH):
        taken: tuple[torch.Tensor, torch.Tensor] = TakeWeighted.apply(
            x_TH, weights_TK, token_of_row_M, pair_of_row_M, rows_of_token_TK
        )
        return taken
    rows_MH = gather_rows(x_TH, token_of_row_M, rows_of_token_TK=rows_of_token_TK, impl=impl, lanes=lanes)
    return rows_MH, pick_weights(weights_TK, pair_of_row_M, has_fill=has_fill)


def pick_weights(weights_TK: torch.Tensor, pair_of_row_R: torch.Tensor, *, has_fill: bool) -> torch.Tensor:
    """(R,) weight of each row, zero for fill rows."""
    flat_N = weights_TK.reshape(-1)
    if not has_fill:
        return flat_N.index_select(0, pair_of_row_R)
    padded = torch.cat([flat_N, flat_N.new_zeros(1)])
    return padded.index_select(0, torch.where(pair_of_row_R < 0, len(flat_N), pair_of_row_R))


def combine_rows(
    y_MH: torch.Tensor,
    rows_of_token_TK: torch.Tensor,
    *,
    token_of_row_M: torch.Tensor,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> torch.Tensor:
    """(T, H) sums over k of `y[rows_of_token[:, k]]`, added in fp32 at least. Backward: each row takes its token's gradient."""
    if impl == "reference":
        return _reference_sum(y_MH, rows_of_token_TK)
    out: torch.Tensor = _Combine.apply(y_MH, rows_of_token_TK, token_of_row_M, lanes)
    return out


def sum_places(
    y_MH: torch.Tensor, places_TK: torch.Tensor, *, lanes: Lanes = SERIAL, out_TH: torch.Tensor | None = None
) -> torch.Tensor:
    """(T, H) sums over k of `y[places[:, k]]`, k ascending, in fp32 at least; nothing for a place of -1. No gradient. `out_TH`: contiguous."""
    return _sum(y_MH, places_TK, lanes, out_TH)


def _reference_take(x_TH: torch.Tensor, index_M: torch.Tensor) -> torch.Tensor:
    """Rows of `x_TH`, zero where the index is -1. Keeps the same however few rows there are: with full recomputation a second run ends behind the last tensor that is kept, and all ranks
    must end theirs at one place among their messages."""
    padded = torch.cat([x_TH, x_TH.new_zeros(1, x_TH.shape[1])])
    return padded.index_select(0, torch.where(index_M < 0, len(x_TH), index_M))


def _reference_sum(y_MH: torch.Tensor, rows_of_token_TK: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(y_MH.dtype, torch.float32)
    parts = [_reference_take(y_MH, index_T).to(wide) for index_T in rows_of_token_TK.unbind(1)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(y_MH.dtype)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, token_of_row_M: torch.Tensor, rows_of_token_TK: torch.Tensor, lanes: Lanes
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_of_token_TK)
        ctx.lanes = lanes
        return _take(x_TH, token_of_row_M, lanes)

    @staticmethod
    def backward(ctx: Any, grad_MH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows_of_token_TK,) = ctx.saved_tensors
        return _sum(grad_MH, rows_of_token_TK, ctx.lanes), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_MH: torch.Tensor, rows_of_token_TK: torch.Tensor, token_of_row_M: torch.Tensor, lanes: Lanes
    ) -> torch.Tensor:
        ctx.save_for_backward(token_of_row_M)
        ctx.lanes = lanes
        return _sum(y_MH, rows_of_token_TK, lanes)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (token_of_row_M,) = ctx.saved_tensors
        return _take(grad_TH, token_of_row_M, ctx.lanes), None, None, None


def _take(x_TH: torch.Tensor, index_M: torch.Tensor, lanes: Lanes) -> torch.Tensor:
    """`x[index]`, zero where the index is -1."""
    if runs_programs(x_TH):
        return take_rows(x_TH, index_M)
    if x_TH.device.type != "cpu" or x_TH.shape[0] == 0:
        return _reference_take(x_TH, index_M)
    out_MH = x_TH.new_empty(index_M.shape[0], x_TH.shape[1])

    complete = _is_complete(index_M)

    def run(rows: slice, lane: int) -> None:
        _pick(x_TH, index_M[rows], out_MH[rows], complete=complete)

    lanes.run(run, cache_blocks(*out_MH.shape, elements=COPY_BLOCK))
    return out_MH


def _sum(
    y_MH: torch.Tensor, rows_of_token_TK: torch.Tensor, lanes: Lanes, out_TH: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over k of `y[rows_of_token[:, k]]`, in fp32 at least."""
    if runs_programs(y_MH):
        return sum_rows(y_MH, rows_of_token_TK, out_TH)
    if y_MH.device.type != "cpu" or y_MH.shape[0] == 0:
        found_TH = _reference_sum(y_MH, rows_of_token_TK)
        return found_TH if out_TH is None else out_TH.copy_(found_TH)
    if out_TH is None:
        out_TH = y_MH.new_empty(rows_of_token_TK.shape[0], y_MH.shape[1])
    wide = torch.promote_types(y_MH.dtype, torch.float32)
    complete = _is_complete(rows_of_token_TK)
    index_KT = rows_of_token_TK.T.contiguous()
    native = lanes.rows_for(y_MH) if y_MH.is_contiguous() and index_KT.dtype == torch.int64 else None

    def run(tokens: slice, lane: int) -> None:
        index_Kt, out_tH = index_KT[:, tokens], out_TH[tokens]
        if native is not None:
            native.sum_rows(y_MH, index_Kt, out_tH)
            return
        part_tH = torch.empty_like(out_tH)
        _pick(y_MH, index_Kt[0], out_tH, complete=complete)
        if len(index_Kt) == 2:  # one addition rounds once, whatever it is computed in
            out_tH.add_(_pick(y_MH, index_Kt[1], part_tH, complete=complete))
        elif len(index_Kt) > 2:
            total_tH = out_tH.to(wide, copy=True)
            for index_t in index_Kt[1:]:
                total_tH.add_(_pick(y_MH, index_t, part_tH, complete=complete))
            out_tH.copy_(total_tH)

    lanes.run(run, cache_blocks(*out_TH.shape))
    return out_TH


def _is_complete(index: torch.Tensor) -> bool:
    """No entry is -1. Indices in the host's own memory: no synchronisation."""
    return index.numel() == 0 or int(index.min()) >= 0


def _pick(x_TH: torch.Tensor, index_m: torch.Tensor, out_mH: torch.Tensor, *, complete: bool) -> torch.Tensor:
    """`x[index]` into `out_mH`, zero where the index is -1."""
    if complete:
        return torch.index_select(x_TH, 0, index_m, out=out_mH)
    torch.index_select(x_TH, 0, index_m.clamp(min=0), out=out_mH)
    return out_mH.masked_fill_((index_m < 0).unsqueeze(1), 0)
