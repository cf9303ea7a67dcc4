"""Layouts of a tensor over an N-dimensional mesh of ranks, one placement a mesh axis; and their short text form `2x4 S0RR`.

Decides which box each coordinate holds. Must never change: a split follows `torch.chunk` (pieces of `ceil(size / count)`, the last ones smaller or
empty), and each axis splits what the axes before it left. So the order of the axes matters: `S01` (axis 0, then 1) and `S10` are different layouts.

    Shard(dim)           the local dim in one chunk for each coordinate
    Strided(dim, f)      first f chunks, then each of them one chunk for each coordinate, of which a rank holds f (torch's `_StridedShard`)
    Ragged(dim, sizes)   pieces of these sizes
    Replicate()          nothing; Partial(): a term of a sum for each coordinate

Text: mesh sizes, then a symbol for each tensor dim: `R`, or `S` and the axes that split it in their order; `2x4 S01RR P0`: axis 0 holds terms of a sum.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.layout import Box, Held, TensorLayout

Run = tuple[int, int]
"""Offset and size, along one dim."""


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class Strided:
    dim: int
    split_factor: int


@dataclass(frozen=True)
class Ragged:
    dim: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Partial:
    pass


Placement = Shard | Strided | Ragged | Replicate | Partial


def mesh_layout(
    shape: Sequence[int],
    sizes: Sequence[int],
    placements: Sequence[Placement],
    *,
    ranks: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> TensorLayout:
    """The layout of a tensor over a mesh of `sizes`, whose ranks are listed row by row (default 0, 1, ...).

    `order`: mesh axes in the order in which they split (default 0, 1, ...). Raises `PlanError` with all problems.
    """
    ranks = tuple(range(math.prod(sizes))) if ranks is None else tuple(ranks)
    order = tuple(range(len(sizes))) if order is None else tuple(order)
    raise_if(_problems(shape, sizes, placements, ranks, order), PlanError, subject="mesh layout")
    runs = [_runs_of_dim(dim, shape[dim], sizes, placements, order) for dim in range(len(shape))]
    partial = [axis for axis in order if isinstance(placements[axis], Partial)]
    made: dict[tuple[tuple[Run, ...], ...], tuple[tuple[Held, ...], tuple[int, ...]]] = {}
    held, shapes, terms = [], [], []
    for coords in itertools.product(*map(range, sizes)):
        mine = tuple(table[tuple(coords[axis] for axis in axes)] for axes, table in runs)
        if mine not in made:
            made[mine] = _held(mine), tuple(sum(size for _, size in dim_runs) for dim_runs in mine)
        boxes, local_shape = made[mine]
        held.append(boxes)
        shapes.append(local_shape)
        terms.append(_number([coords[axis] for axis in partial], [sizes[axis] for axis in partial]))
    return TensorLayout(
        shape=tuple(shape),
        ranks=ranks,
        held=tuple(held),
        local_shapes=tuple(shapes),
        terms=tuple(terms) if partial else (),
    )


def _number(coords: Sequence[int], sizes: Sequence[int]) -> int:
    out = 0
    for coord, size in zip(coords, sizes, strict=True):
        out = out * size + coord
    return out


def _dim_of(placement: Placement) -> int | None:
    return None if isinstance(placement, (Replicate, Partial)) else placement.dim


def _runs_of_dim(
    dim: int, size: int, sizes: Sequence[int], placements: Sequence[Placement], order: Sequence[int]
) -> tuple[tuple[int, ...], dict[tuple[int, ...], tuple[Run, ...]]]:
    """The axes that split a dim, and the runs of it that each coordinate on these axes holds, in the order of the local tensor."""
    axes = tuple(axis for axis in order if _dim_of(placements[axis]) == dim)
    table: dict[tuple[int, ...], tuple[Run, ...]] = {(): ((0, size),)}
    for axis in axes:
        table = {
            (*coords, i): part
            for coords, runs in table.items()
            for i, part in enumerate(_split(runs, placements[axis], sizes[axis]))
        }
    return axes, table


def _split(runs: tuple[Run, ...], placement: Placement, count: int) -> list[tuple[Run, ...]]:
    """What each of `count` coordinates gets of the local dim `runs`."""
    length = sum(size for _, size in runs)
    if isinstance(placement, Ragged):
        stops = tuple(itertools.accumulate(placement.sizes))
        return [_cut(runs, stop - size, stop) for size, stop in zip(placement.sizes, stops, strict=True)]
    if isinstance(placement, Strided):
        outer = [_cut(runs, *bounds) for bounds in _chunks(length, placement.split_factor)]
        inner = [_split(part, Shard(placement.dim), count) for part in outer]
        return [_joined([run for parts in inner for run in parts[i]]) for i in range(count)]
    return [_cut(runs, *bounds) for bounds in _chunks(length, count)]


def _chunks(length: int, count: int) -> list[Run]:
    """[start, stop) of each chunk as `torch.chunk` cuts them, trailing ones empty."""
    size = -(-length // count)
    return [(min(i * size, length), min((i + 1) * size, length)) for i in range(count)]


def _cut(runs: Sequence[Run], start: int, stop: int) -> tuple[Run, ...]:
    """Elements [start, stop) of runs that are laid end to end."""
    out, at = [], 0
    for offset, size in runs:
        low, high = max(start, at), min(stop, at + size)
        if low < high:
            out.append((offset + low - at, high - low))
        at += size
    return tuple(out)


def _joined(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The same with neighbours made one."""
    out: list[Run] = []
    for offset, size in runs:
        if out and sum(out[-1]) == offset:
            out[-1] = (out[-1][0], out[-1][1] + size)
        else:
            out.append((offset, size))
    return tuple(out)


