"""How activations cross between stages with foldings of their own, for every edge of a pipeline.

Decides which two layouts meet at an edge (`plan/layout/activations.py`); who sends what to whom is `plan/reshard/plan.py`'s. Must never change: each element of the
micro-batch goes to each rank that needs it once, in one message for each pair of ranks, so that a step of many micro-batches sends few messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from phalanx.plan.layout import TensorLayout, activation_layout
from phalanx.plan.mapping import AnyFolding, StagedFolding
from phalanx.plan.pipeline import PipelinePlan
from phalanx.plan.pipeline.boundary.edges import EdgePlan, Route, planned_edge
from phalanx.plan.pipeline.schedule import Edge
from phalanx.plan.reshard import Hosts, Move, equal_hosts, plan_reshard


@dataclass(frozen=True)
class Activation:
    """The tensor that crosses: logical (sequences, seq_len, hidden) of one micro-batch."""

    sequences: int
    seq_len: int
    hidden: int
    itemsize: int


@lru_cache(maxsize=16)
def staged_edges(
    edges: tuple[Edge, ...],
    rank_of_stage: tuple[int, ...],
    folding: StagedFolding,
    *,
    replica: int,
    what: Activation,
    hosts: Hosts,
) -> dict[Edge, EdgePlan]:
    """A plan for each edge between virtual stages, those of one place in the pipeline included (nothing is sent there)."""
    layouts = [
        activation_layout(
            folding, place, replica=replica, sequences=what.sequences, seq_len=what.seq_len, hidden=what.hidden
        )
        for place in range(folding.pp)
    ]
    found: dict[tuple[int, int], EdgePlan] = {}
    out = {}
    for edge in edges:
        places = rank_of_stage[edge[0]], rank_of_stage[edge[1]]
        if places not in found:
            found[places] = _edge(edge, layouts[places[0]], layouts[places[1]], what=what, hosts=hosts)
        out[edge] = found[places]
    return out


def _edge(edge: Edge, src: TensorLayout, dst: TensorLayout, *, what: Activation, hosts: Hosts) -> EdgePlan:
    if src.ranks == dst.ranks:  # handed over in memory
        routes = {rank: Route(shape=shape) for rank, shape in zip(src.ranks, src.local_shapes, strict=True)}
        return EdgePlan(edge=edge, forward=routes, backward=routes, hash="local")
    whole = what.sequences * what.seq_len * what.hidden * what.itemsize
    there = Move(name="activation", itemsize=what.itemsize, src=src, dst=dst)
    back = Move(name="gradient", itemsize=what.itemsize, src=dst, dst=src)
    return planned_edge(
        edge,
        plan_reshard([there], hosts, message_bytes=whole),
        plan_reshard([back], hosts, message_bytes=whole),
    )


def edges_for(folding: AnyFolding, plan: PipelinePlan, *, rank: int, what: Activation) -> dict[Edge, EdgePlan] | None:
    """The edges of the pipeline that a rank is part of, as though all ranks shared a host; None where all stages have one folding, and one rank sends to one."""
    if not isinstance(folding, StagedFolding):
        return None
    return staged_edges(
        plan.edges,
        plan.schedule.rank_of_stage,
        folding,
        replica=folding.replica_of(rank),
        what=what,
        hosts=on_one_host(range(folding.world)),
    )


def on_one_host(ranks: Sequence[int]) -> Hosts:
    """Where nobody said which rank is on which host."""
    return equal_hosts([0] * (max(ranks) + 1))
