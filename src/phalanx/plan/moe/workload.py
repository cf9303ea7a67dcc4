"""Forced routing for benchmarks: which experts a token takes, as a function of (mode, seed, step, layer) and the token's place alone.

Must never change: nothing else enters, neither data nor mapping, so that two runs of a benchmark move the same rows.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["balanced", "imbalanced"]


def forced_experts(
    mode: Mode, *, num_tokens: int, num_experts: int, top_k: int, seed: int, step: int, layer: int, skew: float = 1.0
) -> NDArray[np.int64]:
    """(T, K) distinct experts of each token of a micro-batch.

    `balanced` deals the experts, in an order drawn for this step and layer, like cards: counts differ by one at most.
    `imbalanced` draws each token's experts without replacement with Zipf weights `rank ** -skew`, the ranks drawn likewise.
    """
    rng = np.random.Generator(
        np.random.Philox(key=np.array([seed % 2**64, step % 2**32 * 2**16 + layer], dtype=np.uint64))
    )
    order = rng.permutation(num_experts)
    if mode == "balanced":
        cards: NDArray[np.int64] = order[np.arange(num_tokens * top_k) % num_experts].reshape(num_tokens, top_k)
        return cards
    log_weight = np.empty(num_experts)
    log_weight[order] = -skew * np.log(np.arange(1, num_experts + 1))
    keys = log_weight + rng.gumbel(size=(num_tokens, num_experts))  # Gumbel top-k samples without replacement
    return np.argsort(-keys, axis=1, kind="stable")[:, :top_k].astype(np.int64)
