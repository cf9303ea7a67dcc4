"""Carries out one rank's part of a reshard plan over one process group: messages between two ranks, in the plan's order.

Decides nothing: who sends what to whom, in which messages and through whom is `plan.reshard.ReshardPlan`'s. Two ways to post, for two kinds of transport:

    tags      gloo. Receives are posted up to `open_hops` ahead, so that a sender never waits for a receiver's answer; as many sends may be unfinished.
              A message is known by its tag, the count of messages between its two ranks.
    batches   NCCL, which knows no tags: messages between two ranks match in the order of posting, which is the plan's on both sides. Runs of the
              program in which nothing that is sent came in the same run are posted together, on a stream of their own.

Neither can deadlock. Take the first message of the plan's order that is not complete: whatever its two ranks wait for stands before it (a rank does not
go past a receive that is not posted, and waits for earlier messages only), so both have posted it, or will. For that two things of NCCL (v2.28.9) are
kept away. It connects two ranks in their first message, where the host of each waits for the other's (src/transport.cc: ncclTransportP2pSetup), which may be in another run: so all
peers meet first. And what is posted together is carried at the same time only for `TOGETHER` messages each way, of different peers (src/enqueue.cc: addWorkBatchToPlan): so no run has more.
Must never change: sources are only read; the destination is complete where `run` returns, and not to be used where it raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from phalanx.core.errors import PeerError
from phalanx.plan.program import message_id
from phalanx.plan.reshard import MovePart, ReshardPlan
from phalanx.runtime.comm import Axis, Collectives, Exchange, Message, travels_together
from phalanx.runtime.reshard.program import RankProgram, Step
from phalanx.runtime.reshard.staging import Staging
from phalanx.runtime.reshard.tensors import RankTensors, Tensors

Posting = Literal["tags", "batches"]
TOGETHER = 4
"""Messages each way that NCCL's kernel carries side by side: it takes 8 pairs of ranks at once, and what goes beyond waits until all of these are through."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Transport:
    """What the messages of a reshard travel over."""

    comms: Collectives
    axis: Axis
    """All ranks of both meshes (and maybe others)."""
    wire: torch.device
    """Where the transport reads and writes: tensors elsewhere go through staging there."""
    posting: Posting = "tags"
    op_id: str = "reshard"
    connected: set[tuple[bool, int]] = field(default_factory=set)
    """In batches: ways on which messages have gone, (whether this rank sends, place of the other one in the axis), and its own place. The same set for all moves over a group."""


@dataclass(frozen=True, kw_only=True)
class ReshardReport:
    """What one rank did in a reshard. Bytes are counted as messages complete."""

    messages: int
    direct: int
    """Messages without staging: sent from, or received in, the place where their elements lie."""
    sent_bytes: int
    received_bytes: int
    entered_bytes: int
    """Bytes of those received that came from other hosts."""
    entered: tuple[MovePart, ...]
    """What they were, a part each time that it came in."""
    staging_peak_bytes: int
    staging_limit_bytes: int
    sums_peak_bytes: int
    """Peak bytes beside staging: sums under way and terms that wait for their turn."""
    seconds: float


def run_program(
    plan: ReshardPlan, program: RankProgram, lane: Transport, *, source: Tensors, dest: Tensors
) -> ReshardReport:
    """Send, receive, copy and add until `dest` is complete. Collective over the ranks of the plan.

    Raises `PeerError` where a rank has gone or does not answer in time: `dest` is then incomplete, `source` as it was.
    """
    begin_s = time.perf_counter()
    run = (_Batched if lane.posting == "batches" else _Tagged)(plan, program, lane, source, dest)
    with _told(lane), _own_stream(lane.comms, lane.wire):
        run.all()
    return run.report(time.perf_counter() - begin_s)


@contextmanager
def _told(lane: Transport) -> Iterator[None]:
    try:
        yield
    except PeerError as err:
        raise PeerError(
            f"{lane.op_id} did not come to its end: {err}. The destination tensors are incomplete; the source tensors are as they were"
        ) from err


