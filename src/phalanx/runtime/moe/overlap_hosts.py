"""One copy of a token for each other host: what a rank does for its neighbours as a gateway (`plan/moe/overlap/tiles/hosts.py`), in an overlapped layer.

Decides nothing: `relay` and `merge` of the plan say when. A source's entries for another host come here in the order of the first part that any rank of this host needs
them in; each rank gets those of its parts as it would have got them from the source itself. On the way back the ranks' partial sums come here and are added up, rank by
rank, before one row for each token crosses to the source. Gradients of the row weights, four bytes a row, go straight.

    tables     what rows weigh and where their entries are: source -> gateway -> rank, before anything else
    entries    source -> gateway (`send`, `relay`) -> rank (`wait`)
    sums       rank -> gateway (`return`, `merge`) -> source (`wait_return`)

Must never change: the order of the sums, by ranks, which is that of the plan; and that sizes of messages follow from numbers that both ends have.

Legend: n rows of one source on one rank, N entries, H hidden, P ranks of ep_etp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.ops.permute import sum_places
from phalanx.plan.moe import DispatchPlan
from phalanx.plan.moe.overlap.tiles import (
    RankPlan,
    Tile,
    TileOp,
    gateway,
    gateways,
    members,
    part_ends,
    slot_orders,
    tiles_of,
)
from phalanx.runtime.comm import Exchange
from phalanx.runtime.moe.overlap_lists import (
    Entries,
    Outgoing,
    entries_of,
    entry_places,
    host_outgoing,
    outbound_places,
    part_rows,
    row_parts,
    tile_order,
)

Post = Callable[[torch.Tensor, int, int, str], Exchange]
"""(tensor, peer, tag, id of the operation)."""
_FIRST_TAG = 1 << 26
"""First tag of messages about another rank's rows; those between a rank and a source have smaller ones."""
_MOST_BLOCKS = 64


@dataclass(eq=False)
class HostWay:
    """What a gateway has under way in one direction of one pass."""

    entries: dict[int, torch.Tensor] = field(default_factory=dict)
    """What each source has for this host."""
    arriving: dict[tuple[int, int], Exchange] = field(default_factory=dict)
    """Exchanges that bring them, by (source, part)."""
    sums_b: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Partial sums of this host's ranks, by source, then block, rank by rank, each in its inbound order."""
    inbound: dict[tuple[int, int, int], list[Exchange]] = field(default_factory=dict)
    """Exchanges of those, by (source, part, block)."""


@dataclass(eq=False)
class _Passed:
    """What this gateway knows of one source."""

    whole: Outgoing
    """Its entries for this host."""
    picked: dict[int, torch.Tensor]
    """Which of them each rank gets, in its outbound order."""
    entries: dict[int, Entries]
    places_NC: torch.Tensor
    """Rows of the partial sums that make up each inbound entry of the whole."""
    base: dict[int, int]
    """Where each rank's partial sums begin."""
    num_sums: int


