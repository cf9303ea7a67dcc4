"""Rotary position embedding (arXiv 2104.09864), in the "rotate half" convention of Hugging Face checkpoints.

Dim j of a head is paired with dim j + D/2 and turned by `position * frequency[j]` (`plan/model/rope.py`). Positions restart at each document.

Legend: B sequences, S sequence length, A query heads, G key/value heads, D head dim, N = D/2 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.scripted import scripted
from phalanx.kernels.cpu.shapes import cache_blocks
from phalanx.kernels.device import fused_normed_rope, fused_rope, runs_programs
from phalanx.kernels.native import CompiledRows
from phalanx.kernels.ops.norm import rms_norm
from phalanx.plan.model import YarnSpec, amplitude, frequencies

BLOCK_ROWS = 128
"""Tokens that go through all passes while they are in a core's cache."""


@dataclass(frozen=True, eq=False)
class RopeTable:
    """Cosine and sine of every token's angles, (B, S, N), fp32 (fp64 in fp64): computed once per micro-batch for all layers."""

    cos_BSN: torch.Tensor
    sin_BSN: torch.Tensor


@dataclass(frozen=True, eq=False)
class HeadNorms:
    """The norms over each head that come before the rotation: weights (D,) of queries and of keys."""

    q_D: torch.Tensor
    k_D: torch.Tensor
    eps: float


def rope_table(
    positions_BS: torch.Tensor, *, head_dim: int, theta: float, dtype: torch.dtype, yarn: YarnSpec | None = None
) -> RopeTable:
    """Angles in fp64, so that position 10^6 is as exact as position 1, then rounded to the wider of fp32 and `dtype`."""
    wide = torch.promote_types(dtype, torch.float32)
    per_position_N = torch.tensor(frequencies(head_dim, theta, yarn), dtype=torch.float64)
    per_position_N = per_position_N.to(positions_BS.device, non_blocking=True)  # the host goes on at once
    angle_BSN = positions_BS.to(torch.float64).unsqueeze(-1) * per_position_N
    size = amplitude(yarn)
    return RopeTable((angle_BSN.cos() * size).to(wide), (angle_BSN.sin() * size).to(wide))


def apply_rope(
    q_BSAD: torch.Tensor,
    k_BSGD: torch.Tensor,
    *,
    table: RopeTable,
    norms: HeadNorms | None = None,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by their positions, in their own types; each head normalised before if `norms` are given."""
    if impl != "reference" and runs_programs(q_BSAD):
        angles = (table.cos_BSN, table.sin_BSN)
        if norms is None:
            return fused_rope(q_BSAD, k_BSGD, *angles)
        return fused_normed_rope(q_BSAD, k_BSGD, (norms.q_D, norms.k_D), norms.eps, angles)
    if norms is not None:
        q_BSAD = rms_norm(q_BSAD, norms.q_D, norms.eps, impl=impl, lanes=lanes)
        k_BSGD = rms_norm(k_BSGD, norms.k_D, norms.eps, impl=impl, lanes=lanes)
    if impl == "reference" or q_BSAD.device.type != "cpu":
        return _reference(q_BSAD, table), _reference(k_BSGD, table)
    out: tuple[torch.Tensor, torch.Tensor] = _CpuRope.apply(q_BSAD, k_BSGD, table, lanes)
    return out


def _reference(x_BSAD: torch.Tensor, table: RopeTable) -> torch.Tensor:
    cos, sin = table.cos_BSN.unsqueeze(2), table.sin_BSN.unsqueeze(2)
    first, second = x_BSAD.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BSAD.dtype)


class _CpuRope(torch.autograd.Function):
    """Keeps nothing but the table: the gradient is turned back by the same angles."""

    @staticmethod
    def forward(
        ctx: Any, q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, table: RopeTable, lanes: Lanes
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.table, ctx.lanes = table, lanes
        return _turn((q_BSAD, k_BSGD), table, lanes, back=False)

    @staticmethod
    def backward(ctx: Any, dq_BSAD: torch.Tensor, dk_BSGD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (*_turn((dq_BSAD, dk_BSGD), ctx.table, ctx.lanes, back=True), None, None)


def _turn(
    inputs: tuple[torch.Tensor, torch.Tensor], table: RopeTable, lanes: Lanes, *, back: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both inputs turned by the table's angles, or back by them, in blocks of tokens."""
    flat = [x.reshape(-1, *x.shape[2:]) for x in inputs]
    out = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]
    targets = [y.view(-1, *y.shape[2:]) for y in out]
    cos_TN, sin_TN = (x.reshape(-1, x.shape[-1]) for x in (table.cos_BSN, table.sin_BSN))
    work, sign = scripted(_turn_rows), -1.0 if back else 1.0
    natives = [_native(x, cos_TN, sin_TN, lanes) for x in flat]

    def run(part: tuple[int, slice], lane: int) -> None:
        which, rows = part
        if (native := natives[which]) is not None:
            native.rope(flat[which][rows], cos_TN[rows], sin_TN[rows], sign, targets[which][rows])
            return
        work(flat[which][rows], cos_TN[rows], sin_TN[rows], sign, targets[which][rows], BLOCK_ROWS)

    lanes.run(run, [(i, rows) for i, x in enumerate(flat) for rows in cache_blocks(len(x), x.shape[1:].numel())])
    return out[0], out[1]


def _native(x_TAD: torch.Tensor, cos_TN: torch.Tensor, sin_TN: torch.Tensor, lanes: Lanes) -> CompiledRows | None:
    """The compiled kernels, where these are what they read: angles of every row, in the wide type."""
    wide = torch.promote_types(x_TAD.dtype, torch.float32)
    each = (x_TAD.shape[0], x_TAD.shape[2] // 2)
    fit = all(t.dtype == wide and tuple(t.shape) == each for t in (cos_TN, sin_TN)) and x_TAD.shape[2] % 2 == 0
    dense = all(t.is_contiguous() for t in (x_TAD, cos_TN, sin_TN))
    return lanes.rows_for(x_TAD) if fit and dense else None


def _turn_rows(
    x_RAD: torch.Tensor, cos_RN: torch.Tensor, sin_RN: torch.Tensor, sign: float, out_RAD: torch.Tensor, block: int
) -> None:
    """Heads first and the two halves of each apart, so that every operation on the angles is over long rows."""
    pairs, heads = cos_RN.shape[1], x_RAD.shape[1]
    for start in range(0, x_RAD.shape[0], block):
        stop = min(start + block, x_RAD.shape[0])
        cos_rN, sin_rN = cos_RN[start:stop], sin_RN[start:stop]
        x_2ArN = torch.empty([2, heads, stop - start, pairs], dtype=cos_RN.dtype)
        x_2ArN.copy_(x_RAD[start:stop].view(stop - start, heads, 2, pairs).permute(2, 1, 0, 3))
        turned_2ArN = x_2ArN * cos_rN
        turned_2ArN[0].addcmul_(x_2ArN[1], sin_rN, value=-sign)
        turned_2ArN[1].addcmul_(x_2ArN[0], sin_rN, value=sign)
        out_RAD[start:stop].view(stop - start, heads, 2, pairs).copy_(turned_2ArN.permute(2, 1, 0, 3))
