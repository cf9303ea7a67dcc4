"""Starts the program again with the C library's memory settings that can only be given at its start.

glibc keeps a few freed blocks of each small size to itself, per thread, and does not join them with their neighbours. Each tensor leaves two such
splinters at its ends (it is aligned to 64 bytes), and a splinter that is kept apart keeps the space around it from being used for a tensor
of the same size again: the heap of a step grows by a sixth and goes on growing (docs/explanation/memory.md); speed is the same. And it asks for pages of
2 MiB where told to (Linux gives them to those who ask), with which a step takes a twentieth less. The other settings are made while running
(`runtime/processes/allocator.py`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence

TUNABLE = "glibc.malloc.tcache_count=0:glibc.malloc.hugetlb=1"


def with_tunable(environ: Mapping[str, str]) -> dict[str, str] | None:
    """The environment to start with, or None where nothing is to be changed: another C library, or somebody has decided already."""
    given = environ.get("GLIBC_TUNABLES", "")
    if "tcache_count" in given or not _is_glibc():
        return None
    return {**environ, "GLIBC_TUNABLES": f"{given}:{TUNABLE}" if given else TUNABLE}


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, ValueError, OSError):
        return False


def start_again(environ: Mapping[str, str], *, program: str = sys.executable, argv: Sequence[str] = ()) -> None:
    """Become the same program with the setting, in the same process; returns where it has it, or where that is not possible."""
    wanted, words = with_tunable(environ), list(argv or sys.orig_argv)
    if wanted is None or not program or not words:
        return
    with contextlib.suppress(OSError):
        os.execve(program, words, wanted)
