"""How unevenly tokens are assumed to meet the ranks that hold their experts.

Rows of experts are the one part of a step's memory that data decides. Where the workload is forced (`plan/moe/workload.py`) the share is computed;
for a learned router it is an assumption, with constants that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.core.config import Recipe
from phalanx.plan.mapping import Folding
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import forced_experts

DEVIATIONS_FIRST, DEVIATIONS_LATER = 2.4, 1.0
"""Number of standard deviations by which the fullest rank exceeds its even share: in the first steps, when all tokens look alike
to a fresh router and choose much the same K experts, and later. Which ranks hold those is chance (`_deviation`), and over all
layers that a rank has the root of their
number brings it down. The two numbers are measured (docs/explanation/memory.md)."""
SETTLED_STEPS = 25
"""Steps after which the balance loss has acted (the run that the two numbers were measured in)."""
FORCED_STEPS = 8
"""Steps of a forced workload that are looked at."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Rows of the fullest rank's experts over the even share, over all layers."""

    first: float
    """Excess in the first steps, before the balance loss has acted."""
    later: float
    """When the balance loss has acted."""
    source: str
    """Why these numbers."""
    alone_first: float | None = None
    """Excess as `first`, in the fullest layer alone: layers vary each on its own. None: as over all layers."""
    alone_later: float | None = None


Shares = Sequence[float]
"""Share of each expert's rows that a rank's slots take: 1 or 0 without replicas."""


def plain_shares(spec: ModelSpec, folding: Folding) -> Shares:
    """Every expert once in each expert-parallel group."""
    held = spec.num_experts // folding.ep
    return [1.0] * held + [0.0] * (spec.num_experts - held)


def most_uneven(spec: ModelSpec, folding: Folding, shares: Shares | None = None) -> float:
    """Share of a rank whose experts every token chooses."""
    taken = sorted(plain_shares(spec, folding) if shares is None else shares, reverse=True)
    return max(1.0, folding.ep * sum(taken[: spec.top_k]) / spec.top_k)


def _even(spec: ModelSpec, folding: Folding, shares: Shares) -> float:
    """A rank's rows where all experts are chosen equally often, over the even share."""
    return folding.ep * sum(shares) / spec.num_experts


def _deviation(spec: ModelSpec, folding: Folding, shares: Shares) -> float:
    """Standard deviation of a rank's rows in one layer, over the even share, where all tokens choose the same K of the E experts and any K are as likely.

    A sum over K draws without replacement: K (E - K) / (E - 1) times the variance of one; without replicas (EP - 1) / K * (E - K) / (E - 1).
    """
    experts, k = spec.num_experts, spec.top_k
    if experts <= 1:
        return 0.0
    mean = sum(shares) / experts
    one = sum((share - mean) ** 2 for share in shares) / experts
    return folding.ep / k * math.sqrt(k * (experts - k) / (experts - 1) * one)


def fresh_load(*, ep: int, experts: int, top_k: int) -> float:
    """Rows of the fullest rank over the even share in the first steps, in the layer where that is most: `Balance.alone_first` without replicas."""
    if ep == 1 or experts <= 1:
        return 1.0
    deviation = math.sqrt((ep - 1) / top_k * (experts - top_k) / (experts - 1))
    return max(1.0, min(ep * min(top_k, experts // ep) / top_k, 1.0 + DEVIATIONS_FIRST * deviation))


def expected_balance(
    recipe: Recipe,
    spec: ModelSpec,
    folding: Folding,
    *,
    num_layers: int | None = None,
    shares: Sequence[Shares] | None = None,
) -> Balance:
    """What the fullest rank of an expert-parallel group is assumed to compute, over its even share.

    `num_layers` with experts that the rank has (None: all); `shares` of its slots in each expert's rows, by layer (None: no replicas).
    """
    layers = len(spec.moe_layers) if num_layers is None else num_layers
    if not layers or folding.ep == 1:
        return Balance(first=1.0, later=1.0, source="every rank computes what it routes itself")
    by_layer = [plain_shares(spec, folding)] * layers if shares is None else shares
    even = sum(_even(spec, folding, of) for of in by_layer) / layers
    if spec.router.force != "none":
        share = _forced_share(recipe, spec, folding) if shares is None else even
        return Balance(first=share, later=share, source=f"routing is forced ({spec.router.force})")
    most = [most_uneven(spec, folding, of) for of in by_layer]
    alone = [_deviation(spec, folding, of) for of in by_layer]
    together = math.sqrt(sum(of**2 for of in alone)) / layers

    def exceeding(times: float) -> tuple[float, float]:
        """Excess over all layers, and in the layer where it is most."""
        single = max(
            min(top, _even(spec, folding, of) + times * deviation)
            for top, of, deviation in zip(most, by_layer, alone, strict=True)
        )
        return min(sum(most) / layers, even + times * together), single

    (first, alone_first), (later, alone_later) = exceeding(DEVIATIONS_FIRST), exceeding(DEVIATIONS_LATER)
    return Balance(
        first=first,
        later=later,
        source="assumed of a learned router",
        alone_first=alone_first,
        alone_later=alone_later,
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
