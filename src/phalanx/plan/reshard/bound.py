"""The least time that any schedule needs, with a certificate that a person can check without a solver.

Decides which of two kinds of link is the bottleneck. Must never change: the bound holds for every algorithm, whatever it splits or relays; as
long as a box goes only to hosts that hold or need it; and the certificate alone gives its value. Two kinds:

    receive   a host takes in each byte that its ranks need and none of them has, once
    send      of a set X of hosts: a flow whose holders all lie in X leaves its holders at least once; if its needers lie in X too, nobody else
              can have it, and all its copies but those are sent by X as well: (needers - 1) more

By duality the maximum over X is the optimum of a linear program; X is found from its dual prices (or without it, where each flow has one holder).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from phalanx.core.units import format_bytes, format_rate, format_seconds
from phalanx.plan.reshard.flows import Flow
from phalanx.plan.reshard.types import Hosts

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """`num_bytes` must pass the receiving (or sending) links of `hosts`, which take `bytes_per_s` together."""

    kind: Literal["receive", "send"]
    hosts: tuple[int, ...]
    num_bytes: int
    bytes_per_s: float

    @property
    def seconds(self) -> float:
        return self.num_bytes / self.bytes_per_s if self.num_bytes else 0.0

    def explain(self) -> str:
        """The certificate in a line."""
        if not self.num_bytes:
            return "bound 0 s: nothing crosses between hosts"
        who = f"host {self.hosts[0]}" if len(self.hosts) == 1 else f"hosts {_list(self.hosts)} together"
        verb = "receive" if self.kind == "receive" else "send"
        many = "s" if len(self.hosts) == 1 else ""
        what = "that its ranks need and do not have" if self.kind == "receive" else "that nobody else has"
        rate, size = format_rate(self.bytes_per_s, "B"), format_bytes(self.num_bytes)
        return f"bound {format_seconds(self.seconds)}: {who} {verb}{many} {size} {what}, at {rate}"


def _list(hosts: Sequence[int]) -> str:
    if len(hosts) <= 8:
        return " ".join(map(str, hosts))
    return f"{hosts[0]} {hosts[1]} ... {hosts[-1]} ({len(hosts)})"


class Shares(NamedTuple):
    """A division of sending that takes `seconds` of the busiest link: who sends the first copy of each flow, and who the others (bytes by host)."""

    seconds: float
    first: tuple[tuple[tuple[int, int], ...], ...]
    """(host, bytes) of each flow, with their sum its bytes."""
    others: tuple[tuple[tuple[int, int], ...], ...] | None
    """The same for the (needers - 1) further copies; None: needers pass them on in chains, each byte once at most."""


def receive_bound(flows: Sequence[Flow], hosts: Hosts) -> Bound:
    """The busiest receiving link."""
    load = [0] * hosts.count
    for flow in flows:
        for host in flow.needers:
            load[host] += flow.num_bytes
    at = max(range(hosts.count), key=lambda h: load[h] / hosts.recv_bytes_per_s[h], default=0)
    return Bound(kind="receive", hosts=(at,), num_bytes=load[at], bytes_per_s=hosts.recv_bytes_per_s[at])


def send_bound(flows: Sequence[Flow], hosts: Hosts, among: Iterable[int]) -> Bound:
    """The bound of a set X of hosts."""
    chosen = tuple(sorted(set(among)))
    inside = set(chosen)
    total = 0
    for flow in flows:
        if flow.needers and inside.issuperset(flow.holders):
            total += flow.num_bytes * (len(flow.needers) if inside.issuperset(flow.needers) else 1)
    return Bound(
        kind="send",
        hosts=chosen,
        num_bytes=total,
        bytes_per_s=math.fsum(hosts.send_bytes_per_s[h] for h in chosen) or 1.0,
    )


def quick_bound(flows: Sequence[Flow], hosts: Hosts, *, entering: Sequence[Flow] | None = None) -> Bound:
    """The best bound that needs no solver: every receiving link, every single holder, all holders.

    `entering`: what the receiving links take in, where that is not what leaves the holders (partial sources).
    """
    single = {flow.holders for flow in flows if flow.needers and len(flow.holders) == 1}
    everyone = tuple(sorted({h for flow in flows if flow.needers for h in flow.holders}))
    alone = [0] * hosts.count
    for flow in flows:
        if flow.needers and len(flow.holders) == 1:
            alone[flow.holders[0]] += flow.num_bytes
    busiest = max((s[0] for s in single), key=lambda h: (alone[h] / hosts.send_bytes_per_s[h], -h), default=None)
    sets = [everyone] if everyone else []
    if busiest is not None:
        sets.append((busiest,))
    received = receive_bound(flows if entering is None else entering, hosts)
    return max([received, *(send_bound(flows, hosts, s) for s in sets)], key=lambda b: b.seconds)


def chains_suffice(flows: Sequence[Flow], hosts: Hosts) -> bool:
    """Whether needers can pass everything on in chains: none of those that must is a holder too, and each sends as fast as it receives."""
    holders = {h for flow in flows if flow.needers for h in flow.holders}
    relays = {h for flow in flows if len(flow.needers) > 1 for h in flow.needers}
    return all(h not in holders and hosts.send_bytes_per_s[h] >= hosts.recv_bytes_per_s[h] for h in relays)


class _Program(NamedTuple):
    """Rows: first copies, or further ones, of a flow. Variables: who sends how much of a row, and the time."""

    owners: list[tuple[int, bool]]
    """Flow of each row, and whether the row is of first copies."""
    wanted: list[float]
    """Bytes of each row, as a part of all."""
    row_of: NDArray[np.int64]
    host_of: NDArray[np.int64]


def solve_shares(flows: Sequence[Flow], hosts: Hosts) -> tuple[Shares, Bound]:
    """The division of sending with the least time, and the bound of the set X that proves it."""
    from scipy.optimize import linprog  # its import takes 0.3 s, which most plans do without
    from scipy.sparse import coo_array

    chains = chains_suffice(flows, hosts)
    unit = float(sum(f.num_bytes for f in flows) or 1)
    program = _program(flows, unit, chains=chains)
    count, ones = len(program.row_of), np.ones(len(program.row_of))
    used, lane = np.unique(program.host_of, return_inverse=True)
    rate = np.array([hosts.send_bytes_per_s[h] for h in used.tolist()])
    shape = (len(program.wanted), count + 1)
    equal = coo_array((ones, (program.row_of, np.arange(count))), shape=shape).tocsr()
    values = np.concatenate([ones, -rate / rate.max()])
    columns = np.concatenate([np.arange(count), np.full(len(used), count)])
    at = np.concatenate([lane, np.arange(len(used))]), columns
    limit = coo_array((values, at), shape=(len(used), count + 1)).tocsr()
    cost = np.zeros(count + 1)
    cost[count] = 1.0
    solved = linprog(
        cost, A_ub=limit, b_ub=np.zeros(len(used)), A_eq=equal, b_eq=np.array(program.wanted), method="highs"
    )
    if solved.x is None:  # the program always has a solution: each flow has a holder
        raise ArithmeticError(f"the division of sending was not solved: {solved.message}")
    bound = _dual_bound(flows, hosts, used, -np.asarray(solved.ineqlin.marginals))
    first, others = _whole_amounts(flows, program, np.asarray(solved.x[:count]) * unit, chains=chains)
    return Shares(float(solved.x[count]) * unit / float(rate.max()), first, others), bound


def _program(flows: Sequence[Flow], unit: float, *, chains: bool) -> _Program:
    owners: list[tuple[int, bool]] = []
    wanted: list[float] = []
    row_of: list[int] = []
    host_of: list[int] = []
    for number, flow in enumerate(flows):
        for first in (True, False):
            copies = min(1, len(flow.needers)) if first else len(flow.needers) - 1
            if copies < 1 or (chains and not first):
                continue
            who = flow.holders if first else (*flow.holders, *flow.needers)
            row_of += [len(wanted)] * len(who)
            host_of += who
            wanted.append(flow.num_bytes * copies / unit)
            owners.append((number, first))
    return _Program(owners, wanted, np.array(row_of, dtype=np.int64), np.array(host_of, dtype=np.int64))


def _dual_bound(flows: Sequence[Flow], hosts: Hosts, used: NDArray[np.int64], prices: Floats) -> Bound:
    """The best set among the level sets of the prices; one of them has the value of the program."""
    levels = sorted({round(p, 12) for p in prices.tolist() if p > 1e-12}, reverse=True)
    sets = [tuple(used[prices >= level - 1e-11].tolist()) for level in levels]
    return max((send_bound(flows, hosts, s) for s in sets), key=lambda b: b.seconds, default=receive_bound((), hosts))


Amounts = tuple[tuple[tuple[int, int], ...], ...]


def _whole_amounts(
    flows: Sequence[Flow], program: _Program, amounts: Floats, *, chains: bool
) -> tuple[Amounts, Amounts | None]:
    """Amounts rounded to items, each row with its exact sum: of first copies, and of further ones."""
    found: dict[bool, list[tuple[tuple[int, int], ...]]] = {True: [()] * len(flows), False: [()] * len(flows)}
    starts = np.searchsorted(program.row_of, np.arange(len(program.owners) + 1))
    for row, (number, first) in enumerate(program.owners):
        part = slice(int(starts[row]), int(starts[row + 1]))
        flow = flows[number]
        total = flow.num_bytes * (1 if first else len(flow.needers) - 1)
        ends = np.cumsum(amounts[part]).tolist()[:-1]
        cuts = [min(total, max(0, round(end / flow.grain) * flow.grain)) for end in ends]
        edges = [0, *np.maximum.accumulate(np.array(cuts, dtype=np.int64)).tolist(), total]
        shares = zip(program.host_of[part].tolist(), edges[:-1], edges[1:], strict=True)
        found[first][number] = tuple((host, high - low) for host, low, high in shares if high > low)
    return tuple(found[True]), None if chains else tuple(found[False])
