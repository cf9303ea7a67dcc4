"""Waiting for flags and raising them. A flag is an int32 that holds the number of the last call (epoch) for which its data is there.

Must never change: a flag is read by an atomic with acquire semantics at system scope (a plain load may be served from a cache for ever) and raised by one
with release semantics after a barrier of the program, so that what any of its threads stored before is seen by whoever saw the flag. Flags only
grow, so none has to be lowered between calls. Waiting is bounded: a peer that never comes ends in a number in `status`, not in a hang.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_flags(flags, first, last, epoch, patience, status):
    """Return when `flags[first:last]` have all reached `epoch`, or after `patience` looks at one of them: then status[0] > 0 tells which (+ 1)."""
    for i in range(first, last):
        seen = tl.atomic_add(flags + i, 0, sem="acquire", scope="sys")
        looks = 0
        while (seen < epoch) & (looks < patience):
            seen = tl.atomic_add(flags + i, 0, sem="acquire", scope="sys")
            looks += 1
        if seen < epoch:
            tl.atomic_max(status, i + 1, sem="relaxed", scope="gpu")


@triton.jit
def wait_count(counter, target, patience, status):
    """Return when `counter`, raised by programs of this device with `count_done`, has reached `target`."""
    seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    looks = 0
    while (seen < target) & (looks < patience):
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
        looks += 1
    if seen < target:
        tl.atomic_max(status + 1, 1, sem="relaxed", scope="gpu")


@triton.jit
def count_done(counter):
    """Say that this program's stores so far are done; returns how many said so before."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def raise_flag(flag_table, peer, slot, epoch):
    """Set `slot` of the peer's flags to `epoch`. `flag_table` holds the addresses of all peers' flags."""
    flags = tl.load(flag_table + peer).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags + slot, epoch, sem="release", scope="sys")
