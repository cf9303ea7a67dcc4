"""What this machine gives a rank: memory used so far, the matmul rate that utilisation is measured against, and the versions of what decides a run."""

from __future__ import annotations

import platform
import time
from importlib import metadata

import torch

from phalanx.core.process import peak_resident_bytes, resident_bytes
from phalanx.runtime.comm import give_back_freed_memory, synchronize

RATE_SIZES = (1024, 2048, 4096)
RATE_SECONDS = 0.2
"""Measuring time of each size."""
RATE_PATIENCE_S = 0.04
"""A size is tried only where the one before took less than this: each one takes eight times as long."""


class MemoryMeter:
    """Memory that training takes: the peak of this rank, less what it held when the meter was made (imports, process groups)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = resident_bytes()

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, peak_resident_bytes() - self._before)


@torch.no_grad()
def matmul_flops_per_s(dtype: torch.dtype, device: torch.device) -> float:
    """Rate of square products on this rank. Ranks that share cores measure at the same time: their rates then add up to the machine's.

    The matrices are no smaller than a step's tensors, and come before them: their memory goes back to the system, or 50 MiB of fp32 stay in pieces that
    nothing fits into.
    """
    best = 0.0
    for size in RATE_SIZES:
        product_s = _product_s(size, dtype, device)
        best = max(best, 2.0 * size**3 / product_s)
        if product_s > RATE_PATIENCE_S:
            break
    if device.type == "cpu":
        give_back_freed_memory()
    return best


def _product_s(size: int, dtype: torch.dtype, device: torch.device) -> float:
    """Mean time of one square product. (The shortest would ignore that ranks take turns on a core.)"""
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.mm(a, b)
    synchronize(device)  # SYNC: a measurement, before training
    begin_s, count = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - begin_s) < RATE_SECONDS:
        torch.mm(a, b, out=out)
        synchronize(device)  # SYNC: a measurement, before training
        count += 1
    return passed_s / count


def versions() -> dict[str, str]:
    """Versions of what decides a run."""
    found = {"python": platform.python_version()}
    for package in ("phalanx", "torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found
