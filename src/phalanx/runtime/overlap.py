"""One MoE layer in which rows travel while others are computed: carries out the operations of `plan/overlap_types.py`, forward and backward.

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
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any

import torch

from phalanx.kernels.lanes import Lanes
from phalanx.kernels.later import Later, Target, target_of
from phalanx.kernels.permute import sum_places
from phalanx.kernels.tiles import Geometry, Place, Rows, TileProducts, block_units, column_units
from phalanx.plan.dispatch import DispatchPlan
from phalanx.plan.overlap import backward_of, joint_slots, plan_overlap, slot_orders, tiles_of
from phalanx.plan.overlap_bytes import WireBytes, choose_transport, wire_bytes
from phalanx.plan.overlap_rounds import Leg, LegKind, rounds_of
from phalanx.plan.overlap_types import Op, RankPlan, Schedule
from phalanx.runtime.collectives import Exchange, Message, backward_id
from phalanx.runtime.dispatch import Dispatcher
from phalanx.runtime.experts import ExpertWeights
from phalanx.runtime.overlap_hosts import Gateways, HostWay
from phalanx.runtime.overlap_lists import (
    Outgoing,
    entries_of_all,
    outgoing,
    part_rows,
    places_of,
    row_by_row,
    tile_order,
)
from phalanx.runtime.overlap_pacing import TilePace
from phalanx.runtime.overlap_streams import RoundMessages
from phalanx.runtime.overlap_transport import count_copies, routes, traffic_told, usable_hosts
from phalanx.runtime.streams import Streams, leaving_free, streams_of

Choose = Callable[[DispatchPlan, WireBytes], Schedule]
TILE_ROWS = 512
"""Most rows of a tile: a product of this many rows is as fast as larger ones."""
_MOST_BLOCKS = 64
_TAGS = {"meta": 0, "going": 1, "coming": 2, "dots": 3}


def run_overlapped(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    *,
    experts: ExpertWeights,
    dispatcher: Dispatcher,
    schedule: Schedule | Choose,
    per_token: bool | None = None,
    lanes: Lanes,
    later: Later | None = None,
    recompute: bool = False,
    token_index_T: torch.Tensor | None = None,
    part_T: torch.Tensor | None = None,
    op_prefix: str = "",
    beside: Callable[[], torch.Tensor] | None = None,
    host_of_rank: Sequence[int] | None = None,
    through_hosts: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `run_experts` computes, by a schedule. Collective over `ep_etp`, which all must call with equal `schedule` and `per_token`.

    `schedule` may be a function of the batch's counts. `per_token`: a token goes to a rank once, whatever the number of its experts there; else once for
    each; None: whatever sends fewer bytes. `host_of_rank`: by position in `ep_etp`, where it is known which ranks share a host. `through_hosts`: a token goes to each
    other host once, and is passed on there; None: where that sends fewer bytes between hosts. `beside` is computed while entries travel, and its result added to that of the experts (a shared expert).
    """
    kept_TK = dispatcher.kept(weights_TK, experts_TK, token_index_T=token_index_T, part_T=part_T, op_prefix=op_prefix)
    streams = streams_of(dispatcher.comms, x_TH.device)
    known = host_of_rank if streams is None else None  # rounds have no gateways
    hosts = usable_hosts(dispatcher, known, forced=bool(through_hosts), per_token=per_token)
    copies = count_copies(dispatcher, experts_TK, kept_TK, hosts) if dispatcher.is_plain else None
    plan, send, told = dispatcher.exact_list(experts_TK, kept_TK, op_prefix, told=copies)
    traffic = traffic_told(dispatcher, plan, told if copies is not None else None, hosts)
    row_bytes = x_TH.shape[1] * x_TH.element_size()
    among = routes(per_token, through_hosts if hosts else False, counted=copies is not None)
    route = choose_transport(traffic, row_bytes=row_bytes, among=among).route
    per_token = route != "all_to_all"
    if not isinstance(schedule, Schedule):
        schedule = schedule(plan, wire_bytes(traffic, route, row_bytes=row_bytes))
    schedule = replace(schedule, blocks=min(schedule.blocks, column_units(x_TH.shape[1])))
    own = dispatcher.ep_etp.index
    forward = plan_overlap(
        plan,
        schedule,
        rank=own,
        tile_rows=TILE_ROWS,
        direction="forward",
        host_of_rank=hosts or None,
        through_hosts=route == "dedup_host",
        has_shared=beside is not None,
    )
    joint = [] if forward.hosts else joint_slots(plan, tile_rows=TILE_ROWS)
    orders = slot_orders(plan, schedule, joint=joint)
    outs = _outgoing(
        dispatcher, plan, forward, send.pair_of_row_R, orders=orders, num_tokens=x_TH.shape[0], per_token=per_token
    )
    ways = Gateways(forward, plan, outs, top_k=dispatcher.top_k, tile_rows=TILE_ROWS) if forward.hosts else None
    flight = _Flight(
        dispatcher,
        forward,
        outs,
        op_prefix,
        num_tokens=x_TH.shape[0],
        per_token=per_token,
        has_order=any(order is not None for order in orders),
        ways=ways,
    )
    flight.streams = streams
    flight.exchange_meta(weights_TK.detach(), x_TH.dtype)
    flight.later = target_of([experts.w13_e2fH, experts.w2_eHf], x_TH, later)
    flight.lanes, flight.recompute = lanes, recompute
    ticket = _Depart.apply(x_TH, weights_TK, flight)
    extra = None if beside is None else beside()
    w13, w2 = experts.w13_e2fH, experts.w2_eHf
    if flight.later is not None:
        w13, w2 = w13.detach(), w2.detach()
    ticket = _Work.apply(ticket, x_TH.detach(), w13, w2, flight)
    y_TH: torch.Tensor = _Arrive.apply(ticket, flight)
    return y_TH if extra is None else y_TH + extra, send.dropped


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
    """By rank of the group; ranks with slices of the same slots get the same."""
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


