"""One MoE layer in which rows travel while others are computed: carries out the operations of `plan/moe/overlap/tiles/types.py`, forward and backward.

Decides nothing: order, parts and blocks are the plan's. Three autograd functions, so that other work can stand in the gaps between them:

    _Depart   entries leave for the ranks of their experts           backward: gradients of the tokens arrive and are added up
    _Work     tiles are computed as entries arrive, sums go back     backward: the same with the gradients, then those of the weights
    _Arrive   partial sums arrive and are added up                   backward: gradients of the output leave

Messages go from rank to rank, to every rank of `ep_etp` that holds (a slice of) a slot: with etp the owner of a token adds the parts of all
slices. Must never change: receives are posted before anything is computed, sizes follow from numbers that both sides have, and all sums have the
order of slots, then of ranks. Results are the same bits for all schedules.

On a device messages travel on a stream of their own, in rounds that all ranks post in one order (`overlap_streams.py`); on a host each is posted by itself.

Legend: T tokens of this rank, K experts of a token, H hidden, e local slots, n rows of one source, N entries, P ranks of ep_etp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch

from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.tiles import Geometry, SourceRows, TilePlace, TileProducts, block_units, column_units
from phalanx.kernels.ops.deferred import target_of
from phalanx.plan.moe import DispatchPlan
from phalanx.plan.moe.overlap.prediction import WireBytes, choose_transport, wire_bytes
from phalanx.plan.moe.overlap.tiles import (
    MessageEnd,
    RankPlan,
    TileOp,
    TileSchedule,
    backward_of,
    joint_slots,
    plan_overlap,
    slot_orders,
    tiles_of,
)
from phalanx.runtime.comm import Exchange, backward_id
from phalanx.runtime.moe.dispatch import Dispatcher, SendList
from phalanx.runtime.moe.experts import MoeCall
from phalanx.runtime.moe.overlap_exchange import ExchangePath, InFlightExchange
from phalanx.runtime.moe.overlap_hosts import Gateways
from phalanx.runtime.moe.overlap_lists import (
    Outgoing,
    outgoing,
    part_rows,
    tile_order,
)
from phalanx.runtime.moe.overlap_pacing import TilePace
from phalanx.runtime.moe.overlap_transport import count_copies, routes, traffic_told, usable_hosts
from phalanx.runtime.moe.streams import leaving_free, message_streams_of

Choose = Callable[[DispatchPlan, WireBytes], TileSchedule]
TILE_ROWS = 512
"""Most rows of a tile: a product of this many rows is as fast as larger ones."""


def run_overlapped(
    call: MoeCall,
    *,
    dispatcher: Dispatcher,
    schedule: TileSchedule | Choose,
    per_token: bool | None = None,
    lanes: Lanes,
    host_of_rank: Sequence[int] | None = None,
    through_hosts: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `run_experts` computes, by a schedule. Collective over `ep_etp`, which all must call with equal `schedule` and `per_token`.

    `schedule` may be a function of the batch's counts. `per_token`: a token goes to a rank once, whatever the number of its experts there; else once for
    each; None: whatever sends fewer bytes. `host_of_rank`: by position in `ep_etp`, where it is known which ranks share a host. `through_hosts`: a token goes to each
    other host once, and is passed on there; None: where that sends fewer bytes between hosts. `call.beside` is computed while entries travel, and its result added to that of the experts.
    """
    x_TH, weights_TK = call.x_TH, call.weights_TK
    streams = message_streams_of(dispatcher.comms, x_TH.device)
    known = host_of_rank if streams is None else None  # rounds have no gateways
    hosts = usable_hosts(dispatcher, known, forced=bool(through_hosts), per_token=per_token)
    batch = _plan_batch(
        call, dispatcher, schedule, hosts=hosts, per_token=per_token, through_hosts=through_hosts if hosts else False
    )
    flight = _exchange_of(call, dispatcher, batch)
    flight.streams = streams
    flight.exchange_meta(weights_TK.detach(), x_TH.dtype)
    w13, w2 = call.experts.w13_e2fH, call.experts.w2_eHf
    flight.later = target_of([w13, w2], x_TH, call.later)
    flight.lanes, flight.recompute = lanes, call.recompute
    ticket = _Depart.apply(x_TH, weights_TK, flight)
    extra = None if call.beside is None else call.beside()
    if flight.later is not None:
        w13, w2 = w13.detach(), w2.detach()
    ticket = _Work.apply(ticket, x_TH.detach(), w13, w2, flight)
    y_TH: torch.Tensor = _Arrive.apply(ticket, flight)
    return y_TH if extra is None else y_TH + extra, batch.send.dropped


