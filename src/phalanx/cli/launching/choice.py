"""Which way a recipe is started on so many hosts: with elastic recovery, or on ranks that stay the same.

Decides by asking the checks of a recipe: for the number of ranks that the launch gives, with the settings that the script of each way gives. All problems of a launch are found here, together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from phalanx.cli.launching.request import Request, read_recipe
from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.recipe import load_recipe, recipe_file
from phalanx.core.rules import RANKS
from phalanx.plan import choose_recovery

Where = Literal["local", "torchrun", "slurm", "kubernetes"]
WHERE: tuple[Where, ...] = ("local", "torchrun", "slurm", "kubernetes")
GPUS = 8
"""Of a node, where neither the command line nor the recipe says otherwise."""
OWN = ("launch.ranks", "launch.device", "resilience.heal", "resilience.mode")
"""Settings that the script gives by its own lines."""
_BY_SCRIPT = {
    "resilience.service": "the service is the script's own",
    "launch.host": "each node has a name of its own",
    "launch.rack": "each node has the rack that its cluster names",
    "launch.keep_service": "the service is the script's own",
}
DECIDED: Mapping[str, Mapping[str, str]] = {
    "slurm": {**_BY_SCRIPT, "resilience.wanted": "nodes times ranks, or WANTED=... sbatch slurm.sh"},
    "kubernetes": {
        **_BY_SCRIPT,
        "resilience.wanted": "pods times ranks",
        "resilience.minimum": "the ranks of a pod",
        "resilience.wait_s": "1800",
    },
}
"""Settings that an elastic script decides, and what it makes of them. Others on the command line come behind its own words, on every node the same."""
VOLUME = "/runs"
"""Where pods see the volume that they share."""
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
    if asked.elastic is not False:  # else the rules of a fixed run say it
        asked = replace(asked, settings=_without(asked.settings, tuple(DECIDED.get(asked.where, ()))))
    try:
        read = load_recipe(asked.path, asked.settings)
        problems += _recipe_problems(asked, read)
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
    if asked.gpus == 0 and given.get("launch.device") == "cuda":
        rule = "asks for no GPUs, and --launch.device cuda uses them"
        found.append(Problem(where="--gpus-per-node", value=0, rule=rule, hint="leave one of them out"))
    if asked.gpus and given.get("launch.ranks", str(asked.gpus)) != str(asked.gpus):
        rule = f"is not the number of GPUs of a node: each has a rank of its own (--gpus-per-node {asked.gpus})"
        found.append(Problem(where="--launch.ranks", value=given["launch.ranks"], rule=rule, hint="leave it out"))
    if asked.elastic is not False:
        found += [
            Problem(where=f"--{name}", value=given[name], rule=f"is decided by the script: {made}", hint="leave it out")
            for name, made in DECIDED.get(asked.where, {}).items()
            if name in given
        ]
    return found + (_pod_problems(given) if asked.where == "kubernetes" else [])


def _pod_problems(given: Mapping[str, str]) -> list[Problem]:
    """Settings on the command line that pods would not get, or that lead off their volume."""
    found = []
    for name in ("run.folder", "data.cache"):
        if given.get(name) and not _is_on_volume(given[name]):
            rule = f"is lost with its pod: pods share {VOLUME} alone"
            hint = f"leave it out, or use a folder below it, as in {VOLUME}/mine"
            found.append(Problem(where=f"--{name}", value=given[name], rule=rule, hint=hint))
    for name, value in given.items():
        if foreign := _FOREIGN.search(value):
            hint = f"write it in the recipe, in double quotes as {_escaped(foreign[0])}"
            found.append(Problem(where=f"--{name}", value=value, rule=_no_yaml(foreign[0]), hint=hint))
    return found


def _recipe_problems(asked: Asked, read: Recipe) -> list[Problem]:
    """What of a recipe pods would not get, or not find."""
    if asked.where != "kubernetes":
        return []
    found = []
    for number, line in enumerate(recipe_file(Path(asked.path)).read_text(encoding="utf-8").split("\n"), 1):
        if foreign := _FOREIGN.search(line):
            hint = f"write {_escaped(foreign[0])} in double quotes, or leave it out"
            found.append(Problem(where=f"{asked.path}:{number}", value=None, rule=_no_yaml(foreign[0]), hint=hint))
    where = "--data.sources" if "data.sources" in _given(asked.settings) else f"{asked.path}: data.sources"
    for source in read.data.sources:
        if not source.startswith("builtin:") and not _is_on_volume(source):
            hint = f"copy it to the volume phalanx-runs, and write --data.sources {VOLUME}/{os.path.basename(source) or 'text'}"
            found.append(Problem(where=where, value=source, rule=f"pods share {VOLUME} alone", hint=hint))
    return found


_FOREIGN = re.compile("[^\t\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
"""What a line of YAML cannot hold as it stands: ends of lines, control characters and what is no character."""


def _no_yaml(char: str) -> str:
    return f"has the character U+{ord(char):04X}, which a line of YAML cannot hold"


def _escaped(char: str) -> str:
    """As TOML writes it."""
    return f"\\u{ord(char):04X}"


def _is_on_volume(path: str) -> bool:
    return os.path.normpath(path).startswith(f"{VOLUME}/") or os.path.normpath(path) == VOLUME


def _given(words: tuple[str, ...]) -> dict[str, str]:
    """Settings on the command line with their values."""
    return {name: value for name, value, _ in _split(words)}


def _split(words: tuple[str, ...]) -> list[tuple[str, str, tuple[str, ...]]]:
    """Settings on the command line: name, value, and the words that say so."""
    found, rest = list[tuple[str, str, tuple[str, ...]]](), list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if equals or not rest or not word.startswith("--"):
            found.append((name, value, (word,)))
        else:
            found.append((name, rest[0], (word, rest.pop(0))))
    return found


def _local(asked: Asked, read: Recipe) -> Launch | list[Problem]:
    """`phalanx train` decides by itself, unless it is told."""
    launch = _launch(asked, read, elastic=False)
    if asked.elastic is None:
        launch = replace(launch, settings=_without(asked.settings, OWN[:2]))
    else:
        launch = replace(launch, settings=(*launch.settings, "--resilience.heal", str(asked.elastic).lower()))
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
    return tuple(word for name, _, own in _split(words) if name not in names for word in own)


def _checked(launch: Launch, words: list[str], *, world: int | None) -> Launch | list[Problem]:
    """`launch` with the recipe as its ranks read it, or what is wrong with that."""
    if not RANKS.allows(launch.nodes * launch.ranks):
        rule = f"makes {launch.nodes * launch.ranks:,} ranks, more than any cluster has"
        return [Problem(where="--nodes", value=launch.nodes, rule=rule, hint="use fewer nodes")]
    pods = launch.where == "kubernetes"
    more = [*words, "--checkpoint.fall_back", "true", "--launch.device", launch.device]
    more += ["--run.folder", VOLUME, "--data.cache", f"{VOLUME}/cache"] if pods else []
    request = Request(
        recipe_path=launch.path, overrides=(*more, *launch.settings), dry_run=True, trust=pods or launch.trust
    )
    try:
        recipe = read_recipe(request, world=world, several_machines=launch.nodes > 1, tell=lambda line: None)
        return replace(launch, recipe=recipe)
    except ConfigError as err:
        return list(err.problems)
