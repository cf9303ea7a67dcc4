"""Weights in waves: which rows of which tensors travel together, so that no process holds more than a cap allows.

Decides the waves of a weight sync and the layout of what is read in each: readers share the rows of a wave evenly, each reads its own and keeps nothing
of the wave before. Must never change: every row of every tensor is in exactly one wave, in the order of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.core.errors import ConfigError
from phalanx.core.units import format_bytes
from phalanx.plan.layout import Box, Held, TensorLayout


@dataclass(frozen=True)
class RowRange:
    """Rows `[start, stop)` of a tensor along its dim 0."""

    name: str
    start: int
    stop: int


Wave = tuple[RowRange, ...]


def divide(
    shapes: Mapping[str, Sequence[int]], *, element_bytes: int, readers: int, limit_bytes: int
) -> tuple[Wave, ...]:
    """Waves in which no reader holds more than `limit_bytes` of `element_bytes` an element.

    Raises `ConfigError` naming the least limit where a row of some tensor is larger.
    """
    row_bytes = {name: math.prod(shape[1:]) * element_bytes for name, shape in shapes.items()}
    least = max(row_bytes.values(), default=0)
    if least > limit_bytes:
        name = max(row_bytes, key=lambda n: row_bytes[n])
        rule = f"is too little for one row of {name}, {format_bytes(least)} while it is read"
        raise ConfigError.of(
            "memory", limit_bytes, rule, f"the least is {format_bytes(least)}", subject="the memory of a sync"
        )
    waves: list[list[RowRange]] = []
    left = 0
    for name, shape in shapes.items():
        for rows, nbytes in _cut(name, shape, row_bytes[name], readers=readers, limit_bytes=limit_bytes):
            if not waves or nbytes > left:
                waves.append([])
                left = limit_bytes
            waves[-1].append(rows)
            left -= nbytes
    return tuple(map(tuple, waves))


def _cut(
    name: str, shape: Sequence[int], row_bytes: int, *, readers: int, limit_bytes: int
) -> Iterator[tuple[RowRange, int]]:
    """A tensor in parts of which each reader's share fits, with the bytes of the largest share."""
    count = shape[0] if shape else 1
    most = max(1, limit_bytes // max(row_bytes, 1)) * readers
    for start in range(0, count, most):
        stop = min(start + most, count)
        yield RowRange(name, start, stop), -(-(stop - start) // readers) * row_bytes


def readers_layout(shape: Sequence[int], rows: RowRange, *, readers: int) -> TensorLayout:
    """The rows of a wave over ranks 0 .. readers-1, as even as they divide; local tensors hold those rows alone."""
    share = -(-(rows.stop - rows.start) // readers)
    held: list[tuple[Held, ...]] = []
    local: list[tuple[int, ...]] = []
    for reader in range(readers):
        start = min(rows.start + reader * share, rows.stop)
        stop = min(start + share, rows.stop)
        box = Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
        held.append((Held(box, (0,) * len(shape)),) if stop > start else ())
        local.append(box.sizes)
    return TensorLayout(shape=tuple(shape), ranks=tuple(range(readers)), held=tuple(held), local_shapes=tuple(local))


def wave_rows(layout: TensorLayout, rows: RowRange) -> TensorLayout:
    """The same holders and local tensors, of these rows alone."""
    held = tuple(tuple(part for h in of_rank for part in _within(h, rows)) for of_rank in layout.held)
    return TensorLayout(
        shape=layout.shape, ranks=layout.ranks, held=held, local_shapes=layout.local_shapes, terms=layout.terms
    )


def _within(held: Held, rows: RowRange) -> Iterator[Held]:
    first = held.box.offsets[0]
    start, stop = max(first, rows.start), min(first + held.box.sizes[0], rows.stop)
    if start < stop:
        box = Box((start, *held.box.offsets[1:]), (stop - start, *held.box.sizes[1:]))
        yield Held(box, (held.local[0] + start - first, *held.local[1:]))
