"""`verify_mapping`: a mapping held against one rank, from Python."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from phalanx.api.programs import ProgramError, complaint, start
from phalanx.api.recipe_words import RecipeLike, Settings, count_problems, recipe_words
from phalanx.core.errors import ConfigError, Problem, nearest, raise_if
from phalanx.core.reading import load_json


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What `phalanx verify` found; errors are relative to one rank, the worst over all parameters and cases."""

    mappings: int
    worst_gradient_error: float
    worst_norm_error: float
    worst_step_error: float
    failures: tuple[str, ...]
    """What differs; empty: the mapping is proven."""
    not_verified: tuple[str, ...] = ()
    """Settings of the recipe that change a step and that no verified step has."""

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.failures


def verify_mapping(
    recipe: RecipeLike = None,
    settings: Settings | None = None,
    *,
    ranks: int | None = None,
    dtype: Literal["float64", "float32", "bfloat16"] = "float64",
) -> Proof:
    """Hold the mapping and options of a recipe, on a shrunken model, against one rank: loss, every gradient, norm and step. `ranks` processes of this machine (None: its launch.ranks).

    Without a recipe and settings: every legal mapping of the ranks. Raises `ConfigError` or `ProgramError` where it cannot be run; what differs is in the result.
    """
    problems = [] if ranks is None else count_problems({"ranks": ranks})
    legal = ("float64", "float32", "bfloat16")
    if dtype not in legal:
        problems.append(Problem(where="dtype", value=dtype, rule="is not known", hint=nearest(str(dtype), legal)))
    raise_if(problems, ConfigError, subject="the arguments")
    with recipe_words(recipe, settings) as given, tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        out = Path(folder) / "proof.json"
        more = ["--ranks", str(ranks)] if ranks is not None else []
        program = start(["verify", *given.words, *more, "--dtype", dtype, "--json", str(out)])
        _, said = program.communicate()
        if program.returncode not in (0, 1) or not out.exists():
            raise ProgramError(complaint(said), exit_code=program.returncode)
        found = load_json(out)
    return Proof(
        mappings=found["mappings"],
        worst_gradient_error=found["worst_gradient_rel_error"],
        worst_norm_error=found["worst_norm_rel_error"],
        worst_step_error=found["worst_step_rel_error"],
        failures=tuple(found["failures"]),
        not_verified=tuple(found["not_verified"]),
    )