class Gateways:
    """The ways between hosts of one layer and batch on one rank. `outs`: what this rank has for each rank."""

    def __init__(
        self, plan: RankPlan, dispatch: DispatchPlan, outs: Sequence[Outgoing], *, top_k: int, tile_rows: int
    ) -> None:
        self.plan, self.own, self.hosts = plan, plan.rank, plan.hosts
        self.here = members(self.hosts, self.hosts[self.own])
        self.rows = dispatch.rows_PG.reshape(plan.size, dispatch.ep, -1).tolist()
        self.orders, self.etp, self.tile_rows = slot_orders(dispatch, plan.schedule, joint=()), dispatch.etp, tile_rows
        self.sources = [source for source, parts in enumerate(plan.relay_parts) if parts]
        """Whose entries this rank passes on."""
        self.passed: dict[int, _Passed] = {}
        self.outs = outs
        nothing = Outgoing(*(outs[self.own].pairs[:0],) * 3, Entries(*(outs[self.own].pairs[:0],) * 2, 0, (), ()))
        self.lines = [out if self.is_near(peer) else nothing for peer, out in enumerate(outs)]
        """What this rank sends each rank, for itself or for its host, and what comes back from there."""
        for through in gateways(self.hosts, self.own):
            there = members(self.hosts, self.hosts[through])
            tokens = [torch.div(outs[peer].pairs, top_k, rounding_mode="floor") for peer in there]
            parts = [self._row_parts(self.own, peer, tokens[0].device) for peer in there]
            most = max(len(plan.peer_part_ends[peer]) for peer in there)
            self.lines[through] = host_outgoing(torch.cat(tokens), torch.cat(parts), most)

    def is_near(self, peer: int) -> bool:
        """Whether the rank is on this host."""
        return self.hosts[peer] == self.hosts[self.own]

    def way_in(self, source: int) -> int:
        """The rank from which a source's entries come here, and to which their sums go."""
        return source if self.is_near(source) else gateway(self.hosts, source, self.hosts[self.own])

    def tag(self, kind: int, source: int, part: int = 0, block: int = 0) -> int:
        """Tag of a message inside this host about rows of `source`. `kind` 0: table, 1: entries, 2: sums."""
        return _FIRST_TAG + ((part * _MOST_BLOCKS + block) * self.plan.size + source) * 3 + kind

    def _tiles(self, source: int, rank: int) -> tuple[tuple[Tile, ...], tuple[int, ...]]:
        ep = rank // self.etp
        rows = self.rows[source][ep]
        tiles = tiles_of(rows, source=source, tile_rows=self.tile_rows, slots=self.orders[ep])
        return tiles, part_ends(tiles, self.plan.schedule.parts)

    def _row_parts(self, source: int, rank: int, device: torch.device) -> torch.Tensor:
        return row_parts(*self._tiles(source, rank), device)

    # ---- tables ----------------------------------------------------------------------------------------------------------------

    def exchange_tables(
        self,
        tables: Sequence[torch.Tensor],
        words_of: Callable[[Outgoing], torch.Tensor],
        *,
        send: Post,
        receive: Post,
        op_id: str,
    ) -> tuple[list[Exchange], list[Exchange]]:
        """Tell gateways of this rank's rows, pass on what others tell; (what is inbound into `tables`, what is being sent).

        `tables` (n, words) int32 by source: place of the row's entry, its weight; `words_of`: the weights of rows as (n, words - 1).
        """
        like, outbound = tables[self.own], []
        for through in gateways(self.hosts, self.own):
            weights = [words_of(self.outs[peer]) for peer in members(self.hosts, self.hosts[through])]
            places = self.lines[through].entries.outbound_of_row.to(torch.int32)
            table = torch.cat([places.unsqueeze(1), torch.cat(weights)], 1)
            if len(table):
                outbound.append(send(table, through, self.tag(0, self.own), op_id))
        told = {
            s: like.new_empty(sum(sum(self.rows[s][r // self.etp]) for r in self.here), like.shape[1])
            for s in self.sources
        }
        asked = [receive(table, source, self.tag(0, source), op_id) for source, table in told.items()]
        inbound = [
            receive(table, self.way_in(source), self.tag(0, source), op_id)
            for source, table in enumerate(tables)
            if len(table) and self.way_in(source) not in (source, self.own)
        ]
        for exchange, source in zip(asked, self.sources, strict=True):
            exchange.wait()
            for rank, table in self._pass_on(source, told[source]).items():
                if rank == self.own:
                    tables[source].copy_(table)
                elif len(table):
                    outbound.append(send(table, rank, self.tag(0, source), op_id))
        return inbound, outbound

    def _pass_on(self, source: int, table: torch.Tensor) -> dict[int, torch.Tensor]:
        """Gives each rank of this host its table, and remembers which entries it gets."""
        device = table.device
        sizes = [sum(self.rows[source][rank // self.etp]) for rank in self.here]
        places = table[:, 0].to(torch.int64)
        parts = torch.cat([self._row_parts(source, rank, device) for rank in self.here])
        whole = host_outgoing(places, parts, self.plan.relay_parts[source])
        back = whole.entries.inbound_of_row.split(sizes)
        picked, entries, base, keys, tables, at = {}, {}, {}, [], {}, 0
        for i, (rank, place_n, rows) in enumerate(zip(self.here, places.split(sizes), table.split(sizes), strict=True)):
            tiles, ends = self._tiles(source, rank)
            order = tile_order(tiles, device)
            outbound_n, picked[rank] = outbound_places(place_n, order)
            entries[rank] = entries_of(outbound_n, part_rows(tiles, ends), order=order)
            key = torch.empty_like(picked[rank])
            key[entries[rank].inbound_of_row] = back[i]
            keys.append(key)
            base[rank], at = at, at + len(key)
            tables[rank] = torch.cat([outbound_n.to(torch.int32).unsqueeze(1), rows[:, 1:]], 1)
        places_NC = entry_places(torch.cat(keys), whole.entries.num, len(self.here))
        self.passed[source] = _Passed(whole, picked, entries, places_NC, base, at)
        return tables

    # ---- entries and sums ------------------------------------------------------------------------------------------------------

    def open(
        self,
        like: torch.Tensor,
        columns: Sequence[int],
        *,
        outbound_tag: Callable[[int], int],
        receive: Post,
        there: str,
        back: str,
    ) -> HostWay:
        """Post all receives of a gateway in one direction. `like` (T, H); `columns`: of each block of what comes back; `there`, `back`: ids."""
        way = HostWay()
        for source in self.sources:
            passed = self.passed[source]
            entries = passed.whole.entries
            way.entries[source] = like.new_empty(entries.num, like.shape[1])
            for part in range(len(entries.ends_outbound)):
                into = way.entries[source][entries.outbound(part)]
                if len(into):
                    way.arriving[source, part] = receive(into, source, outbound_tag(part), there)
            way.sums_b[source] = [like.new_empty(passed.num_sums, n) for n in columns]
            for rank in self.here:
                if rank != self.own:
                    self._expect(way, source, rank, receive, back)
        return way

    def _expect(self, way: HostWay, source: int, rank: int, receive: Post, op_id: str) -> None:
        entries, first = self.passed[source].entries[rank], self.passed[source].base[rank]
        for part in range(len(entries.ends_inbound)):
            for block, sums in enumerate(way.sums_b[source]):
                into = sums[first : first + entries.num][entries.inbound(part)]
                if len(into):
                    exchange = receive(into, rank, self.tag(2, source, part, block), op_id)
                    way.inbound.setdefault((source, part, block), []).append(exchange)

    def relay(self, way: HostWay, op: TileOp, own_entries: torch.Tensor, *, send: Post, op_id: str) -> list[Exchange]:
        """Pass on one part of source `op.peer`; `own_entries`: where this rank's own go. What is being sent."""
        for part in range(op.part + 1):  # an entry that two ranks need has come with the earlier part
            arrived = way.arriving.pop((op.peer, part), None)
            if arrived is not None:
                arrived.wait()
        passed, sent = self.passed[op.peer], []
        for rank in self.here:
            entries = passed.entries[rank]
            if op.part >= len(entries.ends_outbound):
                continue
            which = entries.outbound(op.part)
            rows = way.entries[op.peer].index_select(0, passed.picked[rank][which])
            if rank == self.own:
                own_entries[which] = rows
            elif len(rows):
                sent.append(send(rows, rank, self.tag(1, op.peer, op.part), op_id))
        return sent

    def own_sums(self, way: HostWay, source: int, block: int) -> torch.Tensor:
        """Where this gateway's own partial sums of a source go."""
        passed = self.passed[source]
        first = passed.base[self.own]
        return way.sums_b[source][block][first : first + passed.entries[self.own].num]

    def merge(self, way: HostWay, op: TileOp, lanes: Lanes) -> torch.Tensor | None:
        """The sums of this host for source `op.peer` that are complete with a part; None: there are none."""
        for part in range(op.part + 1):
            for exchange in way.inbound.pop((op.peer, part, op.block), ()):
                exchange.wait()
        passed = self.passed[op.peer]
        places_NC = passed.places_NC[passed.whole.entries.inbound(op.part)]
        return sum_places(way.sums_b[op.peer][op.block], places_NC, lanes=lanes) if len(places_NC) else None