@dataclass(frozen=True, eq=False)
class _Batch:
    """How one batch goes through a layer: who sends which rows, by which route, in which order."""

    plan: DispatchPlan
    send: SendList
    schedule: TileSchedule
    forward: RankPlan
    per_token: bool


def _plan_batch(
    call: MoeCall,
    dispatcher: Dispatcher,
    schedule: TileSchedule | Choose,
    *,
    hosts: tuple[int, ...],
    per_token: bool | None,
    through_hosts: bool | None,
) -> _Batch:
    """Collective over `ep_etp`. `hosts`: by position there, empty where nothing can go through them."""
    experts_TK, row_bytes = call.experts_TK, call.x_TH.shape[1] * call.x_TH.element_size()
    kept_TK = call.kept_TK(dispatcher)
    copies = count_copies(dispatcher, experts_TK, kept_TK, hosts) if dispatcher.is_plain else None
    begun = dispatcher.begin_list(
        experts_TK, kept_TK, call.op_prefix, told=copies, known=call.known, counts_E=call.counts_E
    )
    plan, send, told = dispatcher.finish_list(begun)
    traffic = traffic_told(dispatcher, plan, told if copies is not None else None, hosts)
    among = routes(per_token, through_hosts, counted=copies is not None)
    route = choose_transport(traffic, row_bytes=row_bytes, among=among).route
    if not isinstance(schedule, TileSchedule):
        schedule = schedule(plan, wire_bytes(traffic, route, row_bytes=row_bytes))
    schedule = replace(schedule, blocks=min(schedule.blocks, column_units(call.x_TH.shape[1])))
    forward = plan_overlap(
        plan,
        schedule,
        rank=dispatcher.ep_etp.index,
        tile_rows=TILE_ROWS,
        direction="forward",
        host_of_rank=hosts or None,
        through_hosts=route == "dedup_host",
        has_shared=call.beside is not None,
    )
    return _Batch(plan, send, schedule, forward, per_token=route != "all_to_all")


def _exchange_of(call: MoeCall, dispatcher: Dispatcher, batch: _Batch) -> InFlightExchange:
    """Nothing of it is under way yet."""
    plan, forward, num_tokens = batch.plan, batch.forward, len(call.x_TH)
    joint = [] if forward.hosts else joint_slots(plan, tile_rows=TILE_ROWS)
    orders = slot_orders(plan, batch.schedule, joint=joint)
    outs = _outgoing(
        dispatcher, plan, forward, batch.send.pair_of_row_R,
        orders=orders, num_tokens=num_tokens, per_token=batch.per_token,
    )  # fmt: skip
    ways = Gateways(forward, plan, outs, top_k=dispatcher.top_k, tile_rows=TILE_ROWS) if forward.hosts else None
    return InFlightExchange(
        dispatcher,
        forward,
        outs,
        call.op_prefix,
        num_tokens=num_tokens,
        per_token=batch.per_token,
        has_order=any(order is not None for order in orders),
        ways=ways,
    )


def _outgoing(
    dispatcher: Dispatcher,
    dispatch: DispatchPlan,
    plan: RankPlan,
    pairs_R: torch.Tensor,
    *,
    orders: Sequence[Sequence[int] | None],
    num_tokens: int,
    per_token: bool,
) -> list[Outgoing]:
    """Tiles that go out, by rank of the group; ranks with slices of the same slots get the same."""
    rows_G = dispatch.rows_PG[plan.rank]
    per_rank = len(rows_G) // dispatcher.ep.size
    lists: list[tuple[torch.Tensor, Sequence[int], torch.Tensor | None]] = []
    at = 0
    for ep in range(dispatcher.ep.size):
        rows_e = [int(n) for n in rows_G[ep * per_rank : (ep + 1) * per_rank]]
        tiles = tiles_of(rows_e, source=plan.rank, tile_rows=TILE_ROWS, slots=orders[ep])
        rows_to = part_rows(tiles, plan.peer_part_ends[ep * dispatcher.etp.size])
        order = tile_order(tiles, pairs_R.device)
        lists.append((pairs_R[at : at + sum(rows_e)], rows_to, order))
        at += sum(rows_e)
    found = outgoing(lists, dispatcher.top_k, num_tokens=num_tokens, per_token=per_token)
    return [one for one in found for _ in range(dispatcher.etp.size)]


