"""Cross-entropy of logits that are there: what each rank knows of a token, then its loss and, in the place of the logits, their gradient.

Legend: T tokens, V vocabulary (of this rank, from row `first` of the whole), P ranks that share it.
"""

from __future__ import annotations

import triton
import triton.language as tl

LEAST = tl.constexpr(-1.0e38)
"""Below every logit, and no infinity, whose difference from itself is no number."""


@triton.jit
def token_shares(
    logits, labels, shares, first, vocab,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens,). `shares[t]` = largest logit, sum of exponentials from there, the label's logit (0 where it is elsewhere).

    One pass: each place of a block has a maximum and a sum of its own (arXiv 1805.02867), put together at the end.
    """
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * vocab
    top_V = tl.full((BLOCK,), LEAST, dtype=WIDE)
    sum_V = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, vocab, BLOCK):
        col_V = start + tl.arange(0, BLOCK)
        z_V = tl.load(row + col_V, mask=col_V < vocab, other=float("-inf")).to(WIDE)
        higher_V = tl.maximum(top_V, z_V)
        sum_V = sum_V * tl.exp(top_V - higher_V) + tl.exp(z_V - higher_V)
        top_V = higher_V
    top = tl.max(top_V)
    label = tl.load(labels + token) - first
    z_label = tl.load(row + label, mask=(label >= 0) & (label < vocab), other=0.0).to(WIDE)
    tl.store(shares + token * 3, top)
    tl.store(shares + token * 3 + 1, tl.sum(sum_V * tl.exp(top_V - top)))
    tl.store(shares + token * 3 + 2, z_label)


@triton.jit
def token_slopes(
    logits, labels, shares, losses, first, vocab, tokens, ranks, ignore,
    GRADIENT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, blocks of the vocabulary). From the shares (P, T, 3) of all ranks: `losses[t]`, and logits become softmax minus one-hot.

    A token whose label is `ignore` has neither.
    """
    token = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + token)
    is_valid = label != ignore
    top = tl.load(shares + token * 3)
    for rank in range(1, ranks):
        top = tl.maximum(top, tl.load(shares + (rank * tokens + token) * 3))
    total = top * 0.0
    z_label = top * 0.0
    for rank in range(0, ranks):
        share = shares + (rank * tokens + token) * 3
        total += tl.load(share + 1) * tl.exp(tl.load(share) - top)
        z_label += tl.load(share + 2)
    lse = top + tl.log(total)
    if tl.program_id(1) == 0:
        tl.store(losses + token, tl.where(is_valid, lse - z_label, 0.0))
    if GRADIENT:
        col_V = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        here_V = col_V < vocab
        at_V = logits + token * vocab + col_V
        z_V = tl.load(at_V, mask=here_V, other=0.0).to(WIDE)
        slope_V = tl.exp(z_V - lse) - tl.where(col_V == label - first, 1.0, 0.0)
        tl.store(at_V, tl.where(is_valid, slope_V, 0.0).to(logits.dtype.element_ty), mask=here_V)


@triton.jit
def scaled(x, factor, out, size, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (blocks,). `out = factor * x`, computed in the wide type."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x_B = tl.load(x + at, mask=at < size, other=0.0).to(WIDE)
    tl.store(out + at, (x_B * tl.load(factor).to(WIDE)).to(out.dtype.element_ty), mask=at < size)
