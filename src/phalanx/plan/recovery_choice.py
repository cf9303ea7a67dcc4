"""Whether a run is elastic where its recipe leaves that open (`resilience.heal` not set): wherever nothing else in it speaks against it.

Decides by asking: the same recipe with elastic recovery must have no problem that it does not have without. Must never change: a run that could be started can
still be; what nobody dies in has the same bits (with equal shares the step of mode fast is that of mode off), unless experts with replicas move, which `train.deterministic` prevents.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.rules import inert_settings, recipe_problems, value_of
from phalanx.core.settings import describe_settings
from phalanx.plan.recipe import run_problems
from phalanx.plan.recovery import wanted_ranks


@dataclass(frozen=True, kw_only=True)
class RecoveryChoice:
    """`recipe` says what will be done; `why_not` in a line where it is not elastic."""

    recipe: Recipe
    why_not: str = ""

    @property
    def is_elastic(self) -> bool:
        return bool(self.recipe.resilience.heal)

    def explain(self) -> str:
        """Says it in a line."""
        if self.is_elastic:
            return (
                f"ranks that die are replaced, and the others continue meanwhile (mode {self.recipe.resilience.mode})"
            )
        return f"no: {self.why_not}"


def _always(recipe: Recipe) -> bool:
    return True


def choose_recovery(
    recipe: Recipe, *, launched: bool = False, fits: Callable[[Recipe], bool] = _always
) -> RecoveryChoice:
    """What becomes of a recipe that has passed its checks. `launched`: another program starts and ends the ranks. Where `folding.ep` is not set, it becomes the largest with which every expert has enough
    holders and the run `fits`.

    Raises `ConfigError` where settings of an elastic run are given and it is not one.
    """
    r = recipe.resilience
    if r.heal is not None:
        return RecoveryChoice(recipe=recipe, why_not="" if r.heal else "resilience.heal = false")
    if launched:
        return _without(recipe, why_not="a launcher starts and ends the ranks")
    if recipe.launch.ranks == 1:
        return _without(recipe, why_not="launch.ranks = 1 leaves no rank to continue")
    if recipe.launch.device == "cuda":
        device = f"launch.device = {recipe.launch.device!r}"
        return _without(
            recipe,
            why_not=f"{device} is elastic only where resilience.heal = true asks for it: not yet shown to work on one",
        )
    wanted, against = with_recovery(recipe)
    if not against:
        return RecoveryChoice(recipe=wanted)
    for ep in _further_degrees(recipe):
        other = replace(wanted, folding=replace(wanted.folding, ep=ep))
        if not _problems(other):
            if fits(other):
                return RecoveryChoice(recipe=other)
            break  # a smaller degree needs more
    return _without(recipe, why_not=" ".join(str(against[0]).split()))


def with_recovery(recipe: Recipe) -> tuple[Recipe, list[Problem]]:
    """The recipe as an elastic run, in mode fast where its mode is off, and the problems that it has then and has not without."""
    r = recipe.resilience
    wanted = replace(recipe, resilience=replace(r, heal=True, mode="fast" if r.mode == "off" else r.mode))
    known = {str(p) for p in _problems(replace(recipe, resilience=replace(r, heal=False)))}
    return wanted, [p for p in _problems(wanted) if str(p) not in known]


def _further_degrees(recipe: Recipe) -> list[int]:
    """Degrees of expert parallelism that may be chosen, the largest first; none where the recipe says one, or where other hosts, which have memory of their own, would have to choose the same."""
    if recipe.folding.ep is not None or recipe.folding.stages is not None or recipe.resilience.service is not None:
        return []
    world = wanted_ranks(recipe)
    return [ep for ep in range(world // 2, 0, -1) if world % ep == 0]


def _without(recipe: Recipe, *, why_not: str) -> RecoveryChoice:
    plain = replace(recipe, resilience=replace(recipe.resilience, heal=False))
    lost = inert_settings(plain).keys() - inert_settings(recipe).keys()
    rule = f"has no effect, because this run is not elastic: {why_not}"
    problems = [
        Problem(where=s.name, value=value, rule=rule, hint="leave it out")
        for s in describe_settings()
        if s.name in lost and (value := value_of(recipe, s.name)) != s.default
    ]
    raise_if(problems, ConfigError, subject="the recipe")
    return RecoveryChoice(recipe=plain, why_not=why_not)


def _problems(recipe: Recipe) -> list[Problem]:
    return [*recipe_problems(recipe), *run_problems(recipe, world=wanted_ranks(recipe))]
