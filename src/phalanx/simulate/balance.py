"""How unevenly tokens are assumed to meet the ranks that hold their experts.

Rows of experts are the one part of a step's memory that data decides. Where the workload is forced (`plan/workload.py`) the share is computed;
for a learned router it is an assumption, with constants that were measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from phalanx.core.config import Recipe
from phalanx.plan.folding import Folding
from phalanx.plan.model import ModelSpec
from phalanx.plan.workload import forced_experts

DEVIATIONS_FIRST, DEVIATIONS_LATER = 2.4, 1.0
"""By how many standard deviations the fullest rank exceeds its even share: in the first steps, when all tokens look alike to a fresh router
and choose much the same K experts, and later. Which ranks hold those is chance: a rank's share of a layer then has the variance (EP - 1) / K,
and over all layers the root of their number brings it down. The two numbers are measured (docs/memory.md)."""
FORCED_STEPS = 8
"""Steps of a forced workload that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Rows of the fullest rank's experts over the even share, over all layers."""

    first: float
    """In the first steps, before the balance loss has acted."""
    later: float
    """From the first checkpoint on."""
    source: str
    """Why these numbers."""
    alone_first: float | None = None
    """As `first`, in the fullest layer alone: layers vary each on its own. None: as over all layers."""
    alone_later: float | None = None


def most_uneven(spec: ModelSpec, folding: Folding) -> float:
    """Share of a rank whose experts every token chooses."""
    return max(1.0, folding.ep * min(spec.top_k, spec.num_experts // folding.ep) / spec.top_k)


def expected_balance(recipe: Recipe, spec: ModelSpec, folding: Folding) -> Balance:
    """What the fullest rank of an expert-parallel group is assumed to compute, over its even share."""
    layers = len(spec.moe_layers)
    if not layers or folding.ep == 1:
        return Balance(first=1.0, later=1.0, source="every rank computes what it routes itself")
    if spec.router.force != "none":
        share = _forced_share(recipe, spec, folding)
        return Balance(first=share, later=share, source=f"routing is forced ({spec.router.force})")
    most = most_uneven(spec, folding)
    deviation = math.sqrt((folding.ep - 1) / spec.top_k / layers)
    alone = deviation * math.sqrt(layers)

    def exceeding(times: float, of: float) -> float:
        return min(most, 1.0 + times * of)

    return Balance(
        first=exceeding(DEVIATIONS_FIRST, deviation),
        later=exceeding(DEVIATIONS_LATER, deviation),
        source="assumed of a learned router",
        alone_first=exceeding(DEVIATIONS_FIRST, alone),
        alone_later=exceeding(DEVIATIONS_LATER, alone),
    )


def worst_balance(spec: ModelSpec, folding: Folding) -> Balance:
    """Every token to the same rank, in every layer."""
    most = most_uneven(spec, folding)
    return Balance(first=most, later=most, source="every token chooses this rank's experts")


def _forced_share(recipe: Recipe, spec: ModelSpec, folding: Folding) -> float:
    """The fullest rank's share under a forced workload, over the first steps."""
    assert spec.router.force != "none"  # asked for by the only caller
    tokens, per_rank, worst = recipe.train.micro_batch * recipe.train.seq_len, spec.num_experts // folding.ep, 1.0
    for step in range(FORCED_STEPS):
        held = [0] * folding.ep
        for layer in spec.moe_layers:
            experts = forced_experts(
                spec.router.force,
                num_tokens=tokens,
                num_experts=spec.num_experts,
                top_k=spec.top_k,
                seed=recipe.train.seed,
                step=step,
                layer=layer,
                skew=spec.router.force_skew,
            )
            for p in range(folding.ep):
                held[p] += int(((experts // per_rank) == p).sum())
        worst = max(worst, max(held) * folding.ep / sum(held))
    return worst
