"""What batches of a layer have in common: counts in coarse steps, and one batch that stands for all that have the same.

Decides for which batch `choose.py` chooses. Must never change: the batch that stands for others is a function of the coarse counts alone, never of the batch at hand, so that ranks
that see batches in different orders (two passes beside one another, `runtime/moe/co_schedule.py`) choose the same for each.

Coarse are the rows between a source and an ep coordinate, in steps; the slots that they are for; the slots of a rank with at least twice its mean load, in powers of two; all rows together and
all bytes, to `BITS` binary digits. What comes back has, but for a few bytes of weights, the size of what went.

Shapes: P sources = ranks of `ep_etp`, E ep coordinates, e slots of a rank, G = E * e.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.plan.moe import DispatchPlan, Ints
from phalanx.plan.moe.overlap.prediction.bytes import Legs, Route, WireBytes
from phalanx.plan.moe.overlap.tiles import gateways, members

__all__ = ["BITS", "About", "about", "typical"]

BITS = 4
"""Precision of all rows and all bytes, which hardly differ from batch to batch: 1/16 of them at most is not seen."""
LEAST = 16
"""Steps are no smaller than the one asked for by more than this: counts of a few rows differ from batch to batch by as many."""
_FINE = 64
"""Parts of a mean load that cold slots are counted in."""


class About(NamedTuple):
    """Coarse counts of one batch. Equal for batches of about equal counts."""

    route: Route
    host_of_rank: tuple[int, ...]
    ep: int
    etp: int
    slots: int
    """Slots of a rank."""
    step: int
    """Rows."""
    rows: int
    sent: tuple[int, ...]
    """Bytes on the way to the experts; through gateways of the first legs and of the last."""
    steps_PE: bytes
    used_PE: bytes
    """Slots that get rows."""
    hot_Ee: bytes
    """n: at least 2 ** n times the mean load of the rank's slots; empty where all are 0."""


