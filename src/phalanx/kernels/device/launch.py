"""Whether Triton's programs can run, and how wide and how many they are.

Must never change: sizes follow from shapes and types, never from values or from the device, so that a result has the same bits on every card of a kind.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

_compiled: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
"""Program, warps and constants -> versions of the arguments -> what Triton compiled."""


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


def launch(program: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """`program[grid](*args, **constants)`; `constants` are its last parameters, all of them, in their order.

    Finding out which version of a program is meant takes Triton several times as long as the launch, so what it found is kept.
    """
    versions = _compiled.setdefault((id(program), num_warps, *constants.values()), {})
    known = versions.get(tuple(map(version_of, args))) if versions else None
    if known is None:
        compiled = program[grid](*args, **constants, num_warps=num_warps)
        if hasattr(compiled, "packed_metadata") and torch.version.hip is None:  # neither interpreted nor recorded
            versions[tuple(map(version_of, args))] = compiled
        return
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
    known.run(x, y, z, stream, known.function, known.packed_metadata, None, None, None, *args, *constants.values())


def version_of(x: Any) -> Any:
    """What Triton compiles a version of a program for: the type of a tensor, whether it begins at a multiple of 16 bytes and its device, and what it tells apart of whole numbers."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.data_ptr() & 15 == 0, x.get_device()
    if type(x) is int:
        return x == 1, x & 15 == 0, -(2**31) <= x < 2**31, x < 2**63
    return type(x) if isinstance(x, float) else (type(x), x)
