"""Order of rows for the kernels that wait on flags, built on the device by the rule of `plan/moe/overlap/fused/device.py`, whose twin is in tests/oracles/device_rows.py.

Must never change: no value reaches the host (no `.item()`, no data-dependent shape), so that all of it can be captured in a CUDA graph. Every tensor has
the size that the capacities give it; counts stay on the device.

Legend: T tokens of this rank, K choices of a token, P ranks of the group, C entries of a source (capacity), M rows, J problems.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phalanx.plan.moe.overlap.fused import EMPTY, part_places, problem_room, row_room


@dataclass(frozen=True, eq=False)
class SendIndex:
    """What this rank sends. int32 tensors; meaning as in `tests/oracles/device_rows.SendIndex`."""

    token_of_entry_PC: torch.Tensor
    slots_PCK: torch.Tensor
    choice_PCK: torch.Tensor
    entry_of_token_TP: torch.Tensor
    counts_P: torch.Tensor
    overflow: torch.Tensor


@dataclass(frozen=True, eq=False)
class Arranged:
    """How this rank computes with what comes. int32 tensors; meaning as in `tests/oracles/device_rows.Arranged`."""

    entry_of_row_M: torch.Tensor
    row_of_copy_PCK: torch.Tensor
    problems_J4: torch.Tensor
    num_problems: torch.Tensor
    num_rows: torch.Tensor
    overflow: torch.Tensor


def send_index(slots_TK: torch.Tensor, *, ranks: int, slots_per_rank: int, capacity: int) -> SendIndex:
    """Entries for each rank from the group's slots (T, K), EMPTY where dropped."""
    num_tokens, top_k = slots_TK.shape
    first_slot_P11 = _arange(ranks, slots_TK).view(-1, 1, 1) * slots_per_rank
    local_PTK = slots_TK.to(torch.int32).unsqueeze(0) - first_slot_P11
    none = slots_per_rank  # sorts behind every slot
    local_PTK = torch.where((local_PTK >= 0) & (local_PTK < slots_per_rank), local_PTK, none)
    local_PTK, choice_PTK = torch.sort(local_PTK, dim=2, stable=True)
    smallest_PT, order_PT = torch.sort(local_PTK[:, :, 0], dim=1, stable=True)
    wanted_P = (smallest_PT < none).sum(1, dtype=torch.int32)
    counts_P = wanted_P.clamp(max=capacity)

    places = min(capacity, num_tokens)
    is_entry_Pc = _arange(places, slots_TK) < counts_P.unsqueeze(1)
    token_Pc = order_PT[:, :places]
    at_PcK = token_Pc.unsqueeze(2).expand(-1, -1, top_k)
    slots_PcK = local_PTK.gather(1, at_PcK)
    is_copy_PcK = is_entry_Pc.unsqueeze(2) & (slots_PcK < none)
    entry_PT = slots_TK.new_full((ranks, num_tokens), EMPTY, dtype=torch.int32)
    entry_PT.scatter_(1, token_Pc, torch.where(is_entry_Pc, _arange(places, slots_TK), EMPTY))
    return SendIndex(
        _padded(torch.where(is_entry_Pc, token_Pc, EMPTY), capacity),
        _padded(torch.where(is_copy_PcK, slots_PcK, EMPTY), capacity),
        _padded(torch.where(is_copy_PcK, choice_PTK.gather(1, at_PcK), EMPTY), capacity),
        entry_PT.T.contiguous(),
        counts_P,
        (wanted_P - counts_P).sum(dtype=torch.int32),
    )


