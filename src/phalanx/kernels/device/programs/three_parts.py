"""Numbers of fp32 as sums of three of bf16.

Legend: N elements of a block. A row of `out` has the parts of its row of `x` one after the other.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def three_parts(
    x, out, count, width,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of elements,). Parts are cut off, so that what is left over is exact and no part is larger than the whole."""
    at_N = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here_N = at_N < count
    left_N = tl.load(x + at_N, mask=here_N, other=0.0)
    to_N = out + at_N // width * 3 * width + at_N % width
    for part in tl.static_range(3):
        high_N = left_N.to(tl.int32, bitcast=True) >> 16  # the bits that a bf16 number has too
        tl.store(to_N + part * width, high_N.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=here_N)
        left_N -= (high_N << 16).to(tl.float32, bitcast=True)
