"""Figures of `phalanx bench layer` from seconds: pure arithmetic, defined in `command.py`."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from phalanx_lab.bench.layer.methods import SERIAL

MARGIN = 1.02
"""How many times faster than serial a schedule must be on the iterations that decide: less is noise, and serial cannot lose."""
MOST = 0.7
"""And the share of those iterations in which it must have been the faster one: medians of a short layer swing by a tenth."""


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {method: statistics.median(each) for method, each in seconds.items()}


def halves(seconds: Mapping[str, Sequence[float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Medians over the even iterations, which decide, and over the odd ones, which score."""
    return medians({m: s[::2] for m, s in seconds.items()}), medians({m: s[1::2] for m, s in seconds.items()})


def chosen(seconds: Mapping[str, Sequence[float]]) -> tuple[str, float]:
    """The method that is best on the even iterations, and its median on the odd ones."""
    decide, score = halves(seconds)
    best = min(decide, key=lambda m: decide[m])
    rounds = list(zip(seconds[best][::2], seconds[SERIAL][::2], strict=True))
    won = sum(own < serial for own, serial in rounds) >= MOST * len(rounds)
    name = best if won and decide[best] * MARGIN < decide[SERIAL] else SERIAL
    return name, score[name]


def regret(seconds: Mapping[str, Sequence[float]]) -> tuple[str, float]:
    """What `chosen` takes, and its seconds over those of the best method, both on the odd iterations."""
    name, got = chosen(seconds)
    _, score = halves(seconds)
    return name, got / min(score.values())


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
