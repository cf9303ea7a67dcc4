"""Which entries travel in an overlapped layer, in which order, and what is added to what: the index arithmetic behind `plan/moe/overlap/tiles/types.py`.

Both sides of every message derive its rows from the same numbers by the same rule, on their devices. A rank's pairs (token, expert) lie sorted by slot of the
group, tokens ascending within each (`Dispatcher.begin_list`); those for the slots of one rank are its *rows* there. The tiles of these rows follow
one another (where the plan puts those of other slots first: in the tiles' order), so the first row of a token lies in the first tile that needs it, and its last row
in the last tile that adds to it:

    outbound     tokens in the order of their first rows
    inbound    tokens in the order of their last rows

The receiver is told for each row the place of its entry among the outbound ones, and its weight; the rest follows.

Legend: n rows of one source on one rank, N entries, T tokens, K experts of a token, C copies at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from phalanx.plan.moe.overlap.tiles import Tile
from phalanx.runtime.moe.dispatch import FILL, repeated, stable_order


@dataclass(frozen=True, eq=False)
class Entries:
    """The rows of one source on one rank, as entries."""

    outbound_of_row: torch.Tensor
    """int64 (n,): place of the row's entry among the outbound ones."""
    inbound_of_row: torch.Tensor
    """int64 (n,): the same among the inbound ones."""
    num: int
    ends_outbound: tuple[int, ...]
    """Number of entries that have gone with each part and those before."""
    ends_inbound: tuple[int, ...]

    def outbound(self, part: int) -> slice:
        return _part(self.ends_outbound, part)

    def inbound(self, part: int) -> slice:
        return _part(self.ends_inbound, part)


def _part(ends: Sequence[int], part: int) -> slice:
    return slice(ends[part - 1] if part else 0, ends[part])


@dataclass(frozen=True, eq=False)
class Outgoing:
    """What this rank sends to one rank."""

    pairs: torch.Tensor
    """int64 (n,): pair `t * K + k` of each row."""
    tokens_outbound: torch.Tensor
    """int64 (N,): token of each outbound entry."""
    tokens_inbound: torch.Tensor
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
    sizes = np.diff(np.array(part_rows(tiles, ends), np.int64), prepend=0)
    (part_n,) = repeated([(np.arange(len(ends)), sizes)], device)
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


def entries_of(outbound_of_row: torch.Tensor, rows_to: Sequence[int], *, order: torch.Tensor | None = None) -> Entries:
    """Entries of rows whose outbound places are known; `rows_to`: rows up to the end of each part; `order`: of the tiles."""
    return entries_of_all([(outbound_of_row, rows_to, order)])[0]


def told_places(place_n: torch.Tensor) -> torch.Tensor:
    """int64 (n,) the outbound place of each row, as another rank says. An aborted message may hold any number, and after a wrong index a device does no more work."""
    return place_n.to(torch.int64).clamp(0, max(0, len(place_n) - 1))


def entries_of_all(
    lists: Sequence[tuple[torch.Tensor, Sequence[int], torch.Tensor | None]],
) -> list[Entries]:
    """`entries_of` of several ranks' rows, as (outbound places, rows to the end of each part, order). A device tells the sizes of all at once."""
    if not lists:
        return []
    device = lists[0][0].device
    all_ends = torch.tensor([end for _, rows_to, _ in lists for end in rows_to], dtype=torch.int64)
    ends = all_ends.to(device, non_blocking=True).split([len(rows_to) for _, rows_to, _ in lists])
    found = [_inbound(outbound, part, order) for (outbound, _, order), part in zip(lists, ends, strict=True)]
    sizes = torch.cat([counts.flatten() for _, counts in found]).tolist()  # SYNC: sizes of messages
    out, at = [], 0
    for (outbound, rows_to, _), (inbound, _) in zip(lists, found, strict=True):
        parts = len(rows_to)
        there, back = tuple(sizes[at : at + parts]), tuple(sizes[at + parts : at + 2 * parts])
        out.append(Entries(outbound, inbound, there[-1] if parts else 0, there, back))
        at += 2 * parts
    return out


