"""What this machine gives a rank: memory used so far, and the matmul rate that utilisation is measured against."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import torch

RATE_SIZES = (1024, 2048)
RATE_SECONDS = 0.25
"""Measuring time of each size: long enough for several products of 2048, short beside a run."""


def resident_bytes() -> int:
    """Memory of this process that is in RAM now; 0 where the system does not say."""
    return _status_kib("VmRSS") * 1024


def peak_resident_bytes() -> int:
    """The most memory of this process that was in RAM at one time."""
    peak = _status_kib("VmHWM") * 1024
    if peak:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_kib(name: str) -> int:
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


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
    """Best rate of a square product on this rank as it computes now (its threads, its neighbours busy with the same)."""
    return max(_rate(size, dtype, device) for size in RATE_SIZES)


def _rate(size: int, dtype: torch.dtype, device: torch.device) -> float:
    generator = torch.Generator().manual_seed(size)
    a, b = (torch.randn(size, size, generator=generator, dtype=torch.float32).to(device, dtype) for _ in range(2))
    out = torch.mm(a, b)
    best_s, end_s = float("inf"), time.perf_counter() + RATE_SECONDS
    while time.perf_counter() < end_s:
        _wait(device)
        begin_s = time.perf_counter()
        torch.mm(a, b, out=out)
        _wait(device)
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2.0 * size**3 / best_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # SYNC: a measurement, before training
