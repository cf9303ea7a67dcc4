"""Memory of the members of an elastic run: `phalanx bench memory` measures them from inside their processes.

Must never change: the run is the one that `phalanx train` makes of the recipe, supervisor, membership and all.
"""

from __future__ import annotations

import json
import multiprocessing
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed

from phalanx.core.config import Recipe
from phalanx.core.errors import RunError
from phalanx.core.events import Event
from phalanx.core.process import peak_resident_bytes, resident_bytes
from phalanx.runtime.processes.launch import threads_per_rank
from phalanx.train.recovery.run import train_elastic
from phalanx.train.recovery.watch import Phase


def measure_elastic(recipe: Recipe, *, folder: Path) -> list[tuple[int, int]]:
    """(baseline, peak above it) of each rank of a run in `folder`, where nothing is yet. Raises `RunError` where it fails."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_train, args=(recipe, folder))
    child.start()
    child.join()
    if child.exitcode:
        raise RunError(f"the run ended with {child.exitcode}")
    told = [json.loads(_report(folder, rank).read_text()) for rank in range(recipe.launch.ranks)]
    return [(int(entry["baseline"]), int(entry["peak"])) for entry in told]


def _train(recipe: Recipe, folder: Path) -> None:
    """Trains in a process of its own, so that nothing of it stays in the one that measures."""
    threads = threads_per_rank(recipe.launch.ranks, recipe.launch.threads)
    raise SystemExit(train_elastic(recipe, threads=threads, watch=_HostWatch(folder)))


def _report(folder: Path, slot: int) -> Path:
    return folder / f"memory-{slot}.json"


class _HostWatch:
    """Makes one watch a worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def host(self, event: Event, /) -> None:
        pass

    def member(self, slot: int) -> _MemberWatch:
        return _MemberWatch(_report(self.folder, slot))


class _MemberWatch:
    """Writes down, in a worker's own process, what it held at first and the most since.

    Other runs are measured from when they have joined the others. Members join later than this is made, so that the pages of the transport
    are touched before.
    """

    def __init__(self, path: Path) -> None:
        touch_transport()
        self.path, self.baseline = path, resident_bytes()

    def phase(self, name: Phase, step: int) -> None:
        pass

    def tell(self, event: Event, /) -> None:
        self.path.write_text(json.dumps({"baseline": self.baseline, "peak": peak_resident_bytes() - self.baseline}))


def touch_transport() -> None:
    """Meet nobody, over gloo."""
    group = torch.distributed.ProcessGroupGloo(torch.distributed.HashStore(), 0, 1, timedelta(seconds=60))
    group.allreduce([torch.zeros(1)]).wait()  # type: ignore[attr-defined]  # of its base class, which the stubs leave out
