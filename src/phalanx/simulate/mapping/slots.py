"""Experts with replicas on a cluster (`resilience.slots_per_rank`): what they take off the fullest rank, and what they cost in bytes.

Decides nothing about replicas: how many an expert gets and where they live is the run's own plan (`plan/placement/run.py`), who serves which rows the run's own dispatcher
(`plan/moe/dispatch_local.py`). Here both meet loads that are drawn, layer by layer, and what comes out are the few numbers that time and memory depend on. Must never change: what is drawn has a
seed, and the placement knows no more of the loads than a run does: none, those of its file, or with `replace_interval` the popularity that experts have had of late.

Legend: L layers, P sources, E experts, R ranks of the expert-parallel group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.layout import ExpertState
from phalanx.plan.mapping import Folding, Placement, Stage
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import DispatchPlan, forced_experts, plan_dispatch, plan_local_dispatch, plan_static_dispatch
from phalanx.plan.placement import ReplicaSettings, stage_replicas
from phalanx.simulate.mapping.routing import FORCED_DRAWS, RouterModel

DRAWS = FORCED_DRAWS
"""Passes of a layer that are drawn and dispatched, those of a stage's layers in turn; their median stands for all."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ExpertSlots:
    """Replicas of experts as time and memory see them. Loads are rows over the mean of the ranks; experts are counted for one layer, of the rank that has most of them."""

    slots_per_rank: int
    floor: int
    """Hosts on which every expert is."""
    state: ExpertState
    follows: bool
    """Replicas are placed by the loads of late."""
    load: float
    """Load of the fullest rank in the middle layer ..."""
    most: float
    """... and in the worst of those that were drawn."""
    plain_load: float | None
    """Load of the fullest rank without replicas, the same rows; None where the experts do not divide among the ranks."""
    exchange: float
    """Rows that cross hosts (on one host: ranks) to or from the busiest rank, over those of an even exchange where every rank serves all others alike."""
    held: float
    """Different experts of a rank."""
    sent: float
    """Experts' worth of gradients that a rank sends to other holders, and as much comes in."""
    owned: float
    """Experts' worth whose sums a rank completes."""

    @property
    def kept(self) -> float:
        """Experts' worth of optimizer state of a rank."""
        return self.held if self.state == "whole" else self.owned

    def explain(self) -> str:
        """One line that a person reads."""
        without = "" if self.plain_load is None else f" (without replicas {self.plain_load:.2f})"
        by = "by the loads of late" if self.follows else "once"
        return (
            f"{self.slots_per_rank} slots a rank, placed {by}: the fullest rank has {self.load:.2f} of the mean rows{without}, "
            f"holds {self.held:.1f} experts of a layer, and sends {self.sent:.1f} experts' gradients to other holders"
        )


@dataclass(frozen=True, kw_only=True)
class RoutedRows:
    """What tokens choose. `capacity`: rows that an expert takes from a source; `padded`: exactly those."""

    routing: RouterModel
    tokens: int
    """Tokens of a rank and micro-batch."""
    seed: int
    forced_skew: float | None = None
    """Skew of `router.force = "imbalanced"`."""
    capacity: int | None = None
    padded: bool = False


def expert_slots(
    spec: ModelSpec,
    folding: Folding,
    stages: Sequence[Stage],
    *,
    rank: int,
    asked: ReplicaSettings,
    rows: RoutedRows,
    state: ExpertState = "whole",
    follows: bool = False,
) -> ExpertSlots:
    """Slots of the stages that `rank` holds. Raises `PlanError` or `ConfigError` as a run does, with all problems."""
    assert asked.slots_per_rank is not None
    rng = np.random.default_rng(rows.seed)
    popularity = _popularity(spec, asked, rows, rng)
    placed_by = replace(asked, loads=popularity) if follows and popularity is not None else asked
    made = stage_replicas(spec, folding, stages, rank=rank, asked=placed_by)
    layers = [made.layers[i % len(made.layers)] for i in range(DRAWS)]
    drawn = list(_drawn(spec, folding, layers, rows, popularity, rng))
    where = [made.placement.of_layer(layer) for layer in layers]
    plans = [_plan(counts, placement, folding, rows) for counts, placement in zip(drawn, where, strict=True)]
    plain = None if spec.num_experts % folding.ep else [_load(counts, folding) for counts in drawn]
    loads = [_load(plan.rows_PG, folding) for plan in plans]
    held, sent, owned = _bytes_of([made.placement.of_layer(layer) for layer in made.layers], folding.ep)
    return ExpertSlots(
        slots_per_rank=asked.slots_per_rank,
        floor=made.on_hosts.floor,
        state=state,
        follows=follows,
        load=median(loads),
        most=max(loads),
        plain_load=None if plain is None else median(plain),
        exchange=median(map(_exchange, plans, where)),
        held=held,
        sent=sent,
        owned=owned,
    )


