"""Whether this machine has the GPUs that its ranks need."""

from __future__ import annotations

from typing import Literal

import torch

from phalanx.core.errors import ConfigError, Problem


def device_here(local_ranks: int, *, num_gpus: int | None = None) -> Literal["cpu", "cuda"]:
    """What `launch.device = "auto"` is for so many ranks of this machine, which has `num_gpus` (None: as many as torch counts, which asks the driver and makes no context of CUDA).

    Raises `ConfigError` where there are GPUs, but not one for every rank.
    """
    found = torch.cuda.device_count() if num_gpus is None else num_gpus
    if found >= local_ranks:
        return "cuda"
    if not found:
        return "cpu"
    rule = f'"auto" means GPUs here, and this machine has {found} for {local_ranks} ranks'
    hint = f"--launch.device cpu, or {found} rank{'s' if found > 1 else ''} (--launch.ranks {found})"
    raise ConfigError.of("launch.device", "auto", rule, hint, subject="the recipe")


def gpu_problems(*, wanted: int, ranks: int, num_gpus: int) -> list[Problem]:
    """Each of the `ranks` of this machine needs a GPU of its own, of which this process must find `wanted`."""
    if num_gpus == 0:
        rule, hint = "needs a GPU that torch can use, and finds none on this machine", "use cpu, or see `nvidia-smi`"
        return [Problem(where="launch.device", value="cuda", rule=rule, hint=hint)]
    if wanted > num_gpus:
        rule = f"must be at most the GPUs of this machine ({num_gpus}), one for each rank"
        return [Problem(where="launch.ranks", value=ranks, rule=rule, hint=f"use {num_gpus}")]
    return []
