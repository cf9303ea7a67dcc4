"""How long a layer takes where its forward pass runs beside the backward pass of another micro-batch (`plan/pipeline/schedule/pairs.py`).

Decides nothing: `choose.py` compares schedules by it. Two passes of a rank have one processor and one link. While one waits for messages, the other computes, so
that of the messages only what is longer than all computing is seen. A pair therefore takes the longest of

    both passes' computing      slower by `OverlapCost.interference` while bytes of either pass move
    the forward pass alone      its own messages may outlast its computing and all that the other has to compute
    the backward pass alone
    both passes' bytes          on the busier way of the link

Serial order exposes all messages of a pass to itself, and they are hidden by the partner's computing nevertheless, up to its length. A schedule of tiles costs its further operations,
and gains only on what is left. Both passes go by the schedule that is asked about: the backward plan is made of the forward plan, and batches are about equal. What a
pass computes outside its experts is not counted, though it hides messages too: where that is much, tiles are chosen a little too often.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.plan.moe.overlap.prediction.bytes import WireBytes
from phalanx.plan.moe.overlap.prediction.clock import seconds_of
from phalanx.plan.moe.overlap.prediction.cost import LayerWork, OverlapCost
from phalanx.plan.moe.overlap.tiles import TileOp
from phalanx.plan.pipeline.schedule import Pair, Schedule

__all__ = ["PassTime", "link_s", "pair_s", "paired_share", "pass_time"]

_NO_COMPUTING = ("wait", "wait_return")


@dataclass(frozen=True)
class PassTime:
    """One pass of one layer on one rank."""

    alone_s: float
    """Seconds with nothing beside it."""
    computing_s: float
    """Seconds of its operations, with no byte moving."""
    link_s: float
    """Seconds of its bytes."""


def pass_time(ops: Sequence[TileOp], work: LayerWork, cost: OverlapCost, wire: WireBytes) -> PassTime:
    """Time of the operations of a rank whose peers are as busy as it."""
    computing_s = math.fsum(work.seconds(op, cost) for op in ops if op.kind not in _NO_COMPUTING)
    return PassTime(seconds_of(ops, work, cost, wire), computing_s, link_s(work.rank, cost, wire))


def link_s(rank: int, cost: OverlapCost, wire: WireBytes) -> float:
    """Seconds of one pass's bytes on the busier way of a rank's link. Where messages inside a host have a rate of their own, they do not count."""
    bytes_PP = wire.total_PP
    if cost.near_bytes_per_s is not None:
        hosts = np.asarray(wire.host_of_rank)
        bytes_PP = np.where(hosts[:, None] == hosts, 0, bytes_PP)
    return max(float(bytes_PP[rank].sum()), float(bytes_PP[:, rank].sum())) / cost.bytes_per_s


def pair_s(forward: PassTime, backward: PassTime, cost: OverlapCost) -> float:
    """Seconds of the two passes beside one another."""
    moving_s = forward.link_s + backward.link_s
    computing_s = cost.slowed(forward.computing_s + backward.computing_s, at=0.0, busy_until=moving_s)
    return max(computing_s, forward.alone_s, backward.alone_s, moving_s)


def paired_share(schedule: Schedule, pairs: Sequence[Pair], *, rank: int) -> float:
    """The share of the forward passes of a pipeline's rank that run beside a backward pass, 0 to 1."""
    seconds = {second for _, second in pairs}
    forward = [action for action in schedule.actions[rank] if action.kind == "F"]
    return sum(action in seconds for action in forward) / max(len(forward), 1)
