"""Which way a recipe is started on so many hosts: with elastic recovery, or on ranks that stay the same.

Decides by asking the checks of a recipe: for the number of ranks that the launch gives, with the settings that the script of each way gives. All problems of a launch are found here, together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from phalanx.cli.launching.request import Request, read_recipe
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.recipe import load_recipe
from phalanx.core.rules import RANKS
from phalanx.plan import choose_recovery

Where = Literal["local", "torchrun", "slurm", "kubernetes"]
WHERE: tuple[Where, ...] = ("local", "torchrun", "slurm", "kubernetes")
GPUS = 8
"""Of a node, where neither the command line nor the recipe says otherwise."""
OWN = ("launch.ranks", "launch.device", "resilience.heal", "resilience.mode")
"""Settings that the script gives by its own lines."""
LEAST, MOST = {"--nodes": 1, "--gpus-per-node": 0}, 100_000
"""Nodes, and GPUs of each."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line says."""

    where: Where
    path: str
    nodes: int | None = None
    gpus: int | None = None
    """Of each node."""
    elastic: bool | None = None
    """None: where the mapping allows it."""
    trust: bool = False
    """As `phalanx train --trust`, here and in the script."""
    settings: tuple[str, ...] = ()
    """Further words of `phalanx train`."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch that has passed its checks."""

    where: Where
    path: str
    nodes: int
    gpus: int
    """Of each node; 0: processors alone."""
    ranks: int
    """Of each node."""
    device: str
    elastic: bool
    why: str
    """Why it is elastic or not, in a line."""
    settings: tuple[str, ...]
    """What is handed on to `phalanx train`, without what the script says by itself."""
    recipe: Recipe
    """As the ranks will get it."""
    trust: bool = False

    @property
    def mode(self) -> str:
        return "fast" if self.recipe.resilience.mode == "off" else self.recipe.resilience.mode


def choose(asked: Asked) -> Launch:
    """Raises `ConfigError` with all that is wrong."""
    raise_if(_too_many(asked), ConfigError, subject="the launch")
    problems = _problems(asked)
    found: Launch | list[Problem] = []
    nodes = None if asked.where == "local" else _legal("--nodes", asked.nodes)
    asked = replace(asked, nodes=nodes, gpus=_legal("--gpus-per-node", asked.gpus))  # of what the hints say, the rest
    try:
        read = load_recipe(asked.path, asked.settings)
        found = (_local if asked.where == "local" else _several)(asked, read)
    except ConfigError as err:
        problems += err.problems
    if isinstance(found, Launch) and not problems:
        return found
    known = {p.where for p in problems}
    problems += [p for p in found if p.where not in known] if isinstance(found, list) else []
    raise ConfigError(problems, subject="the launch")


def _legal(name: str, count: int | None) -> int | None:
    """That count, or the nearest that may be asked for."""
    return None if count is None else min(max(count, LEAST[name]), MOST)


def _too_many(asked: Asked) -> list[Problem]:
    """Counts with which no mapping could even be looked for."""
    most = RANKS.ceiling
    counts = {"--nodes": asked.nodes, "--gpus-per-node": asked.gpus}
    rule, hint = f"must be at most {most:,.0f}", f"use {most:.0f} or fewer"
    return [Problem(where=w, value=n, rule=rule, hint=hint) for w, n in counts.items() if n is not None and n > most]


def _problems(asked: Asked) -> list[Problem]:
    found = []
    for name, value in (("--nodes", asked.nodes), ("--gpus-per-node", asked.gpus)):
        if (near := _legal(name, value)) != value:
            rule = f"must be from {LEAST[name]} to {MOST:,}"
            found.append(Problem(where=name, value=value, rule=rule, hint=f"use {near}"))
    if asked.where == "local" and asked.nodes not in (None, 1):
        found.append(
            Problem(where="--nodes", value=asked.nodes, rule="local is one machine", hint="use torchrun or slurm")
        )
    if asked.where == "torchrun" and asked.elastic:
        rule = "a launcher starts and ends the ranks, so none is replaced"
        found.append(Problem(where="--elastic", value=None, rule=rule, hint="use slurm, kubernetes or local"))
    given = _given(asked.settings)
    if asked.gpus and given.get("launch.device") == "cpu":
        rule = "asks for GPUs, and --launch.device cpu uses none"
        found.append(Problem(where="--gpus-per-node", value=asked.gpus, rule=rule, hint="leave one of them out"))
    if asked.gpus and given.get("launch.ranks", str(asked.gpus)) != str(asked.gpus):
        rule = f"is not the number of GPUs of a node: each has a rank of its own (--gpus-per-node {asked.gpus})"
        found.append(Problem(where="--launch.ranks", value=given["launch.ranks"], rule=rule, hint="leave it out"))
    return found


