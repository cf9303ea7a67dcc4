"""Tells the C library to keep the memory that tensors give back, because fresh memory is dear on a CPU.

The kernel zeroes every page at first touch: about 0.2 ms a megabyte with 4 KiB pages, which for the activations and gradients of a step
is a tenth of the step (docs/performance.md). glibc hands large blocks back to the kernel at once, or when a few of them are free at the top
of the heap, so that every step pays again. With the setting below blocks up to 32 MiB (glibc's own limit) come from the heap and the
heap never shrinks; the peak of the resident memory stays what it was, since nothing is kept that was not in use at the peak.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
LARGEST_HEAP_BLOCK = 32 << 20
NEVER = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Settle it for this process and what it forks. False where the C library is not glibc or refuses."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl, macOS
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_HEAP_BLOCK) and mallopt(M_TRIM_THRESHOLD, NEVER))
