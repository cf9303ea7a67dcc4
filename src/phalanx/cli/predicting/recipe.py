"""The prediction of a recipe file on a cluster, for the commands that show it or go on from it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem
from phalanx.core.recipe import Device, Dtype, load_recipe
from phalanx.plan import choose_recovery, run_problems
from phalanx.plan.model import ModelSpec
from phalanx.simulate import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.failures import with_stragglers
from phalanx.simulate.hardware import GpuCluster, parse_cluster
from phalanx.simulate.mapping import parse_stragglers, straggler_problems
from phalanx.simulate.step import Prediction, predict


def read_and_predict(
    path: Path | None,
    cluster_name: str,
    overrides: Sequence[str],
    *,
    stragglers: Sequence[str] = (),
    spread: float | None = None,
) -> tuple[Recipe, Prediction]:
    """The recipe as it is predicted, and its prediction, with slow ranks as `--straggler` and `--spread` say them. Raises `ConfigError` or `PlanError` with all problems, of the cluster and of the recipe."""
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

    def auto_dtype(given: Recipe) -> Dtype:
        return dtype_of(cluster, given) if cluster is not None else "bfloat16"

    def auto_device(given: Recipe) -> Device:
        return device_of(cluster) if cluster is not None else given.launch.device

    try:
        words = [*overrides, *(["--launch.ranks", str(world)] if world else [])]
        recipe = load_recipe(path, words, check=check, auto_dtype=auto_dtype, auto_device=auto_device)
    except ConfigError as error:
        problems += error.problems
    if problems or cluster is None or recipe is None:
        raise ConfigError(problems, subject="the simulation")
    device = device_of(cluster)
    if recipe.launch.device != device:
        print(
            f'launch.device = "{recipe.launch.device}", but {cluster.name} computes with {device}: predicted as if it said so',
            file=sys.stderr,
        )
    choice = choose_recovery(replace(recipe, launch=replace(recipe.launch, device=device))) if device == "cpu" else None
    if choice is not None:
        recipe = replace(recipe, folding=choice.recipe.folding)  # as a run there would have it
    if choice is not None and choice.is_elastic:
        print(
            "this run would be elastic (resilience.heal is not set): copies of shards and its votes are not in the prediction",
            file=sys.stderr,
        )
    prediction = predict_on(recipe, resolve_recipe(recipe), cluster)
    slow = parse_stragglers(stragglers, spread)
    return recipe, prediction if slow is None else with_stragglers(prediction, slow)


def predict_on(recipe: Recipe, spec: ModelSpec, cluster: GpuCluster) -> Prediction:
    """The prediction of a recipe that was read for this cluster. Raises `ConfigError` or `PlanError` for what is not modelled."""
    mapping = mapping_of_recipe(recipe, spec, world=cluster.world, cluster=cluster)
    return predict(job_of_recipe(recipe, spec), mapping, cluster)


def device_of(cluster: GpuCluster) -> Literal["cpu", "cuda"]:
    """What `launch.device = "auto"` is there."""
    return "cpu" if cluster.hardware.sms is None else "cuda"


def dtype_of(cluster: GpuCluster, recipe: Recipe) -> Dtype:
    """What `train.dtype = "auto"` is there, as `core.recipe.native_dtype` gives it to its ranks."""
    return cluster.hardware.native_dtype if recipe.resilience.service is None else "bfloat16"
