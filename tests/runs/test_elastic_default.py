"""Whether a run is elastic where its recipe leaves that open, and that this changes no bit while nobody dies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_elastic import base, events, losses, state_at_the_end, train
from train_help import phalanx, train_args

from phalanx.cli.train import start
from phalanx.core.config import FoldingConfig, LaunchConfig, Recipe, ResilienceConfig, RunConfig
from phalanx.core.errors import ConfigError
from phalanx.core.recipe import load_recipe
from phalanx.core.rules import recipe_problems
from phalanx.plan.recovery_choice import choose_recovery

__all__ = ["base"]
ONLY_ELASTIC = ResilienceConfig(
    minimum=2, wait_s=60, limit_s=10, straggler=3, straggler_steps=5, straggler_rest_s=5, state_gb=1e-6, f=5
)
FOUR = Recipe(launch=LaunchConfig(ranks=4), folding=FoldingConfig(ep=2))


@pytest.mark.unit
def test_it_is_elastic_where_nothing_speaks_against_it() -> None:
    found = choose_recovery(FOUR)
    assert found.is_elastic and found.recipe.resilience == ResilienceConfig(heal=True, mode="fast")
    assert found.explain() == "ranks that die are replaced, and the others continue meanwhile (mode fast)"
    exact = replace(FOUR, resilience=ResilienceConfig(mode="exact"), launch=LaunchConfig(ranks=4, threads=1))
    assert choose_recovery(exact).recipe.resilience == ResilienceConfig(heal=True, mode="exact")


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
    found = choose_recovery(recipe)
    assert not found.is_elastic and found.recipe.resilience.mode == "off" and found.explain().startswith(f"no: {why}")
    assert "\n" not in found.explain()


@pytest.mark.unit
def test_not_under_a_launcher() -> None:
    assert choose_recovery(FOUR, launched=True).explain() == "no: a launcher starts and ends the ranks"


@pytest.mark.unit
@pytest.mark.parametrize("key", [k for k, v in vars(ONLY_ELASTIC).items() if v != getattr(ResilienceConfig(), k)])
def test_each_setting_of_elastic_runs_is_refused_by_a_run_that_is_none(key: str) -> None:
    given = ResilienceConfig(**{key: getattr(ONLY_ELASTIC, key), **({"straggler": 3.0} if "straggler" in key else {})})
    staged = replace(FOUR, folding=FoldingConfig(stages=("tp1", "tp1")), resilience=given)
    one = replace(FOUR, launch=LaunchConfig(ranks=1), folding=FoldingConfig(), resilience=given)
    for recipe, launched in ((one, False), (staged, False), (replace(FOUR, resilience=given), True)):
        assert not recipe_problems(recipe)
        with pytest.raises(ConfigError, match=rf"resilience\.{key} .*not elastic"):
            choose_recovery(recipe, launched=launched)


@pytest.mark.unit
def test_a_launched_rank_refuses_them_before_it_does_anything(tmp_path: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    recipe = replace(FOUR, resilience=ResilienceConfig(minimum=2), run=RunConfig(folder=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"resilience\.minimum .* a launcher starts and ends the ranks"):
        start(recipe, {**environ, "MASTER_PORT": "29400"})
    assert not list(tmp_path.iterdir())


@pytest.mark.unit
def test_settings_of_an_elastic_run_hold_where_it_is_elastic_by_default_and_are_refused_where_not() -> None:
    given = replace(FOUR, resilience=ResilienceConfig(limit_s=10, wait_s=60, minimum=3))
    assert not recipe_problems(given)
    assert choose_recovery(given).recipe.resilience == replace(given.resilience, heal=True, mode="fast")
    with pytest.raises(ConfigError, match="3 problems") as err:
        choose_recovery(replace(given, launch=LaunchConfig(ranks=1)))
    assert "limit_s" in str(err.value) and "leaves no rank to continue" in str(err.value)
    told = replace(given, resilience=replace(given.resilience, heal=False))
    assert [p.where for p in recipe_problems(told)] == ["resilience.minimum", "resilience.wait_s", "resilience.limit_s"]


def test_the_dry_run_says_it(tmp_path: Path) -> None:
    done = phalanx("train", *train_args(tmp_path, folding__ep=2), "--dry-run")
    assert "elastic      ranks that die are replaced" in done.stdout, done.stderr
    done = phalanx("train", *train_args(tmp_path, folding__ep=4), "--dry-run")
    assert "elastic      no: folding.ep = 4: leaves every expert on 1 of the ranks" in done.stdout


@pytest.mark.ranks
@pytest.mark.parametrize("zero", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_nothing_changes_while_nobody_dies_and_the_folder_keeps_what_was_asked(base: Path, zero: str) -> None:
    """The default beside a run that cannot recover. Whole state: every loss, norm and element; copies of shards: sums in another order."""
    names = [f"by-default-{zero}", f"without-{zero}"]
    few = {
        "resilience__mode": None, "launch__threads": "1", "train__global_batch": "16", "train__steps": "6", "router__bias_rate": None,
        "optim__zero": zero,
    }  # fmt: skip
    train(base, names[0], {}, **{**few, "resilience__heal": None})
    train(base, names[1], {}, **{**few, "resilience__heal": "false"})
    assert events(base, names[0], "TeamFormed") and not events(base, names[1], "TeamFormed")
    one, other = (losses(base, name) for name in names)
    if zero == "0":
        assert one == other
        states = [state_at_the_end(base, name, steps=6) for name in names]
        assert states[0].keys() == states[1].keys() and all((states[0][k] == states[1][k]).all() for k in states[0])
    for step, told in other.items():
        (mine,), (wanted,) = one[step], told
        assert mine == pytest.approx(wanted, rel=1e-5)
    kept = load_recipe(base / "runs" / names[0] / "recipe.toml").resilience
    assert (kept.heal, kept.mode) == (None, "off")


def test_make_train_is_elastic() -> None:
    found = choose_recovery(load_recipe("recipes/laptop.toml"))
    assert found.is_elastic, found.explain()
