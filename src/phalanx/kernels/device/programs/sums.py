"""Sums over all elements of a tensor: of squares, and of bits with weights that depend on the place.

Legend: B elements that a program takes at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
"""2^64 over the golden ratio, as a signed number."""
LOW = tl.constexpr(2**32 - 1)


@triton.jit
def square_parts(x, parts, size, tiles, BLOCK: tl.constexpr):
    """Grid (parts,), each of `tiles` blocks in a row. Sums of squares in fp64, in which those of narrower types are exact."""
    sum_B = tl.zeros((BLOCK,), dtype=tl.float64)
    for tile in range(0, tiles):
        at_B = (tl.program_id(0).to(tl.int64) * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        x_B = tl.load(x + at_B, mask=at_B < size, other=0.0).to(tl.float64)
        sum_B += x_B * x_B
    tl.store(parts + tl.program_id(0), tl.sum(sum_B))


@triton.jit
def add_checksum(x, total, size, tiles, BYTES: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (parts,). Adds the checksum of whole numbers of `BYTES` bytes (1, 2 or 4) to `total`. Additions of whole numbers have one result in any order."""
    sum_B = tl.zeros((BLOCK,), dtype=tl.int64)
    for tile in range(0, tiles):
        at_B = (tl.program_id(0).to(tl.int64) * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        value_B = tl.load(x + at_B, mask=at_B < size, other=0).to(tl.int64) & (LOW >> (32 - 8 * BYTES))
        word_B = at_B * BYTES // 4
        in_word_B = value_B << (at_B * BYTES % 4 * 8)
        mixed_B = (word_B + 1) * GOLDEN
        weight_B = (mixed_B ^ ((mixed_B >> 32) & LOW)) | 1
        sum_B += in_word_B * weight_B
    tl.atomic_add(total, tl.sum(sum_B))
