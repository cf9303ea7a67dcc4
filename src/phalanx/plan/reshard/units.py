"""Unit tasks of a move: the boxes of one logical tensor which all their holders hold whole and all their needers need whole.

Decides how two layouts are cut against each other. Must never change: the units of a move are disjoint and tile what the destination needs, each has
one set of holders for each term of the source and one set of needers, and their order depends on the layouts alone: by destination box in the order
of the destination's ranks, then by source box. (Section 2 of arXiv 2211.05322, for any boxes in place of tiles.)

Moves with equal layouts and item size share one `Template`, which is cut once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.layout import Box, TensorLayout, box_problems, coverage_problems
from phalanx.plan.reshard.types import Hosts, Move

Ints = NDArray[np.int64]
Ranks = tuple[int, ...]

PAIRS_AT_ONCE = 1 << 20
"""Pairs of boxes that are compared in one go: 20 MB of temporaries."""


class Cut(NamedTuple):
    """Disjoint boxes `[low, high)`, (n, dims) each, and who has each: for each term, the ranks in ascending order."""

    low: Ints
    high: Ints
    owners: tuple[tuple[Ranks, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Template:
    """The unit tasks of all moves with one pair of layouts. Unit u goes from source box `src_of[u]` to destination box `dst_of[u]`."""

    moves: tuple[int, ...]
    """Numbers of the moves, ascending."""
    itemsize: int
    holders: tuple[tuple[Ranks, ...], ...]
    """Holders of each source box: for each term, its ranks."""
    needers: tuple[Ranks, ...]
    """Ranks that need each destination box."""
    src_of: Ints
    dst_of: Ints
    low: Ints
    high: Ints
    elements: Ints

    @property
    def num_units(self) -> int:
        return len(self.src_of)

    @property
    def num_terms(self) -> int:
        return len(self.holders[0]) if self.holders else 1

    def box(self, unit: int) -> Box:
        low = self.low[unit].tolist()
        return Box(tuple(low), tuple((self.high[unit] - self.low[unit]).tolist()))


def templates_of(moves: Sequence[Move], hosts: Hosts) -> tuple[Template, ...]:
    """Templates in the order of their first move. Raises `PlanError` with all problems: lost boxes with tensor and box, ranks without a host."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    layouts: dict[TensorLayout, TensorLayout] = {}
    seen: dict[int, int] = {}

    def number(layout: TensorLayout) -> int:
        """Layouts are compared once each: builders share them, and comparing 50,000 big ones takes seconds."""
        if id(layout) not in seen:
            seen[id(layout)] = id(layouts.setdefault(layout, layout))
        return seen[id(layout)]

    for index, move in enumerate(moves):
        groups.setdefault((number(move.src), number(move.dst), move.itemsize), []).append(index)
    made: list[Template] = []
    problems: list[Problem] = []
    cuts: dict[tuple[int, bool], Cut] = {}
    unsound = {at: found for at, layout in _by_number(moves, seen).items() if (found := box_problems(layout))}
    for (src, dst, _), indices in groups.items():
        move = moves[indices[0]]
        found = _rank_problems(move, hosts)
        for side, at in (("src", src), ("dst", dst)):
            found += [replace(p, where=f"{move.name}.{side}: {p.where}") for p in unsound.get(at, [])]
        if src in unsound or dst in unsound:
            problems += found
            continue
        template = None
        if not found and move.src.shape == move.dst.shape and move.dst.num_terms == 1:
            for key, layout in (((src, True), move.src), ((dst, False), move.dst)):
                if key not in cuts:
                    cuts[key] = cut_source(layout) if key[1] else cut_needers(layout)
            template = _template(move, indices, cuts[src, True], cuts[dst, False])
            wanted = int((cuts[dst, False].high - cuts[dst, False].low).prod(axis=1).sum())
        if template is None or int(template.elements.sum()) != wanted:
            found += [p for i in indices for p in coverage_problems(moves[i].src, moves[i].dst, name=moves[i].name)]
        problems += found
        if template is not None:
            made.append(template)
    raise_if(problems, PlanError, subject="the move between layouts")
    return tuple(made)


def _by_number(moves: Sequence[Move], numbers: Mapping[int, int]) -> dict[int, TensorLayout]:
    """Each layout that differs from the others once."""
    return {numbers[id(layout)]: layout for move in moves for layout in (move.src, move.dst)}


def _rank_problems(move: Move, hosts: Hosts) -> list[Problem]:
    problems = []
    if move.itemsize < 1:
        problems.append(Problem(where=f"{move.name}.itemsize", value=move.itemsize, rule="must be at least 1"))
    for side, layout in (("src", move.src), ("dst", move.dst)):
        stray = max(layout.ranks, default=0)
        if stray >= len(hosts.host_of_rank):
            rule, hint = f"has no host: hosts are given for {len(hosts.host_of_rank)} ranks", "give hosts of all ranks"
            problems.append(Problem(where=f"{move.name}.{side}.ranks", value=stray, rule=rule, hint=hint))
    return problems


def _template(move: Move, indices: Sequence[int], src: Cut, dst: Cut) -> Template:
    dst_of, src_of = crossing(dst, src)
    low = np.maximum(src.low[src_of], dst.low[dst_of])
    high = np.minimum(src.high[src_of], dst.high[dst_of])
    return Template(
        moves=tuple(indices),
        itemsize=move.itemsize,
        holders=src.owners,
        needers=tuple(owners[0] for owners in dst.owners),
        src_of=src_of,
        dst_of=dst_of,
        low=low,
        high=high,
        elements=(high - low).prod(axis=1),
    )