def _told(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Tell a trace what a function of autograd does: under `name` forward, under that of its gradient backward. Products inside leave to messages what they are to."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(ctx: Any, *args: Any) -> Any:
            forward = isinstance(args[-1], InFlightExchange)
            flight: InFlightExchange = args[-1] if forward else ctx.flight
            id = flight.prefix + name
            with flight.comms.doing(id if forward else backward_id(id)), leaving_free(flight.left_free):
                return function(ctx, *args)

        return call

    return around


class _Depart(torch.autograd.Function):
    @staticmethod
    @_told("dispatch.permute")
    def forward(ctx: Any, x_TH: torch.Tensor, weights_TK: torch.Tensor, flight: InFlightExchange) -> torch.Tensor:
        ctx.flight, ctx.weights_like = flight, (weights_TK.shape, weights_TK.dtype)
        hidden = x_TH.shape[1]
        units = block_units(hidden, flight.plan.blocks)
        flight.columns = [len(of_block) * hidden // column_units(hidden) for of_block in units]
        flight.way = flight.depart(x_TH.detach(), flight.plan, flight.columns)
        return x_TH.new_zeros(1)

    @staticmethod
    @_told("dispatch.permute")
    def backward(ctx: Any, ticket: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flight, way = ctx.flight, ctx.flight.under_way
        dx_TH = flight.arrive(way)
        d_weights = None
        if ctx.needs_input_grad[1]:
            d_weights_N = dx_TH.new_zeros(ctx.weights_like[0].numel(), dtype=ctx.weights_like[1])
            for peer in range(flight.axis.size):
                pairs = flight.outs[peer].pairs
                if peer == flight.own:
                    dots = way.own_dots
                elif peer in way.dots:
                    dots, exchange = way.dots[peer]
                    exchange.wait()
                else:
                    continue
                d_weights_N[pairs] += dots.to(d_weights_N.dtype)
            d_weights = d_weights_N.view(ctx.weights_like[0])
        flight.close(way)
        flight.way = None
        return dx_TH, d_weights, None


class _Work(torch.autograd.Function):
    @staticmethod
    @_told("experts")
    def forward(
        ctx: Any,
        ticket: torch.Tensor,
        x_TH: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        flight: InFlightExchange,
    ) -> torch.Tensor:
        way = flight.under_way
        geometry = Geometry(flight.plan.tiles, flight.slots, x_TH.dtype, joint_tiles=flight.plan.joint_tiles)
        flight.place_rows(geometry)
        work = TileProducts(geometry, w13, w2, flight.lanes, weights_P1=flight.weights_P1)
        work.open_forward(flight.plan.blocks)
        rows = [SourceRows(*two) for two in zip(way.entries, flight.index, strict=True)]
        pace = TilePace(flight.comms, flight.prefix + "experts", way.plan)
        for op in way.plan.ops:
            if op.kind == "wait":
                _wait(way.arriving.pop((op.peer, op.part), None))
            elif op.kind in ("first", "first_all"):
                work.first(_places(geometry, way.plan, op), rows)
            elif op.kind in ("second", "second_all"):
                work.second(_places(geometry, way.plan, op), op.block)
            elif op.kind == "return":
                flight.give_back(way, op, work.out_b[op.block])
            elif op.kind in ("relay", "merge"):
                flight.pass_on(way, op)
            pace.done(op)
        kept = [] if flight.recompute else work.gate_up_e
        ctx.flight, ctx.geometry, ctx.num_kept = flight, geometry, len(kept)
        ctx.save_for_backward(w13, w2, *kept, *way.entries)
        return ticket.clone()

    @staticmethod
    @_told("experts")
    def backward(ctx: Any, ticket: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        w13, w2, *rest = ctx.saved_tensors
        gate_up_e, entries = rest[: ctx.num_kept], rest[ctx.num_kept :]
        flight, way, geometry = ctx.flight, ctx.flight.under_way, ctx.geometry
        work = TileProducts(geometry, w13, w2, flight.lanes, weights_P1=flight.weights_P1)
        work.open_backward(way.plan.blocks, gate_up_e)
        rows = [SourceRows(*two) for two in zip(entries, flight.index, strict=True)]
        grads = [SourceRows(*two) for two in zip(way.entries, flight.index, strict=True)]
        weights = work.open_weights() if ctx.needs_input_grad[2] or ctx.needs_input_grad[3] else None
        told = set()
        pace = TilePace(flight.comms, backward_id(flight.prefix + "experts"), way.plan)
        for op in way.plan.ops:
            if op.kind == "wait":
                _wait(way.arriving.pop((op.peer, op.part), None))
            elif op.kind in ("first", "first_all"):
                work.first_backward(_places(geometry, way.plan, op), rows, grads)
            elif op.kind in ("second", "second_all"):
                work.second_backward(_places(geometry, way.plan, op), op.block)
            elif op.kind == "return":
                flight.give_back(way, op, work.out_b[op.block])
                if op.part == len(way.plan.part_ends[op.peer]) - 1 and op.peer not in told:
                    told.add(op.peer)
                    _tell_dots(flight, way, op.peer, work.dots_P)
            elif op.kind in ("relay", "merge"):
                flight.pass_on(way, op)
            elif op.kind == "weights" and weights is not None:
                work.weights(op.part, rows, grads, *weights)
            pace.done(op)
        if flight.own not in told:
            way.own_dots = work.dots_P.new_empty(0)
        if flight.later is not None:
            flight.later.put(lambda: _weights_later(work, rows, grads))
        return ticket.clone(), None, *(weights or (None, None)), None


def _tell_dots(flight: InFlightExchange, way: ExchangePath, peer: int, dots_P: torch.Tensor) -> None:
    """Gradients of the row weights, to those who sent the rows."""
    dots_n = dots_P[flight.padded_row[peer]]
    if peer == flight.own:
        way.own_dots = dots_n
    else:
        flight.sent(way, MessageEnd("dots", True, peer), dots_n)


def _weights_later(
    work: TileProducts, rows: list[SourceRows], grads: list[SourceRows]
) -> tuple[torch.Tensor, torch.Tensor]:
    d_w13, d_w2 = work.open_weights()
    for slot in range(len(work.w2_eHf)):
        work.weights(slot, rows, grads, d_w13, d_w2)
    return d_w13, d_w2


class _Arrive(torch.autograd.Function):
    @staticmethod
    @_told("combine.sum")
    def forward(ctx: Any, ticket: torch.Tensor, flight: InFlightExchange) -> torch.Tensor:
        y_TH = flight.arrive(flight.under_way)
        flight.close(flight.under_way)
        flight.way = None
        ctx.flight = flight
        # kept for no other reason than that a layer which is run again is run to its end: others wait for what it sends
        ctx.save_for_backward(flight.places_TC)
        return y_TH

    @staticmethod
    def backward(ctx: Any, dy_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.saved_tensors  # noqa: B018  (runs the layer again, where it is to be)
        flight = ctx.flight
        with flight.comms.doing(backward_id(flight.prefix + "combine.sum")):
            flight.way = flight.depart(dy_TH.contiguous(), backward_of(flight.plan), flight.columns)
        return dy_TH.new_zeros(1), None


def _places(geometry: Geometry, plan: RankPlan, op: TileOp) -> list[TilePlace]:
    """Places of the tiles that an operation multiplies."""
    if op.kind in ("first_all", "second_all"):
        return geometry.of_slot[op.part]
    tiles = plan.tiles_of_part(op.peer, op.part)
    return [geometry.place_of[tile] for tile in tiles if tile.slot not in plan.joint]


def _wait(exchange: Exchange | None) -> None:
    if exchange is not None:
        exchange.wait()