@contextmanager
def _own_stream(comms: Collectives, wire: torch.device) -> Iterator[None]:
    """Copies and messages on a stream of their own, after what is queued now and before what is queued afterwards."""
    if wire.type != "cuda":
        yield
        return
    current, own = torch.cuda.current_stream(wire), comms.transfer_stream(wire)
    own.wait_stream(current)
    try:
        with torch.cuda.stream(own):
            yield
    finally:  # copies may be pending where messages were refused, into memory that is given back
        current.wait_stream(own)


class _Run:
    """What both ways of posting share: tensors, staging, counters."""

    def __init__(
        self, plan: ReshardPlan, program: RankProgram, lane: Transport, source: Tensors, dest: Tensors
    ) -> None:
        self.program, self.lane = program, lane
        self.window = max(1, plan.open_hops)
        self.tensors = RankTensors(plan, program, source=source, dest=dest)
        self.staging = Staging(
            buffer_bytes=program.largest_bytes,
            limit_bytes=2 * self.window * max(program.largest_bytes, plan.message_bytes),
            device=lane.wire,
        )
        self.peers = {rank: i for i, rank in enumerate(lane.axis.ranks)}
        self.direct = self.sent_bytes = self.received_bytes = self.entered_bytes = 0
        self.entered: list[MovePart] = []

    def outgoing(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The bytes of a message that is sent, and the staging buffer that they are in, if any."""
        view = self.tensors.direct(step, self.lane.wire)
        if view is not None:
            self.direct += 1
            return view, None
        buffer = self.staging.take()
        return self.tensors.pack(step, buffer), buffer

    def incoming(self, step: Step) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Where a message that is received goes, and the staging buffer that is, if any."""
        view = self.tensors.direct(step, self.lane.wire)
        if view is not None:
            self.direct += 1
            return view, None
        buffer = self.staging.take()
        return buffer[: step.nbytes], buffer

    def arrived(self, number: int, buffer: torch.Tensor | None) -> None:
        """A received message is complete."""
        step = self.program.steps[number]
        self.received_bytes += step.nbytes
        if number in self.program.entering_steps:
            self.entered_bytes += step.nbytes
            self.entered += [placed.part for placed in step.placed]
        if buffer is not None:
            self.tensors.unpack(step, buffer)
            self.staging.give(buffer)

    def gone(self, step: Step, buffer: torch.Tensor | None) -> None:
        """A message that was sent is complete."""
        self.sent_bytes += step.nbytes
        if buffer is not None:
            self.staging.give(buffer)

    def message(self, step: Step, tensor: torch.Tensor) -> Message:
        return Message(tensor, self.peers[step.peer], step.tag if self.lane.posting == "tags" else 0)

    def report(self, seconds: float) -> ReshardReport:
        return ReshardReport(
            messages=len(self.program.steps),
            direct=self.direct,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            entered_bytes=self.entered_bytes,
            entered=tuple(self.entered),
            staging_peak_bytes=self.staging.usage.peak_bytes,
            staging_limit_bytes=self.staging.limit_bytes,
            sums_peak_bytes=self.tensors.usage.peak_bytes,
            seconds=seconds,
        )


class _Tagged(_Run):
    """Receives posted ahead, sends as soon as what they carry is there."""

    def all(self) -> None:
        self.receives = [n for n, step in enumerate(self.program.steps) if not step.sends]
        self.posted = 0
        """How many of `receives` have been."""
        self.under_way: dict[int, tuple[Exchange, torch.Tensor | None]] = {}
        """Receives by step, oldest first."""
        self.leaving: list[tuple[Step, Exchange, torch.Tensor | None]] = []
        self._post()
        for number, step in enumerate(self.program.steps):
            if step.sends:
                self._send(step)
            else:
                while self.posted == 0 or self.receives[self.posted - 1] < number:
                    self._take(next(iter(self.under_way)))
            self.tensors.copy_some()
        while self.under_way:
            self._take(next(iter(self.under_way)))
        while self.tensors.copy_some():
            pass
        while self.leaving:
            self._finish_send()

    def _post(self) -> None:
        """Be ready for messages, as many as the window allows."""
        while self.posted < len(self.receives) and len(self.under_way) < self.window:
            number = self.receives[self.posted]
            step = self.program.steps[number]
            tensor, buffer = self.incoming(step)
            exchange = self.lane.comms.start_receive(
                self.message(step, tensor),
                self.lane.axis,
                op_id=message_id(self.lane.op_id, step.peer, self.program.rank, step.tag),
            )
            self.under_way[number] = (exchange, buffer)
            self.posted += 1

    def _take(self, number: int) -> None:
        """Wait for a message, unless it has come already."""
        if number not in self.under_way:
            return
        exchange, buffer = self.under_way[number]
        exchange.wait()
        del self.under_way[number]
        self.arrived(number, buffer)
        self._post()

    def _send(self, step: Step) -> None:
        for number in step.needs:
            self._take(number)
        while len(self.leaving) >= self.window:
            self._finish_send()
        tensor, buffer = self.outgoing(step)
        exchange = self.lane.comms.start_send(
            self.message(step, tensor),
            self.lane.axis,
            op_id=message_id(self.lane.op_id, self.program.rank, step.peer, step.tag),
        )
        self.leaving.append((step, exchange, buffer))

    def _finish_send(self) -> None:
        step, exchange, buffer = self.leaving.pop(0)
        exchange.wait()
        self.gone(step, buffer)


class _Batched(_Run):
    """Runs of the program posted together (`batches`)."""

    def all(self) -> None:
        self._connect()
        for first, last in batches(self.program, self.window if travels_together(self.lane.axis.size) else 0):
            self._batch(first, last)
            self.tensors.copy_some()
        while self.tensors.copy_some():
            pass

    def _connect(self) -> None:
        """A number on each way that is new, all at once, after one of all ranks of the axis, which makes the communicator if it is not there. A way is new to both of its ranks or to none, for
        both have the same messages in their programs; one that no message takes has no buffers (0.3 GB, `simulate/step/nccl.py`)."""
        lane, alone = self.lane, (True, self.lane.axis.index)
        if alone not in lane.connected:
            lane.comms.all_reduce(torch.zeros(1, device=lane.wire), lane.axis, op_id=f"{lane.op_id}.all")
            lane.connected.add(alone)
        new = sorted({(step.sends, self.peers[step.peer]) for step in self.program.steps} - lane.connected)
        each_N1 = torch.zeros(len(new), 1, device=lane.wire)
        ways = [(sends, Message(x_1, peer)) for (sends, peer), x_1 in zip(new, each_N1, strict=True)]
        sent, received = ([message for sends, message in ways if sends == way] for way in (True, False))
        lane.comms.start_exchange(sent, received, lane.axis, op_id=f"{lane.op_id}.peers").wait()
        lane.connected.update(new)

    def _batch(self, first: int, last: int) -> None:
        sends: list[Message] = []
        receives: list[Message] = []
        done: list[Callable[[], None]] = []
        for number in range(first, last):
            step = self.program.steps[number]
            tensor, buffer = self.outgoing(step) if step.sends else self.incoming(step)
            (sends if step.sends else receives).append(self.message(step, tensor))
            done.append(partial(self.gone, step, buffer) if step.sends else partial(self.arrived, number, buffer))
        exchange = self.lane.comms.start_exchange(sends, receives, self.lane.axis, op_id=f"{self.lane.op_id}.{first}")
        exchange.wait()
        for finish in done:
            finish()


def batches(program: RankProgram, window: int) -> list[tuple[int, int]]:
    """The runs, as first step and the one after the last: one ends where a message would carry what comes in it, at the second message one way with a rank, and where the window is full. With no
    window each message is alone: then the first one in the plan's order that has not come is what both of its ranks are at."""
    if not window:
        return [(number, number + 1) for number in range(len(program.steps))]
    runs, first = [], 0
    peers: tuple[set[int], set[int]] = set(), set()
    for number, step in enumerate(program.steps):
        mine = peers[step.sends]
        if len(mine) == min(window, TOGETHER) or step.peer in mine or any(need >= first for need in step.needs):
            runs.append((first, number))
            first = number
            for each in peers:
                each.clear()
        mine.add(step.peer)
    if first < len(program.steps):
        runs.append((first, len(program.steps)))
    return runs
