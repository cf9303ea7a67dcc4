"""Where the replicas of one layer live: the rules that others use, and the one that fits where theirs is cut short.

Each rule turns replica counts into a table of copies, experts by hosts; hosts are anonymous here. `compact` and `spread` are the usual ones, `max_overlap` is
maximum rank overlap as printed (arXiv 2407.04656, section 4 and its appendix), `least_loaded` balances load and nothing else. `complement_overlap` groups
what each host *misses*: where the last segment of the printed rule is cut short, it breaks the promise that any f-1 losses are survived; hosts that miss the
same experts keep it. `keep_apart` repairs any table: no expert twice on a host while some host has none of it.

Must never change: a table has `counts[e]` copies of expert e and `slots[n]` copies on host n.

Shapes: E experts, N hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Copies = NDArray[np.int64]
"""(E, N) replicas of each expert on each host."""


def by_count(counts: Sequence[int]) -> list[int]:
    """Experts from the fewest replicas to the most; equal ones in order."""
    return sorted(range(len(counts)), key=lambda e: (counts[e], e))


def compact(counts: Sequence[int], slots: Sequence[int]) -> Copies:
    """One host after the other is filled with one expert after the other."""
    copies: Copies = np.zeros((len(counts), len(slots)), dtype=np.int64)
    hosts = iter(np.repeat(np.arange(len(slots)), slots))
    for expert in by_count(counts):
        for _ in range(counts[expert]):
            copies[expert, next(hosts)] += 1
    return copies


def spread(counts: Sequence[int], slots: Sequence[int]) -> Copies:
    """Copies are dealt to the hosts in turn, expert after expert; a full host is passed over."""
    copies: Copies = np.zeros((len(counts), len(slots)), dtype=np.int64)
    vacant, host = list(slots), 0
    for expert in by_count(counts):
        for _ in range(counts[expert]):
            while not vacant[host]:
                host = (host + 1) % len(slots)
            copies[expert, host] += 1
            vacant[host] -= 1
            host = (host + 1) % len(slots)
    return copies


def max_overlap(counts: Sequence[int], slots: Sequence[int]) -> Copies:
    """The printed rule: experts in groups of c by rising counts, a segment of hosts for each as long as its rarest expert has replicas.

    The last segment is as long as hosts are left. What is left over goes to vacant slots "uniformly": to the host with most of them,
    one without the expert if there is any. Hosts with fewer slots than c take the rarest experts of their group.
    """
    return fill(segments(counts, slots), counts, slots)


def segments(counts: Sequence[int], slots: Sequence[int]) -> Copies:
    """The segments of `max_overlap`, vacant slots left vacant."""
    order, width = by_count(counts), max(slots)
    copies: Copies = np.zeros((len(counts), len(slots)), dtype=np.int64)
    first = 0
    for at in range(0, len(order), width):
        group = order[at : at + width]
        length = min(counts[group[0]], len(slots) - first)
        for host in range(first, first + length):
            copies[group[: slots[host]], host] = 1
        first += length
    return copies


def segments_fit(counts: Sequence[int], slots: Sequence[int]) -> bool:
    """Whether the printed rule cuts no segment short: then it is optimal for every number of lost hosts."""
    order, width = by_count(counts), max(slots)
    return min(slots) == width and sum(counts[e] for e in order[::width]) <= len(slots)


def complement_overlap(counts: Sequence[int], slots: Sequence[int]) -> Copies | None:
    """Groups of d = E - c experts that the same hosts lack. None where a host misses as many as it holds, or hosts differ in slots."""
    num_experts, num_hosts, width = len(counts), len(slots), max(slots)
    missing = num_experts - width
    if not 0 < missing < width or min(slots) != width or max(counts) > num_hosts:
        return None
    lacks = [num_hosts - c for c in counts]
    absent = np.zeros((num_experts, num_hosts), dtype=np.int64)
    first = 0
    order = sorted((e for e in range(num_experts) if lacks[e]), key=lambda e: (lacks[e], e))
    for at in range(0, len(order), missing):
        group = order[at : at + missing]
        length = min(lacks[group[0]], num_hosts - first)
        absent[group, first : first + length] = 1
        first += length
    absent = keep_apart(fill(absent, lacks, (missing,) * num_hosts))
    return 1 - absent


def safe_spread(counts: Sequence[int], slots: Sequence[int], *, floor: int) -> Copies:
    """`floor` copies of each expert on distinct hosts, those with most room first, then the rest: holds the floor wherever that can be held."""
    copies: Copies = np.zeros((len(counts), len(slots)), dtype=np.int64)
    vacant = np.array(slots, dtype=np.int64)
    for expert in by_count(counts):
        hosts = np.argsort(-vacant, kind="stable")[: min(floor, counts[expert])]
        copies[expert, hosts[vacant[hosts] > 0]] = 1
        vacant = np.array(slots) - copies.sum(0)
    return fill(copies, counts, slots)


def host_loads(shares: ArrayLike, copies: Copies) -> NDArray[np.float64]:
    """(..., N) load of each host; `shares` = (..., E) load of one copy of each expert, `copies` (..., E, N).

    Expert by expert: the last bits of a product of matrices depend on the processor, and plans must not.
    """
    loads: NDArray[np.float64] = (np.asarray(shares)[..., None] * copies).sum(-2)
    return loads


def least_loaded(counts: Sequence[int], slots: Sequence[int], loads: Sequence[float]) -> Copies:
    """Longest processing time first: the copy with most load to the host with least, one without the expert if there is any."""
    shares = [load / count for load, count in zip(loads, counts, strict=True)]
    copies: Copies = np.zeros((len(counts), len(slots)), dtype=np.int64)
    return fill(copies, counts, slots, shares=shares)


def fill(
    copies: Copies, counts: Sequence[int], slots: Sequence[int], *, shares: Sequence[float] | None = None
) -> Copies:
    """What is missing of each expert goes to vacant slots: to the host with most of them, one without the expert if there is any.

    With `shares` (load of one copy of each expert) the heaviest copies go first, to the host with the least load.
    """
    copies = copies.copy()
    vacant = np.array(slots, dtype=np.int64) - copies.sum(0)
    load = np.zeros(len(slots)) if shares is None else host_loads(shares, copies)
    missing = (np.asarray(counts) - copies.sum(1)).tolist()
    order = by_count(counts)
    if shares is not None:
        order.sort(key=lambda e: -shares[e])
    for expert in order:
        share = 0.0 if shares is None else shares[expert]
        while missing[expert]:
            rank = -vacant if shares is None else load
            open_ = np.flatnonzero((vacant > 0) & (copies[expert] == 0))
            most = missing[expert]
            if not len(open_):  # only beside itself: one at a time, because each changes the rank
                open_, most = np.flatnonzero(vacant > 0), 1
            hosts = open_[np.argsort(rank[open_], kind="stable")[:most]]
            copies[expert, hosts] += 1
            vacant[hosts] -= 1
            load[hosts] += share
            missing[expert] -= len(hosts)
    return copies


def keep_apart(copies: Copies) -> Copies:
    """Swap copies until no host holds an expert twice that another host lacks, wherever that can be.

    A copy e that its host has twice goes to a host without e, for one that the first host lacks, or else for one that the other has twice. Either
    way the copies beside copies become fewer; with equal slots one of the two exists, so all are apart in the end.
    """
    copies = copies.copy()
    found = True
    while found:
        found = False
        for expert, host in np.argwhere(copies > 1).tolist():
            while copies[expert, host] > 1 and (swap := _apart_swap(copies, expert, host)) is not None:
                other, given = swap
                copies[expert, host] -= 1
                copies[given, host] += 1
                copies[given, other] -= 1
                copies[expert, other] += 1
                found = True
    return copies


def _apart_swap(copies: Copies, expert: int, host: int) -> tuple[int, int] | None:
    """(other host, expert given in exchange), or None. The copy given is of the expert with most copies: it needs them least."""
    totals = copies.sum(1)
    for other in np.flatnonzero(copies[expert] == 0):
        held = copies[:, other] > 0
        for wanted in (held & (copies[:, host] == 0), copies[:, other] > 1):
            if wanted.any():
                return int(other), int(np.argmax(np.where(wanted, totals, -1)))
    return None


def topped_up(copies: Copies, counts: Sequence[int], slots: Sequence[int]) -> Copies | None:
    """A table for other counts (the paper's) made into one for `counts`: copies beside copies make room for what a host lacks.

    No set of holders shrinks, so it survives whatever it survived. None where an expert is on more hosts than it has replicas now.
    """
    single = np.minimum(copies, 1)
    return fill(single, counts, slots) if (single.sum(1) <= np.asarray(counts)).all() else None
