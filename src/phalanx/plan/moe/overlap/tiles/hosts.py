"""Which rank passes a message on, where a host gets one copy of a token however many of its ranks need it (`dedup_host`).

Decides the way between hosts: what a source has for another host goes to one rank there, its *gateway*, which sends each rank of its host what that rank
needs; on the way back the ranks' partial sums go to the gateway, which adds them up and sends one row for each token. The gateway is the rank with the source's own
place in its host (the third to the third, round again where there are fewer), so that all ranks of a host carry about equal shares. Must never change within a run:
both ends of a message rely on it without asking.

`hosts` is the host of each rank by its position in `ep_etp`, any integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def members(hosts: Sequence[int], host: int) -> list[int]:
    """Ranks of a host, ascending."""
    return [rank for rank, other in enumerate(hosts) if other == host]


def gateway(hosts: Sequence[int], source: int, host: int) -> int:
    """The rank of `host` that takes what `source`, a rank of another host, has for all of them."""
    place, ranks = members(hosts, hosts[source]).index(source), members(hosts, host)
    return ranks[place % len(ranks)]


def gateways(hosts: Sequence[int], source: int) -> list[int]:
    """Gateways of all other hosts, for one source."""
    return [gateway(hosts, source, host) for host in sorted(set(hosts) - {hosts[source]})]


def can_forward(hosts: Sequence[int]) -> bool:
    """Whether there is anything to pass on: several hosts, one of them with several ranks."""
    return 1 < len(set(hosts)) < len(hosts)


def message_parts(hosts: Sequence[int], rank: int, parts: Sequence[int]) -> tuple[int, ...]:
    """Parts in which this rank sends to each rank; `parts` are those that each has of its tiles. A gateway gets as many as any rank of its host has."""
    out = [n if hosts[peer] == hosts[rank] else 0 for peer, n in enumerate(parts)]
    for through in gateways(hosts, rank):
        out[through] = max(parts[peer] for peer in members(hosts, hosts[through]))
    return tuple(out)


def relay_parts(hosts: Sequence[int], rank: int, parts: Callable[[int, int], int]) -> tuple[int, ...]:
    """Parts of each source that this rank passes on; `parts(source, rank)` are those that a rank has of a source's tiles."""
    here = members(hosts, hosts[rank])
    return tuple(
        max(parts(source, peer) for peer in here)
        if hosts[source] != hosts[rank] and gateway(hosts, source, hosts[rank]) == rank
        else 0
        for source in range(len(hosts))
    )