@dataclass(eq=False)
class _Way:
    """What is under way in one direction of one pass."""

    plan: RankPlan
    arriving: dict[tuple[int, int], Exchange] = field(default_factory=dict)
    """Entries by (source, part)."""
    returning: dict[tuple[int, int, int], Exchange] = field(default_factory=dict)
    """Partial sums by (rank, part, block)."""
    dots: dict[int, tuple[torch.Tensor, Exchange]] = field(default_factory=dict)
    sent: list[Exchange] = field(default_factory=list)
    entries: list[torch.Tensor] = field(default_factory=list)
    """By source: the entries that come (for this rank itself: the tokens)."""
    sums_b: list[torch.Tensor] = field(default_factory=list)
    """By block: partial sums of this rank's tokens, rank by rank, in coming order."""
    own_dots: torch.Tensor | None = None
    passing: HostWay | None = None
    """What this rank passes on as a gateway."""
    rounds: RoundMessages | None = None
    """On a device: what posts the messages, round by round."""


class _Flight:
    """One layer and batch on one rank: lists, messages under way, and what the three functions share."""

    lanes: Lanes
    recompute: bool
    later: Target | None = None
    streams: Streams | None = None
    """Of a device."""
    columns: Sequence[int]
    """Of each block of what comes back."""
    way: _Way | None = None
    """What is under way now."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        plan: RankPlan,
        outs: list[Outgoing],
        op_prefix: str,
        *,
        num_tokens: int,
        per_token: bool,
        has_order: bool,
        ways: Gateways | None = None,
    ) -> None:
        self.per_token, self.ways = per_token, ways
        self.lines = outs if ways is None else ways.lines
        """By rank: what goes to it and comes back from it in messages of this rank's entries."""
        self.comms, self.axis, self.top_k = dispatcher.comms, dispatcher.ep_etp, dispatcher.top_k
        self.own, self.outs, self.num_tokens = self.axis.index, outs, num_tokens
        self.plan, self.prefix = plan, op_prefix
        self.has_order = has_order
        """Rows of a source do not lie in the order of their tiles, on some rank."""
        self.slots = len(dispatcher.slots_G) // dispatcher.ep.size
        self.others = [(self.own + i) % self.axis.size for i in range(1, self.axis.size)]
        sizes = [line.entries.num for line in self.lines]
        self.base = [sum(sizes[:d]) for d in range(len(sizes) + 1)]
        copies = self.top_k * dispatcher.etp.size
        self.places_TC = self._token_places(num_tokens, copies)

    def _token_places(self, num_tokens: int, copies: int) -> torch.Tensor:
        """(T, C) what comes back of each token, rank by rank, and where each row comes back by itself, slot by slot."""
        if self.per_token or not self.has_order:
            return places_of(torch.cat([line.tokens_coming for line in self.lines]), num_tokens, copies)
        tokens = [torch.div(line.pairs, self.top_k, rounding_mode="floor") for line in self.lines]
        nth_TC = places_of(torch.cat(tokens), num_tokens, copies)
        coming = torch.cat([at + line.entries.coming_of_row for at, line in zip(self.base, self.lines, strict=False)])
        return torch.where(nth_TC < 0, nth_TC, coming[nth_TC.clamp(min=0)]) if len(coming) else nth_TC

    # ---- messages ---------------------------------------------------------------------------------------------------------------

    def _id(self, what: str, way: _Way | None) -> str:
        name = self.prefix + what
        return backward_id(name) if way is not None and way.plan.direction == "backward" else name

    def _leg_id(self, way: _Way, kind: LegKind) -> str:
        """Backward, gradients of the output go the way of the rows, and have the id of the exchange whose gradient they are."""
        if kind == "dots":
            return self._id("dispatch.weights", way)
        to_experts = (kind == "going") == (way.plan.direction == "forward")
        return self._id("dispatch.rows" if to_experts else "combine.rows", way)

    def _send(self, tensor: torch.Tensor, peer: int, tag: int, op_id: str) -> Exchange:
        return self.comms.start_send(Message(tensor, peer, tag), self.axis, op_id=op_id)

    def _receive(self, tensor: torch.Tensor, peer: int, tag: int, op_id: str) -> Exchange:
        return self.comms.start_receive(Message(tensor, peer, tag), self.axis, op_id=op_id)

    def exchange_meta(self, weights_TK: torch.Tensor, dtype: torch.dtype) -> None:
        """Tell every rank what its rows weigh and (`per_token`) where their entries are; learn the same of all others."""
        flat_N, name = weights_TK.reshape(-1), self.prefix + "dispatch.weights"
        words = flat_N.element_size() // 4 + self.per_token
        rows_from = [sum(tile.rows for tile in tiles) for tiles in self.plan.tiles]
        tables = [torch.empty(rows, words, dtype=torch.int32, device=flat_N.device) for rows in rows_from]
        if self.streams is not None:
            self._exchange_meta_at_once(tables, flat_N, name)
            self._read_meta(tables, flat_N, dtype)
            return
        near = self.others if self.ways is None else [peer for peer in self.others if self.ways.is_near(peer)]
        coming = [self._receive(tables[peer], peer, _tag("meta"), name) for peer in near if rows_from[peer]]
        going = [
            self._send(self._meta(self.outs[peer], flat_N), peer, _tag("meta"), name)
            for peer in near
            if len(self.outs[peer].pairs)
        ]
        if self.ways is not None:
            further = self.ways.exchange_tables(
                tables, lambda out: self._words(out, flat_N), send=self._send, receive=self._receive, op_id=name
            )
            coming, going = coming + further[0], going + further[1]
        for exchange in coming:
            exchange.wait()
        self._read_meta(tables, flat_N, dtype)
        for exchange in going:
            exchange.wait()

    def _exchange_meta_at_once(self, tables: Sequence[torch.Tensor], flat_N: torch.Tensor, op_id: str) -> None:
        """One group on the current stream: nothing can be posted before it has come, for sizes follow from it."""
        going = [
            Message(self._meta(self.outs[peer], flat_N), peer) for peer in self.others if len(self.outs[peer].pairs)
        ]
        coming = [Message(tables[peer], peer) for peer in self.others if len(tables[peer])]
        self.comms.start_exchange(going, coming, self.axis, op_id=op_id).wait()

    def _read_meta(self, tables: Sequence[torch.Tensor], flat_N: torch.Tensor, dtype: torch.dtype) -> None:
        """Entries, weights, and which entry each row takes, by source."""
        cuts = [
            (
                part_rows(self.plan.tiles[peer], self.plan.part_ends[peer]),
                tile_order(self.plan.tiles[peer], flat_N.device),
            )
            for peer in self.others
        ]
        of_others = [tables[peer] for peer in self.others]
        if self.per_token:
            come = entries_of_all([(t[:, 0].to(torch.int64), *cut) for t, cut in zip(of_others, cuts, strict=True)])
        else:
            come = [row_by_row(len(t), cut[0], t.device, cut[1]) for t, cut in zip(of_others, cuts, strict=True)]
        own = self.outs[self.own]
        found = {self.own: own.entries, **dict(zip(self.others, come, strict=True))}
        self.ins = [found[source] for source in range(len(tables))]
        self.index = [entries.going_of_row for entries in self.ins]
        """By source: the entry of each row."""
        self.index[self.own] = torch.div(own.pairs, self.top_k, rounding_mode="floor")
        self.row_weights: list[torch.Tensor] = []
        for source, table in enumerate(tables):
            if source == self.own:
                self.row_weights.append(flat_N[own.pairs].to(dtype))
                continue
            told = table[:, int(self.per_token) :].clone(memory_format=torch.contiguous_format)
            self.row_weights.append(told.view(flat_N.dtype).squeeze(1).to(dtype))

    @staticmethod
    def _words(out: Outgoing, flat_N: torch.Tensor) -> torch.Tensor:
        return flat_N[out.pairs].unsqueeze(1).view(torch.int32)

    def _meta(self, out: Outgoing, flat_N: torch.Tensor) -> torch.Tensor:
        weights = self._words(out, flat_N)
        if not self.per_token:
            return weights
        return torch.cat([out.entries.going_of_row.to(torch.int32).unsqueeze(1), weights], 1)

    @property
    def left_free(self) -> int:
        """Multiprocessors that products leave to messages."""
        return 0 if self.streams is None else self.streams.left_free

    @property
    def under_way(self) -> _Way:
        assert self.way is not None  # between departure and arrival
        return self.way

    def depart(self, x_TH: torch.Tensor, plan: RankPlan, columns: Sequence[int]) -> _Way:
        """Post all receives of one direction, then send this rank's entries. `columns`: of each block of what comes back."""
        way = _Way(plan)
        if self.streams is not None:
            op_id: dict[LegKind, str] = {kind: self._leg_id(way, kind) for kind in ("going", "coming", "dots")}
            way.rounds = RoundMessages(rounds_of(plan), self.streams, self.comms, self.axis, op_id=op_id.__getitem__)
        at, size = self._leg_id(way, "going"), x_TH.shape[1]
        for source, entries in enumerate(self.ins):
            if source == self.own:
                way.entries.append(x_TH)
                continue
            buffer = x_TH.new_empty(entries.num, size)
            way.entries.append(buffer)
            for part in range(len(entries.ends_going)):
                if self._way_in(source) != self.own:
                    leg, tag = Leg("going", False, self._way_in(source), part), self._tag_in(source, "going", part)
                    arriving = self._give(way, leg, buffer[entries.going(part)], tag)
                    if arriving is not None:
                        way.arriving[source, part] = arriving
        if self.ways is not None:
            back = self._leg_id(way, "coming")
            way.passing = self.ways.open(
                x_TH, columns, going_tag=lambda part: _tag("going", part), receive=self._receive, there=at, back=back
            )
        way.sums_b = [x_TH.new_empty(self.base[-1], n) for n in columns]
        self._expect(way)
        for op in plan.ops:
            if op.kind == "send" and op.peer != self.own:
                out = self.lines[op.peer]
                rows = x_TH.index_select(0, out.tokens_going[out.entries.going(op.part)])
                self._sent(way, Leg("going", True, op.peer, op.part), rows)
        return way

    def _give(self, way: _Way, leg: Leg, tensor: torch.Tensor, tag: int | None = None) -> Exchange | None:
        """This rank's end of a message. On a host it is posted at once, if it is not empty; on a device with its round."""
        if way.rounds is not None:
            return way.rounds.give(leg, tensor)
        if not len(tensor):
            return None
        tag = _tag(leg.kind, leg.part, leg.block) if tag is None else tag
        return (self._send if leg.is_send else self._receive)(tensor, leg.peer, tag, self._leg_id(way, leg.kind))

    def _sent(self, way: _Way, leg: Leg, tensor: torch.Tensor, tag: int | None = None) -> None:
        exchange = self._give(way, leg, tensor, tag)
        if exchange is not None:
            way.sent.append(exchange)

    def _expect(self, way: _Way) -> None:
        """Post the receives of what comes back."""
        for peer in self.others:
            entries = self.lines[peer].entries
            for part in range(len(entries.ends_coming)):
                for block, sums in enumerate(way.sums_b):
                    into = sums[self.base[peer] : self.base[peer] + entries.num][entries.coming(part)]
                    exchange = self._give(way, Leg("coming", False, peer, part, block), into)
                    if exchange is not None:
                        way.returning[peer, part, block] = exchange
            if way.plan.direction == "backward" and len(self.outs[peer].pairs):
                wide = torch.promote_types(way.sums_b[0].dtype, torch.float32)
                dots = way.sums_b[0].new_empty(len(self.outs[peer].pairs), dtype=wide)
                exchange = self._give(way, Leg("dots", False, peer), dots)
                assert exchange is not None  # there are rows
                way.dots[peer] = dots, exchange

    def give_back(self, way: _Way, op: Op, rows_b: torch.Tensor) -> None:
        """Sum the copies of the entries that are complete with a part, and send them to their source (own: put them in place)."""
        entries = self.ins[op.peer]
        which = entries.coming(op.part)
        if which.start == which.stop:
            if way.rounds is not None and op.peer != self.own:
                self._sent(way, Leg("coming", True, op.peer, op.part, op.block), rows_b[:0])
            return
        places_NC = self.row_places[op.peer][which]
        if op.peer == self.own:
            into = way.sums_b[op.block][self.base[self.own] :][which]
            sum_places(rows_b, places_NC, lanes=self.lanes, out_TH=into)
            return
        to = self._way_in(op.peer)
        if self.ways is not None and way.passing is not None and to == self.own:
            into = self.ways.own_sums(way.passing, op.peer, op.block)[which]
            sum_places(rows_b, places_NC, lanes=self.lanes, out_TH=into)
            return
        sums = sum_places(rows_b, places_NC, lanes=self.lanes)
        self._sent(
            way, Leg("coming", True, to, op.part, op.block), sums, self._tag_in(op.peer, "coming", op.part, op.block)
        )

    def _way_in(self, source: int) -> int:
        """From whom a source's entries come, and to whom their sums go."""
        return source if self.ways is None else self.ways.way_in(source)

    def _tag_in(self, source: int, kind: str, part: int, block: int = 0) -> int:
        if self.ways is None or self.ways.is_near(source):
            return _tag(kind, part, block)
        return self.ways.tag(1 if kind == "going" else 2, source, part, block)

    def pass_on(self, way: _Way, op: Op) -> None:
        """What a gateway does for its host: `relay` and `merge`."""
        assert self.ways is not None and way.passing is not None  # the plan has gateways
        if op.kind == "relay":
            at = self._leg_id(way, "going")
            way.sent += self.ways.relay(way.passing, op, way.entries[op.peer], send=self._send, op_id=at)
            return
        sums = self.ways.merge(way.passing, op, self.lanes)
        if sums is not None:
            tag = _tag("coming", op.part, op.block)
            way.sent.append(self._send(sums, op.peer, tag, self._leg_id(way, "coming")))

    def place_rows(self, geometry: Geometry) -> None:
        """By source: the padded rows of each coming entry, slots ascending."""
        self.row_places: list[torch.Tensor] = []
        self.padded_row: list[torch.Tensor] = []
        for source, entries in enumerate(self.ins):
            device = entries.going_of_row.device
            pieces = [torch.arange(at, at + num, device=device) for at, num in geometry.of_source[source]]
            padded_n = torch.cat(pieces) if pieces else entries.going_of_row
            nth = places_of(entries.coming_of_row, entries.num, min(self.top_k, self.slots))
            found = padded_n[nth.clamp(min=0)] if len(padded_n) else nth
            self.row_places.append(torch.where(nth < 0, nth, found))
            self.padded_row.append(padded_n)

    def arrive(self, way: _Way) -> torch.Tensor:
        """(T, H) sums over the ranks, in their order."""
        for exchange in way.returning.values():
            exchange.wait()
        y_b = [sum_places(sums, self.places_TC, lanes=self.lanes) for sums in way.sums_b]
        return y_b[0] if len(y_b) == 1 else torch.cat(y_b, 1)

    def close(self, way: _Way) -> None:
        """Wait until everything sent has gone."""
        for exchange in way.sent:
            exchange.wait()
        way.sent.clear()


