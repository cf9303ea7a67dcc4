"""Turns streams between hosts into messages between ranks, in one total order.

Decides who sends for a host, who receives for it, and where messages are cut. Must never change: a byte enters a destination host
once, at one rank,
and goes on from there inside the host in a chain; a message has at most `message_bytes` and one sender and receiver for all its
parts; messages stand
in the order of their planned beginnings, so that a chunk is passed on while the next one arrives; what a message carries stands
before it.

Senders and receivers are those of the host with the fewest bytes to and from other hosts so far, the lowest rank among equals.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from phalanx.plan.layout import boxes_of_range
from phalanx.plan.reshard.flows import Edge, FlowSchedule, FlowSet, FlowStream, Item
from phalanx.plan.reshard.types import Hop, Hosts, MovePart
from phalanx.plan.reshard.units import Ranks

ByHost = dict[int, list[int]]
Key = tuple[float, int, int]
"""Planned beginning, steps from the holder, number of the chunk."""

FINE = 16
"""Cuts are moved to the beginning of a row where that shifts them by no more than this part of a message."""


class Chunk(NamedTuple):
    """Items' byte ranges between one pair of rank sets, and the time in which an edge moves it."""

    parts: tuple[MovePart, ...]
    sources: Ranks
    targets: Ranks
    edges: tuple[Edge, ...]
    start_s: tuple[float, ...]
    """Start-up seconds of an edge of each depth; one more for the hops inside hosts."""
    flow: int
    start: int
    stop: int


def make_hops(
    flows: FlowSet, schedule: FlowSchedule, hosts: Hosts, *, message_bytes: int, rank: int | None = None
) -> list[Hop]:
    """All messages of a phase, in order; with `rank` those that it sends or receives, in the same order."""
    maker = _Maker(flows, schedule, hosts, message_bytes, rank)
    keyed: list[tuple[Key, int, Hop]] = []
    for number, chunk in enumerate(maker.chunks()):
        keyed += [(key, len(keyed) + i, hop) for i, (key, hop) in enumerate(maker.hops(chunk, number))]
    keyed.sort(key=lambda entry: entry[:2])
    return [hop for _, _, hop in keyed if rank is None or rank in (hop.src, hop.dst)]