def _held(runs: Sequence[Sequence[Run]]) -> tuple[Held, ...]:
    """Boxes of a rank, and where they lie in its local tensor."""
    placed = []
    for dim_runs in runs:
        stops = itertools.accumulate(size for _, size in dim_runs)
        placed.append([(offset, size, stop - size) for (offset, size), stop in zip(dim_runs, stops, strict=True)])
    return tuple(
        Held(Box(tuple(o for o, _, _ in part), tuple(s for _, s, _ in part)), tuple(at for _, _, at in part))
        for part in itertools.product(*placed)
    )


def _problems(
    shape: Sequence[int],
    sizes: Sequence[int],
    placements: Sequence[Placement],
    ranks: Sequence[int],
    order: Sequence[int],
) -> list[Problem]:
    problems = []
    if any(size < 1 for size in sizes):
        problems.append(Problem(where="mesh", value=tuple(sizes), rule="each axis has 1 rank or more", hint="use 1"))
    if any(size < 0 for size in shape):
        problems.append(Problem(where="shape", value=tuple(shape), rule="no dim is negative"))
    if len(placements) != len(sizes):
        rule = f"one for each of the {len(sizes)} mesh axes"
        problems.append(Problem(where="placements", value=len(placements), rule=rule, hint="use Replicate()"))
    if sorted(order) != list(range(len(sizes))):
        rule = f"names each of the {len(sizes)} mesh axes once"
        problems.append(Problem(where="order", value=tuple(order), rule=rule, hint="leave it out for 0, 1, ..."))
    if len(set(ranks)) != len(ranks) or len(ranks) != math.prod(sizes):
        rule = f"lists {math.prod(sizes)} ranks, each once"
        problems.append(Problem(where="ranks", value=len(set(ranks)), rule=rule, hint="leave it out for 0, 1, ..."))
    for axis, placement in enumerate(placements):
        dim = _dim_of(placement)
        if dim is not None and not 0 <= dim < len(shape):
            rule = f"must be one of the {len(shape)} dims of the tensor"
            problems.append(Problem(where=f"placements[{axis}].dim", value=dim, rule=rule, hint="count from 0"))
        if isinstance(placement, Strided) and placement.split_factor < 1:
            where, value = f"placements[{axis}].split_factor", placement.split_factor
            problems.append(Problem(where=where, value=value, rule="must be at least 1", hint="use 1"))
    return problems or _ragged_problems(shape, sizes, placements, order)


