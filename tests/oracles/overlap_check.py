"""Is a plan of overlap right? A check of one rank's list; it shares no code with the planner.

Decides nothing. `check` proves of one list, by itself:

- tiles are whole: slot by slot (in any order of slots with `hot_first`, else ascending, joint ones last), row after row, none empty; parts hold all of them, each once;
- every operation stands there exactly once and none that does not belong there;
- nothing stands before what it needs: `first` after the waits for its own and all earlier parts of its source (an entry travels with the first part that
  needs it), `second` after its first, `return` after the seconds of its own and all earlier parts in its block (an entry goes back with the last part
  that adds to it), `weights` after all firsts, `sum` last;
- the products of a joint slot: `first_all` after the waits for all parts with rows of the slot, `second_all` after its first, `return` after the seconds of all joint slots with
  rows in its own or an earlier part;
- all sends stand before the first wait and all returns before the first wait_return;
- with gateways: all relays stand behind the sends and before the first merge, those of parts up to k before any wait for part k of another host; a merge of part k behind
  all returns of parts up to k to other hosts; all merges before the first wait_return.

If that holds for every rank, none waits for ever: no send needs anything, so all are posted; then every first wait is answered and all returns are posted; then
so is every wait_return. With gateways by induction over k: relays of part k have waited for parts below k at most, so all waits are answered; a return of part k has
waited for merges below k at most, so all merges are, and then every wait_return. `simulate` (`events.py`) puts all lists together and tries.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, get_args

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe.overlap.tiles.types import ALL, Kind, RankPlan, Tile, TileOp, TileSchedule

__all__ = ["check", "from_json", "plan_problems"]


def check(plan: RankPlan) -> None:
    """Raise `PlanError` with everything that is wrong with one rank's plan."""
    raise_if(plan_problems(plan), PlanError, subject=f"overlap plan of rank {plan.rank}")


def plan_problems(plan: RankPlan) -> list[Problem]:
    """What is wrong with the cut of the rows, and if nothing is, with the operations."""
    return list(_cut_problems(plan)) or [*_missing_or_twice(plan), *_too_early(plan)]