def arrange(
    slots_PCK: torch.Tensor, *, rank: int, slots: int, parts: int, problem_rows: int, max_rows: int | None = None
) -> Arranged:
    """Order the copies that the sources P send to `rank` by (slot, stage, entry) and cut them into problems.

    `max_rows` (default: what no routing exceeds) bounds the rows of all slots; the last ones that find no room are counted in `overflow`.
    """
    ranks, capacity, top_k = slots_PCK.shape
    room = row_room(ranks, capacity, top_k, slots) if max_rows is None else max_rows
    by_stage = slots_PCK.roll(-rank, 0).flatten().to(torch.int32)
    slot_N = torch.where(by_stage == EMPTY, slots, by_stage)
    slot_N, copy_N = torch.sort(slot_N, stable=True)
    ends_e = torch.searchsorted(slot_N, _arange(slots, slots_PCK), right=True, out_int32=True)
    wanted = ends_e[-1]
    ends_e = ends_e.clamp(max=room)
    num_rows = ends_e[-1]

    num_copies = slot_N.numel()
    place_N = _arange(num_copies, slots_PCK)
    row_by_stage = torch.full_like(place_N, EMPTY)
    row_by_stage.scatter_(0, copy_N, torch.where(place_N < num_rows, place_N, EMPTY))
    row_of_copy_PCK = row_by_stage.view(ranks, capacity, top_k).roll(rank, 0).contiguous()

    kept = min(room, num_copies)
    entry_by_stage_M = torch.div(copy_N[:kept], top_k, rounding_mode="floor").to(torch.int32)
    stage_M = torch.div(entry_by_stage_M, capacity, rounding_mode="floor")
    entry_M = entry_by_stage_M - stage_M * capacity
    source_M = (stage_M + rank) % ranks
    is_row_M = place_N[:kept] < num_rows
    entry_of_row_M = torch.where(is_row_M, source_M * capacity + entry_M, 0)
    part_M = torch.div(entry_M, part_places(capacity, parts), rounding_mode="floor")
    problems_J4, num_problems = _problems(ends_e, stage_M * parts + part_M + 1, room=room, problem_rows=problem_rows)
    return Arranged(
        _padded(entry_of_row_M.unsqueeze(0), room, fill=0)[0],
        row_of_copy_PCK,
        problems_J4,
        num_problems,
        num_rows,
        wanted - num_rows,
    )


def _problems(
    ends_e: torch.Tensor, flags_M: torch.Tensor, *, room: int, problem_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(J, 4) table of problems in the order of computing, and how many there are."""
    slots = ends_e.numel()
    starts_e = torch.cat([torch.zeros_like(ends_e[:1]), ends_e[:-1]])
    of_slot_e = torch.div(ends_e - starts_e + problem_rows - 1, problem_rows, rounding_mode="floor")
    problem_ends_e = of_slot_e.cumsum(0).to(torch.int32)
    index_J = _arange(problem_room(room, slots, problem_rows), ends_e)
    slot_J = torch.searchsorted(problem_ends_e, index_J, right=True, out_int32=True)
    is_problem_J = slot_J < slots
    at_J = slot_J.clamp(max=slots - 1).long()
    first_J = starts_e[at_J] + (index_J - (problem_ends_e - of_slot_e)[at_J]) * problem_rows
    rows_J = (ends_e[at_J] - first_J).clamp(max=problem_rows)
    last_J = torch.where(is_problem_J, first_J + rows_J - 1, 0).long()
    needed_J = flags_M[last_J].to(torch.int32)
    table_J4 = torch.stack([slot_J, first_J, rows_J, needed_J], dim=1).to(torch.int32)
    table_J4 = torch.where(is_problem_J.unsqueeze(1), table_J4, 0)
    beyond = torch.iinfo(torch.int32).max
    order_J = torch.sort(torch.where(is_problem_J, needed_J, beyond), stable=True).indices
    return table_J4[order_J], problem_ends_e[-1]


def _arange(n: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32, device=like.device)


def _padded(x: torch.Tensor, places: int, *, fill: int = EMPTY) -> torch.Tensor:
    """`x` (P, c, ...) as int32 with dim 1 filled up to `places`."""
    out = x.new_full((x.shape[0], places, *x.shape[2:]), fill, dtype=torch.int32)
    out[:, : x.shape[1]] = x
    return out
