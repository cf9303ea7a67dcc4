"""Seconds of a piece of work on the device: medians of device events, the L2 cache flushed in between. On a CPU the clock, for the self-test."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch

from phalanx_lab.gpu_check.here import Here

L2_BYTES = 1 << 28
"""More than the cache of any device holds."""


def seconds_of(work: Callable[[], object], here: Here, *, repeats: int = 15) -> float:
    """Median time of `work`, after three runs that are not counted."""
    if not here.on_gpu:
        begin_s = time.perf_counter()
        work()
        return time.perf_counter() - begin_s
    flush = torch.empty(L2_BYTES, dtype=torch.int8, device=here.device)
    for _ in range(3):
        work()
    found = []
    for _ in range(repeats):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def seconds_in_a_row(work: Callable[[], object], here: Here) -> float:
    """Median time of `work` between two of the same, as in a step of many layers: the host prepares the next while the device works. The first half is not counted."""
    if not here.on_gpu:
        return seconds_of(work, here)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
    for mark in marks:
        mark.record()
        work()
    torch.cuda.synchronize()
    found = [begin.elapsed_time(end) / 1e3 for begin, end in itertools.pairwise(marks)]
    return statistics.median(found[20:])


def dense_flops_per_s(here: Here, *, loaded_s: float = 0.0) -> float:
    """Rate of `a @ b`, bf16, 8192 cubed, random data; after so many seconds of nothing else, when the card draws all the power that it may and lowers its clocks."""
    n = here.pick(8192, 64)
    a, b = (torch.randn(n, n, device=here.device, dtype=torch.bfloat16) for _ in range(2))
    end_s = time.perf_counter() + loaded_s
    while here.on_gpu and time.perf_counter() < end_s:
        for _ in range(20):
            a @ b
        torch.cuda.synchronize()
    return 2 * n**3 / seconds_of(lambda: a @ b, here)
