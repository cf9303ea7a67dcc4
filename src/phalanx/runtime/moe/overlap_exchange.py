"""What is under way in one overlapped layer on one rank: its lists, its messages, and where their rows go.

Decides nothing: parts, blocks and their order are the plan's (`plan/moe/overlap/tiles/types.py`), carried out by `overlap.py`. Must never change: receives are posted before anything
is computed, sizes follow from numbers that both sides have, sums have the order of slots, then of ranks.

Legend: T tokens of this rank, H hidden, n rows of one source, N entries or pairs, C copies of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.tiles import Geometry
from phalanx.kernels.ops.deferred import Target
from phalanx.kernels.ops.permute import sum_places
from phalanx.plan.moe.overlap.tiles import MessageEnd, MessageKind, RankPlan, TileOp, rounds_of
from phalanx.runtime.comm import Exchange, Message, backward_id
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.overlap_hosts import Gateways, HostWay
from phalanx.runtime.moe.overlap_lists import (
    Outgoing,
    entries_of_all,
    entry_places,
    part_rows,
    row_by_row,
    tile_order,
    told_places,
)
from phalanx.runtime.moe.overlap_streams import RoundMessages
from phalanx.runtime.moe.streams import CudaStreams

_MOST_BLOCKS = 64
_TAGS = {"meta": 0, "outbound": 1, "inbound": 2, "dots": 3}


@dataclass(eq=False)
class ExchangePath:
    """What is under way in one direction of one pass."""

    plan: RankPlan
    arriving: dict[tuple[int, int], Exchange] = field(default_factory=dict)
    """Entries by (source, part)."""
    returning: dict[tuple[int, int, int], Exchange] = field(default_factory=dict)
    """Partial sums by (rank, part, block)."""
    dots: dict[int, tuple[torch.Tensor, Exchange]] = field(default_factory=dict)
    sent: list[Exchange] = field(default_factory=list)
    entries: list[torch.Tensor] = field(default_factory=list)
    """Entries that come, by source (for this rank itself: the tokens)."""
    sums_b: list[torch.Tensor] = field(default_factory=list)
    """Partial sums of this rank's tokens, by block, rank by rank, in inbound order."""
    own_dots: torch.Tensor | None = None
    passing: HostWay | None = None
    """What this rank passes on as a gateway."""
    rounds: RoundMessages | None = None
    """Poster of the messages on a device, round by round."""


