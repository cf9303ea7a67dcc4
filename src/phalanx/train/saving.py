"""The checkpoints of a run, as one rank of one membership makes them: when one is due, what is said of it, and what the last one must be.

    between     between two steps: hear of the save under way, begin the one that is due or that the last generation did not complete
    now, last   a checkpoint of this very step, before members leave and at the end of the run

Must never change: a checkpoint of step n holds the state after n committed steps and nothing of the next; a save that fails costs a warning while
training goes on, and is an error at the end.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from phalanx.core.config import Recipe
from phalanx.core.errors import CheckpointError, ConfigError
from phalanx.core.events import CheckpointSaved, Emit, Note
from phalanx.core.reading import parse_table
from phalanx.core.recipe import dump_recipe
from phalanx.data import Loader, what_changed
from phalanx.plan.mapping import AnyFolding
from phalanx.plan.model import ModelSpec
from phalanx.runtime.checkpoint import CheckpointManager, RunState, Saved
from phalanx.train.setup import versions
from phalanx.train.step import StepParts, check_saved

AGAIN_S = 10.0
"""Seconds between two tries of the last save."""


@dataclass(kw_only=True, eq=False)
class Saving:
    """One rank's part of it."""

    recipe: Recipe
    manager: CheckpointManager
    tell: Emit
    state_after: Callable[[int], RunState]
    """What a checkpoint says of the run after so many steps."""
    on_saved: Callable[[], None]
    """Called when a checkpoint is complete."""
    on_begin: Callable[[Literal["checkpoint"]], None]
    """Called before this rank works on a checkpoint."""
    wait_s: float = 0.0
    """How long the last save is tried again where the disk refuses it, every `AGAIN_S`."""
    begun: int | None = None
    """Step of the newest checkpoint that was begun, or gone on from."""

    def between(self, parts: StepParts, step: int, *, first: bool) -> None:
        """What is due after `step` steps. `first`: this membership has done nothing between steps yet, so the last one may have left a
        checkpoint incomplete; then it is waited for, or members that come and go could keep it from ever being complete. Collective."""
        if self.manager.pending:
            self.on_begin("checkpoint")
        self.hear()
        interval = self.recipe.checkpoint.interval
        if interval and (first or step % interval == 0) and self._lacks(step, interval):
            self.on_begin("checkpoint")
            self.save(parts, step)
            self.hear(wait=first)

    def _lacks(self, step: int, interval: int) -> bool:
        """Whether the checkpoint that was due last is missing: one that was under way when a generation ended is lost. Collective."""
        due = step // interval * interval
        if not due:
            return False
        self.hear(wait=due == step)  # one that is still written talks over the same groups
        newest = self._newest()
        return newest != due if due == step else newest is None or newest < due

    def _newest(self) -> int | None:
        """The newest checkpoint. A disk that fails costs a warning: a run whose members hold everything goes on."""
        try:
            return self.manager.choose()
        except CheckpointError as err:
            self._warn_of(err)
            return None

    def _warn_of(self, err: CheckpointError) -> None:
        self.tell(Note(level="warning", text=f"{err}\ntraining continues; the next checkpoint tries again"))

    def save(self, parts: StepParts, step: int) -> None:
        """Begin a checkpoint, once the one before is complete. Collective."""
        self.hear(wait=True)
        check_saved(parts, step=step)
        self.manager.save(parts.state.boxes(), self.state_after(step))
        self.begun = step

    def hear(self, *, wait: bool = False) -> None:
        """Tell about saves that ended. One that failed costs a warning: training goes on, and what was saved before is there."""
        try:
            saved = self.manager.finish() if wait else self.manager.poll()
        except CheckpointError as err:
            self._warn_of(err)
            return
        if saved is not None:
            self._tell_saved(saved)
            self.on_saved()

    def _tell_saved(self, saved: Saved) -> None:
        self.tell(
            CheckpointSaved(
                step=saved.step,
                path=str(saved.path),
                bytes=saved.bytes,
                blocked_s=saved.blocked_s,
                total_s=saved.total_s,
            )
        )
        if saved.not_deleted:
            text = (
                f"{saved.not_deleted}\nthe checkpoint of step {saved.step} is complete; older ones could not be deleted"
            )
            self.tell(Note(level="warning", text=text))
        if saved.not_pinned:
            text = f"checkpoints are copied to memory that is not pinned, which stops training for longer: {saved.not_pinned}"
            self.tell(Note(level="warning", text=text))

    def now(self, parts: StepParts, step: int) -> bool:
        """Whether a checkpoint holds the state after `step` steps, made now where there is none. Collective."""
        self.hear(wait=True)
        if self._newest() != step:
            self.save(parts, step)
            self.hear(wait=True)
        return self._newest() == step

    def last(self, parts: StepParts, step: int) -> None:
        """The state at the end must be on the disk: here a failure is an error, whichever save it was. Collective."""
        self.hear(wait=True)
        newest = self.manager.choose()
        if step and (self.begun != step or newest != step):
            saved = self._save_patiently(parts, step)
            if saved is not None:
                self._tell_saved(replace(saved, blocked_s=saved.total_s))

    def _save_patiently(self, parts: StepParts, step: int) -> Saved | None:
        """Saves, again and again where the disk refuses: what these ranks hold is nowhere else. All ranks hear of a failure together, and try as often."""
        check_saved(parts, step=step)
        left_s = self.wait_s
        while True:
            try:
                self.manager.save(parts.state.boxes(), self.state_after(step))
                return self.manager.finish()
            except CheckpointError as err:
                if left_s <= 0:
                    raise
                if left_s == self.wait_s:
                    text = f"{err}\nthe ranks keep the state of step {step} and try again for {self.wait_s:g} s (checkpoint.wait_s): make room now"
                    self.tell(Note(level="warning", text=text))
                time.sleep(min(AGAIN_S, left_s))
                left_s -= AGAIN_S

    def drop(self) -> None:
        """Discard the save under way: the members that would complete it are not in the next generation, or know of no save."""
        if self.manager.pending:
            text = f"Membership changed while checkpoint {self.begun} was being written; it was discarded and will be saved again right away"
            self.tell(Note(level="info", text=text))
        self.manager.close()


