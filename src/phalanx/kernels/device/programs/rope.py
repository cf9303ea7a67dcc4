"""Heads turned by the angles of their token, queries and keys in one launch; normalised before, each by itself, where a weight is given.

Legend: A heads, N pairs of a head: element j goes with element j + N.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def turned(
    q, k, q_weight, k_weight, eps, cos, sin, q_out, k_out,
    q_stride, q_head_stride, k_stride, k_head_stride, q_heads, k_heads, pairs,
    NORMED: tl.constexpr, BACK: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
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
            q + token * q_stride, q_weight, eps, q_out + token * q_heads * 2 * pairs, q_head_stride,
            block * HEADS, q_heads, pairs, cos_N, sin_N, NORMED, WIDE, HEADS, PAIRS,
        )  # fmt: skip
    else:
        turn_heads(
            k + token * k_stride, k_weight, eps, k_out + token * k_heads * 2 * pairs, k_head_stride,
            (block - q_blocks) * HEADS, k_heads, pairs, cos_N, sin_N, NORMED, WIDE, HEADS, PAIRS,
        )  # fmt: skip


@triton.jit
def turn_heads(
    x, weight, eps, out, head_stride, first, heads, pairs, cos_N, sin_N,
    NORMED: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token, from head `first` on."""
    head_A1 = (first + tl.arange(0, HEADS))[:, None]
    pair_1N = tl.arange(0, PAIRS)[None, :]
    here_AN = (head_A1 < heads) & (pair_1N < pairs)
    low_AN, high_AN = _halves(x + head_A1 * head_stride + pair_1N, here_AN, pairs, WIDE)
    if NORMED:
        low_1N, high_1N = _halves(weight + pair_1N, pair_1N < pairs, pairs, WIDE)
        scale_A1 = _scale(low_AN, high_AN, eps, pairs)
        low_AN *= scale_A1 * low_1N
        high_AN *= scale_A1 * high_1N
    to_AN = out + head_A1 * 2 * pairs + pair_1N
    kind = out.dtype.element_ty
    tl.store(to_AN, (low_AN * cos_N[None, :] - high_AN * sin_N[None, :]).to(kind), mask=here_AN)
    tl.store(to_AN + pairs, (high_AN * cos_N[None, :] + low_AN * sin_N[None, :]).to(kind), mask=here_AN)


