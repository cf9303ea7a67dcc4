"""Rotary position embedding (arXiv 2104.09864), in the "rotate half" convention of Hugging Face checkpoints.

Dim j of a head is paired with dim j + D/2 and turned by `position * theta^(-2j/D)`. Positions restart at each document.

Legend: B sequences, S sequence length, A query heads, G key/value heads, D head dim, N = D/2 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.kernels.choice import Impl


@dataclass(frozen=True, eq=False)
class RopeTable:
    """Cosine and sine of every token's angles, (B, S, N), fp32 (fp64 in fp64): computed once per micro-batch for all layers."""

    cos_BSN: torch.Tensor
    sin_BSN: torch.Tensor


def rope_table(positions_BS: torch.Tensor, *, head_dim: int, theta: float, dtype: torch.dtype) -> RopeTable:
    """Angles in fp64, so that position 10^6 is as exact as position 1, then rounded to the wider of fp32 and `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    pair_N = torch.arange(0, head_dim, 2, device=positions_BS.device, dtype=torch.float64)
    angle_BSN = positions_BS.to(torch.float64).unsqueeze(-1) * theta ** (-pair_N / head_dim)
    return RopeTable(angle_BSN.cos().to(wide), angle_BSN.sin().to(wide))


def apply_rope(
    q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, *, table: RopeTable, impl: Impl = "fast"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by their positions, in their own types."""
    return _reference(q_BSAD, table), _reference(k_BSGD, table)


def _reference(x_BSAD: torch.Tensor, table: RopeTable) -> torch.Tensor:
    cos, sin = table.cos_BSN.unsqueeze(2), table.sin_BSN.unsqueeze(2)
    first, second = x_BSAD.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSAD.dtype)
