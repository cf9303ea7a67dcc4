"""Whether a run fits the memory of a GPU (or of a rank on processors, of a cluster), and what would have to change if it does not.

The nearest run that fits has the fewest changes: of what the optimizer and the layers keep first, then of the micro-batch, then of the mapping. Predicted as the dry run predicts.
"""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError
from phalanx.core.rules import recipe_problems, value_of
from phalanx.core.units import format_bytes
from phalanx.plan import run_problems
from phalanx.plan.mapping import Folding, legal_foldings
from phalanx.plan.model import ModelSpec
from phalanx.simulate.hardware import GpuCluster
from phalanx.simulate.step import FIXED_BYTES, WASTE, usable_bytes

CHANGES: Mapping[str, tuple[tuple[Any, int], ...]] = {
    "optim.state_dtype": (("float32", 0), ("bfloat16", 1)),
    "optim.zero": ((0, 0), (1, 1), (2, 2)),
    "train.recompute": (("none", 0), ("selective", 1), ("full", 3)),
}
"""Setting -> values, each of which takes less memory than those before it, and how far it is from the first."""
GB = 0.985 * 2**30
"""Bytes that torch finds for a GB in a card's name: 0.9875 GiB of an A100 (39.5 of 40), 0.989 or more of an H100 (81,559 MiB of 80; 93.0 GiB of 94), 0.991 of an H200 (150.1e9 bytes of 141)."""
SMI_S = 20.0
"""Longest wait for `nvidia-smi`."""
Peak = Callable[[Recipe], int]
"""Bytes of tensors and of NCCL of the fullest rank."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """Memory that one rank has for itself."""

    name: str
    room_bytes: int
    """What it leaves for tensors and NCCL."""


@dataclass(frozen=True, kw_only=True)
class FittingRun:
    """Settings that would fit, as on a command line, and what the fullest rank takes then."""

    settings: Mapping[str, Any]
    peak_bytes: int

    @property
    def words(self) -> str:
        return " ".join(f"--{name} {value}" for name, value in self.settings.items())


def room_of(card_gb: float) -> int:
    """Bytes that a card which is sold as one of so many GB leaves for tensors and NCCL: less its context, and holes between blocks."""
    return int(card_gb * GB * (1 - WASTE) - FIXED_BYTES)


def card_sold_as(card_gb: float) -> Card:
    """A card of so many GB, as its name says."""
    return Card(name=f"a card of {card_gb:.0f} GB", room_bytes=room_of(card_gb))


def card_of(cluster: GpuCluster) -> Card:
    """What a rank of a cluster has."""
    hardware = cluster.hardware
    if hardware.sms is None:
        return Card(name=f"a rank of {cluster.name}", room_bytes=int(usable_bytes(hardware)))
    return Card(name=f"a GPU of {cluster.name}", room_bytes=int(usable_bytes(hardware) - FIXED_BYTES))


def card_here() -> Card | None:
    """The first GPU of this machine; None where there is none."""
    import torch

    return card_sold_as(torch.cuda.get_device_properties(0).total_memory / GB) if torch.cuda.is_available() else None


def smallest_card(environ: Mapping[str, str]) -> Card | None:
    """The one with the least memory of those that this process may use, as `nvidia-smi` says; None where that says nothing. CUDA is not initialised: ranks are to be forked."""
    command = ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=SMI_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = dict(re.findall(r"^\s*(\d+),\s*(\d+)\s*$", said, re.M))
    named = environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    mib = [int(found[name]) for name in named if name in found] or [int(each) for each in found.values()]
    return card_sold_as(min(mib) * 2**20 / GB) if mib else None


def check_card(recipe: Recipe, spec: ModelSpec, *, world: int, peak_bytes: int, card: Card | None, peak: Peak) -> str:
    """A line about the card. Raises `ConfigError` where the run does not fit, with the nearest one that does."""
    needed = format_bytes(peak_bytes)
    if card is None:
        return f"memory       tensors and NCCL take {needed} of a GPU; none is here: --dry-run --cluster h100x64 (or --card-gb 80) says whether they fit"
    room = format_bytes(card.room_bytes)
    if peak_bytes <= card.room_bytes:
        return f"verdict      fits: {needed} of the {room} that {card.name} leaves for tensors and NCCL (predicted, not measured)"
    found = nearest_fit(recipe, spec, world=world, room=card.room_bytes, peak=peak)
    hint = way_out(found, "use more GPUs, or a smaller model")
    rule = f"does not fit: {card.name} leaves {room} for tensors and NCCL"
    raise ConfigError.of("memory of a rank", needed, rule, hint, subject="the dry run")


def way_out(found: FittingRun | None, otherwise: str) -> str:
    """The run that would fit, as a hint; `otherwise` where none does."""
    return otherwise if found is None else f"{shlex.join(found.words.split())} takes {format_bytes(found.peak_bytes)}"


def nearest_fit(recipe: Recipe, spec: ModelSpec, *, world: int, room: int, peak: Peak) -> FittingRun | None:
    """The run with the fewest changes that fits; None where none does."""
    for settings in _ways(recipe):
        found = _tried(recipe, settings, world=world, peak=peak)
        if found is not None and found.peak_bytes <= room:
            return found
    for degrees in _mappings(recipe, spec, world=world):
        ways = [{**degrees, **settings} for settings in ({}, *_ways(recipe))]
        tried = (_tried(recipe, settings, world=world, peak=peak) for settings in reversed(ways))
        least = next((found for found in tried if found is not None), None)  # of what this mapping allows
        if least is None or least.peak_bytes > room:
            continue
        tried = (_tried(recipe, settings, world=world, peak=peak) for settings in ways)
        return next(found for found in tried if found is not None and found.peak_bytes <= room)
    return None


def _ways(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """Changes of the same mapping, the smallest first."""
    micro, halves = recipe.train.micro_batch, list[tuple[Any, int]]()
    while micro % 2 == 0:
        micro //= 2
        halves.append((micro, 2 * (len(halves) + 1)))
    further = {name: _further(values, value_of(recipe, name)) for name, values in CHANGES.items()}
    options = [
        [(name, None, 0), *((name, value, far) for value, far in values)]
        for name, values in {**further, "train.micro_batch": tuple(halves)}.items()
    ]
    ways = sorted(itertools.product(*options), key=lambda way: sum(far for *_, far in way))
    for way in ways:
        settings = {name: value for name, value, _ in way if value is not None}
        if settings:
            yield settings


def _further(values: Sequence[tuple[Any, int]], now: Any) -> list[tuple[Any, int]]:
    """Values beyond the present one, and how far each is from it."""
    at = next(i for i, (value, _) in enumerate(values) if value == now)
    return [(value, far - values[at][1]) for value, far in values[at + 1 :]]


def _mappings(recipe: Recipe, spec: ModelSpec, *, world: int) -> Iterator[dict[str, Any]]:
    """Degrees of other mappings, those with the fewest changes first."""
    config = recipe.folding
    now = {"tp": config.tp, "cp": config.cp, "pp": config.pp, "ep": config.ep, "etp": config.etp}

    def changed(folding: Folding) -> dict[str, Any]:
        return {f"folding.{axis}": n for axis in now if (n := getattr(folding, axis)) != now[axis]}

    legal = legal_foldings(world, spec, seq_len=recipe.train.seq_len, cp_method=config.cp_method)
    yield from sorted((c for folding in legal if (c := changed(folding))), key=lambda c: (len(c), max(c.values())))


def _tried(recipe: Recipe, settings: Mapping[str, Any], *, world: int, peak: Peak) -> FittingRun | None:
    """None where such a run is refused."""
    changed = with_settings(recipe, settings)
    if recipe_problems(changed, given=(), world=world) or run_problems(changed, world=world):
        return None
    return FittingRun(settings=settings, peak_bytes=peak(changed))


def with_settings(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with `section.field` values in place of its own."""
    for name, value in settings.items():
        section, field = name.split(".")
        recipe = replace(recipe, **{section: replace(getattr(recipe, section), **{field: value})})
    return recipe
