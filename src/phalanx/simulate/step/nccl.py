"""Memory of a GPU that NCCL takes for the communicators of a rank, which torch's allocator does not see.

Decides nothing: it counts the communicators that `runtime/comm/groups.py` makes, from the same lists of axes. Computed from NCCL's sources (files and lines are those of v2.28.9, which torch 2.11 brings) for
GPUs of 18 links to NVSwitches and a network card each, and never measured here; one measurement agrees: the first all-to-all of 8 H100 takes 3.28 GB (NVIDIA/nccl issue 1685), here 2.92. Left out: what few
runs use, second groups of overlapped passes, groups of few thread blocks, a tied embedding's, those of replicas' sums.

An exchange connects all its channels with all its peers, however few bytes it carries (src/enqueue.cc:2426); a collective connects the rings, trees or multicast buffers of the one algorithm that NCCL chooses
(src/enqueue.cc:453). On one host that is a ring for few bytes, and for reductions to shards and all-gathers of any size; multicast for sums of whole tensors from about 1 MB. Between hosts few bytes take trees.
"""

from __future__ import annotations

from functools import lru_cache

from phalanx.plan.mapping import PASS_GROUPS, STEP_GROUPS, SUMMED_GROUPS, AnyFolding, Folding, RankSet, exchanged_groups

Ranks = RankSet | tuple[int, ...]
MIB = 2**20
COMMUNICATOR_BYTES = 100 * MIB
"""One without its buffers: what a ring leaves of the 0.36 to 0.41 GB that one of two ranks has been seen to take."""
HOST_CHANNELS, PEER_CHANNELS = 24, 32
"""Channels of a ring on one host, and of an exchange with each peer: that number, rounded up to a power of two (src/graph/paths.cc:860-886)."""
NETWORK_CHANNELS, MOST_NETWORK_CHANNELS, NETWORK_PEER_CHANNELS = 4, 16, 4
"""Between hosts: for each card that is used, at most (src/graph/connect.cc:450-465), and those of an exchange with each peer, on any host, at most: 2 in v2.28, 4 in v2.30 (src/graph/paths.cc:989-1000)."""
NVLINK_BYTES = 12 * MIB
"""Of a channel to and from a peer on the host: to receive 0.5, 4.7 and 4 MiB for each protocol, to send 4 KiB, in units of 2 MiB (src/transport/p2p.cc:376-448, src/init.cc:697-699). Not shared."""
NETWORK_BYTES = 20 * MIB
"""Of a channel of a ring or tree to and from a peer on another host (src/transport/net.cc:880-907, 1048)."""
SHARED_BYTES = 2 * MIB
"""Of a channel for exchanges with all peers on other hosts, one way: 16 steps of 128 KiB (src/transport/net.cc:647). Where peers are exchanged with through the card next to them, each GPU of the host has one."""
MULTICAST_BYTES = 32 * MIB
"""For each GPU of the host: 16 channels there and back, 8 steps of 128 KiB (src/transport/nvls.cc:337)."""


@lru_cache(maxsize=65536)
def nccl_bytes(
    folding: AnyFolding,
    *,
    ranks_per_host: int,
    rank: int = 0,
    cp_exchanges: bool = False,
    sums_whole: bool = False,
    by_purpose: bool = True,
    rows: str = "ep",
) -> int:
    """What the communicators of `rank` take once each has been used. `cp_exchanges`: context parallelism exchanges with all ranks of cp (ulysses; all_gather, whose backward pass sums rows), not with neighbours. `sums_whole`: gradients are summed whole (ZeRO-0).
    `by_purpose`: as in `communicators`. `rows`: group over which rows of MoE layers are exchanged, as in `build_groups`."""
    first, total = rank - rank % ranks_per_host, 0
    for ranks, names, exchanged in _used(folding, rank, by_purpose=by_purpose, rows=rows):
        near = sum(other in ranks for other in range(first, first + ranks_per_host))
        multicast = sums_whole and bool(names & {"dp_cp", "edp"})
        peers, rings = len(ranks) - 1, bool(names.difference(SUMMED_GROUPS))
        if not exchanged:
            peers = _peers(folding, names, len(ranks), cp_exchanges=cp_exchanges)
        total += _communicator_bytes(len(ranks), near, peers=peers, rings=rings, multicast=multicast)
    return total


def communicators(
    folding: AnyFolding, rank: int = 0, *, by_purpose: bool = True
) -> tuple[tuple[Ranks, frozenset[str]], ...]:
    """(ranks, axes) of each communicator of a rank, as `runtime.comm.build_groups` makes them: one for passes and one for the rest of a step where both have the same ranks; not `by_purpose`: one
    for the same ranks, as other frameworks have."""
    return tuple((ranks, names) for ranks, names, _ in _used(folding, rank, by_purpose=by_purpose, rows="ep"))


def _used(folding: AnyFolding, rank: int, *, by_purpose: bool, rows: str) -> list[tuple[Ranks, frozenset[str], bool]]:
    """And whether all ranks exchange with each other: rows of layers and, with us, parts of sums of rows (`plan.mapping.exchanged_groups`)."""
    axes: dict[Ranks, set[str]] = {}
    group_of = folding.rank_set if isinstance(folding, Folding) else folding.group_of
    for name in folding.group_names:
        if name in (*PASS_GROUPS, *STEP_GROUPS) and name != "embedding":
            axes.setdefault(group_of(rank, name), set()).add(name)
    purposes: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    purposes = ((PASS_GROUPS, exchanged_groups(rows)), (STEP_GROUPS, ()))
    if not by_purpose:
        purposes = (((*PASS_GROUPS, *STEP_GROUPS), ("ep_etp",)),)
    parts = ((ranks, names.intersection(of), sent) for ranks, names in axes.items() for of, sent in purposes)
    return [
        (ranks, frozenset(names), not names.isdisjoint(sent))
        for ranks, names, sent in parts
        if names and len(ranks) > 1
    ]


def _peers(folding: AnyFolding, names: frozenset[str], size: int, *, cp_exchanges: bool) -> int:
    """With how many ranks of a group messages are exchanged by name."""
    if ("cp" in names and cp_exchanges) or ("pp" in names and not isinstance(folding, Folding)):
        return size - 1
    return min(2, size - 1) if names & {"cp", "pp"} else 0


@lru_cache(maxsize=4096)
def _communicator_bytes(size: int, near: int, *, peers: int, rings: bool, multicast: bool) -> int:
    """One of `size` ranks, `near` of them on this host."""
    if near == size:
        exchanged = min(peers, near - 1) * PEER_CHANNELS * NVLINK_BYTES
        reduced = MULTICAST_BYTES * near if multicast else 0
        return COMMUNICATOR_BYTES + HOST_CHANNELS * NVLINK_BYTES + exchanged + reduced
    channels = min(MOST_NETWORK_CHANNELS, NETWORK_CHANNELS * near)
    each = NETWORK_BYTES if near == 1 else NVLINK_BYTES
    collective = channels * each * (3 if rings else 2)  # a tree has two neighbours, of which one may be the ring's
    to_peer = min(NETWORK_PEER_CHANNELS, max(1, channels // -(-size // 8)))
    exchanged = min(peers, near - 1) * to_peer * NVLINK_BYTES
    shared = channels * SHARED_BYTES * (1 + near) if peers else 0
    return COMMUNICATOR_BYTES + collective + exchanged + shared
