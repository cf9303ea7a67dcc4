"""A local tensor together with the box of the logical tensor that it is: what checkpoints and verification exchange."""

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
