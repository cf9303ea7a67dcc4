"""Seconds of what crosses between pipeline stages.

Decides which transfers go between hosts, and how long one takes: where stages are all alike, that of one rank to its partner; where they have foldings of their own, what the run's plan says
(`plan/pipeline/boundary/stage_edges.py`): all messages of a rank go at once, those inside its host beside those between hosts, and the edge takes what its busiest rank does.
"""

from __future__ import annotations

from collections.abc import Mapping as Table
from functools import lru_cache

from phalanx.plan.mapping import StagedFolding
from phalanx.plan.pipeline.boundary import Activation, Route, staged_edges
from phalanx.plan.pipeline.schedule import Edge, chain
from phalanx.plan.reshard import equal_hosts
from phalanx.simulate.hardware import Network
from phalanx.simulate.mapping import Job, Mapping, StagedMapping


def hop_seconds(job: Job, mapping: Mapping, network: Network) -> tuple[float, ...]:
    """Seconds of a transfer from each place to the next, from the last to the first, in a pipeline whose stages are all alike. One
    that crosses hosts for any rank counts as one between hosts."""
    f = mapping.folding
    if f.pp == 1:
        return (0.0,)
    num_bytes = mapping.tokens(job) * job.spec.hidden * mapping.item_bytes
    inside, between = (network.send(num_bytes, between=far) for far in (False, True))
    return tuple(
        between if far else inside for far in _far_hops(f.world // f.pp, f.pp, network.hardware.ranks_per_host)
    )


@lru_cache(maxsize=1024)
def _far_hops(ranks: int, pp: int, per_host: int) -> tuple[bool, ...]:
    """Whether, at each hop, any rank of a stage of so many is on another host than its partner in the next."""
    if ranks >= per_host:
        return (True,) * pp
    places = [(place, (place + 1) % pp) for place in range(pp)]
    return tuple(
        any((a * ranks + i) // per_host != (b * ranks + i) // per_host for i in range(ranks)) for a, b in places
    )


def hop_of(places: tuple[int, int]) -> int:
    """The number of the hop between two places that are neighbours, or the two ends: then the last one."""
    return min(places) if abs(places[0] - places[1]) == 1 else -1


def edge_seconds(
    job: Job, mapping: StagedMapping, network: Network, rank_of_stage: tuple[int, ...]
) -> dict[Edge, float]:
    """Seconds of a transfer along each edge between virtual stages, up or down: the longest of all pipelines side by side."""
    folding, per_host = mapping.folding, network.hardware.ranks_per_host
    host_of_rank = [rank // per_host for rank in range(folding.world)]
    what = Activation(
        sequences=mapping.micro_batch,
        seq_len=job.seq_len,
        hidden=job.spec.hidden,
        itemsize=mapping.stages[0].item_bytes,
    )
    edges, out = chain(len(rank_of_stage)), dict[Edge, float]()
    for replica in _different_replicas(folding, per_host):
        plans = staged_edges(edges, rank_of_stage, folding, replica=replica, what=what, hosts=equal_hosts(host_of_rank))
        known: dict[str, float] = {}  # looped edges between two places share a plan
        for edge, plan in plans.items():
            if plan.hash not in known:
                known[plan.hash] = max(
                    _exchange_s(routes, what.itemsize, host_of_rank, network)
                    for routes in (plan.forward, plan.backward)
                )
            out[edge] = max(out.get(edge, 0.0), known[plan.hash])
    return out


def _different_replicas(folding: StagedFolding, per_host: int) -> list[int]:
    """The first of the pipelines that lie alike on hosts: those whose stages begin at the same places of hosts."""
    found: dict[tuple[int, ...], int] = {}
    for replica, stages in enumerate(folding.pipelines):
        found.setdefault(tuple(ranks[0] % per_host for ranks in stages), replica)
    return list(found.values())


def _exchange_s(routes: Table[int, Route], itemsize: int, host_of_rank: list[int], network: Network) -> float:
    """All messages of one transfer at once: what the busiest rank sends or takes, inside its host or between hosts."""
    carried: dict[tuple[int, str, bool], int] = {}
    for rank, route in routes.items():
        sent = (*route.sends, *(relay.leg for relay in route.relays))
        for way, legs in (("out", sent), ("in", route.receives)):
            for leg in legs:
                key = rank, way, host_of_rank[rank] != host_of_rank[leg.peer]
                carried[key] = carried.get(key, 0) + itemsize * sum(box.num_elements for box in leg.parts)
    return max(
        (network.send(num_bytes, between=between) for (_, _, between), num_bytes in carried.items()), default=0.0
    )
