"""The process that traces: it has loaded the CUDA that computes nothing before torch (`shim.py`), and runs one case after the other."""

from __future__ import annotations

import importlib
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed._tools.fake_collectives  # collectives of fake tensors

from phalanx.runtime.comm import Collectives
from phalanx_lab.bench.trace.device import World, stand_in
from phalanx_lab.bench.trace.watch import Seen

STEP = "phalanx_lab.bench.trace.steps:trace_case"
"""What traces a case that does not say `by` whom."""


class _Current:
    """What is taken down at the time."""

    def __init__(self) -> None:
        self.seen, self.world = Seen(), World(samples=1, replicas=1, replica_of=lambda _: 0, tokens=1)

    def set(self, seen: Seen, world: World) -> None:
        self.seen, self.world = seen, world

    def get(self) -> tuple[Seen, World]:
        return self.seen, self.world


def main(asked: str, told: str) -> None:
    """Traces the cases in the file `asked`, and writes what they said, or their error, into the file `told`."""
    torch.set_num_threads(1)
    current = _Current()
    stand_in(current.get)
    _answer_for_all()
    found = [_one(case, current.set) for case in json.loads(Path(asked).read_text())]
    Path(told).write_text(json.dumps(found))


def _answer_for_all() -> None:
    """Control messages have no transport here: every rank says what this one says."""
    collectives: Any = Collectives
    collectives.gather_objects = lambda self, value, axis: [value] * axis.size


def _one(case: dict[str, Any], current: Callable[[Seen, World], None]) -> dict[str, Any]:
    try:
        module, function = case.pop("by", STEP).split(":")
        told: dict[str, Any] = getattr(importlib.import_module(module), function)(case, current)
        return told
    except Exception:
        return {"error": _short(traceback.format_exc())}


def _short(text: str) -> str:
    """The last lines of an error, without the lists of torch."""
    return "\n".join(line[:300] for line in text.splitlines() if "^^^" not in line)[-3000:]
