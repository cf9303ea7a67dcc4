"""Seconds of collectives on hosts with fast links inside and a network card for each rank between them.

Decides which algorithm a group uses and what each link carries. A *span* says how a group lies on hosts: `inside` members share a host, on
`hosts` hosts; ranks of one host drive their own network cards (rails), so a ring of a group with `inside` members a host crosses
hosts on `inside` cards at once. On devices the fastest algorithm is taken, by size and ranks, among those that NCCL has for it: rings for
everything (latency grows with the ranks), double binary trees between hosts for all-reduce, and PAT for gathers and scatters with one member a host (both with the logarithm of the hosts). gloo has rings alone. Must never change: more bytes or slower links never make a collective faster (test).

A table of times measured on those very links comes before the formula (inside a host `Hardware.measured_links`, between hosts `measured_between`): linear
between its sizes in logarithms, beyond them the formula in proportion to the nearest.

S is the size of the whole tensor in bytes (all-gather's output, reduce-scatter's input); V the rows that a rank sends in all-to-all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from phalanx.simulate.hardware.clusters import Curve, Hardware, at

NCCL_SMS = 16
"""Multiprocessors that a ring takes beside computation (8 to 24)."""

TREE_SHARE = 0.92
"""Bandwidth of a double binary tree over that of a ring (NCCL, src/graph/tuning.cc: busBw * .92); its dip at middle sizes is left out."""
PAT_SHARE = 0.75
"""The same of PAT, in NCCL since 2.23 for groups of one rank a host (there: busBw * .75)."""
PAT_STEP, PAT_RANK_S = 1 / 3.5, 2.8e-6
"""Latency of PAT: this share of a message's between hosts for each doubling of hosts, and so much for each rank (there)."""


@dataclass(frozen=True)
class GroupSpan:
    """`inside` members of a group on each of `hosts` hosts."""

    inside: int
    hosts: int

    @property
    def size(self) -> int:
        return self.inside * self.hosts


