"""Flows: all bytes that the same hosts hold and the same hosts lack, over all tensors of a move. And the schedule of flows, in seconds.

Decides what a scheduler sees: links of hosts, not ranks; bytes, not boxes. Must never change: a host that holds a box needs no bytes of it from others,
so the needers of a flow hold nothing of it; the flows are in the order in which their first unit task appears. A flow is a stream of bytes: its unit
tasks end to end, those between the same ranks together. 262,144 unit tasks from 512 ranks to 512 ranks are 4,096 flows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from phalanx.plan.reshard.types import WHOLE, Hosts
from phalanx.plan.reshard.units import Ints, Ranks, Template

HostSet = tuple[int, ...]


Entry = Literal["once", "each", "parts"]
"""How a host takes in bytes that several of its ranks need: at one of them, which passes them on; at each for itself; a part at each, which all exchange."""


class Flow(NamedTuple):
    """`num_bytes` that each of `needers` lacks and each of `holders` has (hosts, ascending). No needers: it stays inside hosts."""

    holders: HostSet
    needers: HostSet
    num_bytes: int
    grain: int
    """Largest item size in it: where it may be cut."""


class UnitGroup(NamedTuple):
    """Unit tasks of one template that travel alike: from any of `sources[source_of[i]]` to all of `targets[target_of[i]]` goes unit `units[i]`."""

    template: int
    term: int
    units: Ints
    sources: tuple[Ranks, ...]
    source_of: Ints
    targets: tuple[Ranks, ...]
    target_of: Ints


class Item(NamedTuple):
    """A unit task of one move in the stream of its flow, from byte `start` on."""

    start: int
    stop: int
    move: int
    template: int
    unit: int
    term: int
    sources: Ranks
    targets: Ranks


class Edge(NamedTuple):
    """A host sends to a host what it holds, or gets in time from the edge of depth `depth - 1` into it."""

    src: int
    dst: int
    depth: int


class FlowStream(NamedTuple):
    """Bytes [start, stop) of a flow along edges from holders to all its needers, between two times."""

    flow: int
    start: int
    stop: int
    edges: tuple[Edge, ...]
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class FlowSchedule:
    """What travels when. Without rounds, a stream has its lanes for itself and is passed on while it arrives (a pipelined broadcast).

    With rounds (`rounds_s`: their edges in seconds), every stream is cut in `num_chunks` equal chunks, and an edge of depth d moves chunk k in
    round k + d; all edges of a round share their lanes, and it lasts as long as its busiest lane needs.
    """

    name: str
    streams: tuple[FlowStream, ...]
    makespan_s: float
    entry: Entry = "once"
    rounds_s: tuple[float, ...] = ()
    num_chunks: int = 1


@dataclass(frozen=True, kw_only=True)
class FlowSet:
    """All flows of a phase, and which unit task is in which."""

    templates: tuple[Template, ...]
    groups: tuple[UnitGroup, ...]
    flows: tuple[Flow, ...]
    flow_of: tuple[Ints, ...]
    """Flow of each unit of each group."""

    @cached_property
    def items(self) -> tuple[tuple[Item, ...], ...]:
        """The stream of each flow. Made for those who need ranks and boxes: schedulers do without."""
        return _items(self)


def whole_groups(templates: Sequence[Template]) -> tuple[UnitGroup, ...]:
    """Every unit task of templates of whole values, from its holders to its needers."""
    return tuple(
        UnitGroup(number, WHOLE, np.arange(t.num_units), tuple(h[0] for h in t.holders), t.src_of, t.needers, t.dst_of)
        for number, t in enumerate(templates)
        if t.num_terms == 1
    )


def make_flows(templates: Sequence[Template], groups: Sequence[UnitGroup], hosts: Hosts) -> FlowSet:
    """Gather unit tasks into flows by (hosts that hold, hosts that lack)."""
    numbers: dict[tuple[HostSet, HostSet], int] = {}
    sizes: list[int] = []
    grains: list[int] = []
    flow_of = []
    host_set = _host_sets(hosts)
    for group in groups:
        template = templates[group.template]
        sources, targets = [host_set(r) for r in group.sources], [host_set(r) for r in group.targets]
        source_ids, target_ids = _numbered(sources), _numbered(targets)
        pair = source_ids[group.source_of] * len(targets) + target_ids[group.target_of]
        kinds, first, inverse = np.unique(pair, return_index=True, return_inverse=True)
        counts = np.zeros(len(kinds), dtype=np.int64)
        np.add.at(counts, inverse, template.elements[group.units])
        mine = np.zeros(len(kinds), dtype=np.int64)
        for kind in np.argsort(first, kind="stable").tolist():
            at = int(first[kind])
            holders, wanted = sources[int(group.source_of[at])], targets[int(group.target_of[at])]
            key = holders, tuple(host for host in wanted if host not in holders)
            number = numbers.setdefault(key, len(numbers))
            if number == len(sizes):
                sizes.append(0)
                grains.append(1)
            sizes[number] += int(counts[kind]) * template.itemsize * len(template.moves)
            grains[number] = max(grains[number], template.itemsize)
            mine[kind] = number
        flow_of.append(mine[inverse])
    flows = tuple(Flow(*key, size, grain) for key, size, grain in zip(numbers, sizes, grains, strict=True))
    return FlowSet(templates=tuple(templates), groups=tuple(groups), flows=flows, flow_of=tuple(flow_of))


def unit_flows(templates: Sequence[Template], groups: Sequence[UnitGroup], hosts: Hosts) -> FlowSet:
    """Each unit task a flow of its own, in order, as the paper schedules them. Moves of one template are one."""
    host_set = _host_sets(hosts)
    flows: list[Flow] = []
    flow_of = []
    for group in groups:
        template = templates[group.template]
        start = len(flows)
        elements = template.elements[group.units].tolist()
        for size, source, target in zip(elements, group.source_of.tolist(), group.target_of.tolist(), strict=True):
            holders = host_set(group.sources[source])
            needers = tuple(host for host in host_set(group.targets[target]) if host not in holders)
            flows.append(Flow(holders, needers, size * template.itemsize * len(template.moves), template.itemsize))
        flow_of.append(np.arange(start, len(flows)))
    return FlowSet(templates=tuple(templates), groups=tuple(groups), flows=tuple(flows), flow_of=tuple(flow_of))


def _host_sets(hosts: Hosts) -> Callable[[Ranks], HostSet]:
    made: dict[Ranks, HostSet] = {}

    def host_set(ranks: Ranks) -> HostSet:
        if ranks not in made:
            made[ranks] = tuple(sorted({hosts.host_of_rank[rank] for rank in ranks}))
        return made[ranks]

    return host_set


def _numbered(sets: Sequence[HostSet]) -> Ints:
    """Equal sets get equal numbers."""
    numbers: dict[HostSet, int] = {}
    return np.array([numbers.setdefault(one, len(numbers)) for one in sets], dtype=np.int64)


def _items(flows: FlowSet) -> tuple[tuple[Item, ...], ...]:
    pairs: dict[tuple[Ranks, Ranks], int] = {}
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in flows.flows]
    for number, (group, flow_of) in enumerate(zip(flows.groups, flows.flow_of, strict=True)):
        of_pair: dict[tuple[int, int], int] = {}
        columns = zip(flow_of.tolist(), group.source_of.tolist(), group.target_of.tolist(), strict=True)
        for at, (flow, source, target) in enumerate(columns):
            if (source, target) not in of_pair:
                key = group.sources[source], group.targets[target]
                of_pair[source, target] = pairs.setdefault(key, len(pairs))
            pair = of_pair[source, target]
            rows[flow] += [(pair, number, move, at) for move in flows.templates[group.template].moves]
    return tuple(_stream(flows, sorted(mine)) for mine in rows)


def _stream(flows: FlowSet, rows: Sequence[tuple[int, int, int, int]]) -> tuple[Item, ...]:
    """Rows in the order of (pair of rank sets, group, move, unit), laid end to end."""
    out, start = [], 0
    for _, number, move, at in rows:
        group = flows.groups[number]
        template = flows.templates[group.template]
        unit = int(group.units[at])
        stop = start + int(template.elements[unit]) * template.itemsize
        sources, targets = group.sources[int(group.source_of[at])], group.targets[int(group.target_of[at])]
        out.append(Item(start, stop, move, group.template, unit, group.term, sources, targets))
        start = stop
    return tuple(out)
