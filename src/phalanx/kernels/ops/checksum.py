"""Checksums of tensors on devices: their 32-bit words, each times an odd weight that depends on its place, added up modulo 2^63.

One flipped bit changes the sum by an odd number times a power of two below 2^32, so none goes unseen; words that changed places, or that hold what others should, change it but for a
chance of about 2^-32. Bytes that are left over count as a word filled up with zeros. Whole numbers add up to the same in any order, so every device says the same. (What is in
the host's memory is summed by CRC-32, for which processors have instructions.)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.device import device_checksums, runs_programs

GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, as a signed number."""
LOW = 2**32 - 1
POSITIVE = 2**63 - 1
PIECE = 1 << 22
"""Words that are widened at once."""


def checksums(tensors: Sequence[torch.Tensor], *, impl: Impl = "fast") -> list[int]:
    """Of each tensor, whatever its type and shape, all on one device. Waits for the device, once."""
    if not tensors:
        return []
    dense = [x.detach().contiguous() for x in tensors]
    if impl == "fast" and runs_programs(dense[0]):
        totals_N = device_checksums(dense)
    else:
        totals_N = torch.stack([reference_checksum(x) for x in dense])
    return (totals_N & POSITIVE).tolist()  # SYNC: once for all of them


def reference_checksum(x: torch.Tensor) -> torch.Tensor:
    """0-d int64 of a contiguous tensor, modulo 2^64."""
    memory = x.detach().reshape(-1).view(torch.uint8)
    if len(memory) % 4 or memory.storage_offset() % 4:
        memory = torch.cat([memory, memory.new_zeros(-len(memory) % 4)])
    total = memory.new_zeros((), dtype=torch.int64)
    for first, words in enumerate(memory.view(torch.int32).split(PIECE)):
        start = first * PIECE + 1
        mixed = torch.arange(start, start + len(words), device=x.device) * GOLDEN
        total += ((words.to(torch.int64) & LOW) * ((mixed ^ ((mixed >> 32) & LOW)) | 1)).sum()
    return total