def _inbound(
    outbound_n: torch.Tensor, ends: torch.Tensor, order: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(n,) inbound place of each row, and (2, parts) how many entries have gone, and come back, up to the end of each part.

    How many entries there are is not known yet: at most n, and those that are not have n as their first and last row."""
    if order is not None:
        inbound_n, counts = _inbound(outbound_n[order], ends, None)
        return inbound_n[_inverse(order)], counts
    n, device = len(outbound_n), outbound_n.device
    row_n = torch.arange(n, device=device)
    both = torch.full((2, n), n, dtype=torch.int64, device=device)
    first_N, last_N = both[0], both[1]
    first_N.scatter_reduce_(0, outbound_n, row_n, "amin")
    last_N.scatter_reduce_(0, outbound_n, row_n, "amax", include_self=False)
    is_last_n = torch.zeros(n + 1, dtype=torch.bool, device=device)
    is_last_n[last_N] = True
    inbound_n = (is_last_n.cumsum(0) - 1)[last_N[outbound_n]]
    return inbound_n, torch.stack([torch.searchsorted(first_N, ends), torch.searchsorted(last_N.sort().values, ends)])


def outbound_places(keys_n: torch.Tensor, order: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(n,) outbound place of each row, rows with equal keys having one, and (N,) the key of each outbound entry: in the order of their first rows."""
    if not len(keys_n):
        return keys_n, keys_n
    outbound_n, keys_N = _places_of_keys(keys_n, int(keys_n.max()) + 1, order)  # SYNC: sizes of messages
    return outbound_n, keys_N[: int(outbound_n.max()) + 1]  # SYNC: sizes of messages


def _places_of_keys(keys_n: torch.Tensor, most: int, order: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`outbound_places` of keys below `most`, where it is not known yet how many entries there are: (n,) keys, zeros behind those of the entries."""
    if order is not None:
        outbound_n, keys_N = _places_of_keys(keys_n[order], most, None)
        return outbound_n[_inverse(order)], keys_N
    n, device = len(keys_n), keys_n.device
    row_n = torch.arange(n, device=device)
    first_T = torch.full((most,), n, dtype=torch.int64, device=device)
    first_n = first_T.scatter_reduce_(0, keys_n, row_n, "amin")[keys_n]
    outbound_n = ((first_n == row_n).cumsum(0) - 1)[first_n]
    return outbound_n, torch.zeros_like(keys_n).scatter_(0, outbound_n, keys_n)


def outgoing(
    lists: Sequence[tuple[torch.Tensor, Sequence[int], torch.Tensor | None]],
    top_k: int,
    *,
    num_tokens: int,
    per_token: bool,
) -> list[Outgoing]:
    """The entries of this rank's rows on other ranks, by rank: one for each token (`per_token`), or one for each row. `lists`: of each rank (pairs, rows to
    the end of each part, order of the tiles)."""
    tokens = [torch.div(pairs, top_k, rounding_mode="floor") for pairs, _, _ in lists]
    if not per_token:
        out = []
        for (pairs, rows_to, order), tokens_n in zip(lists, tokens, strict=True):
            in_order = tokens_n if order is None else tokens_n[order]
            out.append(Outgoing(pairs, in_order, in_order, row_by_row(len(pairs), rows_to, pairs.device, order)))
        return out
    places = [_places_of_keys(t, num_tokens, order) for t, (_, _, order) in zip(tokens, lists, strict=True)]
    entries = entries_of_all(
        [(outbound, rows_to, order) for (outbound, _), (_, rows_to, order) in zip(places, lists, strict=True)]
    )
    out = []
    for (pairs, _, _), tokens_n, (_, outbound_N), one in zip(lists, tokens, places, entries, strict=True):
        inbound_N = torch.zeros_like(tokens_n).scatter_(0, one.inbound_of_row, tokens_n)
        out.append(Outgoing(pairs, outbound_N[: one.num], inbound_N[: one.num], one))
    return out


def host_outgoing(tokens_n: torch.Tensor, part_n: torch.Tensor, parts: int) -> Outgoing:
    """The entries of this rank's rows on all ranks of another host, one for each token: with the first part that any of them needs it in, and back with
    the last part that any adds to it, tokens ascending within both. `tokens_n`, `part_n`: of the rows, rank by rank. The rows' pairs are left out.

    With the outbound places in place of the tokens the result is the same, which is how a gateway finds it."""
    num = int(tokens_n.max()) + 1 if len(tokens_n) else 0  # SYNC: sizes of messages
    first_T = torch.full((num,), parts, dtype=torch.int64, device=tokens_n.device)
    first_T.scatter_reduce_(0, tokens_n, part_n, "amin")
    last_T = torch.full_like(first_T, -1).scatter_reduce_(0, tokens_n, part_n, "amax")
    here_N = (last_T >= 0).nonzero().squeeze(1)  # SYNC: sizes of messages
    tokens_N = here_N[stable_order(first_T[here_N], parts)]
    inbound_N = stable_order(last_T[tokens_N], parts)
    outbound_of_T = torch.zeros_like(first_T)
    outbound_of_T[tokens_N] = torch.arange(len(tokens_N), device=tokens_n.device)
    inbound_of_outbound = _inverse(inbound_N)
    outbound_n = outbound_of_T[tokens_n]
    counts = torch.stack([torch.bincount(t[tokens_N], minlength=parts).cumsum(0) for t in (first_T, last_T)])
    outbound, inbound = counts.tolist()  # SYNC: sizes of messages
    entries = Entries(outbound_n, inbound_of_outbound[outbound_n], len(tokens_N), tuple(outbound), tuple(inbound))
    return Outgoing(tokens_n[:0], tokens_N, tokens_N[inbound_N], entries)


def entry_places(keys_n: torch.Tensor, num_keys: int, copies: int) -> torch.Tensor:
    """(num_keys, copies) int64: where in `keys_n` each key stands, in order, FILL where it stands fewer times. None stands more often."""
    out = torch.full((num_keys, max(copies, 1)), FILL, dtype=torch.int64, device=keys_n.device)
    if len(keys_n):
        order = stable_order(keys_n, num_keys)
        sorted_n = keys_n[order]
        nth = torch.arange(len(keys_n), device=keys_n.device) - torch.searchsorted(sorted_n, sorted_n)
        out[sorted_n, nth] = order
    return out