# ---- what tokens choose


def _popularity(spec: ModelSpec, asked: ReplicaSettings, rows: RoutedRows, rng: np.random.Generator) -> Floats | None:
    """(L, E) of the layers with experts, summing to 1 in each: the file's, or of a learned router as drawn; None where routing is forced."""
    if rows.routing.kind == "balanced" or rows.forced_skew is not None:
        return None
    layers = len(spec.moe_layers)
    if asked.loads is not None:
        table = np.broadcast_to(asked.loads, (layers, asked.loads.shape[1]))
        made: Floats = table / np.maximum(table.sum(1, keepdims=True), 1e-300)
        return made
    drawn: Floats = rng.dirichlet(np.full(spec.num_experts, rows.routing.concentration), size=layers)
    return drawn


def _drawn(
    spec: ModelSpec,
    folding: Folding,
    layers: Sequence[int],
    rows: RoutedRows,
    popularity: Floats | None,
    rng: np.random.Generator,
) -> Iterator[Ints]:
    """(P, E) rows from each source to each expert, for each draw; where routing is forced, of the same draws as `routing.forced_loads`."""
    sources, pairs = folding.ep * folding.etp, rows.tokens * spec.top_k
    for draw, layer in enumerate(layers):
        if popularity is not None:
            counts = rng.multinomial(pairs, popularity[spec.moe_layers.index(layer)], size=sources)
            counts = np.minimum(counts, rows.tokens)  # a token chooses an expert once
        else:
            skew = rows.forced_skew
            chosen = forced_experts(
                "balanced" if skew is None else "imbalanced",
                num_tokens=rows.tokens,
                num_experts=spec.num_experts,
                top_k=spec.top_k,
                seed=rows.seed,
                step=0,
                layer=draw,
                skew=1.0 if skew is None else skew,
            )
            counts = np.tile(np.bincount(chosen.ravel(), minlength=spec.num_experts), (sources, 1))
        if rows.capacity is not None:
            counts = np.full_like(counts, rows.capacity) if rows.padded else np.minimum(counts, rows.capacity)
        yield counts.astype(np.int64)


# ---- who serves it


def _plan(counts_PE: Ints, placement: Placement, folding: Folding, rows: RoutedRows) -> DispatchPlan:
    """Plan as a run's dispatcher makes it."""
    slots, here = placement.group_slots(0).tolist(), {"ep": folding.ep, "etp": folding.etp}
    if rows.padded and rows.capacity is not None:
        return plan_static_dispatch(rows.capacity, slots, **here)
    if placement.is_plain:
        return plan_dispatch(counts_PE, slots, **here)
    return plan_local_dispatch(counts_PE, slots, host_of_ep=placement.hosts, **here)


def _load(rows: Ints, folding: Folding) -> float:
    """Rows of the fullest rank over the mean. `rows`: from each source to each expert or slot, rank by rank."""
    by_rank = rows.sum(0).reshape(folding.ep, -1).sum(1)
    return float(by_rank.max() / by_rank.mean()) if by_rank.any() else 1.0


def _exchange(plan: DispatchPlan, placement: Placement) -> float:
    """See `ExpertSlots.exchange`."""
    hosts = np.asarray(placement.hosts) if placement.hosts else np.arange(plan.ep)
    if len(set(hosts.tolist())) == 1:
        hosts = np.arange(plan.ep)
    rows_RR = plan.rows_PG.reshape(plan.ep, plan.etp, plan.ep, -1).sum((1, 3))
    crossing = np.where(hosts[:, None] == hosts[None, :], 0, rows_RR)
    share = float((hosts[:, None] != hosts[None, :]).mean())
    even = rows_RR.sum() / plan.ep * share
    return float(max(crossing.sum(0).max(), crossing.sum(1).max()) / even) if even else 1.0


# ---- what it holds


def _bytes_of(placements: Sequence[Placement], ranks: int) -> tuple[float, float, float]:
    """(held, sent, owned) experts of a layer, each of the rank that has most over all layers (`plan/layout/holders.py`: of m holders each completes 1/m)."""
    held, sent, owned = (np.zeros(ranks) for _ in range(3))
    for placement in placements:
        by_rank = [set(slots) for slots in placement.slots[0]]
        holders = np.bincount([e for experts in by_rank for e in experts], minlength=placement.num_experts)
        for rank, experts in enumerate(by_rank):
            shares = [1 / holders[e] for e in experts]
            held[rank] += len(experts)
            owned[rank] += sum(shares)
            sent[rank] += len(experts) - sum(shares)
    layers = max(1, len(placements))
    return tuple(float(one.max()) / layers for one in (held, sent, owned))  # type: ignore[return-value]
