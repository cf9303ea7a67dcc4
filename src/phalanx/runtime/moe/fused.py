"""One MoE layer on the kernels that wait on flags: `dispatch.overlap = "fused"`, forward and backward, by `kernels/triton/layer.py`.

Carries out, on each rank of an expert-parallel group whose devices reach each other's memory:

    counts      as every way (the one host synchronisation): how many rows come here, and how many tokens the ranks have
    told        which slots the entries want and what they weigh, one all-to-all of fixed size
    forward     entries are stored at their ranks, the first product begins as flags rise; the second is sent back block by block
    backward    the same with the gradient of the output and the weights transposed; gradients of weights are computed while results travel;
                those of the row weights go back in one all-to-all of fixed size

Forward and backward use the same entries, order and buffers; each is one call on the flags. Decides nothing: how the device is divided is `plan/moe/overlap/fused/launch.py`'s, the order of rows
`plan/moe/overlap/fused/device.py`'s. Its kernels have run on an H200; ranks of their own have not.

Must never change: all ranks of a group make the same calls in the same order; what is kept of the buffers is copied out before this rank's results leave, for then others may
begin the next call; of a call in which a flag was not raised in time the results are NaN and the vote of the step is vetoed (`FusedMemory.fault`), for who has no tokens has no NaN and
may have sent wrong rows. What it says comes to the host beside what is computed, and is read where the host waits anyway: in the next layer, and where a step is given up.

Legend: T tokens of this rank, K choices, H hidden, f expert width, e local slots, P ranks, C capacity, M rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.core.errors import ConfigError, PeerError, Problem, raise_if
from phalanx.kernels.ops.deferred import Target, target_of
from phalanx.kernels.ops.grouped_mm import can_group, products_of_groups, through_swiglu
from phalanx.kernels.ops.swiglu import swiglu
from phalanx.kernels.triton import (
    ArenaSpec,
    Arranged,
    ArrivalCounts,
    Arrivals,
    Division,
    LaunchShape,
    SendIndex,
    SymmetricMemory,
    begin,
    finish,
    fused_first,
    fused_second,
    pack_weights,
    route,
    row_weights,
    send,
    status_words,
    symmetric_arena,
)
from phalanx.plan.moe.overlap.fused import FusedLaunch, fused_launch
from phalanx.runtime.comm import Axis, Collectives, backward_id
from phalanx.runtime.moe.dispatch import Dispatcher, on_device
from phalanx.runtime.moe.experts import MoeCall

MakeArena = Callable[[ArenaSpec, Axis, torch.device], SymmetricMemory]


def device_arena(spec: ArenaSpec, axis: Axis, device: torch.device) -> SymmetricMemory:
    """Memory of the group's devices. Collective. Raises `RunError` on a device that cannot share it."""
    return symmetric_arena(spec, axis.group, device)


