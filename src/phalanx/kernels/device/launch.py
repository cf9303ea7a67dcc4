"""Whether Triton's programs can run, and how wide and how many they are.

Must never change: sizes follow from shapes and types, never from values or from the device, so that a result has the same bits on every card of a kind.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


def runs_programs(x: torch.Tensor) -> bool:
    """`x` is on a GPU, and Triton can be imported."""
    return x.device.type == "cuda" and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def block_of(width: int, most: int) -> int:
    """Elements that a program takes at once of `width`: a power of two, at least 16 and at most `most`."""
    return min(max(16, 1 << (width - 1).bit_length()), most)


def warps_of(elements: int) -> int:
    """Warps of a program whose tiles have `elements`: eight numbers a thread, as far as a power of two from 1 to 16 allows."""
    return min(max(1, elements // 256), 16)


def wide_of(*tensors: torch.Tensor) -> Any:
    """Triton's type in which a program computes: fp64 where a tensor is fp64, else fp32."""
    import triton.language as tl

    return tl.float64 if any(x.dtype == torch.float64 for x in tensors) else tl.float32
