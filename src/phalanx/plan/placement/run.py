"""The placement of a run: plain, or what the planner of replicas makes of the slots, the hosts and the loads that a recipe names.

Decides which ranks are one failure domain, and which layers are placed together: those of a pipeline stage, over the ranks of that stage. How many replicas an
expert gets and where they live is decided in `plan/placement/search/replicas.py` and `plan/placement/search/plan.py`. A pure function, so every rank of a stage, and a dry run, makes
the same placement.

With replicas the expert-parallel group is all of a stage: `ep` is what pp and etp leave of the ranks, `edp` is 1. The ranks of an etp group stand where the
first of them does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phalanx.core.config import Recipe, ResilienceConfig
from phalanx.core.errors import ConfigError, PlanError
from phalanx.core.files import read_json
from phalanx.plan.layout import expert_layers
from phalanx.plan.mapping import AnyFolding, AnyPlacement, LayerPlacements, Stage, plain_placement
from phalanx.plan.model import ModelSpec
from phalanx.plan.placement.search import Floats, HostPlacement, HostPool, plan_placement, read_loads, replica_counts


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What a run says about replicas. `slots_per_rank` None: none has any, and the rest means nothing."""

    slots_per_rank: int | None = None
    f: int = 2
    loads: Floats | None = None
    """(L, E) tokens for each layer with experts, or (1, E) for all of them; None: all alike."""
    ranks_per_host: int = 1
    """Consecutive ranks that are lost together; those of a single machine count as hosts each."""


@dataclass(frozen=True, kw_only=True)
class StageReplicas:
    """Replicas of the experts of one pipeline stage."""

    placement: LayerPlacements
    on_hosts: HostPlacement
    layers: tuple[int, ...]
    notes: tuple[str, ...]
    """What was decided that nobody asked for."""

    def explain(self) -> str:
        """Replicas, what they survive, and the notes."""
        if not self.layers:
            return "no layer with experts"
        return "\n".join([self.on_hosts.explain(), *(f"  {note}" for note in self.notes)])


def asked_of(config: ResilienceConfig, *, loads: Floats | None, world: int, local_ranks: int) -> ReplicaSettings:
    """Replicas that a recipe asks for; `loads` are those of its file, if it names one. Where all ranks are on one machine, each
    stands for a host."""
    per_host = local_ranks if local_ranks < world else 1
    return ReplicaSettings(slots_per_rank=config.slots_per_rank, f=config.f, loads=loads, ranks_per_host=per_host)


def replicas_of(recipe: Recipe, *, world: int, local_ranks: int) -> ReplicaSettings:
    """What the recipe asks of replicas, the table of loads read. Raises `DataError` for a file that cannot be read."""
    text = recipe.resilience.loads
    loads = None if text == "uniform" else read_loads(read_json(Path(text), where="resilience.loads"))
    return asked_of(recipe.resilience, loads=loads, world=world, local_ranks=local_ranks)


def run_placement(
    spec: ModelSpec, folding: AnyFolding, stages: Sequence[Stage], *, rank: int, asked: ReplicaSettings
) -> AnyPlacement:
    """Where the experts of the rank's `stages` are. Raises `PlanError` or `ConfigError` with all problems."""
    if asked.slots_per_rank is None or not spec.moe_layers:
        return plain_placement(max(1, spec.num_experts), folding.of_rank(rank))
    return stage_replicas(spec, folding, stages, rank=rank, asked=asked).placement


def stage_replicas(
    spec: ModelSpec, folding: AnyFolding, stages: Sequence[Stage], *, rank: int, asked: ReplicaSettings
) -> StageReplicas:
    """The replicas of the experts of `stages`, which the rank's pipeline stage holds."""
    assert asked.slots_per_rank is not None
    layers = expert_layers(spec, stages)
    table, host_of_ep = _loads(spec, asked), _host_of_ep(folding, rank, asked.ranks_per_host)
    names = tuple(dict.fromkeys(host_of_ep))
    pool = HostPool(slots=tuple(asked.slots_per_rank * host_of_ep.count(name) for name in names), names=names)
    if not layers:  # a stage of dense layers
        placed = HostPlacement(num_experts=spec.num_experts, pool=pool, slots=())
        return StageReplicas(placement=LayerPlacements(), on_hosts=placed, layers=(), notes=())
    here = table if len(table) == 1 else table[[spec.moe_layers.index(layer) for layer in layers]]
    here = np.broadcast_to(here, (len(layers), spec.num_experts)).copy()
    counts = replica_counts(here, pool, floor=asked.f)
    placed = plan_placement(counts, pool, here)
    made = LayerPlacements(
        layers={layer: placed.layer_placement(i, host_of_ep=host_of_ep) for i, layer in enumerate(layers)}
    )
    made.check()
    return StageReplicas(placement=made, on_hosts=placed, layers=layers, notes=counts.notes)


def _loads(spec: ModelSpec, asked: ReplicaSettings) -> Floats:
    """(L, E) or (1, E). Raises `ConfigError` for a table of another shape."""
    if asked.loads is None:
        return np.ones((1, spec.num_experts))
    table = read_loads(asked.loads)
    num_layers = len(spec.moe_layers)
    if table.shape[1] != spec.num_experts or len(table) not in (1, num_layers):
        rule = f"must be a row for each of the {num_layers} layers with experts (or one for all), each of {spec.num_experts} experts"
        raise ConfigError.of("resilience.loads", table.shape, rule, subject="the recipe")
    return table


def _host_of_ep(folding: AnyFolding, rank: int, ranks_per_host: int) -> list[int]:
    """Host of each ep rank of the rank's stage, in order. Raises `PlanError` where there are several expert-parallel groups."""
    group, stage = folding.group_of(rank, "ep"), folding.of_rank(rank)
    if stage.edp > 1:
        rule = "experts with replicas have one expert-parallel group of all ranks of a stage"
        hint = f"ep = {stage.ep * stage.edp}"
        raise PlanError.of("folding.ep", stage.ep, rule, hint, subject="placement")
    return [(member - folding.coord(member, "etp")) // ranks_per_host for member in group]