class FusedMemory:
    """The buffers that all layers of a rank share, one pair for each group, width and type. `left_free`: multiprocessors that carry rows (None: the plan's).

    `launch` and `make` stand in for a device (tests): how kernels are launched, and where ranks find each other's memory.
    """

    def __init__(
        self, *, left_free: int | None = None, launch: LaunchShape | None = None, make: MakeArena = device_arena
    ) -> None:
        self.left_free = left_free
        self._launch, self._make = launch, make
        self._arenas: dict[tuple[tuple[int, ...], int, torch.dtype], SymmetricMemory] = {}
        self._statuses: list[torch.Tensor] = []
        """Of all buffers that there were: passes under way still use one that was too small for the next."""
        self._side: torch.cuda.Stream | None = None
        self._reports: list[_Report] = []

    def of(
        self, axis: Axis, x_TH: torch.Tensor, *, capacity: int, slots: int, multiprocessors: int | None = None
    ) -> tuple[SymmetricMemory, LaunchShape]:
        """Buffers with room for `capacity` entries of each source, and how kernels are launched. Collective where they are new, or too small: all ranks ask with the same numbers.

        The host must have waited for the last call on them.
        """
        columns, key = x_TH.shape[1], (axis.ranks, x_TH.shape[1], x_TH.dtype)
        found = self._arenas.get(key)
        room = max(capacity, 0 if found is None else found.spec.capacity)
        if self._launch is not None:
            shape, cuts = self._launch, (1 if room < 2 else 2, 2)
        else:
            if multiprocessors is None:
                multiprocessors = torch.cuda.get_device_properties(x_TH.device).multi_processor_count
            plan = fused_launch(multiprocessors, left_free=self.left_free, capacity=room, columns=columns)
            shape, cuts = _shape(plan), (plan.parts, plan.blocks)
        if found is None or found.spec.capacity < capacity:
            spec = ArenaSpec(
                ranks=axis.size, capacity=room, columns=columns, dtype=x_TH.dtype, parts=cuts[0], blocks=cuts[1]
            )
            found = self._arenas[key] = self._make(spec, axis, x_TH.device)
            self._statuses.append(found.status_2)
        return found, replace(shape, slots_per_rank=slots)

    def report(self, arena: SymmetricMemory, place: str) -> None:
        """Let what kernels say of the call that ends here set out for the host."""
        if not arena.status_2.is_cuda:
            self._reports.append(_Report(place, arena.status_2.clone()))
            return
        there = arena.status_2.to("cpu", non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self._reports.append(_Report(place, there, done))

    def failures(self) -> list[str]:
        """What the calls say that are known to be over, of the first that failed: the host has waited for something behind them. It does not wait here."""
        while self._reports and (self._reports[0].done is None or self._reports[0].done.query()):
            report = self._reports.pop(0)
            words = status_words(report.status_2.tolist())
            if words:
                self._reports.clear()  # those behind it say the same
                return [f"{report.place}: {word}" for word in words]
        return []

    def fault(self) -> torch.Tensor | None:
        """() fp32 on the device: NaN where a kernel of this rank gave up, else 0; None where there is no buffer."""
        if not self._statuses:
            return None
        gave_up = torch.stack(self._statuses).any()
        return torch.zeros((), device=gave_up.device).masked_fill_(gave_up, float("nan"))

    @contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Runs what is launched inside, on a device, beside what is launched after, on the multiprocessors that this leaves; on a
        host it has been run by then."""
        if device.type != "cuda":
            yield
            return
        if self._side is None:
            self._side = torch.cuda.Stream(device)
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """What comes next comes behind what runs beside."""
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)


@dataclass(frozen=True, eq=False)
class _Report:
    """What kernels say of a call. `done`: when it is on the host, None: it is."""

    place: str
    status_2: torch.Tensor
    done: torch.cuda.Event | None = None


def _shape(plan: FusedLaunch) -> LaunchShape:
    return LaunchShape(
        slots_per_rank=1,
        division=Division(programs=plan.second, senders=plan.senders),
        first_programs=plan.first,
        send_programs=plan.send,
    )


@dataclass(eq=False)
class _Call:
    """One layer and batch, for both directions."""

    arena: SymmetricMemory
    shape: LaunchShape
    to: SendIndex
    told: ArrivalCounts
    order: Arranged
    rows: int
    counts: tuple[int, ...]
    """Rows of each slot here."""
    memory: FusedMemory
    comms: Collectives
    axis: Axis
    prefix: str
    recompute: bool
    later: Target | None


def run_fused(call: MoeCall, *, dispatcher: Dispatcher, memory: FusedMemory) -> tuple[torch.Tensor, torch.Tensor]:
    """What `run_experts` computes, and the number of dropped pairs. Collective over `ep`. Raises `ConfigError` where an expert is cut (etp) or has replicas,
    `PeerError` where a flag was not raised in time in an earlier call."""
    problems = fused_problems(dispatcher)
    raise_if(problems, ConfigError, subject="the overlap of a MoE layer")
    comms, axis = dispatcher.comms, dispatcher.ep
    x_TH, weights_TK, experts_TK, op_prefix = call.x_TH, call.weights_TK, call.experts_TK, call.op_prefix
    kept_TK = call.kept_TK(dispatcher)
    tokens = on_device(x_TH.shape[0], x_TH.device).view(1)
    begun = dispatcher.begin_list(experts_TK, kept_TK, op_prefix, told=tokens, known=call.known, counts_E=call.counts_E)
    plan, sent, of_all = dispatcher.finish_list(begun)
    counts = plan.slot_counts(ep=axis.index)
    arena, shape = memory.of(axis, x_TH, capacity=max(1, int(of_all.max())), slots=len(counts))
    _raise_failures(memory)
    slots_TK = experts_TK if kept_TK is None else torch.where(kept_TK, experts_TK, -1)
    to = route(slots_TK.to(torch.int32), shape=shape, spec=arena.spec)
    told = _tell(to, pack_weights(weights_TK.detach(), to), comms, axis, op_prefix + "dispatch.weights")
    rows = sum(counts)
    order = begin(told, arena, shape=shape, max_rows=max(1, rows))
    w13, w2 = call.experts.w13_e2fH, call.experts.w2_eHf
    hidden = target_of([w13, w2], x_TH, call.later)
    if hidden is not None:
        w13, w2 = w13.detach(), w2.detach()
    launched = _Call(
        arena, shape, to, told, order, rows, counts, memory, comms, axis, op_prefix, call.recompute, hidden
    )
    y_TH: torch.Tensor = _Fused.apply(x_TH, weights_TK, w13, w2, launched)
    return call.with_shared(y_TH), sent.dropped


def _raise_failures(memory: FusedMemory) -> None:
    """Raises `PeerError` where a call that is over has waited for another rank in vain, with its layer."""
    failures = memory.failures()
    if failures:
        raise PeerError("fused MoE layer: " + "; ".join(failures))


def fused_problems(dispatcher: Dispatcher, hosts: Sequence[int] | None = None) -> list[Problem]:
    """Why the kernels cannot carry a dispatcher's layer. `hosts` of the ranks of the group, where they are known."""
    problems = []

    def wrong(rule: str, hint: str) -> None:
        problems.append(Problem(where="dispatch.overlap", value="fused", rule=rule, hint=hint))

    if dispatcher.etp.size > 1:
        wrong("computes whole experts, and folding.etp cuts them", "folding.etp = 1, or fine")
    if not dispatcher.is_plain:
        wrong("needs one slot for each expert, in their order", "leave resilience.slots_per_rank out, or serial")
    if hosts is not None and len(set(hosts)) > 1:
        rule = f"stores rows in the memory of other devices, and the ranks {dispatcher.ep.ranks} of this expert-parallel group are on {len(set(hosts))} hosts"
        wrong(rule, "folding.ep up to the devices of a host, or fine")
    return problems


def _tell(to: SendIndex, weights_PCK: torch.Tensor, comms: Collectives, axis: Axis, op_id: str) -> ArrivalCounts:
    """What each rank must know of the entries that come to it: as many places from each source as there is room for."""
    ranks, capacity, top_k = to.slots_PCK.shape
    mine = torch.cat([to.slots_PCK, weights_PCK.view(torch.int32)], 2).flatten(0, 1)
    splits = (capacity,) * ranks
    come = comms.all_to_all_raw(mine, axis, splits, splits, op_id).view(ranks, capacity, 2 * top_k)
    slots_PCK, weights = come.split(top_k, dim=2)
    counts_P = (slots_PCK[:, :, 0] >= 0).sum(1, dtype=torch.int32)
    return ArrivalCounts(slots_PCK.contiguous(), weights.contiguous().view(torch.float32), counts_P)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        w13_e2fH: torch.Tensor,
        w2_eHf: torch.Tensor,
        call: _Call,
    ) -> torch.Tensor:
        with call.comms.doing(call.prefix + "experts"):
            gate_up = _travel_and_multiply(x_TH.detach(), w13_e2fH.flatten(1, 2), call)
            x_MH = _received(call) if any(ctx.needs_input_grad) else x_TH.new_empty(0)
            h_Mf = swiglu(gate_up.unflatten(1, (2, -1)), row_weights_M=row_weights(call.told, call.order))
            _send_back(h_Mf, w2_eHf, call)
            y_TH = _finish(call, call.prefix + "experts")
        ctx.call, ctx.weights_like, ctx.weights_dtype = call, weights_TK.shape, weights_TK.dtype
        ctx.save_for_backward(w13_e2fH, w2_eHf, x_MH, *([] if call.recompute else [gate_up]))
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        w13_e2fH, w2_eHf, x_MH, *kept = ctx.saved_tensors
        call: _Call = ctx.call
        with call.comms.doing(backward_id(call.prefix + "experts")):
            d_h_Mf = _travel_and_multiply(dy_TH.contiguous(), w2_eHf.transpose(1, 2), call)[: call.rows]
            dy_MH = _received(call)
            gate_up = kept[0] if kept else _again(x_MH, w13_e2fH.flatten(1, 2), call)
            weights_M = row_weights(call.told, call.order)[: call.rows]
            h_Mf, d_gate_up_Mf, dots_M = through_swiglu(gate_up[: call.rows], weights_M, d_h_Mf, in_place=not kept)
            assert dots_M is not None  # weights were given
            _send_back(d_gate_up_Mf, w13_e2fH.flatten(1, 2).transpose(1, 2), call)

            def of_weights() -> tuple[torch.Tensor, torch.Tensor]:
                d_w13 = _by_slot(d_gate_up_Mf, x_MH, call.counts).view(w13_e2fH.shape)
                return d_w13, _by_slot(dy_MH, h_Mf, call.counts)

            grads: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
            if call.later is not None:
                call.later.put(of_weights)
            elif ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
                grads = of_weights()  # while results travel
            d_weights = (
                _weights_back(dots_M, ctx.weights_like, call).to(ctx.weights_dtype) if ctx.needs_input_grad[1] else None
            )
            dx_TH = _finish(call, backward_id(call.prefix + "experts"))
        return dx_TH, d_weights, *grads, None


