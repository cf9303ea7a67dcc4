"""When each action of a schedule runs, given what a pass and a transfer cost: timeline, bubble, busy time.

Decides the clock of the pipeline: a rank runs its actions in order, each as soon as its input has arrived; a transfer between ranks takes
`p2p` seconds on a channel that carries one at a time (one channel for each ordered pair of ranks). Must never change: for equal costs
on all stages the result equals the closed forms of the literature (tests). What a pass costs is not decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.schedule import Action, Kind, Schedule


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
        """Seconds in which each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

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
    if not 0 <= costs.p2p < float("inf"):
        problems.append(
            Problem(where="costs.p2p", value=costs.p2p, rule="must not be negative, and finite", hint="use 0")
        )
    return problems


def simulate(schedule: Schedule, costs: ScheduleCosts | None = None) -> Timeline:
    """Run the schedule on a clock; without costs F = I = W = 1, B = 2 and free transfers.

    Raises `PlanError` for impossible costs, and where ranks wait for one another for ever.
    """
    costs = costs if costs is not None else uniform_costs(schedule.num_stages)
    raise_if(cost_problems(costs, schedule.num_stages), PlanError, subject="costs")
    run = _Run(schedule, costs)
    run.to_the_end()
    stuck = [
        Problem(where=f"schedule.rank{rank}", value=str(order[len(spans)]), rule="waits for ever for its input")
        for rank, (order, spans) in enumerate(zip(schedule.actions, run.spans, strict=True))
        if len(spans) < len(order)
    ]
    raise_if(stuck, PlanError, subject=f"schedule {schedule.name}")
    return Timeline(schedule=schedule, spans=tuple(map(tuple, run.spans)))


class _Run:
    """State of one simulation: when ranks and channels are free, and when each output reaches the stage that waits for it."""

    def __init__(self, schedule: Schedule, costs: ScheduleCosts) -> None:
        self.schedule, self.costs, self.seconds = schedule, costs, costs.tables
        self.num_stages = schedule.num_stages
        self.free = [0.0] * schedule.pp
        self.spans: list[list[Span]] = [[] for _ in range(schedule.pp)]
        self.channel_free: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[bool, int, int], float] = {}
        """(is gradient, stage, microbatch) -> when its input from the neighbouring stage is there."""
        self.waiting: dict[tuple[bool, int, int], int] = {}
        """The same key -> rank that cannot go on before."""

    def to_the_end(self) -> None:
        """Advance every rank until all are done or none can."""
        ready = list(range(self.schedule.pp))
        while ready:
            rank = ready.pop()
            order, spans = self.schedule.actions[rank], self.spans[rank]
            while len(spans) < len(order):
                action = order[len(spans)]
                key = (action.kind != "F", action.stage, action.microbatch)
                arrival = self.arrived.get(key, 0.0 if self._needs_nothing(action) else None)
                if arrival is None:
                    self.waiting[key] = rank
                    break
                woken = self._execute(rank, action, arrival)
                if woken is not None:
                    ready.append(woken)

    def _needs_nothing(self, action: Action) -> bool:
        """Whether the input does not come from another stage: data, the loss, or what an I of this stage kept for its W."""
        last = self.num_stages - 1
        return action.kind == "W" or action.stage == (0 if action.kind == "F" else last)

    def _execute(self, rank: int, action: Action, arrival: float) -> int | None:
        """Put one action on the clock and send its output; the rank that this wakes, if any."""
        start = max(self.free[rank], arrival)
        end = start + self.seconds[action.kind][action.stage]
        self.free[rank] = end
        self.spans[rank].append(Span(action, start, end))
        target = action.stage + (1 if action.kind == "F" else -1)
        if action.kind == "W" or not 0 <= target < self.num_stages:
            return None
        key = (action.kind != "F", target, action.microbatch)
        self.arrived[key] = self._sent(rank, self.schedule.rank_of_stage[target], end)
        return self.waiting.pop(key, None)

    def _sent(self, src: int, dst: int, at: float) -> float:
        """When a transfer that starts at `at` or later has arrived."""
        if src == dst or not self.costs.p2p:
            return at
        arrival = max(at, self.channel_free.get((src, dst), 0.0)) + self.costs.p2p
        self.channel_free[src, dst] = arrival
        if self.costs.blocking:
            self.free[src] = arrival
        return arrival
