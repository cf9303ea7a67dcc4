"""Cases such that any two settings of any two factors meet in at least one of them.

Most faults need one particular value of one or two settings (an axis above one, a scope of the balancing loss); all pairs of 16 factors fit
into some 80 cases where all combinations would be 10^8. Greedy, after D. M. Cohen et al., "The AETG System" (IEEE TSE 23(7), 1997).
Must never change: same factors, same cases.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

Level = tuple[str, int]
"""A factor's name and the position of one of its levels."""

CANDIDATES = 12
"""Cases tried for each one kept; more make the table shorter by a few per cent only."""


def pairwise(
    factors: Mapping[str, Sequence[Any]], *, seed: int = 0, dear: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Cases (factor -> level) that cover every pair of levels of different factors.

    Of the factors in `dear` the later levels take longer to run: they are chosen last, and where no level meets a new pair, the first one is.
    """
    rng = random.Random(seed)
    levels = {name: [(name, i) for i in range(len(values))] for name, values in factors.items()}
    # a dict keeps the order of insertion, which a set of tuples of strings does not (hash randomisation)
    uncovered = {frozenset((a, b)): (a, b) for x, y in combinations(levels, 2) for a in levels[x] for b in levels[y]}
    cases = []
    while uncovered:
        candidates = [_candidate(levels, uncovered, rng, dear) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: len(_pairs(case) & uncovered.keys()))
        for pair in _pairs(best):
            uncovered.pop(pair, None)
        cases.append({name: factors[name][best[name][1]] for name in factors})
    return cases


def _candidate(
    levels: Mapping[str, Sequence[Level]],
    uncovered: Mapping[frozenset[Level], tuple[Level, Level]],
    rng: random.Random,
    dear: Collection[str],
) -> dict[str, Level]:
    """Start from an uncovered pair; give each other factor, in random order, the level that covers most with those set so far."""
    first, second = rng.choice(list(uncovered.values()))
    case = {first[0]: first, second[0]: second}
    rest = [name for name in levels if name not in case]
    rng.shuffle(rest)
    rest.sort(key=lambda name: name in dear)  # stable: the others keep their random order
    for name in rest:
        gains = [sum(frozenset((level, other)) in uncovered for other in case.values()) for level in levels[name]]
        best = max(gains)
        equal = [level for level, gain in zip(levels[name], gains, strict=True) if gain == best]
        case[name] = equal[0] if name in dear else rng.choice(equal)
    return case


def _pairs(case: Mapping[str, Level]) -> set[frozenset[Level]]:
    return {frozenset(pair) for pair in combinations(case.values(), 2)}