def about(dispatch: DispatchPlan, wire: WireBytes, *, step: int) -> About:
    """The coarse counts of a batch, rows between ranks in steps of about `step`, so that their mean is the middle of one."""
    rows_PEe = dispatch.rows_PG.reshape(dispatch.ep * dispatch.etp, dispatch.ep, -1)
    rows_PE, loads_Ee = rows_PEe.sum(2), rows_PEe.sum(0)
    rows = _coarse(int(rows_PE.sum()))
    mean = rows // rows_PE.size
    step = max(1, step // LEAST, mean // max(1, (mean + step // 2) // step))
    slots = loads_Ee.shape[1]
    times_Ee = loads_Ee * slots // np.maximum(rows_PE.sum(0), 1)[:, None]
    return About(
        route=wire.route,
        host_of_rank=wire.host_of_rank,
        ep=dispatch.ep,
        etp=dispatch.etp,
        slots=slots,
        step=step,
        rows=rows,
        sent=tuple(_coarse(int(sent_PP.sum())) for sent_PP in _sent(wire)),
        steps_PE=((rows_PE + step // 2) // step).tobytes(),
        used_PE=(rows_PEe > 0).sum(2).tobytes(),
        hot_Ee=np.maximum(np.frexp(times_Ee)[1] - 1, 0).tobytes() if times_Ee.max() > 1 else b"",
    )


def typical(found: About) -> tuple[DispatchPlan, WireBytes]:
    """The batch that stands for all with these counts."""
    size = found.ep * found.etp
    steps_PE, used_PE = (
        np.frombuffer(flat, dtype=np.int64).reshape(size, found.ep) for flat in (found.steps_PE, found.used_PE)
    )
    weight_PE = np.where(used_PE > 0, np.maximum(steps_PE * found.step, found.step // 4 + 1), 0)
    rows_PE = np.maximum(_spread(weight_PE, found.rows), used_PE)
    hot_Ee = np.zeros((found.ep, found.slots), dtype=np.int64)
    if found.hot_Ee:
        hot_Ee += np.frombuffer(found.hot_Ee, dtype=np.int32).reshape(hot_Ee.shape)
    rows_PG = _to_slots(rows_PE, used_PE, _loads(hot_Ee)).reshape(size, -1)
    dispatch = DispatchPlan(tuple(range(rows_PG.shape[1])), found.ep, found.etp, rows_PG)
    between_PP = np.repeat(rows_PE, found.etp, axis=1)
    if found.route == "all_gather":
        between_PP = np.ones((size, size), dtype=np.int64)
    np.fill_diagonal(between_PP, 0)
    if found.route == "dedup_host":
        return dispatch, _through_gateways(found, between_PP)
    outbound_PP = _spread(between_PP, *found.sent)
    return dispatch, WireBytes(found.route, outbound_PP, outbound_PP.T.copy(), found.host_of_rank)


def _coarse(number: int) -> int:
    """The middle of the numbers with the same first `BITS` binary digits."""
    shift = max(0, number.bit_length() - BITS)
    return (number >> shift << shift) + (1 << shift >> 1)


def _sent(wire: WireBytes) -> tuple[Ints, ...]:
    return (wire.outbound_PP,) if wire.legs is None else (wire.legs.first_outbound_PP, wire.legs.last_outbound_PP)


def _spread(weights: Ints, total: int) -> Ints:
    """`total` in proportion to weights, rounded down."""
    shares: Ints = weights * total // max(1, int(weights.sum()))
    return shares


def _loads(hot_Ee: Ints) -> Ints:
    """Loads of the slots of each ep coordinate, in parts of their mean: hot ones from the middle of their power of two, the others
    equal shares of what is left."""
    hot = np.where(hot_Ee > 0, 3 * _FINE << hot_Ee >> 1, 0)
    left_E = np.maximum(_FINE * hot.shape[1] - hot.sum(1), 0) // np.maximum((hot == 0).sum(1), 1)
    loads: Ints = np.where(hot_Ee > 0, hot, np.maximum(left_E, 1)[:, None])
    return loads


def _to_slots(rows_PE: Ints, used_PE: Ints, loads_Ee: Ints) -> Ints:
    """(P, E, e) rows: for as many slots as are used, hot ones first and then others from source to source, at least one for each, the rest by load."""
    num = loads_Ee.shape[1]
    turn_PEe = (np.arange(num) - (np.arange(len(rows_PE))[:, None] * used_PE)[..., None]) % num
    place_PEe = (turn_PEe - loads_Ee * num).argsort(2, kind="stable").argsort(2, kind="stable")
    is_used = place_PEe < used_PE[..., None]
    until_PEe = np.where(is_used, loads_Ee, 0).cumsum(2)
    ends_PEe = until_PEe * (rows_PE - used_PE)[..., None] // np.maximum(until_PEe[..., -1:], 1)
    rows: Ints = np.diff(ends_PEe, axis=2, prepend=0) + is_used
    return rows


def _through_gateways(found: About, between_PP: Ints) -> WireBytes:
    """Bytes through gateways, as `wire_bytes` adds up the legs; `between_PP`: rows from source to rank."""
    hosts = found.host_of_rank
    first, last, passed_on = np.zeros_like(between_PP), between_PP.copy(), []
    for source in range(len(hosts)):
        for through in gateways(hosts, source):
            there = members(hosts, hosts[through])
            first[source, through] = between_PP[source, there].sum()
            last[source, through] = 0
            passed_on += [(through, source, rank) for rank in there if rank != through]
    first_outbound, last_outbound = (_spread(rows, sent) for rows, sent in zip((first, last), found.sent, strict=True))
    outbound = first_outbound + last_outbound * np.equal.outer(hosts, hosts)
    for through, source, rank in passed_on:
        outbound[through, rank] += last_outbound[source, rank]
    legs = Legs(first_outbound, first_outbound.T.copy(), last_outbound, last_outbound.T.copy())
    return WireBytes(found.route, outbound, outbound.T.copy(), hosts, legs)
