"""Who keeps a copy of each shard of the optimizer state, so that no loss of fewer than `floor` hosts takes the last one.

A shard of a family that is cut over a group of D ranks is kept by its owner and by the next ranks of the group that are on hosts which have none of it yet,
until `floor` hosts have it, or all hosts of the group. *Next* is along a ring in which the hosts take turns: hosts of one size so keep equally many copies on
each rank (in the order of ranks the first rank of the next host would get those of a whole host), and ranks that are hosts of their own are a plain ring.
Where racks are known, racks take turns too, and hosts in racks that have none of a shard yet go before others: as long as there are `floor` racks no loss of fewer takes
the last copy.

How the keepers of a shard come by its reduced gradient, and the others by its parameters, is decided by bytes (`sums_whole`, `publication`): what a rank sends for
an element of the buffer.

Must never change: the same group gives the same holders on every rank; the owner is the first of them; no two are on one host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

Keepers = tuple[tuple[int, ...], ...]
"""Keepers of each shard: the members of its group that keep it, its owner first."""


@lru_cache(maxsize=256)
def shard_holders(hosts: tuple[int, ...], *, floor: int, racks: tuple[int, ...] = ()) -> Keepers:
    """Members of a group (0 .. D-1, on `hosts`, in `racks`) that hold each of its D shards.

    Fewer than `floor` where the group lies on fewer hosts. Empty `racks`: nothing is known of them.
    """
    racks = racks or hosts
    ring, out = _in_turns(hosts, racks), {}
    for place, owner in enumerate(ring):
        chosen, touched = {hosts[owner]: owner}, {racks[owner]}
        for apart in (True, False):
            for member in ring[place + 1 :] + ring[:place]:
                if len(chosen) >= floor:
                    break
                if hosts[member] not in chosen and not (apart and racks[member] in touched):
                    chosen[hosts[member]] = member
                    touched.add(racks[member])
        out[owner] = tuple(chosen.values())
    return tuple(out[owner] for owner in range(len(hosts)))


def _in_turns(hosts: Sequence[int], racks: Sequence[int]) -> list[int]:
    """Members: the first of each host, then the second of each, ...; among these the first host of each rack, then the second of each, ...

    Hosts come in one order in each turn, that of their first members, however their members lie among each other.
    """
    seen: Counter[int] = Counter()
    turn, first = [], dict[int, int]()
    for member, host in enumerate(hosts):
        turn.append(seen[host])
        seen[host] += 1
        first.setdefault(host, member)
    inside: dict[int, list[int]] = {}
    for host, rack in zip(hosts, racks, strict=True):
        if host not in inside.setdefault(rack, []):
            inside[rack].append(host)
    return sorted(
        range(len(hosts)),
        key=lambda member: (turn[member], inside[racks[member]].index(hosts[member]), first[hosts[member]]),
    )


@lru_cache(maxsize=256)
def copies_of(keepers: Keepers) -> Keepers:
    """Shards that each member of a group keeps for others, ascending."""
    out: list[list[int]] = [[] for _ in keepers]
    for shard, (_, *others) in enumerate(keepers):
        for member in others:
            out[member].append(shard)
    return tuple(map(tuple, out))


def keepers_of(
    group: Sequence[int], *, holders: int, hosts: Sequence[int] | None, racks: Sequence[int] = ()
) -> Keepers:
    """Keepers for the ranks of a group that shards a family; empty where every shard is its owner's alone.

    `hosts`: of every rank of the folding; None: each rank stands for a host. `racks` likewise; empty: nothing is known of them.
    """
    if holders <= 1 or len(group) == 1:
        return ()
    of_group = tuple(range(len(group))) if hosts is None else tuple(map(hosts.__getitem__, group))
    return shard_holders(of_group, floor=holders, racks=tuple(map(racks.__getitem__, group)) if racks else ())


def sums_whole(keepers: Keepers, *, scatters: bool) -> bool:
    """Whether a buffer whose shards are kept so is summed by one all-reduce, from which each keeper takes what it keeps.

    The other way is a reduce-scatter, and messages of each shard to its keepers. Of D shards with k copies each, a rank sends 2(D-1)/D of the buffer one way, and
    (D-1)/D + k/D the other way. `scatters`: the transport has a reduce-scatter of its own; gloo's (torch 2.13) is an all-reduce of a copy of the
    buffer, so that messages come on top of what all-reduce sends. Where both send the same, one collective is fewer than two.
    """
    shards = len(keepers)
    if shards < 2:
        return False
    copies = max(len(members) for members in keepers) - 1
    apart = (shards - 1 if scatters else 2 * (shards - 1)) + copies
    return 2 * (shards - 1) <= apart


@dataclass(frozen=True)
class Parcels:
    """What one member of a group sends and receives so that all have the parameters of all shards."""

    sends: tuple[int, ...]
    """Members that its own shard goes to."""
    receives: tuple[int, ...]
    """Shards that come, each from its owner (the member of the same number)."""


GATHER_SHARE = 0.75
"""An all-gather is one call, whatever the number of ranks. Messages between single ranks are taken where they carry at most this part of its bytes."""


@lru_cache(maxsize=256)
def publication(keepers: Keepers, member: int) -> Parcels | None:
    """Messages of the updated parameters of each shard to those that do not keep it (who keeps it has rounded them itself); None: an all-gather.

    An all-gather brings a member D-1 shards, though it has all but D-k-1 of them already. With as many keepers as shards nothing travels.
    """
    if not keepers:
        return None
    lacking = [tuple(m for m in range(len(keepers)) if m not in members) for members in keepers]
    if max(map(len, lacking)) > GATHER_SHARE * (len(keepers) - 1):
        return None
    return Parcels(sends=lacking[member], receives=tuple(i for i, others in enumerate(lacking) if member in others))
