"""What the training benchmarks share: the shape, the data, the machine's matmul rate.

Must never change: the batch of a step is a function of (seed, step), so that every contender trains on the same tokens.

Legend: B sequences, S sequence length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phalanx.plan.model.model import ModelSpec, RouterSpec


@dataclass(frozen=True, kw_only=True)
class WorkloadShape:
    """A Mixtral-like model and its batch; the defaults are the shape of the published figures."""

    layers: int = 4
    hidden: int = 512
    heads: int = 8
    kv_heads: int = 8
    experts: int = 8
    top_k: int = 2
    ffn: int = 1024
    vocab: int = 8192
    batch: int = 4
    seq_len: int = 512

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.seq_len

    def spec(self) -> ModelSpec:
        router = RouterSpec(score="softmax", softmax_order="before_topk", renormalize=True, aux_loss=AUX_LOSS)
        return ModelSpec(
            name="bench",
            num_layers=self.layers,
            hidden=self.hidden,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.hidden // self.heads,
            vocab=self.vocab,
            num_experts=self.experts,
            top_k=self.top_k,
            expert_ffn=self.ffn,
            router=router,
        )


AUX_LOSS = 0.01
LEARNING_RATE = 3e-4
CLIP_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


def batch_of(shape: WorkloadShape, *, step: int, seed: int = 0) -> NDArray[np.int64]:
    """(B, S + 1) tokens: words by Zipf's law, every second one decided by the word before it, so that there is something to learn."""
    rng = np.random.default_rng((seed, step))
    weights = 1.0 / np.arange(1, shape.vocab + 1)
    drawn = rng.choice(shape.vocab, size=(shape.batch, shape.seq_len + 1), p=weights / weights.sum())
    follower = np.random.default_rng(seed).permutation(shape.vocab)
    follows = rng.random(drawn.shape) < 0.5
    for at in range(1, drawn.shape[1]):
        drawn[:, at] = np.where(follows[:, at], follower[drawn[:, at - 1]], drawn[:, at])
    return drawn.astype(np.int64)
