"""Who keeps a copy of each shard of the optimizer state, so that no loss of fewer than `floor` hosts takes the last one.

A shard of a family that is cut over a group of D ranks is kept by its owner and by the next ranks of the group that are on hosts which have none of it yet,
until `floor` hosts have it, or all hosts of the group. *Next* is along a ring in which the hosts take turns: hosts of one size so keep equally many copies on
each rank (in the order of ranks the first rank of the next host would get those of a whole host), and ranks that are hosts of their own are a plain ring.

Must never change: the same group gives the same holders on every rank; the owner is the first of them; no two are on one host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

Keepers = tuple[tuple[int, ...], ...]
"""Of each shard: the members of its group that keep it, its owner first."""


@lru_cache(maxsize=256)
def shard_holders(hosts: tuple[int, ...], *, floor: int) -> Keepers:
    """Members of a group (0 .. D-1, on `hosts`) that hold each of its D shards.

    Fewer than `floor` where the group lies on fewer hosts.
    """
    ring, out = _in_turns(hosts), {}
    for place, owner in enumerate(ring):
        chosen = {hosts[owner]: owner}
        for member in ring[place + 1 :] + ring[:place]:
            if len(chosen) >= floor:
                break
            chosen.setdefault(hosts[member], member)
        out[owner] = tuple(chosen.values())
    return tuple(out[owner] for owner in range(len(hosts)))


def _in_turns(hosts: Sequence[int]) -> list[int]:
    """Members: the first of each host, then the second of each, ..."""
    seen: Counter[int] = Counter()
    turn = []
    for host in hosts:
        turn.append(seen[host])
        seen[host] += 1
    return sorted(range(len(hosts)), key=lambda member: (turn[member], member))


def keepers_of(group: Sequence[int], *, holders: int, hosts: Sequence[int] | None) -> Keepers:
    """For the ranks of a group that shards a family; empty where every shard is its owner's alone.

    `hosts`: of every rank of the folding; None: each rank stands for a host.
    """
    if holders <= 1 or len(group) == 1:
        return ()
    return shard_holders(tuple(range(len(group))) if hosts is None else tuple(hosts[r] for r in group), floor=holders)
