"""How many bytes a layer's messages have, by transport, and which transport has the least.

Decides the transport for the routing at hand, from exact counts. A pure function of gathered counts, so every rank of the group chooses the same.

    all_to_all   one entry for each (token, slot) pair
    dedup        one entry for each token that a rank needs, however many of its slots
    all_gather   every token to every rank
    dedup_host   one entry for each token that a *host* needs, to its gateway there (`hosts.py`), which forwards inside; way back: sums inside, then one row

An entry is a row of `row_bytes`. What else travels, in bytes per (token, slot) pair: there, forward, the pair's weight (4) and, unless the order of entries says it,
the entry's position (4), on both legs of `dedup_host`; back, backward, the gradient of the weight (4), always straight. Nothing that stays on its rank is counted.

Shapes: P sources = ranks of `ep_etp`, from x to; H hosts; G slots of the group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe import DispatchPlan, Ints
from phalanx.plan.moe.overlap.tiles import Transport, gateway, gateways, members

Route = Transport
ROUTES: tuple[Route, ...] = get_args(Route)
"""The simplest first: with equal bytes the earlier one is taken."""
WEIGHT_BYTES = 4
"""float32: a router's weight or its gradient."""
POSITION_BYTES = 4
"""int32: which entry of its message a row is made of."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """Counts of one batch, all that bytes depend on."""

    pairs_PP: Ints
    """(token, slot) pairs from each source to each rank."""
    copies_PP: Ints
    """Distinct tokens among them."""
    tokens_P: Ints
    host_of_rank: tuple[int, ...]
    """0, 1, ..."""
    copies_PH: Ints
    """Distinct tokens from each source to each host."""

    @property
    def num_hosts(self) -> int:
        return int(self.copies_PH.shape[1])


def traffic_of(
    dispatch: DispatchPlan,
    copies_PP: ArrayLike | None = None,
    *,
    tokens_P: ArrayLike | None = None,
    host_of_rank: Sequence[int] | None = None,
    copies_PH: ArrayLike | None = None,
) -> Traffic:
    """Counts of a dispatch plan, the gathered copies and each source's tokens. Raises `PlanError` where they contradict each other.

    Without `copies_PP` no token is taken to have two slots on one rank; without `tokens_P` all tokens to be routed somewhere, as few as the pairs allow;
    without `host_of_rank` each rank to be a host.
    """
    size = dispatch.ep * dispatch.etp
    pairs = np.repeat(dispatch.rows_PG.reshape(size, dispatch.ep, -1).sum(2), dispatch.etp, axis=1)
    copies = pairs if copies_PP is None else np.asarray(copies_PP, dtype=np.int64)
    tokens = copies.max(1) if tokens_P is None else np.asarray(tokens_P, dtype=np.int64)
    hosts = tuple(range(size)) if host_of_rank is None else tuple(int(host) for host in host_of_rank)
    by_host = _host_copies(copies, hosts) if copies_PH is None else np.asarray(copies_PH, dtype=np.int64)
    traffic = Traffic(pairs, copies, tokens, hosts, by_host)
    raise_if([*_problems(traffic, size, dispatch.slots_per_rank)], PlanError, subject="counts of a dispatch")
    return traffic


def _host_copies(copies_PP: Ints, hosts: Sequence[int]) -> Ints:
    """Where hosts are single ranks; else the most there can be: no token goes to two ranks of a host."""
    by_host = np.zeros((len(copies_PP), max(hosts) + 1), dtype=np.int64)
    np.add.at(by_host.T, np.asarray(hosts), copies_PP.T)
    return by_host


def _problems(traffic: Traffic, size: int, slots_per_rank: int) -> Iterable[Problem]:
    pairs, copies, tokens = traffic.pairs_PP, traffic.copies_PP, traffic.tokens_P
    shapes = (copies.shape, tokens.shape, len(traffic.host_of_rank), len(traffic.copies_PH))
    if shapes != ((size, size), (size,), size, size):
        yield Problem(where="copies, tokens, hosts", value=shapes, rule=f"one entry for each of {size} ranks")
        return
    for where, wrong, rule in (
        ("copies", copies > pairs, "no more tokens than pairs"),
        ("copies", copies * slots_per_rank < pairs, f"each token at most once in each of {slots_per_rank} slots"),
        ("tokens", copies > tokens[:, None], "no more tokens than the source has"),
    ):
        for source, rank in np.argwhere(wrong):
            value = (int(copies[source, rank]), int(pairs[source, rank]), int(tokens[source]))
            yield Problem(where=f"{where}[{source}, {rank}]", value=value, rule=f"copies, pairs, tokens: {rule}")


# ---- bytes -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Legs:
    """Bytes of the two legs of a message between hosts. Those that stay in a host have the last leg only."""

    first_outbound_PP: Ints
    """Bytes from each source to each of its gateways."""
    first_inbound_PP: Ints
    """Bytes from gateways back to sources."""
    last_outbound_PP: Ints
    """(source, rank): about the source's rows, from wherever they come to the rank. Of a gateway itself nothing."""
    last_inbound_PP: Ints
    """(rank, source)."""


