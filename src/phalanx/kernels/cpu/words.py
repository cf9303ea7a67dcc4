"""Word sums of memory: the sum of its 32-bit words, modulo 2^32. One flipped bit changes it by a power of two, whichever bit it is, so none goes unseen.

A sum does not depend on the order of its parts: those of the pieces of a buffer add up to that of the buffer. Bytes that are left over count as a word filled
up with zeros, so pieces are cut at whole words, or say in which byte of a word they begin (`phase`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.kernels.native import CompiledRows

WORDS = 2**32


def word_sum(x: torch.Tensor, *, rows: CompiledRows | None = None, phase: int = 0) -> int | torch.Tensor:
    """Word sum of a contiguous tensor of any type; on a device a 0-d int64 that the host has not waited for. `rows`: compiled kernels, if there are any."""
    if rows is not None and x.dtype in rows.TYPES and x.device.type == "cpu":
        return rows.word_sum(x, phase)
    if x.numel() == 0:
        return 0
    total = reference_word_sum(x, phase)
    return total if x.is_cuda else int(total)


def phase_of(x: torch.Tensor) -> int:
    """Byte of a word of memory in which a tensor begins."""
    return x.data_ptr() % 4


def on_host(totals: Sequence[int | torch.Tensor]) -> list[int]:
    """Word sums as numbers; those of a device in one transfer."""
    there = [x for x in totals if isinstance(x, torch.Tensor)]
    come = iter(torch.stack(there).tolist() if there else ())  # SYNC: of the vote
    return [next(come) if isinstance(x, torch.Tensor) else x for x in totals]


def reference_word_sum(x: torch.Tensor, phase: int = 0) -> torch.Tensor:
    """0-d int64."""
    memory = x.detach().reshape(-1).view(torch.uint8)
    left = (phase + len(memory)) % 4
    if phase or left or memory.storage_offset() % 4:
        memory = torch.cat([memory.new_zeros(phase), memory, memory.new_zeros((4 - left) % 4)])
    return memory.view(torch.int32).sum(dtype=torch.int32).to(torch.int64) % WORDS
