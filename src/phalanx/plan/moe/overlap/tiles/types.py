"""What happens inside one MoE layer on one rank, as a list of operations: the contract between planner, executor, cost model and simulator.

One layer is two products with a message before and after. Forward, rows come from their *sources* (ranks of `ep_etp`), go through the first
projection and the activation, then through the second projection, and one row for each token goes back, summed over the token's copies
on this rank. Backward is the same list of operations: gradients of the output come, the gradient of the hidden rows is the first product, that
of the input the second, and one row for each token goes back; gradients of weights run while those travel.

Words:

    tile      rows of one slot from one source, at most `tile_rows` of them in the order of their tokens. Tiles are numbered per source: slot by
              slot (the most loaded first where the schedule says so), then row by row. What is computed for a tile never depends on the schedule: same
              rows, same shapes, same bits.
    joint     a slot whose rows of all sources are multiplied together, as one run of rows cut into tiles: weights are read once, and products are larger. Which slots are
              depends on the counts alone. Joint slots are numbered last. Their tiles by source, as above, only say which rows travel together.
    part      consecutive tiles of one source
    outbound     entries (tokens) that a source sends to this rank, ordered by (first tile that needs it, token). A message carries those of one part.
    inbound    the same entries on their way back, ordered by (last tile that adds to it, token). A message carries those of one part, one block of columns.
    block     columns of the second product's result, equal numbers, all tiles alike

    gateway   the rank through which a source's entries enter another host, where a host gets one copy of a token (`hosts.py`)

Sums never depend on the schedule either: copies of a token on one rank are added in the order of the slots, then partial sums in the order of the ranks. With gateways
the sums of a host's ranks are added up there, in the order of the ranks, and take their gateway's place among the partial sums at the source: other
sums than without, so bits depend on the transport, and on which ranks share a host.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal

from phalanx.core.hashed import Hashed
from phalanx.core.messages import message

Transport = Literal["all_to_all", "all_gather", "dedup", "dedup_host"]
"""What a source sends: to each rank an entry for each (token, slot) pair; for each of its tokens; for each of its tokens that the rank needs; to each other
host an entry for each of its tokens that the host needs."""
Order = Literal["serial", "own_first", "arrival"]
Kind = Literal[
    "send",
    "wait",
    "first",
    "second",
    "first_all",
    "second_all",
    "return",
    "wait_return",
    "sum",
    "weights",
    "shared",
    "relay",
    "merge",
]
"""
send         entries of one part to `peer` (a part of the tiles that `peer` has of this rank; to a gateway: what its host needs of that part first)
wait         entries of one part of source `peer`: from here on they are there
first        first product of all tiles of (`peer`, `part`) that are not of joint slots; `peer` is the source, this rank itself included
second       second product of the same tiles, columns of `block`
first_all    first product of all rows of joint slot `part`
second_all   second product of the same, columns of `block`
return       sum the copies of the entries that are complete with `part`, in `block`, and send them back to `peer` (own rank: put them in place)
wait_return  partial sums of (`peer`, `part`, `block`) are there: `part` of the tiles that `peer` has of this rank
sum          add up the partial sums of all ranks for each of this rank's tokens
weights      gradients of the weights of local slot `part` (backward only)
shared       whatever the caller wants to be computed in this gap (a shared expert)
relay        gateway: entries of parts up to `part` of source `peer`, a rank of another host, come; each rank of this host gets those of `part` that it needs
merge        gateway: partial sums of this host's ranks for (`peer`, up to `part`, `block`) come; those that are complete with `part` are added up and sent to `peer`
"""


@dataclass(frozen=True, slots=True)
class TileOp:
    """One operation of one rank. Fields that a kind does not name are -1."""

    kind: Kind
    peer: int = -1
    """Position in the group `ep_etp`."""
    part: int = -1
    block: int = -1

    def __str__(self) -> str:
        """`first 2.0`, `return 2.0.1`: kind, peer, part, block, those that it has."""
        return " ".join([self.kind, ".".join(str(n) for n in (self.peer, self.part, self.block) if n >= 0)]).strip()


@message
@dataclass(frozen=True, kw_only=True)
class TileSchedule:
    """What may differ from one batch to the next without changing a bit of the result. The same on all ranks of the group."""

    parts: int = 1
    """Most parts of about equal rows into which the tiles of a source are cut."""
    blocks: int = 1
    """Blocks of the columns."""
    order: Order = "serial"
    """serial: everything has arrived before anything is computed, everything is computed before anything goes back. own_first: rows of this rank
    while others travel, then each part as it comes in ring order. arrival: own rows only until the first part is expected, the rest of them
    while the results go back."""
    own_before: float = 1.0
    """arrival: the share of the own first product that comes before the first wait."""
    seed: int | None = None
    """Not None: any legal order, drawn from this seed (tests)."""
    hot_first: bool = False
    """Tiles of the slots with most rows come first, so that what fills whole tiles is computed, and on its way back, first."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of one slot from one source."""

    slot: int
    """Local slot."""
    source: int
    """ALL in the tiles of joint slots."""
    rows: int
    first_row: int
    """First row within the rows of (slot, source)."""


