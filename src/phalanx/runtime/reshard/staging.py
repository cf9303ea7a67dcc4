"""Buffers that messages are packed into and unpacked from, counted and bounded.

Decides nothing. Must never change: no more bytes are in use at once than the plan promises (`2 * open_hops * message_bytes`); a buffer is given back
before it is used again, and kept for the next message (its pages are then already there).
"""

from __future__ import annotations

import torch

from phalanx.core.errors import RunError


class Usage:
    """Bytes in use beside source and destination tensors, and the most there ever were."""

    def __init__(self) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int) -> None:
        self.now_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def give(self, nbytes: int) -> None:
        self.now_bytes -= nbytes


class Staging:
    """Buffers of `buffer_bytes` each on `device`, at most `limit_bytes` in use at a time."""

    def __init__(self, *, buffer_bytes: int, limit_bytes: int, device: torch.device) -> None:
        self.buffer_bytes, self.limit_bytes, self.device = buffer_bytes, limit_bytes, device
        self.usage = Usage()
        self._free: list[torch.Tensor] = []

    def take(self) -> torch.Tensor:
        """A buffer of bytes. Raises `RunError` where more would be in use than was promised."""
        if self.usage.now_bytes + self.buffer_bytes > self.limit_bytes:
            raise RunError(
                f"reshard needs more than the {self.limit_bytes} bytes of staging that its plan promises; this is a bug in the executor"
            )
        self.usage.take(self.buffer_bytes)
        return self._free.pop() if self._free else torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """The buffer is not used any more."""
        self.usage.give(self.buffer_bytes)
        self._free.append(buffer)
