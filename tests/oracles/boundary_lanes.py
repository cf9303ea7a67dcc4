"""The order of transfers over a boundary, carried out: who would wait for ever."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.core.errors import Problem
from phalanx.plan.pipeline.boundary.edges import EdgePlan, Relay
from phalanx.plan.pipeline.comm import PipelinePlan, Recv, Run
from phalanx.plan.pipeline.schedule.clock import Edge

Step = tuple[str, int, int, int]
"""("send" or "recv", this rank, the other one, tag of the transfer); a pass is no step: it waits for nothing but earlier steps."""


def rank_steps(plan: PipelinePlan, edges: Mapping[Edge, EdgePlan], *, rank: int, position: int) -> tuple[Step, ...]:
    """All messages of one rank in the one total order: those of a transfer where the program of its place has it, in the plan's order."""
    steps: list[Step] = []
    for op in plan.programs[position]:
        if isinstance(op, Run):
            continue
        tag = plan.tag(op.transfer)
        route = edges[op.transfer.edge].routes(op.transfer.direction).get(rank)
        if route is None:
            continue
        if isinstance(op, Recv):
            for item in route.incoming():
                kind, leg = ("send", item.leg) if isinstance(item, Relay) else ("recv", item)
                steps.append((kind, rank, leg.peer, tag))
        else:
            steps += [("send", rank, leg.peer, tag) for leg in route.sends]
    return tuple(steps)


def lane_problems(
    plan: PipelinePlan, edges: Mapping[Edge, EdgePlan], position_of_rank: Mapping[int, int]
) -> list[Problem]:
    """Ranks that wait for ever where all do their messages in order, each waiting for its other side before the next."""
    programs = {r: rank_steps(plan, edges, rank=r, position=p) for r, p in position_of_rank.items()}
    at = dict.fromkeys(programs, 0)
    ready = set(programs)
    while ready:
        rank = ready.pop()
        while at[rank] < len(programs[rank]):
            kind, _, peer, tag = programs[rank][at[rank]]
            facing = ("recv" if kind == "send" else "send", peer, rank, tag)
            if peer not in programs or at[peer] == len(programs[peer]) or programs[peer][at[peer]] != facing:
                break
            at[peer] += 1
            at[rank] += 1
            ready.add(peer)
    return [
        Problem(where=f"lane.rank{rank}", value=programs[rank][count], rule="deadlocks waiting for the other rank")
        for rank, count in at.items()
        if count < len(programs[rank])
    ]
