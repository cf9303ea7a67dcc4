"""What a pipeline schedule sends: every transfer of activations and gradients, and the order in which each rank posts and takes them.

Decides one total order of all passes and transfers of all ranks; each rank does its own part of it in that order. Must never change:
a transfer stands after the pass that produces it and before the pass that takes it, and both of its ranks see it at the same place of
that one order. From this follows that no executor which keeps to the order can deadlock:

- posting (isend/irecv): post where `Send` and `Recv` stand, wait for a receive just before the `Run` that takes it, wait for sends
  at the end of the step only;
  (a transport with tags may post a receive before its place, `PipelinePlan.posted`: a message only travels once its receiver wants it,
  and who computes wants nothing; this makes nobody wait longer);
- blocking, even with sends that wait for their receiver (rendezvous): the first transfer of the order that is not complete has both
  of its ranks waiting at it;
- in batches (`batches`: neighbouring sends and receives posted at once, then waited for): the same, some ranks being ahead; only where all of a batch
  travels at the same time (`runtime/comm: travels_together`).

Messages between two ranks come in the same order on both sides, so that a transport without tags matches them too (NCCL); `tag` is
unique within a step for one that matches by tag (gloo). A transfer whose two stages share a rank (the bottom of a V, one rank) is
handed over in memory: it has no `Send` or `Recv`, but the `Run`s on both sides name it.

Two neighbouring passes may be a *pair*, which runs as one (`plan/pipeline/schedule/pairs.py`): what either takes stands before both, what either gives after both.

Stages send along *edges*: each to the next, and where a model has skip connections also to later ones. A forward pass takes the outputs of
all stages below that have an edge to it and gives one for each edge upwards, both nearest stage first; the backward pass takes and
gives the gradients of the same, in the same orders. *Rank* means a place in the pipeline here; with several processes to a place
(`plan/pipeline/boundary/edges.py`) each follows the program of its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.plan.pipeline.schedule import Action, Edge, Pair, Schedule, chain, in_order, simulate

AHEAD = 2
"""Passes before its place at which a host posts a receive: places are those of a clock that no machine keeps to the pass."""
Direction = Literal["forward", "backward"]


class Transfer(NamedTuple):
    """What `stage` made of `microbatch`: an output, for a stage above (forward), or the gradient of an input, for one below."""

    src_rank: int
    dst_rank: int
    stage: int
    microbatch: int
    direction: Direction
    span: int = 1
    """Stages from the one that sends to the one that takes."""

    @property
    def target_stage(self) -> int:
        """The stage that takes it."""
        return self.stage + (self.span if self.direction == "forward" else -self.span)

    @property
    def edge(self) -> Edge:
        """Lower and upper stage."""
        return min(self.stage, self.target_stage), max(self.stage, self.target_stage)

    @property
    def is_local(self) -> bool:
        """Whether it stays in memory."""
        return self.src_rank == self.dst_rank

    def __str__(self) -> str:
        over = f"+{self.span}" if self.span > 1 else ""
        return f"{self.direction} {self.stage}{over}.{self.microbatch} {self.src_rank}->{self.dst_rank}"


@dataclass(frozen=True, slots=True)
class Run:
    """Run a pass. `takes` are its inputs from other stages (none: data, the loss, or W), `gives` what its outputs become."""

    action: Action
    takes: tuple[Transfer, ...]
    gives: tuple[Transfer, ...]


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
class PipelinePlan(Hashed):
    """A schedule with its transfers. `programs[rank]` is what a rank does, in order; `transfers` all of them in the one order."""

    schedule: Schedule
    programs: tuple[tuple[RankOp, ...], ...]
    transfers: tuple[Transfer, ...]
    edges: tuple[Edge, ...]
    """Which stages send to which, the chain first."""
    pairs: tuple[Pair, ...] = ()
    """Passes that may run beside one another, of all ranks."""

    @cached_property
    def second_of(self) -> dict[Action, Action]:
        """First pass of each pair -> its second."""
        return dict(self.pairs)

    @cached_property
    def _edge_numbers(self) -> dict[Edge, int]:
        return {edge: number for number, edge in enumerate(self.edges)}

    def tag(self, transfer: Transfer) -> int:
        """Number of a transfer, unique within a step."""
        number = self._edge_numbers[transfer.edge] * self.schedule.num_microbatches + transfer.microbatch
        return 2 * number + (transfer.direction == "backward")

    def posted(self, rank: int, *, ahead: int) -> tuple[RankOp, ...]:
        """The program of `rank` with each receive `ahead` passes before its place, for transports that match by tag."""
        program = self.programs[rank]
        receives = _receives_by_place(program)
        out: list[RankOp] = []
        place, seconds = 0, set(self.second_of.values())
        for op in program:
            if isinstance(op, Recv):
                continue
            if isinstance(op, Run):
                while op.action not in seconds and receives and receives[0][0] <= place + ahead:
                    out.append(receives.popleft()[1])
                place += 1
            out.append(op)
        return tuple(out)

    @cached_property
    def sent(self) -> tuple[Transfer, ...]:
        """Transfers that cross ranks."""
        return tuple(transfer for transfer in self.transfers if not transfer.is_local)

    def check(self) -> None:
        """Raise `PlanError` with everything wrong with the schedule or its transfers."""
        self.schedule.check()
        raise_if(pipeline_plan_problems(self), PlanError, subject=f"transfers of schedule {self.schedule.name}")

    def to_dict(self) -> dict[str, Any]:
        programs = [[_written(op) for op in program] for program in self.programs]
        plain: dict[str, Any] = {"schedule": self.schedule.to_dict(), "programs": programs, "edges": self.edges}
        if self.pairs:
            plain["pairs"] = [f"{first} {second}" for first, second in self.pairs]
        return plain

    def explain(self) -> str:
        """The schedule, how much it sends, and the largest number of receives open at once."""
        local = len(self.transfers) - len(self.sent)
        opened = " ".join(str(_most_open(program)) for program in self.programs)
        skips = [f"{a} to {b}" for a, b in self.edges if b - a > 1]
        beside = f"\n  in addition to the chain, stages send: {', '.join(skips)}" if skips else ""
        return (
            f"{self.schedule.explain()}{beside}\n  {len(self.sent)} transfers between ranks, {local} within one\n"
            f"  messages received before they are used at most, by rank: {opened}"
        )


def plan_pipeline(
    schedule: Schedule,
    *,
    edges: Sequence[Edge] | None = None,
    pairs: Sequence[Pair] = (),
) -> PipelinePlan:
    """The transfers of a schedule in the order in which they become possible where every pass takes what `uniform_costs` says.

    `edges`: which stages send to which (None: each to the next). Raises `PlanError` where they are none, and where the schedule
    itself cannot come to its end.
    """
    joined = in_order(chain(schedule.num_stages) if edges is None else edges)
    placed: list[tuple[tuple[float, int, int, int], int, RankOp]] = []
    """(when, transfer before pass, rank that makes it, which of that rank), rank that does it, what"""
    transfers: list[tuple[tuple[float, int, int, int], Transfer]] = []
    for rank, spans in enumerate(simulate(schedule, edges=joined, pairs=pairs).spans):
        for index, (action, start, end) in enumerate(spans):
            takes, gives = (transfers_of(schedule, action, joined, gives=gives) for gives in (False, True))
            placed.append(((start, 1, rank, index), rank, Run(action, takes, gives)))
            key = (end, 0, rank, index)
            for transfer in gives:
                transfers.append((key, transfer))
                if not transfer.is_local:
                    placed += [(key, rank, Send(transfer)), (key, transfer.dst_rank, Recv(transfer))]
    programs: list[list[RankOp]] = [[] for _ in range(schedule.pp)]
    for _, rank, op in sorted(placed, key=lambda item: item[0]):
        programs[rank].append(op)
    ordered = tuple(transfer for _, transfer in sorted(transfers, key=lambda item: item[0]))
    return PipelinePlan(
        schedule=schedule,
        programs=tuple(map(tuple, programs)),
        transfers=ordered,
        edges=joined,
        pairs=tuple(pairs),
    )


def transfers_of(schedule: Schedule, action: Action, edges: Sequence[Edge], *, gives: bool) -> tuple[Transfer, ...]:
    """What a pass makes for other stages (`gives`), or needs from them; `edges` in their order."""
    if action.kind == "W":
        return ()
    forward = action.kind == "F"
    mine = [edge for edge in edges if edge[0 if forward == gives else 1] == action.stage]
    return tuple(_transfer(schedule, edge, action.microbatch, "forward" if forward else "backward") for edge in mine)


def _transfer(schedule: Schedule, edge: Edge, microbatch: int, direction: Direction) -> Transfer:
    source, target = edge if direction == "forward" else edge[::-1]
    ranks = schedule.rank_of_stage
    return Transfer(ranks[source], ranks[target], source, microbatch, direction, edge[1] - edge[0])


def _receives_by_place(program: Sequence[RankOp]) -> deque[tuple[int, Recv]]:
    """The receives of a program with the number of passes before each."""
    out: deque[tuple[int, Recv]] = deque()
    place = 0
    for op in program:
        if isinstance(op, Recv):
            out.append((place, op))
        place += isinstance(op, Run)
    return out


def batches(program: Sequence[RankOp], *, together: bool = True) -> tuple[Run | tuple[Send | Recv, ...], ...]:
    """A program with its neighbouring sends and receives put together, to be posted at once; not `together`: each alone."""
    out: list[Run | tuple[Send | Recv, ...]] = []
    for op in program:
        if isinstance(op, Run):
            out.append(op)
        elif together and out and isinstance(out[-1], tuple):
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
        elif isinstance(op, Run):
            now -= sum(not transfer.is_local for transfer in op.takes)
    return most


# ---- check ----------------------------------------------------------------------------------------------------------------------


def pipeline_plan_problems(plan: PipelinePlan) -> list[Problem]:
    """What is wrong with the transfers: passes reordered, something sent twice or never, sides that disagree, a blocking deadlock."""
    problems = []
    for rank, (program, order) in enumerate(zip(plan.programs, plan.schedule.actions, strict=True)):
        if tuple(op.action for op in program if isinstance(op, Run)) != order:
            rule = "runs the passes of the schedule, in its order"
            problems.append(Problem(where=f"plan.rank{rank}", value="another order", rule=rule))
        problems += _rank_problems(rank, program) + _edge_problems(plan, rank) + _pair_problems(plan, rank)
    sends = [op.transfer for program in plan.programs for op in program if isinstance(op, Send)]
    recvs = [op.transfer for program in plan.programs for op in program if isinstance(op, Recv)]
    if sorted(sends) != sorted(plan.sent) or sorted(recvs) != sorted(plan.sent):
        rule = "every transfer between ranks is sent once and received once"
        problems.append(Problem(where="plan.transfers", value=(len(sends), len(recvs), len(plan.sent)), rule=rule))
    tags = {plan.tag(transfer) for transfer in plan.transfers}
    if len(tags) < len(plan.transfers):
        problems.append(Problem(where="plan.tags", value=len(tags), rule=f"differ for all {len(plan.transfers)}"))
    return problems or _blocking_deadlock(plan)


def _edge_problems(plan: PipelinePlan, rank: int) -> list[Problem]:
    """A pass that leaves out an edge of its stage, or names them in another order."""
    problems = []
    for op in plan.programs[rank]:
        if isinstance(op, Run):
            for name, found in (("takes", op.takes), ("gives", op.gives)):
                if found != transfers_of(plan.schedule, op.action, plan.edges, gives=name == "gives"):
                    rule = "names one transfer for each edge of its stage, nearest stage first"
                    problems.append(
                        Problem(where=f"plan.rank{rank}.{op.action}.{name}", value=[str(t) for t in found], rule=rule)
                    )
    return problems


def _pair_problems(plan: PipelinePlan, rank: int) -> list[Problem]:
    """Something between the two passes of a pair: a transfer that one of them waits for, or that would wait for both."""
    program, second_of = plan.programs[rank], plan.second_of
    problems = []
    for op, after in zip(program, (*program[1:], None), strict=True):
        if isinstance(op, Run) and op.action in second_of:
            wanted = second_of[op.action]
            if not isinstance(after, Run) or after.action != wanted:
                found = "nothing" if after is None else _written(after)
                rule = f"is followed by the other pass of its pair, {wanted}, not by {found}"
                problems.append(Problem(where=f"plan.rank{rank}", value=str(op.action), rule=rule))
    return problems


def _rank_problems(rank: int, program: Sequence[RankOp]) -> list[Problem]:
    """A send before its pass, a pass before its receive, a transfer of other ranks."""
    here: set[Transfer] = set()
    problems = []
    for op in program:
        needs: tuple[Transfer, ...]
        if isinstance(op, Run):
            needs, makes, mine = op.takes, op.gives, True
        elif isinstance(op, Send):
            needs, makes, mine = (op.transfer,), (), op.transfer.src_rank == rank
        else:
            needs, makes, mine = (), (op.transfer,), op.transfer.dst_rank == rank
        if not mine:
            problems.append(Problem(where=f"plan.rank{rank}", value=_written(op), rule="belongs to other ranks"))
        for missing in (transfer for transfer in needs if transfer not in here):
            rule = f"comes after {missing} is there"
            problems.append(Problem(where=f"plan.rank{rank}", value=_written(op), rule=rule))
        here.update(makes)
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
        Problem(where=f"plan.rank{rank}", value=_written(op), rule="deadlocks waiting for the other rank")
        for rank in range(len(plan.programs))
        if (op := head(rank)) is not None
    ]
