"""Tells the C library to keep the memory that tensors give back, because fresh memory is expensive on a CPU.

The kernel zeroes every page at first touch: about 0.2 ms a megabyte with 4 KiB pages, which for the activations and gradients of a step
is a tenth of the step (docs/explanation/cpu-performance.md). glibc hands large blocks back to the kernel at once, or when a few of them are free at the top
of the heap, so that every step pays again. With the setting below blocks up to 32 MiB (glibc's own limit) come from the heap and the
heap never shrinks. Threads share few heaps: with one each, gloo's threads would keep their copies of the gradients (30 MiB a rank in the
default run) where no other thread can use the space. What holes cost is in docs/explanation/memory.md. Lanes must not share one: they allocate all the
time, and waiting for each other's lock and taking over each other's cache lines costs 8 % of a step with two lanes.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
LARGEST_HEAP_BLOCK = 32 << 20
HUGE = 2 << 20
"""Bytes of a huge page, and the least that is worth one."""
NEVER = (1 << 31) - 1


def keep_freed_memory(*, threads: int = 1) -> bool:
    """Settle it for this process and what it forks. False where the C library is not glibc or refuses.

    `threads` that compute, as lanes and as torch's own workers: a heap for the main thread and one for each of the others.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl, macOS
        return False
    settings = ((M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK), (M_TRIM_THRESHOLD, NEVER), (M_ARENA_MAX, 2 * threads - 1))
    return all(bool(mallopt(name, value)) for name, value in settings)


def give_back_freed_memory() -> bool:
    """Return what was freed so far to the system, wherever in the heap it lies: for what is done once, at the start, with tensors that are larger than
    those of a step. False where the C library is not glibc."""
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):
        return False


def in_huge_pages(fresh: torch.Tensor) -> torch.Tensor:
    """Ask for pages of 2 MiB for the memory of `fresh`, which has not been touched yet; returns it.

    For large buffers that a step reads or writes from end to end: looking up small pages is a ninth of the optimizer's time. The buffer gets
    no larger by it. Nothing happens for small ones, on other devices, and where the system does not know such pages.
    """
    size = fresh.untyped_storage().nbytes()
    if fresh.device.type != "cpu" or size < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return fresh
    start = fresh.untyped_storage().data_ptr()
    first, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(first), ctypes.c_size_t(stop - first), mmap.MADV_HUGEPAGE
    )  # advice: it may fail
    return fresh
