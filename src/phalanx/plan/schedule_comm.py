"""What a pipeline schedule sends: every transfer of activations and gradients, and the order in which each rank posts and takes them.

Decides one total order of all passes and transfers of all ranks; each rank does its own part of it in that order. Must never change:
a transfer stands after the pass that produces it and before the pass that takes it, and both of its ranks see it at the same place of
that one order. From this follows that no executor which keeps to the order can deadlock:

- posting (isend/irecv): post where `Send` and `Recv` stand, wait for a receive just before the `Run` that takes it, wait for sends
  at the end of the step only;
- blocking, even with sends that wait for their receiver (rendezvous): the first transfer of the order that is not complete has both
  of its ranks waiting at it;
- in batches (`batches`: neighbouring sends and receives posted at once, then waited for): the same, some ranks being ahead.

Messages between two ranks come in the same order on both sides, so that a transport without tags matches them too (NCCL); `tag` is
unique within a step for one that matches by tag (gloo). A transfer whose two stages share a rank (the bottom of a V, one rank) is
handed over in memory: it has no `Send` or `Recv`, but the `Run`s on both sides name it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.schedule import Action, Schedule
from phalanx.plan.schedule_time import ScheduleCosts, simulate

Direction = Literal["forward", "backward"]


class Transfer(NamedTuple):
    """What `stage` made of `microbatch`: its output, for the stage above (forward), or the gradient of its input, for the one below."""

    src_rank: int
    dst_rank: int
    stage: int
    microbatch: int
    direction: Direction

    @property
    def target_stage(self) -> int:
        """The stage that takes it."""
        return self.stage + (1 if self.direction == "forward" else -1)

    @property
    def is_local(self) -> bool:
        """Whether it stays in memory."""
        return self.src_rank == self.dst_rank

    def tag(self, num_microbatches: int) -> int:
        """Its number, unique within a step."""
        boundary = min(self.stage, self.target_stage)
        return 2 * (boundary * num_microbatches + self.microbatch) + (self.direction == "backward")

    def __str__(self) -> str:
        return f"{self.direction} {self.stage}.{self.microbatch} {self.src_rank}->{self.dst_rank}"


@dataclass(frozen=True, slots=True)
class Run:
    """Run a pass. `takes` is its input from another stage (None: data, the loss, or W), `gives` what its output becomes."""

    action: Action
    takes: Transfer | None
    gives: Transfer | None


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send what an earlier `Run` of this rank gave."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Recv:
    """Start to receive what a later `Run` of this rank takes."""

    transfer: Transfer


RankOp = Run | Send | Recv


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A schedule with its transfers. `programs[rank]` is what a rank does, in order; `transfers` all of them in the one order."""

    schedule: Schedule
    programs: tuple[tuple[RankOp, ...], ...]
    transfers: tuple[Transfer, ...]

    @cached_property
    def sent(self) -> tuple[Transfer, ...]:
        """Transfers that cross ranks."""
        return tuple(transfer for transfer in self.transfers if not transfer.is_local)

    def check(self) -> None:
        """Raise `PlanError` with everything wrong with the schedule or its transfers."""
        self.schedule.check()
        raise_if(plan_problems(self), PlanError, subject=f"transfers of schedule {self.schedule.name}")

    def to_json(self) -> str:
        programs = [[_written(op) for op in program] for program in self.programs]
        return json.dumps({"schedule": self.schedule.to_dict(), "programs": programs}, sort_keys=True)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def explain(self) -> str:
        """The schedule, how much it sends, and the largest number of receives open at once."""
        local = len(self.transfers) - len(self.sent)
        opened = " ".join(str(_most_open(program)) for program in self.programs)
        return (
            f"{self.schedule.explain()}\n  {len(self.sent)} transfers between ranks, {local} within one\n"
            f"  messages received before they are used at most, by rank: {opened}"
        )


def plan_pipeline(schedule: Schedule, costs: ScheduleCosts | None = None) -> PipelinePlan:
    """The transfers of a schedule in the order in which they become possible (`costs` as in `simulate`; every rank must give the same).

    Raises `PlanError` where the schedule itself cannot come to its end.
    """
    placed: list[tuple[tuple[float, int, int, int], int, RankOp]] = []
    """(when, transfer before pass, rank that makes it, which of that rank), rank that does it, what"""
    transfers: list[tuple[tuple[float, int, int, int], Transfer]] = []
    for rank, spans in enumerate(simulate(schedule, costs).spans):
        for index, (action, start, end) in enumerate(spans):
            takes, gives = taken_by(schedule, action), given_by(schedule, action)
            placed.append(((start, 1, rank, index), rank, Run(action, takes, gives)))
            if gives is None:
                continue
            key = (end, 0, rank, index)
            transfers.append((key, gives))
            if not gives.is_local:
                placed += [(key, rank, Send(gives)), (key, gives.dst_rank, Recv(gives))]
    programs: list[list[RankOp]] = [[] for _ in range(schedule.pp)]
    for _, rank, op in sorted(placed, key=lambda item: item[0]):
        programs[rank].append(op)
    ordered = tuple(transfer for _, transfer in sorted(transfers, key=lambda item: item[0]))
    return PipelinePlan(schedule=schedule, programs=tuple(map(tuple, programs)), transfers=ordered)


