"""Back to a checkpoint, where no member holds all state of a run any more: which one, what becomes of later ones, and what is said.

Must never change: a checkpoint that cannot be used is passed over and named, never used in part; what was saved is moved at most, never deleted; all
members take the same one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from phalanx.core.errors import CheckpointError, FinalError
from phalanx.core.events import Emit, Note, WentBack
from phalanx.observe import warn_without_screen
from phalanx.plan.mapping import ModelSpec
from phalanx.runtime.checkpoint import CheckpointManager
from phalanx.train.trainer import Trainer, check_length

T = TypeVar("T")


def despite_disk(work: Callable[[], T], otherwise: T, tell: Emit) -> T:
    """What `work` finds among the checkpoints. Where the disk fails a warning, and `otherwise`: a run whose members hold everything goes on."""
    try:
        return work()
    except CheckpointError as err:
        tell(Note(level="warning", text=f"{err}\ntraining goes on; the next checkpoint tries again"))
        return otherwise


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """The checkpoint that was loaded."""

    step: int
    damaged: tuple[CheckpointError, ...]
    """Why newer ones were not."""
    damaged_steps: tuple[int, ...]


def newest_sound(trainer: Trainer, spec: ModelSpec) -> Fallback | None:
    """Load the newest checkpoint that is whole into the trainer's state; None where there is none at all. Collective.

    Raises `FinalError` with all that is wrong where there are checkpoints and none can be used, `PeerError` where a member is lost.
    """
    manager, damaged, steps = trainer.manager, list[CheckpointError](), list[int]()
    for found in manager.candidates():
        try:
            step = load_checkpoint(trainer, manager, spec, found)
        except CheckpointError as err:
            damaged.append(err)
            steps.append(found)
            continue
        return Fallback(step=step, damaged=tuple(damaged), damaged_steps=tuple(steps))
    if damaged:
        text = "\n".join(str(err) for err in damaged)
        raise FinalError(f"no member holds all state of the run any more, and no checkpoint of it can be used\n{text}")
    return None


def load_checkpoint(trainer: Trainer, manager: CheckpointManager, spec: ModelSpec, found: int) -> int:
    """Read the checkpoint of step `found` whole; returns the step to go on with. Collective; raises `CheckpointError` on all members."""
    state = manager.read_state(found, model=json.loads(spec.to_json()))
    step = trainer.loader.check_state(state.loader) if state.loader else found  # an import drew no sample yet
    check_length(trainer.rank.recipe, step)
    manager.load(trainer.parts.state.boxes(), step=found)
    trainer.parts.state.restore(trainer.parts.comms)
    return step


def set_later_aside(trainer: Trainer, step: int) -> tuple[str, ...]:
    """Checkpoints after `step` can never be the newest again; a disk that refuses it costs a warning. Collective."""
    try:
        return tuple(trainer.manager.go_back(step))
    except CheckpointError as err:
        text = f"{err}\nlater checkpoints stay where they are: remove them, or they may count as the newest"
        trainer.rank.sinks(Note(level="warning", text=text))
        return ()


def tell_went_back(trainer: Trainer, found: Fallback, *, why: str, committed: int | None, history: int) -> None:
    """To a person and to the ledger. Collective, as later checkpoints are set aside first, and whoever draws may not be back yet: then the first member says it."""
    aside, sinks = set_later_aside(trainer, found.step), trainer.rank.sinks
    for step, err in zip(found.damaged_steps, found.damaged, strict=True):
        sinks(
            Note(
                level="warning",
                text=f"the checkpoint of step {step} cannot be used, the next older one is tried: {err}",
            )
        )
    lost = "" if committed is None else f", {committed - found.step} steps before"
    moved = f"; later checkpoints are in checkpoints/abandoned: {', '.join(aside)}" if aside else ""
    text = f"{why}: training goes back to the checkpoint of step {found.step}{lost}{moved}"
    sinks(Note(level="warning", text=text))
    sinks(
        WentBack(
            history=history,
            step=found.step,
            from_step=committed,
            why=why,
            damaged=found.damaged_steps,
            abandoned=aside,
        )
    )
    shown = any(trainer.rank.peers.gather(sinks.has_screen)) or trainer.rank.recipe.observe.console == "none"
    if not shown and trainer.rank.info.rank == 0:
        warn_without_screen(text)
