"""Is the schedule of a plan possible, does it end when it says, and does the bound hold? The part of `check.py` that deals with hosts and seconds.

Decides nothing and shares no code with the planner. The lanes are swept over the beginnings and ends of streams; the bytes of the bound are counted again from
the layouts, element by element of the grid that all boxes make, with nothing but the certificate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import Problem
from phalanx.plan.layout import Box
from phalanx.plan.reshard.bound import Bound
from phalanx.plan.reshard.flows import Flow, FlowSchedule, FlowSet
from phalanx.plan.reshard.types import Hop, Hosts, Move

NEAR = 1e-6
"""Part by which times and rates may differ."""
OURS = "best"


class TimedPhase(Protocol):
    """Flows, their schedule, and when it begins."""

    @property
    def flows(self) -> FlowSet: ...
    @property
    def schedule(self) -> FlowSchedule: ...
    @property
    def start_s(self) -> float: ...


class TimedPlan(Protocol):
    """What is read of a plan."""

    @property
    def moves(self) -> tuple[Move, ...]: ...
    @property
    def hosts(self) -> Hosts: ...
    @property
    def method(self) -> str: ...
    @property
    def bound(self) -> Bound: ...
    @property
    def makespan_s(self) -> float: ...
    @property
    def phases(self) -> Sequence[TimedPhase]: ...
    @property
    def hops(self) -> tuple[Hop, ...]: ...


def time_problems(plan: TimedPlan) -> list[Problem]:
    """Problems of every phase: trees, lanes, the end; and that the messages carry what the schedule counts."""
    problems = []
    end = 0.0
    for number, phase in enumerate(plan.phases):
        where = f"phase {number}"
        if phase.start_s < end * (1 - NEAR):
            problems.append(_problem(where, "begins before the one before it has ended"))
        end = phase.start_s + phase.schedule.makespan_s
        if plan.method == OURS:
            problems += _tree_problems(phase.flows.flows, phase.schedule, where)
            problems += _lane_problems(phase.schedule, plan, where)
    if abs(end - plan.makespan_s) > NEAR * max(end, plan.makespan_s):
        problems.append(_problem("makespan_s", f"the schedule ends after {end:g} s, not {plan.makespan_s:g} s"))
    return problems + _traffic_problems(plan)


def _problem(where: str, rule: str) -> Problem:
    return Problem(where=where, value=None, rule=rule)


def _tree_problems(flows: Sequence[Flow], schedule: FlowSchedule, where: str) -> list[Problem]:
    """Every needer of a flow gets each byte once, from a holder or from who has it a step earlier."""
    problems = []
    parts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for stream in schedule.streams:
        flow = flows[stream.flow]
        depth = {edge.dst: edge.depth for edge in stream.edges}
        if len(depth) != len(stream.edges) or set(depth) != set(flow.needers):
            problems.append(_problem(where, f"a stream of flow {stream.flow} does not reach each of its needers once"))
        for edge in stream.edges:
            if not (edge.depth == 0 and edge.src in flow.holders) and depth.get(edge.src, edge.depth) != edge.depth - 1:
                problems.append(_problem(where, f"host {edge.src} passes on flow {stream.flow} before it has it"))
        for host in depth:
            parts[stream.flow, host].append((stream.start, stream.stop))
    for number, flow in enumerate(flows):
        for host in flow.needers:
            at = 0
            for start, stop in sorted(parts[number, host]):
                at = stop if start == at else -1
            if at != flow.num_bytes:
                problems.append(_problem(where, f"host {host} does not get every byte of flow {number} once"))
    return problems


def _lane_problems(schedule: FlowSchedule, plan: TimedPlan, where: str) -> list[Problem]:
    """No lane ever carries more than its rate."""
    rates = [*plan.hosts.send_bytes_per_s, *plan.hosts.recv_bytes_per_s]
    count = plan.hosts.count
    grain = max((move.itemsize for move in plan.moves), default=1)
    if schedule.rounds_s:
        return _round_problems(schedule, rates, count, grain, where)
    problems: list[Problem] = []
    events: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for stream in schedule.streams:
        took = stream.end_s - stream.begin_s
        if took <= 0 or stream.end_s > schedule.makespan_s * (1 + NEAR) or stream.begin_s < 0:
            problems.append(_problem(where, f"a stream of flow {stream.flow} takes no time or ends too late"))
            continue
        for edge in stream.edges:
            for lane in (edge.src, count + edge.dst):
                rate = (stream.stop - stream.start) / took
                events[lane] += [(stream.begin_s, rate), (stream.end_s, -rate)]
    for lane, changes in events.items():
        if _peak(changes, schedule.makespan_s) > rates[lane] * (1 + NEAR):
            problems.append(_problem(where, f"{_lane(lane, count)} carries more than its rate"))
    return problems


def _lane(lane: int, count: int) -> str:
    return f"host {lane % count} {'sends: its link' if lane < count else 'receives: its link'}"


def _peak(changes: Sequence[tuple[float, float]], end: float) -> float:
    """The highest sum of rates; what ends and begins at nearly the same time does not overlap."""
    total, peak, at = 0.0, 0.0, 0
    ordered = sorted(changes)
    while at < len(ordered):
        now = ordered[at][0]
        while at < len(ordered) and ordered[at][0] <= now + 1e-9 * end:
            total += ordered[at][1]
            at += 1
        peak = max(peak, total)
    return peak


def _round_problems(
    schedule: FlowSchedule, rates: Sequence[float], count: int, grain: int, where: str
) -> list[Problem]:
    """Chunk k of an edge of depth d moves in round k + d; chunks are equal but for an item."""
    depth = max((edge.depth for s in schedule.streams for edge in s.edges), default=0)
    lengths = np.diff(np.array(schedule.rounds_s))
    problems = []
    if len(lengths) != schedule.num_chunks + depth or (lengths < 0).any() or schedule.rounds_s[0] != 0:
        return [_problem(where, "has no round for each chunk of its deepest edge")]
    if abs(schedule.rounds_s[-1] - schedule.makespan_s) > NEAR * schedule.makespan_s:
        problems.append(_problem(where, "its rounds do not end with it"))
    load = np.zeros((len(rates), len(lengths)))
    slack = np.zeros(len(rates))
    for stream in schedule.streams:
        size = (stream.stop - stream.start) / schedule.num_chunks
        for edge in stream.edges:
            for lane in (edge.src, count + edge.dst):
                load[lane, edge.depth : edge.depth + schedule.num_chunks] += size
                slack[lane] += grain
    over = load - slack[:, None] > np.array(rates)[:, None] * lengths[None, :] * (1 + NEAR)
    total = load.sum(axis=1) > np.array(rates) * schedule.makespan_s * (1 + NEAR)
    lanes = np.nonzero(over.any(axis=1) | total)[0].tolist()
    return problems + [_problem(where, f"{_lane(lane, count)} carries more than its rate") for lane in lanes]


def _traffic_problems(plan: TimedPlan) -> list[Problem]:
    """Messages between hosts carry, pair by pair, what the streams do; no lane needs longer for them than the makespan."""
    hosts = plan.hosts
    carried: dict[tuple[int, int], int] = defaultdict(int)
    for hop in plan.hops:
        src, dst = hosts.host_of_rank[hop.src], hosts.host_of_rank[hop.dst]
        if src != dst:
            carried[src, dst] += sum(p.box.num_elements * plan.moves[p.move].itemsize for p in hop.parts)
    problems = []
    for host in range(hosts.count):
        sent = sum(size for (src, _), size in carried.items() if src == host) / hosts.send_bytes_per_s[host]
        got = sum(size for (_, dst), size in carried.items() if dst == host) / hosts.recv_bytes_per_s[host]
        if plan.method == OURS and max(sent, got) > plan.makespan_s * (1 + NEAR) + _slack(plan, host):
            problems.append(_problem(f"host {host}", "its messages take longer than the makespan"))
    if plan.method == OURS:
        problems += _pair_problems(plan, carried)
    return problems


def _streams_of_hosts(plan: TimedPlan) -> Iterator[tuple[int, int, int]]:
    for phase in plan.phases:
        for stream in phase.schedule.streams:
            for edge in stream.edges:
                yield edge.src, edge.dst, stream.stop - stream.start


def _slack(plan: TimedPlan, host: int) -> float:
    """Streams are cut at items: where items of several sizes share a flow, each cut may be off by one of them."""
    cuts = sum(1 for src, dst, _ in _streams_of_hosts(plan) if host in (src, dst))
    if len({move.itemsize for move in plan.moves}) < 2:
        return 0.0
    grain = max(move.itemsize for move in plan.moves)
    return cuts * grain / min(plan.hosts.send_bytes_per_s[host], plan.hosts.recv_bytes_per_s[host])


def _pair_problems(plan: TimedPlan, carried: Mapping[tuple[int, int], int]) -> list[Problem]:
    planned: dict[tuple[int, int], int] = defaultdict(int)
    cuts: dict[tuple[int, int], int] = defaultdict(int)
    for src, dst, size in _streams_of_hosts(plan):
        planned[src, dst] += size
        cuts[src, dst] += 1
    sizes = {move.itemsize for move in plan.moves}
    slack = max(sizes) if len(sizes) > 1 else 0
    problems = []
    for pair in sorted({*planned, *carried}):
        if abs(planned[pair] - carried.get(pair, 0)) > slack * cuts[pair]:
            rule = f"messages carry {carried.get(pair, 0)} bytes, the schedule {planned[pair]}"
            problems.append(_problem(f"hosts {pair[0]} -> {pair[1]}", rule))
    return problems


# ---- the bound ------------------------------------------------------------------------------------------------------------------


def bound_problems(plan: TimedPlan) -> list[Problem]:
    """The certificate holds by itself, and the plan is not faster than it allows."""
    bound, hosts = plan.bound, plan.hosts
    lanes = hosts.recv_bytes_per_s if bound.kind == "receive" else hosts.send_bytes_per_s
    rate = math.fsum(lanes[host] for host in bound.hosts)
    problems = []
    if bound.num_bytes and abs(rate - bound.bytes_per_s) > NEAR * rate:
        problems.append(_problem("bound", f"its hosts have {rate:g} bytes per second, not {bound.bytes_per_s:g}"))
    counted = certified_bytes(plan.moves, hosts, bound.kind, frozenset(bound.hosts))
    if counted < bound.num_bytes:
        problems.append(_problem("bound", f"its hosts must pass {counted} bytes, not {bound.num_bytes}"))
    if plan.makespan_s < bound.seconds * (1 - NEAR):
        problems.append(_problem("makespan_s", "is below the bound"))
    return problems


def certified_bytes(moves: Sequence[Move], hosts: Hosts, kind: str, chosen: frozenset[int]) -> int:
    """Bytes that must enter (`receive`) or leave (`send`) the chosen hosts, counted from the layouts alone."""
    total = 0
    known: dict[tuple[int, int], int] = {}
    for move in moves:
        key = id(move.src), id(move.dst)
        if key not in known:
            known[key] = _elements(move, hosts, kind, chosen)
        total += known[key] * move.itemsize
    return total


def _elements(move: Move, hosts: Hosts, kind: str, chosen: frozenset[int]) -> int:
    grid = _Grid(move, hosts)
    if kind == "receive":
        return sum(grid.count(grid.needed[h] & ~grid.has_all(h)) for h in chosen if h in grid.needed)
    best = np.zeros(grid.shape, dtype=np.int64)
    for term in range(grid.num_terms):
        held = np.zeros(grid.shape, dtype=bool)
        outside = held.copy()
        for (host, t), cells in grid.held.items():
            if t == term:
                held |= cells
                if host not in chosen:
                    outside |= cells
        lacking = np.zeros(grid.shape, dtype=np.int64)
        beyond = np.zeros(grid.shape, dtype=bool)
        for host, cells in grid.needed.items():
            short = cells & ~grid.held.get((host, term), np.zeros(grid.shape, dtype=bool))
            lacking += short
            if host not in chosen:
                beyond |= short
        leaves = held & ~outside & (lacking > 0)
        copies = np.where(beyond | (grid.num_terms > 1), 1, lacking)
        best = np.maximum(best, np.where(leaves, copies, 0))
    return int((best * grid.volumes).sum())


class _Grid:
    """Cells between all edges of all boxes of a move; what each host holds of each term, and what it needs."""

    def __init__(self, move: Move, hosts: Hosts) -> None:
        boxes = [one.box for layout in (move.src, move.dst) for held in dict.fromkeys(layout.held) for one in held]
        dims = len(move.src.shape)
        self.edges = [
            np.unique(
                [0, move.src.shape[d], *(b.offsets[d] for b in boxes), *(b.offsets[d] + b.sizes[d] for b in boxes)]
            )
            for d in range(dims)
        ]
        self.shape = tuple(max(0, len(e) - 1) for e in self.edges)
        volumes: NDArray[np.int64] = np.ones((), dtype=np.int64)
        for edges in self.edges:
            volumes = np.multiply.outer(volumes, np.diff(edges))
        self.volumes = volumes
        self.num_terms = move.src.num_terms
        self.held: dict[tuple[int, int], NDArray[np.bool_]] = {}
        self.needed: dict[int, NDArray[np.bool_]] = {}
        for at, rank in enumerate(move.src.ranks):
            term = move.src.terms[at] if move.src.terms else 0
            for one in move.src.held[at]:
                self._paint(self.held.setdefault((hosts.host_of_rank[rank], term), self._none()), one.box)
        for at, rank in enumerate(move.dst.ranks):
            for one in move.dst.held[at]:
                self._paint(self.needed.setdefault(hosts.host_of_rank[rank], self._none()), one.box)

    def _none(self) -> NDArray[np.bool_]:
        return np.zeros(self.shape, dtype=bool)

    def _paint(self, cells: NDArray[np.bool_], box: Box) -> None:
        offsets, sizes = box.offsets, box.sizes
        cells[
            tuple(
                slice(int(np.searchsorted(e, o)), int(np.searchsorted(e, o + s)))
                for e, o, s in zip(self.edges, offsets, sizes, strict=True)
            )
        ] = True

    def has_all(self, host: int) -> NDArray[np.bool_]:
        """Cells of which a host has every term."""
        out = np.ones(self.shape, dtype=bool)
        for term in range(self.num_terms):
            out &= self.held.get((host, term), self._none())
        return out

    def count(self, cells: NDArray[np.bool_]) -> int:
        return int(self.volumes[cells].sum())
