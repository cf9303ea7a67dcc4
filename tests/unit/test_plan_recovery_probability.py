"""The certificate: equal to trying every loss, for every family of sets; intervals that hold; planted errors seen."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers import times

import phalanx.plan.placement.search.probability as recovery_probability
from phalanx.plan.placement.search.host_sets import components, hosts_in, mask_of, minimal_sets, small_fatal_counts
from phalanx.plan.placement.search.local_search import FatalTable, holder_sets, least_fatal
from phalanx.plan.placement.search.probability import certify, fatal_counts, independent_recovery, rack_sets
from phalanx.plan.placement.search.rules import max_overlap, spread

pytestmark = pytest.mark.unit


@st.composite
def families(draw, most=9):
    """(sets of hosts, number of hosts)."""
    n = draw(st.integers(1, most))
    return draw(st.lists(st.integers(1, 2**n - 1), max_size=10)), n


def by_hand(sets, n):
    losses = [mask_of(c) for k in range(n + 1) for c in itertools.combinations(range(n), k)]
    out = [0] * (n + 1)
    for loss in losses:
        out[loss.bit_count()] += any(s & loss == s for s in sets)
    return tuple(out)


@given(families())
@settings(max_examples=times(300, 100), deadline=None)
def test_exact_for_every_family_of_sets(case):
    sets, n = case
    wanted = by_hand(sets, n)
    assert fatal_counts(sets, n) == wanted
    assert [math.comb(n, k) - w for k, w in enumerate(wanted)] == recovery_probability.survived_sets(
        minimal_sets(sets), n
    )
    made = certify(sets, n)
    assert all(c.is_exact for c in made.chances)
    assert [1 - c.low for c in made.chances] == [pytest.approx(w / math.comb(n, k)) for k, w in enumerate(wanted)]
    assert FatalTable(n, sets).fatal() == wanted
    assert small_fatal_counts(minimal_sets(sets), n)[: n + 1] == wanted[:4]
    first = next((k for k, w in enumerate(wanted) if w), n)
    assert made.guaranteed == first


@given(families())
@settings(max_examples=times(100, 40), deadline=None)
def test_inclusion_and_exclusion_equals_the_table(case):
    """The two ways to count the losses of one part agree."""
    sets, _ = case
    for part in components(minimal_sets(sets)):
        size = mask_of(h for s in part for h in hosts_in(s)).bit_count()
        table = recovery_probability._part_polynomial
        listed = recovery_probability._by_unions(part, size)
        if len(part) > 4:
            assert table(part, size) == listed
        assert sum(listed) == 2**size - sum(by_hand(recovery_probability._renumbered(part), size))


@given(families(most=7), st.lists(st.floats(0, 0.99), min_size=7, max_size=7))
@settings(max_examples=times(100, 40), deadline=None)
def test_independent_failures_equal_the_sum_over_all_losses(case, failure):
    sets, n = case
    wanted = sum(
        math.prod(failure[h] if loss >> h & 1 else 1 - failure[h] for h in range(n))
        for loss in range(2**n)
        if not any(s & loss == s for s in sets)
    )
    low, high = independent_recovery(sets, failure[:n])
    assert low == pytest.approx(wanted) and high == pytest.approx(wanted)


def test_the_closed_form_of_segments():
    """Disjoint segments 2, 3, 5 of 12 hosts: inclusion and exclusion over the segments, as printed."""
    lengths, n = (2, 3, 5), 12
    sets = [mask_of(range(sum(lengths[:i]), sum(lengths[: i + 1]))) for i in range(3)]
    for k, chance in enumerate(certify(sets, n).chances):
        wanted = 0
        for taken in itertools.chain.from_iterable(itertools.combinations(lengths, r) for r in range(4)):
            if sum(taken) <= k:
                wanted += (-1) ** len(taken) * math.comb(n - sum(taken), k - sum(taken))
        assert chance.low * math.comb(n, k) == wanted


def test_segments_of_any_size_are_exact_for_many_hosts():
    """200 hosts in 40 segments of 5: a thousand digits, and no sampling."""
    made = certify([mask_of(range(5 * i, 5 * i + 5)) for i in range(40)], 200)
    assert all(c.is_exact for c in made.chances) and made.guaranteed == 5
    assert made.chances[5].low == 1 - Fraction(40, math.comb(200, 5))


def test_exact_up_to_20_hosts_however_many_sets_there_are():
    """3,000 random sets of 5 to 9 of 16 hosts: the certificate is exact for every k, and right where all losses can be tried."""
    rng = np.random.default_rng(2)
    sets = [mask_of(rng.choice(16, size=int(rng.integers(5, 10)), replace=False)) for _ in range(3000)]
    made = certify(sets, 16)
    assert all(c.is_exact for c in made.chances)
    found = np.array(sets)
    losses = [mask_of(loss) for loss in itertools.combinations(range(16), 6)]
    fatal = sum(bool((found & loss == found).any()) for loss in losses)
    assert made.chances[6].low == 1 - Fraction(fatal, math.comb(16, 6))
    assert all(c.is_exact for c in certify(sets, 20).chances)


def test_beyond_there_is_an_interval_that_holds():
    """40 hosts, sets that overlap everywhere: exact up to 3, then an interval around what 20,000 random losses give."""
    rng = np.random.default_rng(0)
    sets = [mask_of(rng.choice(40, size=int(rng.integers(2, 6)), replace=False)) for _ in range(120)]
    made = certify(sets, 40)
    assert [c.is_exact for c in made.chances[:4]] == [True] * 4 and not made.chances[5].is_exact
    assert "interval" in made.explain()
    losses3 = list(itertools.combinations(range(40), 3))
    fatal3 = sum(any(s & mask_of(loss) == s for s in sets) for loss in losses3)
    assert made.chances[3].low * math.comb(40, 3) == math.comb(40, 3) - fatal3
    for k in (4, 6, 10):
        draws = [mask_of(rng.choice(40, size=k, replace=False)) for _ in range(2000)]
        seen = sum(not any(s & loss == s for s in sets) for loss in draws) / len(draws)
        assert float(made.chances[k].low) - 0.05 <= seen <= float(made.chances[k].high) + 0.05
    low, high = independent_recovery(sets, [0.02] * 40)
    assert 0 < low <= high < 1


def test_racks_are_hosts_of_another_size():
    """4 hosts in 2 racks; an expert on both hosts of rack 0 dies with it, one across racks does not."""
    sets, count = rack_sets([0b0011, 0b0110], (7, 7, 9, 9))
    assert (sorted(sets), count) == ([0b01, 0b11], 2)
    assert certify(*rack_sets([0b0110], (7, 7, 9, 9))).guaranteed == 2


def test_bounds_of_one_expert():
    """Nothing beats what the rarest expert alone costs, and one expert reaches it."""
    assert least_fatal((2, 5), 5) == fatal_counts([0b11], 5)
    for counts, slots in (((2, 2, 4), (2,) * 4), ((3, 3, 3, 3), (3,) * 4)):
        for rule in (max_overlap, spread):
            fatal = fatal_counts(holder_sets(rule(counts, slots)), 4)
            assert fatal >= least_fatal(counts, 4)


@pytest.mark.parametrize("fault", ["parts_share_hosts", "minimal_forgets", "off_by_one"])
def test_planted_errors_change_the_certificate(monkeypatch, fault):
    """Each would make some certificate wrong; the comparison with enumeration sees it."""
    if fault == "parts_share_hosts":
        monkeypatch.setattr(recovery_probability, "components", lambda sets: [[s] for s in sets])
    elif fault == "minimal_forgets":
        monkeypatch.setattr(
            recovery_probability, "minimal_sets", lambda sets, limit=None: (minimal_sets(sets) or [])[:-1]
        )
    else:
        monkeypatch.setattr(
            math, "comb", lambda n, k: math.factorial(n) // math.factorial(k) // math.factorial(n - k) + (k == 1)
        )
    rng = np.random.default_rng(1)
    seen = 0
    for _ in range(30):
        sets = [int(x) for x in rng.integers(1, 2**7, size=6)]
        try:
            minimal = recovery_probability.minimal_sets(sets)  # type: ignore[attr-defined]
            survived = recovery_probability.survived_sets(minimal, 7)
            right = by_hand(sets, 7)
            seen += survived != [sum(bin(x).count("1") == k for x in range(2**7)) - right[k] for k in range(8)]
        except (ValueError, AssertionError):
            seen += 1
    assert seen
