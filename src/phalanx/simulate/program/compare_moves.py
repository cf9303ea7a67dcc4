"""Moves of state that a run has recorded, planned again from what they were planned from and put on a clock: message by message beside what was measured.

Decides nothing. Must never change: the plan that is predicted is the one that ran, by its hash, or it is an error; every message is matched by rank and id, and its bytes are compared too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.errors import ConfigError
from phalanx.plan.program import move_program
from phalanx.plan.recovery import RecoveryPlanner, moves_again
from phalanx.plan.reshard import equal_hosts, plan_reshard
from phalanx.simulate.program.clock import CostOf, run_moves
from phalanx.simulate.program.compare_run import Comparison, MeasuredOp, compare_steps


@dataclass(frozen=True, kw_only=True)
class MeasuredMove:
    """What all ranks recorded of a move."""

    op_id: str
    step: int
    generation: int
    plan: str
    hosts: Sequence[int]
    order: Mapping[str, Any]
    """The last three as in `core.events.MoveRecorded`."""
    ranks: int
    seconds: float
    """Seconds from when the last rank began to compare plans to the last end of a message."""
    messages: Mapping[tuple[int, str], MeasuredOp]
    """(rank, id) -> begin since that rank began to compare plans, seconds from when all who take part had posted it."""
    sent_bytes: Mapping[tuple[int, str], int]


@dataclass(frozen=True, kw_only=True)
class MoveComparison:
    """Prediction and measurement of one move."""

    op_id: str
    step: int
    generation: int
    ranks: int
    messages: int
    """Number of messages between single ranks."""
    sent_bytes: tuple[int, int]
    """Bytes sent by all ranks, predicted and measured."""
    other_bytes: tuple[str, ...]
    """Ids of which a rank sent another number of bytes than predicted."""
    found: Comparison

    def to_dict(self) -> dict[str, Any]:
        predicted, measured = self.sent_bytes
        return {
            "op_id": self.op_id,
            "step": self.step,
            "generation": self.generation,
            "ranks": self.ranks,
            "messages": self.messages,
            "sent_bytes": {"predicted": predicted, "measured": measured},
            "other_bytes": list(self.other_bytes),
            **self.found.to_dict(),
        }


def compare_move(move: MeasuredMove, planner: RecoveryPlanner, cost: CostOf) -> MoveComparison:
    """`planner`: of the recipe. Raises `ConfigError` where that makes another plan of the order than the run did, `DataError` where the order cannot be read."""
    plan = plan_reshard(moves_again(move.op_id, move.order, planner), equal_hosts(move.hosts))
    if plan.hash != move.plan:
        rule = f"makes another plan of the move {move.op_id} after step {move.step} than the run (plan {plan.hash}, the run's {move.plan})"
        raise ConfigError.of("the recipe", None, rule, "use the run's recipe.toml", subject="the comparison")
    everyone = range(move.ranks)
    programs = [move_program(plan, rank, ranks=everyone, op_id=move.op_id) for rank in everyone]
    found = compare_steps(run_moves(programs, cost), [move.messages], step_s=[move.seconds], beside=True)
    sent = {(p.rank, op.id): round(op.sent_bytes) for p in programs for op in p.collectives}
    between = {(p.rank, op.id) for p in programs for op in p.collectives if op.sends_to is not None}
    return MoveComparison(
        op_id=move.op_id,
        step=move.step,
        generation=move.generation,
        ranks=move.ranks,
        messages=len(between),
        sent_bytes=(sum(sent.values()), sum(move.sent_bytes.values())),
        other_bytes=tuple(sorted({key[1] for key, n in move.sent_bytes.items() if sent.get(key, n) != n})),
        found=replace(found, hash=plan.hash),
    )
