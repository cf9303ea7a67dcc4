"""The one place that moves tensors between ranks: names the axis, counts bytes, has a timeout, emits an event.

Decides nothing about who sends what: splits and sizes come from plans, identical on all ranks. A collective that fails or runs out
of time ends in a `RunError` that names the operation, the axis and its ranks. On an axis of size 1 every method is the identity
and sends nothing.

`sent_bytes` is what leaves this rank for others, own share excluded (folding reference, section 1.4):
all-to-all: the rows addressed to others; all-gather: own rows x (size - 1); reduce-scatter: all rows but the own share;
all-reduce: reduce-scatter and all-gather, `2 * bytes * (size - 1) / size`; broadcast: the root sends `bytes * (size - 1)`;
exchange, send: all messages sent; receive: nothing.

Whatever is only moved may be of any type: what a transport does not know (fp8 on gloo, which would lose the group over it) goes as bytes of the same memory.
Sums of such a type are refused; row sums, which are added up here, are taken in fp32 (`reduce_scatter_rows`).

The row collectives are differentiable: all-to-all <-> all-to-all with swapped splits, all-gather <-> reduce-scatter, whole tokens there <-> their sums back. Gradients are sums over the
ranks that received a copy, never means. Sums run in rank order, in fp32 for 16-bit types, so results are deterministic.

Shapes: M, N rows; `...` any trailing dims.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist

from phalanx.core.clock import ANCHOR_S
from phalanx.core.errors import PeerError, RunError
from phalanx.core.events import Collective, Emit, Event, Lane, Operation, ignore
from phalanx.runtime.comm.abortable import AbortableCall, run_abortable
from phalanx.runtime.comm.devices import complete
from phalanx.runtime.comm.exchange import (
    ALL_TO_ALL_TAG,
    Call,
    Checked,
    Counter,
    Exchange,
    Message,
    between_ranks,
    carried,
    check_own,
    check_splits_of,
    check_summed,
    named_errors,
    num_bytes,
    row_bytes,
)
from phalanx.runtime.comm.groups import DEFAULT_TIMEOUT_S, Axis
from phalanx.runtime.comm.lost import LostPeers
from phalanx.runtime.comm.pacing import Pace
from phalanx.runtime.comm.peers import gathered
from phalanx.runtime.comm.row_collectives import (
    AllGatherRows,
    AllReduceSum,
    AllToAllRows,
    ReduceScatterRows,
    RowExchange,
    RowsUnderWay,
    StartRows,
)
from phalanx.runtime.comm.sums import FEW, MessageSums, Passed
from phalanx.runtime.comm.tokens import TokenBuffers, TokensCame, TokenTrip, send_tokens
from phalanx.runtime.comm.waiting import LayerTimes

ReduceOp = Literal["sum", "max", "min"]
# torch 2.13 renamed these two and deprecates the old names
_all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_UNUSED_TAG = 2**31 - 1
"""Tag of a message that is never sent."""
_APART_TAG = 2**31 - 3
"""Tag of the messages of an all-to-all that may be under way beside another."""
_SUMS_TAG = 2**31 - 4
"""Tag of the parts of a sum that is taken here."""
T = TypeVar("T")
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class TwoPasses(Protocol):
    """Two passes of this rank that take turns (`runtime/moe/co_schedule.py`), as long as both run."""

    def axis(self, axis: Axis) -> Axis:
        """The axis with the groups of the pass that asks."""

    def away(self, axis: Axis) -> AbstractContextManager[None]:
        """Let the other pass continue while this one waits for a message over `axis` inside."""

    def offer(self) -> None:
        """Let the other pass have a turn, if it waits for one."""

    @property
    def failed(self) -> str:
        """What to say of a pass that has failed; empty while none has."""


class Collectives:
    """All data collectives of one rank.

    `counters` maps (op, axis name) to calls, bytes and time waited, `layers` has the times of each MoE layer's dispatch and combine (host
    only). With `trace` every collective emits `core.events.Collective`; its times bracket the wait on a CPU, and the launch only on an
    asynchronous device. With `check_splits` the ranks first exchange their row
    splits and raise on a mismatch, which otherwise lets gloo abort the process. `synchronous` hides nothing behind computing: an
    exchange is waited for where it starts (to measure what hiding it is worth).

    With `sums` everything that moves is checked (`runtime/comm/sums.py`). A sum over ranks then is an exchange of parts, a sum of what came here, in rank order, and a gather: of
    what a transport adds up on the way nothing could be said.
    """

    def __init__(
        self,
        *,
        emit: Emit = ignore,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        trace: bool = False,
        check_splits: bool = False,
        synchronous: bool = False,
        escape: AbortableCall | None = None,
        lost: LostPeers | None = None,
        sums: MessageSums | None = None,
        tokens: TokenBuffers | None = None,
    ) -> None:
        self.sums = sums
        self.tokens = tokens or TokenBuffers()
        self.timeout_s = timeout_s
        self.trace = trace
        self.check_splits = check_splits
        self.synchronous = synchronous
        self.escape = escape
        """In runs that survive the loss of ranks: ends waits for messages that would never end."""
        self.lost = lost
        """In other runs: ends the process there."""
        self.counters: dict[tuple[str, str], Counter] = {}
        self.layers = LayerTimes()
        self.doubts: list[torch.Tensor] = []
        """0-d bools on the device; where one of them is true the step must not be committed (`train/step/vote.py`). The host does not wait for them. An assertion on the device would end its work
        for good, also where a message was aborted and what came means nothing."""
        self.watch: Callable[[str, bool], None] | None = None
        """Called with the id of each collective when it is posted (True) and when the wait for it has ended."""
        self._is_helper_thread = False
        self.pace: Pace | None = None
        """Paced mode (`phalanx bench predict`): the duration of this rank's recorded operations."""
        self.beside: TwoPasses | None = None
        """While a pass of this rank runs beside another."""
        self.message_streams: Any = None
        """Where messages travel beside what a device computes, once they have (`runtime/moe/streams.py`)."""
        self.transfers: torch.cuda.Stream | None = None
        """`transfer_stream`, once it was asked for."""
        self._emit = emit
        self._kept: list[Event] = []

    # ---- whole tensors -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: torch.Tensor, axis: Axis, *, op: ReduceOp = "sum", op_id: str = "") -> torch.Tensor:
        """Reduce `x` in place over the axis and return it."""
        if axis.group is None:
            return x
        check_summed(x, axis, "all_reduce")
        if self.sums is not None:
            self._start_checked_sum(x, axis, op, op_id).wait()
            return x
        axis = self._own(axis)
        sent = 2 * num_bytes(x) * (axis.size - 1) // axis.size
        self._run(
            "all_reduce",
            axis,
            Call(op_id, sent, not x.is_cuda),
            lambda: dist.all_reduce(x, _REDUCE_OPS[op], group=axis.group, async_op=True),
        )
        return x

    def reduce_scatter(self, x_flat: torch.Tensor, axis: Axis, *, op_id: str = "") -> torch.Tensor:
        """Sum the flat buffer, which is overwritten, over the axis; return shard number `axis.index` of `axis.size` equal ones (a view of it, but where messages are checked)."""
        shard, exchange = self.start_reduce_scatter(x_flat, axis, op_id=op_id)
        exchange.wait()
        return shard

    def start_reduce_scatter(
        self, x_flat: torch.Tensor, axis: Axis, *, op_id: str = "", totals: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, Exchange]:
        """`reduce_scatter` that travels while the rank continues: neither buffer nor shard are to be touched before the exchange has been waited for. `totals`: the word
        sums of the shards, where messages are checked and they are known."""
        if axis.group is None:
            return x_flat, Exchange(lambda: None)
        check_summed(x_flat, axis, "reduce_scatter")
        if x_flat.numel() % axis.size:
            raise ValueError(
                f"reduce_scatter over {axis.name}: {x_flat.numel()} elements do not split into {axis.size}"
            )
        if self.sums is not None:
            return self._start_own_part(x_flat, axis, "sum", op_id, totals)
        axis, length = self._own(axis), x_flat.numel() // axis.size
        call = Call(op_id, num_bytes(x_flat) - num_bytes(x_flat) // axis.size, not x_flat.is_cuda)
        out = x_flat[axis.index * length : (axis.index + 1) * length]  # in place, as NCCL allows there alone
        if self.scatters(x_flat):
            launch = partial(_reduce_scatter_into, out, x_flat, group=axis.group, async_op=True)
        else:
            launch = partial(dist.all_reduce, x_flat, group=axis.group, async_op=True)
        return out, self._start("reduce_scatter", axis, call, launch)

    def scatters(self, x: torch.Tensor) -> bool:
        """Whether the transport of such tensors has a reduce-scatter of its own. gloo's is an all-reduce of a copy of the buffer (torch 2.13,
        `ProcessGroupGloo.cpp`), so that an all-reduce in place gives the same bits for half of the processor's time. Checked sums are ours."""
        return x.is_cuda or self.sums is not None

    def start_all_reduce(
        self, x: torch.Tensor, axis: Axis, *, op_id: str = "", totals: Sequence[int] | None = None
    ) -> Exchange:
        """The sum over the axis, in place, while the rank continues: `x` is not to be touched before the exchange has been waited for. `totals`: the word sums of its
        equal parts, one for each rank, where messages are checked and they are known."""
        if axis.group is None:
            return Exchange(lambda: None)
        check_summed(x, axis, "all_reduce")
        if self.sums is not None:
            return self._start_checked_sum(x, axis, "sum", op_id, totals)
        axis = self._own(axis)
        call = Call(op_id, 2 * num_bytes(x) * (axis.size - 1) // axis.size, not x.is_cuda)
        return self._start("all_reduce", axis, call, partial(dist.all_reduce, x, group=axis.group, async_op=True))

    def all_gather(
        self, shard: torch.Tensor, axis: Axis, *, out: torch.Tensor | None = None, op_id: str = ""
    ) -> torch.Tensor:
        """Concatenate equal shards along dim 0 in axis order (into `out`, if given)."""
        if axis.group is None:
            if out is None:
                return shard
            return out.copy_(shard) if out.data_ptr() != shard.data_ptr() else out
        if self.sums is not None and _few(shard):
            return self._gather_thrice(shard.contiguous(), axis, out, op_id, self.sums)
        axis, shard = self._own(axis), shard.contiguous()
        full = out if out is not None else shard.new_empty((shard.shape[0] * axis.size, *shard.shape[1:]))
        if full.numel() != shard.numel() * axis.size:
            raise ValueError(
                f"all_gather over {axis.name}: {full.numel()} elements cannot take {axis.size} x {shard.numel()}"
            )
        self._run(
            "all_gather",
            axis,
            Call(
                op_id,
                num_bytes(shard) * (axis.size - 1),
                not shard.is_cuda,
                checked=self._checked("all_gather", op_id, axis, [shard] * axis.size, full.chunk(axis.size)),
            ),
            lambda: _all_gather_into(carried(full), carried(shard), group=axis.group, async_op=True),
        )
        return full

    def broadcast(self, x: torch.Tensor, axis: Axis, *, root: int = 0, op_id: str = "") -> torch.Tensor:
        """Overwrite `x` with that of the rank at position `root` of the axis; returns it."""
        if axis.group is None:
            return x
        axis = self._own(axis)
        sent = num_bytes(x) * (axis.size - 1) if axis.index == root else 0
        source = axis.ranks[root]
        goes = [x if axis.index == root != i else None for i in range(axis.size)]
        comes = [x if i == root != axis.index else None for i in range(axis.size)]
        call = Call(op_id, sent, not x.is_cuda, checked=self._checked("broadcast", op_id, axis, goes, comes))
        self._run("broadcast", axis, call, lambda: dist.broadcast(carried(x), source, group=axis.group, async_op=True))
        return x

    def barrier(self, axis: Axis, *, op_id: str = "") -> None:
        """Wait for all ranks of the axis."""
        if axis.group is not None:
            axis = self._own(axis)
            self._run("barrier", axis, Call(op_id, 0), lambda: dist.barrier(group=axis.group, async_op=True))

    def gather_objects(self, value: Any, axis: Axis) -> list[Any]:
        """Every rank's `value`, in axis order. For small control data only (`core/messages.py` has its types); not counted."""
        if axis.group is None:
            return [value]
        axis = self._own(axis)
        assert axis.group is not None
        with named_errors("gather_objects", axis, self.timeout_s), self._away(axis):
            return self._until(partial(gathered, value, axis.group), axis, "")

    # ---- messages between ranks, under way while this rank computes -----------------------------------------------------

    def start_exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], axis: Axis, *, op_id: str = ""
    ) -> Exchange:
        """Post all messages and return while they travel; `Exchange.wait` takes them in.

        With `trace` the event spans the time from here to the end of that wait.
        """
        messages = [(dist.isend, m) for m in sends] + [(dist.irecv, m) for m in receives]
        if axis.group is None or not messages:
            if messages:
                raise ValueError(f"exchange over {axis.name}: an axis of one rank has no peer to exchange with")
            return Exchange(lambda: None)
        axis = self._own(axis)
        call = Call(
            op_id,
            sum(num_bytes(m.tensor) for m in sends),
            not messages[0][1].tensor.is_cuda,
            to=tuple(m.peer for m in sends),
            source=tuple(m.peer for m in receives),
            checked=self._checked_messages("exchange", op_id, axis, sends, receives),
        )
        begin_s = self._posted(call)
        ops = [dist.P2POp(op, carried(m.tensor), axis.ranks[m.peer], axis.group, m.tag) for op, m in messages]
        # a device's first message between two ranks waits here until the other one posts it
        with named_errors("exchange", axis, self.timeout_s, op_id), nullcontext() if call.on_host else self.waiting():
            works = dist.batch_isend_irecv(ops)

        def finish() -> None:
            there_s = wait_s = time.monotonic()
            with named_errors("exchange", axis, self.timeout_s, op_id):
                for work in works:
                    there_s = self._wait(work, call, axis)
            self._note("exchange", axis, call, begin_s, wait_s, there_s)

        exchange = Exchange(finish, again=None if call.on_host else lambda: self._order(works, call, axis))
        if self.synchronous:
            exchange.wait()
        return exchange

    def _order(self, works: Sequence[Any], call: Call, axis: Axis) -> None:
        for work in works:
            self._wait(work, call, axis)

    def transfer_stream(self, device: torch.device) -> torch.cuda.Stream:
        """Where messages between stages, and state that moves, travel beside passes. Always the same one: what was received is given back to its stream's memory."""
        if self.transfers is None:
            self.transfers = torch.cuda.Stream(device, priority=-1)  # of which NCCL takes few
        return self.transfers

    def break_off(self, axis: Axis) -> None:
        """Let whatever is under way over the axis's own group fail, on this rank and on those that wait for it. gloo only; the group is lost.

        There is no other way to end such a wait: gloo's waits end with their message, or with their group. One for a message that has partly gone ends with neither.
        """
        if axis.group is None:
            return
        peer = (axis.index + 1) % axis.size
        with suppress(RuntimeError):  # the error that ends all waits
            work = dist.irecv(torch.empty(1), axis.ranks[peer], axis.group, _UNUSED_TAG)
            assert work is not None  # this rank is in the group
            work.wait(timedelta(milliseconds=1))

    def apart(self) -> Collectives:
        """The same for another thread, with counters and events of its own until they are taken back by `absorb`."""
        kept: list[Event] = []
        other = Collectives(
            emit=kept.append,
            timeout_s=self.timeout_s,
            trace=self.trace,
            check_splits=self.check_splits,
            escape=self.escape,
            lost=self.lost,
            sums=self.sums,
        )
        other._kept, other._is_helper_thread = kept, True
        return other

    def absorb(self, other: Collectives) -> None:
        """Count and emit what `other` (of `apart`) has done, once its thread has ended."""
        for key, found in other.counters.items():
            counter = self.counters.setdefault(key, Counter())
            counter.calls += found.calls
            counter.sent_bytes += found.sent_bytes
            counter.waited_s += found.waited_s
        other.counters.clear()
        self.layers.absorb(other.layers)
        for event in other._kept:
            self._emit(event)
        other._kept.clear()

    # ---- events of what the rank does -----------------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[list[Event]]:
        """Trace what happens inside into the list, in memory: writing each event as it happens would be part of what is measured."""
        before, kept = (self.trace, self._emit), list[Event]()
        self.trace, self._emit = True, kept.append
        try:
            yield kept
        finally:
            self.trace, self._emit = before

    @contextmanager
    def doing(self, op_id: str, lane: Lane = "compute") -> Iterator[None]:
        """Records, with `trace`, that the rank did this from here to the end, however it ends: a run again stops by an error when it
        has enough."""
        if not self.trace:
            yield
            return
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self.did(op_id, lane, begin_s)

    def did(self, op_id: str, lane: Lane, begin_s: float) -> None:
        """Record an operation that ends now and began at `begin_s` of `time.monotonic`."""
        if self.pace is not None and lane == "compute":
            self.pace.hold(op_id, begin_s)
        elif self.pace is not None and lane == "wait":
            self.pace.waited(time.monotonic(), since_s=begin_s)
        end_s = ANCHOR_S + time.monotonic()
        self._emit(Operation(op_id=op_id, lane=lane, begin_s=ANCHOR_S + begin_s, end_s=end_s))

    def waiting(self) -> AbstractContextManager[None]:
        """The rank's own thread waits inside for others, or for a thread beside it that does (`runtime/comm/progress.py`)."""
        return nullcontext() if self.escape is None else self.escape.progress.waiting()

    @contextmanager
    def blocked(self, op_id: str, axis: Axis) -> Iterator[None]:
        """The rank waits inside for a thread that has the collectives of `apart`: time that nothing hides, as in a wait of its own."""
        begin_s = time.monotonic()
        with self.waiting():
            yield
        waited_s = time.monotonic() - begin_s
        self.counters.setdefault(("blocked", axis.name), Counter()).waited_s += waited_s
        self.layers.blocked(op_id, waited_s)
        if self.trace:
            self.did(op_id, "wait", begin_s)

    def start_send(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        """Post one message and return, also where the collectives are `synchronous`: its receiver may post later what we wait for."""
        axis = self._own(axis)
        sent, peer = num_bytes(message.tensor), axis.ranks[message.peer]
        launch = partial(dist.isend, carried(message.tensor), peer, axis.group, message.tag)
        call = Call(
            op_id,
            sent,
            not message.tensor.is_cuda,
            f"send to rank {peer}",
            to=(message.peer,),
            checked=self._checked_messages("send", op_id, axis, [message], ()),
        )
        return self._pending("send", axis, call, launch)

    def start_receive(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        """Be ready for one message and return, as `start_send` does."""
        axis = self._own(axis)
        peer = axis.ranks[message.peer]
        launch = partial(dist.irecv, carried(message.tensor), peer, axis.group, message.tag)
        call = Call(
            op_id,
            0,
            not message.tensor.is_cuda,
            f"receive from rank {peer}",
            source=(message.peer,),
            checked=self._checked_messages("send", op_id, axis, (), [message]),
        )
        return self._pending("receive", axis, call, launch)

    # ---- rows, uneven and differentiable -------------------------------------------------------------------------------

    def all_to_all_rows(
        self,
        x: torch.Tensor,
        *,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        axis: Axis,
        op_id: str = "",
    ) -> torch.Tensor:
        """Send `in_splits[j]` consecutive rows of `x` (M, ...) to rank j; receive `out_splits[i]` rows from rank i, in axis order."""
        check_splits_of(x, in_splits, axis, "all_to_all_rows")
        if axis.group is None:
            return x
        out: torch.Tensor = AllToAllRows.apply(x, self, axis, tuple(in_splits), tuple(out_splits), op_id)
        return out

    def start_all_to_all_rows(
        self,
        x: torch.Tensor,
        *,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        axis: Axis,
        op_id: str = "",
    ) -> RowsUnderWay:
        """`all_to_all_rows` that travels while the rank continues; `RowsUnderWay.wait` has its rows. `x` is not to be written before that.

        Differentiable: the backward pass posts the reverse exchange where it meets `wait`, and waits for it where it meets this call, so what
        autograd does in between (what was computed between the two, and whatever has been recorded later than this call) hides it.
        """
        check_splits_of(x, in_splits, axis, "start_all_to_all_rows")
        if axis.group is None:
            return RowsUnderWay(x)
        trip = RowExchange(self, axis, tuple(in_splits), tuple(out_splits), op_id)
        token: torch.Tensor = StartRows.apply(x, trip)
        return RowsUnderWay(token, trip)

    def all_gather_rows(self, x: torch.Tensor, *, sizes: Sequence[int], axis: Axis, op_id: str = "") -> torch.Tensor:
        """Concatenate the rows of all ranks; rank i contributes `sizes[i]`."""
        check_own(x, sizes, axis)
        if axis.group is None:
            return x
        out: torch.Tensor = AllGatherRows.apply(x, self, axis, tuple(sizes), op_id)
        return out

    def reduce_scatter_rows(
        self, x: torch.Tensor, *, sizes: Sequence[int], axis: Axis, op_id: str = ""
    ) -> torch.Tensor:
        """Sum `x` (sum of sizes, ...) over the ranks and return this rank's `sizes[index]` rows of the sum."""
        check_splits_of(x, sizes, axis, "reduce_scatter_rows")
        if axis.group is None:
            return x
        out: torch.Tensor = ReduceScatterRows.apply(x, self, axis, tuple(sizes), op_id)
        return out

    def all_reduce_sum(self, x: torch.Tensor, axis: Axis, *, op_id: str = "") -> torch.Tensor:
        """Sum of `x` over the axis, on all ranks, as a new tensor. Gradient: the sum of all ranks' gradients."""
        if axis.group is None:
            return x
        out: torch.Tensor = AllReduceSum.apply(x, self, axis, op_id)
        return out

    def dispatch_tokens(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        *,
        num_experts: int,
        axis: Axis,
        op_id: str = "",
        known: TokensCame | None = None,
    ) -> TokensCame:
        """Send each token, with its choices and their weights, once to every rank of the axis that has an expert of it, of `num_experts` in their order; `TokensCame.trip` sums
        them back. `known`: of a pass that runs again. Raises `ConfigError` where DeepEP is not there."""
        if known is None:
            buffer = self.tokens.of(self, axis, x_TH)
            trip = TokenTrip(self, buffer, axis, row_bytes=row_bytes(x_TH), on_host=not x_TH.is_cuda)
        else:
            trip = known.trip
        return send_tokens(trip, x_TH, weights_TK, experts_TK, num_experts=num_experts, op_id=op_id, known=known)

    def by_library(
        self, op: str, axis: Axis, op_id: str, launch: Callable[[], tuple[T, int]], *, on_host: bool, limit_s: float
    ) -> T:
        """What a library moves by itself: `launch` gives its result and the bytes that left. `limit_s`: how long the library waits for a rank."""
        begin_s = self._posted(Call(op_id, 0, on_host))
        with named_errors(op, axis, limit_s, op_id):
            found, sent_bytes = launch()
        self._note(op, axis, Call(op_id, sent_bytes, on_host), begin_s, begin_s, time.monotonic())
        return found

    # ---- the transport under the differentiable ones -------------------------------------------------------------------

    def _exchange(
        self,
        op: str,
        x: torch.Tensor,
        axis: Axis,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        op_id: str,
    ) -> torch.Tensor:
        out, exchange = self._start_exchange(op, x, axis, in_splits, out_splits, op_id)
        exchange.wait()
        return out

    def _start_exchange(
        self,
        op: str,
        x: torch.Tensor,
        axis: Axis,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        op_id: str,
        *,
        tag: int = ALL_TO_ALL_TAG,
    ) -> tuple[torch.Tensor, Exchange]:
        """`tag`: of the messages on a host; on a device they match by their order."""
        axis = self._own(axis)
        if self.check_splits:
            self._compare_splits(op, axis, in_splits, out_splits)
        out = x.new_empty((sum(out_splits), *x.shape[1:]))
        sent = (x.shape[0] - in_splits[axis.index]) * row_bytes(x)
        if x.is_cuda:
            launch: Callable[[], Any] = partial(
                dist.all_to_all_single,
                carried(out),
                carried(x),
                list(out_splits),
                list(in_splits),
                group=axis.group,
                async_op=True,
            )
        else:
            launch = partial(between_ranks, out, x, out_splits, in_splits, axis, tag=tag)
        checked = self._checked(op, op_id, axis, x.split(list(in_splits)), out.split(list(out_splits)))
        return out, self._start(op, axis, Call(op_id, sent, not x.is_cuda, checked=checked), launch)

    def gather_rows_raw(self, x: torch.Tensor, axis: Axis, sizes: Sequence[int], op_id: str) -> torch.Tensor:
        """`all_gather_rows` without autograd: even sizes as an all-gather, uneven ones as an all-to-all of repeated input.

        gloo has no uneven all-gather; padding to the largest size would send more bytes than repeating the input does.
        """
        x, axis = x.detach().contiguous(), self._own(axis)
        if len(set(sizes)) > 1:
            repeated = x.repeat(axis.size, *(1,) * (x.dim() - 1))
            return self._exchange("all_gather_rows", repeated, axis, [x.shape[0]] * axis.size, sizes, op_id)
        if self.check_splits:
            self._compare_splits("all_gather_rows", axis, [x.shape[0]] * axis.size, sizes)
        out = x.new_empty((sum(sizes), *x.shape[1:]))
        checked = self._checked("all_gather_rows", op_id, axis, [x] * axis.size, out.split(list(sizes)))
        self._run(
            "all_gather_rows",
            axis,
            Call(op_id, num_bytes(x) * (axis.size - 1), not x.is_cuda, checked=checked),
            lambda: _all_gather_into(carried(out), carried(x), group=axis.group, async_op=True),
        )
        return out

    def scatter_rows_raw(self, x: torch.Tensor, axis: Axis, sizes: Sequence[int], op_id: str) -> torch.Tensor:
        """`reduce_scatter_rows` without autograd: each rank receives its share from all and adds in rank order."""
        own = sizes[axis.index]
        parts = self._exchange("reduce_scatter_rows", x.detach().contiguous(), axis, sizes, [own] * axis.size, op_id)
        parts = parts.view(axis.size, own, *x.shape[1:])
        wide = torch.float32 if x.is_floating_point() and x.element_size() < 4 else x.dtype
        return parts.sum(0, dtype=wide).to(x.dtype)

    def all_to_all_raw(
        self, x: torch.Tensor, axis: Axis, in_splits: Sequence[int], out_splits: Sequence[int], op_id: str
    ) -> torch.Tensor:
        """`all_to_all_rows` without autograd."""
        return self._exchange("all_to_all_rows", x.detach().contiguous(), axis, in_splits, out_splits, op_id)

    def start_all_to_all_raw(
        self, x: torch.Tensor, axis: Axis, in_splits: Sequence[int], out_splits: Sequence[int], op_id: str
    ) -> tuple[torch.Tensor, Exchange]:
        """`start_all_to_all_rows` without autograd: the rows, not to be read before the exchange has been waited for."""
        x = x.detach().contiguous()
        check_splits_of(x, in_splits, axis, "start_all_to_all_rows")
        return self._start_exchange("all_to_all_rows", x, axis, in_splits, out_splits, op_id)

    def start_all_to_all_apart(
        self, x: torch.Tensor, axis: Axis, in_splits: Sequence[int], out_splits: Sequence[int], *, op_id: str = ""
    ) -> tuple[torch.Tensor, Exchange]:
        """`start_all_to_all_raw` in an order of its own: on the host such exchanges meet one another only, whatever rows travel over the
        axis in between (gradients leave when they are complete, which is not at the same place between the dispatches of all ranks). On a device `Groups.step_axis` sees to it."""
        x = x.detach().contiguous()
        check_splits_of(x, in_splits, axis, "all_to_all_rows")
        return self._start_exchange("all_to_all_rows", x, axis, in_splits, out_splits, op_id, tag=_APART_TAG)

    def _compare_splits(self, op: str, axis: Axis, in_splits: Sequence[int], out_splits: Sequence[int]) -> None:
        splits = self.gather_objects((tuple(in_splits), tuple(out_splits)), axis)
        for i, (sends, _) in enumerate(splits):
            for j, (_, receives) in enumerate(splits):
                if sends[j] != receives[i]:
                    raise RunError(
                        f"{op} over {axis.name} {axis.ranks}: rank {axis.ranks[i]} sends {sends[j]} rows to rank "
                        f"{axis.ranks[j]}, which expects {receives[i]}"
                    )

    # ---- what is checked -----------------------------------------------------------------------------------------------

    def _checked(
        self,
        op: str,
        op_id: str,
        axis: Axis,
        goes: Sequence[torch.Tensor | None],
        comes: Sequence[torch.Tensor | None],
        *,
        totals: Sequence[int] | None = None,
    ) -> Checked | None:
        """What each other rank of the axis gets from this one, and gives to it. `totals`: word sums of what goes, where they are known."""
        if self.sums is None:
            return None
        mine = axis.ranks[axis.index]

        def passed(each: Sequence[torch.Tensor | None], known: Sequence[int | None] | None) -> list[Passed]:
            others = zip(axis.ranks, each, [None] * axis.size if known is None else known, strict=True)
            return [Passed(r, x, n) for r, x, n in others if r != mine and x is not None and x.numel()]

        return Checked(f"{op} [{op_id}] over {axis.name}", passed(goes, totals), passed(comes, None))

    def _checked_messages(
        self, op: str, op_id: str, axis: Axis, sends: Sequence[Message], receives: Sequence[Message]
    ) -> Checked | None:
        if self.sums is None:
            return None
        goes, comes = ([Passed(axis.ranks[m.peer], m.tensor) for m in each] for each in (sends, receives))
        return Checked(f"{op} [{op_id}] over {axis.name}", goes, comes)

    def _gather_thrice(
        self, shard: torch.Tensor, axis: Axis, out: torch.Tensor | None, op_id: str, sums: MessageSums
    ) -> torch.Tensor:
        """`all_gather` of few whole numbers, of which two of three copies count."""
        axis, thrice = self._own(axis), shard.reshape(1, -1).repeat(3, 1)
        full = thrice.new_empty((axis.size * 3, thrice.shape[1]))
        call = Call(op_id, num_bytes(thrice) * (axis.size - 1), not shard.is_cuda)
        self._run("all_gather", axis, call, lambda: _all_gather_into(full, thrice, group=axis.group, async_op=True))
        found = sums.majority(full.view(axis.size, *thrice.shape)).reshape(-1, *shard.shape[1:])
        return found if out is None else out.copy_(found.view_as(out))

    def _start_checked_sum(
        self, x: torch.Tensor, axis: Axis, op: ReduceOp, op_id: str, totals: Sequence[int] | None = None
    ) -> Exchange:
        """An all-reduce in place of which everything that moves can be checked."""
        sums = self.sums
        assert sums is not None  # asked by the caller
        if _few(x):
            axis, thrice = self._own(axis), x.reshape(1, -1).repeat(3, 1)
            call = Call(op_id, 2 * num_bytes(thrice) * (axis.size - 1) // axis.size, not x.is_cuda)
            launch = partial(dist.all_reduce, thrice, _REDUCE_OPS[op], group=axis.group, async_op=True)
            exchange = self._start("all_reduce", axis, call, launch)

            def vote() -> None:
                exchange.wait()
                x.copy_(sums.majority(thrice).view_as(x))

            return Exchange(vote)
        part, coming = self._start_own_part(x.reshape(-1), axis, op, op_id, totals)

        def finish() -> None:
            coming.wait()
            if x.is_contiguous() and x.numel() == part.numel() * axis.size:
                self.all_gather(part, axis, out=x.view(-1), op_id=op_id)
            else:
                x.copy_(self.all_gather(part, axis, op_id=op_id)[: x.numel()].view_as(x))

        return Exchange(finish)

    def _start_own_part(
        self, x_flat: torch.Tensor, axis: Axis, op: ReduceOp, op_id: str, totals: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, Exchange]:
        """This rank's part of the sum of equal parts, in rank order, once the exchange has been waited for."""
        axis, size = self._own(axis), axis.size
        length = -(-x_flat.numel() // size)
        if length * size != x_flat.numel():
            x_flat = torch.cat([x_flat, x_flat.new_zeros(length * size - x_flat.numel())])
        parts, total, splits = x_flat.new_empty(size * length), x_flat.new_empty(length), [length] * size
        each, sums = (x_flat.split(length), parts.split(length)), self.sums
        checked = self._checked("reduce_scatter", op_id, axis, *each, totals=totals)
        assert checked is not None and sums is not None  # asked by the callers
        adds = op == "sum" and sums.adds(total)
        if x_flat.is_cuda:
            launch: Callable[[], Any] = partial(dist.all_to_all_single, parts, x_flat, group=axis.group, async_op=True)
        else:
            launch = partial(between_ranks, parts, x_flat, splits, splits, axis, tag=_SUMS_TAG, own=not adds)
        noted = replace(checked, comes=())  # what comes is summed as it is added
        call = Call(op_id, num_bytes(x_flat) // size * (size - 1), not x_flat.is_cuda, checked=noted)
        exchange = self._start("reduce_scatter", axis, call, launch)

        def finish() -> None:
            exchange.wait()
            each = parts.view(size, length)
            if adds:
                sums.add(checked.place, axis.ranks, each, x_flat.split(length)[axis.index], total)
                return
            sums.received(checked.place, checked.comes)
            if op == "sum":
                torch.sum(each, 0, out=total)
            else:
                (torch.amax if op == "max" else torch.amin)(each, 0, out=total)

        return total, Exchange(finish)

    # ---- posting and waiting -------------------------------------------------------------------------------------------

    def _start(self, op: str, axis: Axis, call: Call, launch: Callable[[], Any]) -> Exchange:
        """Launch now, wait when the exchange is waited for (at once, if `synchronous`)."""
        exchange = self._pending(op, axis, call, launch)
        if self.synchronous:
            exchange.wait()
        return exchange

    def _pending(self, op: str, axis: Axis, call: Call, launch: Callable[[], Any]) -> Exchange:
        begin_s = self._posted(call)
        with named_errors(call.words or op, axis, self.timeout_s, call.op_id):
            work = launch()
        if self.escape is not None and call.on_host:  # a device's do not block the host
            self.escape.begun(work, partial(work.wait, timedelta(seconds=self.timeout_s)))
        launch_s = time.monotonic() - begin_s  # it blocks the rank, as a wait does

        def finish() -> None:
            wait_s = time.monotonic() - launch_s
            if self.escape is not None:
                self.escape.ended(work)
            with named_errors(call.words or op, axis, self.timeout_s, call.op_id):
                there_s = self._wait(work, call, axis)
            self._note(op, axis, call, begin_s, wait_s, there_s)

        return Exchange(finish, poll=work.is_completed)

    def _run(self, op: str, axis: Axis, call: Call, launch: Callable[[], Any]) -> None:
        begin_s = self._posted(call)
        with named_errors(op, axis, self.timeout_s, call.op_id):
            there_s = self._wait(launch(), call, axis)
        self._note(op, axis, call, begin_s, begin_s, there_s)

    def complete(self, device: torch.device) -> None:
        """Completes what `device` has computed from messages, before it is used (`runtime/comm/devices.py`). Raises
        `PeerError`."""
        complete(device, None if self.escape is None else self.escape.aborted)

    def check_sound(self) -> None:
        """Raises `PeerError` where the generation was aborted: what the host has just read on a device may be anything."""
        if self.escape is not None and self.escape.aborted():
            raise PeerError("the process group was aborted while a message was under way; its contents are discarded")

    def _own(self, axis: Axis) -> Axis:
        """The axis with the groups of the pass that asks, where two run."""
        return axis if self.beside is None else self.beside.axis(axis)

    def _away(self, axis: Axis) -> AbstractContextManager[None]:
        """The other pass, where two run, continues while this one is inside."""
        return nullcontext() if self.beside is None else self.beside.away(axis)

    def offer_turn(self) -> None:
        """Let a co-scheduled pass continue, if what it waited for is there."""
        if self.beside is not None:
            self.beside.offer()

    def _wait(self, work: Any, call: Call, axis: Axis) -> float:
        """When it was there."""
        if (
            not call.on_host
        ):  # orders itself on the stream; a timeout here would make NCCL block the host, the group has its own
            work.wait()
            if self.escape is not None:
                self.escape.progress.handed_over(work)
            return time.monotonic()
        with self._away(axis):
            self._until(partial(work.wait, timedelta(seconds=self.timeout_s)), axis, call.op_id)
            return time.monotonic()

    def _until(self, wait: Callable[[], T], axis: Axis, op_id: str) -> T:
        if self.lost is not None:
            return self.lost.during(wait, axis, op_id)
        return run_abortable(self.escape, wait, left=partial(self._left, axis, op_id))

    def _left(self, axis: Axis, op_id: str) -> str:
        """Why a wait for messages over `axis` is given up; empty where it goes on."""
        failed = "" if self.beside is None else self.beside.failed
        return failed or ("" if self.escape is None or self.escape.asks is None else self.escape.asks(axis, op_id))

    def give_up(self, error: BaseException) -> None:
        """The rank's own thread waits in the middle of a message, and another of its threads has failed with `error`: a fixed run ends; in an elastic one the wait asks, and is given up."""
        if self.lost is not None:
            self.lost.end(error)

    def _posted(self, call: Call) -> float:
        """Now, on `time.monotonic`: the beginning of a collective."""
        if not call.on_host and self.escape is not None and self.escape.aborted():
            raise PeerError(
                "collective refused: connections are closed"
            )  # it would create a communicator, and hang in it
        begin_s = time.monotonic()
        if self.sums is not None and call.checked is not None:
            self.sums.sent(call.checked.place, call.checked.goes)
        if self.watch is not None:
            self.watch(call.op_id, True)
        if call.on_host:
            self.layers.posted(call.op_id, begin_s)
        return begin_s

    def _note(self, op: str, axis: Axis, call: Call, begin_s: float, wait_s: float, end_s: float) -> None:
        """Count a collective that is done, and emit its event. The wait for it, from `wait_s` to `end_s`, blocked the rank unless it is a thread's."""
        if self.watch is not None:
            self.watch(call.op_id, False)
        if self.sums is not None and call.checked is not None:
            self.sums.received(call.checked.place, call.checked.comes)
        waited_s = 0.0 if self._is_helper_thread else end_s - wait_s
        if self.pace is not None and not self._is_helper_thread:
            self.pace.waited(end_s, since_s=wait_s, held=wait_s == begin_s)
        key = (op, axis.name)
        counter = self.counters.get(key)
        if counter is None:
            counter = self.counters[key] = Counter()
        counter.calls += 1
        counter.sent_bytes += call.sent_bytes
        counter.waited_s += waited_s
        if call.on_host:
            self.layers.ended(call.op_id, end_s, waited_s)
        if self.trace:
            event = Collective(
                op_id=call.op_id,
                op=op,
                axis=axis.name,
                size=axis.size,
                sent_bytes=call.sent_bytes,
                begin_s=ANCHOR_S + begin_s,
                end_s=ANCHOR_S + end_s,
                waited_s=waited_s,
                aside=self._is_helper_thread,
                ranks=tuple(axis.ranks),
                sends_to=tuple(axis.ranks[i] for i in call.to),
                receives_from=tuple(axis.ranks[i] for i in call.source),
            )
            self._emit(event)


def _few(x: torch.Tensor) -> bool:
    """Whether these are whole numbers that travel three times."""
    return not x.is_floating_point() and x.dtype != torch.bool and x.numel() <= FEW
