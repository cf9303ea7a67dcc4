"""What travels between the stages of a pipeline, and the lane on which ranks pass it on while they compute.

Decides nothing: who sends which boxes to whom is decided by `EdgePlan` (`plan/pipeline/boundary/edges.py`). On a CPU a rank that relays has a thread for it, the *lane*, with a
process group of its own: it takes what has come in the plan's order and sends it on, whatever passes the rank is busy with. A lane ends
with the step: when all is sent, or, on failure, by giving up its group, which also tells the ranks that wait for this one.

Must never change: a rank's own output leaves from the thread that computes it, right behind its pass; a lane only passes on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from phalanx.core.errors import RunError
from phalanx.plan.pipeline import PipelinePlan, Transfer
from phalanx.plan.pipeline.boundary import BoundaryMessage, EdgePlan, Relay, Route, direct_edge
from phalanx.plan.pipeline.schedule import Edge
from phalanx.runtime.comm import Axis, Collectives, Exchange, Message

RECEIPT = 2**24
"""Added to the tag of a message, the tag of what says that it is there."""
LEAST_OPEN = 4
"""Sends that may always be under way: a receiver that is a little late should not stop the sender."""
GRACE_S = 0.1
"""How long lanes may take to end once their group is broken off. Less than a launcher waits for more errors once a rank has ended."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """This rank's place in a pipeline, and how tensors cross every edge that ends there.

    `position` is the place in the pipeline whose program this rank follows (`Schedule.rank_of_stage` speaks of places); all ranks of a
    stage have the same one. `edges` has an `EdgePlan` for every edge (stage, stage) of the `PipelinePlan` that has an end on this
    rank: local shapes of activation and gradient, and who sends what to whom, in global ranks, which are those of `axis`: all ranks of
    all stages that exchange anything with one another. `direct_edges` makes them for one rank a stage, `planned_edge`
    from two reshard plans.

    A pass gives one tensor for each edge upwards, of the local shape that the edge's plan has for this rank, and takes one for each
    from below (nearest stage first); the backward pass the same, turned round. All have `dtype`, and lie on `device`.

    `lane` is needed on a CPU where a plan lets ranks pass on what they receive: the ranks of `axis` in a group that nothing else uses.
    `wait_for_sends` makes a rank wait, behind each pass, until its receivers say that they have what it sent, as a blocking send between
    devices does (to measure what not waiting is worth; a host's own sends end when the kernel has the bytes). It needs a lane.
    """

    position: int
    edges: Mapping[Edge, EdgePlan]
    dtype: torch.dtype
    device: torch.device
    axis: Axis
    comms: Collectives
    lane: Axis | None = None
    wait_for_sends: bool = False
    in_turn: bool = False
    """On a GPU: nothing is computed while a message is under way."""

    @property
    def rank(self) -> int:
        """This rank's global number."""
        return self.axis.ranks[self.axis.index]

    def route(self, transfer: Transfer) -> Route:
        """This rank's part of a transfer."""
        return self.edges[transfer.edge].routes(transfer.direction)[self.rank]

    def answered(self, transfer: Transfer) -> frozenset[int]:
        """Ranks that wait until their messages of a transfer are there: those that send it from their stage, if any do."""
        routes = self.edges[transfer.edge].routes(transfer.direction)
        return frozenset(rank for rank, route in routes.items() if route.sends and self.wait_for_sends)

    def axis_of(self, transfer: Transfer) -> Axis:
        """Whose group carries it: the lane's, for a transfer that some rank passes on or acknowledges."""
        on = self.wait_for_sends or self.edges[transfer.edge].relays(transfer.direction)
        if self.device.type != "cpu" or not on:
            return self.axis
        if self.lane is None:
            raise ValueError(
                f"{transfer} is passed on inside its stage, or acknowledged, which needs a lane (Boundary.lane)"
            )
        return self.lane

    def stream(self) -> torch.cuda.Stream | None:
        """Stream for transfers beside passes, where the device has streams."""
        return self.comms.transfer_stream(self.device) if self.device.type == "cuda" else self.comms.transfers

    def empty(self, transfer: Transfer) -> torch.Tensor:
        """A place for what this rank receives."""
        return torch.empty(self.route(transfer).shape, dtype=self.dtype, device=self.device)


def direct_edges(plan: PipelinePlan, shape: Sequence[int], ranks: Sequence[int]) -> dict[Edge, EdgePlan]:
    """Every edge of a pipeline with one rank to a place, `ranks[place]`, where the same shape crosses everywhere."""
    place = plan.schedule.rank_of_stage
    return {e: direct_edge(e, shape, src=ranks[place[e[0]]], dst=ranks[place[e[1]]]) for e in plan.edges}


# ---- messages -------------------------------------------------------------------------------------------------------------------


def packed(tensor: torch.Tensor, leg: BoundaryMessage) -> torch.Tensor:
    """What a message carries: a part of the tensor itself where it lies in one piece, else a copy."""
    views = [tensor[box.slices()] for box in leg.parts]
    if len(views) == 1:
        return views[0].contiguous()
    return torch.cat([view.reshape(-1) for view in views])


@dataclass(frozen=True, eq=False)
class Landing:
    """Where a message arrives, and where its parts belong."""

    buffer: torch.Tensor
    views: tuple[torch.Tensor, ...]
    """Empty: it arrives where it belongs."""

    def unpack(self) -> None:
        at = 0
        for view in self.views:
            view.copy_(self.buffer[at : at + view.numel()].view(view.shape))
            at += view.numel()


def landing(tensor: torch.Tensor, leg: BoundaryMessage) -> Landing:
    """Buffer for a message into `tensor`: the place itself where it lies in one piece."""
    views = tuple(tensor[box.slices()] for box in leg.parts)
    if len(views) == 1 and views[0].is_contiguous():
        return Landing(views[0], ())
    return Landing(tensor.new_empty(sum(view.numel() for view in views)), views)


def start_sends(
    legs: Sequence[BoundaryMessage], tensor: torch.Tensor, *, axis: Axis, comms: Collectives, tag: int, op_id: str
) -> tuple[Exchange, list[Message]]:
    """Send parts of `tensor`; the messages hold what must live until they are gone."""
    messages = [Message(packed(tensor, leg), axis.ranks.index(leg.peer), tag) for leg in legs]
    return comms.start_exchange(messages, (), axis, op_id=op_id), messages


def wait_for_receipt(
    sent: tuple[Exchange, list[Message]], *, axis: Axis, comms: Collectives, tag: int, op_id: str
) -> None:
    """Return when the receivers of all messages have said that they are there."""
    exchange, messages = sent
    receipts = [Message(torch.empty(1, dtype=torch.uint8), message.peer, tag + RECEIPT) for message in messages]
    answer = comms.start_exchange((), receipts, axis, op_id=op_id)
    exchange.wait()
    answer.wait()


class Arrival:
    """A transfer that is on its way to this rank."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.parts: list[tuple[Exchange, Landing]] = []

    def receive(self, legs: Sequence[BoundaryMessage], *, axis: Axis, comms: Collectives, tag: int, op_id: str) -> None:
        """Post all messages as one exchange; each by itself where they are taken one by one."""
        landings = [landing(self.tensor, leg) for leg in legs]
        messages = [Message(l.buffer, axis.ranks.index(leg.peer), tag) for leg, l in zip(legs, landings, strict=True)]
        exchange = comms.start_exchange((), messages, axis, op_id=op_id)
        self.parts += [(exchange, l) for l in landings]

    def tensors(self) -> list[torch.Tensor]:
        """What it comes in, and what it becomes."""
        return [self.tensor, *(place.buffer for _, place in self.parts if place.views)]

    def take(self) -> torch.Tensor:
        """Wait until all of it is there."""
        for index in range(len(self.parts)):
            self.take_part(index)
        return self.tensor

    def take_part(self, index: int) -> None:
        exchange, place = self.parts[index]
        exchange.wait()
        place.unpack()


# ---- the lane -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Job:
    """A transfer that the lane takes in and passes on; `done` is set when all of it is here, whether or not it has left."""

    arrival: Arrival
    route: Route
    tag: int
    op_id: str
    done: threading.Event
    answered: frozenset[int]
    """Ranks that wait to hear that their messages are here."""


class EdgeLane:
    """Passes on what comes along one edge in one direction, in order, while the rank computes. Make it on the thread that computes."""

    def __init__(self, boundary: Boundary, axis: Axis, name: str) -> None:
        self.axis = axis
        self.comms = boundary.comms.apart()
        self._jobs: deque[_Job] = deque()
        self._more = threading.Condition()
        self._ending = False
        self._error: BaseException | None = None
        self._open: deque[tuple[Exchange, list[Message]]] = deque()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, arrival: Arrival, route: Route, *, tag: int, op_id: str, answered: frozenset[int]) -> threading.Event:
        """Take in and pass on what is posted in `arrival`; the event says that all of it is here, or that it never will be."""
        job = _Job(arrival, route, tag, op_id, threading.Event(), answered)
        with self._more:
            self._jobs.append(job)
            self._more.notify()
            if self._error is not None:
                job.done.set()
        return job.done

    def raise_error(self) -> None:
        """Raise what has ended the lane, if anything."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Wait until everything has left; raises what has ended the lane."""
        self._end()
        with self.comms.waiting():
            self._thread.join()
        self.raise_error()

    @staticmethod
    def abandon(lanes: Collection[EdgeLane], comms: Collectives) -> None:
        """End their threads now; their groups are lost. One in the middle of a message is left behind: nothing ends its wait (`runtime/comm/abortable.py`)."""
        for lane in lanes:
            lane._end()
        for axis in {id(lane.axis.group): lane.axis for lane in lanes if lane._thread.is_alive()}.values():
            comms.break_off(axis)
        end_s = time.monotonic() + GRACE_S
        for lane in lanes:
            lane._thread.join(max(0.0, end_s - time.monotonic()))

    def _end(self) -> None:
        with self._more:
            self._ending = True
            self._more.notify()

    def _next(self) -> _Job | None:
        with self._more:
            self._more.wait_for(lambda: self._jobs or self._ending)
            return self._jobs.popleft() if self._jobs else None

    def _run(self) -> None:
        job: _Job | None = None
        try:
            while (job := self._next()) is not None:
                self._pass_on(job)
            self._close(0)
        except BaseException as error:
            self._error = error
            with self._more:
                for left in (job, *self._jobs):
                    if left is not None:
                        left.done.set()

    @torch.no_grad()
    def _pass_on(self, job: _Job) -> None:
        count = 0
        for item in job.route.incoming():
            if isinstance(item, Relay):
                sent = start_sends(
                    [item.leg], job.arrival.tensor, axis=self.axis, comms=self.comms, tag=job.tag, op_id=job.op_id
                )
                self._open.append(sent)
                self._close(LEAST_OPEN)
            else:
                job.arrival.take_part(count)
                count += 1
                if item.peer in job.answered:
                    self._answer(item.peer, job)
                if count == len(job.route.receives):
                    job.done.set()

    def _answer(self, peer: int, job: _Job) -> None:
        receipt = Message(torch.zeros(1, dtype=torch.uint8), self.axis.ranks.index(peer), job.tag + RECEIPT)
        exchange = self.comms.start_exchange([receipt], (), self.axis, op_id=job.op_id)
        self._open.append((exchange, [receipt]))
        self._close(LEAST_OPEN)

    def _close(self, most_open: int) -> None:
        while len(self._open) > most_open:
            self._open[0][0].wait()
            self._open.popleft()


def check_sides(plan: PipelinePlan, boundary: Boundary) -> None:
    """Raise `RunError` where the boundary lacks an edge that ends at this rank's place, or this rank's part in it."""
    stages = plan.schedule.stages_of(boundary.position)
    missing = [
        edge
        for edge in plan.edges
        if (edge[0] in stages or edge[1] in stages)
        and (edge not in boundary.edges or boundary.rank not in boundary.edges[edge].forward)
    ]
    if missing:
        raise RunError(
            f"rank {boundary.rank} at place {boundary.position} has no part in edge {missing[0]} of its pipeline"
        )
