"""Pipeline stages with foldings of their own (`folding.stages`) on a cluster: a mapping for each stage, and what crosses between them.

Decides what a stage is to the rest of the simulator: the `Mapping` of a pipeline whose stages are all like it, on ranks that begin where the stage's do. So layers, memory and sums of gradients of a
stage are those of a plain pipeline at that place. What crosses an edge is what the run's plan says (`plan/pipeline/boundary/stage_edges.py`): all messages of a rank go at once, those inside its host beside
those between hosts, and the edge takes what its busiest rank does. Must never change: stages that are all alike give the prediction of the plain mapping (test).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping as Table
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.mapping import Folding, StagedFolding
from phalanx.plan.pipeline.boundary import Activation, Route, staged_edges
from phalanx.plan.pipeline.schedule import Edge, chain
from phalanx.plan.reshard import equal_hosts
from phalanx.simulate.hardware import Network
from phalanx.simulate.mapping.mapping import Job, Mapping, mapping_problems


@dataclass(frozen=True, kw_only=True)
class StagedMapping:
    """`stages[s]` is the mapping of stage s as though all stages were like it (`like_stage`); schedule, precision and the like are the same in all."""

    folding: StagedFolding
    stages: tuple[Mapping, ...]
    micro_batch: int
    """Sequences of a pipeline's micro-batch; a stage's mapping has those of one share."""

    @property
    def slots(self) -> None:
        """Such stages have no replicas of experts (`plan.stage_foldings.resolve_mapping`)."""
        return None

    @property
    def extra_warmup(self) -> tuple[int, ...] | None:
        return self.stages[0].extra_warmup

    @property
    def schedule(self) -> str:
        return self.stages[0].schedule

    def num_microbatches(self, job: Job) -> int:
        """Of each pipeline."""
        return self.stages[0].num_microbatches(job)

    def check(self, job: Job) -> None:
        """Raise `PlanError` with all problems of all stages, each once."""
        found: dict[tuple[Any, ...], Problem] = {}
        for stage in self.stages:
            for problem in mapping_problems(stage, job):
                found.setdefault((problem.where, str(problem.value), problem.rule), problem)
        raise_if(list(found.values()), PlanError, subject="mapping")

    def to_json(self) -> str:
        """All choices of all stages."""
        return json.dumps({"stages": [json.loads(stage.to_json()) for stage in self.stages]}, sort_keys=True)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def label(self) -> str:
        """One line for tables."""
        rest = self.stages[0].label().split(" | ")[-1].split(" ", 1)[1]
        return f"{self.folding.label()} | mb{self.micro_batch} {rest}"

    def explain(self) -> str:
        """The mapping in a few lines that a person reads."""
        beside = self.stages[0].explain().split("\n")[1:]
        return "\n".join([self.label(), *(f"  {line}" for line in self.folding.explain().split("\n")), *beside])


AnyMapping = Mapping | StagedMapping
"""The same for all stages, or one for each."""


def like_stage(folding: StagedFolding, place: int) -> Folding:
    """A uniform pipeline of as many stages, all like that of `place`."""
    stage, pp = folding.stages[place], folding.pp
    return Folding(world=stage.world * pp, tp=stage.tp, cp=stage.cp, pp=pp, ep=stage.ep, etp=stage.etp)


def shares_of(folding: StagedFolding, place: int) -> int:
    """Ranks of dp that divide the sequences of a micro-batch."""
    return folding.stages[place].dp // folding.replicas


def of_places(mapping: AnyMapping) -> tuple[Mapping, ...]:
    """The mapping at each place of the pipeline."""
    return (mapping,) * mapping.folding.pp if isinstance(mapping, Mapping) else mapping.stages


def with_extra_warmup(mapping: AnyMapping, extra_warmup: tuple[int, ...]) -> AnyMapping:
    """The same with these forwards ahead of 1F1B."""
    if isinstance(mapping, Mapping):
        return replace(mapping, extra_warmup=extra_warmup)
    return replace(mapping, stages=tuple(replace(stage, extra_warmup=extra_warmup) for stage in mapping.stages))


# ---- what crosses ---------------------------------------------------------------------------------------------------------------


def hop_seconds(job: Job, mapping: Mapping, network: Network) -> tuple[float, ...]:
    """Of a pipeline whose stages are all alike: seconds of a transfer from each place to the next, from the last to the first. One that crosses hosts for any rank counts as one between hosts."""
    f = mapping.folding
    if f.pp == 1:
        return (0.0,)
    num_bytes = mapping.tokens(job) * job.shape.hidden * mapping.item_bytes
    inside, between = (network.send(num_bytes, between=far) for far in (False, True))
    return tuple(
        between if far else inside for far in _far_hops(f.world // f.pp, f.pp, network.hardware.ranks_per_host)
    )


@lru_cache(maxsize=1024)
def _far_hops(ranks: int, pp: int, per_host: int) -> tuple[bool, ...]:
    """Of each hop, whether any rank of a stage of so many is on another host than its partner in the next."""
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
        hidden=job.shape.hidden,
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
    """Of pipelines that lie alike on hosts, the first: those whose stages begin at the same places of hosts."""
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
