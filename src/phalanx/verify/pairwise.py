"""Cases such that any two settings of any two factors meet in at least one of them.

Most faults need one particular value of one or two settings (an axis above one, a scope of the balancing loss); all pairs of 16 factors fit
into some 80 cases where all combinations would be 10^8. Greedy, after D. M. Cohen et al., "The AETG System" (IEEE TSE 23(7), 1997).
Options that shut each other out (`excluded`) never meet in a case: what would be left out of it when it is made would still count as covered.

Must never change: same factors, same cases; a case holds what is counted as covered by it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from typing import Any

Level = tuple[str, int]
"""A factor's name and the position of one of its levels."""

Excluded = Callable[[Mapping[str, Any]], bool]
"""Whether settings (factor -> level, of two factors) cannot meet."""
CANDIDATES = 12
"""Cases tried for each one kept; more make the table shorter by a few per cent only."""


def pairwise(
    factors: Mapping[str, Sequence[Any]],
    *,
    seed: int = 0,
    dear: Collection[str] = (),
    excluded: Excluded = lambda settings: False,
) -> list[dict[str, Any]]:
    """Cases (factor -> level) that cover every pair of levels of different factors that is not excluded.

    Whatever is chosen, each factor must have a level left that goes with it. Of the factors in `dear` the later levels take longer to run: they are chosen last, and where no level meets a new pair, the first one is.
    """
    rng = random.Random(seed)
    levels = {name: [(name, i) for i in range(len(values))] for name, values in factors.items()}
    # a dict keeps the order of insertion, which a set of tuples of strings does not (hash randomisation)
    pairs = {frozenset((a, b)): (a, b) for x, y in combinations(levels, 2) for a in levels[x] for b in levels[y]}
    apart = {key for key, pair in pairs.items() if excluded({name: factors[name][i] for name, i in pair})}
    uncovered = {key: pair for key, pair in pairs.items() if key not in apart}
    cases = []
    while uncovered:
        candidates = [_candidate(levels, uncovered, apart, rng, dear) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: len(_pairs(case) & uncovered.keys()))
        for pair in _pairs(best):
            uncovered.pop(pair, None)
        cases.append({name: factors[name][best[name][1]] for name in factors})
    return cases


def _candidate(
    levels: Mapping[str, Sequence[Level]],
    uncovered: Mapping[frozenset[Level], tuple[Level, Level]],
    apart: Collection[frozenset[Level]],
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
        legal = [x for x in levels[name] if not any(frozenset((x, other)) in apart for other in case.values())]
        gains = [sum(frozenset((level, other)) in uncovered for other in case.values()) for level in legal]
        best = max(gains)
        equal = [level for level, gain in zip(legal, gains, strict=True) if gain == best]
        case[name] = equal[0] if name in dear else rng.choice(equal)
    return case


def _pairs(case: Mapping[str, Level]) -> set[frozenset[Level]]:
    return {frozenset(pair) for pair in combinations(case.values(), 2)}
