"""The two products of routed experts, tile by tile, for executors that compute while rows travel.

A tile is rows of one slot from one source, or of a joint slot from all of them, source by source (`plan/moe/overlap/tiles/types.py`). Every tile is computed by the same operations on the same shapes whenever its
turn comes, and the second product always in the same columns, so that results do not depend on the order of work. Gradients of weights
are taken over all rows of a slot at once, slot after slot.

The row weight multiplies the activation before the second product, as in `kernels/ops/grouped.py`, whose `reference` is the plain twin. In the padded
buffers a tile has `padded_rows` rows, zeros below its own, and so has a slot: they add nothing to any product.

Legend: n entries of a source, r rows of a tile, m with padding, P rows of the padded buffers, H hidden, f expert width, F = 2f, e slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F

from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.shapes import padded_rows, spaced
from phalanx.plan.moe.overlap import BLOCK_COLUMNS, most_blocks
from phalanx.plan.moe.overlap.tiles import ALL, Tile

COLUMNS = BLOCK_COLUMNS
"""Least columns of a unit of the second product."""
ONE_BUFFER = 1 << 20
"""Most elements of a buffer that all slots share."""


def column_units(hidden: int) -> int:
    """Number of equal units of columns into which the second product is always cut."""
    return most_blocks(hidden, COLUMNS)


def block_units(hidden: int, count: int) -> list[list[slice]]:
    """The units of columns of each of `count` blocks (at most `column_units(hidden)`), about equal numbers."""
    units, out = column_units(hidden), []
    size = hidden // units
    for i in range(count):
        out.append([slice(u * size, (u + 1) * size) for u in range(units * i // count, units * (i + 1) // count)])
    return out


@dataclass(frozen=True)
class TilePiece:
    """Rows of one source in a tile."""

    source: int
    start: int
    """First row among the rows of the source."""
    num: int
    into: int
    """Where they begin in the tile."""

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.num)

    @property
    def inside(self) -> slice:
        return slice(self.into, self.into + self.num)


@dataclass(frozen=True)
class TilePlace:
    """Where a tile lies: from `at` on in the padded buffers, `size` long; what it is made of."""

    tile: Tile
    at: int
    size: int
    pieces: tuple[TilePiece, ...]
    in_slot: slice
    """Its rows among those of its slot."""

    @property
    def padded(self) -> slice:
        return slice(self.at, self.at + self.size)


class Geometry:
    """The padded buffers of one layer and batch on one rank: slot by slot, in each source by source."""

    def __init__(
        self,
        tiles: Sequence[Sequence[Tile]],
        num_slots: int,
        dtype: torch.dtype,
        *,
        joint_tiles: Sequence[Tile] = (),
    ) -> None:
        """`tiles` of each source; those of the slots of `joint_tiles` say how many rows come, not what is multiplied."""
        together = {tile.slot for tile in joint_tiles}
        rows_PG = _rows_by_slot(tiles, num_slots)
        starts_PG = [[0, *accumulate(rows)] for rows in rows_PG]
        by_slot: list[list[Tile]] = [[] for _ in range(num_slots)]
        for of_source in (*tiles, joint_tiles):
            for tile in of_source:
                if tile.source == ALL or tile.slot not in together:
                    by_slot[tile.slot].append(tile)
        self.slots: list[slice] = []
        """Padded rows of each slot."""
        self.of_slot: list[list[TilePlace]] = []
        at = 0
        for slot, of_slot in enumerate(by_slot):
            first, places = at, []
            for tile in sorted(of_slot, key=lambda tile: (tile.source, tile.first_row)):
                size = padded_rows(tile.rows, dtype)
                if tile.source == ALL:
                    pieces = _pieces(tile, [rows[slot] for rows in rows_PG], [starts[slot] for starts in starts_PG])
                else:
                    pieces = (TilePiece(tile.source, starts_PG[tile.source][slot] + tile.first_row, tile.rows, 0),)
                places.append(TilePlace(tile, at, size, pieces, slice(at - first, at - first + size)))
                at += size
            at = first + padded_rows(at - first, dtype)
            self.slots.append(slice(first, at))
            self.of_slot.append(places)
        self.size = at
        self.of_source: list[list[tuple[int, int]]] = [[] for _ in tiles]
        """Places of each source's rows in the padded buffers, as (first, number) one after the other."""
        for places in self.of_slot:
            for place in places:
                for piece in place.pieces:
                    self.of_source[piece.source].append((place.at + piece.into, piece.num))
        self.place_of = {place.tile: place for places in self.of_slot for place in places}

    @property
    def largest(self) -> int:
        """Rows of the largest tile, padded."""
        return max((p.size for places in self.of_slot for p in places), default=0)


