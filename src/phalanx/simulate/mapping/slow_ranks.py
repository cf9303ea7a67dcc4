"""Ranks that compute slower than others: named ones, and drawn ones; what the slowest of many does to a step.

Decides for whom a rank waits. All communication of a layer (tensor, context and expert parallelism, all-to-all included) makes its ranks wait for each other in
every layer, so ranks that any chain of such groups joins go at the pace of the slowest of them. That is an *island*: a block of lcm(tp cp, etp ep) ranks of a pipeline stage, since both
grids number their ranks alike. Islands at the same place of all stages make a pipeline, each stage with the pace of its own slowest rank; reductions of gradients and the optimizer
wait for the slowest pipeline (`slow_step.py` puts them on the clock). Must never change: an island is what its folding's groups join (test), and what is drawn has a seed, so a
prediction is the same twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import Problem
from phalanx.plan.mapping import AnyFolding, Folding, StagedFolding
from phalanx.simulate.hardware import GpuCluster

DRAWS = 65
"""Number of draws of all ranks, where paces are drawn; odd, so that there is a median."""
MOST_SPREAD = 1.0
"""Largest spread of the logarithm of paces; beyond it devices would differ by more than any two generations of them do."""

Floats = NDArray[np.float64]
_FORM = re.compile(r"(?P<what>host|rank)=(?P<which>[0-9]{1,9}(?:\.[0-9]{1,9})?%|[0-9]{1,9}):(?P<factor>[0-9.]+)")


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """Who is slower. Factors are seconds of computation over those of the others, at least 1; those of a rank and its host multiply."""

    ranks: tuple[tuple[int, float], ...] = ()
    hosts: tuple[tuple[int, float], ...] = ()
    shares: tuple[tuple[float, float], ...] = ()
    """(share, factor): each host is so slow with that probability."""
    spread: float = 0.0
    """Standard deviation of the logarithm of every device's pace, whose median is 1."""
    draws: int = DRAWS
    seed: int = 0

    @property
    def drawn(self) -> bool:
        return bool(self.shares or self.spread)

    def factors(self, cluster: GpuCluster, rng: np.random.Generator) -> Floats:
        """(world,) seconds of computation of each rank over the usual."""
        per_host = cluster.hardware.ranks_per_host
        out = np.ones(cluster.world)
        for rank, factor in self.ranks:
            out[rank] *= factor
        for host, factor in self.hosts:
            out[host * per_host : (host + 1) * per_host] *= factor
        for share, factor in self.shares:
            slow = rng.random(cluster.hosts) < share
            out *= np.repeat(np.where(slow, factor, 1.0), per_host)[: cluster.world]
        if self.spread:
            out *= np.exp(self.spread * rng.standard_normal(cluster.world))
        return out

    def to_dict(self) -> dict[str, Any]:
        named: dict[str, Any] = {"ranks": self.ranks, "hosts": self.hosts, "shares": self.shares}
        return {**named, "spread": self.spread, "draws": self.draws if self.drawn else 1}


def straggler_problems(texts: Sequence[str], spread: float | None, cluster: GpuCluster | None) -> list[Problem]:
    """What is wrong with `--straggler` and `--spread`; `cluster` says which ranks and hosts there are."""
    problems = []
    for text in texts:
        match = _FORM.fullmatch(text)
        if match is None or not _is_number(match["factor"]):
            rule, hint = "is not host=NUMBER:FACTOR, rank=NUMBER:FACTOR or host=SHARE%:FACTOR", "try host=3:1.2"
            problems.append(Problem(where="--straggler", value=text, rule=rule, hint=hint))
            continue
        if not 1 <= float(match["factor"]) < 1000:
            below = float(match["factor"]) < 1
            rule = "has a factor below 1: slower ranks take longer" if below else "has a factor that has no effect"
            problems.append(Problem(where="--straggler", value=text, rule=rule, hint="try 1.2"))
        problems += _place_problems(text, match["what"], match["which"], cluster)
    if spread is not None and not 0 < spread <= MOST_SPREAD:
        rule = f"must be above 0, at most {MOST_SPREAD:g}: the spread of the logarithm of devices' paces"
        problems.append(Problem(where="--spread", value=spread, rule=rule, hint="try 0.02"))
    return problems


def _is_number(text: str) -> bool:
    return text.count(".") <= 1 and text != "."


def _place_problems(text: str, what: str, which: str, cluster: GpuCluster | None) -> list[Problem]:
    """A rank or host that the cluster lacks, a share of ranks, a share above 1."""
    if which.endswith("%"):
        if what == "rank":
            rule, hint = "draws hosts, not ranks", f"try {text.replace('rank', 'host')}, or --spread"
            return [Problem(where="--straggler", value=text, rule=rule, hint=hint)]
        rule = "is a share of more than all hosts, or of none"
        return (
            []
            if 0 < float(which[:-1]) <= 100
            else [Problem(where="--straggler", value=text, rule=rule, hint="try 0.5%")]
        )
    if cluster is None:
        return []
    number = cluster.hosts if what == "host" else cluster.world
    if int(which) < number:
        return []
    rule = f"is not in {cluster.name}, whose {what}s are 0 to {number - 1}"
    return [Problem(where="--straggler", value=text, rule=rule)]


def parse_stragglers(texts: Sequence[str], spread: float | None) -> Stragglers | None:
    """The stragglers that were asked for, checked before (`straggler_problems`); None where none were."""
    if not texts and spread is None:
        return None
    matches = [match for match in map(_FORM.fullmatch, texts) if match is not None]

    def of(what: str, *, share: bool) -> list[tuple[str, float]]:
        found = [(m["which"], float(m["factor"])) for m in matches if m["what"] == what]
        return [(which.rstrip("%"), factor) for which, factor in found if which.endswith("%") == share]

    return Stragglers(
        ranks=tuple((int(which), factor) for which, factor in of("rank", share=False)),
        hosts=tuple((int(which), factor) for which, factor in of("host", share=False)),
        shares=tuple((float(which) / 100, factor) for which, factor in of("host", share=True)),
        spread=spread or 0.0,
    )


# ---- what they do to a step


def island_size(folding: Folding) -> int:
    """Ranks of a stage that wait for each other within a layer, directly or through others."""
    return math.lcm(folding.tp * folding.cp, folding.etp * folding.ep)


def islands_of(folding: StagedFolding) -> int:
    """Pipelines side by side of which any wait for each other within a layer of some stage: where islands of one stage are of several pipelines, those of all stages are theirs."""
    each = [stage.world // folding.replicas for stage in folding.stages]
    return math.lcm(*(math.lcm(size, island_size(own)) // size for size, own in zip(each, folding.stages, strict=True)))


def paces(folding: AnyFolding, factors: Floats) -> Floats:
    """(pipelines, pp): of each pipeline of islands, the slowest rank's factor on each stage. `factors` are (world,)."""
    if isinstance(folding, Folding):
        slowest: Floats = factors.reshape(folding.pp, -1, island_size(folding)).max(axis=2).T
        return slowest
    number = folding.replicas // islands_of(folding)
    ends = [*folding.first_ranks[1:], folding.world]
    of_stages = [factors[a:b] for a, b in zip(folding.first_ranks, ends, strict=True)]
    return np.array([own.reshape(number, -1).max(axis=1) for own in of_stages]).T
