"""Figures of `phalanx bench layer` from seconds: pure arithmetic, defined in `command.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx_lab.bench.layer.methods import AUTO


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {method: statistics.median(each) for method, each in seconds.items()}


def halves(seconds: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Medians over the even iterations, which decide, and over the odd ones, which score."""
    return medians({m: s[::2] for m, s in seconds.items()}), medians({m: s[1::2] for m, s in seconds.items()})


@dataclass(frozen=True, kw_only=True)
class Regret:
    """How far the run's own choice stays behind the best of the other methods."""

    best: str
    """The method that is best on the even iterations."""
    ratio: float
    """Seconds of `auto` over those of `best`, medians of the odd iterations, which have not decided which one is best."""
    to_least: float
    """The same over the least median of any method, of all iterations: of methods that are equal the one that was lucky."""


def regret(seconds: Mapping[str, Sequence[float]]) -> Regret:
    """Regret of seconds by method, `auto` among them."""
    others = {method: each for method, each in seconds.items() if method != AUTO}
    decide, score = halves(others)
    best = min(decide, key=lambda m: decide[m])
    auto_s = statistics.median(seconds[AUTO][1::2])
    to_least = statistics.median(seconds[AUTO]) / min(medians(others).values())
    return Regret(best=best, ratio=auto_s / score[best], to_least=to_least)


def figures(
    t: float, *, compute_s: float, messages_s: float, least_s: float, serial_s: float, coarse_s: float | None
) -> dict[str, float | None]:
    """One method's figures. None where there is no coarse method to compare with."""
    return {
        "hidden": (messages_s + compute_s - t) / min(messages_s, compute_s),
        "hidden_of_comm": 1 - (t - compute_s) / messages_s,
        "comm_share": messages_s / serial_s,
        "speedup_vs_serial": serial_s / t,
        "speedup_vs_best_coarse": None if coarse_s is None else coarse_s / t,
        "time_over_bound": t / max(compute_s, min(messages_s, least_s)),
    }