def _rows_by_slot(tiles: Sequence[Sequence[Tile]], num_slots: int) -> list[list[int]]:
    """Rows of each source, slot by slot."""
    found = [[0] * num_slots for _ in tiles]
    for rows, of_source in zip(found, tiles, strict=True):
        for tile in of_source:
            rows[tile.slot] += tile.rows
    return found


def _pieces(tile: Tile, rows_P: Sequence[int], starts_P: Sequence[int]) -> tuple[TilePiece, ...]:
    """Pieces of a joint slot's tile: the slot's rows lie source by source; `starts_P`: where each source's begin among its rows."""
    found, before, end = [], 0, tile.first_row + tile.rows
    for source, (rows, start) in enumerate(zip(rows_P, starts_P, strict=True)):
        low, high = max(before, tile.first_row), min(before + rows, end)
        if low < high:
            found.append(TilePiece(source, start + low - before, high - low, low - tile.first_row))
        before += rows
    return tuple(found)


@dataclass(frozen=True, eq=False)
class SourceRows:
    """Rows of one source: which entry each takes."""

    entries_nH: torch.Tensor
    index: torch.Tensor
    """int64, by row of the source."""


def _gather_pieces(place: TilePlace, sources: Sequence[SourceRows], x_mH: torch.Tensor) -> None:
    """The entries of a tile, zeros below."""
    for piece in place.pieces:
        rows = sources[piece.source]
        torch.index_select(rows.entries_nH, 0, rows.index[piece.rows], out=x_mH[piece.inside])
    if place.tile.rows < place.size:
        x_mH[place.tile.rows :].zero_()


