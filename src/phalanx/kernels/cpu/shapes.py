"""Shapes that a CPU likes: few different row counts, and rows that do not all fall into the same cache sets."""

from __future__ import annotations

import torch

SPACE = 32
"""Elements between rows of a scratch matrix: one cache line in bf16, so that rows are never a power of two bytes apart."""


def padded_rows(num_rows: int, dtype: torch.dtype) -> int:
    """`num_rows` rounded up to four significant bits, at least 16, for bf16; unchanged for types whose products need no code of their own.

    Eight sizes an octave waste 3 % of the work on average and keep the number of shapes that oneDNN ever sees below a hundred.
    """
    if dtype not in (torch.bfloat16, torch.float16) or num_rows == 0:
        return num_rows
    step = max(16, 1 << max(0, num_rows.bit_length() - 4))
    return -(-num_rows // step) * step


def spaced(rows: int, columns: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialised (rows, columns) of the type of `like`, with space between the rows.

    The space holds zeros: with AMX, oneDNN 3.12 reads past the end of a row up to the next multiple of 32 and multiplies what it finds
    by zero, which is NaN if it finds a NaN.
    """
    whole = like.new_empty(rows, columns + SPACE)
    whole[:, columns:].zero_()
    return whole[:, :columns]


BLOCK = 1 << 18
"""Elements of a block of an elementwise kernel: 1 MiB in fp32. Smaller blocks stay closer to the core, but every operation on one costs
two microseconds of the interpreter, which the lanes share."""


def cache_blocks(rows: int, columns: int, *, elements: int = BLOCK) -> list[slice]:
    """Rows cut into blocks of about `elements` elements."""
    size = max(1, elements // max(1, columns))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
