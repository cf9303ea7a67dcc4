"""When each action of a schedule runs, given what a pass and a transfer cost: timeline, bubble, busy time.

Decides the clock of the pipeline: a rank runs its actions in order, each as soon as its inputs have arrived; a transfer between ranks takes
`p2p` seconds on a channel that carries one at a time (one channel for each ordered pair of ranks; or, where the links of the ranks are what is
scarce, one for what each rank sends and one for what it receives). Must never change: for equal costs on all stages the result equals
the closed forms of the literature (tests). What a pass costs is not decided here.

Two neighbouring passes of a rank may be a *pair* that runs as one (`plan/pipeline/schedule/pairs.py`): it starts when the inputs of both are there, and both have
ended when it has.

An *edge* (s, t) says that stage s has an output for stage t above it, and t a gradient for s. Every pipeline has the chain of its
neighbours; a model with long skip connections has more.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.pipeline.schedule.make import Action, Kind, Schedule

Edge = tuple[int, int]
"""Stage whose output it is, and the stage above that takes it."""
Pair = tuple[Action, Action]
"""Two passes of one rank that run as one, in the order of the schedule."""

MOST_S = 1e100
"""Longest a pass or a transfer may take: however many there are, their sum is a number."""
MOST_RATIO = 1e9
"""Of a pass or a transfer over the shortest pass: added to a hundred thousand of the longest, the shortest still moves the clock."""


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
        rule = f"has no edge {missing[0]}: other edges come in addition to the chain of neighbouring stages"
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
    """Seconds of edges that cost something else than `p2p`."""
    channels: Literal["pair", "rank"] = "pair"
    """What carries one transfer at a time: each ordered pair of ranks, or each rank's link (one way in, one way out)."""

    def transfer_s(self, edge: Edge) -> float:
        """Seconds of one transfer along an edge, up or down."""
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


