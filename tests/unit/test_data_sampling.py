"""The order of samples: permutations that are permutations, exact mixtures, and answers that never change."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.core.errors import DataError
from phalanx.data.sampling import BLOCK, Mixture, derive_key, permute, quotas, shares

pytestmark = pytest.mark.unit


def all_of(size, key):
    return permute(np.arange(size), size=size, key=key)


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=times(200, 66), deadline=None)
def test_permutation_is_a_bijection(size, key):
    assert np.array_equal(np.sort(all_of(size, key)), np.arange(size))


@given(st.integers(1, 2**40), st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**40), min_size=1, max_size=50))
@settings(max_examples=times(100, 40), deadline=None)
def test_permutation_of_a_large_range_stays_inside_and_keeps_points_apart(size, key, points):
    inside = np.unique(np.array(points) % size)
    image = permute(inside, size=size, key=key)
    assert image.min() >= 0 and image.max() < size and len(np.unique(image)) == len(inside)


WORD = (1 << 64) - 1


def plain_mix(word):
    z = (word + 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def plain_permute(value, *, size, key):
    """The same permutation on Python's integers."""
    high = math.isqrt(size - 1) + 1
    low = -(-size // high)
    while True:
        left, right = divmod(value, low)
        for i in range(8):
            round_key = plain_mix(plain_mix(key) ^ i)
            if i % 2:
                right = (right + plain_mix(left ^ round_key) % low) % low
            else:
                left = (left + plain_mix(right ^ round_key) % high) % high
        value = left * low + right
        if value < size:
            return value


@given(st.integers(1, 2**50), st.integers(0, WORD), st.integers(0, 2**50))
@settings(max_examples=times(100, 40), deadline=None)
def test_permutation_equals_the_one_on_plain_integers(size, key, value):
    expected = plain_permute(value % size, size=size, key=key)
    assert permute(np.array([value % size]), size=size, key=key).tolist() == [expected]


def test_permutation_is_the_same_forever():
    """Golden values: a change here would change the data order of every run that is resumed."""
    assert all_of(10, derive_key(0, 0, 0)).tolist() == [6, 8, 0, 4, 9, 1, 7, 5, 2, 3]
    large = permute(np.arange(4), size=10**12, key=12345)
    assert large.tolist() == [876362540840, 305365893607, 551853090933, 98457810758]


@pytest.mark.parametrize("size", [2, 3, 7, 12])
def test_permutations_of_small_ranges_are_even(size):
    """Chi-square of where each index lands over 2,000 keys: within six standard deviations."""
    keys = 2000
    table = np.zeros((size, size))
    for key in range(keys):
        table[np.arange(size), all_of(size, derive_key(key))] += 1
    expected = keys / size
    chi = ((table - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert chi < freedom + 6 * np.sqrt(2 * freedom) + 6


def test_neighbours_do_not_stay_neighbours():
    image = all_of(10_000, derive_key(5))
    assert (np.abs(np.diff(image)) == 1).mean() < 0.002
    assert abs(np.corrcoef(np.arange(10_000), image)[0, 1]) < 0.04


def test_keys_depend_on_every_part_and_their_order():
    keys = {derive_key(*parts) for parts in [(1, 2, 3), (3, 2, 1), (1, 2), (1, 2, 4), (0, 1, 2, 3), (1, 2, 3, 0)]}
    assert len(keys) == 6


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=8), st.integers(1, 20_000))
def test_shares_sum_up_and_are_nearest(weights, total):
    counts = shares(weights, total)
    assert sum(counts) == total
    assert all(abs(c - w / sum(weights) * total) < 1 + 1e-6 for c, w in zip(counts, weights, strict=True))


def test_a_weight_too_small_to_matter_is_an_error():
    with pytest.raises(DataError) as caught:
        quotas([1.0, 1e-6, 1e-7])
    assert len(caught.value.problems) == 2
    assert "data.weights[1]" in str(caught.value) and "never be drawn" in str(caught.value)


@given(st.integers(1, 400), st.integers(0, 10**6), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_one_pool_gives_every_window_once_per_epoch(size, seed, epoch):
    mixture = Mixture(sizes=[size], weights=[1.0], seed=seed)
    pools, windows, epochs = mixture.locate(np.arange(epoch * size, (epoch + 1) * size))
    assert not pools.any() and (epochs == epoch).all()
    assert np.array_equal(np.sort(windows), np.arange(size))


def test_epochs_differ():
    mixture = Mixture(sizes=[500], weights=[1.0], seed=3)
    first, second = (mixture.locate(np.arange(e * 500, (e + 1) * 500))[1] for e in (0, 1))
    assert (first == second).mean() < 0.05


@given(st.lists(st.integers(1000, 9000), min_size=2, max_size=4), st.integers(0, 100), st.integers(0, 2), st.randoms())
@settings(max_examples=10, deadline=None)
def test_mixture_is_exact_in_every_block_and_loses_no_window(sizes, seed, block, random):
    weights = [random.uniform(0.05, 1) for _ in sizes]
    mixture = Mixture(sizes=sizes, weights=weights, seed=seed)
    pools, windows, epochs = mixture.locate(np.arange((block + 1) * BLOCK))
    for pool, (size, quota) in enumerate(zip(sizes, mixture.quotas, strict=True)):
        mine = pools == pool
        assert mine[block * BLOCK :].sum() == quota
        order = windows[mine] + epochs[mine] * size
        assert np.array_equal(np.sort(order[: len(order) // size * size]), np.arange(len(order) // size * size))
        assert len(np.unique(order)) == len(order)


@given(st.lists(st.integers(0, 5 * BLOCK), min_size=1, max_size=30), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_a_sample_does_not_depend_on_what_was_asked_before(samples, seed):
    asked = np.array(samples)
    together = Mixture(sizes=[100, 37], weights=[0.7, 0.3], seed=seed).locate(asked)
    for i, sample in enumerate(samples):
        alone = Mixture(sizes=[100, 37], weights=[0.7, 0.3], seed=seed).locate(np.array([sample]))
        assert [int(part[0]) for part in alone] == [int(part[i]) for part in together]


def test_blocks_are_shuffled():
    mixture = Mixture(sizes=[100, 100], weights=[1, 1], seed=0)
    pools = mixture.locate(np.arange(2 * BLOCK))[0]
    halves = pools.reshape(-1, 100).mean(axis=1)
    assert halves.min() > 0.3 and halves.max() < 0.7
    assert (pools[:BLOCK] == pools[BLOCK:]).mean() < 0.55
