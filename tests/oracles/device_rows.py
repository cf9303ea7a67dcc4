"""The rule of `plan/moe/overlap/fused/device.py` in NumPy, written for reading: which tokens go to which rank, and in which order a rank computes with the rows that come."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.plan.moe import Ints
from phalanx.plan.moe.overlap.fused.device import EMPTY, part_places, problem_room, row_room


@dataclass(frozen=True, eq=False)
class SendIndex:
    """What a rank sends to each rank of the group."""

    token_of_entry_PC: Ints
    slots_PCK: Ints
    """Local slots (at the receiver) that need the entry, ascending, then EMPTY."""
    choice_PCK: Ints
    """Which of its token's choices each of these is."""
    entry_of_token_TP: Ints
    counts_P: Ints
    overflow: int


@dataclass(frozen=True, eq=False)
class Arranged:
    """How a rank computes with the entries that come to it."""

    entry_of_row_M: Ints
    """`source * C + entry`; 0 beyond the last row."""
    row_of_copy_PCK: Ints
    """Row of each copy, in the order of the slots: copies are summed in this order."""
    problems_J4: Ints
    """(slot, first row, rows, flags needed), in the order of computing; zeros beyond the last."""
    num_problems: int
    num_rows: int
    overflow: int


def send_index(slots_TK: Ints, *, ranks: int, slots_per_rank: int, capacity: int) -> SendIndex:
    """Entries for each rank, from the group's slot of each choice (EMPTY where it was dropped)."""
    num_tokens, top_k = slots_TK.shape
    token_PC = np.full((ranks, capacity), EMPTY, np.int32)
    slots_PCK = np.full((ranks, capacity, top_k), EMPTY, np.int32)
    choice_PCK = np.full((ranks, capacity, top_k), EMPTY, np.int32)
    entry_TP = np.full((num_tokens, ranks), EMPTY, np.int32)
    counts, overflow = np.zeros(ranks, np.int32), 0
    for rank in range(ranks):
        here = []
        for token in range(num_tokens):
            local = sorted((int(s) - rank * slots_per_rank, k) for k, s in enumerate(slots_TK[token]))
            local = [(s, k) for s, k in local if 0 <= s < slots_per_rank]
            if local:
                here.append((local[0][0], token, local))
        here.sort(key=lambda e: e[:2])
        counts[rank] = min(len(here), capacity)
        overflow += len(here) - int(counts[rank])
        for entry, (_, token, local) in enumerate(here[:capacity]):
            token_PC[rank, entry] = token
            entry_TP[token, rank] = entry
            slots_PCK[rank, entry, : len(local)] = [s for s, _ in local]
            choice_PCK[rank, entry, : len(local)] = [k for _, k in local]
    return SendIndex(token_PC, slots_PCK, choice_PCK, entry_TP, counts, overflow)


def arrange(
    slots_PCK: Ints, *, rank: int, slots: int, parts: int, problem_rows: int, max_rows: int | None = None
) -> Arranged:
    """Order the copies of the entries that the sources P send to `rank`. `slots_PCK` as in `SendIndex`, by source."""
    ranks, capacity, top_k = slots_PCK.shape
    room = row_room(ranks, capacity, top_k, slots) if max_rows is None else max_rows
    copies = []
    for stage in range(ranks):
        source = (rank + stage) % ranks
        for entry, choice in np.ndindex(capacity, top_k):
            slot = int(slots_PCK[source, entry, choice])
            if slot != EMPTY:
                flags = stage * parts + part_of(entry, capacity, parts) + 1
                copies.append((slot, stage, entry, source, choice, flags))
    copies.sort()
    overflow = max(0, len(copies) - room)
    copies = copies[:room]
    entry_of_row, row_of_copy = np.zeros(room, np.int32), np.full((ranks, capacity, top_k), EMPTY, np.int32)
    for row, (_, _, entry, source, choice, _) in enumerate(copies):
        entry_of_row[row] = source * capacity + entry
        row_of_copy[source, entry, choice] = row
    problems, first = [], 0
    for slot in range(slots):
        end = first + sum(c[0] == slot for c in copies)
        for start in range(first, end, problem_rows):
            stop = min(start + problem_rows, end)
            problems.append((copies[stop - 1][5], slot, start, stop - start))
        first = end
    problems.sort()
    table = np.zeros((problem_room(room, slots, problem_rows), 4), np.int32)
    for i, (flags, slot, start, rows) in enumerate(problems):
        table[i] = (slot, start, rows, flags)
    return Arranged(entry_of_row, row_of_copy, table, len(problems), len(copies), overflow)


def part_of(entry: int, capacity: int, parts: int) -> int:
    """Part of an entry: places are cut, not entries, so that copies have sizes that the host knows."""
    return entry // part_places(capacity, parts)
