"""Recipes that come with Phalanx: their names, and what is predicted of each on its cluster, which stands in the head of its file.

Must never change: the line tells a person where a recipe belongs, and decides nothing; a test compares it with a fresh prediction.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from phalanx.core.recipe import PACKAGED
from phalanx.simulate.hardware import parse_cluster
from phalanx.simulate.step import Prediction

_LINE = re.compile(r"^# predicted: cluster=(\S+) step_s=([0-9.]+) mfu=([0-9.]+) memory_bytes=([0-9]+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A step on a cluster, with the bytes of tensors of the fullest rank."""

    cluster: str
    step_s: float
    mfu: float
    memory_bytes: int


def predicted_line(cluster: str, prediction: Prediction, peak_bytes: int) -> str:
    """The line of the head, without its mark of a comment."""
    seconds, mfu = prediction.step.seconds, prediction.mfu("causal")
    return f"predicted: cluster={cluster} step_s={seconds:.3f} mfu={mfu:.3f} memory_bytes={peak_bytes}"


def read_predicted(text: str) -> Predicted | None:
    """What the head of a recipe says; None where it says nothing, as of the recipes of this machine."""
    found = _LINE.search(text)
    if found is None:
        return None
    cluster, step_s, mfu, memory = found.groups()
    return Predicted(cluster=cluster, step_s=float(step_s), mfu=float(mfu), memory_bytes=int(memory))


def next_commands(recipe: str, predicted: Predicted | None) -> list[str]:
    """How a recipe is started where it belongs."""
    if predicted is None:
        return [f"phalanx train {recipe}"]
    nodes = parse_cluster(predicted.cluster).hosts
    return [
        f"phalanx train {recipe} --dry-run --cluster {predicted.cluster}",
        f"phalanx launch slurm {recipe} --nodes {nodes}",
    ]


def packaged_recipes() -> dict[str, Path]:
    """Name -> file."""
    return {path.stem: path for path in sorted(PACKAGED.glob("*.toml"))}
