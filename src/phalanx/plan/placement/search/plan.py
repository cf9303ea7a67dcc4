"""The best placement of all layers together: best of the rules, joined over layers, then improved.

Decides where every replica lives. A layer matters by its sorted replica counts only (its *pattern*), so layers of one pattern share one table of copies,
with their experts named in it: then all of them die of the same losses, and no more. (Layers that are planned one by one die of different ones: 12 layers
recover with 0.59 instead of 0.96.) Patterns are placed one after the other, each by the rule that adds fewest fatal losses to those before; the mix is
compared with every rule alone, and random swaps improve the winner where it may not be optimal (`rules.segments_fit`).

Must never change: compared from the smallest number of lost hosts upward, the result is never worse than the printed rule or spread for the same loads; and
each expert is on `floor` hosts at least.

Shapes: L layers, E experts, N hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.placement.search.balance import levelled, name_rows
from phalanx.plan.placement.search.host_pool import HostPool
from phalanx.plan.placement.search.hosts import HostPlacement, from_copies
from phalanx.plan.placement.search.local_search import (
    MAX_HOSTS,
    Counts,
    FatalTable,
    holder_sets,
    least_fatal,
    local_search,
)
from phalanx.plan.placement.search.order import ordered_hosts
from phalanx.plan.placement.search.probability import certify, fatal_counts
from phalanx.plan.placement.search.replicas import Floats, ReplicaCounts, paper_counts, read_loads
from phalanx.plan.placement.search.rules import (
    Copies,
    compact,
    complement_overlap,
    fill,
    host_loads,
    keep_apart,
    least_loaded,
    max_overlap,
    safe_spread,
    segments,
    segments_fit,
    spread,
    topped_up,
)

Score = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long to look. The result is the same on every rank, because moves are counted, not seconds."""

    swaps: int | None = None
    """Swaps tried for each pattern; None: 1500 for up to 8 hosts, 600 for up to 10, 200 beyond, where each takes longer."""
    balance_swaps: int | None = None
    """Swaps tried for each layer to level its load at no cost in recovery."""
    seed: int = 0

    def of(self, num_hosts: int, asked: int | None, num_parts: int) -> int:
        if asked is not None:
            return asked
        each = 1500 if num_hosts <= 8 else 600 if num_hosts <= 10 else 200
        return min(each, 6000 // max(1, num_parts))


RULES = ("printed", "spread", "compact", "least_loaded")
"""What others do; `rule_placement` makes them."""


def rule_placement(rule: str, loads: ArrayLike, counts: ReplicaCounts, pool: HostPool) -> HostPlacement:
    """One of `RULES`, as it is: nothing repaired, hosts in plan order. All but `least_loaded` with the counts of the paper, uncapped.

    `floor` of the result is what the rule was asked for, whether it keeps it or not (`check` tells).
    """
    loads_LE = read_loads(loads)
    rows = []
    for layer, loads_E in enumerate(loads_LE):
        asked = (
            np.array(counts.counts[layer])
            if rule == "least_loaded"
            else paper_counts(loads_E, pool.num_slots, floor=counts.floor)
        )
        order = sorted(range(len(asked)), key=lambda e, asked=asked, loads_E=loads_E: (asked[e], loads_E[e], e))  # type: ignore[misc]
        pattern = [int(asked[e]) for e in order]
        made = _BY_NAME[rule](pattern, pool.slots, loads_E[order])
        copies = np.zeros_like(made)
        copies[order] = made
        rows.append(copies)
    return from_copies(np.stack(rows), pool, floor=counts.floor)


def apart_placement(rule: str, loads: ArrayLike, counts: ReplicaCounts, pool: HostPool) -> HostPlacement | None:
    """`rule_placement` with copies of an expert on as many hosts as it has copies, wherever that can be. None where some expert is on fewer hosts than the floor."""
    made = rule_placement(rule, loads, counts, pool)
    apart = from_copies(np.stack([keep_apart(copies) for copies in made.copies]), pool, floor=counts.floor)
    return apart if int((apart.copies > 0).sum(2).min()) >= counts.floor else None


_BY_NAME: Mapping[str, Callable[[Sequence[int], Sequence[int], Floats], Copies]] = {
    "printed": lambda counts, slots, _: max_overlap(counts, slots),
    "spread": lambda counts, slots, _: spread(counts, slots),
    "compact": lambda counts, slots, _: compact(counts, slots),
    "least_loaded": lambda counts, slots, loads: least_loaded(counts, slots, loads.tolist()),
}


# ---- all layers together ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """Layers by pattern. `order[l]` = experts of layer l in the order of its pattern."""

    pool: HostPool
    floor: int
    loads: Floats
    paper: tuple[tuple[int, ...], ...]
    """Counts of the paper, in the order of the pattern."""
    order: tuple[tuple[int, ...], ...]
    patterns: tuple[tuple[int, ...], ...]
    """Different sorted counts."""
    pattern_of: tuple[int, ...]
    all_fit: bool
    """No layer's segments are cut short: the printed rule needs no repair."""


def _layers(counts: ReplicaCounts, pool: HostPool, loads: Floats) -> _Layers:
    order, rows, paper = [], [], []
    for row, loads_E in zip(counts.counts, loads, strict=True):
        by = sorted(range(len(row)), key=lambda e, row=row, loads_E=loads_E: (row[e], loads_E[e], e))  # type: ignore[misc]
        order.append(tuple(by))
        rows.append(tuple(row[e] for e in by))
        paper.append(tuple(paper_counts(loads_E, pool.num_slots, floor=counts.floor)[by].tolist()))
    patterns = tuple(dict.fromkeys(rows))
    number = {pattern: i for i, pattern in enumerate(patterns)}
    return _Layers(
        pool=pool,
        floor=counts.floor,
        loads=loads,
        paper=tuple(paper),
        order=tuple(order),
        patterns=patterns,
        pattern_of=tuple(number[row] for row in rows),
        all_fit=all(segments_fit(pattern, pool.slots) for pattern in patterns),
    )


Tables = list[Copies]
"""A table of copies for each pattern."""


def plan_placement(
    counts: ReplicaCounts, pool: HostPool, loads: ArrayLike, *, effort: Effort | None = None
) -> HostPlacement:
    """The placement with the fewest fatal losses of 1, 2, 3, ... hosts; among equals the one that levels the load.

    Racks and failure probabilities decide which host takes which place of the plan. Raises `PlanError` where the counts do not fill the slots.
    """
    effort = effort or Effort()
    loads_LE = read_loads(loads)
    raise_if(_input_problems(counts, pool, loads_LE), PlanError, subject="placement")
    layers = _layers(counts, pool, loads_LE)
    ranked = _ranked(layers)
    best = [tables for score, tables in ranked if score == ranked[0][0]]
    if pool.num_hosts <= MAX_HOSTS:
        best = [_improved(layers, _starts(ranked), effort)]
    copies = _named(layers, _least_busy(layers, best))
    if pool.num_hosts <= MAX_HOSTS and loads_LE.any():
        swaps = effort.of(pool.num_hosts, effort.balance_swaps, 4 * len(copies))
        copies = levelled(copies, loads_LE, swaps=swaps, seed=effort.seed)
    copies = copies[:, :, ordered_hosts({m for c in copies for m in holder_sets(c)}, pool)]
    plan = from_copies(copies, pool, floor=counts.floor)
    plan.check()
    return plan


def _input_problems(counts: ReplicaCounts, pool: HostPool, loads: Floats) -> list[Problem]:
    problems = []
    shape = (counts.num_layers, counts.num_experts)
    if loads.shape != shape:
        problems.append(Problem(where="loads.shape", value=loads.shape, rule=f"must be those of the counts, {shape}"))
    for layer, row in enumerate(counts.counts):
        if sum(row) != pool.num_slots:
            rule = f"replicas of a layer fill the {pool.num_slots} slots"
            problems.append(Problem(where=f"counts[{layer}]", value=sum(row), rule=rule))
        if min(row) < counts.floor:
            problems.append(Problem(where=f"counts[{layer}]", value=min(row), rule=f"is at least {counts.floor}"))
    return problems


def _ranked(layers: _Layers) -> list[tuple[Score, Tables]]:
    """All plans by rule, and their mix, from the best to the worst."""
    candidates = [_candidates(layers, i) for i in range(len(layers.patterns))]
    plans = [[tables[name] for tables in candidates] for name in candidates[0] if all(name in t for t in candidates)]
    if layers.pool.num_hosts <= MAX_HOSTS and len(layers.patterns) > 1:
        plans.append(_mixed(layers, candidates))
    scored = [(_score(plan, layers.pool.num_hosts), plan) for plan in plans]
    return sorted(scored, key=lambda pair: pair[0])


def _starts(ranked: Sequence[tuple[Score, Tables]]) -> list[Tables]:
    """The best plan and the best of those that are not as good: swaps find more from two sides."""
    second = [tables for score, tables in ranked if score != ranked[0][0]]
    return [ranked[0][1], *second[:1]]


def _score(tables: Tables, num_hosts: int) -> Score:
    """What is compared: losses that are not survived, from one host upward; where only an interval is known, its bad end."""
    sets = {mask for copies in tables for mask in holder_sets(copies)}
    return tuple(float(1 - chance.low) for chance in certify(sets, num_hosts).chances)


def _candidates(layers: _Layers, index: int) -> dict[str, Copies]:
    """Tables by rule. `first` = some layer of the pattern: its paper counts and loads stand for all of them where they differ."""
    pattern, slots, floor = layers.patterns[index], layers.pool.slots, layers.floor
    layer = layers.pattern_of.index(index)
    out = {
        "overlap": max_overlap(pattern, slots),
        "overlap_levelled": _levelled_overlap(layers, layer),
        "spread": spread(pattern, slots),
    }
    if min(slots) < max(slots):  # with equal slots, copies that are kept apart hold the floor
        out["safe"] = safe_spread(pattern, slots, floor=floor)
    if layers.pool.num_hosts <= MAX_HOSTS or not layers.all_fit:
        paper = layers.paper[layer]
        topped = {"printed_topped": max_overlap(paper, slots), "spread_topped": spread(paper, slots)}
        out |= {
            name: made for name, copies in topped.items() if (made := topped_up(copies, pattern, slots)) is not None
        }
        out |= {f"{name}_apart": keep_apart(copies) for name, copies in out.items()}
    complement = complement_overlap(pattern, slots)
    return out if complement is None else {**out, "complement": complement}


def _levelled_overlap(layers: _Layers, layer: int) -> Copies:
    """The printed segments; what is left over goes where load is least, which costs no recovery."""
    pattern, slots = layers.patterns[layers.pattern_of[layer]], layers.pool.slots
    shares = layers.loads[layer][list(layers.order[layer])] / np.array(pattern)
    return fill(segments(pattern, slots), pattern, slots, shares=shares.tolist())


def _mixed(layers: _Layers, candidates: Sequence[Mapping[str, Copies]]) -> Tables:
    """Patterns from the most vulnerable on, each by the rule that adds fewest fatal losses to those of the patterns before."""
    num_hosts = layers.pool.num_hosts
    table = FatalTable(num_hosts)
    chosen: dict[int, Copies] = {}
    harm = [min(fatal_counts(holder_sets(c), num_hosts) for c in tables.values()) for tables in candidates]
    for index in sorted(range(len(candidates)), key=lambda i: (tuple(-h for h in harm[i]), i)):
        scored: list[tuple[Counts, int, Copies]] = []
        for number, copies in enumerate(candidates[index].values()):
            sets = set(holder_sets(copies))
            for mask in sets:
                table.add(mask)
            scored.append((table.fatal(), number, copies))
            for mask in sets:
                table.remove(mask)
        chosen[index] = min(scored, key=lambda s: s[:2])[2]
        for mask in set(holder_sets(chosen[index])):
            table.add(mask)
    return [chosen[i] for i in range(len(candidates))]


def _improved(layers: _Layers, starts: Sequence[Tables], effort: Effort) -> Tables:
    """Random swaps, pattern by pattern, unless no placement can be better; the best of what the starts become."""
    num_hosts = layers.pool.num_hosts
    enough = tuple(max(column) for column in zip(*(_bound(p, layers.pool) for p in layers.patterns), strict=True))
    swaps = effort.of(num_hosts, effort.swaps, len(layers.patterns))
    found: list[tuple[Counts, Tables]] = []
    for tables in starts:
        table = FatalTable(num_hosts, (mask for copies in tables for mask in holder_sets(copies)))
        out = list(tables)
        for i, copies in enumerate(tables):
            if table.fatal() == enough:
                return out
            out[i] = local_search(copies, table, moves=swaps, enough=enough, seed=effort.seed + i)
        found.append((table.fatal(), out))
    return min(found, key=lambda pair: pair[0])[1]


def _bound(pattern: Sequence[int], pool: HostPool) -> Counts:
    """Fatal losses that no placement of one layer avoids: exact where the printed segments fit."""
    if segments_fit(pattern, pool.slots):
        return fatal_counts(holder_sets(max_overlap(pattern, pool.slots)), pool.num_hosts)
    return least_fatal(pattern, pool.num_hosts)


def _named(layers: _Layers, tables: Tables, *, first: int | None = None) -> NDArray[np.int64]:
    """(L, E, N) with the experts' own names: which of the experts with equally many replicas is which is free, and levels the load."""
    orders = layers.order[:first]
    out = np.zeros((len(orders), len(orders[0]), layers.pool.num_hosts), dtype=np.int64)
    for layer, order in enumerate(orders):
        loads = layers.loads[layer][list(order)]
        table = tables[layers.pattern_of[layer]]
        out[layer, list(order)] = name_rows(table, loads) if loads.any() else table
    return out


SAMPLED_LAYERS = 4
"""Layers by which plans that recover equally well are told apart."""


def _least_busy(layers: _Layers, plans: Sequence[Tables]) -> Tables:
    """The plan whose busiest hosts have least load."""

    def busiest(tables: Tables) -> float:
        copies = _named(layers, tables, first=SAMPLED_LAYERS)
        shares = layers.loads[:SAMPLED_LAYERS] / copies.sum(2)
        return float(host_loads(shares, copies).max(1).sum())

    return min(plans, key=busiest) if len(plans) > 1 else plans[0]
