"""What a move of state that a run records was planned from, as plain data, and the same move again.

    heal/state[/WAVE]  members of the new generation with where the state of each stands, and pieces that are no sources: `plan/recovery/planner.py` plans again
    replace/KIND       mapping, and where the experts of each pipeline stage were and are to be
    replace/state      the same: what comes to each rank of all kinds, beside a step (`plan/placement/arrivals.py`)
    replace/gradient   the same: its gradients, at the end of that step

Decides nothing. Must never change: from the order of a move and the recipe of its run the very same moves are made, by the run and by whoever reads the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from phalanx.core.errors import DataError
from phalanx.plan.layout import Box, StateLayouts
from phalanx.plan.mapping import AnyPlacement, Folding, LayerPlacements, Placement, StagePlan
from phalanx.plan.model import ModelSpec, parameters
from phalanx.plan.placement import coming_moves, of_all_kinds
from phalanx.plan.recovery.generation import GenerationPlan
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.state_descriptor import Fact, read_state_descriptor
from phalanx.plan.reshard import Move

STATE_MOVE_ID = "heal/state"
"""Name under which members of a new generation record their messages; of a later wave with its number behind it."""
REPLACE_ID = "replace"
"""Beginning of the ids of experts that are placed anew; behind it the kind of state."""
STATE_ID, GRADIENT_ID = f"{REPLACE_ID}/state", f"{REPLACE_ID}/gradient"
"""Names of what comes beside a step, and of what comes at its end."""

ByStage = Mapping[int, LayerPlacements]


def wave_id(wave: int) -> str:
    """Name of the messages of a wave of state."""
    return f"{STATE_MOVE_ID}/{wave}" if wave else STATE_MOVE_ID


def state_move_order(plan: GenerationPlan, left_out: Sequence[tuple[int, str, Box]]) -> dict[str, Any]:
    """Order of `plan.moves`. `left_out`: what `GenerationPlan.without` was given."""
    return {
        "members": [
            [f.uid, f.machine, f.rack, None if f.descriptor is None else f.descriptor.to_dict()] for f in plan.members
        ],
        "left_out": [[who, name, box.offsets, box.sizes] for who, name, box in left_out],
    }


def expert_order(folding: Folding, before: ByStage, after: ByStage) -> dict[str, Any]:
    """Order of `expert_moves`."""
    return {"folding": asdict(folding), "before": _to_data(before), "after": _to_data(after)}


def expert_moves(
    spec: ModelSpec, folding: Folding, stages: StagePlan, *, before: ByStage, after: ByStage, itemsize: int
) -> list[Move]:
    """Moves of parameters with experts, one kind of state, from where they were to where they are to be."""
    names = sorted(param.name for param in parameters(spec) if param.ep_dim == 0)
    src, dst = (
        StateLayouts(spec=spec, folding=folding, stages=stages, placement=_of_rank(side, folding))
        for side in (before, after)
    )
    return [Move(name=name, itemsize=itemsize, src=src.parameter(name), dst=dst.parameter(name)) for name in names]


def moves_again(op_id: str, order: Mapping[str, Any], planner: RecoveryPlanner) -> list[Move]:
    """The moves that were ordered, in a run of `planner`. Raises `DataError` for an order that cannot be read, `PlanError` for one that the run cannot have given."""
    try:
        if op_id.startswith(STATE_MOVE_ID):
            facts = [
                Fact(uid=uid, machine=machine, rack=rack, descriptor=None if at is None else read_state_descriptor(at))
                for uid, machine, rack, at in order["members"]
            ]
            wrong = [
                (int(who), str(name), Box(tuple(offsets), tuple(sizes)))
                for who, name, offsets, sizes in order["left_out"]
            ]
            plan = planner.plan(facts).without(wrong)
            return plan.moves_of([wave_id(wave) for wave in range(len(plan.waves))].index(op_id))
        folding = Folding(**order["folding"])
        before, after = (_from_data(order[side]) for side in ("before", "after"))
    except (KeyError, TypeError, ValueError) as err:
        rule = f"is no order of a move: {type(err).__name__} {err}"
        raise DataError.of(op_id, None, rule, subject="the run") from err
    moves = expert_moves(
        planner.spec, folding, planner.stages(folding), before=before, after=after, itemsize=planner.state_bytes
    )
    if op_id == STATE_ID:
        return of_all_kinds(coming_moves(moves), moment_bytes=planner.moment_bytes)
    if op_id == GRADIENT_ID:
        return coming_moves(moves)
    return moves if op_id.endswith("/master") else [replace(m, itemsize=planner.moment_bytes) for m in moves]


def _of_rank(placements: ByStage, folding: Folding) -> Callable[[int], AnyPlacement]:
    return lambda rank: placements[folding.coord(rank, "pp")]


def _to_data(placements: ByStage) -> list[Any]:
    return [
        [stage, [[layer, placement.to_dict()] for layer, placement in sorted(of.layers.items())]]
        for stage, of in sorted(placements.items())
    ]


def _from_data(data: Sequence[Any]) -> dict[int, LayerPlacements]:
    return {
        int(stage): LayerPlacements(layers={int(layer): _placement(of) for layer, of in layers})
        for stage, layers in data
    }


def _placement(of: Mapping[str, Any]) -> Placement:
    slots = tuple(tuple(tuple(int(e) for e in rank) for rank in group) for group in of["slots"])
    where = {name: tuple(of[name]) for name in ("hosts", "racks") if name in of}
    return Placement(num_experts=int(of["num_experts"]), slots=slots, **where)
