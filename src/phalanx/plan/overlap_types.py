"""What happens inside one MoE layer on one rank, as a list of operations: the contract between planner, executor, cost model and simulator.

One layer is two products with a message before and after. Forward, rows come from their *sources* (ranks of `ep_etp`), go through the first
projection and the activation, then through the second projection, and one row for each token goes back, summed over the token's copies
on this rank. Backward is the same list of operations: gradients of the output come, the gradient of the hidden rows is the first product, that
of the input the second, and one row for each token goes back; gradients of weights run while those travel.

Words:

    tile      rows of one slot from one source, at most `tile_rows` of them in the order of their tokens. Tiles are numbered per source: slot by
              slot, then row by row. What is computed for a tile never depends on the schedule: same rows, same shapes, same bits.
    part      consecutive tiles of one source
    going     entries (tokens) that a source sends to this rank, ordered by (first tile that needs it, token). A message carries those of one part.
    coming    the same entries on their way back, ordered by (last tile that adds to it, token). A message carries those of one part, one block of columns.
    block     columns of the second product's result, equal numbers, all tiles alike

Sums never depend on the schedule either: copies of a token on one rank are added in the order of the slots, then partial sums in the order of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transport = Literal["all_to_all", "dedup", "all_gather"]
"""What a source sends to a rank: an entry for each (token, slot) pair; for each of its tokens that the rank needs; for each of its tokens."""
Kind = Literal["send", "wait", "first", "second", "return", "wait_return", "sum", "weights", "shared"]
"""
send         entries of one part to `peer` (a part of the tiles that `peer` has of this rank)
wait         entries of one part from `peer`: from here on they are there
first        first product of all tiles of (`peer`, `part`); `peer` is the source, this rank itself included
second       second product of all tiles of (`peer`, `part`), columns of `block`
return       sum the copies of the entries that are complete with `part`, in `block`, and send them back to `peer` (own rank: put them in place)
wait_return  partial sums of (`peer`, `part`, `block`) are there: `part` of the tiles that `peer` has of this rank
sum          add up the partial sums of all ranks for each of this rank's tokens
weights      gradients of the weights of local slot `part` (backward only)
shared       whatever the caller wants to be computed in this gap (a shared expert)
"""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one rank. Fields that a kind does not name are -1."""

    kind: Kind
    peer: int = -1
    """Position in the group `ep_etp`."""
    part: int = -1
    block: int = -1


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What may differ from one batch to the next without changing a bit of the result. The same on all ranks of the group."""

    parts: int = 1
    """Into how many parts of about equal rows the tiles of a source are cut, at most."""
    blocks: int = 1
    """Of the columns."""
    order: Literal["serial", "own_first", "arrival"] = "serial"
    """serial: everything has arrived before anything is computed, everything is computed before anything goes back. own_first: rows of this rank
    while others travel, then each part as it comes in ring order. arrival: own rows only until the first part is expected, the rest of them
    while the results go back."""
    own_before: float = 1.0
    """arrival: the share of the own first product that comes before the first wait."""
    seed: int | None = None
    """Not None: any legal order, drawn from this seed (tests)."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one slot from one source."""

    slot: int
    """Local slot."""
    source: int
    rows: int
    first_row: int
    """Within the rows of (slot, source)."""


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """The operations of one rank for one layer and batch, in the order in which it carries them out. A topological order of what needs what."""

    rank: int
    size: int
    """Ranks of `ep_etp`."""
    direction: Literal["forward", "backward"]
    tiles: tuple[tuple[Tile, ...], ...]
    """By source: the tiles of its rows that are here."""
    part_ends: tuple[tuple[int, ...], ...]
    """By source: where its parts end in `tiles[source]`. A source without rows has no parts."""
    peer_part_ends: tuple[tuple[int, ...], ...]
    """By peer: where the parts end of the tiles that *it* has of this rank's rows."""
    blocks: int
    ops: tuple[Op, ...]