class ActionSpan(NamedTuple):
    """An action and when it runs."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Spans of each rank in order. Time starts with the first action of any rank at 0."""

    schedule: Schedule
    spans: tuple[tuple[ActionSpan, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """When the last action of any rank has ended."""
        return max((spans[-1].end for spans in self.spans if spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which each rank computes; a pair counts once."""
        return tuple(math.fsum(end - start for start, end in {(s.start, s.end) for s in spans}) for spans in self.spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of each rank that are bubble: the makespan without its busy time."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """Share of all ranks' time that is bubble, 0 to 1: (p-1)/(m+p-1) for 1F1B."""
        return math.fsum(self.idle) / (self.makespan * len(self.spans)) if self.makespan else 0.0

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
        bad = [cost for cost in table if not 0 < cost <= MOST_S]
        if bad:
            rule = f"a pass takes a positive time, {MOST_S:g} at most"
            problems.append(Problem(where=f"costs.{name}", value=bad[0], rule=rule, hint="use 1"))
    for cost in (costs.p2p, *costs.edge_p2p.values()):
        if not 0 <= cost <= MOST_S:
            rule = f"must not be negative, and {MOST_S:g} at most"
            problems.append(Problem(where="costs.p2p", value=cost, rule=rule, hint="use 0"))
    passes = [*costs.forward, *costs.backward, *costs.input_grad, *costs.weight_grad]
    most = max((*passes, costs.p2p, *costs.edge_p2p.values()), default=0.0)
    if not problems and most > MOST_RATIO * min(passes, default=most):
        rule = f"the longest pass or transfer may take {MOST_RATIO:g} times as long as the shortest pass at most"
        problems.append(Problem(where="costs", value=most, rule=rule, hint=f"use {MOST_RATIO * min(passes):g}"))
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
        Problem(where=f"schedule.rank{rank}", value=str(order[len(spans)]), rule="deadlocks waiting for its input")
        for rank, (order, spans) in enumerate(zip(schedule.actions, run.spans, strict=True))
        if len(spans) < len(order)
    ]
    raise_if(stuck, PlanError, subject=f"schedule {schedule.name}")
    return Timeline(schedule=schedule, spans=tuple(map(tuple, run.spans)))


def pair_problems(schedule: Schedule, pairs: Sequence[Pair]) -> list[Problem]:
    """Pairs that are not two neighbouring passes of one rank, the first of them first, and passes that are in two pairs."""
    if not pairs:
        return []
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


_Input = tuple[bool, int, int]
"""(is gradient, stage, microbatch) of what a pass waits for."""


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
        self.orders, self.second, self.paired_share = schedule.actions, second, paired_share
        self.free = [0.0] * schedule.pp
        """When each rank has ended what it does; infinite while it runs a pass."""
        self.spans: list[list[ActionSpan]] = [[] for _ in range(schedule.pp)]
        self.channel_free: dict[object, float] = {}
        self.arrived: dict[_Input, int] = {}
        """How many of the inputs of a pass from other stages are there."""
        above = [[e for e in edges if e[0] == s] for s in range(schedule.num_stages)]
        below = [[e for e in edges if e[1] == s] for s in range(schedule.num_stages)]
        self.num_inputs = {
            "F": [len(found) for found in below],
            "B": [len(found) for found in above],
            "I": [len(found) for found in above],
            "W": [0] * schedule.num_stages,
        }
        """Number of inputs of a pass of each stage, from other stages."""
        activations = [[self._to(e, e[1]) for e in found] for found in above]
        gradients = [[self._to(e, e[0]) for e in found] for found in below]
        nothing: list[list[tuple[int, int, float]]] = [[] for _ in above]
        self.outputs = {"F": activations, "B": gradients, "I": gradients, "W": nothing}
        """(stage, its rank, seconds) of what a pass of each stage sends to others."""
        self.events: list[tuple[float, int, int, tuple[Action, ...] | None, _Input | None]] = []
        """(when, number, rank, passes that end there together, an input that arrives) in order of time."""
        self.number = 0

    def _to(self, edge: Edge, stage: int) -> tuple[int, int, float]:
        return stage, self.schedule.rank_of_stage[stage], self.costs.transfer_s(edge)

    def to_the_end(self) -> None:
        """Take events in order of time until nothing is left that could happen."""
        free, arrived = self.free, self.arrived
        for rank in range(self.schedule.pp):
            self._start(rank, 0.0)
        while self.events:
            now, _, rank, ended, there = heapq.heappop(self.events)
            if ended is not None:
                free[rank] = now
                for action in ended:
                    self._send(rank, action, now)
            elif there is not None:
                arrived[there] = arrived.get(there, 0) + 1
            if free[rank] <= now:
                self._start(rank, now)

    def _tell(self, when: float, rank: int, ended: tuple[Action, ...] | None, there: _Input | None) -> None:
        self.number += 1
        heapq.heappush(self.events, (when, self.number, rank, ended, there))

    def _start(self, rank: int, now: float) -> None:
        """Begin the next pass of a rank that is free, if everything is there."""
        order, spans = self.orders[rank], self.spans[rank]
        if len(spans) == len(order):
            return
        first = order[len(spans)]
        if not self._ready(first):
            return
        second = self.second.get(first) if self.second else None
        if second is None:
            together: tuple[Action, ...] = (first,)
            end = now + self.seconds[first.kind][first.stage]
        elif self._ready(second):
            together = (first, second)
            end = now + self.paired_share * math.fsum(self.seconds[action.kind][action.stage] for action in together)
        else:
            return
        spans += [ActionSpan(action, now, end) for action in together]
        self.free[rank] = float("inf")
        self._tell(end, rank, together, None)

    def _ready(self, action: Action) -> bool:
        kind, stage, microbatch = action
        needed = self.num_inputs[kind][stage]
        return not needed or self.arrived.get((kind != "F", stage, microbatch), 0) >= needed

    def _send(self, rank: int, action: Action, now: float) -> None:
        """Put what a pass has made for other stages on its way."""
        kind, stage, microbatch = action
        for target, dst, seconds in self.outputs[kind][stage]:
            arrival = self._sent(rank, dst, now, seconds) if seconds and dst != rank else now
            self._tell(arrival, dst, None, (kind != "F", target, microbatch))

    def _sent(self, src: int, dst: int, now: float, seconds: float) -> float:
        """When a transfer that starts now or later has arrived."""
        used: tuple[object, ...] = ((src, dst),) if self.costs.channels == "pair" else (("out", src), ("in", dst))
        arrival = max(now, *(self.channel_free.get(channel, 0.0) for channel in used)) + seconds
        self.channel_free.update(dict.fromkeys(used, arrival))
        if self.costs.blocking:
            self.free[src] = max(self.free[src], arrival)
            self._tell(arrival, src, None, None)
        return arrival
