"""Copies of a rank's state on the host, from which a checkpoint is written while training goes on.

On a CPU a copy is there when `HostCopies.copy` returns. On a GPU it goes to pinned memory, on a stream of its own beside the next step:

    current stream   step n | forward and backward of step n + 1 ... [order] commit ...
                            \\ event                                  ^ event
    stream of copies         [wait] state -> pinned memory ......... /
    writing thread                                                  [wait] write ...

The host waits in the thread that writes, and nowhere else.

Must never change: a copy is of one step, for it begins behind all that the current stream was given before, and whoever changes or drops state calls
`HostCopies.order` first; a copy is read after `HostCopy.wait` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.runtime.state import BoxTensor

BLOCK_BYTES = 1 << 32
"""Largest block of pinned memory that boxes share. torch's allocator rounds blocks up to powers of two, so that one for each box would be a third too much."""
ALIGN = 64


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """What one save writes."""

    boxes: list[BoxTensor]
    """To be read after `wait`."""
    note: str = ""
    """Why memory that was allocated for it is not pinned; empty: nothing to say."""
    done: Any = None
    """The event of their end, on a device."""
    device: torch.device | None = None

    def wait(self) -> None:
        """Wait, in the thread that writes, until the copies are there."""
        if self.device is not None:
            torch.cuda.set_device(self.device)  # threads begin on device 0, where waiting would cost memory
            self.done.synchronize()  # SYNC: in the thread that writes, beside training


class HostCopies:
    """Memory for copies, kept from save to save: its pages are then already there, and pinned."""

    def __init__(self) -> None:
        self._made_for: object = None
        self._into: list[torch.Tensor] = []
        self._stream: torch.cuda.Stream | None = None
        self._under_way: tuple[Any, Sequence[BoxTensor]] | None = None
        """The end of the newest copy, and what it reads, until `order`."""

    def copy(self, boxes: Sequence[BoxTensor]) -> HostCopy:
        """Copy `boxes`, behind all that the current stream was given so far. The copy before must be of no more use."""
        device = _device_of(boxes)
        note, wanted = "", (device, [(b.tensor.shape, b.tensor.dtype) for b in boxes])
        if self._made_for != wanted:
            self._into = []
            if device is None:
                self._into = [torch.empty(b.tensor.shape, dtype=b.tensor.dtype) for b in boxes]
            else:
                note = self._share_blocks([b.tensor for b in boxes])
            self._made_for = wanted
        done = self._start(boxes, device)
        copied = [BoxTensor(b.name, b.shape, b.box, into, True) for b, into in zip(boxes, self._into, strict=True)]
        return HostCopy(boxes=copied, note=note, done=done, device=device)

    def order(self) -> None:
        """What the current stream is given from here on comes behind the newest copy. The host waits for nothing."""
        if self._under_way is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._under_way[0])
            self._under_way = None

    def _start(self, boxes: Sequence[BoxTensor], device: torch.device | None) -> Any:
        if device is None:
            for into, box in zip(self._into, boxes, strict=True):
                into.copy_(box.tensor)
            return None
        self._stream = self._stream or torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for into, box in zip(self._into, boxes, strict=True):
                into.copy_(box.tensor, non_blocking=True)
            done = self._stream.record_event(torch.cuda.Event(blocking=True))
        self._under_way = done, boxes
        return done

    def _share_blocks(self, tensors: Sequence[torch.Tensor]) -> str:
        """Memory for each of them in pinned blocks; returns why some are not pinned, if so."""
        blocks, places = pack([x.nbytes for x in tensors])
        note, made = "", list[torch.Tensor]()
        for size in blocks:
            try:
                made.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as err:
                note = str(err).splitlines()[0]
                made.append(torch.empty(size, dtype=torch.uint8))
        for x, (block, at) in zip(tensors, places, strict=True):
            into = made[block][at : at + x.nbytes].view(x.dtype).view(x.shape)
            self._into.append(into)  # of the block, which its allocator keeps until copies end
        return note


def _device_of(boxes: Sequence[BoxTensor]) -> torch.device | None:
    """The GPU on which they are; None on a CPU."""
    return next((b.tensor.device for b in boxes if b.tensor.is_cuda), None)


def pack(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Bytes of blocks, which are powers of two, and the block and the first byte of each of `sizes`: largest first, each where there is room."""
    padded = [-(-size // ALIGN) * ALIGN for size in sizes]
    left, blocks, full, places = sum(padded), list[int](), list[int](), [(0, 0)] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -padded[i]):
        found = next((k for k, size in enumerate(blocks) if full[k] + padded[i] <= size), len(blocks))
        if found == len(blocks):
            below = 1 << max(0, left.bit_length() - 1)
            blocks.append(max(min(BLOCK_BYTES, below), 1 << max(0, padded[i] - 1).bit_length()))
            full.append(0)
        places[i] = (found, full[found])
        full[found] += padded[i]
        left -= padded[i]
    return blocks, places