@dataclass(frozen=True, eq=False)
class WireBytes:
    """Bytes from each rank (first axis) to each other (second) in one pass of one layer. The diagonal is zero."""

    route: Route
    outbound_PP: Ints
    """Bytes from sources to experts."""
    inbound_PP: Ints
    """Bytes from experts to sources."""
    host_of_rank: tuple[int, ...]
    legs: Legs | None = None
    """The same message by message, where there are gateways."""

    @property
    def leaving_PP(self) -> Ints:
        """Bytes from each source to whom it sends by itself: to gateways what they pass on."""
        if self.legs is None:
            return self.outbound_PP
        hosts = np.asarray(self.host_of_rank)
        return self.legs.first_outbound_PP + np.where(hosts[:, None] == hosts, self.legs.last_outbound_PP, 0)

    @property
    def last_outbound_PP(self) -> Ints:
        """(source, rank), on the last leg."""
        return self.outbound_PP if self.legs is None else self.legs.last_outbound_PP

    @property
    def last_inbound_PP(self) -> Ints:
        """(rank, source), on the leg that begins at the rank."""
        return self.inbound_PP if self.legs is None else self.legs.last_inbound_PP

    @property
    def total_PP(self) -> Ints:
        return self.outbound_PP + self.inbound_PP

    @property
    def total(self) -> int:
        return int(self.total_PP.sum())

    @property
    def between_hosts(self) -> int:
        hosts = np.asarray(self.host_of_rank)
        return int(self.total_PP[hosts[:, None] != hosts].sum())


def wire_bytes(
    traffic: Traffic, route: Route, *, row_bytes: int, direction: Literal["forward", "backward"] = "forward"
) -> WireBytes:
    """Exact bytes of one pass (see the module's table for what an entry brings along)."""
    there = (WEIGHT_BYTES + (POSITION_BYTES if route != "all_to_all" else 0)) if direction == "forward" else 0
    back = WEIGHT_BYTES if direction == "backward" else 0
    if route == "dedup_host":
        return _through_gateways(traffic, row_bytes, there=there, back=back)
    entries, pairs = _entries(traffic, route), traffic.pairs_PP
    outbound, inbound = entries * row_bytes + pairs * there, (entries * row_bytes + pairs * back).T.copy()
    np.fill_diagonal(outbound, 0)
    np.fill_diagonal(inbound, 0)
    return WireBytes(route, outbound, inbound, traffic.host_of_rank)


def _entries(traffic: Traffic, route: Route) -> Ints:
    if route == "all_to_all":
        return traffic.pairs_PP
    if route == "dedup":
        return traffic.copies_PP
    return np.tile(traffic.tokens_P[:, None], (1, len(traffic.tokens_P)))


def _through_gateways(traffic: Traffic, row_bytes: int, *, there: int, back: int) -> WireBytes:
    """Rows for another host go through one of its ranks."""
    hosts, size = traffic.host_of_rank, len(traffic.host_of_rank)
    outbound = traffic.copies_PP * row_bytes + traffic.pairs_PP * there
    inbound, straight = (traffic.copies_PP * row_bytes).T.copy(), (traffic.pairs_PP * back).T.copy()
    np.fill_diagonal(straight, 0)
    first_outbound, first_inbound = np.zeros((2, size, size), dtype=np.int64)
    for source in range(size):
        for through in gateways(hosts, source):
            pairs = traffic.pairs_PP[source, members(hosts, hosts[through])].sum()
            entries = traffic.copies_PH[source, hosts[through]] * row_bytes
            first_outbound[source, through] = entries + pairs * there
            first_inbound[through, source] = entries
    total_outbound, total_inbound = first_outbound.copy(), first_inbound + straight
    for source, rank in np.ndindex(size, size):
        near = hosts[source] == hosts[rank]
        through = source if near else gateway(hosts, source, hosts[rank])
        if through == rank:
            outbound[source, rank] = inbound[rank, source] = 0
        total_outbound[through, rank] += outbound[source, rank]
        total_inbound[rank, through] += inbound[rank, source]
    near = np.asarray(hosts)[:, None] == np.asarray(hosts)
    for source in range(size):  # a clock takes what goes straight between hosts to go with the sums
        for through in gateways(hosts, source):
            there_P = members(hosts, hosts[through])
            first_inbound[through, source] += straight[there_P, source].sum()
    legs = Legs(first_outbound, first_inbound, outbound, inbound + np.where(near, straight, 0))
    return WireBytes("dedup_host", total_outbound, total_inbound, hosts, legs)


@dataclass(frozen=True)
class TransportChoice:
    """The transport with the least bytes, and what the others would have cost."""

    route: Route
    totals: tuple[tuple[Route, int, int], ...]
    """(transport, bytes between hosts, bytes between ranks) of all that were compared, both ways."""


def choose_transport(
    traffic: Traffic,
    *,
    row_bytes: int,
    among: Sequence[Route] = ("all_to_all", "all_gather", "dedup"),
) -> TransportChoice:
    """The transport with the least bytes in a forward pass; with several ranks on a host, the least between hosts and then in all. Of equals the simplest."""
    if not among or set(among) - set(ROUTES):
        raise PlanError.of("among", tuple(among), f"one or more of {', '.join(ROUTES)}", subject="transport")
    totals = []
    for route in sorted(among, key=ROUTES.index):
        wire = wire_bytes(traffic, route, row_bytes=row_bytes)
        totals.append((route, wire.between_hosts, wire.total))
    return TransportChoice(min(totals, key=lambda row: row[1:])[0], tuple(totals))
