"""What a mapping takes of a rank from the first step to the last, for a run that must choose one after a loss: parameters, gradients and optimizer state.

What else a rank needs (activations, buffers) depends little on how many ranks are left, so a run leaves room for it by its limit (`resilience.state_gb`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.config import Recipe
from phalanx.plan.layout import copies_of, keepers_of, stage_params
from phalanx.plan.mapping import Folding, StagePlan
from phalanx.plan.model import ModelSpec

ITEM = {"bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element of a parameter, by `train.dtype`; of optimizer state 4 at least."""
FIXED_POINT_ITEM = 8
"""Bytes of an element of `kernels/cpu/fixed_point.py`'s sums."""


def moment_bytes(recipe: Recipe) -> int:
    """Bytes of an element of either moment of the optimizer."""
    return 2 if recipe.optim.state_dtype == "bfloat16" else max(4, ITEM.get(recipe.train.dtype, 2))


def optimizer_bytes(recipe: Recipe) -> int:
    """Bytes of a master weight and both of its moments."""
    return max(4, ITEM.get(recipe.train.dtype, 2)) + 2 * moment_bytes(recipe)


@dataclass(frozen=True, kw_only=True)
class StateRoom:
    """Bytes of an element, and what all of them may take."""

    limit: float = math.inf
    """Bytes of a rank."""
    parameter: int = 4
    gradient: int = 4
    optimizer: int = 12
    """Master weight and both moments."""


def state_bytes(
    spec: ModelSpec, folding: Folding, stages: StagePlan, room: StateRoom, *, slots: int | None, holders: int | None
) -> float:
    """Bytes of state of the fullest rank. `slots`: experts of each layer that a rank holds, None for its share of them. `holders`:
    ranks that keep each shard of the optimizer state, None where it is whole. Copies are as even as on hosts of one size (`bytes_on_hosts`: on any)."""
    dense, expert = _share(folding.dp * folding.cp, holders), _share(folding.edp, holders)
    found = (_bytes(held, room, dense, expert) for held in _elements(spec, folding, stages, slots))
    return max(found, default=0.0)


def bytes_on_hosts(
    spec: ModelSpec,
    folding: Folding,
    stages: StagePlan,
    room: StateRoom,
    *,
    slots: int | None,
    holders: int,
    hosts: Sequence[int],
    racks: Sequence[int] = (),
) -> list[float]:
    """Bytes of state of each rank, where optimizer state is cut and the ranks are on `hosts`, in `racks` (empty: nothing is known of them). One that is alone on its host keeps copies of
    all that the ranks of a single other host have."""
    elements = _elements(spec, folding, stages, slots)
    dense, expert = (_kept(folding, name, holders=holders, hosts=hosts, racks=racks) for name in ("dp_cp", "edp"))
    return [
        _bytes(elements[folding.coord(rank, "pp")], room, dense[rank], expert[rank]) for rank in range(folding.world)
    ]


def _elements(spec: ModelSpec, folding: Folding, stages: StagePlan, slots: int | None) -> list[tuple[float, float]]:
    """Elements of dense tensors, and of experts, on a rank of each pipeline stage."""
    held = slots if slots is not None else spec.num_experts / folding.ep
    out = []
    for pp in range(folding.pp):
        dense = expert = 0.0
        for param in stage_params(spec, stages.of_rank(pp)):
            cut = (folding.tp if param.tp_dim is not None else 1) * (folding.etp if param.etp_dim is not None else 1)
            if param.ep_dim is None:
                dense += param.num_elements / cut
            else:
                expert += param.num_elements / cut * held / spec.num_experts
        out.append((dense, expert))
    return out


def _bytes(elements: tuple[float, float], room: StateRoom, dense_share: float, expert_share: float) -> float:
    """Bytes of a rank that keeps such shares of the optimizer state of its parameters."""
    dense, expert = elements
    every = room.parameter + room.gradient
    return (dense + expert) * every + (dense * dense_share + expert * expert_share) * room.optimizer


def _share(shards: int, holders: int | None) -> float:
    """Share of a parameter's optimizer state that a rank keeps, where it is cut into so many."""
    return 1.0 if holders is None else min(holders, shards) / shards


def _kept(folding: Folding, name: str, *, holders: int, hosts: Sequence[int], racks: Sequence[int]) -> dict[int, float]:
    """Of each rank: the share of the optimizer state that it keeps of parameters which are cut over the groups called `name`."""
    out: dict[int, float] = {}
    for group in folding.groups(name):
        copies = copies_of(keepers_of(group, holders=holders, hosts=hosts, racks=racks)) or ((),) * len(group)
        out |= {rank: (1 + len(kept)) / len(group) for rank, kept in zip(group, copies, strict=True)}
    return out
