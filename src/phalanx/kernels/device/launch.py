"""Whether Triton's programs can run, and how wide and how many they are.

Must never change: sizes follow from shapes and types, never from values or from the device, so that a result has the same bits on every card of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch


def runs_programs(x: torch.Tensor) -> bool:
    """`x` is on a GPU, and Triton can be imported."""
    return x.is_cuda and _has_triton()


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


@cache
def wide_of(*dtypes: torch.dtype) -> Any:
    """Triton's type in which a program computes: fp64 where a tensor is fp64, else fp32."""
    import triton.language as tl

    return tl.float64 if torch.float64 in dtypes else tl.float32


class Kernel:
    """A program with its warps and constants (its last parameters, all of them, in their order).

    Finding out which version of a program is meant takes Triton several times as long as the launch, so what it found is kept. Who launches often keeps the kernel too (`functools.cache`).
    """

    def __init__(self, program: Any, *, num_warps: int = 4, **constants: Any) -> None:
        self._program, self._named = program, {**constants, "num_warps": num_warps}
        self._constants = tuple(constants.values())
        self._versions: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """`program[grid](*args, **constants)`."""
        if not self._versions:  # also where tensors have no address
            self._first_of_a_version(grid, args)
            return
        version, values = told_apart(args)
        known = self._versions.get(version)
        if known is None:
            self._first_of_a_version(grid, args)
            return
        x, y, z = (*grid, 1, 1)[:3]
        stream = torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())
        known.run(x, y, z, stream, known.function, known.packed_metadata, None, None, None, *values, *self._constants)

    def _first_of_a_version(self, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
        compiled = self._program[grid](*args, **self._named)
        if hasattr(compiled, "packed_metadata") and torch.version.hip is None:  # neither interpreted nor recorded
            self._versions[told_apart(args)[0]] = compiled


_kernel_of = cache(Kernel)


def launch(program: Any, grid: tuple[int, ...], *args: Any, num_warps: int = 4, **constants: Any) -> None:
    """`Kernel`, made and found again here."""
    _kernel_of(program, num_warps=num_warps, **constants)(grid, *args)


def told_apart(args: Sequence[Any]) -> tuple[tuple[Any, ...], list[Any]]:
    """What Triton compiles a version of a program for, and what that is launched with.

    The first has the type of a tensor, whether it begins at a multiple of 16 bytes and its device, and what is told apart of whole numbers. In the second an address stands for
    each tensor, which spares the driver a question about it.
    """
    version: list[Any] = []
    values = []
    for x in args:
        if isinstance(x, torch.Tensor):
            address = x.data_ptr()
            version += x.dtype, address & 15 == 0, x.get_device()
            values.append(address)
        else:
            version.append(_told_of_number(x))
            values.append(x)
    return tuple(version), values


def _told_of_number(x: Any) -> Any:
    if type(x) is int:
        return x == 1, x & 15 == 0, -(2**31) <= x < 2**31, x < 2**63
    return type(x) if isinstance(x, float) else (type(x), x)