class _Maker:
    def __init__(
        self, flows: FlowSet, schedule: FlowSchedule, hosts: Hosts, message_bytes: int, rank: int | None
    ) -> None:
        self.flows, self.schedule, self.message_bytes, self.rank = flows, schedule, message_bytes, rank
        self.host_of = hosts.host_of_rank
        self.sent, self.received, self.handed = ([0] * len(self.host_of) for _ in range(3))

    def chunks(self) -> Iterator[Chunk]:
        """Chunks in the order of their streams: those that cross hosts, then those that stay."""
        once = self.schedule.entry == "once"
        covered = {stream.flow for stream in self.schedule.streams} if once else set[int]()
        for stream in sorted(self.schedule.streams, key=lambda s: (s.begin_s, s.flow, s.start)):
            yield from self._of_stream(stream)
        for number, flow in enumerate(self.flows.flows):
            if number not in covered and not (once and flow.needers):
                yield from self._of_stream(FlowStream(number, 0, flow.num_bytes, (), 0.0, self.schedule.makespan_s))

    def _of_stream(self, stream: FlowStream) -> Iterator[Chunk]:
        count = self.schedule.num_chunks if self.schedule.rounds_s and stream.edges else 1
        for k in range(count):
            low, high = (chunk_edge(stream, i, count, self.flows.flows[stream.flow].grain) for i in (k, k + 1))
            for parts, item, start, stop in self._cut(stream.flow, low, high, bool(stream.edges)):
                times = self._times(stream, k, start, stop, (start - low) / (high - low))
                yield Chunk(parts, item.sources, item.targets, stream.edges, times, stream.flow, start, stop)

    def _times(self, stream: FlowStream, k: int, start: int, stop: int, part: float) -> tuple[float, ...]:
        """When each depth begins to move bytes [start, stop) of a stream: `part` of its chunk k is before them."""
        depths = range(max((e.depth for e in stream.edges), default=-1) + 2)
        rounds = self.schedule.rounds_s
        if rounds and stream.edges:
            last = len(rounds) - 1
            ends = [(rounds[min(k + depth, last)], rounds[min(k + depth + 1, last)]) for depth in depths]
            return tuple(begin + part * (end - begin) for begin, end in ends)
        rate = (stream.end_s - stream.begin_s) / (stream.stop - stream.start)
        return tuple(stream.begin_s + rate * (start - stream.start + depth * (stop - start)) for depth in depths)

    def _cut(
        self, flow: int, low: int, high: int, crosses: bool
    ) -> Iterator[tuple[tuple[MovePart, ...], Item, int, int]]:
        """Messages of bytes [low, high) of a flow, between hosts (`crosses`) or inside them: parts, an item with their rank sets, the bytes."""
        items = self.flows.items[flow]
        group: list[MovePart] = []
        lead, start, end = None, low, low
        for item in items[bisect_right(items, low, key=lambda item: item.stop) :]:
            if item.start >= high:
                break
            first, last = (self._snap(item, at, 1) for at in (low, high))
            if self._is_left_out(item):
                if lead is not None:  # whose ranks are chosen before these bytes count
                    yield tuple(group), lead, start, end
                    group, lead = [], None
                self._count_left_out(item, last - first, crosses)
                continue
            while first < last:
                stop = self._stop(first, last, item, used=end - start if lead is not None else 0)
                if lead is not None and (stop <= first or (item.sources, item.targets) != (lead.sources, lead.targets)):
                    yield tuple(group), lead, start, end
                    group, lead = [], None
                    continue
                if lead is None:
                    lead, start = item, first
                if self.rank is None or self.rank in (*item.sources, *item.targets):
                    group += self._parts(item, first, stop)
                first = end = stop
        if lead is not None:
            yield tuple(group), lead, start, end

    def _is_left_out(self, item: Item) -> bool:
        """Who needs it holds it; or it goes from one rank to one other, which leaves nothing to choose, and neither is the rank that is asked about."""
        if self.rank is not None and len(item.sources) == len(item.targets) == 1:
            return self.rank not in (*item.sources, *item.targets) or item.sources == item.targets
        return all(rank in item.sources for rank in item.targets)

    def _count_left_out(self, item: Item, num_bytes: int, crosses: bool) -> None:
        if len(item.sources) == len(item.targets) == 1 and item.sources != item.targets:
            (src,), (dst,) = item.sources, item.targets
            if (self.host_of[src] != self.host_of[dst]) == crosses:
                self._count(src, dst, num_bytes)

    def _stop(self, first: int, last: int, item: Item, *, used: int) -> int:
        """Where a message with `used` bytes is cut in an item: at its end, or, in an empty message, so that its rest is cut evenly."""
        if last - first <= self.message_bytes - used:
            return last
        if used:
            return first
        count = -(-(last - first) // self.message_bytes)
        at = first + -(-(last - first) // count)
        row = self._snap(item, at, max(1, self.message_bytes // FINE))
        return row if row > first else self._snap(item, at, 1)

    def _snap(self, item: Item, at: int, grain: int) -> int:
        """Byte `at` of the flow moved down to a place where the item may be cut."""
        if at <= item.start or at >= item.stop:
            return min(max(at, item.start), item.stop)
        unit = self._cut_bytes(item, grain)
        return item.start + (at - item.start) // unit * unit

    def _cut_bytes(self, item: Item, grain: int) -> int:
        """Bytes of the largest run of whole rows, planes, ... of the box that is no more than `grain`; at least an element."""
        template = self.flows.templates[item.template]
        size = template.itemsize
        for length in template.box(item.unit).sizes[::-1]:
            if size * length > grain:
                break
            size *= length
        return size

    def _parts(self, item: Item, start: int, stop: int) -> list[MovePart]:
        template = self.flows.templates[item.template]
        box = template.box(item.unit)
        if start == item.start and stop == item.stop:
            return [MovePart(item.move, box, item.term)]
        first, last = ((at - item.start) // template.itemsize for at in (start, stop))
        return [
            MovePart(item.move, piece.shifted(box.offsets), item.term)
            for piece, _ in boxes_of_range(box.sizes, first, last)
        ]

    # ---- ranks -----------------------------------------------------------------------------------------------------

    def hops(self, chunk: Chunk, number: int) -> Iterator[tuple[Key, Hop]]:
        """The messages of a chunk, each with its place in the order."""
        holders = self._by_host(chunk.sources)
        needers = self._by_host([rank for rank in chunk.targets if rank not in chunk.sources])
        if self.schedule.entry == "each":
            yield from self._direct(chunk, number, holders, needers)
        elif self.schedule.entry == "parts":
            yield from self._exchanged(chunk, number, holders, needers)
        if self.schedule.entry == "once":
            yield from self._chained(chunk, number, holders, needers)
        elif not chunk.edges:
            yield from self._chained(chunk, number, holders, {h: r for h, r in needers.items() if h in holders})

    def _chained(self, chunk: Chunk, number: int, holders: ByHost, needers: ByHost) -> Iterator[tuple[Key, Hop]]:
        """A message for each edge, and a chain inside each host from the rank that has the bytes first."""
        entry: dict[int, int] = {}
        for edge in sorted(chunk.edges, key=lambda e: e.depth):
            sender = entry[edge.src] if edge.src in entry else self._least(self.sent, holders[edge.src])
            entry[edge.dst] = self._least(self.received, needers[edge.dst])
            yield (chunk.start_s[edge.depth], edge.depth, number), self._hop(sender, entry[edge.dst], chunk)
        depth_of = {edge.dst: edge.depth for edge in chunk.edges}
        for host, ranks in needers.items():
            first = depth_of.get(host, -1) + 1
            at = entry[host] if host in entry else self._least(self.handed, holders[host])
            rest = [rank for rank in ranks if rank != at]
            turn = next((i for i, rank in enumerate(rest) if rank > at), 0)
            for step, rank in enumerate(rest[turn:] + rest[:turn]):
                yield (chunk.start_s[first], first + step, number), self._hop(at, rank, chunk)
                at = rank

    def _direct(self, chunk: Chunk, number: int, holders: ByHost, needers: ByHost) -> Iterator[tuple[Key, Hop]]:
        """A message for each needer."""
        for edge in chunk.edges:
            for rank in needers[edge.dst]:
                sender = self._least(self.sent, holders[edge.src])
                yield (chunk.start_s[edge.depth], edge.depth, number), self._hop(sender, rank, chunk)

    def _exchanged(self, chunk: Chunk, number: int, holders: ByHost, needers: ByHost) -> Iterator[tuple[Key, Hop]]:
        """A part for each needer of a host, then from each to all others of its host."""
        for edge in chunk.edges:
            ranks = needers[edge.dst]
            cuts = [chunk.start + (chunk.stop - chunk.start) * i // len(ranks) for i in range(len(ranks) + 1)]
            for rank, low, high in zip(ranks, cuts[:-1], cuts[1:], strict=True):
                cut = [parts for parts, *_ in self._cut(chunk.flow, low, high, True)]
                if not cut:
                    continue
                parts = tuple(p for parts in cut for p in parts)
                own = chunk._replace(parts=parts, start=low, stop=high)
                sender = self._least(self.sent, holders[edge.src])
                yield (chunk.start_s[edge.depth], edge.depth, number), self._hop(sender, rank, own)
                for other in ranks:
                    if other != rank:
                        yield (chunk.start_s[edge.depth + 1], edge.depth + 1, number), self._hop(rank, other, own)

    def _by_host(self, ranks: Sequence[int]) -> ByHost:
        out: ByHost = {}
        for rank in ranks:
            out.setdefault(self.host_of[rank], []).append(rank)
        return out

    @staticmethod
    def _least(load: Sequence[int], ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: (load[rank], rank))

    def _hop(self, src: int, dst: int, chunk: Chunk) -> Hop:
        self._count(src, dst, chunk.stop - chunk.start)
        return Hop(src, dst, chunk.parts)

    def _count(self, src: int, dst: int, num_bytes: int) -> None:
        if self.host_of[src] == self.host_of[dst]:
            self.handed[src] += num_bytes
        else:
            self.sent[src] += num_bytes
            self.received[dst] += num_bytes


def chunk_edge(stream: FlowStream, k: int, count: int, grain: int) -> int:
    """First byte of chunk k of a stream that is cut in `count` chunks at multiples of `grain`."""
    if k >= count:
        return stream.stop
    return stream.start + (stream.stop - stream.start) * k // count // grain * grain
