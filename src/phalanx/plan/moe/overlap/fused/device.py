"""The rule by which a device orders one MoE layer's rows by itself: what depends on the routing of a batch, without telling the host.

Kernels that wait on flags need two things of a batch: which tokens go to which rank (`send_index`), and in which order this rank computes with the
rows that come (`arrange`). Both are built on the device (`kernels/triton/index.py`, so that a
step can be captured in a graph; their twin in NumPy, written for reading, is in tests/oracles/device_rows.py). How many thread blocks send rather than compute is what `predicted_s` weighs.

The order (flux's idea of problems with a least size, arXiv 2502.19811 section 3; the rules are ours):

    entry      a token that a source sends to this rank, once. Entries are ordered by (smallest local slot that needs them, token).
    stage      how soon a source's entries are expected: own rank 0, then around the ring.
    flag       one for each (stage, part of the entries), raised when the part is there, in this order. Flag number f is stage * parts + part.
    row        a copy of an entry for one slot. Rows are ordered by (slot, stage, entry), so that within a slot they need ever later flags.
    problem    consecutive rows of one slot, at most `problem_rows`. It needs the first n flags, n given by its last row. Problems are computed in the order
               (n, slot, first row). Fewer rows save waiting, more rows use each weight for longer: 512 is about where a Hopper GPU stops
               reading weights faster than its memory allows.

Unlike the tiles of `plan/moe/overlap/tiles/types.py`, a problem may hold rows of several sources: a tile of 128 rows filled to a half costs a GPU as much as a full one. A GPU's product
of a row does not depend on the other rows of its tile, so the order still changes no bit.

Buffers have room for `capacity` entries of a source; an unused place holds -1. What finds no room is counted in `overflow`, never dropped silently.

Legend: T tokens of this rank, K choices of a token, P ranks of the group, C capacity (entries of a source), M rows, J problems.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EMPTY = -1


def part_places(capacity: int, parts: int) -> int:
    """Places of one part (the last part may have fewer)."""
    return max(1, math.ceil(capacity / parts))


def row_room(ranks: int, capacity: int, top_k: int, slots: int) -> int:
    """Rows that no routing exceeds: the slots of a token differ."""
    return ranks * capacity * min(top_k, slots)


def problem_room(rows: int, slots: int, problem_rows: int) -> int:
    """Problems that no division of `rows` among the slots exceeds."""
    return min(rows, slots + rows // problem_rows)


@dataclass(frozen=True, kw_only=True)
class SecondCost:
    """What the division between computing and sending costs, in seconds; measured, see benchmarks/gpu."""

    programs: int
    """Thread blocks at work, one on each multiprocessor."""
    tiles: int
    """Tiles of the product, in all blocks."""
    tile_s: float
    """One tile on one program."""
    blocks: int
    sender_s: float
    """All of the sending by one program alone."""
    link_s: float
    """All of the sending at the rate of the link, however many programs send."""


def predicted_s(cost: SecondCost, senders: int) -> float:
    """Predicted seconds of the second product and its sending with `senders` of the programs.

    Senders start when the first block of columns is there and have at most all blocks but the last done when the product ends; then all
    programs help. Sending goes at the rate of its programs up to that of the link: programs beyond that are lost to the product (the trade of
    arXiv 2502.19811, section 3.2; the formula is ours).
    """
    waves = math.ceil(cost.tiles / (cost.programs - senders))
    compute_s = waves * cost.tile_s
    all_s = max(cost.sender_s / cost.programs, cost.link_s)
    if senders == 0:
        return compute_s + all_s
    sending_s = max(cost.sender_s / senders, cost.link_s)
    early = 1 - 1 / cost.blocks
    sent = min(early, compute_s * early / sending_s) if sending_s > 0 else early
    return compute_s + (1 - sent) * all_s
