"""Where a run goes on: its checkpoints are opened, one of them is chosen, those after it are set aside, and each of these is reported.

A run in a fixed world (`train/run.py`) and members that come and go (`train/recovery/`) do it alike. What is in a checkpoint is read by `train/saving.py`.

Must never change: going back moves later checkpoints and deletes none; the same command, run again, goes back once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from phalanx.core.config import Recipe
from phalanx.core.errors import CheckpointError, FinalError
from phalanx.core.events import Note
from phalanx.runtime.checkpoint import CheckpointFolder, CheckpointManager, Writer
from phalanx.train.setup import Rank, RunFolder


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
        lost=rank.lost,
        writer=writer,
    )
    if later:
        manager.open_later()
    elif left := manager.open():
        rank.sinks(Note(level="info", text=f"removed what an interrupted save left: {', '.join(left)}"))
    return manager


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """The checkpoint that was loaded."""

    step: int
    damaged: tuple[CheckpointError, ...] = ()
    """Why newer ones were not."""
    damaged_steps: tuple[int, ...] = ()


def start_candidates(recipe: Recipe, folder: CheckpointFolder) -> list[int]:
    """Checkpoints that a start may go on from, the one that it should first: several only with `checkpoint.fall_back`. Raises `CheckpointError` where the recipe names one that is not there."""
    if not recipe.checkpoint.resume:
        return []
    if recipe.checkpoint.fall_back and recipe.checkpoint.step is None:
        return folder.candidates()
    found = folder.choose(recipe.checkpoint.step)
    return [] if found is None else [found]


def trained_text(folder: RunFolder, candidates: Sequence[int]) -> str | None:
    """Fingerprint of the run's text, from the first checkpoint whose run state can be read. Raises `CheckpointError` where there are some and none can."""
    failed: CheckpointError | None = None
    for step in candidates:
        try:
            return folder.trained_text(step)
        except CheckpointError as err:
            failed = failed or err
    if failed is not None:
        raise failed
    return None


def load_newest(candidates: Sequence[int], load: Callable[[int], int], *, why: str) -> Fallback | None:
    """Load the first of `candidates` that can be read whole; None where there are none. Collective.

    `load` returns the number of steps that are done. Raises `FinalError` (`why`, and all that is wrong) where none can be used.
    """
    damaged: dict[int, CheckpointError] = {}
    for found in candidates:
        try:
            step = load(found)
        except CheckpointError as err:
            damaged[found] = err
        else:
            return Fallback(step=step, damaged=tuple(damaged.values()), damaged_steps=tuple(damaged))
    if damaged:
        raise FinalError("\n".join([f"{why}, and no checkpoint of it can be used", *map(str, damaged.values())]))
    return None


def load_start(rank: Rank, manager: CheckpointManager, candidates: Sequence[int], load: Callable[[int], int]) -> int:
    """The step from which a start goes on, loaded, or 0; checkpoints that it goes back behind are set aside. Collective."""
    if not candidates:
        return 0
    if len(candidates) == 1:  # its own error says how to go on
        step = load(candidates[0])
        leave_later(rank, manager)
        return step
    found = load_newest(candidates, load, why="the run was to resume from a checkpoint")
    assert found is not None
    if found.damaged:
        aside = set_later_aside(rank, manager, found.step)
        text = "; ".join(" ".join(str(err.problems[0]).split()) for err in found.damaged)
        text = f"the newest checkpoint is damaged ({text}); training resumes from that of step {found.step}"
        rank.sinks(Note(level="warning", text=f"{text}. Kept in checkpoints/abandoned: {', '.join(aside) or 'none'}"))
    return found.step


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