def from_json(text: str) -> RankPlan:
    """The plan that `RankPlan.to_json` wrote. Raises `PlanError` for text that is no plan, and for a plan that fails its check."""
    try:
        plan = _plan_of(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        rule = f"a plan of overlap in JSON ({type(error).__name__}: {error})"
        raise PlanError.of("plan", text[:60], rule, subject="overlap plan file") from error
    check(plan)
    return plan


def _plan_of(data: dict[str, Any]) -> RankPlan:
    fields = set(RankPlan.__dataclass_fields__)
    if set(data) != fields:
        raise ValueError(f"fields {sorted(set(data) ^ fields)} are missing or unknown")
    if data["direction"] not in ("forward", "backward"):
        raise ValueError(f"direction {data['direction']!r}")
    return RankPlan(
        rank=_whole(data["rank"]),
        size=_whole(data["size"]),
        direction=data["direction"],
        tiles=tuple(
            tuple(Tile(_whole(slot), source, _whole(rows), _whole(first)) for slot, rows, first in tiles)
            for source, tiles in enumerate(data["tiles"])
        ),
        part_ends=tuple(tuple(_whole(end) for end in ends) for ends in data["part_ends"]),
        peer_part_ends=tuple(tuple(_whole(end) for end in ends) for ends in data["peer_part_ends"]),
        blocks=_whole(data["blocks"]),
        ops=tuple(TileOp(_kind(kind), *(_whole(n) for n in numbers)) for kind, *numbers in data["ops"]),
        num_slots=_whole(data["num_slots"]),
        schedule=TileSchedule(**data["schedule"]),
        hosts=tuple(_whole(host) for host in data["hosts"]),
        relay_parts=tuple(_whole(parts) for parts in data["relay_parts"]),
        joint_tiles=tuple(
            Tile(_whole(slot), ALL, _whole(rows), _whole(first)) for slot, rows, first in data["joint_tiles"]
        ),
    )


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is no whole number")
    return value


def _kind(value: object) -> Kind:
    found: Kind | None = next((kind for kind in get_args(Kind) if kind == value), None)
    if found is None:
        raise ValueError(f"unknown kind of operation {value!r}")
    return found


# ---- tiles and parts -------------------------------------------------------------------------------------------------------


def _cut_problems(plan: RankPlan) -> Iterator[Problem]:
    if not 0 <= plan.rank < plan.size:
        yield Problem(where="plan.rank", value=plan.rank, rule=f"a position in a group of {plan.size}")
        return
    if plan.blocks < 1:
        yield Problem(where="plan.blocks", value=plan.blocks, rule="at least 1")
    for name in ("tiles", "part_ends", "peer_part_ends"):
        if len(getattr(plan, name)) != plan.size:
            rule = f"one entry for each of the {plan.size} ranks"
            yield Problem(where=f"plan.{name}", value=len(getattr(plan, name)), rule=rule)
            return
    yield from _host_problems(plan)
    yield from _joint_problems(plan)
    for source in range(plan.size):
        yield from _tile_problems(plan, source)
        yield from _end_problems(f"plan.part_ends[{source}]", plan.part_ends[source], total=len(plan.tiles[source]))
        yield from _end_problems(f"plan.peer_part_ends[{source}]", plan.peer_part_ends[source], total=None)
    if plan.part_ends[plan.rank] != plan.peer_part_ends[plan.rank]:
        rule = f"the own parts {plan.part_ends[plan.rank]}, seen from the other side"
        yield Problem(where=f"plan.peer_part_ends[{plan.rank}]", value=plan.peer_part_ends[plan.rank], rule=rule)


def _tile_problems(plan: RankPlan, source: int) -> Iterator[Problem]:
    next_slot, next_row = 0, 0
    seen: set[int] = set()
    for number, tile in enumerate(plan.tiles[source]):
        where = f"plan.tiles[{source}][{number}]"
        if tile.source != source or tile.rows < 1 or not 0 <= tile.slot < plan.num_slots:
            rule = f"rows of source {source} in one of {plan.num_slots} slots, at least one"
            yield Problem(where=where, value=tile, rule=rule)
        first_joint = tile.slot in plan.joint and next_slot not in plan.joint
        if tile.slot not in seen and (plan.schedule.hot_first or first_joint or tile.slot > next_slot):
            next_slot, next_row = tile.slot, 0
        seen.add(tile.slot)
        if (tile.slot, tile.first_row) != (next_slot, next_row):
            rule = f"slots ascending, rows end to end: next is row {next_row} of slot {next_slot}"
            yield Problem(where=where, value=tile, rule=rule)
        if number and tile.slot not in plan.joint and plan.tiles[source][number - 1].slot in plan.joint:
            yield Problem(where=where, value=tile, rule=f"joint slots {plan.joint} come last")
        next_slot, next_row = tile.slot, tile.first_row + tile.rows


def _joint_problems(plan: RankPlan) -> Iterator[Problem]:
    """The tiles of each joint slot hold all of its rows, one after the other."""
    if plan.joint_tiles and plan.hosts:
        yield Problem(where="plan.joint_tiles", value=len(plan.joint_tiles), rule="none where there are gateways")
    rows = Counter[int]()
    for number, tile in enumerate(plan.joint_tiles):
        begins = number == 0 or plan.joint_tiles[number - 1].slot != tile.slot
        if tile.source != ALL or tile.rows < 1 or tile.first_row != rows[tile.slot] or (begins and rows[tile.slot]):
            rule = f"rows of all sources end to end: next is row {rows[tile.slot]} of slot {tile.slot}, each slot's tiles beside each other"
            yield Problem(where=f"plan.joint_tiles[{number}]", value=tile, rule=rule)
        rows[tile.slot] += tile.rows
    for slot, found in rows.items():
        come = sum(tile.rows for tiles in plan.tiles for tile in tiles if tile.slot == slot)
        if found != come:
            yield Problem(where=f"plan.joint_tiles of slot {slot}", value=found, rule=f"all {come} rows that come")


def _end_problems(where: str, ends: Sequence[int], *, total: int | None) -> Iterator[Problem]:
    if any(b <= a for a, b in pairwise((0, *ends))):
        yield Problem(where=where, value=tuple(ends), rule="ends ascend, and no part is empty")
    if total is not None and (ends[-1] if ends else 0) != total:
        yield Problem(where=where, value=tuple(ends), rule=f"the last part ends with the last of {total} tiles")


# ---- operations ------------------------------------------------------------------------------------------------------------


def _host_problems(plan: RankPlan) -> Iterator[Problem]:
    """Of gateways: who passes on what."""
    lengths = (len(plan.hosts), len(plan.relay_parts))
    if lengths not in ((0, 0), (plan.size, plan.size)):
        rule = f"one entry for each of the {plan.size} ranks, or none"
        yield Problem(where="plan.hosts, plan.relay_parts", value=lengths, rule=rule)
        return
    for source, parts in enumerate(plan.relay_parts):
        mine = _is_far(plan, source) and _way_in(plan, source, plan.rank) == plan.rank
        least = len(plan.part_ends[source]) if mine else 0
        if parts < least or (parts and not mine):
            rule = f"at least the {least} parts for itself" if mine else "0: it is not the gateway of this source"
            yield Problem(where=f"plan.relay_parts[{source}]", value=parts, rule=rule)


def _is_far(plan: RankPlan, peer: int) -> bool:
    return bool(plan.hosts) and plan.hosts[peer] != plan.hosts[plan.rank]


def _way_in(plan: RankPlan, source: int, rank: int) -> int:
    """Through which rank the entries of `source` come to the host of `rank`: that with the same place among the ranks of its host."""
    place = sum(host == plan.hosts[source] for host in plan.hosts[:source])
    there = [peer for peer, host in enumerate(plan.hosts) if host == plan.hosts[rank]]
    return there[place % len(there)]


def _messages_to(plan: RankPlan) -> Iterator[tuple[int, int]]:
    """(rank, parts) of what this rank sends, and of what comes back to it."""
    parts = {p: len(ends) for p, ends in enumerate(plan.peer_part_ends) if p != plan.rank}
    for p, n in parts.items():
        if not _is_far(plan, p):
            yield p, n
        elif _way_in(plan, plan.rank, p) == p:
            yield p, max(n for q, n in parts.items() if plan.hosts[q] == plan.hosts[p])


def _expected(plan: RankPlan) -> Iterator[TileOp]:
    """Every operation that must stand in the list."""
    for p in range(plan.size):
        for part in range(len(plan.part_ends[p])):
            yield TileOp("first", p, part)
            if p != plan.rank:
                yield TileOp("wait", p, part)
            for block in range(plan.blocks):
                yield TileOp("second", p, part, block)
                yield TileOp("return", p, part, block)
    for slot in plan.joint:
        yield TileOp("first_all", part=slot)
        yield from (TileOp("second_all", part=slot, block=block) for block in range(plan.blocks))
    for p, parts in _messages_to(plan):
        for part in range(parts):
            yield TileOp("send", p, part)
            yield from (TileOp("wait_return", p, part, block) for block in range(plan.blocks))
    for p, parts in enumerate(plan.relay_parts):
        for part in range(parts):
            yield TileOp("relay", p, part)
            yield from (TileOp("merge", p, part, block) for block in range(plan.blocks))
    if plan.direction == "backward":
        yield from (TileOp("weights", part=slot) for slot in range(plan.num_slots))
    yield TileOp("sum")


def _missing_or_twice(plan: RankPlan) -> Iterator[Problem]:
    expected, found = set(_expected(plan)), Counter(plan.ops)
    if len(expected) == len(found) == len(plan.ops) and expected == found.keys():
        return
    for op in sorted(expected - found.keys(), key=str):
        yield Problem(where=f"plan.ops: {op}", value=None, rule="must be there, and is not")
    for op, times in found.items():
        if op not in expected and op != TileOp("shared"):
            rule = f"no such peer, part, block or slot on rank {plan.rank} ({plan.direction})"
            yield Problem(where=f"plan.ops: {op}", value=None, rule=rule)
        elif times > 1:
            yield Problem(where=f"plan.ops: {op}", value=f"{times} times", rule="exactly once")


def _too_early(plan: RankPlan) -> Iterator[Problem]:
    """Operations that stand before something they need."""
    place: dict[TileOp, int] = {}
    last_of: dict[str, int] = {}
    for number, op in enumerate(plan.ops):
        place.setdefault(op, number)
        last_of[op.kind] = number
    joint = _joint_parts(plan)
    for number, op in enumerate(plan.ops):
        late = [other for other in _direct_needs(plan, op, joint) if place.get(other, -1) > number]
        for other in late:
            yield Problem(where=f"plan.ops[{number}]: {op}", value=None, rule=f"comes after {other}, which it needs")
        for rule in _RULES_OF_KIND.get(op.kind, ()):
            if last_of.get(rule, -1) > number:
                yield Problem(where=f"plan.ops[{number}]: {op}", value=None, rule=f"comes after every {rule}")
        if plan.hosts:
            yield from _before_gateways(plan, op, number)
    if plan.ops and plan.ops[-1].kind != "sum":
        yield Problem(where="plan.ops", value=str(plan.ops[-1]), rule="the last operation is sum")


def _before_gateways(plan: RankPlan, op: TileOp, number: int) -> Iterator[Problem]:
    """What lets nobody wait in a circle through a gateway: see the module."""
    if op.kind == "wait" and _is_far(plan, op.peer):
        kind, what = "relay", "relay of parts up to its own"
    elif op.kind == "merge":
        kind, what = "return", "return to another host of parts up to its own"
    else:
        return
    for other in plan.ops[number + 1 :]:
        if other.kind == kind and other.part <= op.part and (kind == "relay" or _is_far(plan, other.peer)):
            rule = f"comes after every {what}, and {other} stands behind it"
            yield Problem(where=f"plan.ops[{number}]: {op}", value=None, rule=rule)


_RULES_OF_KIND = {
    "wait": ("send",),
    "relay": ("send",),
    "merge": ("relay",),
    "wait_return": ("return", "merge"),
    "weights": ("first", "first_all"),
}
"""All operations of the second kinds stand before any of the first: they are what keeps ranks from waiting in a circle, and gradients of weights whole."""


def _joint_parts(plan: RankPlan) -> dict[int, set[tuple[int, int]]]:
    """By joint slot: the parts, as (source, part), in which its rows come."""
    found: dict[int, set[tuple[int, int]]] = {slot: set() for slot in plan.joint}
    for source, ends in enumerate(plan.part_ends):
        for part, (start, end) in enumerate(pairwise((0, *ends))):
            for tile in plan.tiles[source][start:end]:
                if tile.slot in found:
                    found[tile.slot].add((source, part))
    return found


def _direct_needs(plan: RankPlan, op: TileOp, joint: dict[int, set[tuple[int, int]]]) -> Iterable[TileOp]:
    earlier = range(op.part + 1)
    if op.kind == "first" and op.peer != plan.rank:
        return [TileOp("wait", op.peer, part) for part in earlier]
    if op.kind == "second":
        return [TileOp("first", op.peer, op.part)]
    if op.kind == "return":
        slots = [slot for slot, parts in joint.items() if any(p == op.peer and k <= op.part for p, k in parts)]
        alone = [TileOp("second", op.peer, part, op.block) for part in earlier]
        return [*alone, *(TileOp("second_all", part=slot, block=op.block) for slot in slots)]
    if op.kind == "first_all":
        return [TileOp("wait", p, part) for p, k in joint.get(op.part, ()) if p != plan.rank for part in range(k + 1)]
    if op.kind == "second_all":
        return [TileOp("first_all", part=op.part)]
    return []
