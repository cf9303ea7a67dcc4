"""Rotary position embedding of queries and keys in one launch, with the norms over each head before it where a model has them.

The backward pass turns gradients back and keeps the angles alone; with norms it keeps what went in, and is two launches, the second of which adds up the gradients of the weights.

Legend: B sequences, S sequence length, T = B * S tokens, A query heads, G key heads, D head dim, N = D/2 pairs.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.kernels.device.launch import block_of, launch, warps_of, wide_of
from phalanx.kernels.device.norm import COLUMNS, SUMS
from phalanx.kernels.device.rows import dense_rows

BLOCK = 1024
"""Pairs that a program turns at once."""
PARTS = 1024
"""Programs that share the tokens of queries where weights have gradients, at most, and as many those of keys: each writes a sum of them."""


def fused_rope(
    q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, cos_BSN: torch.Tensor, sin_BSN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by the angles of their tokens, in their own types, computed in fp32 (fp64 in fp64)."""
    out: tuple[torch.Tensor, torch.Tensor] = _FusedRope.apply(q_BSAD, k_BSGD, cos_BSN, sin_BSN)
    return out


def fused_normed_rope(
    q_BSAD: torch.Tensor,
    k_BSGD: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of `x / sqrt(mean(x^2) + eps) * weight` of each head; `weights` (D,) of queries and of keys, `angles` cosine and sine. D <= 2 `BLOCK`."""
    out: tuple[torch.Tensor, torch.Tensor] = _FusedNormedRope.apply(q_BSAD, k_BSGD, *weights, eps, *angles)
    return out


def turn(
    q_BSAD: torch.Tensor,
    k_BSGD: torch.Tensor,
    cos_BSN: torch.Tensor,
    sin_BSN: torch.Tensor,
    *,
    back: bool,
    weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense results; by the opposite angles if `back`, normalised before if `weights` are given."""
    outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSAD, k_BSGD)]
    if q_BSAD.numel() or k_BSGD.numel():
        from phalanx.kernels.device.programs import rope as programs

        q_TAD, k_TGD = _tokens(q_BSAD), _tokens(k_BSGD)
        tile = _tile(q_TAD, k_TGD, cos_BSN)
        blocks = sum(-(-x.shape[1] // tile["HEADS"]) for x in (q_TAD, k_TGD))
        launch(
            programs.turned, (len(q_TAD), blocks),
            q_TAD, k_TGD, *((q_TAD, k_TGD) if weights is None else weights), eps, cos_BSN.contiguous(), sin_BSN.contiguous(), *outputs,
            *_strides(q_TAD, k_TGD), q_TAD.shape[1], k_TGD.shape[1], q_TAD.shape[2] // 2,
            NORMED=weights is not None, BACK=back, **tile, num_warps=warps_of(2 * tile["HEADS"] * tile["PAIRS"]),
        )  # fmt: skip
    return outputs[0], outputs[1]


def normed_turn_backward(
    inputs: tuple[torch.Tensor, torch.Tensor],
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """Gradients of queries, keys and both weights, in their types, from those `grads` of the results."""
    outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    (q_TAD, k_TGD), dy = map(_tokens, inputs), list(map(_tokens, grads))
    tokens, heads, width = q_TAD.shape
    if not tokens:
        return *outputs, *map(torch.zeros_like, weights)
    from phalanx.kernels.device.programs import norm as sums, rope as programs

    tile, each = _tile(q_TAD, k_TGD, angles[0]), -(-tokens // PARTS)
    parts = -(-tokens // each)
    dw_PD = angles[0].new_empty(parts, 2 * width)
    dw_2D = weights[0].new_empty(2, width)
    launch(
        programs.normed_turned_backward, (parts, 2),
        q_TAD, k_TGD, *weights, eps, *(x.contiguous() for x in angles), *dy, *outputs, dw_PD,
        *_strides(q_TAD, k_TGD), *_strides(*dy), tokens, heads, k_TGD.shape[1], width // 2, each,
        **tile, num_warps=warps_of(tile["HEADS"] * tile["PAIRS"]),  # more would leave an SM with fewer bytes on their way
    )  # fmt: skip
    grid = (-(-2 * width // COLUMNS),)
    launch(sums.sum_parts, grid, dw_PD, dw_2D, parts, 2 * width, ROWS=SUMS, BLOCK=COLUMNS, num_warps=4)
    return *outputs, *dw_2D.unbind()


def _tokens(x_BSAD: torch.Tensor) -> torch.Tensor:
    return dense_rows(x_BSAD).reshape(-1, *x_BSAD.shape[2:])


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [n for x in tensors for n in (x.stride(0), x.stride(1))]


def _tile(q_TAD: torch.Tensor, k_TGD: torch.Tensor, cos_BSN: torch.Tensor) -> dict[str, Any]:
    """How many heads a program takes at once, of how many pairs."""
    pairs = block_of(q_TAD.shape[2] // 2, BLOCK)
    heads = min(1 << (max(q_TAD.shape[1], k_TGD.shape[1]) - 1).bit_length(), max(1, BLOCK // pairs))
    return {"WIDE": wide_of(q_TAD.dtype, cos_BSN.dtype), "HEADS": heads, "PAIRS": pairs}


class _FusedRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, cos_BSN: torch.Tensor, sin_BSN: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos_BSN, sin_BSN)
        return turn(q_BSAD, k_BSGD, cos_BSN, sin_BSN, back=False)

    @staticmethod
    def backward(ctx: Any, dq_BSAD: torch.Tensor, dk_BSGD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *turn(dq_BSAD, dk_BSGD, *ctx.saved_tensors, back=True), None, None


class _FusedNormedRope(torch.autograd.Function):
    """Keeps its inputs only: a head's scale is found again."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BSAD: torch.Tensor,
        k_BSGD: torch.Tensor,
        q_weight_D: torch.Tensor,
        k_weight_D: torch.Tensor,
        eps: float,
        cos_BSN: torch.Tensor,
        sin_BSN: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (q_weight_D, k_weight_D)
        ctx.save_for_backward(q_BSAD, k_BSGD, *weights, cos_BSN, sin_BSN)
        ctx.eps = eps
        return turn(q_BSAD, k_BSGD, cos_BSN, sin_BSN, back=False, weights=weights, eps=eps)

    @staticmethod
    def backward(ctx: Any, dq_BSAD: torch.Tensor, dk_BSGD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BSAD, k_BSGD, *weights, cos_BSN, sin_BSN = ctx.saved_tensors
        inputs, grads = (q_BSAD, k_BSGD), (dq_BSAD, dk_BSGD)
        dq, dk, *dw = normed_turn_backward(inputs, tuple(weights), ctx.eps, (cos_BSN, sin_BSN), grads)
        return dq, dk, *dw, None, None, None
