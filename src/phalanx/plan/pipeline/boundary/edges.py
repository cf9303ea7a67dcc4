"""How a tensor crosses from the ranks of one stage to those of another: what each rank sends, takes and passes on, there and back.

Decides, from a plan for the activation and one for its gradient (`plan/reshard/plan.py`; the second has the layouts changed over), each rank's part as
boxes of the tensor that it holds locally. Must never change: a rank does its part in the order of the plan; what it passes on has come
to it by then. One rank to one rank that hold the same is the plain case, and one message.

The two stages share no rank: what a rank has for another stage of its own place in the pipeline is handed over in memory. A gradient comes back
whole: where the stage above is replicated, all of its replicas have the same gradient and any of them may send it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.layout import Box, TensorLayout
from phalanx.plan.pipeline import Direction
from phalanx.plan.pipeline.schedule import Edge
from phalanx.plan.reshard import Hop, Move, Reduction


class Crossing(Protocol):
    """What is needed of a `plan.reshard.ReshardPlan` of one tensor."""

    @property
    def moves(self) -> tuple[Move, ...]: ...
    @property
    def hops(self) -> tuple[Hop, ...]: ...
    @property
    def reductions(self) -> tuple[Reduction, ...]: ...
    @property
    def hash(self) -> str: ...


class BoundaryMessage(NamedTuple):
    """One message of one rank: boxes of its local tensor, end to end, to or from the global rank `peer`."""

    peer: int
    parts: tuple[Box, ...]


class Relay(NamedTuple):
    """A message that a rank sends on when the first `after` of its receives are there."""

    leg: BoundaryMessage
    after: int


@dataclass(frozen=True, kw_only=True)
class Route:
    """What one rank does for one tensor that crosses. On the side that has it `sends`, on the other `receives` and `relays`."""

    shape: tuple[int, ...]
    """Shape of the local tensor that it sends from, or receives into."""
    sends: tuple[BoundaryMessage, ...] = ()
    receives: tuple[BoundaryMessage, ...] = ()
    relays: tuple[Relay, ...] = ()

    def incoming(self) -> tuple[BoundaryMessage | Relay, ...]:
        """Receives and relays in the plan's order."""
        out: list[BoundaryMessage | Relay] = []
        for count, leg in enumerate(self.receives):
            out += [relay for relay in self.relays if relay.after == count]
            out.append(leg)
        return (*out, *(relay for relay in self.relays if relay.after == len(self.receives)))


@dataclass(frozen=True, kw_only=True)
class EdgePlan:
    """Both ways of one edge. `forward` and `backward` have a route for each rank of either stage."""

    edge: Edge
    forward: Mapping[int, Route]
    backward: Mapping[int, Route]
    hash: str

    def routes(self, direction: Direction) -> Mapping[int, Route]:
        return self.forward if direction == "forward" else self.backward

    def relays(self, direction: Direction) -> bool:
        """Whether some rank passes on what it receives."""
        return any(route.relays for route in self.routes(direction).values())

    def check(self) -> None:
        """Raise `PlanError` where something is missing, comes twice, or the way back has other shapes."""
        raise_if(edge_plan_problems(self), PlanError, subject=f"edge {self.edge[0]} to {self.edge[1]}")

    def explain(self) -> str:
        """How many messages cross, and how many are passed on, each way."""
        lines = [f"edge {self.edge[0]} to {self.edge[1]}"]
        for direction in ("forward", "backward"):
            routes = self.routes(direction).values()
            sent, on = sum(len(r.sends) for r in routes), sum(len(r.relays) for r in routes)
            lines.append(f"  {direction}: {sent} messages from stage to stage, {on} passed on inside")
        return "\n".join(lines)


def direct_edge(edge: Edge, shape: Sequence[int], *, src: int, dst: int) -> EdgePlan:
    """One rank to one rank, the whole tensor in one message; nothing at all where they are the same rank."""
    shape = tuple(shape)
    whole = (Box((0,) * len(shape), shape),)

    def way(a: int, b: int) -> dict[int, Route]:
        if a == b:
            return {a: Route(shape=shape)}
        return {
            a: Route(shape=shape, sends=(BoundaryMessage(b, whole),)),
            b: Route(shape=shape, receives=(BoundaryMessage(a, whole),)),
        }

    text = json.dumps([edge, shape, src, dst])
    return EdgePlan(
        edge=edge, forward=way(src, dst), backward=way(dst, src), hash=hashlib.sha256(text.encode()).hexdigest()[:16]
    )


def planned_edge(edge: Edge, forward: Crossing, backward: Crossing) -> EdgePlan:
    """An edge whose activation crosses by `forward` and whose gradient by `backward`. Raises `PlanError` where they are not plans of one."""
    problems = [*_plan_problems("forward", forward), *_plan_problems("backward", backward)]
    raise_if(problems, PlanError, subject=f"edge {edge[0]} to {edge[1]}")
    text = json.dumps([edge, forward.hash, backward.hash])
    made = EdgePlan(
        edge=edge,
        forward=_routes(forward),
        backward=_routes(backward),
        hash=hashlib.sha256(text.encode()).hexdigest()[:16],
    )
    made.check()
    return made


