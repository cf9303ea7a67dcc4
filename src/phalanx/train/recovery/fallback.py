"""Where a generation begins of which no member holds the state of the run: at a checkpoint, or at the beginning of a run that has none.

Must never change: no member initialises anew once a step of the run was committed; a checkpoint that cannot be used is passed over and named, never used in
part; what was saved is moved at most, never deleted; all members take the same one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from phalanx.core.errors import FinalError
from phalanx.core.events import Note, WentBack
from phalanx.observe import warn_without_screen
from phalanx.plan.recovery import GenerationPlan
from phalanx.runtime.membership import GroupEpoch
from phalanx.train import (
    Fallback,
    Trainer,
    load_newest,
    load_start,
    load_state,
    read_run_state,
    set_later_aside,
)


def from_disk(
    trainer: Trainer, team: GroupEpoch, plan: GenerationPlan, *, committed: int | None, candidates: Sequence[int]
) -> int:
    """No member has the state, or not all of it: the step of the newest sound checkpoint, loaded; in a run that has not begun, of those that it may start from (`start_candidates`), or 0."""
    if not team.begun:
        return load_start(trainer.rank, trainer.manager, candidates, partial(_load, trainer))
    what = "no member holds the state of the run any more" if committed is None else plan.explain()
    found = newest_sound(trainer)
    if found is None:
        raise FinalError(
            f"{what}, and there is no checkpoint of it: refusing to restart from scratch. Start the run again under another --run.name, "
            "with a smaller checkpoint.interval or a larger resilience.f"
        )
    tell_went_back(trainer, found, why=what, committed=committed, history=team.generation.number)
    return found.step


def newest_sound(trainer: Trainer) -> Fallback | None:
    """Load the newest checkpoint that is whole into the trainer's state; None where there is none at all. Collective.

    Raises `FinalError` with all that is wrong where there are checkpoints and none can be used, `PeerError` where a member is lost.
    """
    why = "no member holds all state of the run any more"
    return load_newest(trainer.manager.candidates(), partial(_load, trainer), why=why)


def _load(trainer: Trainer, found: int) -> int:
    """Read the checkpoint of step `found` whole; returns the step to go on with. Collective; raises `CheckpointError` on all members."""
    step = read_run_state(trainer.manager, trainer.rank.recipe, trainer.spec, trainer.loader, found=found)
    load_state(trainer.manager, trainer.parts, found=found)
    return step


def tell_went_back(trainer: Trainer, found: Fallback, *, why: str, committed: int | None, history: int) -> None:
    """Tells a person and the ledger. Collective, as later checkpoints are set aside first, and whoever draws may not be back yet:
    then the first member says it."""
    aside, sinks = set_later_aside(trainer.rank, trainer.manager, found.step), trainer.rank.sinks
    for step, err in zip(found.damaged_steps, found.damaged, strict=True):
        text = f"the checkpoint of step {step} cannot be used, trying the next older one: {err}"
        sinks(Note(level="warning", text=text))
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