def given_by(schedule: Schedule, action: Action) -> Transfer | None:
    """What a pass makes for another stage."""
    forward = action.kind == "F"
    target = action.stage + (1 if forward else -1)
    if action.kind == "W" or not 0 <= target < schedule.num_stages:
        return None
    ranks = schedule.rank_of_stage
    direction: Direction = "forward" if forward else "backward"
    return Transfer(ranks[action.stage], ranks[target], action.stage, action.microbatch, direction)


def taken_by(schedule: Schedule, action: Action) -> Transfer | None:
    """What a pass needs from another stage."""
    forward = action.kind == "F"
    source = action.stage - (1 if forward else -1)
    if action.kind == "W" or not 0 <= source < schedule.num_stages:
        return None
    ranks = schedule.rank_of_stage
    direction: Direction = "forward" if forward else "backward"
    return Transfer(ranks[source], ranks[action.stage], source, action.microbatch, direction)


def batches(program: Sequence[RankOp]) -> tuple[Run | tuple[Send | Recv, ...], ...]:
    """A program with its neighbouring sends and receives put together, to be posted at once."""
    out: list[Run | tuple[Send | Recv, ...]] = []
    for op in program:
        if isinstance(op, Run):
            out.append(op)
        elif out and isinstance(out[-1], tuple):
            out[-1] = (*out[-1], op)
        else:
            out.append((op,))
    return tuple(out)


def _written(op: RankOp) -> str:
    if isinstance(op, Run):
        return str(op.action)
    return f"{'send' if isinstance(op, Send) else 'recv'} {op.transfer}"


def _most_open(program: Sequence[RankOp]) -> int:
    """Most receives of one rank that are posted and not yet taken: buffers of the size of a stage's boundary."""
    now = most = 0
    for op in program:
        if isinstance(op, Recv):
            now += 1
            most = max(most, now)
        elif isinstance(op, Run) and op.takes is not None and not op.takes.is_local:
            now -= 1
    return most


# ---- check ----------------------------------------------------------------------------------------------------------------------


def plan_problems(plan: PipelinePlan) -> list[Problem]:
    """What is wrong with the transfers: passes reordered, something sent twice or never, sides that disagree, a blocking deadlock."""
    problems = []
    for rank, (program, order) in enumerate(zip(plan.programs, plan.schedule.actions, strict=True)):
        if tuple(op.action for op in program if isinstance(op, Run)) != order:
            rule = "runs the passes of the schedule, in its order"
            problems.append(Problem(where=f"plan.rank{rank}", value="another order", rule=rule))
        problems += _rank_problems(rank, program)
    sends = [op.transfer for program in plan.programs for op in program if isinstance(op, Send)]
    recvs = [op.transfer for program in plan.programs for op in program if isinstance(op, Recv)]
    if sorted(sends) != sorted(plan.sent) or sorted(recvs) != sorted(plan.sent):
        rule = "every transfer between ranks is sent once and received once"
        problems.append(Problem(where="plan.transfers", value=(len(sends), len(recvs), len(plan.sent)), rule=rule))
    tags = {transfer.tag(plan.schedule.num_microbatches) for transfer in plan.transfers}
    if len(tags) < len(plan.transfers):
        problems.append(Problem(where="plan.tags", value=len(tags), rule=f"differ for all {len(plan.transfers)}"))
    return problems or _blocking_deadlock(plan)


def _rank_problems(rank: int, program: Sequence[RankOp]) -> list[Problem]:
    """A send before its pass, a pass before its receive, a transfer of other ranks."""
    here: set[Transfer] = set()
    problems = []
    for op in program:
        needs: Transfer | None
        if isinstance(op, Run):
            needs, makes, mine = op.takes, op.gives, True
        elif isinstance(op, Send):
            needs, makes, mine = op.transfer, None, op.transfer.src_rank == rank
        else:
            needs, makes, mine = None, op.transfer, op.transfer.dst_rank == rank
        if not mine:
            problems.append(Problem(where=f"plan.rank{rank}", value=_written(op), rule="belongs to other ranks"))
        if needs is not None and needs not in here:
            rule = f"comes after {needs} is there"
            problems.append(Problem(where=f"plan.rank{rank}", value=_written(op), rule=rule))
        if makes is not None:
            here.add(makes)
    return problems


def _blocking_deadlock(plan: PipelinePlan) -> list[Problem]:
    """Run all programs with sends and receives that wait for the other side; ranks that do not come to the end wait for ever."""
    position = [0] * len(plan.programs)

    def head(rank: int) -> RankOp | None:
        program = plan.programs[rank]
        return program[position[rank]] if position[rank] < len(program) else None

    ready = set(range(len(plan.programs)))
    while ready:
        rank = ready.pop()
        while (op := head(rank)) is not None:
            if not isinstance(op, Run):
                transfer = op.transfer
                other = transfer.dst_rank if isinstance(op, Send) else transfer.src_rank
                facing = head(other)
                if facing != (Recv(transfer) if isinstance(op, Send) else Send(transfer)):
                    break
                position[other] += 1
                ready.add(other)
            position[rank] += 1
    return [
        Problem(where=f"plan.rank{rank}", value=_written(op), rule="waits for ever for the other rank")
        for rank in range(len(plan.programs))
        if (op := head(rank)) is not None
    ]
