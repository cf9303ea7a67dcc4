"""Plans and predictions for Python programs: no process is started."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from phalanx.api.recipe_words import RecipeLike, Settings, count_problems, recipe_words
from phalanx.cli.launching import Request, read_recipe
from phalanx.cli.predicting.arguments import model_named, precision_problems
from phalanx.cli.predicting.dry_run import describe, machine_here, rank_estimates, tokenizer_vocab
from phalanx.cli.predicting.recipe import read_and_predict
from phalanx.cli.predicting.room import has_room
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, nearest, of_kind, raise_if
from phalanx.core.recipe import no_device
from phalanx.plan import choose_recovery, resolve_shape
from phalanx.plan.mapping import AnyFolding
from phalanx.plan.model import ModelSpec
from phalanx.plan.pipeline import Pipeline, make_pipeline
from phalanx.plan.recovery import wanted_ranks
from phalanx.simulate.hardware import GpuCluster, parse_cluster
from phalanx.simulate.mapping import Job, RouterModel
from phalanx.simulate.search import RERANKED, SearchResult, base_mapping, search as search_mappings
from phalanx.simulate.step import Prediction

Routing = Literal["balanced", "learned"]


def load_recipe(recipe: RecipeLike = None, settings: Settings | None = None, *, ranks: int | None = None) -> Recipe:
    """The recipe of a file, or of a name that comes with Phalanx, with `settings` changed: checked with its model on `ranks` (None: its launch.ranks).

    Raises `ConfigError` with every problem.
    """
    raise_if([] if ranks is None else count_problems({"ranks": ranks}), ConfigError, subject="the arguments")
    with recipe_words(recipe, settings) as words:
        request = Request(recipe_path=words.path, overrides=words.overrides, dry_run=True, trust=words.is_own)
        return read_recipe(request, world=ranks, auto_device=no_device)  # it may go to a machine of another kind


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """What a run would do: its model, both grids of ranks, its pipeline, and the memory of its ranks."""

    recipe: Recipe
    """As the run takes it: with elastic recovery where nothing speaks against it, which may choose another `folding.ep`."""
    ranks: int
    elastic: str
    """Whether ranks that die are replaced, in words."""
    spec: ModelSpec
    folding: AnyFolding
    """Which rank is where in the grids of attention and of experts."""
    pipeline: Pipeline
    memory_bytes: tuple[int, ...]
    """Highest memory of the fullest rank of each pipeline stage, predicted."""

    def explain(self) -> str:
        """The plan in words, as the dry run prints it."""
        return f"{describe(self.recipe, world=self.ranks)}\nelastic      {self.elastic}"

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "ranks": self.ranks,
            "parameters": self.spec.num_params,
            "active_parameters": self.spec.active_params,
            "folding": self.folding.label(),
            "schedule": self.pipeline.schedule,
            "memory_bytes": list(self.memory_bytes),
        }


def make_plan(recipe: RecipeLike = None, settings: Settings | None = None, *, ranks: int | None = None) -> RunPlan:
    """What `phalanx train` makes of a recipe on `ranks` of this machine (None: its launch.ranks). Raises `ConfigError` or `DataError` with every problem."""
    found = load_recipe(recipe, settings, ranks=ranks)
    if ranks is not None:
        found = replace(found, launch=replace(found.launch, ranks=ranks))
    choice = choose_recovery(found, fits=has_room)
    found = choice.recipe
    world = ranks or wanted_ranks(found)
    spec, folding = resolve_shape(found, world=world, tokenizer_vocab=tokenizer_vocab(found.data))
    machine = machine_here(found, local_ranks=world)
    return RunPlan(
        recipe=found,
        ranks=world,
        elastic=choice.explain(),
        spec=spec,
        folding=folding,
        pipeline=make_pipeline(found.pipeline, spec, pp=folding.pp, seq_len=found.train.seq_len),
        memory_bytes=tuple(e.peak_bytes for e in rank_estimates(found, machine, world=world)),
    )


def predict(recipe: RecipeLike, cluster: str, settings: Settings | None = None) -> Prediction:
    """Time, memory and rates of a step of `recipe` on a cluster that need not be here, such as `h100x64` or `FILE.toml:64`. Raises `ConfigError` or `PlanError`."""
    with recipe_words(recipe, settings) as words:
        raise_if(_name_problems(cluster=cluster), ConfigError, subject="the arguments")
        return read_and_predict(None if words.path is None else Path(words.path), cluster, words.overrides)[1]


def search(
    model: str,
    cluster: str,
    *,
    seq_len: int = 4096,
    global_batch: int = 256,
    precision: Literal["bf16", "fp8", "fp32"] = "bf16",
    routing: Routing = "learned",
    keep: int = RERANKED,
) -> SearchResult:
    """The best mappings of a model (a preset, or a published one) on a cluster, the fastest first in `.best`.

    `seq_len` is tokens, `global_batch` sequences of a step, `routing` how tokens meet experts (`balanced`: evenly, as in benchmarks), `keep` how many are timed exactly. Raises `ConfigError`, or `PlanError` where nothing is legal or fits.
    """
    problems = count_problems({"seq_len": seq_len, "global_batch": global_batch, "keep": keep})
    if routing not in (kinds := get_args(Routing)):
        problems.append(Problem(where="routing", value=routing, rule="is not known", hint=nearest(routing, kinds)))
    spec, found = _named(model, cluster, precision, problems)
    job = Job(spec=spec, seq_len=seq_len, global_batch=global_batch)
    return search_mappings(job, found, precision=precision, keep=keep, base=base_mapping(RouterModel(kind=routing)))


def _name_problems(**names: object) -> list[Problem]:
    """Of arguments that must be text."""
    legal = {"model": "olmoe-1b-7b", "cluster": "h100x64"}
    return [
        p for name, value in names.items() for p in of_kind(name, value, str, "must be text", f'use "{legal[name]}"')
    ]


def _named(model: str, cluster: str, precision: str, problems: list[Problem]) -> tuple[ModelSpec, GpuCluster]:
    """Raises `ConfigError` with `problems` and its own."""
    found: list[Any] = []
    strange = _name_problems(model=model, cluster=cluster)
    problems += strange
    for read, name in () if strange else ((model_named, model), (parse_cluster, cluster)):
        try:
            found.append(read(name))
        except ConfigError as error:
            problems += error.problems
    problems += precision_problems(
        precision, next((c for c in found if isinstance(c, GpuCluster)), None), where="precision"
    )
    raise_if(problems, ConfigError, subject="the arguments")
    return found[0], found[1]
