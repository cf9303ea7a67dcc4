"""A rank's shard of optimizer state as tensors of its parameters' local shapes, of which only the boxes that the shard covers are there.

Decides nothing: `plan/state_layout.py: shards` says which boxes those are. So a reshard plan moves masters and moments between any two foldings, as it moves
parameters, without ever making a whole buffer. Must never change: a view of a box reads and writes the shard itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from phalanx.plan.layout import FlatLayout
from phalanx.runtime.optimizer_state import ShardedState


class ShardView:
    """Has of a tensor what moving boxes needs: shape, type, device, and `view[slices]` for boxes inside the shard."""

    def __init__(self, shard: torch.Tensor, *, shape: Sequence[int], first: int) -> None:
        """`first`: place in `shard` (1-d) of the local tensor's first element; negative where the shard begins after it."""
        self.shape, self.dtype, self.device = torch.Size(shape), shard.dtype, shard.device
        self._shard, self._first = shard, first
        self._strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))

    def numel(self) -> int:
        return self.shape.numel()

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        """The box as a view of the shard. Raises `IndexError` for one that is not all there."""
        sizes = [part.stop - part.start for part in box]
        at = self._first + sum(part.start * stride for part, stride in zip(box, self._strides, strict=True))
        last = at + sum((n - 1) * stride for n, stride in zip(sizes, self._strides, strict=True))
        if min(sizes, default=1) and not (at >= 0 and last < len(self._shard)):
            raise IndexError(f"{box} of a local tensor {tuple(self.shape)} is not in this rank's shard")
        return self._shard.as_strided(sizes, self._strides, self._shard.storage_offset() + max(at, 0))


def shard_views(state: ShardedState, kind: str) -> dict[str, ShardView]:
    """By parameter: this rank's `master`, `exp_avg` or `exp_avg_sq`."""
    return {
        name: view
        for family in state.families.values()
        for name, view in _views(family.layout, getattr(family, kind)).items()
    }


def _views(layout: FlatLayout, shard: torch.Tensor) -> dict[str, ShardView]:
    """Raises `ValueError` (`shard_range`) where the state of experts is sharded over their holders: its parts lie anywhere in a buffer."""
    first, _ = layout.shard_range()
    return {
        local.param.name: ShardView(shard, shape=local.shape, first=start - first)
        for local, start in zip(layout.params, layout.starts, strict=True)
    }