class InFlightExchange:
    """One layer and batch on one rank: lists, messages under way, and what the three functions share."""

    lanes: Lanes
    recompute: bool
    later: Target | None = None
    streams: CudaStreams | None = None
    """Of a device."""
    columns: Sequence[int]
    """Columns of each block of what comes back."""
    way: ExchangePath | None = None
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
        """What goes to each rank and comes back from it in messages of this rank's entries."""
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
            return entry_places(torch.cat([line.tokens_inbound for line in self.lines]), num_tokens, copies)
        tokens = [torch.div(line.pairs, self.top_k, rounding_mode="floor") for line in self.lines]
        nth_TC = entry_places(torch.cat(tokens), num_tokens, copies)
        inbound = torch.cat([at + line.entries.inbound_of_row for at, line in zip(self.base, self.lines, strict=False)])
        return torch.where(nth_TC < 0, nth_TC, inbound[nth_TC.clamp(min=0)]) if len(inbound) else nth_TC

    # ---- messages ---------------------------------------------------------------------------------------------------------------

    def _id(self, what: str, way: ExchangePath | None) -> str:
        name = self.prefix + what
        return backward_id(name) if way is not None and way.plan.direction == "backward" else name

    def _leg_id(self, way: ExchangePath, kind: MessageKind) -> str:
        """Backward, gradients of the output go the way of the rows, and have the id of the exchange whose gradient they are."""
        if kind == "dots":
            return self._id("dispatch.weights", way)
        to_experts = (kind == "outbound") == (way.plan.direction == "forward")
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
        inbound = [self._receive(tables[peer], peer, _tag("meta"), name) for peer in near if rows_from[peer]]
        outbound = [
            self._send(self._meta(self.outs[peer], flat_N), peer, _tag("meta"), name)
            for peer in near
            if len(self.outs[peer].pairs)
        ]
        if self.ways is not None:
            further = self.ways.exchange_tables(
                tables, lambda out: self._words(out, flat_N), send=self._send, receive=self._receive, op_id=name
            )
            inbound, outbound = inbound + further[0], outbound + further[1]
        for exchange in inbound:
            exchange.wait()
        self._read_meta(tables, flat_N, dtype)
        for exchange in outbound:
            exchange.wait()

    def _exchange_meta_at_once(self, tables: Sequence[torch.Tensor], flat_N: torch.Tensor, op_id: str) -> None:
        """One group on the current stream: nothing can be posted before it has come, for sizes follow from it."""
        outbound = [
            Message(self._meta(self.outs[peer], flat_N), peer) for peer in self.others if len(self.outs[peer].pairs)
        ]
        inbound = [Message(tables[peer], peer) for peer in self.others if len(tables[peer])]
        self.comms.start_exchange(outbound, inbound, self.axis, op_id=op_id).wait()

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
            come = entries_of_all([(told_places(t[:, 0]), *cut) for t, cut in zip(of_others, cuts, strict=True)])
        else:
            come = [row_by_row(len(t), cut[0], t.device, cut[1]) for t, cut in zip(of_others, cuts, strict=True)]
        own = self.outs[self.own]
        found = {self.own: own.entries, **dict(zip(self.others, come, strict=True))}
        self.ins = [found[source] for source in range(len(tables))]
        self.index = [entries.outbound_of_row for entries in self.ins]
        """Entry of each row, by source."""
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
        return torch.cat([out.entries.outbound_of_row.to(torch.int32).unsqueeze(1), weights], 1)

    @property
    def left_free(self) -> int:
        """Multiprocessors that products leave to messages."""
        return 0 if self.streams is None else self.streams.left_free

    @property
    def under_way(self) -> ExchangePath:
        assert self.way is not None  # between departure and arrival
        return self.way

    def depart(self, x_TH: torch.Tensor, plan: RankPlan, columns: Sequence[int]) -> ExchangePath:
        """Post all receives of one direction, then send this rank's entries. `columns`: of each block of what comes back."""
        way = ExchangePath(plan)
        if self.streams is not None:
            op_id: dict[MessageKind, str] = {kind: self._leg_id(way, kind) for kind in ("outbound", "inbound", "dots")}
            way.rounds = RoundMessages(rounds_of(plan), self.streams, self.comms, self.axis, op_id=op_id.__getitem__)
        at, size = self._leg_id(way, "outbound"), x_TH.shape[1]
        for source, entries in enumerate(self.ins):
            if source == self.own:
                way.entries.append(x_TH)
                continue
            buffer = x_TH.new_empty(entries.num, size)
            way.entries.append(buffer)
            for part in range(len(entries.ends_outbound)):
                if self._way_in(source) != self.own:
                    leg, tag = (
                        MessageEnd("outbound", False, self._way_in(source), part),
                        self._tag_in(source, "outbound", part),
                    )
                    arriving = self._give(way, leg, buffer[entries.outbound(part)], tag)
                    if arriving is not None:
                        way.arriving[source, part] = arriving
        if self.ways is not None:
            back = self._leg_id(way, "inbound")
            way.passing = self.ways.open(
                x_TH,
                columns,
                outbound_tag=lambda part: _tag("outbound", part),
                receive=self._receive,
                there=at,
                back=back,
            )
        way.sums_b = [x_TH.new_empty(self.base[-1], n) for n in columns]
        self._expect(way)
        for op in plan.ops:
            if op.kind == "send" and op.peer != self.own:
                out = self.lines[op.peer]
                rows = x_TH.index_select(0, out.tokens_outbound[out.entries.outbound(op.part)])
                self.sent(way, MessageEnd("outbound", True, op.peer, op.part), rows)
        return way

    def _give(
        self, way: ExchangePath, leg: MessageEnd, tensor: torch.Tensor, tag: int | None = None
    ) -> Exchange | None:
        """This rank's end of a message. On a host it is posted at once, if it is not empty; on a device with its round."""
        if way.rounds is not None:
            return way.rounds.give(leg, tensor)
        if not len(tensor):
            return None
        tag = _tag(leg.kind, leg.part, leg.block) if tag is None else tag
        return (self._send if leg.is_send else self._receive)(tensor, leg.peer, tag, self._leg_id(way, leg.kind))

    def sent(self, way: ExchangePath, leg: MessageEnd, tensor: torch.Tensor, tag: int | None = None) -> None:
        exchange = self._give(way, leg, tensor, tag)
        if exchange is not None:
            way.sent.append(exchange)

    def _expect(self, way: ExchangePath) -> None:
        """Post the receives of what comes back."""
        for peer in self.others:
            entries = self.lines[peer].entries
            for part in range(len(entries.ends_inbound)):
                for block, sums in enumerate(way.sums_b):
                    into = sums[self.base[peer] : self.base[peer] + entries.num][entries.inbound(part)]
                    exchange = self._give(way, MessageEnd("inbound", False, peer, part, block), into)
                    if exchange is not None:
                        way.returning[peer, part, block] = exchange
            if way.plan.direction == "backward" and len(self.outs[peer].pairs):
                wide = torch.promote_types(way.sums_b[0].dtype, torch.float32)
                dots = way.sums_b[0].new_empty(len(self.outs[peer].pairs), dtype=wide)
                exchange = self._give(way, MessageEnd("dots", False, peer), dots)
                assert exchange is not None  # there are rows
                way.dots[peer] = dots, exchange

    def give_back(self, way: ExchangePath, op: TileOp, rows_b: torch.Tensor) -> None:
        """Sum the copies of the entries that are complete with a part, and send them to their source (own: put them in place)."""
        entries = self.ins[op.peer]
        which = entries.inbound(op.part)
        if which.start == which.stop:
            if way.rounds is not None and op.peer != self.own:
                self.sent(way, MessageEnd("inbound", True, op.peer, op.part, op.block), rows_b[:0])
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
        self.sent(
            way,
            MessageEnd("inbound", True, to, op.part, op.block),
            sums,
            self._tag_in(op.peer, "inbound", op.part, op.block),
        )

    def _way_in(self, source: int) -> int:
        """Whom a source's entries come from, and whom their sums go to."""
        return source if self.ways is None else self.ways.way_in(source)

    def _tag_in(self, source: int, kind: str, part: int, block: int = 0) -> int:
        if self.ways is None or self.ways.is_near(source):
            return _tag(kind, part, block)
        return self.ways.tag(1 if kind == "outbound" else 2, source, part, block)

    def pass_on(self, way: ExchangePath, op: TileOp) -> None:
        """What a gateway does for its host: `relay` and `merge`."""
        assert self.ways is not None and way.passing is not None  # the plan has gateways
        if op.kind == "relay":
            at = self._leg_id(way, "outbound")
            way.sent += self.ways.relay(way.passing, op, way.entries[op.peer], send=self._send, op_id=at)
            return
        sums = self.ways.merge(way.passing, op, self.lanes)
        if sums is not None:
            tag = _tag("inbound", op.part, op.block)
            way.sent.append(self._send(sums, op.peer, tag, self._leg_id(way, "inbound")))

    def place_rows(self, geometry: Geometry) -> None:
        """Padded rows of each inbound entry, by source, slots ascending, and the weights of all of them, 0 where there is none."""
        self.row_places: list[torch.Tensor] = []
        self.padded_row: list[torch.Tensor] = []
        self.weights_P1 = self.row_weights[self.own].new_zeros(geometry.size, 1)
        pieces = [piece for source in geometry.of_source for piece in source]
        padded = np.concatenate([np.arange(at, at + num) for at, num in pieces or [(0, 0)]])
        rows = torch.from_numpy(padded).to(self.weights_P1.device, non_blocking=True)
        rows_of = rows.split([sum(num for _, num in source) for source in geometry.of_source])
        for entries, weights, padded_n in zip(self.ins, self.row_weights, rows_of, strict=True):
            self.weights_P1[padded_n, 0] = weights
            self.padded_row.append(padded_n)
            if entries.num == len(padded_n):  # each has one row
                self.row_places.append(
                    torch.empty_like(padded_n).index_copy_(0, entries.inbound_of_row, padded_n)[:, None]
                )
                continue
            nth = entry_places(entries.inbound_of_row, entries.num, min(self.top_k, self.slots))
            self.row_places.append(torch.where(nth < 0, nth, padded_n[nth.clamp(min=0)]))

    def arrive(self, way: ExchangePath) -> torch.Tensor:
        """(T, H) sums over the ranks, in their order."""
        for exchange in way.returning.values():
            exchange.wait()
        y_b = [sum_places(sums, self.places_TC, lanes=self.lanes) for sums in way.sums_b]
        return y_b[0] if len(y_b) == 1 else torch.cat(y_b, 1)

    def close(self, way: ExchangePath) -> None:
        """Wait until everything sent has gone."""
        for exchange in way.sent:
            exchange.wait()
        way.sent.clear()


def _tag(kind: str, part: int = 0, block: int = 0) -> int:
    return (part * _MOST_BLOCKS + block) * len(_TAGS) + _TAGS[kind]
