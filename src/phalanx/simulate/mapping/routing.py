"""How unevenly tokens meet ranks, as a distribution: what imbalance does to time and to buffers.

Decides the load of the fullest expert-parallel rank over the even share (lambda, at least 1). Tokens of a micro-batch choose
experts with probabilities that are themselves drawn (Dirichlet with `concentration` for each expert; infinity is uniform), so the share
of a rank has a mean of 1 and a variance of

    (EP - 1) / (E c + 1)  +  (EP - 1) / rows      popularity of its experts, and chance among the rows of a micro-batch

and the fullest of EP ranks lies by the expected maximum of EP normal draws above it. What memory must hold is more: also the first steps of
a fresh router (`simulate/memory/balance.py`). Must never change: forced and capped routing have lambda 1, and more ranks or more skew never make it smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, median
from typing import Literal

import numpy as np

from phalanx.plan.moe import forced_experts
from phalanx.simulate.memory import fresh_load

BUFFER_QUANTILE = 0.999
"""What memory holds is enough for all but one in a thousand passes of a layer."""


@dataclass(frozen=True, kw_only=True)
class RouterModel:
    """What is assumed of the router. `concentration` is that of a balanced, trained router unless said otherwise."""

    kind: Literal["balanced", "learned"] = "balanced"
    """balanced: forced, or capacity factor 1 with padding; learned: as the distribution says."""
    concentration: float = 8.0
    """Concentration of the experts' popularity in a layer: its coefficient of variation is about 1 / sqrt(concentration)."""
    forced: tuple[float, float] | None = None
    """Load of the fullest rank in a typical layer and in the worst, where a recipe forces it (`forced_loads`)."""

    def hottest(self, *, ep: int, experts: int, rows: float, top_k: int, worst: bool = False) -> float:
        """Load of the fullest of `ep` ranks over the even share; `rows` are all rows of the group in a micro-batch.

        That of a layer in a typical pass, which time asks for; `worst` is what memory must hold, of a fresh router and of a trained one.
        """
        if ep <= 1 or not experts:
            return 1.0
        if self.forced is not None:
            return self.forced[1 if worst else 0]
        if self.kind == "balanced":
            return 1.0
        popularity = (ep - 1) / (experts * self.concentration + 1)
        deviation = math.sqrt(popularity + (ep - 1) / max(rows, 1.0))
        most = min(float(ep), ep * min(top_k, experts // ep) / top_k if top_k else float(ep))
        trained = max(1.0, min(most, 1.0 + deviation * _maximum(ep, BUFFER_QUANTILE if worst else 0.5)))
        return max(trained, fresh_load(ep=ep, experts=experts, top_k=top_k)) if worst else trained


def _maximum(n: int, quantile: float) -> float:
    """Quantile of the largest of `n` independent standard normal draws."""
    return NormalDist().inv_cdf(quantile ** (1.0 / n))


FORCED_DRAWS = 16
"""Layers and steps of a forced workload that are counted."""


@lru_cache(maxsize=64)
def forced_loads(*, ep: int, experts: int, top_k: int, tokens: int, seed: int, skew: float) -> tuple[float, float]:
    """Load of the fullest of `ep` ranks over the even share under `router.force = "imbalanced"`: median and largest of the first draws.

    `tokens` of a micro-batch; every source draws the same (`plan/moe/workload.py`), so shares of a group are those of one micro-batch.
    """
    found = []
    for layer in range(FORCED_DRAWS):
        chosen = forced_experts(
            "imbalanced", num_tokens=tokens, num_experts=experts, top_k=top_k, seed=seed, step=0, layer=layer, skew=skew
        )
        held = np.bincount(chosen.ravel() // (experts // ep), minlength=ep)
        found.append(float(held.max() * ep / held.sum()))
    return median(found), max(found)
