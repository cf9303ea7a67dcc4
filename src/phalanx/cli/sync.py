"""Deliver the weights of a run to an inference mesh of another layout: one file for each of its ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from phalanx.core.arguments import read_words
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.files import check_writable, new_folder, write_json
from phalanx.core.units import format_bytes

if TYPE_CHECKING:
    from phalanx.runtime.processes import StopRequest, WorldInfo
    from phalanx.train.sync import SyncPlan


@dataclass(frozen=True, kw_only=True)
class SyncArgs:
    """Deliver the weights of a run to an inference mesh of another layout."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run, such as runs/laptop."""
    to: Annotated[str, tyro.conf.arg(metavar="LAYOUT")]
    """Degrees of the inference mesh, such as tp4.dp2 or tp2.ep2; what is left out is 1. It has tp x cp x dp ranks."""
    out: Annotated[Path, tyro.conf.arg(metavar="DIR")]
    """New folder: a safetensors file for each rank of the mesh, and index.json, which says where each part of each tensor is."""
    memory: Annotated[str, tyro.conf.arg(metavar="BYTES")] = "256MB"
    """Most that one process holds of weights at a time; tensors larger than that travel in parts."""
    readers: int = 2
    """Processes that read the checkpoint, each a share of every wave."""
    step: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Checkpoint to read. Default: the newest."""
    dtype: Annotated[str | None, tyro.conf.arg(metavar="TYPE")] = None
    """bfloat16, float32 or float64. Default: train.dtype."""
    check: bool = False
    """Read everything again and compare it with the checkpoint before the folder gets its name."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the figures: waves, bytes held and received by each rank."""


def main(args: list[str]) -> int:
    """Run `phalanx sync ARGS...`; returns the exit status."""
    options = read_words(SyncArgs, args, prog="phalanx sync", description=__doc__)
    check_writable(options.json)
    if options.json is not None:  # --out may be the folder that the command runs in, which is then another one
        options = replace(options, json=options.json.absolute())
    from phalanx.runtime.processes import read_world, run_local, run_one
    from phalanx.train.sync import plan_sync

    plan = plan_sync(
        options.run,
        options.out,
        to=options.to,
        memory=options.memory,
        readers=options.readers,
        step=options.step,
        dtype=options.dtype,
    )
    launched = read_world()
    raise_if(_launch_problems(plan, launched), ConfigError, subject="the launch")
    body = partial(_rank, plan, options)
    if launched is not None:
        return run_one(body, launched, threads=1)
    return run_local(body, ranks=plan.world, threads=1)


def _launch_problems(plan: SyncPlan, launched: WorldInfo | None) -> list[Problem]:
    if launched is None or launched.world == plan.world:
        return []
    rule = f"is not {plan.readers} readers and {plan.folding.world} receivers"
    return [Problem(where="WORLD_SIZE", value=launched.world, rule=rule, hint=f"start {plan.world} ranks")]


def _rank(plan: SyncPlan, options: SyncArgs, info: WorldInfo, stop: StopRequest) -> int:
    """One rank; the first one speaks, checks and gives the folder its name."""
    from phalanx.train.sync import check_sync, finish_sync, run_sync

    if info.rank != 0:
        run_sync(plan, info)
        return 0
    print(plan.explain(), flush=True)
    with new_folder(plan.target, writer="sync"):
        reports = run_sync(plan, info)
        compared = check_sync(plan) if options.check else 0
        finish_sync(plan)
    most = max(r.held_bytes + r.staging_bytes for r in reports)
    print(f"{options.out}: {len(plan.waves)} waves, at most {format_bytes(most)} held by a process")
    if options.check:
        print(f"{format_bytes(compared)} read again and compared with the checkpoint: equal")
    figures = {"waves": len(plan.waves), "memory_bytes": plan.memory_bytes, "peak_held_bytes": most}
    write_json(options.json, {**figures, "compared_bytes": compared, "ranks": [asdict(r) for r in reports]})
    return 0
