"""Schedules in which all streams run side by side, cut in chunks, and receivers pass chunks on: for what no order of whole streams solves.

Decides along which trees the bytes of a flow go, and in how many chunks. Must never change: the load of every lane in every round is counted, and a round
lasts as long as its busiest lane needs; a host passes a chunk on in a later round than it got it.

The division of sending (`bound.solve_shares`) says how many bytes of each flow each host sends. They are laid along the flow, so that every byte has
as many senders as needers; any such senders can be made a forest, those that send most nearest to the roots. All streams take the whole time at
a constant rate, so each lane has its share of the load in each round, and the makespan is the least possible but for the depth of the trees:
`1 + (depth - 1) / chunks`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from phalanx.plan.reshard.bound import Shares
from phalanx.plan.reshard.flows import Edge, Flow, FlowSchedule, FlowStream
from phalanx.plan.reshard.types import Hosts

FILL = 1 / 768
"""Part of the makespan that may be lost while the trees fill."""
MOST_CHUNKS = 8192


def relay_schedule(flows: Sequence[Flow], shares: Shares, hosts: Hosts, *, least_bytes: int) -> FlowSchedule:
    """All flows in rounds. No chunk of the busiest stream is smaller than `least_bytes`."""
    streams = [
        FlowStream(number, start, stop, forest(roots, flows[number].needers, senders), 0.0, 0.0)
        for number in range(len(flows))
        for start, stop, roots, senders in _pieces(number, flows[number], shares)
        if start < stop
    ]
    depth = max((edge.depth for s in streams for edge in s.edges), default=0)
    longest = max((s.stop - s.start for s in streams), default=1)
    wanted = 1 << max(0, int(np.ceil(np.log2(max(1.0, depth / FILL)))))
    most = max(1, min(MOST_CHUNKS, longest // max(1, least_bytes)))
    tried = sorted({min(most, wanted), min(most, max(1, wanted // 4)), min(most, 64), min(most, wanted * 4)})
    made = [_rounds(flows, streams, hosts, count) for count in tried]
    return min(made, key=lambda s: (s.makespan_s, s.num_chunks))


def _pieces(number: int, flow: Flow, shares: Shares) -> list[tuple[int, int, list[int], list[int]]]:
    """(start, stop, holder that sends the first copy, senders of all copies) of each part of a flow."""
    if not flow.needers:
        return []
    edges = list(itertools.accumulate((size for _, size in shares.first[number]), initial=0))
    roots = [(a, b, host) for (host, _), a, b in zip(shares.first[number], edges[:-1], edges[1:], strict=True)]
    if shares.others is None:
        return [piece for a, b, host in roots for piece in _chained(a, b, host, flow)]
    layers = _layers(shares.others[number], flow.num_bytes)
    cuts = sorted({0, flow.num_bytes, *edges, *(x for a, b, _ in layers for x in (a, b))})
    out = []
    for a, b in itertools.pairwise(cuts):
        root = next(host for low, high, host in roots if low <= a < high)
        out.append((a, b, [root], [root, *(host for low, high, host in layers if low <= a < high)]))
    return out


def _chained(start: int, stop: int, root: int, flow: Flow) -> list[tuple[int, int, list[int], list[int]]]:
    """Needers that pass on each byte once on average: a chain, or (from four on) two trees, each with half of the needers inside."""
    needers = list(flow.needers)
    count = len(needers)
    if count < 4:
        return [(start, stop, [root], [root, *needers[:-1]])]
    half = (count - 1) // 2
    middle = start + (stop - start) // 2 // flow.grain * flow.grain
    out = []
    for low, high, inside in ((start, middle, needers[: count // 2]), (middle, stop, needers[-(count // 2) :])):
        twice = inside[:half]
        senders = [root, *twice, *twice, *inside[half : half + (count - 1) % 2]]
        out.append((low, high, [root], senders))
    return out


def _layers(others: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int, int]]:
    """(start, stop, host): the further copies laid along the flow again and again, host after host."""
    out, at = [], 0
    for host, amount in others:
        while amount:
            start = at % size
            part = min(amount, size - start)
            out.append((start, start + part, host))
            at, amount = at + part, amount - part
    return out


def forest(roots: Sequence[int], needers: Sequence[int], senders: Sequence[int]) -> tuple[Edge, ...]:
    """Edges to all needers in which each host sends as often as it stands in `senders`; holders are roots.

    Breadth first, the needers that send most before the others: then there is always a free place, for all places are as many as needers
    and a root has one.
    """
    times = Counter(senders)
    places = [(host, 0) for host in sorted(times) if host not in needers for _ in range(times[host])]
    assert all(root in times for root in roots)
    edges = []
    for at, needer in enumerate(sorted(needers, key=lambda h: (-times[h], h))):
        host, depth = places[at]
        edges.append(Edge(host, needer, depth))
        places += [(needer, depth + 1)] * times[needer]
    return tuple(edges)


def _rounds(flows: Sequence[Flow], streams: Sequence[FlowStream], hosts: Hosts, count: int) -> FlowSchedule:
    """The schedule with `count` chunks a stream, each round as long as it needs."""
    depth = max((edge.depth for s in streams for edge in s.edges), default=0)
    load = np.zeros((2 * hosts.count, count + depth))
    steps = np.arange(count + 1, dtype=np.int64)
    for stream in streams:
        grain = flows[stream.flow].grain
        cuts = (stream.stop - stream.start) * steps // count // grain * grain
        cuts[count] = stream.stop - stream.start
        sizes = np.diff(cuts)
        for edge in stream.edges:
            load[edge.src, edge.depth : edge.depth + count] += sizes
            load[hosts.count + edge.dst, edge.depth : edge.depth + count] += sizes
    rates = np.array([*hosts.send_bytes_per_s, *hosts.recv_bytes_per_s])
    edges = np.concatenate([[0.0], np.cumsum((load / rates[:, None]).max(axis=0))])
    end = float(edges[-1])
    timed = tuple(stream._replace(begin_s=0.0, end_s=end) for stream in streams)
    return FlowSchedule(name="relay", streams=timed, makespan_s=end, rounds_s=tuple(edges.tolist()), num_chunks=count)
