"""What a rank keeps of optimizer state as tensors of its parameters' local shapes, of which only the boxes that its shards cover are there.

Decides nothing: `plan/layout/state.py: shards` says which boxes those are. So a reshard plan moves masters and moments between any two foldings, as it moves
parameters, without ever making a whole buffer. Must never change: a view of a box reads and writes the state itself.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch

from phalanx.plan.layout import FlatLayout
from phalanx.runtime.state.optimizer import ShardedState


class ShardPart(NamedTuple):
    """Elements `[start, stop)` of a local tensor, row-major, and where they begin in what is kept."""

    start: int
    stop: int
    at: int


class ShardView:
    """Has of a tensor what moving boxes needs: shape, type, device, and `view[slices]` for boxes inside one of its parts."""

    def __init__(self, kept: torch.Tensor, *, shape: Sequence[int], parts: Sequence[ShardPart]) -> None:
        """`kept` is 1-d."""
        self.shape, self.dtype, self.device = torch.Size(shape), kept.dtype, kept.device
        self._kept, self._parts = kept, tuple(parts)
        self._strides = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))

    def numel(self) -> int:
        return self.shape.numel()

    def stride(self) -> tuple[int, ...]:
        return self._strides

    def __getitem__(self, box: tuple[slice, ...]) -> torch.Tensor:
        """The box as a view of what is kept. Raises `IndexError` for one that is not all in one part."""
        sizes = [part.stop - part.start for part in box]
        if not min(sizes, default=1):
            return self._kept.new_empty(sizes)
        first = sum(part.start * stride for part, stride in zip(box, self._strides, strict=True))
        last = first + sum((n - 1) * stride for n, stride in zip(sizes, self._strides, strict=True))
        for start, stop, at in self._parts:
            if start <= first and last < stop:
                return self._kept.as_strided(sizes, self._strides, self._kept.storage_offset() + at + first - start)
        raise IndexError(f"{box} of a local tensor {tuple(self.shape)} is not in what this rank keeps")


def shard_views(state: ShardedState, kind: str, names: Container[str] | None = None) -> dict[str, ShardView]:
    """This rank's `master`, `exp_avg` or `exp_avg_sq` of each parameter. `names`: no buckets without any of these."""
    return {
        name: view
        for family in state.families.values()
        if family.has_any(names)
        for name, view in views_of(family.layout, getattr(family, kind)).items()
    }


def views_of(layout: FlatLayout, kept: torch.Tensor) -> dict[str, ShardView]:
    """Views of (kept_length,) elements, by parameter, that lie as what the rank keeps. Raises `ValueError` where the state of
    experts is sharded over their holders: their parts are no shards."""
    if layout.scattered is not None:
        raise ValueError("the state of experts is sharded over their holders: it has no views")
    runs = layout.kept_runs
    return {
        local.param.name: ShardView(kept, shape=local.shape, parts=_parts(runs, start, start + local.num_elements))
        for local, start in zip(layout.params, layout.starts, strict=True)
    }


def _parts(kept_runs: Sequence[tuple[int, int]], begin: int, end: int) -> list[ShardPart]:
    """Parts of the local tensor that is `[begin, end)` of the buffer."""
    out, at = [], 0
    for first, stop in kept_runs:
        lo, hi = max(first, begin), min(stop, end)
        if lo < hi:
            out.append(ShardPart(lo - begin, hi - begin, at + lo - first))
        at += stop - first
    return out
