"""Losses drawn at random, for plans of an elastic run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

from phalanx.core.config import ModelConfig, PipelineConfig, RouterConfig
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.model.model import ModelSpec, resolve_model
from phalanx.plan.recovery.generation import GenerationPlan
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.state_descriptor import Fact, StateDescriptor, read_state_descriptor


@cache
def tiny() -> ModelSpec:
    return resolve_model(ModelConfig(preset="tiny"), RouterConfig(bias_rate=1e-2))


def planner(
    base: Folding, *, slots: int | None = None, floor: int = 2, zero: int = 0, spec: ModelSpec | None = None
) -> RecoveryPlanner:
    if slots is not None:
        base = Folding(**{**vars_of(base), "ep": base.world // (base.etp * base.pp)})
    return RecoveryPlanner(
        spec=spec or tiny(),
        base=base,
        seq_len=32,
        floor=floor,
        zero=zero,
        slots_per_rank=slots,
        pipeline=PipelineConfig(),
    )


def vars_of(folding: Folding) -> dict[str, int]:
    return {axis: getattr(folding, axis) for axis in ("world", "tp", "cp", "pp", "ep", "etp")}


def fresh(number: int, *, machines: int = 1) -> list[Fact]:
    """Members without state."""
    return [new_member(i, machine=i * machines // number) for i in range(number)]


def new_member(uid: int, *, machine: int = 0) -> Fact:
    return Fact(uid=f"host{machine}.{uid}.x", machine=f"host{machine}", descriptor=None)


def after(plan: GenerationPlan, *, lost: Sequence[str] = ()) -> list[Fact]:
    """The members that live, once `plan` was carried out and a step was committed. Their descriptors went through a report."""
    out = []
    for rank, fact in enumerate(plan.members):
        if fact.uid in lost:
            continue
        at: StateDescriptor | None = None
        if rank < plan.folding.world:
            at = read_state_descriptor(plan.state_descriptor(rank).to_dict())
        out.append(Fact(uid=fact.uid, machine=fact.machine, descriptor=at))
    return out


def shuffled(facts: Sequence[Fact], rng: random.Random) -> list[Fact]:
    return rng.sample(list(facts), len(facts))