def _given(words: tuple[str, ...]) -> dict[str, str]:
    """Settings on the command line with their values."""
    pairs, rest = {}, list(words)
    while rest:
        name, equals, value = rest.pop(0).removeprefix("--").partition("=")
        pairs[name] = value if equals or not rest else rest.pop(0)
    return pairs


def _local(asked: Asked, read: Recipe) -> Launch | list[Problem]:
    """`phalanx train` decides by itself, unless it is told."""
    launch = _launch(asked, read, elastic=False)
    heal = () if asked.elastic is None else ("--resilience.heal", str(asked.elastic).lower())
    launch = replace(launch, settings=(*launch.settings, *heal))
    checked = _checked(launch, ["--launch.ranks", str(launch.ranks)], world=None)
    if isinstance(checked, list):
        return checked
    choice = choose_recovery(checked.recipe)
    return replace(checked, elastic=choice.is_elastic, why=choice.explain().removeprefix("no: "))


def _several(asked: Asked, read: Recipe) -> Launch | list[Problem]:
    """Elastic where that may be; else fixed, with what speaks against elastic."""
    heal = read.resilience.heal if asked.elastic is None else asked.elastic
    if asked.where == "torchrun":
        return _fixed(asked, read, why="torchrun starts and ends the ranks; slurm and kubernetes have an elastic way")
    if heal is not None:
        why = "--fixed" if asked.elastic is False else "resilience.heal = false; --elastic turns it on"
        return _elastic(asked, read) if heal else _fixed(asked, read, why=why)
    fixed = _fixed(asked, read, why="")
    if isinstance(fixed, Launch) and fixed.device != "cpu":
        once = replace(fixed.recipe, resilience=replace(read.resilience, heal=None))
        return replace(fixed, why=f"{choose_recovery(once).why_not}; --elastic asks for it")
    elastic = _elastic(asked, read)
    if isinstance(elastic, Launch) or isinstance(fixed, list):
        return fixed if isinstance(elastic, list) else elastic
    return replace(fixed, why=" ".join(str(elastic[0]).split()))


def _elastic(asked: Asked, read: Recipe) -> Launch | list[Problem]:
    launch = _launch(asked, read, elastic=True)
    words = {
        "resilience.heal": "true",
        "resilience.mode": launch.mode,
        "resilience.service": "node0:29400",
        "resilience.wanted": launch.nodes * launch.ranks,
        "resilience.minimum": launch.ranks,
        "resilience.wait_s": 1800,
        "launch.ranks": launch.ranks,
    }
    launch = replace(launch, why="ranks and hosts that die are replaced, and the others go on meanwhile")
    return _checked(launch, [w for name, value in words.items() for w in (f"--{name}", str(value))], world=None)


def _fixed(asked: Asked, read: Recipe, *, why: str) -> Launch | list[Problem]:
    launch = _launch(asked, read, elastic=False)
    heal = ("--resilience.heal", "false") if read.resilience.heal else ()  # a launcher refuses what the recipe asks for
    launch = replace(launch, why=why, settings=(*launch.settings, *heal))
    return _checked(launch, [], world=launch.nodes * launch.ranks)


def _launch(asked: Asked, read: Recipe, *, elastic: bool) -> Launch:
    """What both ways have in common, not checked yet."""
    here = asked.where == "local"
    gpus = asked.gpus if asked.gpus is not None else 0 if here or read.launch.device == "cpu" else GPUS
    device = "cuda" if gpus else read.launch.device if here and asked.gpus is None else "cpu"
    return Launch(
        where=asked.where, path=asked.path, nodes=asked.nodes or (1 if here else 2), gpus=gpus, ranks=gpus or read.launch.ranks,
        device=device, elastic=elastic, why="", settings=_without(asked.settings, OWN if elastic else OWN[:3]), recipe=read, trust=asked.trust,
    )  # fmt: skip


def _without(words: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(w for name, value in _given(words).items() if name not in names for w in (f"--{name}", value))


def _checked(launch: Launch, words: list[str], *, world: int | None) -> Launch | list[Problem]:
    """`launch` with the recipe as its ranks read it, or what is wrong with that."""
    if not RANKS.allows(launch.nodes * launch.ranks):
        rule = f"makes {launch.nodes * launch.ranks:,} ranks, more than any cluster has"
        return [Problem(where="--nodes", value=launch.nodes, rule=rule, hint="use fewer nodes")]
    pods = launch.where == "kubernetes"
    more = [*words, "--checkpoint.fall_back", "true", "--launch.device", launch.device]
    more += ["--run.folder", "/runs", "--data.cache", "/runs/cache"] if pods else []
    request = Request(
        recipe_path=launch.path, overrides=(*more, *launch.settings), dry_run=True, trust=pods or launch.trust
    )
    try:
        recipe = read_recipe(request, world=world, several_machines=launch.nodes > 1, tell=lambda line: None)
        return replace(launch, recipe=recipe)
    except ConfigError as err:
        return list(err.problems)
