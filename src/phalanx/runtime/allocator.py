"""Tells the C library to keep the memory that tensors give back, because fresh memory is dear on a CPU.

The kernel zeroes every page at first touch: about 0.2 ms a megabyte with 4 KiB pages, which for the activations and gradients of a step
is a tenth of the step (docs/performance.md). glibc hands large blocks back to the kernel at once, or when a few of them are free at the top
of the heap, so that every step pays again. With the setting below blocks up to 32 MiB (glibc's own limit) come from the heap and the
heap never shrinks. All threads share one heap: gloo's threads would else keep their copies of the gradients (30 MiB a rank in the default
run) where no other thread can use the space. What holes cost is in docs/memory.md.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
"""Parameters of mallopt(3)."""
LARGEST_HEAP_BLOCK = 32 << 20
NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Settle it for this process and what it forks. False where the C library is not glibc or refuses."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl, macOS
        return False
    settings = ((M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK), (M_TRIM_THRESHOLD, NEVER), (M_ARENA_MAX, 1))
    return all(bool(mallopt(name, value)) for name, value in settings)
