"""Rotary position embedding of queries and keys in one launch; the backward pass turns their gradients back, and keeps the angles alone.

Legend: B sequences, S sequence length, T = B * S tokens, A query heads, G key heads, D head dim, N = D/2 pairs.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.kernels.device.launch import block_of, launch, warps_of, wide_of
from phalanx.kernels.device.rows import dense_rows

BLOCK = 1024
"""Pairs that a program turns."""


def fused_rope(
    q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, cos_BSN: torch.Tensor, sin_BSN: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by the angles of their tokens, in their own types, computed in fp32 (fp64 in fp64)."""
    out: tuple[torch.Tensor, torch.Tensor] = _FusedRope.apply(q_BSAD, k_BSGD, cos_BSN, sin_BSN)
    return out


def turn(
    q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, cos_BSN: torch.Tensor, sin_BSN: torch.Tensor, *, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense results; by the opposite angles if `back`."""
    outputs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSAD, k_BSGD)]
    if q_BSAD.numel() or k_BSGD.numel():
        from phalanx.kernels.device.programs import rope as programs

        q_TAD, k_TGD = (dense_rows(x).reshape(-1, *x.shape[2:]) for x in (q_BSAD, k_BSGD))
        pairs = q_TAD.shape[2] // 2
        of_pairs = block_of(pairs, BLOCK)
        of_heads = min(1 << (max(q_TAD.shape[1], k_TGD.shape[1]) - 1).bit_length(), max(1, BLOCK // of_pairs))
        blocks = sum(-(-x.shape[1] // of_heads) for x in (q_TAD, k_TGD))
        launch(
            programs.turned, (len(q_TAD), blocks),
            q_TAD, k_TGD, cos_BSN.contiguous(), sin_BSN.contiguous(), *outputs,
            q_TAD.stride(0), q_TAD.stride(1), k_TGD.stride(0), k_TGD.stride(1), q_TAD.shape[1], k_TGD.shape[1], pairs,
            BACK=back, WIDE=wide_of(q_TAD, cos_BSN), HEADS=of_heads, PAIRS=of_pairs, num_warps=warps_of(2 * of_heads * of_pairs),
        )  # fmt: skip
    return outputs[0], outputs[1]


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
