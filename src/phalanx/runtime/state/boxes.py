"""Local tensors that are parts of something larger: boxes of logical tensors, which checkpoints and verification exchange, and segments of a reduced gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.plan.layout import Box


@dataclass(frozen=True, eq=False)
class BoxTensor:
    """`tensor` (contiguous, `box.sizes`) holds `logical[box]` of the logical tensor `name` with shape `shape`.

    `primary` is True on exactly one holder of each element, which is the one that writes it to a checkpoint.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    primary: bool


@dataclass(frozen=True, eq=False)
class Segment:
    """Reduced gradient of the elements `[start, start + len)` of what this rank keeps: its own shard, then copies."""

    start: int
    tensor: torch.Tensor
