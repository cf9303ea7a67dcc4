"""Word sums of the shards of a gradient buffer, taken while it is filled, where messages are checked: what is sent is then known without reading it again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.kernels.cpu.words import WORDS
from phalanx.kernels.native import CompiledRows
from phalanx.plan.layout import FlatLayout


class ShardTotals:
    """Of one buffer: by parameter and shard (`kernels/cpu/words.py`)."""

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, rows: CompiledRows) -> None:
        self._dtype, self._rows, self._num_shards, length = dtype, rows, layout.num_shards, layout.shard_length
        self._cuts = [
            [
                (shard, max(start, shard * length), min(start + local.num_elements, (shard + 1) * length))
                for shard in range(start // length, -(-(start + local.num_elements) // length))
            ]
            for local, start in zip(layout.params, layout.starts, strict=True)
        ]
        self._starts = layout.starts

    def begin(self) -> None:
        self._found: dict[int, list[tuple[int, int]]] = {}

    def collect(self, index: int, grad: torch.Tensor, flat: torch.Tensor, *, add: bool) -> bool:
        """Write a gradient into the buffer, or add it; False, and nothing is written, where there is no function for it."""
        self._found.pop(index, None)
        if not self._rows.can_take(grad) or torch.promote_types(grad.dtype, torch.float32) != self._dtype:
            return False
        if not grad.is_contiguous():
            return False
        each, at = grad.detach().view(-1), self._starts[index]
        self._found[index] = [
            (shard, self._rows.collect(each[first - at : stop - at], flat[first:stop], add=add))
            for shard, first, stop in self._cuts[index]
        ]
        return True

    def of_shards(self, seen: Sequence[bool]) -> list[int] | None:
        """Those of the whole shards; None where a gradient went into the buffer by another way. What was not seen is zero."""
        if any(has and index not in self._found for index, has in enumerate(seen)):
            return None
        totals = [0] * self._num_shards
        for each in self._found.values():
            for shard, total in each:
                totals[shard] = (totals[shard] + total) % WORDS
        return totals
