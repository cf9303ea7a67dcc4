"""The recipe that a search writes: the fastest mapping that a recipe can say and that fits by the dry run, as a short file.

Decides which of a search's mappings is written. Must never change: what is written passes `phalanx train FILE --dry-run --cluster NAME`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from phalanx.cli.predicting.dry_run import Machine, card_bytes, machine_of
from phalanx.core.config import Recipe
from phalanx.core.errors import PlanError
from phalanx.core.recipe import short_recipe
from phalanx.core.units import format_bytes
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.mapping import Mapping, Overlap
from phalanx.simulate.search import CLOCKED, SearchResult, recipe_of_mapping
from phalanx.simulate.step import Prediction, predict

Find = Callable[[GpuCluster, float], SearchResult]
"""A search on a cluster, of what fills at most this share of its memory. Raises `PlanError` where there is nothing."""
ROOMS = (1.0, 0.9, 0.8, 0.7, 0.6)
"""Shares of the memory that searches fill, one after the other, until something fits by the dry run, which counts more closely."""
UNSAID = "no recipe: "
MOST_TRIED = 30
"""Mappings of one search that the dry run looks at; each takes a second or two."""
LARGER = (1.25, 1.5, 2, 3, 4, 6, 8)
"""Multiples of a cluster that are tried where nothing fits."""


@dataclass(frozen=True, kw_only=True)
class Fitting:
    """A mapping whose recipe fits."""

    recipe: Recipe
    prediction: Prediction
    peak_bytes: int
    """Tensors of the fullest rank, by the dry run."""
    number: int | None
    """Its place in the list of the search, from 1; None where it is in none that was shown."""
    passed_over: tuple[str, ...]
    """Why the faster ones were not taken."""


def fastest_fitting(result: SearchResult, find: Find) -> tuple[Fitting | None, tuple[str, ...]]:
    """The fastest recipe that fits, or None and why there is none. `result` is what `find` gave for the whole memory."""
    passed: tuple[str, ...] = ()
    looked_at = set[Mapping]()
    for room in ROOMS:
        try:
            found = result if room == ROOMS[0] else find(result.cluster, room)
        except PlanError:
            break
        fitting, why, is_sayable = _first_of(found, looked_at)
        passed = passed or why
        if fitting is not None:
            shown = fitting.number if room == ROOMS[0] else None
            return replace(fitting, number=shown, passed_over=passed), ()
        if not is_sayable:
            break
    return None, passed


def _first_of(result: SearchResult, looked_at: set[Mapping]) -> tuple[Fitting | None, tuple[str, ...], bool]:
    """The first of a search that fits, why those before it were passed over, and whether recipes can say any of them.

    One that does not fit may with gradients in shards (`optim.zero = 2`), which take time: it stands by until the list comes to what is slower. None is looked at twice, nor one that
    differs from a former in how it overlaps alone.
    """
    cluster, passed, is_sayable = result.cluster, list[str](), False
    machine, spare = machine_of(cluster), None
    assert machine.card is not None
    for number, p in _by_time(result):
        plain = replace(p.uniform, overlap=Overlap())
        if spare is not None and spare.prediction.step.seconds <= p.step.seconds:
            break
        if plain in looked_at:
            is_sayable = True
            continue
        found, why = _tried(result, p, machine)
        if found is not None:
            return replace(found, number=number), tuple(passed), True
        passed.append(why)
        if not why.startswith(UNSAID):
            is_sayable = True
            looked_at.add(plain)
            sharded = replace(p.uniform, sharding="gradients")
            other, _ = _tried(result, predict(result.job, sharded, cluster, most_microbatches=CLOCKED), machine)
            if other is not None and (spare is None or other.prediction.step.seconds < spare.prediction.step.seconds):
                spare = other
    return spare, tuple(passed), is_sayable


def _tried(result: SearchResult, p: Prediction, machine: Machine) -> tuple[Fitting | None, str]:
    """The recipe of a mapping where it fits, else why not."""
    cluster = result.cluster
    assert machine.card is not None
    on_device = cluster.hardware.sms is not None
    recipe, reasons = recipe_of_mapping(result.job, p.uniform, on_device=on_device, cluster=cluster)
    if recipe is None:
        return None, f"{UNSAID}{'; '.join(reasons)} ({p.mapping.label()})"
    peak = card_bytes(recipe, machine, world=cluster.world)
    if peak <= machine.card.room_bytes:
        return Fitting(recipe=recipe, prediction=p, peak_bytes=peak, number=None, passed_over=()), ""
    room = format_bytes(machine.card.room_bytes)
    return None, f"{p.mapping.label()}: {format_bytes(peak)} by the dry run, of {room}"


def _by_time(result: SearchResult) -> Iterator[tuple[int | None, Prediction]]:
    """Its mappings, the fastest first, each with its place in the list that is shown."""
    places = {p.mapping: place for place, p in enumerate(result.best, start=1)}
    each = {p.mapping: p for p in (*result.best, *result.variants)}.values()
    for p in sorted(each, key=lambda p: p.step.seconds)[:MOST_TRIED]:
        yield places.get(p.mapping), p


def fits_on(cluster: GpuCluster, find: Find, may_fit: Callable[[GpuCluster], bool]) -> GpuCluster | None:
    """A larger cluster of the same hosts on which a recipe fits: the smallest of `LARGER`; None where none does. Where nothing `may_fit` none is searched for."""
    per_host = cluster.hardware.ranks_per_host
    for factor in LARGER:
        world = math.ceil(cluster.world * factor / per_host) * per_host
        larger = replace(cluster, world=world)
        if not may_fit(larger):
            continue
        try:
            result = find(larger, 1.0)
        except PlanError:
            continue
        if fastest_fitting(result, find)[0] is not None:
            return larger
    return None


# ---- the file -------------------------------------------------------------------------------------------------------------------


def recipe_text(recipe: Recipe, cluster: GpuCluster, *, head: tuple[str, ...], comments: dict[str, str]) -> str:
    """A recipe file with what differs from the defaults, what a person will change, and a comment beside it."""
    hosts = f"each of {cluster.hosts} hosts" if cluster.hosts > 1 else "this host"
    beside = {
        "run.name": "the run lives in runs/NAME",
        "data.sources": "your text: files, folders or globs of .txt, .jsonl, .jsonl.gz, .parquet",
        "data.tokenizer": "or a tokenizer.json, of which model.vocab holds every token",
        "train.steps": "of the whole run",
        "launch.ranks": f"GPUs of one host: `phalanx launch`, or torchrun, starts them on {hosts}",
        **comments,
    }
    return short_recipe(recipe, head=head, comments=beside)


LR = "# lr = 3e-4    # highest learning rate; without it the default (phalanx settings optim)"


def searched_text(found: Fitting, cluster: GpuCluster) -> str:
    """The file that a search writes."""
    p = found.prediction
    head = (
        f"Found by phalanx search for {p.job.spec.name} on {cluster.name}. Predicted, not measured: look with",
        f"phalanx train FILE --dry-run --cluster {shlex.quote(cluster.word)}",
    )
    return recipe_text(found.recipe, cluster, head=head, comments={"optim#": LR})
