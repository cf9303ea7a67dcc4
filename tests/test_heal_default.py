"""Whether a run heals itself where its recipe leaves that open, and that this changes no bit while nobody dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.core.config import FoldingConfig, LaunchConfig, Recipe, ResilienceConfig
from phalanx.core.recipe import load_recipe
from phalanx.plan.heal_choice import choose_healing
from test_heal import base, events, losses, state_at_the_end, train
from train_help import phalanx, train_args

__all__ = ["base"]
FOUR = Recipe(launch=LaunchConfig(ranks=4), folding=FoldingConfig(ep=2))


@pytest.mark.unit
def test_it_heals_where_nothing_speaks_against_it() -> None:
    found = choose_healing(FOUR)
    assert found.heals and found.recipe.resilience == ResilienceConfig(heal=True, mode="fast")
    assert found.explain() == "ranks that die are replaced, and the others go on meanwhile (mode fast)"
    exact = replace(FOUR, resilience=ResilienceConfig(mode="exact"), launch=LaunchConfig(ranks=4, threads=1))
    assert choose_healing(exact).recipe.resilience == ResilienceConfig(heal=True, mode="exact")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (replace(FOUR, launch=LaunchConfig(ranks=1)), "launch.ranks = 1"),
        (replace(FOUR, launch=LaunchConfig(ranks=4, device="cuda")), "launch.device = 'cuda'"),
        (replace(FOUR, folding=FoldingConfig(ep=4)), "folding.ep = 4: leaves every expert on 1 of the ranks"),
        (replace(FOUR, resilience=ResilienceConfig(heal=False)), "resilience.heal = false"),
    ],
)
def test_where_it_cannot_the_recipe_stays_and_the_reason_is_a_line(recipe: Recipe, why: str) -> None:
    found = choose_healing(recipe)
    assert not found.heals and found.recipe.resilience.mode == "off" and found.explain().startswith(f"no: {why}")
    assert "\n" not in found.explain()


@pytest.mark.unit
def test_not_under_a_launcher() -> None:
    assert choose_healing(FOUR, launched=True).explain() == "no: a launcher starts and ends the ranks"


def test_the_dry_run_says_it(tmp_path: Path) -> None:
    done = phalanx("train", *train_args(tmp_path, folding__ep=2), "--dry-run")
    assert "healing      ranks that die are replaced" in done.stdout, done.stderr
    done = phalanx("train", *train_args(tmp_path, folding__ep=4), "--dry-run")
    assert "healing      no: folding.ep = 4: leaves every expert on 1 of the ranks" in done.stdout


@pytest.mark.ranks
def test_bits_stay_and_the_folder_keeps_what_was_asked(base: Path) -> None:
    """The default beside a run that cannot heal: every loss, norm and element."""
    few = {
        "resilience__mode": None, "launch__threads": "1", "train__global_batch": "16", "router__bias_rate": None
    }  # fmt: skip
    train(base, "by-default", {}, **{**few, "resilience__heal": None})
    train(base, "without", {}, **{**few, "resilience__heal": "false"})
    assert events(base, "by-default", "TeamFormed") and not events(base, "without", "TeamFormed")
    assert losses(base, "by-default") == losses(base, "without")
    one, other = (state_at_the_end(base, name) for name in ("by-default", "without"))
    assert one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)
    kept = (base / "runs/by-default/recipe.toml").read_text()
    assert "heal" not in kept and 'mode = "fast"' not in kept


def test_make_train_heals() -> None:
    found = choose_healing(load_recipe(Path(__file__).parent.parent / "recipes" / "laptop.toml"))
    assert found.heals, found.explain()
