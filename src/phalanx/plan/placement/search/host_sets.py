"""Sets of hosts as bits, many at a time: which are contained in which, and how many sets of k hosts contain one of them.

Decides nothing. A *fatal* set of lost hosts contains all holders of some expert; holders of experts are the sets here. Only the *minimal* ones matter.
Sets are Python integers (bit n = host n), so any number of hosts works; NumPy does the work where they fit its words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

TABLE_HOSTS = 20
"""Hosts of a table of all subsets: 2^20 of them take 10 ms."""


def minimal_sets(sets: Iterable[int], *, limit: int | None = None) -> list[int] | None:
    """Those that contain no other, ascending by size. None where there are more than `limit`: then nobody waits for them."""
    distinct = sorted(set(sets), key=lambda s: (s.bit_count(), s))
    if not distinct:
        return []
    words = _words(distinct)
    alive = np.ones(len(distinct), dtype=bool)
    kept: list[int] = []
    for i, mask in enumerate(distinct):
        if not alive[i]:
            continue
        if limit is not None and len(kept) >= limit:
            return None
        kept.append(mask)
        rest = words[i + 1 :]
        alive[i + 1 :] &= ((rest & words[i]) != words[i]).any(1)
    return kept


def _words(sets: Sequence[int]) -> NDArray[np.uint64]:
    """(sets, words) 64 hosts a word."""
    count = max(1, -(-max(s.bit_length() for s in sets) // 64))
    low = (1 << 64) - 1
    return np.array([[s >> (64 * w) & low for w in range(count)] for s in sets], dtype=np.uint64)


def components(sets: Sequence[int]) -> list[list[int]]:
    """Sets parted so that those of different parts share no host."""
    parts: list[tuple[int, list[int]]] = []
    for mask in sets:
        touched = [p for p in parts if p[0] & mask]
        union, members = mask, [mask]
        for hosts, others in touched:
            union |= hosts
            members = others + members
        parts = [p for p in parts if not p[0] & mask] + [(union, members)]
    return [members for _, members in parts]


def hosts_in(mask: int) -> list[int]:
    """Hosts of a set, ascending."""
    return [n for n in range(mask.bit_length()) if mask >> n & 1]


def mask_of(hosts: Iterable[int]) -> int:
    """The set of these hosts."""
    out = 0
    for host in hosts:
        out |= 1 << int(host)
    return out


def popcounts(num_hosts: int) -> NDArray[np.uint8]:
    """Size of every subset of `num_hosts` hosts, by its bits."""
    sizes = np.zeros(1, dtype=np.uint8)
    for _ in range(num_hosts):
        sizes = np.concatenate([sizes, sizes + 1])
    return sizes


def fatal_table(sets: Sequence[int], num_hosts: int) -> NDArray[np.bool_]:
    """Whether each subset of the hosts (2^N of them) contains one of `sets`."""
    fatal = np.zeros(1 << num_hosts, dtype=bool)
    fatal[np.array(sets, dtype=np.int64)] = True
    for n in range(num_hosts):
        halves = fatal.reshape(-1, 2, 1 << n)
        halves[:, 1] |= halves[:, 0]
    return fatal


def small_fatal_counts(sets: Sequence[int], num_hosts: int) -> tuple[int, int, int, int]:
    """How many sets of 0, 1, 2 and 3 hosts contain one of `sets` (minimal ones), for any number of hosts, without listing them.

    Hosts that are fatal alone are set aside. Among the others the fatal pairs are edges of a graph: the triples with an edge number
    edges * (n - 2) - (pairs of edges that meet) + triangles. Fatal triples of their own contain no edge, because the sets are minimal.
    """
    if 0 in sets:
        return 1, num_hosts, math.comb(num_hosts, 2), math.comb(num_hosts, 3)
    singles = [s for s in sets if s.bit_count() == 1]
    edges = [hosts_in(s) for s in sets if s.bit_count() == 2]
    triples = sum(s.bit_count() == 3 for s in sets)
    n = num_hosts - len(singles)
    near: dict[int, set[int]] = {}
    for a, b in edges:
        near.setdefault(a, set()).add(b)
        near.setdefault(b, set()).add(a)
    meeting = sum(math.comb(len(others), 2) for others in near.values())
    triangles = sum(len(near[a] & near[b]) for a, b in edges) // 3
    pairs = len(edges) + math.comb(num_hosts, 2) - math.comb(n, 2)
    three = triples + len(edges) * (n - 2) - meeting + triangles + math.comb(num_hosts, 3) - math.comb(n, 3)
    return 0, len(singles), pairs, three
