"""Partial sources: which rank adds the terms of which box, and what travels for it.

Decides where each sum is made: at a host that holds terms, or at one that needs the sum. Must never change: the terms of a box are added by one rank, in
the order of the terms; a box that is added has at most `piece_bytes`, for the terms that have not had their turn wait in buffers of its size.

A sum made at a destination saves its way there, but all terms must enter that host; a sum made at a source divides sending and receiving among the
hosts that hold terms (a reduce-scatter), and is then multicast like any value. Both, and the mixture that loads links least box by box, are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from phalanx.plan.reshard.flows import Flow, UnitGroup
from phalanx.plan.reshard.types import WHOLE, Hosts, Reduction
from phalanx.plan.reshard.units import Ints, Ranks, Template

Where = Literal["destination", "source", "either"]
WHERES: tuple[Where, ...] = ("destination", "source", "either")


class PartialSums(NamedTuple):
    """Sums of all partial templates: what travels before them and after them."""

    before: tuple[UnitGroup, ...]
    after: tuple[UnitGroup, ...]
    reductions: tuple[Reduction, ...]


def cut_partial(template: Template, piece_bytes: int) -> Template:
    """A partial template with its units cut in pieces of at most `piece_bytes`, along their longest dims. One of whole values stays as it is."""
    if template.num_terms == 1:
        return template
    low, high, src_of, dst_of = template.low, template.high, template.src_of, template.dst_of
    most = max(1, piece_bytes // template.itemsize)
    while len(low) and int((sizes := high - low).prod(axis=1).max()) > most:
        big = sizes.prod(axis=1) > most
        dim = sizes.argmax(axis=1)
        at = np.arange(len(low))
        middle = low.copy(), high.copy()
        half = low[at, dim] + sizes[at, dim] // 2
        middle[1][at[big], dim[big]] = half[big]
        middle[0][at[big], dim[big]] = half[big]
        order = np.argsort(np.concatenate([2 * at, 2 * at[big] + 1]), kind="stable")
        low = np.concatenate([low, middle[0][big]])[order]
        high = np.concatenate([middle[1], high[big]])[order]
        src_of, dst_of = (np.concatenate([x, x[big]])[order] for x in (src_of, dst_of))
    return Template(
        moves=template.moves,
        itemsize=template.itemsize,
        holders=template.holders,
        needers=template.needers,
        src_of=src_of,
        dst_of=dst_of,
        low=low,
        high=high,
        elements=(high - low).prod(axis=1),
    )


def place_sums(templates: Sequence[Template], hosts: Hosts, *, where: Where) -> PartialSums:
    """Choose the rank that adds each box."""
    chooser = _Chooser(hosts, where)
    before: list[UnitGroup] = []
    after: list[UnitGroup] = []
    reductions: list[Reduction] = []
    for number, template in enumerate(templates):
        if template.num_terms == 1:
            continue
        adders = [chooser.adder(template, unit) for unit in range(template.num_units)]
        reductions += [
            Reduction(rank, move, template.box(unit)) for unit, rank in enumerate(adders) for move in template.moves
        ]
        before += _before(number, template, adders)
        after.append(_after(number, template, adders))
    return PartialSums(tuple(before), tuple(group for group in after if len(group.units)), tuple(reductions))


class _Chooser:
    """Chooses hosts by the load of links so far, ranks of a host by the bytes that they have added."""

    def __init__(self, hosts: Hosts, where: Where) -> None:
        self.hosts, self.where = hosts, where
        self.sent = [0.0] * hosts.count
        self.received = [0.0] * hosts.count
        self.added = [0] * len(hosts.host_of_rank)

    def adder(self, template: Template, unit: int) -> int:
        terms = template.holders[int(template.src_of[unit])]
        needers = template.needers[int(template.dst_of[unit])]
        host_of = self.hosts.host_of_rank
        term_hosts = [sorted({host_of[rank] for rank in ranks}) for ranks in terms]
        need_hosts = sorted({host_of[rank] for rank in needers})
        hold_hosts = sorted({host for one in term_hosts for host in one})
        allowed = {"destination": need_hosts, "source": hold_hosts}.get(self.where, sorted({*need_hosts, *hold_hosts}))
        size = int(template.elements[unit]) * template.itemsize * len(template.moves)
        best = min(allowed, key=lambda h: (*self._cost(h, size, term_hosts, need_hosts), h))
        self._take(best, size, term_hosts, need_hosts)
        mine = [rank for rank in needers if host_of[rank] == best]
        mine = mine or sorted({rank for ranks in terms for rank in ranks if host_of[rank] == best})
        rank = min(mine, key=lambda r: (self.added[r], -sum(r in ranks for ranks in terms), r))
        self.added[rank] += size
        return rank

    def _loads(
        self, at: int, size: int, term_hosts: Sequence[Sequence[int]], need_hosts: Sequence[int]
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds that a sum at host `at` adds to sending and to receiving links."""
        send, recv = self.hosts.send_bytes_per_s, self.hosts.recv_bytes_per_s
        sent: dict[int, float] = {}
        received: dict[int, float] = {}
        for holders in term_hosts:
            if at not in holders:
                sender = min(holders, key=lambda h: (self.sent[h] + sent.get(h, 0.0), h))
                sent[sender] = sent.get(sender, 0.0) + size / send[sender]
                received[at] = received.get(at, 0.0) + size / recv[at]
        others = [host for host in need_hosts if host != at]
        if others:
            sent[at] = sent.get(at, 0.0) + size / send[at]
        for host in others:
            received[host] = received.get(host, 0.0) + size / recv[host]
        return sent, received

    def _cost(
        self, at: int, size: int, term_hosts: Sequence[Sequence[int]], need_hosts: Sequence[int]
    ) -> tuple[float, float]:
        sent, received = self._loads(at, size, term_hosts, need_hosts)
        worst = max(
            [self.sent[h] + s for h, s in sent.items()] + [self.received[h] + s for h, s in received.items()],
            default=0.0,
        )
        return worst, sum(sent.values()) + sum(received.values())

    def _take(self, at: int, size: int, term_hosts: Sequence[Sequence[int]], need_hosts: Sequence[int]) -> None:
        sent, received = self._loads(at, size, term_hosts, need_hosts)
        for load, more in ((self.sent, sent), (self.received, received)):
            for host, seconds in more.items():
                load[host] += seconds


