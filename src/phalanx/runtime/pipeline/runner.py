"""Carries out one rank's part of a pipeline plan: passes in their order, transfers between ranks under way beside them.

Decides nothing: what runs when, and who sends what to whom, is decided by `PipelinePlan` (`plan/pipeline/comm.py`) and the edges (`plan/pipeline/boundary/edges.py`); what a
pass does is the caller's (`Passes`): this file knows no model. One executor for all schedules, and for plans that only go forward.

    Run    wait for what the pass takes, run it, keep what it gives until it is sent or handed over
    Send   start the transfer. It is waited for later: at the end, or when more are open than the rank holds activations
    Recv   start to receive; the pass that takes it waits. On a CPU it is posted `AHEAD` passes before its place: a message only travels
           once its receiver wants it, and a receiver that computes wants nothing
    a transfer within the place (the bottom of a V) is handed over in memory
    two passes that the plan pairs run beside one another, where the caller has a `CoScheduler` for it, and else one after the other: the same bits

Waiting for a transfer after its place in the plan's one order cannot deadlock, since the other side posts its end at that same place and waits
for earlier ones only; posting a receive before its place makes nobody wait. Transports that match messages by order alone (NCCL) get
neighbouring transfers in one batch, as `batches` puts them, in the plan's order. What has to be passed on inside a stage goes on while the
rank computes (`runtime/pipeline/boundary.py`).

Must never change: a transfer carries rows of the shape that its edge has, whatever the routing; every tensor is dropped as soon as the plan has no
more use for it.

Legend: T rows between stages on this rank, H hidden.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from phalanx.core.errors import RunError
from phalanx.plan.pipeline import AHEAD, Direction, PipelinePlan, Recv, Run, Send, Transfer, batches
from phalanx.plan.pipeline.schedule import Edge
from phalanx.runtime.comm import Axis, Collectives, Exchange, Message, travels_together
from phalanx.runtime.moe import CoScheduler
from phalanx.runtime.pipeline.boundary import (
    LEAST_OPEN,
    Arrival,
    Boundary,
    EdgeLane,
    Landing,
    check_sides,
    landing,
    packed,
    start_sends,
    wait_for_receipt,
)

__all__ = ["Boundary", "Passes", "agree_on", "run_pipeline"]

Tensors = tuple[torch.Tensor, ...]


class Passes(Protocol):
    """The work of this rank's stages. Tensors that come in and go out carry no gradient graph.

    One tensor for each edge of the stage, nearest stage first: of the chain the first, of skip connections the others.
    """

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        """The stage's outputs. `inputs` is empty on the first stage, and so is what the last one returns."""

    def backward(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        """Gradients of weights and inputs; returns those of the inputs. `d_outputs` is empty on the last stage."""

    def input_gradient(self, stage: int, microbatch: int, d_outputs: Tensors) -> Tensors:
        """Does what `backward` does, but the gradients of weights may be deferred until `weight_gradient`."""

    def weight_gradient(self, stage: int, microbatch: int) -> None:
        """What `input_gradient` deferred."""


def run_pipeline(
    plan: PipelinePlan,
    passes: Passes,
    boundary: Boundary,
    *,
    name: Callable[[Transfer], str] = str,
    beside: CoScheduler | None = None,
) -> None:
    """Run this rank's program of `plan` to its end. Collective over the pipeline axis; `name` gives the id of a transfer.

    `beside` runs the plan's pairs; all ranks have one, or none.

    Raises `PeerError`, naming the transfer, where another rank is gone or silent. No thread outlives the call but a lane in the middle of a message.
    After an error the axis's group is of no more use: what was posted in it waits for its message still.
    """
    check_sides(plan, boundary)
    executor = _Executor(plan, passes, boundary, name, beside)
    try:
        executor.run()
    except BaseException:
        executor.abandon()
        raise


def agree_on(plan: PipelinePlan, *, axis: Axis, comms: Collectives) -> None:
    """Raise `RunError` on all ranks of a pipeline where their plans differ. Collective, once before the first step."""
    told = comms.gather_objects(plan.hash, axis)
    if len(set(told)) > 1:
        found = ", ".join(f"{value} on rank {rank}" for rank, value in zip(axis.ranks, told, strict=True))
        raise RunError(f"the ranks of a pipeline have different plans of {plan.schedule.name}: {found}")


class _Executor:
    def __init__(
        self,
        plan: PipelinePlan,
        passes: Passes,
        boundary: Boundary,
        name: Callable[[Transfer], str],
        beside: CoScheduler | None,
    ) -> None:
        self.plan, self.passes, self.boundary, self.name = plan, passes, boundary, name
        self.beside = beside
        self.second_of = plan.second_of if beside is not None else {}
        self.first: Run | None = None
        """Waits for the other pass of its pair, which comes next."""
        self.most_open = max(LEAST_OPEN, plan.schedule.max_live[boundary.position])
        self.ready: dict[Transfer, torch.Tensor] = {}
        """Made here and not yet sent or handed over."""
        self.posted_receives: dict[Transfer, tuple[Arrival, threading.Event | None]] = {}
        """Transfers that come, with the event that a lane sets where it takes the transfer in."""
        self.open_sends: deque[tuple[Exchange, Sequence[object]]] = deque()
        """Exchanges under way, with what must live until they are sent: messages, and tensors that these are made of."""
        self.lanes: dict[tuple[Edge, Direction], EdgeLane] = {}
        self.stream = boundary.stream()

    def run(self) -> None:
        if self.boundary.device.type == "cpu":
            self._run_posted()
        else:
            self._run_in_batches()
        self._close(0)
        for lane in self.lanes.values():
            lane.finish()
            self.boundary.comms.absorb(lane.comms)

    def abandon(self) -> None:
        """End what is under way on threads."""
        EdgeLane.abandon(self.lanes.values(), self.boundary.comms)

    def _run_posted(self) -> None:
        """Receives are posted ahead of their place, unless all is to be waited for where it stands."""
        position = self.boundary.position
        waits = self.boundary.comms.synchronous
        for op in self.plan.programs[position] if waits else self.plan.posted(position, ahead=AHEAD):
            if isinstance(op, Run):
                self._pass(op)
            elif isinstance(op, Send):
                self._send(op.transfer)
            else:
                self._receive(op.transfer)

    def _run_in_batches(self) -> None:
        together = travels_together(self.boundary.axis.size)
        for step in batches(self.plan.programs[self.boundary.position], together=together):
            if isinstance(step, Run):
                self._pass(step)
            else:
                self._start(step)
        if self.stream is not None:
            torch.cuda.current_stream(self.boundary.device).wait_stream(self.stream)

    # ---- passes

    def _pass(self, run: Run) -> None:
        if run.action in self.second_of:
            self.first = run
        elif self.first is not None:
            self._pair(self.first, run)
            self.first = None
        else:
            self._keep(run, self._work(run)())

    def _pair(self, first: Run, second: Run) -> None:
        assert (
            self.beside is not None and self.second_of[first.action] == second.action
        )  # the plan has them next to each other
        made, also_made = self.beside.run(self._work(first), self._work(second))
        self._keep(first, made)
        self._keep(second, also_made)

    def _work(self, run: Run) -> Callable[[], Tensors]:
        """The pass, its inputs taken."""
        kind, stage, microbatch = run.action
        taken = tuple(self._take(transfer) for transfer in run.takes)

        def run_it() -> Tensors:
            with self.boundary.comms.doing(str(run.action), "host"):
                if kind == "F":
                    return self.passes.forward(stage, microbatch, taken)
                if kind == "B":
                    return self.passes.backward(stage, microbatch, taken)
                if kind == "I":
                    return self.passes.input_gradient(stage, microbatch, taken)
                self.passes.weight_gradient(stage, microbatch)
                return ()

        return run_it

    def _keep(self, run: Run, made: Tensors) -> None:
        if len(made) != len(run.gives):
            raise ValueError(f"pass {run.action} made {len(made)} tensors for {len(run.gives)} edges")
        for transfer, tensor in zip(run.gives, made, strict=True):
            shape, dtype = self.boundary.route(transfer).shape, self.boundary.dtype
            if tuple(tensor.shape) != shape or tensor.dtype != dtype:
                found = f"{tuple(tensor.shape)} of {tensor.dtype}"
                raise ValueError(f"pass {run.action} made {found}; between stages are {shape} of {dtype}")
            self.ready[transfer] = tensor.contiguous()

    def _take(self, transfer: Transfer) -> torch.Tensor:
        if transfer.is_local:
            return self.ready.pop(transfer)
        arrival, here = self.posted_receives.pop(transfer)
        if self.stream is not None:  # allocated there, used here
            for tensor in arrival.tensors():
                tensor.record_stream(torch.cuda.current_stream(self.boundary.device))
        if here is None:
            return arrival.take()
        with self.boundary.comms.blocked(self.name(transfer), self.boundary.axis_of(transfer)):
            here.wait()
        self.lanes[transfer.edge, transfer.direction].raise_error()
        return arrival.tensor

    # ---- transfers

    def _send(self, transfer: Transfer) -> None:
        legs, tensor = self.boundary.route(transfer).sends, self.ready.pop(transfer)
        if not legs:  # another replica sends it
            return
        axis, comms = self.boundary.axis_of(transfer), self.boundary.comms
        tag, op_id = self.plan.tag(transfer), self.name(transfer)
        sent = start_sends(legs, tensor, axis=axis, comms=comms, tag=tag, op_id=op_id)
        if self.boundary.wait_for_sends:
            wait_for_receipt(sent, axis=axis, comms=comms, tag=tag, op_id=op_id)
            return
        self.open_sends.append(sent)
        self._close(self.most_open)

    def _receive(self, transfer: Transfer) -> None:
        route, axis = self.boundary.route(transfer), self.boundary.axis_of(transfer)
        tag, op_id = self.plan.tag(transfer), self.name(transfer)
        arrival = Arrival(self.boundary.empty(transfer))
        if not route.relays and not self.boundary.wait_for_sends:
            arrival.receive(route.receives, axis=axis, comms=self.boundary.comms, tag=tag, op_id=op_id)
            self.posted_receives[transfer] = arrival, None
            return
        lane = self._lane(transfer, axis)
        for leg in route.receives:
            arrival.receive([leg], axis=axis, comms=lane.comms, tag=tag, op_id=op_id)
        self.posted_receives[transfer] = (
            arrival,
            lane.add(arrival, route, tag=tag, op_id=op_id, answered=self.boundary.answered(transfer)),
        )

    def _lane(self, transfer: Transfer, axis: Axis) -> EdgeLane:
        key = transfer.edge, transfer.direction
        if key not in self.lanes:
            self.lanes[key] = EdgeLane(self.boundary, axis, f"lane {transfer.edge} {transfer.direction}")
        return self.lanes[key]

    def _close(self, most_open: int) -> None:
        """Wait for the oldest sends until at most so many are open. On a device both streams do: memory of either goes back to it, and would be written while NCCL still reads."""
        while len(self.open_sends) > most_open:
            exchange, _ = self.open_sends[0]
            with self._aside(after_passes=False):
                exchange.wait()
            if self.stream is not None:
                exchange.wait()
            self.open_sends.popleft()

    # ---- devices: a stream of their own for transfers, in the plan's order

    def _start(self, ops: Sequence[Send | Recv]) -> None:
        """Post neighbouring transfers at once; those that some rank passes on one by one, as all ranks then have them, and so where each is waited for."""
        edges = self.boundary.edges
        if self.boundary.in_turn or any(edges[op.transfer.edge].relays(op.transfer.direction) for op in ops):
            for op in ops:
                self._post([op])
                if isinstance(op, Recv):
                    self._relay(op.transfer)
        else:
            self._post(ops)

    def _post(self, ops: Sequence[Send | Recv]) -> None:
        """One exchange for all messages of `ops`."""
        sends: list[Message] = []
        made: list[torch.Tensor] = []
        receives: list[Message] = []
        arriving: list[tuple[Arrival, Landing]] = []
        axis = self.boundary.axis
        with self._aside(after_passes=any(isinstance(op, Send) for op in ops)):
            for op in ops:
                transfer = op.transfer
                route, tag = self.boundary.route(transfer), self.plan.tag(transfer)
                if isinstance(op, Send):
                    tensor = self.ready.pop(transfer)
                    sends += [Message(packed(tensor, leg), axis.ranks.index(leg.peer), tag) for leg in route.sends]
                    made.append(tensor)
                    continue
                arrival = Arrival(self.boundary.empty(transfer))
                self.posted_receives[transfer] = arrival, None
                for leg in route.receives:
                    place = landing(arrival.tensor, leg)
                    receives.append(Message(place.buffer, axis.ranks.index(leg.peer), tag))
                    arriving.append((arrival, place))
            if not sends and not receives:
                return
            op_id = " ".join(self.name(op.transfer) for op in ops)
            exchange = self.boundary.comms.start_exchange(sends, receives, axis, op_id=op_id)
            for arrival, place in arriving:
                arrival.parts.append((exchange, place))
            if sends:
                self.open_sends.append((exchange, (*sends, *made)))
            self._wait_in_turn(exchange)
        self._close(self.most_open)

    def _wait_in_turn(self, exchange: Exchange) -> None:
        if self.boundary.in_turn:
            exchange.wait()
            if self.stream is not None:
                self.stream.synchronize()  # SYNC: in a first step

    def _relay(self, transfer: Transfer) -> None:
        """Pass on, on the stream of the transfers, what has just been posted."""
        route = self.boundary.route(transfer)
        if not route.relays:
            return
        arrival, _ = self.posted_receives[transfer]
        with self._aside(after_passes=False):
            arrival.take()
            sent = start_sends(
                [relay.leg for relay in route.relays],
                arrival.tensor,
                axis=self.boundary.axis,
                comms=self.boundary.comms,
                tag=self.plan.tag(transfer),
                op_id=self.name(transfer),
            )
            self.open_sends.append(sent)
            self._wait_in_turn(sent[0])

    @contextmanager
    def _aside(self, *, after_passes: bool) -> Iterator[None]:
        """The stream of the transfers; what has been computed so far comes before it where it is to be sent."""
        if self.stream is None:
            yield
            return
        if after_passes:
            self.stream.wait_stream(torch.cuda.current_stream(self.boundary.device))
        with torch.cuda.stream(self.stream):
            yield