@triton.jit
def normed_turned_backward(
    q, k, q_weight, k_weight, eps, cos, sin, dy_q, dy_k, dq, dk, dw_parts,
    q_stride, q_head_stride, k_stride, k_head_stride, dy_q_stride, dy_q_head_stride, dy_k_stride, dy_k_head_stride,
    tokens, q_heads, k_heads, pairs, tokens_each,
    WIDE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Grid (parts, 2): a part has `tokens_each` tokens, with all heads of `q` or of `k`. `dq` and `dk` are dense; a row of `dw_parts` has the part's gradients of both weights."""
    first = tl.program_id(0).to(tl.int64) * tokens_each
    end = tl.minimum(first + tokens_each, tokens)
    dw = dw_parts + tl.program_id(0).to(tl.int64) * 4 * pairs
    if tl.program_id(1) == 0:
        tokens_backward(
            q, q_weight, eps, cos, sin, dy_q, dq, dw, q_stride, q_head_stride, dy_q_stride, dy_q_head_stride,
            first, end, q_heads, pairs, WIDE, HEADS, PAIRS,
        )  # fmt: skip
    else:
        tokens_backward(
            k, k_weight, eps, cos, sin, dy_k, dk, dw + 2 * pairs, k_stride, k_head_stride, dy_k_stride, dy_k_head_stride,
            first, end, k_heads, pairs, WIDE, HEADS, PAIRS,
        )  # fmt: skip


@triton.jit
def tokens_backward(
    x, weight, eps, cos, sin, dy, dx, dw, stride, head_stride, dy_stride, dy_head_stride, first, end, heads, pairs,
    WIDE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Tokens from `first` up to `end`."""
    pair_N = tl.arange(0, PAIRS)
    here_N = pair_N < pairs
    w_low_N, w_high_N = _halves(weight + pair_N, here_N, pairs, WIDE)
    dw_low_AN = tl.zeros((HEADS, PAIRS), dtype=WIDE)
    dw_high_AN = tl.zeros((HEADS, PAIRS), dtype=WIDE)
    for token in range(first, end):
        cos_N = tl.load(cos + token * pairs + pair_N, mask=here_N, other=0.0).to(WIDE)
        sin_N = tl.load(sin + token * pairs + pair_N, mask=here_N, other=0.0).to(WIDE)
        for head in range(0, heads, HEADS):
            low_AN, high_AN = heads_backward(
                x + token * stride, w_low_N, w_high_N, eps, dy + token * dy_stride, dx + token * heads * 2 * pairs,
                head_stride, dy_head_stride, head, heads, pairs, cos_N, sin_N, WIDE, HEADS, PAIRS,
            )  # fmt: skip
            dw_low_AN += low_AN
            dw_high_AN += high_AN
    tl.store(dw + pair_N, tl.sum(dw_low_AN, axis=0), mask=here_N)
    tl.store(dw + pairs + pair_N, tl.sum(dw_high_AN, axis=0), mask=here_N)


@triton.jit
def heads_backward(
    x, w_low_N, w_high_N, eps, dy, dx, head_stride, dy_head_stride, first, heads, pairs, cos_N, sin_N,
    WIDE: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: with n = x * scale and d = `dy` turned back, `dx = scale * (w d - n * mean(w d n))`. Returns both halves of `d n`."""
    head_A1 = (first + tl.arange(0, HEADS))[:, None]
    pair_1N = tl.arange(0, PAIRS)[None, :]
    here_AN = (head_A1 < heads) & (pair_1N < pairs)
    low_AN, high_AN = _halves(x + head_A1 * head_stride + pair_1N, here_AN, pairs, WIDE)
    scale_A1 = _scale(low_AN, high_AN, eps, pairs)
    low_AN *= scale_A1
    high_AN *= scale_A1
    dy_low_AN, dy_high_AN = _halves(dy + head_A1 * dy_head_stride + pair_1N, here_AN, pairs, WIDE)
    d_low_AN = dy_low_AN * cos_N[None, :] + dy_high_AN * sin_N[None, :]
    d_high_AN = dy_high_AN * cos_N[None, :] - dy_low_AN * sin_N[None, :]
    dn_low_AN, dn_high_AN = d_low_AN * w_low_N[None, :], d_high_AN * w_high_N[None, :]
    mean_A1 = (tl.sum(dn_low_AN * low_AN + dn_high_AN * high_AN, axis=1) / (2 * pairs))[:, None]
    to_AN = dx + head_A1 * 2 * pairs + pair_1N
    kind = dx.dtype.element_ty
    tl.store(to_AN, (scale_A1 * (dn_low_AN - low_AN * mean_A1)).to(kind), mask=here_AN)
    tl.store(to_AN + pairs, (scale_A1 * (dn_high_AN - high_AN * mean_A1)).to(kind), mask=here_AN)
    return d_low_AN * low_AN, d_high_AN * high_AN


@triton.jit
def _halves(at, here, pairs, WIDE: tl.constexpr):
    """The elements at `at`, and those that go with them."""
    return tl.load(at, mask=here, other=0.0).to(WIDE), tl.load(at + pairs, mask=here, other=0.0).to(WIDE)


@triton.jit
def _scale(low_AN, high_AN, eps, pairs):
    """(A, 1) 1 / sqrt(mean square + eps) of each head."""
    return tl.rsqrt(tl.sum(low_AN * low_AN + high_AN * high_AN, axis=1) / (2 * pairs) + eps)[:, None]
