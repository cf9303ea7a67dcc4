"""The plan of overlap inside one MoE layer: from the counts of a batch and a schedule to the operations of one rank.

Decides the cut of rows into tiles and parts, and through `order.py` the order of all operations. Whether rows and columns may be cut at all is not
decided here but derived from what the operations read (`axis.py`). Must never change, because both ends of a message rely on it without asking:

- tiles depend on counts and `tile_rows` alone, never on the schedule: that is why no schedule changes a bit. The schedule may put those of the most loaded slots
  first (`hot_first`), which changes their numbers, and no sum: sums go by slots;
- so do the joint slots, whose rows of all sources are multiplied together; where tokens go through gateways there are none: a part that waits for rows of another
  number than its own could close a circle there (`order.py`);
- parts depend on the tiles, their order and the number of parts alone.

A pure function of gathered counts: every rank plans for itself. Words: see `types.py`. P sources (ranks of `ep_etp`), G slots of the group.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Literal

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe import DispatchPlan
from phalanx.plan.moe.overlap.tiles.axis import BACKWARD, FORWARD, Layer, cuts_of
from phalanx.plan.moe.overlap.tiles.hosts import message_parts, relay_parts
from phalanx.plan.moe.overlap.tiles.order import (
    NONE,
    JointSlot,
    Parts,
    forward_order,
    tile_schedule_problems,
    with_weights,
)
from phalanx.plan.moe.overlap.tiles.types import ALL, RankPlan, Tile, TileSchedule

__all__ = ["backward_of", "part_ends", "plan_overlap", "tile_sizes", "tiles_of"]


@lru_cache(maxsize=1 << 14)
def tile_sizes(rows: int, tile_rows: int) -> tuple[int, ...]:
    """Rows of each tile of `rows` rows: full tiles and a rest, or tiles that differ by one row where the rest would be below half a tile."""
    full, rest = divmod(rows, tile_rows)
    if not rest:
        return (tile_rows,) * full
    if rest >= tile_rows // 2 or not full:
        return (*(tile_rows,) * full, rest)
    share, larger = divmod(rows, full + 1)
    return (*(share + 1,) * larger, *(share,) * (full + 1 - larger))


def tiles_of(
    rows_G: Sequence[int], *, source: int, tile_rows: int, slots: Sequence[int] | None = None
) -> tuple[Tile, ...]:
    """Tiles of one source on one rank, slot by slot in the order of `slots`; `rows_G` are its rows for each LOCAL slot. A slot without rows has no tile."""
    tiles = []
    for slot in range(len(rows_G)) if slots is None else slots:
        first = 0
        for size in tile_sizes(int(rows_G[slot]), tile_rows):
            tiles.append(Tile(slot, source, size, first))
            first += size
    return tuple(tiles)


def part_ends(tiles: Sequence[Tile], parts: int) -> tuple[int, ...]:
    """Where at most `parts` parts of about equal rows end in `tiles`; none is empty, the last ends with the tiles. () for no tiles."""
    return ends_of_sizes([tile.rows for tile in tiles], parts)


def ends_of_sizes(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
    """`part_ends` for the rows of the tiles alone: each end is the tile boundary nearest to an even share, the earlier of two."""
    if not sizes:
        return ()
    if parts == 1:
        return (len(sizes),)
    ends_of_tiles = list(accumulate(sizes))
    total = ends_of_tiles[-1]
    found: list[int] = []
    for part in range(1, parts):
        wanted = total * part / parts
        at = bisect_left(ends_of_tiles, wanted)
        if at and wanted - ends_of_tiles[at - 1] <= ends_of_tiles[at] - wanted:
            at -= 1
        if at + 1 < len(sizes) and (not found or at + 1 > found[-1]):
            found.append(at + 1)
    return (*found, len(sizes))


@dataclass(frozen=True)
class SlotCounts:
    """Rows by local slot that one rank has to do with."""

    come: list[list[int]]
    """Rows from each source to this rank's slots."""
    go: list[list[int]]
    """Rows from this rank to the slots of each ep coordinate."""


