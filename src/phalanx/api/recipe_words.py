"""Recipes as Python programs give them: a `Recipe`, the path of a file, a name that comes with Phalanx, or nothing; and settings by name."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phalanx.api.programs import ProgramError
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, ProblemsError, of_kind, raise_if
from phalanx.core.reading import toml_value
from phalanx.core.recipe import dump_recipe

RecipeLike = Recipe | str | Path | None
"""A recipe, the path of its file, the name of one that comes with Phalanx, or None: every default."""
Settings = Mapping[str, Any]
"""Name of a setting (section and key) -> value, such as `{"train.steps": 30}`."""


@dataclass(frozen=True, kw_only=True)
class RecipeWords:
    """A recipe as the command line names it."""

    path: str | None
    overrides: tuple[str, ...]
    is_own: bool
    """Made by the calling program, which may decide what a file alone may not."""

    @property
    def words(self) -> tuple[str, ...]:
        return (*((self.path,) if self.path is not None else ()), *self.overrides)


@contextlib.contextmanager
def recipe_words(recipe: RecipeLike, settings: Settings | None) -> Iterator[RecipeWords]:
    """The words of a command line for `recipe` with `settings` changed. A `Recipe` lies in a file of its own meanwhile. Raises `ConfigError` for what is neither."""
    one, rule = 'use "laptop"', "must be a Recipe, a file, a name that comes with Phalanx, or None"
    problems = of_kind("recipe", recipe, Recipe | str | Path | None, rule, one)
    rule = "must be a dict of settings by name"
    problems += of_kind("settings", settings, Mapping | None, rule, 'use {"train.steps": 30}')
    raise_if(problems, ConfigError, subject="the arguments")
    overrides = tuple(f"--{name}={as_word(value)}" for name, value in (settings or {}).items())
    if not isinstance(recipe, Recipe):
        yield RecipeWords(path=None if recipe is None else str(recipe), overrides=overrides, is_own=False)
        return
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        path = Path(folder) / "recipe.toml"
        path.write_text(dump_recipe(recipe), encoding="utf-8")
        try:
            yield RecipeWords(path=str(path), overrides=overrides, is_own=True)
        except ProblemsError as error:  # the file is nothing that its user knows
            problems = [replace(p, where=p.where.replace(str(path), "recipe")) for p in error.problems]
            raise type(error)(problems, subject=error.subject) from None
        except ProgramError as error:
            raise ProgramError(str(error).replace(str(path), "recipe"), exit_code=error.exit_code) from None


def as_word(value: object) -> str:
    """A value as it stands on a command line: text as it is, None as `none`, everything else as TOML. What has numbers of NumPy or torch is asked for Python's."""
    if isinstance(value, str | Path):
        return str(value)
    return "none" if value is None else toml_value(value, default=_plain)


def count_problems(counts: Mapping[str, object]) -> list[Problem]:
    """Of arguments by name."""
    return [
        Problem(where=name, value=value, rule="must be a whole number, at least 1", hint="use 1 or more")
        for name, value in counts.items()
        if type(value) is not int or value < 1
    ]


def _plain(value: object) -> object:
    """Raises `ConfigError` for what no setting can be."""
    for name in ("tolist", "__fspath__"):
        if callable(convert := getattr(value, name, None)):
            return convert()
    rule, hint = "must be text, a number, true or false, None, or a list of these", "use str(...) of it"
    raise ConfigError.of("settings", repr(value), rule, hint, subject="the arguments")
