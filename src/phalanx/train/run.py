"""A run on a world that stays as it is, on one rank: build, resume, train, and say how it went.

    build_trainer     recipe -> a `Trainer` that stands after the step from which it goes on
    train             all of it, with the errors and the closing words

Must never change: whoever is lost ends the run, and the same command goes on from its newest checkpoint.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, raise_if
from phalanx.core.events import Note, RunEnded
from phalanx.observe import print_summary
from phalanx.plan.mapping import ModelSpec
from phalanx.runtime.checkpoint import CheckpointManager
from phalanx.runtime.comm import StopRequest, WorldInfo, close_world, own_group
from phalanx.train.build import make_loader, make_parts
from phalanx.train.loop import Trainer
from phalanx.train.reporting import RunProgress, summary_of
from phalanx.train.saving import load_state, read_run_state
from phalanx.train.setup import PATIENCE_S, Rank, open_rank, prepare_text, resolve_pipeline, resolve_shape
from phalanx.train.step_hook import StepHook

MakeStepHook = Callable[[Recipe, ModelSpec], StepHook]
"""Makes what goes with the steps of a run (`train/placement/`)."""


def train(recipe: Recipe, info: WorldInfo, stop: StopRequest, *, hook: MakeStepHook) -> int:
    """Run `recipe` as rank `info.rank`; returns the exit code. Raises `PhalanxError` for whatever a person can act on."""
    rank, begin_s = open_rank(recipe, info), time.monotonic()
    trainer = None
    with rank.sinks:
        try:
            trainer = build_trainer(rank, stop, hook=hook)
            stop.on_request = partial(_say_what_follows, rank)
            outcome = trainer.run()
        except BaseException as err:
            reason = " ".join([f"{type(err).__name__}:", *str(err).splitlines()[:2]])
            step = trainer.step if trainer is not None else 0
            rank.sinks(RunEnded(step=step, reason=reason, seconds=time.monotonic() - begin_s))
            raise
        rank.sinks(RunEnded(step=outcome.step, reason=outcome.reason, seconds=time.monotonic() - begin_s))
    if rank.speaks:
        print_summary(summary_of(rank.folder.path, outcome, seconds=time.monotonic() - begin_s))
    close_world()
    return 0


def _say_what_follows(rank: Rank) -> None:
    """The answer to Ctrl-C, where the display is drawn: whatever else writes to the terminal would tear it."""
    text = "Finishing the step and saving a checkpoint. Press Ctrl-C again to stop immediately."
    if rank.speaks:
        rank.sinks(Note(level="info", text=text))
    elif rank.info.rank == 0:
        print(text, file=sys.stderr, flush=True)


def build_trainer(rank: Rank, stop: StopRequest, *, hook: MakeStepHook) -> Trainer:
    """Everything that a run needs, resumed where there is something to resume. Collective."""
    recipe = rank.recipe
    manager = CheckpointManager(
        rank.folder.checkpoints.path,
        group=own_group(rank.info.world, timeout_s=PATIENCE_S),  # disks are slow; a peer that died is noticed at once
        keep_last=recipe.checkpoint.keep_last,
        asynchronous=recipe.checkpoint.asynchronous and recipe.checkpoint.interval > 0,
        write_rate=recipe.checkpoint.write_rate,
    )
    left = manager.open()
    found = _resume_step(rank, manager)
    prepared = prepare_text(rank, resume=_train_fingerprint(rank, found), stop=stop)
    spec, folding = resolve_shape(recipe, world=rank.info.world, tokenizer_vocab=prepared.tokenizer.vocab_size)
    pipeline = resolve_pipeline(recipe, spec, folding)
    loader = make_loader(recipe, prepared)
    step = 0 if found is None else read_run_state(manager, recipe, spec, loader, found=found)
    parts = make_parts(rank, spec, folding, pipeline)
    if found is not None:
        load_state(manager, parts, found=found)
    # Running the kept file again must not go back again.
    kept = replace(recipe, checkpoint=replace(recipe.checkpoint, step=None))
    rank.peers.first(lambda: rank.folder.write_recipe(kept, prepared.tokenizer))
    _tell_of_folder(rank, manager, left)
    return Trainer(
        rank=rank, stop=stop, prepared=prepared, spec=spec, folding=folding, parts=parts, loader=loader, manager=manager,
        hook=hook(recipe, spec), progress=RunProgress(start=step, step=step),
    )  # fmt: skip


def _resume_step(rank: Rank, manager: CheckpointManager) -> int | None:
    """The checkpoint to go on from, or None for a new run."""
    config = rank.recipe.checkpoint
    if config.resume:
        return manager.choose(config.step)
    rank.peers.first(lambda: raise_if(rank.folder.mixing_problems(), ConfigError, subject="the recipe"))
    return None


def _train_fingerprint(rank: Rank, step: int | None) -> str | None:
    """What the run that goes on was trained on, so that preparation finds it again."""
    if step is None:
        return None
    found = rank.peers.first(lambda: rank.folder.checkpoints.read_state(step).loader.get("data"))
    return str(found) if found is not None else None


def _tell_of_folder(rank: Rank, manager: CheckpointManager, left: list[str]) -> None:
    """Say what was done to old checkpoints, and set aside those that the recipe goes back behind. Collective."""
    step = rank.recipe.checkpoint.step
    if left:
        rank.sinks(Note(level="info", text=f"removed what an interrupted save left: {', '.join(left)}"))
    if step is not None and (aside := manager.go_back(step)):
        text = f"later checkpoints are in checkpoints/abandoned: {', '.join(aside)}"
        rank.sinks(Note(level="info", text=text))
