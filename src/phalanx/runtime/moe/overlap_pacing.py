"""Paced mode inside an overlapped layer: each product of tiles lasts its part of what the experts are given, so that what it makes leaves when it would.

Decides nothing about order. Must never change: parts of one pass add up to the whole, by multiplications: forward the first product has twice those of the second, backward
half of it, and gradients of weights have as many as both.
"""

from __future__ import annotations

from phalanx.plan.moe.overlap.tiles import RankPlan, TileOp
from phalanx.runtime.comm import Collectives


class TilePace:
    """Pace of one pass of one layer on one rank; without one it does nothing."""

    def __init__(self, comms: Collectives, op_id: str, plan: RankPlan) -> None:
        self._pace, self._id, self._plan = comms.pace if comms.trace else None, op_id, plan
        self._whole = sum(map(self._work, plan.ops)) if self._pace is not None else 0.0

    def _work(self, op: TileOp) -> float:
        """Multiplications, in units of rows x one matrix."""
        forward = self._plan.direction == "forward"
        match op.kind:
            case "first":
                return self._plan.rows_alone(op.peer, op.part) * (2.0 if forward else 1.0)
            case "second":
                return self._plan.rows_alone(op.peer, op.part) * (1.0 if forward else 2.0) / self._plan.blocks
            case "first_all":
                return self._plan.slot_rows(op.part) * (2.0 if forward else 1.0)
            case "second_all":
                return self._plan.slot_rows(op.part) * (1.0 if forward else 2.0) / self._plan.blocks
            case "weights":
                return 3.0 * self._plan.slot_rows(op.part)
            case _:
                return 0.0

    def done(self, op: TileOp) -> None:
        """An operation of the plan has computed all it does."""
        work = self._work(op) if self._pace is not None and self._whole else 0.0
        if work and self._pace is not None:
            self._pace.hold_part(self._id, work / self._whole)
