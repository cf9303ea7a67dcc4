"""Where a check runs, and how it tells what it found.

A check is a function of a `Here`. It tells each value as soon as it has it, with its bar, in a line that is flushed at once: what was told is kept, whatever ends the check.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

Size = TypeVar("Size")


class Skipped(Exception):
    """A check, or the rest of it, that cannot run here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Here:
    """The device under check, and the file for what is found."""

    device: torch.device
    told: Path
    keep: Path | None = None
    """Where a check leaves what its processes recorded; None: nowhere."""

    @property
    def on_gpu(self) -> bool:
        """Else this is the self-test: the same functions on a CPU, with tiny sizes, whose times say nothing."""
        return self.device.type == "cuda"

    def pick(self, full: Size, small: Size) -> Size:
        """`full` on a GPU, `small` in the self-test."""
        return full if self.on_gpu else small

    def tell(self, name: str, value: Any, *, most: float | None = None, least: float | None = None) -> None:
        """Write down a value; beyond its bar (or not a number where it has one) the check has failed."""
        failed = (most is not None and not value <= most) or (least is not None and not value >= least)
        bars = [f"{sign} {bar:g}" for sign, bar in (("<=", most), (">=", least)) if bar is not None]
        line = {"name": name, "value": _plain(value), "bar": " and ".join(bars) or None, "failed": failed}
        with self.told.open("a") as file:  # ranks of a check tell into the same file
            file.write(json.dumps(line) + "\n")

    def tell_rate(self, name: str, value: float, *, least: float) -> None:
        """Write down a figure of speed: its bar holds on a GPU only."""
        self.tell(name, value, least=least if self.on_gpu else None)

    def needs_gpu(self, why: str) -> None:
        """Raise `Skipped` in the self-test, for what has no meaning on a CPU."""
        if not self.on_gpu:
            raise Skipped(f"needs a GPU: {why}")


def _plain(value: Any) -> Any:
    """Four digits, and what JSON can hold."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value