def _before(number: int, template: Template, adders: Sequence[int]) -> list[UnitGroup]:
    """Every term goes to the rank that adds, if that rank does not hold it."""
    groups = []
    for term in range(template.num_terms):
        sources = tuple(holders[term] for holders in template.holders)
        away = [u for u, rank in enumerate(adders) if rank not in sources[int(template.src_of[u])]]
        if away:
            groups.append(
                _unit_group(number, template, term, away, sources, template.src_of, [(adders[u],) for u in away])
            )
    return groups


def _after(number: int, template: Template, adders: Sequence[int]) -> UnitGroup:
    """The sum goes from the rank that added it to all who need it."""
    rest = [
        tuple(r for r in template.needers[int(d)] if r != rank)
        for d, rank in zip(template.dst_of.tolist(), adders, strict=True)
    ]
    units = [u for u, ranks in enumerate(rest) if ranks]
    table = {rank: i for i, rank in enumerate(dict.fromkeys(adders))}
    source_of = np.array([table[rank] for rank in adders], dtype=np.int64)
    return _unit_group(number, template, WHOLE, units, tuple((r,) for r in table), source_of, [rest[u] for u in units])


def _unit_group(
    number: int,
    template: Template,
    term: int,
    units: Sequence[int],
    sources: tuple[Ranks, ...],
    source_of: Ints,
    targets: Sequence[Ranks],
) -> UnitGroup:
    table = {ranks: i for i, ranks in enumerate(dict.fromkeys(targets))}
    chosen = np.array(units, dtype=np.int64)
    target_of = np.array([table[ranks] for ranks in targets], dtype=np.int64)
    return UnitGroup(number, term, chosen, sources, source_of[chosen], tuple(table), target_of)


def bound_flows(templates: Sequence[Template], hosts: Hosts) -> tuple[list[Flow], list[Flow]]:
    """What must cross hosts for partial templates whoever adds: what enters (each host that needs a box and lacks any term of it takes in its size), and
    what leaves (a term with few holders leaves them, in whatever sum, for a needer that is none of them)."""
    host_of = hosts.host_of_rank
    sizes: dict[tuple[tuple[int, ...], ...], int] = {}
    for template in templates:
        if template.num_terms == 1:
            continue
        term_hosts = [[tuple(sorted({host_of[r] for r in ranks})) for ranks in terms] for terms in template.holders]
        need_hosts = [tuple(sorted({host_of[r] for r in ranks})) for ranks in template.needers]
        columns = zip(template.src_of.tolist(), template.dst_of.tolist(), template.elements.tolist(), strict=True)
        for src, dst, elements in columns:
            key = (need_hosts[dst], *term_hosts[src])
            sizes[key] = sizes.get(key, 0) + elements * template.itemsize * len(template.moves)
    entering, leaving = [], []
    for (needers, *terms), size in sizes.items():
        lacking = tuple(host for host in needers if any(host not in one for one in terms))
        if lacking:
            entering.append(Flow((), lacking, size, 1))
        left = [one for one in terms if not set(needers) <= set(one)]
        if left:
            scarce = min(left, key=lambda one: (len(one), one))
            leaving.append(Flow(scarce, next((h,) for h in needers if h not in scarce), size, 1))
    return entering, leaving
