"""Which entries travel in an overlapped layer, in which order, and what is added to what: the index arithmetic behind `plan/overlap_types.py`.

Both sides of every message derive its rows from the same numbers by the same rule, on their devices. A rank's pairs (token, expert) lie sorted by slot of the
group, tokens ascending within each (`Dispatcher.exact_list`); those for the slots of one rank are its *rows* there. The tiles of these rows follow
one another (where the plan puts those of other slots first: in the tiles' order), so the first row of a token lies in the first tile that needs it, and its last row
in the last tile that adds to it:

    going     tokens in the order of their first rows
    coming    tokens in the order of their last rows

The receiver is told for each row the place of its entry among the going ones, and its weight; the rest follows.

Legend: n rows of one source on one rank, N entries, T tokens, K experts of a token, C copies at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

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


def tile_order(tiles: Sequence[Tile], device: torch.device) -> torch.Tensor | None:
    """int64 (n,): the rows of a source, which lie slot by slot, in the order of its tiles. None where that is the same."""
    if all(a.slot <= b.slot for a, b in pairwise(tiles)):
        return None
    rows: dict[int, int] = {}
    for tile in tiles:
        rows[tile.slot] = rows.get(tile.slot, 0) + tile.rows
    starts = dict(zip(sorted(rows), accumulate((rows[slot] for slot in sorted(rows)), initial=0), strict=False))
    first = [starts[tile.slot] + tile.first_row for tile in tiles]
    return torch.cat([torch.arange(at, at + t.rows, device=device) for at, t in zip(first, tiles, strict=True)])


def row_parts(tiles: Sequence[Tile], ends: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 (n,): the part of each row of a source."""
    sizes = torch.tensor(part_rows(tiles, ends), dtype=torch.int64)
    part_n = torch.repeat_interleave(torch.arange(len(ends)), sizes.diff(prepend=sizes.new_zeros(1))).to(device)
    order = tile_order(tiles, device)
    return part_n if order is None else part_n[_inverse(order)]


def _inverse(order_n: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order_n)
    inverse[order_n] = torch.arange(len(order_n), device=order_n.device)
    return inverse


def row_by_row(
    num_rows: int, rows_to: Sequence[int], device: torch.device, order: torch.Tensor | None = None
) -> Entries:
    """Entries where each row has its own."""
    row_n = torch.arange(num_rows, device=device) if order is None else _inverse(order)
    return Entries(row_n, row_n, num_rows, tuple(rows_to), tuple(rows_to))


def entries_of(
    going_of_row: torch.Tensor, rows_to: Sequence[int], *, num: int | None = None, order: torch.Tensor | None = None
) -> Entries:
    """Entries of rows whose going places are known; `rows_to`: rows up to the end of each part; `num`: of entries, if known; `order`: of the tiles."""
    if order is not None:
        found = entries_of(going_of_row[order], rows_to, num=num)
        return replace(found, going_of_row=going_of_row, coming_of_row=found.coming_of_row[_inverse(order)])
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


def going_places(keys_n: torch.Tensor, order: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(n,) going place of each row, rows with equal keys having one, and (N,) the key of each going entry: in the order of their first rows."""
    if order is not None:
        going_n, keys_N = going_places(keys_n[order])
        return going_n[_inverse(order)], keys_N
    n, device = len(keys_n), keys_n.device
    if not n:
        return keys_n, keys_n
    row_n = torch.arange(n, device=device)
    first_T = torch.full((int(keys_n.max()) + 1,), n, dtype=torch.int64, device=device)
    first_T.scatter_reduce_(0, keys_n, row_n, "amin")
    first_n = first_T[keys_n]
    is_first_n = first_n == row_n
    return (is_first_n.cumsum(0) - 1)[first_n], keys_n[is_first_n]


def outgoing(
    pairs: torch.Tensor, top_k: int, rows_to: Sequence[int], *, per_token: bool, order: torch.Tensor | None = None
) -> Outgoing:
    """The entries of this rank's rows on another rank: one for each token (`per_token`), or one for each row."""
    n, device = len(pairs), pairs.device
    tokens = torch.div(pairs, top_k, rounding_mode="floor")
    if not per_token or n == 0:
        in_order = tokens if order is None else tokens[order]
        return Outgoing(pairs, in_order, in_order, row_by_row(n, rows_to, device, order))
    going_of_row, tokens_going = going_places(tokens, order)
    entries = entries_of(going_of_row, rows_to, num=len(tokens_going), order=order)
    tokens_coming = torch.empty_like(tokens_going)
    tokens_coming[entries.coming_of_row] = tokens
    return Outgoing(pairs, tokens_going, tokens_coming, entries)


def host_outgoing(tokens_n: torch.Tensor, part_n: torch.Tensor, parts: int) -> Outgoing:
    """The entries of this rank's rows on all ranks of another host, one for each token: with the first part that any of them needs it in, and back with
    the last part that any adds to it, tokens ascending within both. `tokens_n`, `part_n`: of the rows, rank by rank. The rows' pairs are left out.

    With the going places in place of the tokens the result is the same, which is how a gateway finds it."""
    num = int(tokens_n.max()) + 1 if len(tokens_n) else 0  # SYNC: sizes of messages
    first_T = torch.full((num,), parts, dtype=torch.int64, device=tokens_n.device)
    first_T.scatter_reduce_(0, tokens_n, part_n, "amin")
    last_T = torch.full_like(first_T, -1).scatter_reduce_(0, tokens_n, part_n, "amax")
    here_N = (last_T >= 0).nonzero().squeeze(1)
    tokens_N = here_N[stable_order(first_T[here_N], parts)]
    coming_N = stable_order(last_T[tokens_N], parts)
    going_of_T = torch.zeros_like(first_T)
    going_of_T[tokens_N] = torch.arange(len(tokens_N), device=tokens_n.device)
    coming_of_going = _inverse(coming_N)
    going_n = going_of_T[tokens_n]
    counts = torch.stack([torch.bincount(t[tokens_N], minlength=parts).cumsum(0) for t in (first_T, last_T)])
    going, coming = counts.tolist()  # SYNC: sizes of messages
    entries = Entries(going_n, coming_of_going[going_n], len(tokens_N), tuple(going), tuple(coming))
    return Outgoing(tokens_n[:0], tokens_N, tokens_N[coming_N], entries)


def places_of(keys_n: torch.Tensor, num_keys: int, copies: int) -> torch.Tensor:
    """(num_keys, copies) int64: where in `keys_n` each key stands, in order, FILL where it stands fewer times. None stands more often."""
    out = torch.full((num_keys, max(copies, 1)), FILL, dtype=torch.int64, device=keys_n.device)
    if len(keys_n):
        order = stable_order(keys_n, num_keys)
        sorted_n = keys_n[order]
        nth = torch.arange(len(keys_n), device=keys_n.device) - torch.searchsorted(sorted_n, sorted_n)
        out[sorted_n, nth] = order
    return out
