"""The certificate of a placement: P(recover | k hosts lost), exact wherever it can be.

Decides nothing about placements. A loss is survived if every expert of every layer keeps a live holder. Exact, as integers over C(N, k):

- every k up to 20 hosts, because every loss is looked at;
- every k for more hosts, where they fall into parts that share no expert's holders and each part has at most 20 hosts, or at most 12 sets of holders
  (segments of any size): the survived sets of the parts multiply as polynomials in k;
- k <= 3 for any number of hosts, by counting (`plan/placement/search/host_sets.py`).

Beyond, an interval that holds for certain: the union bound above, the loss of disjoint sets below. The entry says which it is. Must never change: an entry
marked exact equals enumeration. Racks: the same question about the racks that each expert's holders stand in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from phalanx.plan.placement.search.host_sets import (
    TABLE_HOSTS,
    components,
    fatal_table,
    hosts_in,
    mask_of,
    minimal_sets,
    popcounts,
    small_fatal_counts,
)

MAX_TERMS = 12
"""Sets of one part whose unions are listed (2^12 of them)."""
MAX_SETS = 1500
"""Minimal sets beyond which only intervals are given."""


@dataclass(frozen=True)
class Chance:
    """P(recover) after k hosts were lost: `low == high` where it is exact."""

    lost: int
    low: Fraction
    high: Fraction

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    def __str__(self) -> str:
        if self.is_exact:
            return f"{float(self.low):.4f}"
        return f"{float(self.low):.4f}..{float(self.high):.4f}"


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """P(recover | k lost) for k = 0 .. N."""

    num_hosts: int
    chances: tuple[Chance, ...]

    @property
    def guaranteed(self) -> int:
        """Any loss of fewer hosts than this is survived for certain (f); at most N, for nothing survives the loss of all."""
        return next((c.lost for c in self.chances if c.low < 1), self.num_hosts)

    @property
    def probabilities(self) -> tuple[float, ...]:
        """Probabilities by k; the lower end where it is an interval."""
        return tuple(float(c.low) for c in self.chances)

    def explain(self, *, most: int = 6, what: str = "hosts") -> str:
        """The first uncertain losses, in one line."""
        shown = [c for c in self.chances if c.lost >= self.guaranteed][:most]
        kind = "exact" if all(c.is_exact for c in self.chances) else "exact but where an interval is shown"
        listed = "  ".join(f"{c.lost}: {c}" for c in shown)
        return f"survives any {self.guaranteed - 1} {what} lost; P(recover | k lost), {kind}: {listed}"


def certify(sets: Iterable[int], num_hosts: int) -> Certificate:
    """Certifies the holders (bits) of all experts of all layers."""
    wanted = [math.comb(num_hosts, k) for k in range(num_hosts + 1)]
    distinct = set(sets)
    survived = _survived(distinct, num_hosts)
    if survived is not None:
        shares = [Fraction(s, w) for s, w in zip(survived, wanted, strict=True)]
        return Certificate(num_hosts=num_hosts, chances=tuple(Chance(k, p, p) for k, p in enumerate(shares)))
    few = minimal_sets(s for s in distinct if s.bit_count() <= 3) or []
    fatal = small_fatal_counts(few, num_hosts)
    exact = [Fraction(w - f, w) for f, w in zip(fatal, wanted, strict=False)]
    chances = [Chance(k, p, p) for k, p in enumerate(exact)]
    return Certificate(num_hosts=num_hosts, chances=(*chances, *_intervals(distinct, num_hosts, exact[-1])))


def fatal_counts(sets: Iterable[int], num_hosts: int) -> tuple[int, ...]:
    """How many sets of k lost hosts are fatal, k = 0 .. N; only up to k = 3 where more cannot be exact. What plans are compared by."""
    distinct = set(sets)
    survived = _survived(distinct, num_hosts)
    if survived is not None:
        return tuple(math.comb(num_hosts, k) - s for k, s in enumerate(survived))
    few = minimal_sets(s for s in distinct if s.bit_count() <= 3) or []
    return small_fatal_counts(few, num_hosts)


def _survived(distinct: Collection[int], num_hosts: int) -> list[int] | None:
    """How many sets of k lost hosts are survived, k = 0 .. N; None where it cannot be exact."""
    if num_hosts <= TABLE_HOSTS:
        return _by_table(list(distinct), num_hosts)
    minimal = minimal_sets(distinct, limit=MAX_SETS)
    return None if minimal is None else survived_sets(minimal, num_hosts)


def survived_sets(minimal: Sequence[int], num_hosts: int) -> list[int] | None:
    """How many sets of k lost hosts contain none of `minimal`, k = 0 .. N; None where it takes too long."""
    polynomial, covered = [1], 0
    for part in components(minimal):
        size = mask_of(h for s in part for h in hosts_in(s)).bit_count()
        factor = _part_polynomial(part, size)
        if factor is None:
            return None
        polynomial = _product(polynomial, factor)
        covered += size
    return _product(polynomial, [math.comb(num_hosts - covered, k) for k in range(num_hosts - covered + 1)])


def _part_polynomial(part: Sequence[int], size: int) -> list[int] | None:
    """Survived sets by their size, of the hosts of one part."""
    if size > TABLE_HOSTS and len(part) > MAX_TERMS:
        return None
    if len(part) <= MAX_TERMS and (size > TABLE_HOSTS or len(part) <= 4):
        return _by_unions(part, size)
    return _by_table(_renumbered(part), size)


def _by_table(sets: Sequence[int], num_hosts: int) -> list[int]:
    """Every set of lost hosts looked at."""
    fatal = fatal_table(sets, num_hosts)
    return [int(c) for c in np.bincount(popcounts(num_hosts)[~fatal], minlength=num_hosts + 1)]


def _by_unions(part: Sequence[int], size: int) -> list[int]:
    """Inclusion and exclusion: the supersets of every union of some of the sets, with the sign of their number."""
    signs: dict[int, int] = {0: 1}
    for mask in part:
        added = dict(signs)
        for union, sign in signs.items():
            added[union | mask] = added.get(union | mask, 0) - sign
        signs = {u: s for u, s in added.items() if s}
    out = [0] * (size + 1)
    for union, sign in signs.items():
        taken = union.bit_count()
        for k in range(taken, size + 1):
            out[k] += sign * math.comb(size - taken, k - taken)
    return out


def _renumbered(part: Sequence[int]) -> list[int]:
    """The same sets over hosts 0 .. size-1."""
    hosts = hosts_in(mask_of(h for s in part for h in hosts_in(s)))
    place = {host: i for i, host in enumerate(hosts)}
    return [mask_of(place[h] for h in hosts_in(s)) for s in part]


def _product(a: Sequence[int], b: Sequence[int]) -> list[int]:
    out = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            out[i + j] += x * y
    return out


def _intervals(sets: set[int], num_hosts: int, last: Fraction) -> list[Chance]:
    """Intervals for k = 4 .. N, around what cannot be counted; `last` is P for k = 3, and P never rises with k."""
    sizes = np.bincount([s.bit_count() for s in sets], minlength=num_hosts + 1).tolist()
    apart: list[int] = []
    for mask in sorted(sets, key=lambda s: (s.bit_count(), s)):
        if not any(mask & other for other in apart):
            apart.append(mask)
    below = survived_sets(apart, num_hosts)
    assert below is not None  # disjoint sets are parts of one set each
    out = []
    for k in range(4, num_hosts + 1):
        all_sets = math.comb(num_hosts, k)
        union = sum(count * math.comb(num_hosts - s, k - s) for s, count in enumerate(sizes[: k + 1]) if count)
        high = min(Fraction(below[k], all_sets), last)
        out.append(Chance(k, max(Fraction(all_sets - union, all_sets), Fraction(0)), high))
        last = high
    return out


# ---- hosts that are not alike ---------------------------------------------------------------------------------------------------


def rack_sets(sets: Iterable[int], racks: Sequence[int]) -> tuple[list[int], int]:
    """The sets of racks that holders stand in, and how many racks there are. A lost set of racks is fatal if it contains one."""
    number = {rack: i for i, rack in enumerate(sorted(set(racks)))}
    return [mask_of({number[racks[h]] for h in hosts_in(s)}) for s in set(sets)], len(number)


def independent_recovery(sets: Iterable[int], failure: Sequence[float]) -> tuple[float, float]:
    """P(recover) when host n fails with probability `failure[n]`, independently: (low, high), equal where it is exact.

    Beyond 20 hosts of a part: survivals favour each other (Harris' inequality), so their product is a lower bound; disjoint sets give an upper one.
    """
    minimal = minimal_sets(sets, limit=MAX_SETS)
    if minimal is None:
        minimal = sorted(set(sets))
    low, high = 1.0, 1.0
    for part in components(minimal):
        hosts = hosts_in(mask_of(h for s in part for h in hosts_in(s)))
        if len(part) > 1 and len(hosts) <= TABLE_HOSTS:
            fatal = fatal_table(_renumbered(part), len(hosts))
            chance = float(_subset_chances([failure[h] for h in hosts])[~fatal].sum())
            low, high = low * chance, high * chance
        else:
            each = [1 - math.prod(failure[h] for h in hosts_in(s)) for s in part]
            low, high = low * math.prod(each), high * min(each)
    return low, high


def _subset_chances(failure: Sequence[float]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Probability that exactly this subset of hosts fails, by its bits."""
    chances = np.ones(1)
    for p in failure:
        chances = np.concatenate([chances * (1 - p), chances * p])
    return chances
