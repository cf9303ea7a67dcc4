"""Exact mode with replicas of experts: how many an expert has, and where, changes no bit; every planted mistake shows."""

from __future__ import annotations

import pytest
import torch
from exact_help import Ranks, Run, ended
from tiers import some

from phalanx.core.recipe import load_recipe
from phalanx.plan.moe.dispatch import DispatchSpec

pytestmark = pytest.mark.ranks

ONE = Ranks(1)
SKEWED = {"force": "imbalanced", "force_skew": 1.5}
FEW = Run(steps=4, chunk_rows=4)
"""An expert gets 12 rows of a micro-batch on average."""
REPLICATED = (
    Ranks(1, slots=11),
    Ranks(2, ep=2, slots=6),
    Ranks(3, ep=3, slots=4, seed=1),
    Ranks(4, ep=4, slots=3, seed=2),
    Ranks(4, ep=4, slots=5, seed=3, expert_state="sharded"),
)


def check_same(run: Run, many: tuple[Ranks, ...], one: Ranks = ONE) -> None:
    alone = ended(run, one)
    for ranks in many:
        assert ended(run, ranks) == alone, ranks


def test_replicas_change_no_bit_on_any_number_of_ranks() -> None:
    check_same(FEW, (*some(REPLICATED, 3), Ranks(4, ep=2), Ranks(3)))


def test_with_skewed_loads_and_blocks_computed_again() -> None:
    run = Run(steps=4, chunk_rows=4, router=SKEWED, recompute="selective", dtype=torch.bfloat16)
    check_same(run, (Ranks(2, ep=2, slots=7), Ranks(4, ep=4, slots=4, seed=5)))


@pytest.mark.parametrize(
    "policy",
    [pytest.param({}, marks=pytest.mark.slow), {"drop_by": "position", "drop_scope": "full_sequence"}],
    ids=str,
)
def test_with_tokens_dropped(policy: dict[str, str]) -> None:
    run = Run(steps=3, chunk_rows=4, router=SKEWED, dispatch=DispatchSpec(policy="drop", capacity_factor=1.0, **policy))
    assert any(figures[5] > 0 for figures in ended(run, ONE).figures)
    check_same(run, (Ranks(3, ep=3, slots=4), Ranks(4, ep=4, slots=3, expert_state="sharded")))


@pytest.mark.slow
def test_with_plain_kernels_and_widths_that_fit_no_vector() -> None:
    check_same(Run(steps=3, chunk_rows=4, compiled=False, model={"hidden": 36}), (Ranks(3, ep=3, slots=4),))
    check_same(Run(steps=3, chunk_rows=4, kernels="reference"), (Ranks(2, ep=2, slots=6),))


def test_with_a_pipeline() -> None:
    check_same(Run(steps=3, chunk_rows=4, samples=5), (Ranks(4, pp=2, ep=2, slots=6), Ranks(4, pp=2)), Ranks(2, pp=2))


@pytest.fixture(scope="module")
def sound() -> tuple[Run, Ranks]:
    """What has the bits of one rank where nothing is planted."""
    run, ranks = Run(steps=1, chunk_rows=16, router=SKEWED), Ranks(4, ep=4, slots=5)
    assert ended(run, ranks) == ended(run, ONE)
    return run, ranks


@pytest.mark.parametrize("fault", ["rows split", "joined rows", "holder left out", "every holder squares"])
def test_a_planted_mistake_shows(fault: str, sound: tuple[Run, Ranks]) -> None:
    run, ranks = sound
    assert ended(run, ranks, faults=[fault]) != ended(run, ONE, faults=[fault])


def test_a_recipe_may_ask_for_both() -> None:
    recipe = load_recipe(None, ["--resilience.mode=exact", "--resilience.slots_per_rank=4", "--launch.threads=1"])
    assert recipe.resilience.slots_per_rank == 4
