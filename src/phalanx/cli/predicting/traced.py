"""`phalanx simulate traced FILE...`: what steps that `phalanx bench trace` has counted would take on H100s, eight a host. Predicted, not measured. No process, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.core.arguments import WordParser
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, read_json, write_json
from phalanx.core.recipe import load_recipe
from phalanx.core.units import format_count, format_seconds
from phalanx.plan.model import PRESETS
from phalanx.simulate import job_of_recipe, mapping_of_recipe, resolve_recipe
from phalanx.simulate.hardware import parse_cluster
from phalanx.simulate.mapping import Mapping as RunMapping
from phalanx.simulate.step import TracedExchange, TracedPhase, TracedRank, TracedStep, TracedTime

FIELDS = tuple(field.name for field in dataclasses.fields(TracedPhase))
EVEN = ("--router.force", "balanced", "--launch.device", "cuda")
"""A trace loads all experts alike, on GPUs."""


def traced(argv: Sequence[str]) -> int:
    """Print a table with a line for each file."""
    parser = WordParser(prog="phalanx simulate traced", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written by phalanx bench trace --json FILE")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the predictions")
    args = parser.parse_args(list(argv))
    check_writable(args.json)
    found = {str(path): read_step(path) for path in args.files}
    times = {name: step.time() for name, step in found.items()}
    write_json(args.json, {name: to_dict(time) for name, time in times.items()})
    print(describe(times))
    return 0


def read_step(path: Path) -> TracedStep:
    """The step of a file. Raises `ConfigError` with everything that is wrong with it."""
    found = read_json(path, where=str(path))
    step = found.get("step") if isinstance(found, dict) else None
    if not isinstance(step, dict):
        rule = "is not in the file: it is no trace"
        raise ConfigError.of(str(path), "step", rule, "use one of phalanx bench trace --json FILE", subject="the trace")
    return step_of(step, str(path))


def step_of(step: Mapping[str, Any], where: str) -> TracedStep:
    """What `phalanx bench trace` says of a step, as simulations take it. Raises `ConfigError` with everything that is wrong."""
    raise_if(_problems(step, where), ConfigError, subject="the trace")
    recipe = load_recipe(None, [*step["settings"], *EVEN])
    preset, train, world = PRESETS.get(recipe.model.preset), recipe.train, step["world"]
    spec = resolve_recipe(recipe, tokenizer_vocab=recipe.model.vocab or (preset.vocab if preset is not None else 1))
    wide = dataclasses.replace(recipe, train=dataclasses.replace(train, global_batch=world * train.micro_batch))
    cluster = parse_cluster(f"h100x{world}")
    mapping = mapping_of_recipe(wide, spec, world=world, cluster=cluster)
    if not isinstance(mapping, RunMapping):
        rule, hint = "is not predicted from a trace where stages have foldings of their own", "folding.pp"
        raise ConfigError.of(f"{where}: folding.stages", "set", rule, hint, subject="the trace")
    places = {place: _rank_of(rank) for rank in step["ranks"] for place in rank["places"]}
    if sorted(places) != list(range(mapping.folding.pp)):
        rule = f"must be all places of a pipeline of {mapping.folding.pp}, each once"
        raise ConfigError.of(f"{where}: ranks.places", sorted(places), rule, subject="the trace")
    job = job_of_recipe(wide, spec)
    job = dataclasses.replace(job, global_batch=step["rounds"] * mapping.folding.dp * train.micro_batch)
    return TracedStep(job=job, mapping=mapping, places=tuple(places[i] for i in sorted(places)), cluster=cluster)


def _rank_of(told: Mapping[str, Any]) -> TracedRank:
    phases = {name: TracedPhase(**{field: phase[field] for field in FIELDS}) for name, phase in told["phases"].items()}
    exchanges = [
        TracedExchange(phase=phase, content=content, op=op, ranks=tuple(ranks), sent_bytes=sent)
        for phase, content, op, ranks, sent in told["exchanges"]
    ]
    return TracedRank(phases=phases, exchanges=tuple(exchanges))


def _problems(step: Mapping[str, Any], where: str) -> list[Problem]:
    found = [
        Problem(where=f"{where}: {name}", value=step.get(name), rule="must be a count from 1", hint="8")
        for name in ("world", "rounds")
        if not _is_count(step.get(name)) or not step[name]
    ]
    settings, ranks = step.get("settings"), step.get("ranks")
    if not isinstance(settings, list) or not all(isinstance(word, str) for word in settings):
        found.append(Problem(where=f"{where}: settings", value=settings, rule="must be the words of a recipe"))
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        return [*found, Problem(where=f"{where}: ranks", value=ranks, rule="must be a list of the ranks traced")]
    for i, rank in enumerate(ranks):
        found += _rank_problems(rank, f"{where}: ranks[{i}]")
    return found


def _rank_problems(rank: Mapping[str, Any], where: str) -> list[Problem]:
    phases, exchanges, places = rank.get("phases"), rank.get("exchanges"), rank.get("places")
    found = []
    if not isinstance(places, list) or not places or not all(map(_is_count, places)):
        found.append(Problem(where=f"{where}.places", value=places, rule="must be places of a pipeline", hint="[0]"))
    if not isinstance(exchanges, list) or not all(map(_is_exchange, exchanges)):
        rule = "must be a list of [phase, content, operation, ranks, bytes]"
        found.append(Problem(where=f"{where}.exchanges", value=exchanges, rule=rule, hint="[]"))
    if not isinstance(phases, dict) or not all(isinstance(phase, dict) for phase in phases.values()):
        return [*found, Problem(where=f"{where}.phases", value=phases, rule="must be a table of phases")]
    for name, phase in phases.items():
        for field in FIELDS:
            if not _is_count(phase.get(field)):
                place = f"{where}.phases.{name}.{field}"
                found.append(Problem(where=place, value=phase.get(field), rule="must be a count", hint="1"))
    if not found and not any(phase["launches"] for phase in phases.values()):
        found.append(Problem(where=f"{where}.phases", value=sorted(phases), rule="launch nothing"))
    return found


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_exchange(told: object) -> bool:
    if not isinstance(told, list) or len(told) != 5 or not all(isinstance(word, str) for word in told[:3]):
        return False
    ranks = told[3]
    return _is_count(told[4]) and isinstance(ranks, list) and len(ranks) > 1 and all(map(_is_count, ranks))


def to_dict(time: TracedTime) -> dict[str, Any]:
    """As JSON."""
    return {
        "seconds": time.seconds,
        "tokens_per_s": time.tokens_per_s,
        "mfu": time.mfu,
        "hidden": time.hidden,
        "parts": dict(time.parts),
    }


def describe(found: Mapping[str, TracedTime]) -> str:
    """Lines of a table: microseconds a token, by what takes them."""
    kinds = list(next(iter(found.values())).parts)
    width = max(len("us a token"), *(len(Path(name).name) for name in found))
    columns = (*kinds, "step", "tokens/s", "rows hidden", "MFU")
    lines = [f"{'us a token':<{width}}" + "".join(f"{kind:>12}" for kind in columns)]
    for name, time in found.items():
        each = "".join(f"{seconds * time.ranks / time.tokens * 1e6:>12.1f}" for seconds in time.parts.values())
        lines.append(
            f"{Path(name).name:<{width}}{each}{format_seconds(time.seconds):>12}{format_count(time.tokens_per_s):>12}{time.hidden:>12.0%}{time.mfu:>12.1%}"
        )
    return "\n".join(
        [
            *lines,
            "Counted on a device that computes nothing, at the rates of simulate/step/traced.py: predicted, not measured.",
        ]
    )
