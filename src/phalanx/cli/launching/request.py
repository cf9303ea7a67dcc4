"""What a command line asks of a run: a recipe, its overrides and options, read and checked together.

Decides what a recipe file may not decide alone, for it comes from anywhere.
"""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from phalanx.core.arguments import take_word
from phalanx.core.config import RECIPE_FILE, STATUS_FILE, Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.process import say
from phalanx.core.reading import toml_value
from phalanx.core.recipe import AutoDevice, AutoDtype, Device, Dtype, load_recipe, native_dtype, untrusted
from phalanx.plan import run_problems
from phalanx.plan.recovery import wanted_ranks


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    recipe_path: str | None
    overrides: tuple[str, ...]
    dry_run: bool
    card_gb: float | None = None
    """Memory of a GPU in GB, for a dry run where there is none."""
    cluster: str | None = None
    """Where a dry run is predicted, as `phalanx search --cluster` names it."""
    trust: bool = False
    """The recipe file may say what else only the command line may (`trust_problems`)."""
    force: bool = False
    """Memory is not asked about."""


def read_args(args: Sequence[str]) -> Request:
    """A recipe first, if any; then overrides. Raises `ConfigError` for anything else."""
    rest = [a for a in args if a not in ("--dry-run", "--trust", "--force")]
    is_dry = "--dry-run" in args
    card_gb = _take_card(rest, is_dry=is_dry)
    cluster = take_word(rest, "--cluster")
    if cluster is not None and (not is_dry or card_gb is not None):
        rule = "has its own cards: --card-gb has no effect" if is_dry else "goes with --dry-run alone"
        hint = "leave one of them out" if is_dry else "add --dry-run"
        raise ConfigError.of("--cluster", cluster, rule, hint, subject="the arguments")
    path = rest.pop(0) if rest and not rest[0].startswith("-") else None
    flags = {"dry_run": is_dry, "trust": "--trust" in args, "force": "--force" in args}
    return Request(recipe_path=path, overrides=tuple(rest), card_gb=card_gb, cluster=cluster, **flags)


def _take_card(rest: list[str], *, is_dry: bool) -> float | None:
    """The number that follows `--card-gb`, if that is among the arguments; both are taken out of them."""
    text = take_word(rest, "--card-gb")
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    rule = "must be the memory of a GPU in GB" if is_dry else "goes with --dry-run alone"
    if not is_dry or not 1 <= number <= 10_000:
        raise ConfigError.of("--card-gb", text, rule, "use 80" if is_dry else "add --dry-run", subject="the arguments")
    return number


def read_recipe(
    request: Request,
    *,
    world: int | None,
    several_machines: bool = False,
    auto_device: AutoDevice | None = None,
    auto_dtype: AutoDtype | None = None,
    tell: Callable[[str], None] = say,
) -> Recipe:
    """The recipe, checked with its model on `world` ranks (None: launch.ranks). Raises `ConfigError` with every problem.

    `auto_device` and `auto_dtype` say what `launch.device = "auto"` and `train.dtype = "auto"` are; None asks this machine and its run. The run folder keeps what it was: its recipe gives the same run again. The file that the user wrote still says
    "auto", so that the same command goes on with what another machine has.
    """

    def run_dtype(recipe: Recipe) -> Dtype:
        """That of the run, where it has begun: it may go on on another machine."""
        kept = Path(recipe.run.folder) / recipe.run.name / RECIPE_FILE
        if kept.is_file():
            return cast("Dtype", load_recipe(kept).train.dtype)
        return "bfloat16" if several_machines else native_dtype(recipe)

    def check(recipe: Recipe) -> list[Problem]:
        return run_problems(recipe, world=world or wanted_ranks(recipe))

    recipe = load_recipe(
        request.recipe_path, request.overrides, check=check, auto_dtype=auto_dtype or run_dtype,
        auto_device=auto_device or _device_here, tell=tell,
    )  # fmt: skip
    raise_if(_launch_problems(request, recipe, world), ConfigError, subject="the recipe")
    raise_if(moved_problems(request, recipe), ConfigError, subject="the recipe")
    raise_if(trust_problems(request, recipe), ConfigError, subject="the recipe")
    return recipe if world is None else replace(recipe, launch=replace(recipe.launch, ranks=world))


