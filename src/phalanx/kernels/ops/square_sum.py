"""Sums of squares of tensors of any float type, exact enough for a global gradient norm.

`torch.linalg.vector_norm` adds fp32 squares in a few long running sums (1e-3 off over 20 million elements) and has no fast path for
bf16 on a CPU (10 times slower than this one). Here chunks that fit a cache are widened to fp64, in which the square of a bf16 or fp32 number is
exact: the result is within n * 2**-53 of the sum, on every processor and in every order of addition. (`torch.dot` in fp32 leaves the order to the
processor's library and was 4e-6 off over bf16 numbers on an AMD EPYC. fp64 takes the same time for bf16, and 0.3 ns an element more for fp32, which only
machines without the compiled kernels pay; those take 0.1 ns more for bf16.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.scripted import scripted
from phalanx.kernels.device import device_square_sums, runs_programs

CHUNK = 1 << 16
"""Elements: 512 KiB in fp64, which stays in a core's second-level cache."""
PIECE = 1 << 21
"""Elements of one piece of work for a lane."""


def square_sums(tensors: Sequence[torch.Tensor], *, impl: Impl = "fast", lanes: Lanes = SERIAL) -> torch.Tensor:
    """0-d fp64 sum of the squares of all elements of contiguous `tensors`, which are shared out among the lanes in pieces. NaN or infinite where an element is (or the sum
    overflows: fp64, on a GPU without Triton fp32)."""
    device = tensors[0].device
    if impl != "reference" and runs_programs(tensors[0]):
        return device_square_sums(tensors)
    if impl == "reference" or device.type != "cpu" or tensors[0].dtype == torch.float64:
        return torch.stack([_plain(x, impl) for x in tensors]).sum()
    pieces = [x[start : start + PIECE] for x in (t.reshape(-1) for t in tensors) for start in range(0, len(x), PIECE)]
    sums = torch.zeros(len(pieces), dtype=torch.float64)
    work = scripted(_in_chunks)

    def run(i: int, lane: int) -> None:
        native = lanes.rows_for(pieces[i]) if pieces[i].is_contiguous() else None
        if native is not None:
            sums[i] = native.square_sum(pieces[i])
        else:
            work(pieces[i], sums[i], CHUNK)

    lanes.run(run, range(len(pieces)))
    return sums.sum()


def _plain(x: torch.Tensor, impl: Impl) -> torch.Tensor:
    if impl == "reference" or x.dtype == torch.float64:
        return x.to(torch.float64).square().sum()
    return torch.linalg.vector_norm(x, dtype=torch.float32).to(torch.float64).square()


def _in_chunks(flat: torch.Tensor, total: torch.Tensor, chunk: int) -> None:
    wide = torch.empty([min(chunk, flat.numel())], dtype=torch.float64)
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        part = wide[: part.numel()].copy_(part)
        total.add_(torch.dot(part, part))
