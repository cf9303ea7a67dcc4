"""A stable counting sort of small whole numbers, each program some tiles of them one after the other.

Legend: B numbers of a tile, E their values, P programs.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_values(keys, counts, size, values, tiles, BLOCK: tl.constexpr, E2: tl.constexpr):
    """Grid (P,). `counts` (P, values): how often each value below `values` occurs among a program's numbers."""
    value_1E = tl.arange(0, E2)[None, :]
    count_E = tl.zeros((E2,), dtype=tl.int32)
    for tile in range(0, tiles):
        at_B = (tl.program_id(0) * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        key_B1 = tl.load(keys + at_B, mask=at_B < size, other=values)[:, None]
        count_E += tl.sum((key_B1 == value_1E).to(tl.int32), axis=0)
    value_E = tl.arange(0, E2)
    tl.store(counts + tl.program_id(0) * values + value_E, count_E, mask=value_E < values)


@triton.jit
def place_values(
    keys, counts, order, places, tokens, totals, ends, size, values, tiles, programs,
    COPIES: tl.constexpr, BLOCK: tl.constexpr, E2: tl.constexpr, P2: tl.constexpr,
):  # fmt: skip
    """Grid (P,). `order[j]` is where the j-th number stands, sorted, `tokens[j]` that divided by COPIES; `places` the inverse, -1 for a number that is no value.

    `totals`: how often each value occurs, `ends` their running sums.
    """
    value_E = tl.arange(0, E2)
    total_E = tl.zeros((E2,), dtype=tl.int32)
    before_E = tl.zeros((E2,), dtype=tl.int32)
    for first in range(0, programs, P2):
        program_P1 = (first + tl.arange(0, P2))[:, None]
        here_PE = (program_P1 < programs) & (value_E < values)[None, :]
        count_PE = tl.load(counts + program_P1 * values + value_E[None, :], mask=here_PE, other=0)
        total_E += tl.sum(count_PE, axis=0)
        before_E += tl.sum(tl.where(program_P1 < tl.program_id(0), count_PE, 0), axis=0)
    end_E = tl.cumsum(total_E, axis=0)
    if tl.program_id(0) == 0:
        tl.store(totals + value_E, total_E.to(tl.int64), mask=value_E < values)
        tl.store(ends + value_E, end_E, mask=value_E < values)
    next_E = end_E - total_E + before_E
    for tile in range(0, tiles):
        at_B = (tl.program_id(0) * tiles + tile) * BLOCK + tl.arange(0, BLOCK)
        here_B = at_B < size
        key_B = tl.load(keys + at_B, mask=here_B, other=values)
        is_it_BE = (key_B[:, None] == value_E[None, :]).to(tl.int32)
        upto_BE = tl.cumsum(is_it_BE, axis=0)
        place_B = tl.sum(is_it_BE * (next_E[None, :] + upto_BE - 1), axis=1)
        is_value_B = here_B & (key_B < values)
        tl.store(places + at_B, tl.where(is_value_B, place_B, -1).to(tl.int64), mask=here_B)
        tl.store(order + place_B, at_B.to(tl.int64), mask=is_value_B)
        tl.store(tokens + place_B, (at_B // COPIES).to(tl.int64), mask=is_value_B)
        next_E += tl.sum(is_it_BE, axis=0)


@triton.jit
def ends_of_groups(counts, ends, sources, stride, width, E2: tl.constexpr, P2: tl.constexpr):
    """Grid (1,). `ends[e]`: how many of all sources' numbers belong to the groups up to e; `counts` (sources, stride) begins with theirs."""
    group_E = tl.arange(0, E2)
    total_E = tl.zeros((E2,), dtype=tl.int64)
    for first in range(0, sources, P2):
        source_P1 = (first + tl.arange(0, P2))[:, None]
        here_PE = (source_P1 < sources) & (group_E < width)[None, :]
        total_E += tl.sum(tl.load(counts + source_P1 * stride + group_E[None, :], mask=here_PE, other=0), axis=0)
    tl.store(ends + group_E, tl.cumsum(total_E, axis=0).to(tl.int32), mask=group_E < width)


@triton.jit
def zero_empty_groups(ends, a, b, a_size, b_size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (groups, PARTS). Zeros in both, `a_size` and `b_size` numbers a group, where a group has no row."""
    group, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    if tl.load(ends + group) == begin:
        zero_B = tl.zeros((BLOCK,), dtype=a.dtype.element_ty)
        for first in range(part * BLOCK, a_size, PARTS * BLOCK):
            at_B = first + tl.arange(0, BLOCK)
            tl.store(a + group * a_size + at_B, zero_B, mask=at_B < a_size)
        for first in range(part * BLOCK, b_size, PARTS * BLOCK):
            at_B = first + tl.arange(0, BLOCK)
            tl.store(b + group * b_size + at_B, zero_B, mask=at_B < b_size)