def _device_here(recipe: Recipe) -> Device:
    """By the GPUs of this machine and the ranks that start on it."""
    from phalanx.runtime.processes import device_here, read_world

    launched = read_world()
    return device_here(launched.gpus_to_see if launched else recipe.launch.ranks)


def _given(request: Request) -> set[str]:
    """Names of the settings on the command line."""
    return {word.split("=")[0].removeprefix("--") for word in request.overrides if word.startswith("--")}


def is_run_of(folder: Path, recipe: Recipe) -> bool:
    """Whether `folder` is that of the run of `recipe`. It is another where it was copied or renamed, or where the present folder is not the one that the run began in."""
    home = Path(recipe.run.folder) / recipe.run.name
    return os.path.exists(home) and os.path.exists(folder) and os.path.samefile(home, folder)


def moved_problems(request: Request, recipe: Recipe) -> list[Problem]:
    """The recipe in a run folder may name another one: that one would be trained, from its beginning where it is not there."""
    path, given = Path(request.recipe_path or ""), _given(request)
    here, home = path.absolute().parent, Path(recipe.run.folder) / recipe.run.name
    if path.name != RECIPE_FILE or not os.path.exists(here / STATUS_FILE):  # no run folder
        return []
    if is_run_of(here, recipe) or "run.name" in given or ("run.folder" in given and here.name == recipe.run.name):
        return []
    stays = {"run.name": (recipe.run.name, here.name), "run.folder": (recipe.run.folder, os.path.relpath(here.parent))}
    here_words = " ".join(f"--{name} {shlex.quote(new)}" for name, (old, new) in stays.items() if new != old)
    rule = f"is another folder than that of the recipe ({path.parent}), which was copied or renamed, or begun elsewhere than in the present folder"
    hint = f"add {here_words} to go on in {path.parent}, or --run.name {shlex.quote(recipe.run.name)} to train {home}"
    return [Problem(where=f"{path}: run.name, run.folder", value=str(home), rule=rule, hint=hint)]


def trust_problems(request: Request, recipe: Recipe) -> list[Problem]:
    """A recipe file comes from anywhere: where it writes, whose run it joins, and who is told of it, is for the command line to say."""
    if request.recipe_path is None or request.trust:
        return []
    given = _given(request)
    found = []
    for name, value, does in untrusted(recipe, its_own=is_run_of(Path(request.recipe_path).parent, recipe)):
        if name not in given:
            rule = f"{does}, which a recipe file alone may not decide"
            word = shlex.quote(toml_value(value) if isinstance(value, tuple) else f"{value}")
            hint = f"repeat it on the command line (--{name} {word}), or add --trust if the file is your own"
            found.append(Problem(where=name, value=value, rule=rule, hint=hint))
    return found


def _launch_problems(request: Request, recipe: Recipe, world: int | None) -> list[Problem]:
    """A number of ranks on the command line has no effect under a launcher. (One in a recipe is that recipe's default.)"""
    if world is not None and recipe.resilience.heal and request.cluster is None:
        rule = "has no effect: the launcher starts and ends the ranks, not this program"
        return [
            Problem(
                where="resilience.heal",
                value=True,
                rule=rule,
                hint="leave it out, or start one `phalanx train` on each host, without a launcher, with resilience.service",
            )
        ]
    asked = any(a.split("=")[0] == "--launch.ranks" for a in request.overrides)
    if world is None or not asked or recipe.launch.ranks == world:
        return []
    rule = f"has no effect: {f'{request.cluster} has' if request.cluster else 'the launcher started'} {world} ranks"
    return [Problem(where="--launch.ranks", value=recipe.launch.ranks, rule=rule, hint="leave it out")]