def _travel_and_multiply(x_TH: torch.Tensor, w_eNH: torch.Tensor, call: _Call) -> torch.Tensor:
    """(M, N): entries leave, and the product of those that come."""
    arena, shape = call.arena, call.shape
    arena.next_call()
    with call.memory.beside(x_TH.device):
        send(x_TH, call.to, arena, shape=shape)
    _meet(call)
    arrivals = Arrivals(arena.arrived_F, arena.epoch_1, arena.status_2)
    out = fused_first(
        arena.received_PCH.flatten(0, 1), w_eNH, call.order, arrivals,
        programs=shape.first_programs, tile=shape.first, patience=shape.patience, impl=shape.impl,
    )  # fmt: skip
    call.memory.join()
    return out


def _received(call: _Call) -> torch.Tensor:
    """(M, H) a copy of the rows that have come, in the order of the slots. Before results leave: then others may write here again."""
    return call.arena.received_PCH.flatten(0, 1).index_select(0, call.order.entry_of_row_M[: call.rows].long())


def _again(x_MH: torch.Tensor, w_eNH: torch.Tensor, call: _Call) -> torch.Tensor:
    """The first product of the forward pass from the rows that were kept."""
    arena, shape, order = call.arena, call.shape, call.order
    if not call.rows:
        return x_MH.new_empty(0, w_eNH.shape[1])
    as_they_lie = torch.arange(len(order.entry_of_row_M), dtype=torch.int32, device=x_MH.device)
    return fused_first(
        x_MH, w_eNH, replace(order, entry_of_row_M=as_they_lie), Arrivals(arena.arrived_F, arena.epoch_1, arena.status_2),
        programs=shape.division.programs, tile=shape.first, wait=False, impl=shape.impl,
    )  # fmt: skip


