"""The learning rate of a run whose recipe does not say one.

Decides by the FLOPs of the whole training, the rule of DeepSeek LLM (arXiv 2401.02954, section 3.1): lr = 0.3118 C^-0.1250. A training shorter than 20 tokens an active parameter (arXiv 2203.15556) counts
as one of those: a look at some steps of a large model must not take the rate of a small one. At most `MOST_LR`, with which small models have been trained here.
"""

from __future__ import annotations

from phalanx.core.config import MOST_LR, Recipe
from phalanx.plan.model import ModelSpec, flops_per_token

TOKENS_PER_PARAMETER = 20


def default_lr(recipe: Recipe, spec: ModelSpec) -> float:
    """Highest learning rate for the model `spec` and as many tokens as `recipe` trains, to two digits."""
    t = recipe.train
    tokens = max(t.steps * t.global_batch * t.seq_len, TOKENS_PER_PARAMETER * spec.active_params)
    flops = tokens * flops_per_token(spec, t.seq_len)
    return min(MOST_LR, float(f"{0.3118 * flops**-0.125:.1e}"))
