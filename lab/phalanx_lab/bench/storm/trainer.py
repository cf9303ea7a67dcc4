"""The real trainer in a storm: its recipe, hosts that run it, the undisturbed run, and the weights that both end with.

Every host of the storm is a program like `phalanx train` on a machine: a supervisor, its workers, the shared run folder, the service outside of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from phalanx.core.config import Recipe
from phalanx.core.errors import RunError
from phalanx.core.recipe import load_recipe
from phalanx.plan.layout.parameters import Box
from phalanx.plan.recipe import run_problems
from phalanx.runtime.checkpoint.manager import CheckpointManager, import_now
from phalanx.runtime.membership.keys import Service, TlsService
from phalanx.runtime.membership.service import start_network_store
from phalanx.runtime.processes.launch import run_local
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.placement.rebalancer import Rebalancer
from phalanx.train.recovery.run import train_elastic
from phalanx.train.recovery.watch import PHASES
from phalanx.train.run import train
from phalanx_lab.bench.cluster import overrides, tiny_run
from phalanx_lab.bench.storm.board import PhaseBoard
from phalanx_lab.bench.storm.chaos_cluster import ChaosCluster
from phalanx_lab.bench.storm.watch import StormWatch

TIMEOUT_S = 60.0
"""Timeout of collectives. Nothing may ever wait for it."""
ENDLESS = 1_000_000
"""Steps of a run that the storm ends."""
STORM, CALM = "storm", "calm"


@dataclass(frozen=True, kw_only=True)
class StormSetup:
    """What a storm trains, and on what."""

    mode: Literal["exact", "fast"] = "exact"
    hosts: int = 4
    slots: int = 1
    f: int = 2
    ep: int = 2
    interval: int = 20
    """Steps between checkpoints."""
    limit_s: float = 1.0
    """Limit of heartbeats in seconds."""
    hang_s: float = 1.5
    """Limit of ranks that are still, in seconds."""
    service: str = ""
    """Its address in the recipe."""

    @property
    def ranks(self) -> int:
        return self.hosts * self.slots


def recipe_words(setup: StormSetup, folder: Path, *, host: str = "") -> list[str]:
    """Overrides of the recipe of one host."""
    own: dict[str, object] = {
        "router.bias_rate": 0.01,
        "data.sources": f'["{folder / "text"}"]',
        "data.validation_fraction": 0.2,
        "train.steps": ENDLESS,
        "train.seq_len": 32,
        "train.global_batch": 14,
        "train.micro_batch": 2,
        "optim.lr": 3e-4 if setup.mode == "fast" else 3e-3,
        "optim.schedule": "constant",  # steps must not depend on how many the storm lets the run have
        "optim.warmup_steps": 10,
        "optim.zero": 0,
        "folding.ep": setup.ep,
        "resilience.mode": setup.mode,
        "resilience.heal": "true",
        "resilience.f": setup.f,
        "resilience.service": setup.service,
        "resilience.wanted": setup.ranks,
        "resilience.limit_s": setup.limit_s,
        "resilience.hang_s": setup.hang_s,
        "checkpoint.interval": setup.interval,
        "launch.ranks": setup.slots,
        "launch.threads": 1,
        "launch.timeout_s": TIMEOUT_S,
        "launch.host": host or "h0",
    }
    return overrides(tiny_run(folder / "runs", STORM, folder / "cache", own))


def recipe_of(setup: StormSetup, folder: Path, *, host: str = "") -> Recipe:
    """Raises `ConfigError` with all that is wrong."""
    return load_recipe(None, recipe_words(setup, folder, host=host), check=lambda r: run_problems(r, world=setup.ranks))


def calm_recipe(setup: StormSetup, folder: Path, *, steps: int, ranks: int) -> Recipe:
    """The same training of `steps` steps on `ranks` local ranks, that cannot recover and is not hurt."""
    recipe = recipe_of(setup, folder)
    return replace(
        recipe,
        run=replace(recipe.run, name=CALM),
        train=replace(recipe.train, steps=steps),
        resilience=replace(recipe.resilience, heal=False, service=None, wanted=None),
        checkpoint=replace(recipe.checkpoint, interval=0),
        launch=replace(recipe.launch, ranks=ranks, host=None),
    )


def train_calmly(setup: StormSetup, folder: Path, *, steps: int) -> Path:
    """The undisturbed run; its folder."""
    ranks = setup.ranks if setup.mode == "fast" else 2
    recipe = calm_recipe(setup, folder, steps=steps, ranks=ranks)
    run_local(lambda info, stop: train(recipe, info, stop, hook=Rebalancer), ranks=ranks, threads=1)
    folder = Path(recipe.run.folder) / recipe.run.name
    if final_step(folder) != steps:
        raise RunError(f"the undisturbed run ended after {final_step(folder)} of {steps} steps")
    return folder


class TrainerChaosCluster(ChaosCluster):
    """Hosts are processes of this machine, forked with everything imported."""

    def __init__(self, setup: StormSetup, folder: Path, *, service: Service | None = None) -> None:
        """`service`: the one at `setup.service`; None: keep one."""
        board = PhaseBoard(setup.ranks, PHASES)
        import_now()
        kept = start_network_store("127.0.0.1", 0) if service is None else service
        super().__init__(hosts=setup.hosts, slots=setup.slots, folder=folder, board=board, service=kept)
        if isinstance(self.service, TlsService):
            setup = replace(setup, service=f"{self.service.host}:{self.service.port}")
        self.setup = setup

    def _host(self, name: str, start: int) -> int:
        first = self.names.index(name) * self.slots
        watch = StormWatch(self.board, self.folder, host=name, start=start, first=first)
        return train_elastic(recipe_of(self.setup, self.folder, host=name), threads=1, watch=watch)


# ---- what a run ends with


def final_step(run: Path) -> int | None:
    """Final step of its newest checkpoint."""
    return CheckpointManager(run / "checkpoints").choose()


def tensors_at_the_end(run: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the newest checkpoint of a run."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    manager = CheckpointManager(run / "checkpoints")
    step = manager.choose()
    if step is None:
        return {}
    found = dcp.FileSystemReader(manager.folder.of(step)).read_metadata().state_dict_metadata
    boxes = []
    for key, meta in found.items():
        assert isinstance(meta, TensorStorageMetadata)
        shape = tuple(meta.size)
        tensor = torch.empty(shape, dtype=meta.properties.dtype)
        boxes.append(BoxTensor(key, shape, Box((0,) * len(shape), shape), tensor, True))
    manager.load(boxes, step=step)
    return {box.name: box.tensor for box in boxes}


def digests(run: Path) -> dict[str, str]:
    """Name of each tensor at the end -> digest of its bytes."""
    return {
        name: hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
        for name, x in tensors_at_the_end(run).items()
    }


def different(mine: dict[str, str], other: dict[str, str]) -> Sequence[str]:
    """Names of tensors that are not the same."""
    return sorted(name for name in {*mine, *other} if mine.get(name) != other.get(name))