ALL = -1
"""Stands in place of a source for all of them."""


@dataclass(frozen=True, kw_only=True)
class RankPlan(Hashed):
    """The operations of one rank for one layer and batch, in the order in which it carries them out. A topological order of what needs what."""

    rank: int
    size: int
    """Ranks of `ep_etp`."""
    direction: Literal["forward", "backward"]
    tiles: tuple[tuple[Tile, ...], ...]
    """Tiles of each source's rows that are here."""
    part_ends: tuple[tuple[int, ...], ...]
    """Ends of each source's parts in `tiles[source]`. A source without rows has no parts."""
    peer_part_ends: tuple[tuple[int, ...], ...]
    """Ends of the parts of the tiles that each peer has of this rank's rows."""
    blocks: int
    ops: tuple[TileOp, ...]
    num_slots: int = 0
    """Local slots, with rows or without."""
    schedule: TileSchedule = TileSchedule()
    """What the operations were ordered by."""
    hosts: tuple[int, ...] = ()
    """Host of each rank, where messages between hosts go through gateways; empty: every message goes straight."""
    relay_parts: tuple[int, ...] = ()
    """Parts of each source that this rank, being its gateway on another host, passes on. Empty without gateways."""

    joint_tiles: tuple[Tile, ...] = ()
    """Tiles of all sources' rows of the joint slots: `source` is ALL, `first_row` counts the slot's rows source by source."""

    @cached_property
    def joint(self) -> tuple[int, ...]:
        """Local slots whose rows of all sources are multiplied together, in the order of their tiles."""
        return tuple(dict.fromkeys(tile.slot for tile in self.joint_tiles))

    def tiles_of_part(self, source: int, part: int) -> tuple[Tile, ...]:
        """Tiles of one part of a source."""
        ends = self.part_ends[source]
        return self.tiles[source][ends[part - 1] if part else 0 : ends[part]]

    def rows(self, source: int, part: int) -> int:
        """Rows of one part of a source."""
        return sum(tile.rows for tile in self.tiles_of_part(source, part))

    def rows_alone(self, source: int, part: int) -> int:
        """Rows of one part of a source that are not of joint slots."""
        return sum(tile.rows for tile in self.tiles_of_part(source, part) if tile.slot not in self.joint)

    def slot_rows(self, slot: int) -> int:
        """Rows of all sources."""
        return sum(tile.rows for tiles in self.tiles for tile in tiles if tile.slot == slot)

    def to_dict(self) -> dict[str, Any]:
        """The whole plan as plain data, which `tests/oracles/overlap_check.py` reads back."""
        return {
            "rank": self.rank,
            "size": self.size,
            "direction": self.direction,
            "num_slots": self.num_slots,
            "tiles": [[[t.slot, t.rows, t.first_row] for t in tiles] for tiles in self.tiles],
            "part_ends": [list(ends) for ends in self.part_ends],
            "peer_part_ends": [list(ends) for ends in self.peer_part_ends],
            "blocks": self.blocks,
            "schedule": asdict(self.schedule),
            "hosts": list(self.hosts),
            "relay_parts": list(self.relay_parts),
            "joint_tiles": [[t.slot, t.rows, t.first_row] for t in self.joint_tiles],
            "ops": [[op.kind, op.peer, op.part, op.block] for op in self.ops],
        }

    def explain(self) -> str:
        """The plan as a person reads it: who brings how many rows in how many tiles and parts, then the operations in order."""
        lines = [
            f"rank {self.rank} of {self.size}, {self.direction}: {len(self.ops)} operations, {self.num_slots} slots, {self.blocks} block{'s' if self.blocks > 1 else ''} of columns"
        ]
        for source, (tiles, ends) in enumerate(zip(self.tiles, self.part_ends, strict=True)):
            parts = " + ".join(str(self.rows(source, part)) for part in range(len(ends)))
            who = "own rows" if source == self.rank else f"from {source}"
            lines.append(f"  {who}: {len(tiles)} tiles, rows by part {parts}" if ends else f"  {who}: none")
        if self.joint:
            slots = ", ".join(f"{slot} ({self.slot_rows(slot)} rows)" for slot in self.joint)
            lines.append(f"  multiplied together, of all sources, in {len(self.joint_tiles)} tiles: slots {slots}")
        return "\n".join([*lines, *(f"  {number:4d} {op}" for number, op in enumerate(self.ops))])
