"""The expert feed-forward network over rows sorted by slot: one SwiGLU MLP per slot, each over its own rows.

Must never change: the row weight multiplies the activation *before* the second projection, so that expert outputs need not be kept
for the backward pass (legal because that projection has no bias; arXiv 2504.14960).

Legend: M rows, H hidden, e local slots, f local expert width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.swiglu import reference_swiglu


def expert_ffn(
    x_MH: torch.Tensor,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    counts: Sequence[int],
    *,
    row_weights_M: torch.Tensor | None = None,
    recompute: bool = False,
    impl: Impl = "fast",
) -> torch.Tensor:
    """`w2 (row_weight * silu(w_gate x) * (w_up x))`, (M, H), in the type of `x_MH`.

    `counts` (host integers, one per slot, sum M) says how many consecutive rows belong to each slot; zeros are fine.
    `row_weights_M` may be of a wider type than `x_MH`; its gradient comes back in that type. With `recompute` the backward pass
    computes the first projection again instead of keeping it.
    """
    return _reference(x_MH, w13_e2fH, w2_eHf, counts, row_weights_M)


def _reference(
    x_MH: torch.Tensor,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    counts: Sequence[int],
    row_weights_M: torch.Tensor | None,
) -> torch.Tensor:
    rows = torch.split(x_MH, list(counts))
    weights = [None] * len(counts) if row_weights_M is None else torch.split(row_weights_M, list(counts))
    out = [
        reference_swiglu(torch.einsum("mh,gfh->mgf", x, w13), weight) @ w2.T
        for x, w13, w2, weight in zip(rows, w13_e2fH, w2_eHf, weights, strict=True)
    ]
    return torch.cat(out)