def _plan_problems(name: str, plan: Crossing) -> list[Problem]:
    """Plans of several tensors, of terms that are yet to be added, or between stages that share ranks."""
    if len(plan.moves) != 1:
        return [Problem(where=name, value=len(plan.moves), rule="moves one tensor: that of the edge")]
    problems, move = [], plan.moves[0]
    if plan.reductions or move.src.num_terms > 1:
        rule = "moves whole values: a stage adds up the terms of a gradient before it sends it"
        problems.append(Problem(where=f"{name}.src.terms", value=move.src.num_terms, rule=rule))
    shared = sorted(set(move.src.ranks) & set(move.dst.ranks))
    if shared:
        rule = "share no rank: what stays on a rank is handed over in memory"
        problems.append(Problem(where=f"{name}.ranks", value=shared, rule=rule))
    return problems


def _routes(plan: Crossing) -> dict[int, Route]:
    move = plan.moves[0]
    sends: dict[int, list[BoundaryMessage]] = {}
    receives: dict[int, list[BoundaryMessage]] = {}
    relays: dict[int, list[Relay]] = {}
    for hop in plan.hops:
        boxes = [part.box for part in hop.parts]
        if hop.src in move.src.ranks:
            sends.setdefault(hop.src, []).append(BoundaryMessage(hop.dst, _local(move.src, hop.src, boxes)))
        else:
            leg = BoundaryMessage(hop.dst, _local(move.dst, hop.src, boxes))
            relays.setdefault(hop.src, []).append(Relay(leg, len(receives.get(hop.src, ()))))
        receives.setdefault(hop.dst, []).append(BoundaryMessage(hop.src, _local(move.dst, hop.dst, boxes)))
    out = {}
    for layout in (move.src, move.dst):
        for rank, shape in zip(layout.ranks, layout.local_shapes, strict=True):
            out[rank] = Route(
                shape=shape,
                sends=tuple(sends.get(rank, ())),
                receives=tuple(receives.get(rank, ())),
                relays=tuple(relays.get(rank, ())),
            )
    return out


def _local(layout: TensorLayout, rank: int, boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Boxes of the logical tensor as parts of the rank's local tensor. Raises `PlanError` for one that it does not hold."""
    out = []
    for box in boxes:
        held = next((h for h in layout.of_rank(rank) if h.box.contains(box)), None)
        if held is None:
            problem = Problem(where=f"rank{rank}", value=box, rule="sends and receives boxes that it holds")
            raise PlanError([problem], subject="a move between stages")
        out.append(held.place(box))
    return tuple(out)


# ---- check ----------------------------------------------------------------------------------------------------------------------


def edge_plan_problems(plan: EdgePlan) -> list[Problem]:
    """Ranks that do not get each element once, pass on what has not come, or have other shapes on the way back."""
    problems = []
    for direction in ("forward", "backward"):
        problems += _sides(direction, plan.routes(direction))
        for rank, route in plan.routes(direction).items():
            where = f"{direction}.rank{rank}"
            if route.receives:
                problems += _coverage(where, route)
            for relay in route.relays:
                come = {box for leg in route.receives[: relay.after] for box in leg.parts}
                missing = [box for box in relay.leg.parts if sum(_shared(box, c) for c in come) < box.num_elements]
                if missing:
                    rule = "has come before it is passed on"
                    problems.append(Problem(where=where, value=missing[0], rule=rule))
    for rank, route in plan.forward.items():
        back = plan.backward.get(rank)
        if back is None or back.shape != route.shape:
            rule = f"gets a gradient of the shape of its activation, {route.shape}"
            problems.append(
                Problem(where=f"backward.rank{rank}", value=None if back is None else back.shape, rule=rule)
            )
    return problems


def _sides(direction: str, routes: Mapping[int, Route]) -> list[Problem]:
    """Pairs of ranks whose messages differ in number, order or size from side to side."""
    sent: dict[tuple[int, int], list[list[tuple[int, ...]]]] = {}
    taken: dict[tuple[int, int], list[list[tuple[int, ...]]]] = {}
    for rank, route in routes.items():
        for leg in (*route.sends, *(relay.leg for relay in route.relays)):
            sent.setdefault((rank, leg.peer), []).append([box.sizes for box in leg.parts])
        for leg in route.receives:
            taken.setdefault((leg.peer, rank), []).append([box.sizes for box in leg.parts])
    problems = []
    for pair in sorted(sent.keys() | taken.keys()):
        if sent.get(pair) != taken.get(pair):
            rule = f"the messages of ranks {pair[0]} and {pair[1]} have the same sizes on both sides"
            problems.append(Problem(where=direction, value=pair, rule=rule))
    return problems


def _coverage(where: str, route: Route) -> list[Problem]:
    """Boxes that overlap, or do not fill the local tensor."""
    boxes = [box for leg in route.receives for box in leg.parts]
    if any(a.intersection(b) for i, a in enumerate(boxes) for b in boxes[:i]):
        return [Problem(where=where, value=len(boxes), rule="receives no element twice")]
    filled, whole = sum(box.num_elements for box in boxes), Box((0,) * len(route.shape), route.shape)
    if filled != whole.num_elements or not all(whole.contains(box) for box in boxes):
        rule = f"receives all {whole.num_elements} elements of its tensor"
        return [Problem(where=where, value=filled, rule=rule)]
    return []


def _shared(a: Box, b: Box) -> int:
    """Elements that two boxes have in common."""
    common = a.intersection(b)
    return common.num_elements if common is not None else 0