def _ragged_problems(
    shape: Sequence[int], sizes: Sequence[int], placements: Sequence[Placement], order: Sequence[int]
) -> list[Problem]:
    problems = []
    for at, axis in enumerate(order):
        placement = placements[axis]
        if not isinstance(placement, Ragged):
            continue
        before = [b for b in order[:at] if _dim_of(placements[b]) == placement.dim]
        size = shape[placement.dim]
        where = f"placements[{axis}].sizes"
        if before:
            rule = "must be of the first axis that splits its dim"
            problems.append(Problem(where=where, value=placement.sizes, rule=rule, hint="put it first in the order"))
        elif len(placement.sizes) != sizes[axis] or sum(placement.sizes) != size or min(placement.sizes) < 0:
            rule = f"must be {sizes[axis]} sizes that add up to {size}, none negative"
            problems.append(Problem(where=where, value=placement.sizes, rule=rule))
    return problems


# ---- text -----------------------------------------------------------------------------------------------------------------------

MOST_RANKS = 2_000_000
"""Of a mesh; the largest published cluster has 200,000 devices."""
_SYMBOL = re.compile(r"R|S\d{1,3}")
_TEXT = re.compile(r"(?P<mesh>\d{1,9}(x\d{1,9})*)\s+(?P<spec>(R|S\d{1,3})*)(\s+P(?P<partial>\d{1,3}))?")


def mesh_sizes(text: str) -> tuple[int, ...]:
    """The sizes of the mesh in `2x4 S0RR`. Raises `PlanError` as `read_layout` does."""
    return tuple(map(int, _match(text, where="layout")["mesh"].split("x")))


def read_layout(text: str, shape: Sequence[int], *, first_rank: int = 0, where: str = "layout") -> TensorLayout:
    """The layout `2x4 S0RR` of a tensor, on consecutive ranks. Raises `PlanError` with all problems, naming `where`."""
    match = _match(text, where=where)
    sizes = tuple(map(int, match["mesh"].split("x")))
    symbols = _SYMBOL.findall(match["spec"])
    partial = [int(digit) for digit in match["partial"] or ""]
    split = [(int(digit), dim) for dim, symbol in enumerate(symbols) for digit in symbol[1:]]
    used = [axis for axis, _ in split] + partial
    problems = []
    if len(symbols) != len(shape):
        rule, hint = f"needs a symbol for each of the {len(shape)} tensor dims", "R for a dim that is not split"
        problems.append(Problem(where=where, value=text, rule=rule, hint=hint))
    strays = sorted({axis for axis in used if axis >= len(sizes)})
    if strays:
        rule = f"names axis {strays[0]} of a mesh of {len(sizes)} axes"
        problems.append(Problem(where=where, value=text, rule=rule, hint="count from 0"))
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        problems.append(Problem(where=where, value=text, rule=f"uses mesh axis {twice[0]} twice", hint="use it once"))
    if 0 in sizes:
        problems.append(Problem(where=where, value=text, rule="each mesh axis has 1 rank or more", hint="use 1"))
    if math.prod(sizes) > MOST_RANKS:
        rule, hint = f"has at most {MOST_RANKS:,} ranks", f"use {MOST_RANKS}"
        problems.append(Problem(where=where, value=text, rule=rule, hint=hint))
    raise_if(problems, PlanError, subject="layout")
    placements: list[Placement] = [Replicate()] * len(sizes)
    for axis, dim in split:
        placements[axis] = Shard(dim)
    for axis in partial:
        placements[axis] = Partial()
    order = [*used, *(axis for axis in range(len(sizes)) if axis not in used)]
    ranks = range(first_rank, first_rank + math.prod(sizes))
    return mesh_layout(shape, sizes, placements, ranks=ranks, order=order)


def _match(text: str, *, where: str) -> re.Match[str]:
    match = _TEXT.fullmatch(text.strip())
    if match is None:
        rule = "is not a mesh and a symbol for each tensor dim"
        problem = Problem(where=where, value=text, rule=rule, hint="write 2x4 S0RR, 2x4 S01R or 4x2 RS1 P0")
        raise PlanError([problem], subject="layout")
    return match
