"""Where a generation begins of which no member holds the state of the run: at a checkpoint, or at the beginning of a run that has none.

Must never change: nobody initialises anew once a step of the run was committed.
"""

from __future__ import annotations

from phalanx.core.errors import FinalError
from phalanx.core.events import Note
from phalanx.plan.recovery import HealPlan
from phalanx.runtime.membership import Team
from phalanx.train.recovery.fallback import load_checkpoint, newest_sound, set_later_aside, tell_went_back
from phalanx.train.trainer import Trainer


def from_disk(trainer: Trainer, team: Team, plan: HealPlan, *, committed: int | None) -> int:
    """No member has the state, or not all of it: the step of the newest sound checkpoint, loaded, or 0 in a run that has not begun."""
    if not team.begun:
        return _from_the_start(trainer)
    what = "no member holds the state of the run any more" if committed is None else plan.explain()
    found = newest_sound(trainer, trainer.spec)
    if found is None:
        raise FinalError(
            f"{what}, and there is no checkpoint of it; nothing is initialised anew. Start the run again under another --run.name, "
            "with a smaller checkpoint.interval or a larger resilience.f"
        )
    tell_went_back(trainer, found, why=what, committed=committed, history=team.generation.number)
    return found.step


def _from_the_start(trainer: Trainer) -> int:
    """The step that the recipe says to go on from, loaded, or 0."""
    config, manager = trainer.rank.recipe.checkpoint, trainer.manager
    found = manager.choose(config.step) if config.resume else None
    if found is None:
        return 0
    step = load_checkpoint(trainer, manager, trainer.spec, found)
    if config.step is not None:
        aside = set_later_aside(trainer, found)
        if aside:
            text = f"later checkpoints than step {found} are in checkpoints/abandoned: {', '.join(aside)}"
            trainer.rank.sinks(Note(level="info", text=text))
    return step
