"""Where a run goes on: its checkpoints are opened, one of them is chosen, those after it are set aside, and each of these is reported.

A run in a fixed world (`train/run.py`) and members that come and go (`train/recovery/`) do it alike. What is in a checkpoint is read by `train/saving.py`.

Must never change: going back moves later checkpoints and deletes none; the same command, run again, goes back once.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from phalanx.core.config import Recipe
from phalanx.core.errors import CheckpointError
from phalanx.core.events import Note
from phalanx.runtime.checkpoint import CheckpointManager, Writer
from phalanx.train.setup import Rank


def open_checkpoints(
    rank: Rank, *, group: dist.ProcessGroup | None, writer: Writer | None = None, later: bool = False
) -> CheckpointManager:
    """The checkpoints of the run of `rank`, for `group` alone to talk over. Collective.

    `writer`: the generation that saves, one of several; each save is then completed between later steps. `later`: the folder exists and is opened
    with the first save, so that no rank waits for it now.
    """
    config = rank.recipe.checkpoint
    manager = CheckpointManager(
        rank.folder.checkpoints.path,
        group=group,
        keep_last=config.keep_last,
        asynchronous=config.asynchronous and config.interval > 0,
        by_steps=writer is not None,
        write_rate=config.write_rate,
        escape=rank.escape,
        writer=writer,
    )
    if later:
        manager.open_later()
    elif left := manager.open():
        rank.sinks(Note(level="info", text=f"removed what an interrupted save left: {', '.join(left)}"))
    return manager


def choose_start(recipe: Recipe, manager: CheckpointManager) -> int | None:
    """The checkpoint that `recipe` says to go on from, or None for a new run. Collective."""
    return manager.choose(recipe.checkpoint.step) if recipe.checkpoint.resume else None


def leave_later(rank: Rank, manager: CheckpointManager) -> None:
    """Set aside the checkpoints that the recipe goes back behind. Collective; call it once the one that was asked for is loaded."""
    step = rank.recipe.checkpoint.step
    if step is not None and (aside := set_later_aside(rank, manager, step)):
        text = f"checkpoints after step {step} are now in checkpoints/abandoned: {', '.join(aside)}"
        rank.sinks(Note(level="info", text=text))


def set_later_aside(rank: Rank, manager: CheckpointManager, step: int) -> tuple[str, ...]:
    """Checkpoints after `step` can never be the newest again; a disk that refuses it costs a warning. Collective."""
    try:
        return tuple(manager.go_back(step))
    except CheckpointError as err:
        text = f"{err}\nlater checkpoints stay where they are: remove them, or they may count as the newest"
        rank.sinks(Note(level="warning", text=text))
        return ()


def recipe_to_keep(recipe: Recipe) -> Recipe:
    """What the run folder keeps of `recipe`: running that file must not go back again, and no host says there what it is called."""
    launch = replace(recipe.launch, host=None, rack=None, keep_service=False)
    return replace(recipe, checkpoint=replace(recipe.checkpoint, step=None), launch=launch)
