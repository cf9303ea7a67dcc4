"""The prediction of a recipe file on a cluster, for the commands that show it or go on from it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem
from phalanx.core.recipe import Dtype, load_recipe
from phalanx.plan import choose_recovery, run_problems
from phalanx.simulate import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.failures import with_stragglers
from phalanx.simulate.hardware import parse_cluster
from phalanx.simulate.mapping import parse_stragglers, straggler_problems
from phalanx.simulate.step import Prediction, predict


def predict_recipe(
    path: Path,
    cluster_name: str,
    overrides: Sequence[str],
    *,
    stragglers: Sequence[str] = (),
    spread: float | None = None,
) -> Prediction:
    """The prediction of a recipe, with slow ranks as `--straggler` and `--spread` say them. Raises `ConfigError` or `PlanError` with all problems, of the cluster and of the recipe."""
    problems: list[Problem] = []
    cluster, recipe = None, None
    try:
        cluster = parse_cluster(cluster_name)
    except ConfigError as error:
        problems += error.problems
    world = cluster.world if cluster is not None else None
    problems += straggler_problems(stragglers, spread, cluster)

    def check(given: Recipe) -> Sequence[Problem]:
        return run_problems(given, world=world, tokenizer_vocab=given.model.vocab) if world is not None else ()

    native: Dtype = cluster.hardware.native_dtype if cluster is not None else "bfloat16"

    def auto(given: Recipe) -> Dtype:
        """Type that `core.recipe.native_dtype` gives the ranks there."""
        return native if given.resilience.service is None else "bfloat16"

    try:
        words = [*overrides, *(["--launch.ranks", str(world)] if world else [])]
        recipe = load_recipe(path, words, check=check, auto_dtype=auto)
    except ConfigError as error:
        problems += error.problems
    if problems or cluster is None or recipe is None:
        raise ConfigError(problems, subject="the simulation")
    choice = choose_recovery(recipe) if cluster.hardware.sms is None else None
    if choice is not None:
        recipe = replace(recipe, folding=choice.recipe.folding)
    spec = resolve_recipe(recipe)
    mapping = mapping_of_recipe(recipe, spec, world=cluster.world, cluster=cluster)
    device = "cpu" if cluster.hardware.sms is None else "cuda"
    if recipe.launch.device != device:
        print(
            f'launch.device = "{recipe.launch.device}", but {cluster.name} computes with {device}: predicted as if it said so',
            file=sys.stderr,
        )
    if choice is not None and choice.is_elastic:
        print(
            "this run would be elastic (resilience.heal is not set): copies of shards and its votes are not in the prediction",
            file=sys.stderr,
        )
    prediction = predict(job_of_recipe(recipe, spec), mapping, cluster)
    slow = parse_stragglers(stragglers, spread)
    return prediction if slow is None else with_stragglers(prediction, slow)