def cut_needers(layout: TensorLayout) -> Cut:
    """Disjoint boxes of a destination, with the ranks that need each."""
    return _cut_ranks(layout, range(len(layout.ranks)))


def cut_source(layout: TensorLayout) -> Cut:
    """Disjoint boxes of a source, with the holders of each term. What some term of has no holder is left out."""
    if layout.num_terms == 1:
        return _cut_ranks(layout, range(len(layout.ranks)))
    whole: Cut | None = None
    for term in range(layout.num_terms):
        one = _cut_ranks(layout, [i for i, t in enumerate(layout.terms) if t == term])
        whole = one if whole is None else _common(whole, one)
    assert whole is not None
    return whole


def _common(a: Cut, b: Cut) -> Cut:
    """Intersections, which have the owners of both."""
    of_a, of_b = crossing(a, b)
    owners = tuple(a.owners[i] + b.owners[j] for i, j in zip(of_a.tolist(), of_b.tolist(), strict=True))
    return Cut(np.maximum(a.low[of_a], b.low[of_b]), np.minimum(a.high[of_a], b.high[of_b]), owners)


def _cut_ranks(layout: TensorLayout, positions: Sequence[int]) -> Cut:
    """The boxes that the ranks at some positions have, made disjoint."""
    ranks_of: dict[Box, list[int]] = {}
    boxes_of: dict[int, tuple[Box, ...]] = {}
    for position in positions:
        held = layout.held[position]
        if id(held) not in boxes_of:
            boxes_of[id(held)] = tuple(one.box for one in held if one.box.num_elements)
        for box in boxes_of[id(held)]:
            ranks_of.setdefault(box, []).append(layout.ranks[position])
    dims = len(layout.shape)
    low = np.array([box.offsets for box in ranks_of], dtype=np.int64).reshape(len(ranks_of), dims)
    sizes = np.array([box.sizes for box in ranks_of], dtype=np.int64).reshape(len(ranks_of), dims)
    owners = [tuple(sorted(ranks)) for ranks in ranks_of.values()]
    return _disjoint(low, low + sizes, owners)


def _disjoint(low: Ints, high: Ints, owners: Sequence[Ranks]) -> Cut:
    """Boxes that overlap without being equal are cut along each other; what several cover has all their ranks."""
    plain = Cut(low, high, tuple((ranks,) for ranks in owners))
    first, second = crossing(plain, plain)
    if len(first) == len(low):  # each meets only itself
        return plain
    tangled = np.unique(first[first != second])
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], set[int]] = {}
    for box_low, box_high, members in _refined(low[tangled], high[tangled], tangled.tolist(), 0):
        parts.setdefault((box_low, box_high), set()).update(r for i in members for r in owners[i])
    free = np.setdiff1d(np.arange(len(low)), tangled)
    lows = np.array([p for p, _ in parts], dtype=np.int64).reshape(len(parts), low.shape[1])
    highs = np.array([p for _, p in parts], dtype=np.int64).reshape(len(parts), low.shape[1])
    who = [owners[i] for i in free.tolist()] + [tuple(sorted(ranks)) for ranks in parts.values()]
    return Cut(np.concatenate([low[free], lows]), np.concatenate([high[free], highs]), tuple((ranks,) for ranks in who))


def _refined(
    low: Ints, high: Ints, members: list[int], dim: int
) -> list[tuple[tuple[int, ...], tuple[int, ...], list[int]]]:
    """Disjoint boxes over the dims from `dim` on, each with the members that cover it; neighbours with the same members are one."""
    if dim == low.shape[1]:
        return [((), (), members)]
    edges = np.unique(np.concatenate([low[:, dim], high[:, dim]]))
    runs: list[tuple[int, int, NDArray[np.bool_]]] = []
    for start, stop in itertools.pairwise(edges.tolist()):
        active = (low[:, dim] <= start) & (high[:, dim] >= stop)
        if runs and runs[-1][1] == start and np.array_equal(runs[-1][2], active):
            runs[-1] = (runs[-1][0], stop, active)
        elif active.any():
            runs.append((start, stop, active))
    out = []
    for start, stop, active in runs:
        inside = [m for m, a in zip(members, active.tolist(), strict=True) if a]
        for rest_low, rest_high, who in _refined(low[active], high[active], inside, dim + 1):
            out.append(((start, *rest_low), (stop, *rest_high), who))
    return out


def crossing(a: Cut, b: Cut) -> tuple[Ints, Ints]:
    """Numbers of the pairs of boxes that share an element, by the number in `a`, then in `b`."""
    rows = max(1, PAIRS_AT_ONCE // max(1, len(b.low)))
    found_a, found_b = [], []
    for start in range(0, len(a.low), rows):
        part = slice(start, start + rows)
        hit = np.ones((len(a.low[part]), len(b.low)), dtype=bool)
        for dim in range(a.low.shape[1]):
            hit &= a.low[part, dim, None] < b.high[None, :, dim]
            hit &= a.high[part, dim, None] > b.low[None, :, dim]
        at_a, at_b = np.nonzero(hit)
        found_a.append(at_a + start)
        found_b.append(at_b)
    if not found_a:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    return np.concatenate(found_a), np.concatenate(found_b)
