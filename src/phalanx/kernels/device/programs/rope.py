"""Heads turned by the angles of their token, queries and keys in one launch.

Legend: A heads, N pairs of a head: element j goes with element j + N.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turned(
    q, k, cos, sin, q_out, k_out, q_stride, q_head_stride, k_stride, k_head_stride, q_heads, k_heads, pairs,
    BACK: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of heads of `q`, then of `k`). Outputs are dense. `BACK`: by the opposite angles."""
    token = tl.program_id(0).to(tl.int64)
    pair_N = tl.arange(0, PAIRS)
    cos_N = tl.load(cos + token * pairs + pair_N, mask=pair_N < pairs, other=0.0).to(WIDE)
    sin_N = tl.load(sin + token * pairs + pair_N, mask=pair_N < pairs, other=0.0).to(WIDE)
    if BACK:
        sin_N = -sin_N
    block = tl.program_id(1)
    q_blocks = tl.cdiv(q_heads, HEADS)
    if block < q_blocks:
        turn_heads(
            q + token * q_stride, q_out + token * q_heads * 2 * pairs, q_head_stride,
            block * HEADS, q_heads, pairs, cos_N, sin_N, WIDE, HEADS, PAIRS,
        )  # fmt: skip
    else:
        turn_heads(
            k + token * k_stride, k_out + token * k_heads * 2 * pairs, k_head_stride,
            (block - q_blocks) * HEADS, k_heads, pairs, cos_N, sin_N, WIDE, HEADS, PAIRS,
        )  # fmt: skip


@triton.jit
def turn_heads(
    x, out, head_stride, first, heads, pairs, cos_N, sin_N,
    WIDE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, from head `first` on."""
    head_A1 = (first + tl.arange(0, HEADS))[:, None]
    pair_1N = tl.arange(0, PAIRS)[None, :]
    here_AN = (head_A1 < heads) & (pair_1N < pairs)
    from_AN = x + head_A1 * head_stride + pair_1N
    low_AN = tl.load(from_AN, mask=here_AN, other=0.0).to(WIDE)
    high_AN = tl.load(from_AN + pairs, mask=here_AN, other=0.0).to(WIDE)
    to_AN = out + head_A1 * 2 * pairs + pair_1N
    kind = out.dtype.element_ty
    tl.store(to_AN, (low_AN * cos_N[None, :] - high_AN * sin_N[None, :]).to(kind), mask=here_AN)
    tl.store(to_AN + pairs, (high_AN * cos_N[None, :] + low_AN * sin_N[None, :]).to(kind), mask=here_AN)
