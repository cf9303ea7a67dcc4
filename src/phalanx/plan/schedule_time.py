"""When each action of a schedule runs, given what a pass and a transfer cost: timeline, bubble, busy time.

Decides the clock of the pipeline: a rank runs its actions in order, each as soon as its inputs have arrived; a transfer between ranks takes
`p2p` seconds on a channel that carries one at a time (one channel for each ordered pair of ranks; or, where the links of the ranks are what is
scarce, one for what each rank sends and one for what it receives). Must never change: for equal costs on all stages the result equals
the closed forms of the literature (tests). What a pass costs is not decided here.

Two neighbouring passes of a rank may be a *pair* that runs as one (`plan/pairs.py`): it starts when the inputs of both are there, and both have
ended when it has.

An *edge* (s, t) says that stage s has an output for stage t above it, and t a gradient for s. Every pipeline has the chain of its
neighbours; a model with long skip connections has more.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.schedule import Action, Kind, Schedule

Edge = tuple[int, int]
"""Stage whose output it is, and the stage above that takes it."""
Pair = tuple[Action, Action]
"""Two passes of one rank that run as one, in the order of the schedule."""


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Each stage to the next."""
    return tuple((stage, stage + 1) for stage in range(num_stages - 1))


def edge_problems(edges: Sequence[Edge], num_stages: int) -> list[Problem]:
    """Edges that lead nowhere, back or twice the same way, and a chain that is not whole."""
    problems = []
    for edge in dict.fromkeys(edges):
        if not 0 <= edge[0] < edge[1] < num_stages:
            rule = f"leads from a stage to one above it, of 0 .. {num_stages - 1}"
            problems.append(Problem(where="edges", value=edge, rule=rule))
    if len(set(edges)) < len(edges):
        twice = next(edge for edge in edges if edges.count(edge) > 1)
        problems.append(Problem(where="edges", value=twice, rule="are given once each"))
    missing = [edge for edge in chain(num_stages) if edge not in edges]
    if missing:
        rule = f"has no edge {missing[0]}: other edges come beside the chain of neighbouring stages"
        problems.append(Problem(where="edges", value=list(edges), rule=rule))
    return problems


def in_order(edges: Sequence[Edge]) -> tuple[Edge, ...]:
    """The chain first, then longer and longer ones: the order in which a pass names its inputs and outputs."""
    return tuple(sorted(edges, key=lambda edge: (edge[1] - edge[0], edge[0])))


@dataclass(frozen=True, kw_only=True)
class ScheduleCosts:
    """Seconds of each kind of pass, by stage, and of a transfer between two ranks (none within a rank).

    `blocking`: the sender waits for the end of its transfer (how a plain send behaves); else transfers run beside the passes.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    input_grad: tuple[float, ...]
    weight_grad: tuple[float, ...]
    p2p: float = 0.0
    blocking: bool = False
    edge_p2p: Mapping[Edge, float] = field(default_factory=dict)
    """Of edges that cost something else than `p2p`."""
    channels: Literal["pair", "rank"] = "pair"
    """What carries one transfer at a time: each ordered pair of ranks, or each rank's link (one way in, one way out)."""

    def transfer_s(self, edge: Edge) -> float:
        """Of one transfer along an edge, up or down."""
        return self.edge_p2p.get(edge, self.p2p)

    @property
    def tables(self) -> dict[Kind, tuple[float, ...]]:
        """Seconds by kind and stage."""
        return {"F": self.forward, "B": self.backward, "I": self.input_grad, "W": self.weight_grad}


def uniform_costs(
    num_stages: int,
    *,
    forward: float = 1,
    backward: float | None = None,
    input_grad: float = 1,
    weight_grad: float = 1,
    p2p: float = 0,
    blocking: bool = False,
) -> ScheduleCosts:
    """The same costs on every stage; `backward` is the sum of its two halves unless given."""
    whole = input_grad + weight_grad if backward is None else backward
    each = (forward, whole, input_grad, weight_grad)
    f, b, i, w = ((cost,) * num_stages for cost in each)
    return ScheduleCosts(forward=f, backward=b, input_grad=i, weight_grad=w, p2p=p2p, blocking=blocking)