def rows_of(dispatch: DispatchPlan, *, rank: int) -> SlotCounts:
    """What comes to a rank and what it sends; the ETP ranks of an ep coordinate all get the same rows."""
    rows = dispatch.rows_PG.reshape(dispatch.ep * dispatch.etp, dispatch.ep, -1)
    return SlotCounts(rows[:, rank // dispatch.etp].tolist(), rows[rank].tolist())


def cut_rows(rows_G: Sequence[int], tile_rows: int, slots: Sequence[int] | None = None) -> list[int]:
    """Rows of each tile of one source on one rank, slot by slot in the order of `slots`."""
    ordered = rows_G if slots is None else [rows_G[slot] for slot in slots]
    return [size for rows in ordered for size in tile_sizes(rows, tile_rows)]


def slots_of(rows_G: Sequence[int], tile_rows: int, slots: Sequence[int] | None = None) -> list[int]:
    """The slot of each tile of `cut_rows`."""
    ordered = range(len(rows_G)) if slots is None else slots
    return [slot for slot in ordered for _ in tile_sizes(rows_G[slot], tile_rows)]


THIN = 8
"""Slots whose rows of all sources are at most this part of a tile, in the mean of a rank, are all joint: calling a product of so few rows costs more
than what it can hide."""


def joint_slots(dispatch: DispatchPlan, *, tile_rows: int) -> list[tuple[int, ...]]:
    """Local slots of each ep coordinate whose rows of all sources are multiplied together, ascending.

    Rows of the first slots, half of all, stay apart: they are what can be computed before everything has come, and after the last
    has left. Of the others, and of all of a rank whose slots are thin (`THIN`), those are joint that have fewer
    tiles so. Depends on nothing but counts and `tile_rows`.
    """
    loads_G = dispatch.rows_PG.sum(0)
    saves_G = -(-loads_G // tile_rows) < (-(-dispatch.rows_PG // tile_rows)).sum(0)  # `tile_sizes` makes as many tiles
    loads_EG = loads_G.reshape(dispatch.ep, -1)
    before_EG = loads_EG.cumsum(1) - loads_EG
    all_E1 = loads_EG.sum(1, keepdims=True)
    is_joint = saves_G.reshape(dispatch.ep, -1) & (
        (2 * before_EG >= all_E1) | (THIN * all_E1 <= tile_rows * dispatch.slots_per_rank)
    )
    return [tuple(of_ep.nonzero()[0].tolist()) for of_ep in is_joint]


def slot_orders(
    dispatch: DispatchPlan, schedule: TileSchedule, *, joint: Sequence[tuple[int, ...]]
) -> list[list[int] | None]:
    """Local slots of each ep coordinate in the order in which their tiles are numbered, `joint` ones (of each coordinate; () for
    none) last. None: as they are."""
    num, none = dispatch.slots_per_rank, [()] * dispatch.ep
    if not schedule.hot_first:
        return [
            None if last == tuple(range(num - len(last), num)) else sorted(range(num), key=last.__contains__)
            for last in joint or none
        ]
    loads = dispatch.rows_PG.sum(0).reshape(dispatch.ep, -1).tolist()
    return [
        sorted(range(num), key=lambda slot: (slot in last, -load[slot]))
        for load, last in zip(loads, joint or none, strict=True)
    ]


def part_counts(
    dispatch: DispatchPlan, schedule: TileSchedule, *, tile_rows: int, ranks: Iterable[int]
) -> dict[tuple[int, int], int]:
    """Parts that each of `ranks` has of each source's tiles, by (source, rank), where tokens go through gateways."""
    rows = dispatch.rows_PG.reshape(dispatch.ep * dispatch.etp, dispatch.ep, -1).tolist()
    slots = slot_orders(dispatch, schedule, joint=())
    of_ep = {
        (source, ep): len(ends_of_sizes(cut_rows(of_source[ep], tile_rows, slots[ep]), schedule.parts))
        for ep in {rank // dispatch.etp for rank in ranks}
        for source, of_source in enumerate(rows)
    }
    return {(source, rank): of_ep[source, rank // dispatch.etp] for rank in ranks for source in range(len(rows))}


def plan_overlap(
    dispatch: DispatchPlan,
    schedule: TileSchedule,
    *,
    rank: int,
    tile_rows: int,
    direction: Literal["forward", "backward"] = "forward",
    host_of_rank: Sequence[int] | None = None,
    through_hosts: bool = False,
    has_shared: bool = False,
    layer: Layer | None = None,
) -> RankPlan:
    """The plan of one rank, `rank` being its position in `ep_etp` (`ep * ETP + etp`).

    Every source of the group sends to every rank the rows for its slots; the ETP ranks of an ep coordinate all get the same. `host_of_rank` orders
    by distance (None: all on one host). `through_hosts`: one copy of a token goes to each other host, through a gateway (`hosts.py`). `has_shared`: the layer has a shared expert to compute in a gap. `layer`: what its operations read and write, where
    they are not those of an ordinary expert; a schedule that cuts what must stay whole is refused. Raises `PlanError` with all problems.
    """
    size = dispatch.ep * dispatch.etp
    problems = [*_problems(schedule, size, rank, tile_rows, host_of_rank)]
    if through_hosts and host_of_rank is None:
        rule = "forwarding inside hosts needs to know which ranks share one"
        problems.append(Problem(where="host_of_rank", value=None, rule=rule))
    problems += cuts_of(layer or (FORWARD if direction == "forward" else BACKWARD)).problems(schedule)
    raise_if(problems, PlanError, subject="overlap")
    hosts = tuple(host_of_rank) if host_of_rank is not None else (0,) * size
    plan = _without_ops(dispatch, schedule, rank, tile_rows, hosts if through_hosts else ())
    plan = replace(plan, ops=forward_order(schedule, parts_of(plan, hosts), has_shared=has_shared))
    return plan if direction == "forward" else backward_of(plan)


def _without_ops(
    dispatch: DispatchPlan, schedule: TileSchedule, rank: int, tile_rows: int, hosts: tuple[int, ...]
) -> RankPlan:
    """Tiles and parts of the forward pass; `hosts`: by rank, empty where nothing is forwarded inside them."""
    size = dispatch.ep * dispatch.etp
    joint = [] if hosts else joint_slots(dispatch, tile_rows=tile_rows)
    sizes, slots = rows_of(dispatch, rank=rank), slot_orders(dispatch, schedule, joint=joint)
    own_slots = slots[rank // dispatch.etp]
    tiles = tuple(
        tiles_of(rows, source=source, tile_rows=tile_rows, slots=own_slots) for source, rows in enumerate(sizes.come)
    )
    go_ends = [
        ends_of_sizes(cut_rows(rows, tile_rows, order), schedule.parts)
        for rows, order in zip(sizes.go, slots, strict=True)
    ]
    relay: tuple[int, ...] = ()
    if hosts:
        here = [other for other in range(size) if hosts[other] == hosts[rank]]
        counts = part_counts(dispatch, schedule, tile_rows=tile_rows, ranks=here)
        relay = relay_parts(hosts, rank, lambda source, peer: counts[source, peer])
    own_joint = joint[rank // dispatch.etp] if joint else ()
    return RankPlan(
        rank=rank,
        size=size,
        direction="forward",
        tiles=tiles,
        part_ends=tuple(part_ends(of_source, schedule.parts) for of_source in tiles),
        peer_part_ends=tuple(go_ends[peer // dispatch.etp] for peer in range(size)),
        blocks=schedule.blocks,
        ops=(),
        num_slots=dispatch.slots_per_rank,
        schedule=schedule,
        hosts=hosts,
        relay_parts=relay,
        joint_tiles=joint_tiles(sizes.come, own_joint, tile_rows=tile_rows, slots=own_slots) if joint else (),
    )


def parts_of(plan: RankPlan, hosts: Sequence[int] = ()) -> Parts:
    """How many parts a plan has for and from whom; `hosts` orders them by distance, where the plan does not."""
    hosts = plan.hosts or hosts or (0,) * plan.size
    go = tuple(map(len, plan.peer_part_ends))
    return Parts(
        rank=plan.rank,
        come=tuple(map(len, plan.part_ends)),
        go=message_parts(plan.hosts, plan.rank, go) if plan.hosts else go,
        is_far=tuple(host != hosts[plan.rank] for host in hosts),
        blocks=plan.blocks,
        num_slots=plan.num_slots,
        relay=plan.relay_parts,
        joint=tuple(joint_parts(plan.joint, [[tile.slot for tile in tiles] for tiles in plan.tiles], plan.part_ends)),
    )


def joint_tiles(
    come: Sequence[Sequence[int]], joint: Sequence[int], *, tile_rows: int, slots: Sequence[int] | None
) -> tuple[Tile, ...]:
    """Tiles of the rows of all sources for the joint slots of a rank; `come`: rows of each source by slot, `slots` as `slot_orders` gives them."""
    rows_G = [sum(rows) for rows in zip(*come, strict=True)]
    return tiles_of(
        rows_G, source=ALL, tile_rows=tile_rows, slots=joint if slots is None else slots[len(slots) - len(joint) :]
    )


def joint_parts(joint: Sequence[int], slots: Sequence[Sequence[int]], ends: Sequence[Sequence[int]]) -> list[JointSlot]:
    """Parts in which rows of joint slots come; `slots` of the tiles of each source, `ends` of its parts."""
    where = [_slot_parts(frozenset(joint), *of_source) for of_source in zip(slots, ends, strict=True)] if joint else []
    nowhere = (NONE, NONE)
    return [JointSlot(slot, *zip(*(at.get(slot, nowhere) for at in where), strict=True)) for slot in joint]


def _slot_parts(joint: frozenset[int], slots: Sequence[int], ends: Sequence[int]) -> dict[int, tuple[int, int]]:
    """First and last part of one source with tiles of each joint slot. Joint slots come last."""
    found: dict[int, tuple[int, int]] = {}
    part = len(ends) - 1
    for number in range(len(slots) - 1, -1, -1):
        slot = slots[number]
        if slot not in joint:
            break
        while part and number < ends[part - 1]:
            part -= 1
        found[slot] = part, found[slot][1] if slot in found else part
    return found


def backward_of(plan: RankPlan) -> RankPlan:
    """The backward plan of a forward plan: the same tiles, parts, messages and order, and the gradients of the weights.

    What went to a rank comes back as a gradient from there and goes the same way again, so the lists are the same; see `types.py`.
    """
    if plan.direction != "forward":
        rule = "the backward plan is made of a forward one"
        raise_if([Problem(where="plan.direction", value=plan.direction, rule=rule)], PlanError, subject="overlap")
    return replace(plan, direction="backward", ops=with_weights(plan.ops, parts_of(plan), schedule=plan.schedule))


def _problems(
    schedule: TileSchedule, size: int, rank: int, tile_rows: int, host_of_rank: Sequence[int] | None
) -> list[Problem]:
    problems = tile_schedule_problems(schedule)
    if not 0 <= rank < size:
        problems.append(Problem(where="rank", value=rank, rule=f"a position in a group of {size} ranks"))
    if tile_rows < 1:
        problems.append(
            Problem(where="tile_rows", value=tile_rows, rule="at least 1", hint="128 suits float32 on a CPU")
        )
    if host_of_rank is not None and len(host_of_rank) != size:
        rule = f"one host for each of the {size} ranks"
        problems.append(Problem(where="host_of_rank", value=tuple(host_of_rank), rule=rule))
    return problems
