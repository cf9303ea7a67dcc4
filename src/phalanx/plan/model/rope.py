"""Frequencies of the rotary embedding, and how YaRN stretches them to longer sequences (arXiv 2309.00071).

Decides the angle per position of each pair of dims, the factor on cosine and sine, and the factor on the softmax. Must never change: without
YaRN pair j turns by `theta^(-2j/D)` per position. Everything is computed in fp64.

Legend: D rotated dims of a head, N = D/2 pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class YarnSpec:
    """A model trained on sequences of `original_length` and stretched by `factor`.

    Pairs that turn more than `beta_fast` times in the original length stay as they are, those that turn less than `beta_slow` times are slowed
    down by `factor`, the rest lies between. `mscale` and `mscale_all_dim` are DeepSeek's (0: not given): see `amplitude` and `softmax_factor`.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0


def frequencies(dims: int, theta: float, yarn: YarnSpec | None = None) -> tuple[float, ...]:
    """Angle per position of each of the N pairs."""
    plain = [theta ** (-2 * j / dims) for j in range(dims // 2)]
    if yarn is None:
        return tuple(plain)
    low = max(math.floor(_pair_turning(yarn.beta_fast, dims, theta, yarn)), 0)
    high = min(math.ceil(_pair_turning(yarn.beta_slow, dims, theta, yarn)), dims - 1)
    width = (high - low) or 0.001
    slowed = [min(max((j - low) / width, 0.0), 1.0) for j in range(dims // 2)]
    return tuple(f / yarn.factor * s + f * (1 - s) for f, s in zip(plain, slowed, strict=True))


def _pair_turning(turns: float, dims: int, theta: float, yarn: YarnSpec) -> float:
    """The (fractional) pair that turns so many times in the original length."""
    return dims * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def amplitude(yarn: YarnSpec | None) -> float:
    """Factor on cosine and sine."""
    if yarn is None:
        return 1.0
    if yarn.mscale and yarn.mscale_all_dim:
        return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
    return _mscale(yarn.factor, 1.0)


def softmax_factor(yarn: YarnSpec | None) -> float:
    """Factor on the scores of latent attention (DeepSeek-V2, section 3.1.4)."""
    return _mscale(yarn.factor, yarn.mscale_all_dim) ** 2 if yarn is not None and yarn.mscale_all_dim else 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
