"""Which replica serves which token, local first: the rule for experts with replicas on several hosts.

Decides the rows from every source to every slot of one expert-parallel group (arXiv 2407.04656, section 4.3), in whole numbers: the paper's shares are real
numbers, and ranks that round them by themselves lose tokens. A pure function of the gathered counts, so every rank computes the same.

In exact mode rows of an expert are computed in chunks of `unit_rows`, cut from each source's list of them, and a chunk must stay whole. So what is split and handed out
are then chunks: the same rules, with the word "row" read as "chunk". Every part that a source sends is whole chunks, so whoever cuts it again finds the very same ones. The last chunk of a list
may be shorter and counts like any other: rows of replicas may differ by more than `unit_rows`.

Rules that must never change, because all ranks rely on them without asking:
- the rows of an expert are split over its replicas as evenly as whole numbers can be; the replicas that take one more are those with most rows of their own
  rank to serve, then the lower slots;
- a rank serves its own rows first, then those of its host, then the rest; within each circle rows are handed out by sources ascending to slots ascending, so
  an expert of n senders and m receivers costs n + m - 1 messages a circle at most;
- nothing is dropped and nothing is made.

The rest of a dispatch (orders, sizes) follows from the rows as in `plan/moe/dispatch.py`, whose even split without regard to place stays what it is.

Shapes: P sources, E experts, G slots of the group, R ranks (ep coordinates).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.moe.dispatch import DispatchPlan, Ints, replica_index


def plan_local_dispatch(
    counts_PE: ArrayLike,
    slots_G: Sequence[int],
    *,
    ep: int,
    etp: int,
    host_of_ep: Sequence[int] = (),
    unit_rows: int = 1,
) -> DispatchPlan:
    """The plan for gathered counts; `host_of_ep` = host of each ep coordinate (empty: each has its own), `unit_rows` = rows that stay together.

    Raises `PlanError` where counts and slots do not belong together, or an expert with rows has no slot.
    """
    counts, slots = np.asarray(counts_PE, dtype=np.int64), np.asarray(slots_G, dtype=np.int64)
    raise_if(_problems(counts, slots, ep, etp, host_of_ep, unit_rows), PlanError, subject="dispatch")
    rank_of_slot = np.repeat(np.arange(ep), len(slots) // ep)
    rank_of_source = np.repeat(np.arange(ep), etp)
    hosts = np.asarray(host_of_ep) if len(host_of_ep) else np.arange(ep)
    left = -(-counts // unit_rows)
    room = _rooms(left, slots, rank_of_source, rank_of_slot)
    units = np.zeros((ep * etp, len(slots)), dtype=np.int64)
    for circle in (np.arange(ep), hosts, np.zeros(ep, dtype=np.int64)):
        sent = _corner_fill(left, room, slots, circle[rank_of_source], circle[rank_of_slot])
        units += sent
        room -= sent.sum(0)
        np.subtract.at(left.T, slots, sent.T)
    rows = units if unit_rows == 1 else _rows_of_units(units, counts, slots, unit_rows)
    return DispatchPlan(tuple(int(s) for s in slots), ep, etp, rows, unit_rows)


def _rows_of_units(units_PG: Ints, counts_PE: Ints, slots: Ints, unit_rows: int) -> Ints:
    """(P, G) rows in the units that each source sends to each slot: its list of an expert is cut slot by slot, slots ascending."""
    ends = np.stack([_ends_by_expert(units, slots) for units in units_PG])
    counts = counts_PE[:, slots]
    rows: Ints = np.minimum(ends * unit_rows, counts) - np.minimum((ends - units_PG) * unit_rows, counts)
    return rows


def _rooms(counts: Ints, slots: Ints, rank_of_source: Ints, rank_of_slot: Ints) -> Ints:
    """(G,) rows that each slot takes of its expert: an even share, and the odd ones where most rows are at home."""
    _, replicas = replica_index(tuple(slots.tolist()))
    share, odd = np.divmod(counts.sum(0)[slots], replicas)
    own = np.zeros((rank_of_slot.max() + 1, counts.shape[1]), dtype=np.int64)
    np.add.at(own, rank_of_source, counts)
    same = (slots[:, None] == slots[None, :]) & (rank_of_slot[:, None] == rank_of_slot[None, :])
    nth, on_rank = np.tril(same, -1).sum(1), same.sum(1)
    # rows of its own rank beyond the even shares of all its slots of the expert, and the odd rows of those slots before it
    wish = np.maximum(own[rank_of_slot, slots] - share * on_rank - nth, 0)
    order = np.lexsort((np.arange(len(slots)), -wish, slots))
    first = np.searchsorted(slots[order], np.arange(counts.shape[1]))
    place = np.empty_like(slots)
    place[order] = np.arange(len(slots)) - first[slots[order]]
    room: Ints = share + (place < odd)
    return room


def _corner_fill(left_PE: Ints, room_G: Ints, slots: Ints, source_circle: Ints, slot_circle: Ints) -> Ints:
    """(P, G) rows handed out within each circle: the rows of an expert laid end to end, and so the room of its slots; they meet where both overlap."""
    rows = np.zeros((len(left_PE), len(slots)), dtype=np.int64)
    for circle in np.unique(slot_circle):
        sources, mine = np.flatnonzero(source_circle == circle), np.flatnonzero(slot_circle == circle)
        row_ends = np.cumsum(left_PE[sources], axis=0)[:, slots[mine]]
        row_begins = row_ends - left_PE[sources][:, slots[mine]]
        room_ends = _ends_by_expert(room_G[mine], slots[mine])
        room_begins = room_ends - room_G[mine]
        meet = np.minimum(row_ends, room_ends) - np.maximum(row_begins, room_begins)
        rows[np.ix_(sources, mine)] = np.maximum(meet, 0)
    return rows


def _ends_by_expert(room: Ints, slots: Ints) -> Ints:
    """Where the room of each slot ends, counted through the slots of its expert in order."""
    order = np.argsort(slots, kind="stable")
    ends = np.cumsum(room[order])
    before = np.concatenate([[0], ends])[np.searchsorted(slots[order], slots[order])]
    out = np.empty_like(room)
    out[order] = ends - before
    return out


def _problems(counts: Ints, slots: Ints, ep: int, etp: int, host_of_ep: Sequence[int], unit_rows: int) -> list[Problem]:
    problems = []
    if unit_rows < 1:
        rule = "rows that stay together: at least 1"
        problems.append(Problem(where="unit_rows", value=unit_rows, rule=rule, hint="use 1"))
    if counts.ndim != 2 or len(counts) != ep * etp:
        return [
            Problem(where="counts.shape", value=counts.shape, rule=f"needs a row for each of the {ep} x {etp} sources")
        ]
    if (counts < 0).any():
        problems.append(Problem(where="counts", value=int(counts.min()), rule="a number of rows is not negative"))
    if not len(slots) or len(slots) % ep:
        problems.append(Problem(where="slots", value=len(slots), rule=f"the same number on each of the {ep} ep ranks"))
    strays = sorted(set(slots.tolist()) - set(range(counts.shape[1])))
    if strays:
        problems.append(Problem(where="slots", value=strays, rule=f"experts are 0 ... {counts.shape[1] - 1}"))
    homeless = sorted(set(np.flatnonzero(counts.sum(0)).tolist()) - set(slots.tolist()))
    if homeless:
        problems.append(Problem(where="slots", value=homeless, rule="an expert with rows needs a slot"))
    if len(host_of_ep) not in (0, ep):
        problems.append(
            Problem(where="host_of_ep", value=len(host_of_ep), rule=f"needs a host for each of the {ep} ep ranks")
        )
    return problems