def _send_back(h_Mf: torch.Tensor, w_eHf: torch.Tensor, call: _Call) -> None:
    shape = call.shape
    if not len(h_Mf):  # nothing came, and flags must rise all the same
        h_Mf = h_Mf.new_zeros(1, h_Mf.shape[1])
    fused_second(
        h_Mf, w_eHf, call.order, call.told.counts_P, call.arena,
        division=shape.division, tile=shape.second, shape=shape.send, patience=shape.patience, impl=shape.impl,
    )  # fmt: skip


def _finish(call: _Call, place: str) -> torch.Tensor:
    """(T, H) sums over the ranks; NaN where a flag was not raised in time."""
    _meet(call)
    out_TH = finish(call.to, call.arena, shape=call.shape)
    out_TH.masked_fill_(call.arena.status_2.any(), float("nan"))
    call.memory.report(call.arena, place)
    return out_TH


def _meet(call: _Call) -> None:
    """Plain versions look at a flag once, so ranks wait for each other where kernels would wait for flags."""
    if call.shape.impl == "reference":
        call.comms.barrier(call.axis)


def _weights_back(dots_M: torch.Tensor, like: torch.Size, call: _Call) -> torch.Tensor:
    """Gradients of the row weights, at the tokens that they belong to."""
    to, row_PCK = call.to, call.order.row_of_copy_PCK
    ranks, capacity, _ = row_PCK.shape
    dots = torch.cat([dots_M, dots_M.new_zeros(1)])  # the last one: of places where there is no copy
    mine = dots[torch.where(row_PCK >= 0, row_PCK, call.rows).long()].flatten(0, 1)
    splits, at = (capacity,) * ranks, backward_id(call.prefix + "dispatch.weights")
    come_PCK = call.comms.all_to_all_raw(mine, call.axis, splits, splits, at).view(row_PCK.shape)
    pair_PCK = to.token_of_entry_PC.unsqueeze(2) * like[1] + to.choice_PCK
    num_pairs = like.numel()
    place = torch.where(to.choice_PCK >= 0, pair_PCK, num_pairs).long()
    out = come_PCK.new_zeros(num_pairs + 1).scatter_(0, place.flatten(), come_PCK.flatten())
    return out[:num_pairs].view(like)


def _by_slot(a_MN: torch.Tensor, b_MK: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """(e, N, K) `a.T @ b` over each slot's rows."""
    if a_MN.is_cuda and can_group(a_MN, b_MK):
        return products_of_groups(a_MN, b_MK, counts)
    rows = zip(a_MN.split(list(counts)), b_MK.split(list(counts)), strict=True)
    return torch.stack([a.T @ b for a, b in rows])
