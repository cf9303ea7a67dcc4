"""Which entries travel in an overlapped layer, in which order, and what is added to what: the index arithmetic behind `plan/overlap_types.py`.

Both sides of every message derive its rows from the same numbers by the same rule, on their devices. A rank's pairs (token, expert) lie sorted by slot of the
group, tokens ascending within each (`Dispatcher.exact_list`); those for the slots of one rank are its *rows* there. The tiles of these rows follow
one another, so the first row of a token lies in the first tile that needs it, and its last row in the last tile that adds to it:

    going     tokens in the order of their first rows
    coming    tokens in the order of their last rows

The receiver is told for each row the place of its entry among the going ones, and its weight; the rest follows.

Legend: n rows of one source on one rank, N entries, T tokens, K experts of a token, C copies at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.plan.overlap_types import Tile
from phalanx.runtime.dispatch import FILL, stable_order


@dataclass(frozen=True, eq=False)
class Entries:
    """The rows of one source on one rank, as entries."""

    going_of_row: torch.Tensor
    """int64 (n,): place of the row's entry among the going ones."""
    coming_of_row: torch.Tensor
    """int64 (n,): the same among the coming ones."""
    num: int
    ends_going: tuple[int, ...]
    """By part: how many entries have gone with it and those before."""
    ends_coming: tuple[int, ...]

    def going(self, part: int) -> slice:
        return _part(self.ends_going, part)

    def coming(self, part: int) -> slice:
        return _part(self.ends_coming, part)


def _part(ends: Sequence[int], part: int) -> slice:
    return slice(ends[part - 1] if part else 0, ends[part])


@dataclass(frozen=True, eq=False)
class Outgoing:
    """What this rank sends to one rank."""

    pairs: torch.Tensor
    """int64 (n,): pair `t * K + k` of each row."""
    tokens_going: torch.Tensor
    """int64 (N,): token of each going entry."""
    tokens_coming: torch.Tensor
    entries: Entries


def part_rows(tiles: Sequence[Tile], ends: Sequence[int]) -> tuple[int, ...]:
    """Rows up to the end of each part."""
    total, out, at = 0, [], 0
    for end in ends:
        total += sum(tile.rows for tile in tiles[at:end])
        out.append(total)
        at = end
    return tuple(out)


def row_by_row(num_rows: int, rows_to: Sequence[int], device: torch.device) -> Entries:
    """Entries where each row has its own."""
    row_n = torch.arange(num_rows, device=device)
    return Entries(row_n, row_n, num_rows, tuple(rows_to), tuple(rows_to))


def entries_of(going_of_row: torch.Tensor, rows_to: Sequence[int], *, num: int | None = None) -> Entries:
    """Entries of rows whose going places are known; `rows_to`: rows up to the end of each part; `num`: of entries, if known."""
    if num is None:
        num = int(going_of_row.max()) + 1 if len(going_of_row) else 0  # SYNC: sizes of messages
    n, device = len(going_of_row), going_of_row.device
    row_n = torch.arange(n, device=device)
    last_N = torch.zeros(num, dtype=torch.int64, device=device)
    last_N.scatter_reduce_(0, going_of_row, row_n, "amax")
    is_last_n = torch.zeros(n, dtype=torch.bool, device=device)
    is_last_n[last_N] = True
    place_n = is_last_n.cumsum(0)
    first_N = torch.full((num,), n, dtype=torch.int64, device=device)
    first_N.scatter_reduce_(0, going_of_row, row_n, "amin")
    ends = torch.tensor(list(rows_to), dtype=torch.int64, device=device)
    counts = torch.stack([torch.searchsorted(first_N, ends), torch.searchsorted(last_N.sort().values, ends)])
    going, coming = counts.tolist()  # SYNC: sizes of messages
    return Entries(
        going_of_row=going_of_row,
        coming_of_row=(place_n - 1)[last_N[going_of_row]],
        num=num,
        ends_going=tuple(going),
        ends_coming=tuple(coming),
    )


def outgoing(pairs: torch.Tensor, top_k: int, rows_to: Sequence[int], *, per_token: bool) -> Outgoing:
    """The entries of this rank's rows on another rank: one for each token (`per_token`), or one for each row."""
    n, device = len(pairs), pairs.device
    tokens = torch.div(pairs, top_k, rounding_mode="floor")
    row_n = torch.arange(n, device=device)
    if not per_token or n == 0:
        return Outgoing(pairs, tokens, tokens, row_by_row(n, rows_to, device))
    first_T = torch.full((int(tokens.max()) + 1,), n, dtype=torch.int64, device=device)
    first_T.scatter_reduce_(0, tokens, row_n, "amin")
    first_n = first_T[tokens]
    is_first_n = first_n == row_n
    going_of_row = (is_first_n.cumsum(0) - 1)[first_n]
    tokens_going = tokens[is_first_n]
    entries = entries_of(going_of_row, rows_to, num=len(tokens_going))
    tokens_coming = torch.empty_like(tokens_going)
    tokens_coming[entries.coming_of_row] = tokens
    return Outgoing(pairs, tokens_going, tokens_coming, entries)


def places_of(keys_n: torch.Tensor, num_keys: int, copies: int) -> torch.Tensor:
    """(num_keys, copies) int64: where in `keys_n` each key stands, in order, FILL where it stands fewer times. None stands more often."""
    out = torch.full((num_keys, max(copies, 1)), FILL, dtype=torch.int64, device=keys_n.device)
    if len(keys_n):
        order = stable_order(keys_n, num_keys)
        sorted_n = keys_n[order]
        nth = torch.arange(len(keys_n), device=keys_n.device) - torch.searchsorted(sorted_n, sorted_n)
        out[sorted_n, nth] = order
    return out