def span_of(size: int, stride: int, *, ranks_per_host: int, first: int = 0, world: int = 0) -> GroupSpan:
    """How a group of `size` ranks, `stride` apart, lies on hosts of consecutive ranks: of the groups of `world` ranks that begin with rank `first`, in the
    middle of a host perhaps, the one on most hosts."""
    inside = max(1, min(size, ranks_per_host // stride))
    plain = GroupSpan(inside, math.ceil(size / inside))
    return plain if first % ranks_per_host == 0 else _across(plain, size, stride, ranks_per_host, first, world)


@lru_cache(maxsize=1024)
def _across(plain: GroupSpan, size: int, stride: int, ranks_per_host: int, first: int, world: int) -> GroupSpan:
    """The widest of the groups that begin in the middle of a host; `plain` where none is wider."""
    blocks = range(0, world, size * stride)
    starts = {(first + block + at) % ranks_per_host for block in blocks for at in range(stride)}
    hosts = min(size, max(start + (size - 1) * stride for start in starts) // ranks_per_host + 1)
    return plain if hosts <= plain.hosts else GroupSpan(math.ceil(size / hosts), hosts)


@dataclass(frozen=True)
class Network:
    """Collectives on one kind of hardware."""

    hardware: Hardware

    def _inside(self, moved: float, members: int, whole: float) -> float:
        """`moved` bytes over a rank's fast link, of a tensor of `whole` bytes: half of the bandwidth at `half_bytes`."""
        h = self.hardware
        rate = at(h.inside_bytes_per_s, members) * whole / (whole + h.inside_half_bytes) if whole else math.inf
        return moved / rate if moved else 0.0

    @property
    def _between(self) -> float:
        return self.hardware.between_bytes_per_s * self.hardware.between_efficiency

    def all_gather(self, whole: float, span: GroupSpan) -> float:
        """All-gather: inside a host every byte passes a fast link, between hosts 1/inside of them a card."""
        return self._ring("all_gather", whole, span)

    def reduce_scatter(self, whole: float, span: GroupSpan) -> float:
        """Moves as many bytes as an all-gather, the other way."""
        return self._ring("reduce_scatter", whole, span)

    def _ring(self, name: str, whole: float, span: GroupSpan) -> float:
        if span.size <= 1 or whole <= 0:
            return 0.0

        def formula(size: float) -> float:
            ring = self.ring_latency(span) + self._one_way(size, span)
            if span.hosts == 1 or span.inside > 1 or self.hardware.sms is None:
                return ring
            return min(ring, self.pat_latency(span) + self._one_way(size, span) / PAT_SHARE)

        return self._known(name, span, whole, formula)

    def _one_way(self, size: float, span: GroupSpan) -> float:
        """Every byte once over a fast link of each rank, and 1/inside of them over each card; without latency."""
        n = span.size
        fast = self._inside(size * (n - 1) / n, max(2, span.inside), size) if span.inside > 1 else 0.0
        slow = size * (span.hosts - 1) / span.hosts / span.inside / self._between if span.hosts > 1 else 0.0
        return max(fast, slow)

    def _known(self, name: str, span: GroupSpan, num_bytes: float, formula: Callable[[float], float]) -> float:
        """Seconds from the table of these links, if it has such a collective of so many ranks on so many hosts; else by the
        formula."""
        h = self.hardware
        if span.hosts == 1:
            knots = _knots(h.measured_links, name, span.size)
        else:
            knots = _knots_between(h.measured_between, name, span)
        if not knots:
            return formula(num_bytes)
        nearest = min(max(num_bytes, knots[0][0]), knots[-1][0])
        return math.exp(at(knots, nearest)) * formula(num_bytes) / formula(nearest)

    def ring_latency(self, span: GroupSpan) -> float:
        """Start of a collective, and the way once round: a message to each further host, and the steps inside it."""
        h, further = self.hardware, span.hosts - 1
        return h.inside_latency_s + further * (h.between_latency_s + (span.inside - 1) * h.hop_s)

    def tree_latency(self, span: GroupSpan) -> float:
        """Up and down a tree of hosts whose members are chains (NCCL, src/graph/tuning.cc, Tree)."""
        h = self.hardware
        return h.inside_latency_s + 2 * (math.log2(span.hosts) * h.between_latency_s + (span.inside - 1) * h.hop_s)

    def pat_latency(self, span: GroupSpan) -> float:
        """Parallel aggregated trees, one member a host (NCCL, PAT)."""
        h = self.hardware
        return h.inside_latency_s + math.log2(span.hosts) * h.between_latency_s * PAT_STEP + span.hosts * PAT_RANK_S

    def all_reduce(self, whole: float, span: GroupSpan) -> float:
        """Reduce-scatter and all-gather, or up and down two trees, in each of which every rank handles half of the bytes."""
        if span.size <= 1 or whole <= 0:
            return 0.0

        def formula(size: float) -> float:
            ring = 2 * (self.ring_latency(span) + self._one_way(size, span))
            return ring if span.hosts == 1 or self.hardware.sms is None else min(ring, self.tree(size, span))

        return self._known("all_reduce", span, whole, formula)

    def tree(self, whole: float, span: GroupSpan) -> float:
        """All-reduce by double binary trees between hosts: a rank sends all bytes up and all down, where a ring sends (n - 1)/n of them twice."""
        fast = self._inside(whole, max(2, span.inside), whole) if span.inside > 1 else 0.0
        slow = whole / span.inside / self._between
        return self.tree_latency(span) + 2 * max(fast, slow) / TREE_SHARE

    def all_to_all(self, rows_bytes: float, span: GroupSpan) -> float:
        """Every rank sends `rows_bytes`, evenly, to all; parts for other hosts through its own card, at once with those inside."""
        n = span.size
        if n <= 1 or rows_bytes <= 0:
            return 0.0
        h = self.hardware

        def inside(size: float) -> float:
            return self._inside(size * (span.inside - 1) / n, max(2, span.inside), size)

        if span.hosts == 1:
            return self._known("all_to_all", span, rows_bytes, lambda size: h.inside_latency_s + inside(size))

        def between(size: float) -> float:
            slow = size * (1 - span.inside / n) / self._between
            return h.inside_latency_s + h.between_latency_s + max(inside(size), slow)

        return self._known("all_to_all", span, rows_bytes, between)

    def all_to_all_dedup(
        self, token_bytes: float, span: GroupSpan, *, top_k: int, num_experts: int, host_limit: int | None = None
    ) -> float:
        """Each token crosses to a host once, and from there fans out to the ranks that need it (DeepEP, HybridEP).

        `token_bytes` is one row of every token of a rank; `host_limit` caps the hosts of a token (group-limited routing).
        """
        n, h = span.size, self.hardware
        if n <= 1 or token_bytes <= 0:
            return 0.0
        hosts = distinct(span.hosts, top_k, num_experts)
        hosts = min(hosts, host_limit) if host_limit else hosts
        ranks = distinct(n, top_k, num_experts)
        fast = self._inside(token_bytes * ranks * (1 - 1 / max(2, span.inside)), max(2, span.inside), token_bytes)
        if span.hosts == 1:
            return h.inside_latency_s + fast
        slow = token_bytes * hosts * (span.hosts - 1) / span.hosts / self._between
        return h.inside_latency_s + h.between_latency_s + max(fast, slow)

    def send(self, num_bytes: float, *, between: bool) -> float:
        """One message from rank to rank."""
        h = self.hardware
        if num_bytes <= 0:
            return h.between_latency_s if between else h.inside_latency_s
        if between:
            return self._known(
                "send", GroupSpan(1, 2), num_bytes, lambda size: h.between_latency_s + size / self._between
            )
        return self._known(
            "send", GroupSpan(2, 1), num_bytes, lambda size: h.inside_latency_s + self._inside(size, 2, size)
        )


def beside(comm: float, room: float, taken: float) -> float:
    """What communication adds to computation of `room` seconds that it runs beside: what has no room, and the share `taken` of the device."""
    return max(0.0, comm - room) + min(comm, room) * taken


@lru_cache(maxsize=256)
def _knots(table: tuple[tuple[str, int, float, float], ...], name: str, n: int) -> Curve:
    """(bytes, logarithm of seconds) of one collective, ascending."""
    return tuple(
        sorted((size, math.log(seconds)) for what, ranks, size, seconds in table if (what, ranks) == (name, n))
    )


@lru_cache(maxsize=256)
def _knots_between(table: tuple[tuple[str, int, int, float, float], ...], name: str, span: GroupSpan) -> Curve:
    """The same of ranks on several hosts."""
    wanted = name, span.size, span.hosts
    return tuple(sorted((size, math.log(s)) for what, ranks, hosts, size, s in table if (what, ranks, hosts) == wanted))


def distinct(places: int, top_k: int, num_experts: int) -> float:
    """Expected number of distinct places (hosts or ranks, equal shares of the experts) that a token's `top_k` different experts lie on.

    Uniform choice without replacement: P (1 - C(E - E/P, k) / C(E, k)).
    """
    share = num_experts // places if places else 0
    if share < 1 or top_k >= num_experts:
        return float(min(places, max(top_k, 1)))
    missed = 1.0
    for i in range(top_k):
        missed *= max(0.0, (num_experts - share - i) / (num_experts - i))
    return places * (1.0 - missed)