def run_state(recipe: Recipe, spec: ModelSpec, folding: AnyFolding, loader: Loader, step: int) -> RunState:
    """What a checkpoint says of a run after `step` steps on the ranks of `folding`."""
    t = recipe.train
    samples = step * t.global_batch
    return RunState(
        step=step,
        samples=samples,
        tokens=samples * t.seq_len,
        seed=t.seed,
        loader=loader.state(step),
        model=parse_table(spec.to_json(), where="the model"),
        model_hash=spec.hash,
        recipe_hash=hashlib.sha256(dump_recipe(recipe).encode()).hexdigest()[:16],
        folding=folding.to_dict(),
        world=folding.world,
        versions=versions(),
    )


def read_run_state(manager: CheckpointManager, recipe: Recipe, spec: ModelSpec, loader: Loader, *, found: int) -> int:
    """Check the checkpoint of step `found` against this run; returns the number of steps that are done. Collective.

    Raises `CheckpointError` where it is damaged or another run's, `ConfigError` where the run has done more steps than it is to have.
    """
    state = manager.read_state(found, model=parse_table(spec.to_json(), where="the model"))
    changed = partial(what_changed, Path(recipe.data.cache))
    step = loader.check_state(state.loader, changed=changed) if state.loader else found  # an import drew no sample yet
    if step > recipe.train.steps:
        rule = f"is less than the {step} steps that this run has done"
        hint = f"use {step} or more, another --run.name, or --checkpoint.step to go back"
        raise ConfigError.of("train.steps", recipe.train.steps, rule, hint, subject="the recipe")
    return step


def load_state(manager: CheckpointManager, parts: StepParts, *, found: int) -> None:
    """Read the checkpoint of step `found` into the state of `parts`, which may have no memory yet. Collective."""
    parts.state.make_room()
    manager.load(parts.state.boxes(), step=found)
    parts.state.restore(parts.comms)
