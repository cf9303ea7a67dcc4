"""Forwards ahead of 1F1B: chosen from times and memory, smallest that is good enough, and never against a rule."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from phalanx.core.errors import PlanError
from phalanx.plan.pipeline.schedule.clock import ScheduleCosts, simulate, uniform_costs
from phalanx.plan.pipeline.schedule.eager import choose_warmup
from phalanx.plan.pipeline.schedule.make import make_schedule, most_extra, nearest_extra

pytestmark = pytest.mark.unit


def test_no_transfer_time_no_forward_ahead() -> None:
    choice = choose_warmup("eager_1f1b", uniform_costs(4, p2p=0), num_microbatches=32, live_bytes=[1] * 4)
    assert choice.extra_warmup == (0, 0, 0, 0) and choice.live == (4, 3, 2, 1)
    assert choice.makespan_s == choice.plain_s == choice.best_s


def test_long_transfers_take_what_hides_them() -> None:
    """A transfer as long as a forward pass: the formula of the paper's schedule, and no number that could be smaller."""
    choice = choose_warmup(
        "eager_1f1b_split", uniform_costs(4, p2p=1), num_microbatches=32, live_bytes=[1] * 4, tolerance=0
    )
    assert choice.makespan_s == choice.best_s == pytest.approx(24 * 3 + 3 * 2 + 6 * 1)  # 24 of the 32 are simulated
    assert choice.plain_s / choice.makespan_s == pytest.approx(101 / 84)
    assert sum(choice.extra_warmup) <= sum(most_extra(4))
    fewer = [
        nearest_extra([*choice.extra_warmup[:r], choice.extra_warmup[r] - 1, *choice.extra_warmup[r + 1 :]], pp=4)
        for r in range(4)
        if choice.extra_warmup[r]
    ]
    for extra in fewer:  # each number is needed
        made = make_schedule("eager_1f1b_split", pp=4, virtual=1, num_microbatches=24, extra_warmup=extra)
        assert simulate(made, choice.costs).makespan > choice.best_s


def test_memory_bounds_the_choice_by_rank() -> None:
    costs = uniform_costs(4, p2p=1)
    free = choose_warmup("eager_1f1b", costs, num_microbatches=32, live_bytes=[10] * 4)
    tight = choose_warmup("eager_1f1b", costs, num_microbatches=32, live_bytes=[10] * 4, budget_bytes=50)
    assert max(tight.live) <= 5 < max(free.live) and tight.live[0] * 10 <= 50
    assert free.makespan_s < tight.makespan_s < tight.plain_s
    uneven = choose_warmup("eager_1f1b", costs, num_microbatches=32, live_bytes=[10, 25, 10, 10], budget_bytes=80)
    assert uneven.live[1] == 3 and uneven.extra_warmup[1] == 0
    for choice in (free, tight, uneven):
        choice.check()
        made = make_schedule("eager_1f1b", pp=4, virtual=1, num_microbatches=32, extra_warmup=choice.extra_warmup)
        made.check()
        assert made.peak_live == choice.live


def test_a_memory_that_1f1b_does_not_fit_is_an_error_that_says_how_much_it_needs() -> None:
    with pytest.raises(PlanError) as caught:
        choose_warmup("eager_1f1b", uniform_costs(3), num_microbatches=9, live_bytes=[10, 20, 10], budget_bytes=29)
    text = str(caught.value)
    assert "the 3 micro-batches of 1F1B on rank 0" in text and "at least 30 bytes" in text and "at least 40" in text


times = st.floats(0.1, 3)


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 14))
def test_every_choice_is_legal_fits_and_is_near_the_best_of_all(data: st.DataObject, pp: int, m: int) -> None:
    f, i, w = (tuple(data.draw(times) for _ in range(pp)) for _ in range(3))
    both = tuple(a + b for a, b in zip(i, w, strict=True))
    costs = ScheduleCosts(forward=f, backward=both, input_grad=i, weight_grad=w, p2p=data.draw(st.floats(0, 2)))
    live = [data.draw(st.integers(1, 9)) for _ in range(pp)]
    least = max(min(m, pp - r) * each for r, each in enumerate(live))
    budget = least + data.draw(st.integers(0, 40))
    choice = choose_warmup("eager_1f1b", costs, num_microbatches=m, live_bytes=live, budget_bytes=budget)
    choice.check()
    if pp > 4:
        return
    every = itertools.product(*(range(most + 1) for most in most_extra(pp)))
    fits = [
        extra for extra in every
        if nearest_extra(extra, pp=pp) == extra
        and all(min(m, pp - r + e) * b <= budget for r, (e, b) in enumerate(zip(extra, live, strict=True)))
    ]  # fmt: skip
    spans = [
        simulate(make_schedule("eager_1f1b", pp=pp, virtual=1, num_microbatches=choice.simulated, extra_warmup=e), costs).makespan
        for e in fits
    ]  # fmt: skip
    assert choice.makespan_s <= min(spans) * 1.02


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"budget_bytes": 20}, "must be at most the 20 that a rank may hold"),
        ({"makespan_s": 1e9}, "must be within"),
        ({"extra_warmup": (0, 2, 0, 0)}, "must be at most 1"),
    ],
)
def test_the_check_sees(change: dict, says: str) -> None:
    good = choose_warmup("eager_1f1b", uniform_costs(4, p2p=1), num_microbatches=32, live_bytes=[10] * 4)
    with pytest.raises(PlanError) as caught:
        dataclasses.replace(good, **change).check()
    assert says in str(caught.value)


def test_it_says_why() -> None:
    choice = choose_warmup(
        "eager_1f1b", uniform_costs(2, p2p=0.5), num_microbatches=8, live_bytes=[10, 10], budget_bytes=2000
    )
    text = choice.explain()
    assert "0.50 of a forward pass" in text and "times as fast as with none" in text and "KiB a rank)" in text


def test_same_choice_whatever_the_hash_seed() -> None:
    code = (
        "from phalanx.plan.pipeline.schedule.eager import choose_warmup as c; from phalanx.plan.pipeline.schedule.clock import uniform_costs as u;"
        "print(c('eager_1f1b', u(5, p2p=.7), num_microbatches=20, live_bytes=[3]*5, budget_bytes=18).hash)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
