"""A run on a world that stays as it is, on one rank: build, resume, train, and say how it went.

    build_trainer     recipe -> a `Trainer` that stands after the step from which it goes on
    train             all of it, with the errors and the closing words

Must never change: whoever is lost ends the run, and the same command goes on from its newest checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from phalanx.core.config import Recipe
from phalanx.core.events import Note
from phalanx.core.process import say
from phalanx.plan import resolve_shape
from phalanx.plan.model import ModelSpec
from phalanx.runtime.comm import own_group
from phalanx.runtime.processes import STOPPING, StopRequest, WorldInfo, close_world
from phalanx.train.build import make_loader, make_parts
from phalanx.train.loop import Trainer
from phalanx.train.reporting import RunEnd, RunProgress
from phalanx.train.resume import load_start, open_checkpoints, recipe_to_keep, start_candidates, trained_text
from phalanx.train.saving import load_state, read_run_state
from phalanx.train.setup import PATIENCE_S, Rank, open_rank, prepare_text, resolve_pipeline, tell_uncompiled
from phalanx.train.step_hook import StepHook

MakeStepHook = Callable[[Recipe, ModelSpec], StepHook]
"""Makes what goes with the steps of a run (`train/placement/`)."""


SETTING_UP = "Stopping as soon as the run is set up. Press Ctrl-C again to stop immediately."


def train(recipe: Recipe, info: WorldInfo, stop: StopRequest, *, hook: MakeStepHook) -> int:
    """Run `recipe` as rank `info.rank`; returns the exit code. Raises `PhalanxError` for whatever a person can act on."""
    rank = open_rank(recipe, info)
    stop.on_request = partial(_acknowledge, rank, SETTING_UP)
    assert rank.lost is not None  # of a fixed run
    trainer = None
    with (
        rank.sinks,
        RunEnd(rank.sinks, lambda: trainer.step if trainer is not None else 0) as end,
        rank.lost.telling(partial(_last_words, rank, end)),
    ):
        trainer = build_trainer(rank, stop, hook=hook)
        stop.on_request = partial(_acknowledge, rank, STOPPING)
        outcome = trainer.run()
        end.reason = outcome.reason
    if rank.speaks:
        end.summarize(rank.folder.path, outcome)
    close_world()
    if rank.lock is not None:
        rank.lock.close()
    return 0


def _last_words(rank: Rank, end: RunEnd, error: BaseException) -> None:
    end.tell(error)
    rank.sinks.close()


def _acknowledge(rank: Rank, text: str) -> None:
    """Answer Ctrl-C where the display is drawn: whatever else writes to the terminal would tear it."""
    if rank.speaks:
        rank.sinks(Note(level="info", text=text))
    elif rank.info.rank == 0:
        say(text)


def build_trainer(rank: Rank, stop: StopRequest, *, hook: MakeStepHook) -> Trainer:
    """Everything that a run needs, resumed where there is something to resume. Collective."""
    recipe = rank.recipe
    # a group of its own: disks are slow; a peer that died is noticed at once
    manager = open_checkpoints(
        rank, group=own_group(rank.info.world, timeout_s=recipe.launch.timeout_s, patience_s=PATIENCE_S)
    )
    if not recipe.checkpoint.resume:
        rank.peers.first(rank.folder.refuse_mixing)
    candidates = rank.peers.first(lambda: start_candidates(recipe, manager.folder))
    text = rank.peers.first(lambda: trained_text(rank.folder, candidates))
    prepared = prepare_text(rank, resume=text, stop=stop)
    spec, folding = resolve_shape(recipe, world=rank.info.world, tokenizer_vocab=prepared.tokenizer.vocab_size)
    pipeline = resolve_pipeline(recipe, spec, folding)
    loader = make_loader(recipe, prepared)
    parts = make_parts(rank, spec, folding, pipeline, drawn=not candidates)
    if rank.info.rank == 0:
        tell_uncompiled(recipe, rank.device, emit=rank.sinks)

    def load(found: int) -> int:
        step = read_run_state(manager, recipe, spec, loader, found=found)
        load_state(manager, parts, found=found)
        return step

    step = load_start(rank, manager, candidates, load)
    rank.peers.first(lambda: rank.folder.write_recipe(recipe_to_keep(recipe), prepared.tokenizer, prepared.template))
    return Trainer(
        rank=rank, stop=stop, prepared=prepared, spec=spec, folding=folding, parts=parts, loader=loader, manager=manager,
        hook=hook(recipe, spec), progress=RunProgress(start=step, step=step),
    )  # fmt: skip
