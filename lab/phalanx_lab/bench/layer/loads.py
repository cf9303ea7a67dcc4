"""Routing with exactly the load that a benchmark asks for: which experts each token of a rank goes to.

A *load* is the share of a rank's (token, expert) pairs that each expert gets. Loads of the benchmarks are even, have a given standard deviation
(of the shares over the experts, as COMET counts it: arXiv 2502.19811, section 5.4; 0.032 is its average in production), or have one expert
that gets nothing. Experts are hot in an order that a seed draws.

The number of pairs of each expert is exact, a token's experts are different ones, and otherwise which token goes where is random: pairs are dealt
out one expert after the other, then tokens swap experts at random as often as it takes to forget that. (Dealt out alone, experts would always meet
the same few others, and how many tokens go to both hosts would be an accident.)

Legend: T tokens of a rank, K experts of a token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import ConfigError, Problem, raise_if

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DEAD = "dead"
"""Name of the load in which one expert gets nothing and the others the same."""
SWAPS = 64
"""Rounds in which every token swaps with another one."""


def load_vector(load: str, *, num_experts: int, top_k: int, seed: int = 0) -> Floats:
    """(E,) shares, sum 1, none above `1 / K` (an expert meets a token once). `load`: a standard deviation, or `dead`.

    Shares with a standard deviation are log-normal quantiles, whose width is found by bisection. Raises `ConfigError` where no such load exists.
    """
    if load == DEAD:
        shares = np.ones(num_experts)
        shares[0] = 0.0
        shares /= max(num_experts - 1, 1)
        _raise_if_impossible(shares, load, top_k)
    else:
        shares = _spread(_deviation(load), num_experts=num_experts, top_k=top_k)
    out: Floats = shares[np.random.default_rng(seed).permutation(num_experts)]
    return out


def _deviation(load: str) -> float:
    try:
        value = float(load)
    except ValueError:
        value = -1.0
    rule = "must be a standard deviation of the experts' shares, 0 or more, or `dead`"
    problem = Problem(where="load", value=load, rule=rule, hint="use 0, 0.032 or dead")
    raise_if([] if 0.0 <= value < 1.0 else [problem], ConfigError, subject="the options")
    return value


def _spread(deviation: float, *, num_experts: int, top_k: int) -> Floats:
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / num_experts) for i in range(num_experts)])

    def shares(width: float) -> Floats:
        out = np.exp(width * (quantiles - quantiles[-1]))
        return np.asarray(out / out.sum())

    low, high = 0.0, 20.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if shares(middle).std() < deviation else (low, middle)
    found = shares(low)
    if abs(found.std() - deviation) > 1e-6:
        _raise_if_impossible(np.ones(1), str(deviation), 2)
    _raise_if_impossible(found, str(deviation), top_k)
    return found


def _raise_if_impossible(shares: Floats, load: str, top_k: int) -> None:
    rule = f"would give one expert {shares.max():.3f} of all pairs; with {top_k} experts for each token none can have more than 1/{top_k}"
    problem = Problem(where="load", value=load, rule=rule, hint="use a smaller standard deviation")
    raise_if([problem] if shares.max() * top_k > 1 + 1e-9 else [], ConfigError, subject="the options")


def pair_counts(shares: Floats, *, num_tokens: int, top_k: int) -> Ints:
    """(E,) pairs of each expert: `T * K * share`, whole by largest remainders, none above T."""
    exact = shares * (num_tokens * top_k)
    counts = np.floor(exact + 1e-9).astype(np.int64)
    by_remainder = np.argsort(-(exact - counts), kind="stable")
    missing = num_tokens * top_k - int(counts.sum())
    for expert in _again(by_remainder, missing):
        if missing == 0:
            break
        if counts[expert] < num_tokens and shares[expert] > 0:
            counts[expert] += 1
            missing -= 1
    return counts


def _again(order: Ints, missing: int) -> Iterator[int]:
    for _ in range(missing + 1):
        yield from (int(e) for e in order)


def exact_routing(counts: Ints, *, num_tokens: int, top_k: int, rng: np.random.Generator) -> Ints:
    """(T, K) experts of each token, all different, expert e in exactly `counts[e]` of them. Sum of `counts` is `T * K`, none above T."""
    assert counts.sum() == num_tokens * top_k and counts.max(initial=0) <= num_tokens
    order = rng.permutation(len(counts))
    dealt = np.repeat(order, counts[order])  # an expert's pairs are at most T in a row: to T different tokens
    experts_TK = dealt.reshape(top_k, num_tokens).T.copy()
    half = num_tokens // 2
    for _ in range(SWAPS):
        tokens = rng.permutation(num_tokens)
        a, b = tokens[:half], tokens[half : 2 * half]
        slot_a, slot_b = rng.integers(top_k, size=(2, half))
        of_a, of_b = experts_TK[a, slot_a], experts_TK[b, slot_b]
        legal = ~((experts_TK[a] == of_b[:, None]).any(1) | (experts_TK[b] == of_a[:, None]).any(1))
        experts_TK[a[legal], slot_a[legal]] = of_b[legal]
        experts_TK[b[legal], slot_b[legal]] = of_a[legal]
    return rng.permuted(experts_TK, axis=1)