class Span(NamedTuple):
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans of each rank in order. Time starts with the first action of any rank at 0."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """When the last action of any rank has ended."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank computes; a pair counts once."""
        return tuple(sum(end - start for start, end in {(s.start, s.end) for s in spans}) for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of each rank that are bubble: the makespan without its busy time."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is bubble, 0 to 1: (p-1)/(m+p-1) for 1F1B."""
        return sum(self.idle) / (self.makespan * len(self.spans)) if self.makespan else 0.0

    @property
    def peak_live(self) -> tuple[int, ...]:
        """Most activations that each rank holds at once; orders alone decide it."""
        return self.schedule.peak_live


def cost_problems(costs: ScheduleCosts, num_stages: int) -> list[Problem]:
    """Costs that no pass can have, and tables of the wrong length."""
    problems = []
    for name in ("forward", "backward", "input_grad", "weight_grad"):
        table: Sequence[float] = getattr(costs, name)
        if len(table) != num_stages:
            rule = f"has a cost for each of the {num_stages} stages"
            problems.append(Problem(where=f"costs.{name}", value=len(table), rule=rule))
        bad = [cost for cost in table if not 0 < cost < float("inf")]
        if bad:
            problems.append(
                Problem(where=f"costs.{name}", value=bad[0], rule="a pass takes a positive time", hint="use 1")
            )
    for cost in (costs.p2p, *costs.edge_p2p.values()):
        if not 0 <= cost < float("inf"):
            problems.append(
                Problem(where="costs.p2p", value=cost, rule="must not be negative, and finite", hint="use 0")
            )
    return problems


def simulate(
    schedule: Schedule,
    costs: ScheduleCosts | None = None,
    *,
    edges: Sequence[Edge] | None = None,
    pairs: Sequence[Pair] = (),
    paired_share: float = 1.0,
) -> Timeline:
    """Run the schedule on a clock; without costs F = I = W = 1, B = 2 and free transfers. `edges`: None is the chain.

    A pair of `pairs` takes `paired_share` of what its two passes take one after the other. Raises `PlanError` for impossible costs, for pairs that
    are no neighbours, and where ranks wait for one another for ever.
    """
    costs = costs if costs is not None else uniform_costs(schedule.num_stages)
    edges = chain(schedule.num_stages) if edges is None else edges
    problems = cost_problems(costs, schedule.num_stages) + edge_problems(edges, schedule.num_stages)
    problems += pair_problems(schedule, pairs)
    raise_if(problems, PlanError, subject="costs")
    run = _Run(schedule, costs, in_order(edges), dict(pairs), paired_share)
    run.to_the_end()
    stuck = [
        Problem(where=f"schedule.rank{rank}", value=str(order[len(spans)]), rule="waits for ever for its input")
        for rank, (order, spans) in enumerate(zip(schedule.actions, run.spans, strict=True))
        if len(spans) < len(order)
    ]
    raise_if(stuck, PlanError, subject=f"schedule {schedule.name}")
    return Timeline(schedule=schedule, spans=tuple(map(tuple, run.spans)))


def pair_problems(schedule: Schedule, pairs: Sequence[Pair]) -> list[Problem]:
    """Pairs that are not two neighbouring passes of one rank, the first of them first, and passes that are in two pairs."""
    neighbours = {both for order in schedule.actions for both in pairwise(order)}
    taken = [action for pair in pairs for action in pair]
    problems = [
        Problem(where="pairs", value=f"{first} {second}", rule="are not neighbours in the order of a rank")
        for first, second in pairs
        if (first, second) not in neighbours
    ]
    twice = (
        next((action for action in taken if taken.count(action) > 1), None) if len(set(taken)) < len(taken) else None
    )
    if twice is not None:
        problems.append(Problem(where="pairs", value=str(twice), rule="is in two pairs"))
    return problems


@dataclass(frozen=True, slots=True)
class _Ended:
    """The passes of one rank that end together."""

    actions: tuple[Action, ...]


class _Run:
    """State of one simulation: when ranks and channels are free, and how many inputs of each pass have arrived."""

    def __init__(
        self,
        schedule: Schedule,
        costs: ScheduleCosts,
        edges: Sequence[Edge],
        second: Mapping[Action, Action],
        paired_share: float,
    ) -> None:
        self.schedule, self.costs, self.seconds = schedule, costs, costs.tables
        self.edges, self.second, self.paired_share = edges, second, paired_share
        self.free = [0.0] * schedule.pp
        """When each rank has ended what it does; infinite while it runs a pass."""
        self.spans: list[list[Span]] = [[] for _ in range(schedule.pp)]
        self.channel_free: dict[object, float] = {}
        self.arrived: dict[tuple[bool, int, int], int] = {}
        """(is gradient, stage, microbatch) -> how many of its inputs from other stages are there."""
        self.above = {s: [e for e in edges if e[0] == s] for s in range(schedule.num_stages)}
        self.below = {s: [e for e in edges if e[1] == s] for s in range(schedule.num_stages)}
        self.events: list[tuple[float, int, int, _Ended | tuple[bool, int, int] | None]] = []
        """(when, number, rank, passes that end there, an input that arrives, or nothing) in order of time."""
        self.number = 0

    def to_the_end(self) -> None:
        """Take events in order of time until nothing is left that could happen."""
        for rank in range(self.schedule.pp):
            self._tell(0.0, rank, None)
        while self.events:
            now, _, rank, what = heapq.heappop(self.events)
            if isinstance(what, _Ended):
                self.free[rank] = now
                for action in what.actions:
                    self._send(rank, action, now)
            elif what is not None:
                self.arrived[what] = self.arrived.get(what, 0) + 1
            self._start(rank, now)

    def _tell(self, when: float, rank: int, what: _Ended | tuple[bool, int, int] | None) -> None:
        self.number += 1
        heapq.heappush(self.events, (when, self.number, rank, what))

    def _start(self, rank: int, now: float) -> None:
        """Begin the rank's next pass, if it is free and everything is there."""
        order, spans = self.schedule.actions[rank], self.spans[rank]
        if self.free[rank] > now or len(spans) == len(order):
            return
        first = order[len(spans)]
        together = (first, self.second[first]) if first in self.second else (first,)
        if any(self.arrived.get((a.kind != "F", a.stage, a.microbatch), 0) < self._needs(a) for a in together):
            return
        share = self.paired_share if len(together) > 1 else 1.0
        end = now + share * sum(self.seconds[action.kind][action.stage] for action in together)
        spans += [Span(action, now, end) for action in together]
        self.free[rank] = float("inf")
        self._tell(end, rank, _Ended(together))

    def _needs(self, action: Action) -> int:
        """Inputs that come from other stages."""
        if action.kind == "W":
            return 0
        return len((self.below if action.kind == "F" else self.above)[action.stage])

    def _send(self, rank: int, action: Action, now: float) -> None:
        """Put what a pass has made for other stages on its way."""
        if action.kind == "W":
            return
        forward = action.kind == "F"
        for edge in (self.above if forward else self.below)[action.stage]:
            target = edge[1] if forward else edge[0]
            dst = self.schedule.rank_of_stage[target]
            arrival = self._sent(rank, dst, now, self.costs.transfer_s(edge))
            self._tell(arrival, dst, (not forward, target, action.microbatch))

    def _sent(self, src: int, dst: int, now: float, seconds: float) -> float:
        """When a transfer that starts now or later has arrived."""
        if src == dst or not seconds:
            return now
        used: tuple[object, ...] = ((src, dst),) if self.costs.channels == "pair" else (("out", src), ("in", dst))
        arrival = max(now, *(self.channel_free.get(channel, 0.0) for channel in used)) + seconds
        self.channel_free.update(dict.fromkeys(used, arrival))
        if self.costs.blocking:
            self.free[src] = max(self.free[src], arrival)
            self._tell(arrival, src, None)
        return arrival
