"""What earlier moves of experts have taken: one slow move must not end them for good."""

import pytest

from phalanx.train.placement.expert_figures import BESIDE_BYTES_PER_S, BYTES_PER_S, LAST, MEMORY, PastMoves

pytestmark = pytest.mark.unit


def test_before_the_first_move_nothing_is_known() -> None:
    moves = PastMoves()
    assert (moves.bytes_per_s(beside=False), moves.rebuild_s) == (BYTES_PER_S, 0.0)


def test_one_slow_move_among_others_changes_nothing() -> None:
    moves = PastMoves()
    for seconds, rate in ((0.1, 2e8), (30.0, 1e5), (0.2, 1e8)):
        moves.decided()
        moves.took(rebuild_s=seconds, bytes_per_s=rate)
    assert (moves.bytes_per_s(beside=False), moves.rebuild_s) == (2e8, 0.1)


def test_a_slow_first_move_is_forgotten() -> None:
    moves = PastMoves()
    moves.decided()
    moves.took(rebuild_s=30.0, bytes_per_s=1e5)
    for _ in range(MEMORY - 1):
        moves.decided()
        assert (moves.bytes_per_s(beside=False), moves.rebuild_s) == (1e5, 30.0)
    moves.decided()
    assert (moves.bytes_per_s(beside=False), moves.rebuild_s) == (BYTES_PER_S, 0.0)


def test_a_machine_that_has_become_slow_is_found_out() -> None:
    moves = PastMoves()
    moves.decided()
    moves.took(rebuild_s=0.1, bytes_per_s=1e9)
    for _ in range(LAST):
        moves.decided()
        moves.took(rebuild_s=3.0, bytes_per_s=1e6)
    assert (moves.bytes_per_s(beside=False), moves.rebuild_s) == (1e6, 3.0)


def test_a_move_in_which_nothing_travelled_says_nothing_of_the_way() -> None:
    moves = PastMoves()
    moves.decided()
    moves.took(rebuild_s=0.5, bytes_per_s=None)
    assert (moves.bytes_per_s(beside=False), moves.rebuild_s) == (BYTES_PER_S, 0.5)


def test_each_way_is_known_by_its_own_moves() -> None:
    moves = PastMoves()
    moves.decided()
    moves.took(rebuild_s=0.1, bytes_per_s=1e7)
    assert moves.bytes_per_s(beside=True) == BESIDE_BYTES_PER_S > BYTES_PER_S
    moves.took(rebuild_s=0.1, bytes_per_s=4e7, beside=True)
    assert (moves.bytes_per_s(beside=False), moves.bytes_per_s(beside=True)) == (1e7, 4e7)
