"""What a recipe says about the hosts of an elastic run: with how many ranks it begins, how many ranks must hold an expert."""

from __future__ import annotations

from phalanx.core.config import Recipe


def wanted_ranks(recipe: Recipe) -> int:
    """Ranks of all hosts together when the run begins."""
    wanted = recipe.resilience.wanted
    return recipe.launch.ranks if wanted is None else wanted


def holders_needed(recipe: Recipe) -> int:
    """Ranks that must hold an expert so that `resilience.f` hosts do: on one machine every rank counts as a host, on several a host has `launch.ranks`."""
    per_host = 1 if recipe.resilience.service is None else recipe.launch.ranks
    return (recipe.resilience.f - 1) * per_host + 1