class TileProducts:
    """Operands and buffers of one layer and batch, in one direction after the other. `weights_P1`: (P, 1) weights of the rows, in the type of the products."""

    def __init__(
        self,
        geometry: Geometry,
        w13_e2fH: torch.Tensor,
        w2_eHf: torch.Tensor,
        lanes: Lanes,
        *,
        weights_P1: torch.Tensor,
    ) -> None:
        self.geometry, self.lanes, self.weights_P1 = geometry, lanes, weights_P1
        self.native = lanes.rows_for(w2_eHf)
        self.w13_shape = w13_e2fH.shape
        self.w13_eFH, self.w2_eHf = w13_e2fH.flatten(1, 2), w2_eHf
        self.width, self.hidden = w2_eHf.shape[2], w2_eHf.shape[1]
        self.unit = self.hidden // column_units(self.hidden)
        self._x = [spaced(geometry.largest, self.hidden, w2_eHf) for _ in range(lanes.count)]

    def _gather(self, place: TilePlace, sources: Sequence[SourceRows], lane: int) -> torch.Tensor:
        """The tile's entries, zeros below."""
        x_mH = self._x[lane][: place.size]
        _gather_pieces(place, sources, x_mH)
        return x_mH

    def _by_slot(self, columns: int, *, space: bool = False) -> list[torch.Tensor]:
        """Room for the rows of each slot. One large buffer for all would be mapped and cleared anew at every call: heaps keep nothing that large."""
        rows = [slot.stop - slot.start for slot in self.geometry.slots]
        make = partial(spaced, columns=columns, like=self.w2_eHf) if space else partial(self._room, columns)
        if self.geometry.size * columns <= ONE_BUFFER:
            return list(make(self.geometry.size).split(rows))
        return [make(n) for n in rows]

    def _room(self, columns: int, rows: int) -> torch.Tensor:
        return self.w2_eHf.new_empty(rows, columns)

    def _of(self, buffers: Sequence[torch.Tensor], place: TilePlace) -> torch.Tensor:
        """The tile's rows."""
        return buffers[place.tile.slot][place.in_slot]

    # ---- forward --------------------------------------------------------------------------------------------------------------

    def open_forward(self, blocks: int) -> None:
        """Make room."""
        size, like = self.geometry.size, self.w2_eHf
        self.columns = block_units(self.hidden, blocks)
        self.gate_up_e = self._by_slot(2 * self.width, space=True)
        self.h_e = self._by_slot(self.width)
        self.out_b = [like.new_empty(size, len(units) * self.unit) for units in self.columns]

    def first(self, places: Sequence[TilePlace], sources: Sequence[SourceRows]) -> None:
        """`h = weight * silu(gate) * up` of tiles; the rows of each source."""
        self.lanes.run(lambda place, lane: self._first(place, sources, lane), places)

    def _first(self, place: TilePlace, sources: Sequence[SourceRows], lane: int) -> None:
        gate_up_mF, h_mf = self._of(self.gate_up_e, place), self._of(self.h_e, place)
        torch.mm(self._gather(place, sources, lane), self.w13_eFH[place.tile.slot].T, out=gate_up_mF)
        self._activate(gate_up_mF, h_mf)
        h_mf.mul_(self.weights_P1[place.padded])

    def _activate(self, gate_up_mF: torch.Tensor, h_mf: torch.Tensor) -> None:
        if self.native is not None:
            self.native.swiglu_forward(gate_up_mF, h_mf)
        else:
            torch.mul(F.silu(gate_up_mF[:, : self.width]), gate_up_mF[:, self.width :], out=h_mf)

    def second(self, places: Sequence[TilePlace], block: int) -> None:
        """`h w2` of tiles, in the columns of a block."""
        self.lanes.run(lambda place, _: self._products(place, self.h_e, self.w2_eHf[place.tile.slot].T, block), places)

    def _products(self, place: TilePlace, left_e: Sequence[torch.Tensor], right_kH: torch.Tensor, block: int) -> None:
        out_mB, left_mk = self.out_b[block][place.padded], self._of(left_e, place)
        for i, columns in enumerate(self.columns[block]):
            torch.mm(left_mk, right_kH[:, columns], out=out_mB[:, i * self.unit : (i + 1) * self.unit])

    # ---- backward -------------------------------------------------------------------------------------------------------------

    def open_backward(self, blocks: int, gate_up_e: Sequence[torch.Tensor]) -> None:
        """Make room; `gate_up_e` is what the forward pass kept, empty: it is computed again."""
        size, like = self.geometry.size, self.w2_eHf
        self.columns = block_units(self.hidden, blocks)
        self._again = not gate_up_e
        self.gate_up_e = list(gate_up_e) or self._by_slot(2 * self.width, space=True)
        self.h_e = self._by_slot(self.width)
        self.d_gate_up_e = self._by_slot(2 * self.width, space=True)
        wide = torch.promote_types(like.dtype, torch.float32)
        self.dots_P = like.new_empty(size, dtype=wide)
        self.out_b = [like.new_empty(size, len(units) * self.unit) for units in self.columns]
        self._dh = [like.new_empty(self.geometry.largest, self.width) for _ in range(self.lanes.count)]

    def first_backward(
        self, places: Sequence[TilePlace], sources: Sequence[SourceRows], grads: Sequence[SourceRows]
    ) -> None:
        """The gradient of gate and up, that of the row weights (`dots_P`), and `h` again, of tiles; by source. `entries_nH` of `grads`: of the output."""
        self.lanes.run(lambda place, lane: self._first_backward(place, sources, grads, lane), places)

    def _first_backward(
        self, place: TilePlace, sources: Sequence[SourceRows], grads: Sequence[SourceRows], lane: int
    ) -> None:
        slot = place.tile.slot
        gate_up_mF, h_mf, d_mF = (self._of(t, place) for t in (self.gate_up_e, self.h_e, self.d_gate_up_e))
        if self._again:
            torch.mm(self._gather(place, sources, lane), self.w13_eFH[slot].T, out=gate_up_mF)
        dh_mf = self._dh[lane][: place.size]
        torch.mm(self._gather(place, grads, lane), self.w2_eHf[slot], out=dh_mf)
        self._activate_backward(gate_up_mF, dh_mf, h_mf, d_mF, self.dots_P[place.padded])
        weights_m1 = self.weights_P1[place.padded]
        h_mf.mul_(weights_m1)
        d_mF.mul_(weights_m1)

    def _activate_backward(
        self,
        gate_up_mF: torch.Tensor,
        dh_mf: torch.Tensor,
        h_mf: torch.Tensor,
        d_mF: torch.Tensor,
        dots_m: torch.Tensor,
    ) -> None:
        if self.native is not None:
            self.native.swiglu_backward(gate_up_mF, dh_mf, h_mf, d_mF, dots_m)
            return
        gate_mf, up_mf = gate_up_mF[:, : self.width], gate_up_mF[:, self.width :]
        silu_mf = F.silu(gate_mf)
        torch.mul(silu_mf, up_mf, out=h_mf)
        torch.sum(dh_mf.to(dots_m.dtype) * h_mf.to(dots_m.dtype), 1, out=dots_m)
        torch.mul(dh_mf, silu_mf, out=d_mF[:, self.width :])
        d_mF[:, : self.width].copy_(torch.ops.aten.silu_backward(dh_mf * up_mf, gate_mf))

    def second_backward(self, places: Sequence[TilePlace], block: int) -> None:
        """The gradient of the rows of tiles, in the columns of a block."""
        self.lanes.run(
            lambda place, _: self._products(place, self.d_gate_up_e, self.w13_eFH[place.tile.slot], block), places
        )

    def open_weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where gradients of weights go: of `w13` and of `w2`."""
        d_w13_eFH = torch.empty(self.w13_eFH.shape, dtype=self.w2_eHf.dtype, device=self.w2_eHf.device)
        return d_w13_eFH.view(self.w13_shape), torch.empty_like(self.w2_eHf, memory_format=torch.contiguous_format)

    def weights(
        self,
        slot: int,
        sources: Sequence[SourceRows],
        grads: Sequence[SourceRows],
        d_w13_e2fH: torch.Tensor,
        d_w2_eHf: torch.Tensor,
    ) -> None:
        """Gradients of one slot's weights, over the rows of all sources."""
        place = self.geometry.slots[slot]
        d_w13_FH, d_w2_Hf = d_w13_e2fH[slot].flatten(0, 1), d_w2_eHf[slot]
        if place.start == place.stop:
            d_w13_FH.zero_()
            d_w2_Hf.zero_()
            return
        self._zero_padding(slot)
        x_mH = spaced(place.stop - place.start, self.hidden, self.w2_eHf)
        torch.mm(self._gather_slot(slot, grads, x_mH).T, self.h_e[slot], out=d_w2_Hf)
        torch.mm(self.d_gate_up_e[slot].T, self._gather_slot(slot, sources, x_mH), out=d_w13_FH)

    def _gather_slot(self, slot: int, of_source: Sequence[SourceRows], x_mH: torch.Tensor) -> torch.Tensor:
        first, end = self.geometry.slots[slot].start, 0
        for place in self.geometry.of_slot[slot]:
            end = place.at - first + place.size
            _gather_pieces(place, of_source, x_mH[place.at - first : end])
        x_mH[end:].zero_()
        return x_mH

    def _zero_padding(self, slot: int) -> None:
        """Rows of a slot behind its last tile: nothing has written them."""
        places = self.geometry.of_slot[slot]
        filled = places[-1].padded.stop - self.geometry.slots[slot].start
        self.h_e[slot][filled:].zero_()
        self.d_gate_up_e[slot][filled:].zero_()
