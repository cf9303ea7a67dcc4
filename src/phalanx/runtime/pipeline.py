"""Carries out one rank's part of a pipeline plan: passes in their order, transfers between ranks under way beside them.

Decides nothing: what runs when, and who sends what to whom, is `plan.schedule_comm.PipelinePlan`'s; what a pass does is the caller's
(`Passes`): this file knows no model. One executor for all schedules, and for plans that only go forward.

    Run    wait for what the pass takes, run it, keep what it gives until it is sent or handed over
    Send   start the transfer. It is waited for later: at the end, or when more are open than the rank holds activations
    Recv   start to receive; the pass that takes it waits
    a transfer within the rank (the bottom of a V) is handed over in memory

Waiting for a transfer after its place in the plan's one order cannot deadlock, since the other side posts its end at that same place and waits
for earlier ones only. Transports that match messages by order alone (NCCL) get neighbouring transfers in one batch, as `batches` puts them.

Must never change: a transfer carries (T, H) rows of one shape, whatever the routing; every tensor is dropped as soon as the plan has no more use
for it.

Legend: T rows between stages on this rank, H hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from phalanx.core.errors import RunError
from phalanx.plan.schedule_comm import PipelinePlan, Recv, Run, Send, Transfer, batches
from phalanx.runtime.collectives import Collectives, Exchange, Message
from phalanx.runtime.groups import Axis

LEAST_OPEN = 4
"""Sends that may always be under way: a receiver that is a little late should not stop the sender."""


class Passes(Protocol):
    """The work of this rank's stages. Tensors that come in and go out carry no gradient graph."""

    def forward(self, stage: int, microbatch: int, x_TH: torch.Tensor | None) -> torch.Tensor | None:
        """The stage's output. `x_TH` is None on the first stage; what the last one returns is thrown away."""

    def backward(self, stage: int, microbatch: int, d_out_TH: torch.Tensor | None) -> torch.Tensor | None:
        """Gradients of weights and input; returns that of the input. `d_out_TH` is None on the last stage."""

    def input_gradient(self, stage: int, microbatch: int, d_out_TH: torch.Tensor | None) -> torch.Tensor | None:
        """As `backward`, but the gradients of weights may be put off until `weight_gradient`."""

    def weight_gradient(self, stage: int, microbatch: int) -> None:
        """What `input_gradient` put off."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """What travels between two stages, and between whom."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    axis: Axis
    comms: Collectives

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def run_pipeline(
    plan: PipelinePlan, passes: Passes, boundary: Boundary, *, name: Callable[[Transfer], str] = str
) -> None:
    """Run this rank's program of `plan` to its end. Collective over the pipeline axis; `name` gives the id of a transfer.

    Raises `PeerError`, naming the transfer, where another rank is gone or silent.
    """
    _Executor(plan, passes, boundary, name).run()


def agree_on(plan: PipelinePlan, *, axis: Axis, comms: Collectives) -> None:
    """Raise `RunError` on all ranks of a pipeline where their plans differ. Collective, once before the first step."""
    told = comms.gather_objects(plan.hash, axis)
    if len(set(told)) > 1:
        found = ", ".join(f"{value} on rank {rank}" for rank, value in zip(axis.ranks, told, strict=True))
        raise RunError(f"the ranks of a pipeline have different plans of {plan.schedule.name}: {found}")


class _Executor:
    def __init__(self, plan: PipelinePlan, passes: Passes, boundary: Boundary, name: Callable[[Transfer], str]) -> None:
        self.plan, self.passes, self.boundary, self.name = plan, passes, boundary, name
        rank = boundary.axis.index
        self.program = plan.programs[rank]
        self.most_open = max(LEAST_OPEN, plan.schedule.max_live[rank])
        self.ready: dict[Transfer, torch.Tensor] = {}
        """Made here and not yet sent or handed over."""
        self.coming: dict[Transfer, tuple[torch.Tensor, Exchange]] = {}
        self.going: deque[tuple[Exchange, list[Message]]] = deque()
        """With the messages, whose tensors must live until they are sent."""

    def run(self) -> None:
        for step in batches(self.program):
            if isinstance(step, Run):
                self._pass(step)
            elif self.boundary.device.type == "cpu":
                for op in step:
                    self._start([op])
            else:
                self._start(step)
        self._close(0)

    def _pass(self, run: Run) -> None:
        kind, stage, microbatch = run.action
        taken = None if run.takes is None else self._take(run.takes)
        made: torch.Tensor | None = None
        if kind == "F":
            made = self.passes.forward(stage, microbatch, taken)
        elif kind == "B":
            made = self.passes.backward(stage, microbatch, taken)
        elif kind == "I":
            made = self.passes.input_gradient(stage, microbatch, taken)
        else:
            self.passes.weight_gradient(stage, microbatch)
        if run.gives is not None:
            self.ready[run.gives] = self._checked(run, made)

    def _checked(self, run: Run, made: torch.Tensor | None) -> torch.Tensor:
        want = self.boundary
        if made is None or tuple(made.shape) != want.shape or made.dtype != want.dtype:
            found = "nothing" if made is None else f"{tuple(made.shape)} of {made.dtype}"
            raise ValueError(f"pass {run.action} made {found}; between stages are {want.shape} of {want.dtype}")
        return made.contiguous()

    def _take(self, transfer: Transfer) -> torch.Tensor:
        if transfer.is_local:
            return self.ready.pop(transfer)
        tensor, exchange = self.coming.pop(transfer)
        exchange.wait()
        return tensor

    def _start(self, ops: Sequence[Run | Send | Recv]) -> None:
        """Post neighbouring sends and receives at once."""
        sends: list[Message] = []
        receives: list[Message] = []
        names: list[str] = []
        arriving: list[tuple[Transfer, torch.Tensor]] = []
        for op in ops:
            assert not isinstance(op, Run)  # batches keeps them apart
            transfer = op.transfer
            tag = transfer.tag(self.plan.schedule.num_microbatches)
            names.append(self.name(transfer))
            if isinstance(op, Send):
                sends.append(Message(self.ready.pop(transfer), transfer.dst_rank, tag))
            else:
                arriving.append((transfer, self.boundary.empty()))
                receives.append(Message(arriving[-1][1], transfer.src_rank, tag))
        exchange = self.boundary.comms.start_exchange(sends, receives, self.boundary.axis, op_id=" ".join(names))
        for transfer, tensor in arriving:
            self.coming[transfer] = (tensor, exchange)
        if sends:
            self.going.append((exchange, sends))
            self._close(self.most_open)

    def _close(self, most_open: int) -> None:
        """Wait for the oldest sends until at most so many are open."""
        while len(self.going) > most_open:
            self.going[0][0].wait()
            self.going.popleft()