def _tag(kind: str, part: int = 0, block: int = 0) -> int:
    return (part * _MOST_BLOCKS + block) * len(_TAGS) + _TAGS[kind]


def _told(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Tell a trace what a function of autograd does: under `name` forward, under that of its gradient backward. Products inside leave to messages what they are to."""

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(ctx: Any, *args: Any) -> Any:
            forward = isinstance(args[-1], _Flight)
            flight: _Flight = args[-1] if forward else ctx.flight
            id = flight.prefix + name
            with flight.comms.doing(id if forward else backward_id(id)), leaving_free(flight.left_free):
                return function(ctx, *args)

        return call

    return around


class _Depart(torch.autograd.Function):
    @staticmethod
    @_told("dispatch.permute")
    def forward(ctx: Any, x_TH: torch.Tensor, weights_TK: torch.Tensor, flight: _Flight) -> torch.Tensor:
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
        ctx: Any, ticket: torch.Tensor, x_TH: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, flight: _Flight
    ) -> torch.Tensor:
        way = flight.under_way
        geometry = Geometry(flight.plan.tiles, flight.slots, x_TH.dtype, joint_tiles=flight.plan.joint_tiles)
        flight.place_rows(geometry)
        work = TileProducts(geometry, w13, w2, flight.lanes)
        work.open_forward(flight.plan.blocks)
        rows = [Rows(*three) for three in zip(way.entries, flight.index, flight.row_weights, strict=True)]
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
        work = TileProducts(geometry, w13, w2, flight.lanes)
        work.open_backward(way.plan.blocks, gate_up_e)
        rows = [Rows(*three) for three in zip(entries, flight.index, flight.row_weights, strict=True)]
        grads = [Rows(g, r.index, r.weights) for g, r in zip(way.entries, rows, strict=True)]
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


def _tell_dots(flight: _Flight, way: _Way, peer: int, dots_P: torch.Tensor) -> None:
    """Gradients of the row weights, to those who sent the rows."""
    dots_n = dots_P[flight.padded_row[peer]]
    if peer == flight.own:
        way.own_dots = dots_n
    else:
        flight._sent(way, Leg("dots", True, peer), dots_n)


def _weights_later(work: TileProducts, rows: list[Rows], grads: list[Rows]) -> tuple[torch.Tensor, torch.Tensor]:
    d_w13, d_w2 = work.open_weights()
    for slot in range(len(work.w2_eHf)):
        work.weights(slot, rows, grads, d_w13, d_w2)
    return d_w13, d_w2


class _Arrive(torch.autograd.Function):
    @staticmethod
    @_told("combine.sum")
    def forward(ctx: Any, ticket: torch.Tensor, flight: _Flight) -> torch.Tensor:
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


def _places(geometry: Geometry, plan: RankPlan, op: Op) -> list[Place]:
    """Of the tiles that an operation multiplies."""
    if op.kind in ("first_all", "second_all"):
        return geometry.of_slot[op.part]
    tiles = plan.tiles_of_part(op.peer, op.part)
    return [geometry.place_of[tile] for tile in tiles if tile.slot not in plan.joint]


def _wait(exchange: Exchange | None) -> None:
    if exchange is not None:
        exchange.wait()
