"""A run of local ranks that heals itself: one supervisor, which prepares everything, and workers, which are forked with it.

    parent    run folder and its lock ─ text ─ model and mapping ─ `Supervisor.run`: forks workers, also in the place of those that died
    worker    sinks ─ seat ─ `run_member` with a `HealingBody` ─ the last words

Must never change: the parent runs no tensor operation and has no thread when it forks; whatever is wrong with recipe, text or mapping is an error before it does.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.core.events import RunEnded
from phalanx.core.recipe import dump_recipe
from phalanx.data.prepare import Prepared, prepare
from phalanx.observe.console import wants_live
from phalanx.observe.preparation import PreparationProgress
from phalanx.observe.sinks import open_sinks
from phalanx.observe.summary import print_summary
from phalanx.plan.folding import Folding
from phalanx.plan.heal import Healing, heal_problems
from phalanx.runtime.allocator import keep_freed_memory
from phalanx.runtime.member import run_member
from phalanx.runtime.seat import Seat, SeatSettings
from phalanx.runtime.supervisor import Supervisor, SupervisorSettings
from phalanx.train.assemble import bucket_elements, state_dtype
from phalanx.train.closing import summary_of
from phalanx.train.healing import HealingBody, HealingRun
from phalanx.train.run_folder import RunFolder
from phalanx.train.setup import DTYPES, replicas_of, resolve_pipeline, resolve_shape
from phalanx.train.trainer import versions


def train_healing(recipe: Recipe, *, threads: int, port: int = 0) -> int:
    """Train on `launch.ranks` local ranks until all steps are done, whoever of them dies; returns the exit code.

    `port` of the membership service, 0: a free one. Raises `PhalanxError` for whatever a person can act on.
    """
    folder = RunFolder(Path(recipe.run.folder) / recipe.run.name)
    folder.create()
    lock = folder.lock()  # inherited by the workers: it is free when the last of them has ended
    try:
        run = prepare_run(recipe, folder)
        settings = SupervisorSettings(
            slots=recipe.launch.ranks,
            wanted=recipe.launch.ranks,
            minimum=run.healing.least(),
            seat=SeatSettings(timeout_s=recipe.launch.timeout_s),
        )
        return Supervisor(lambda seat: work(run, seat, threads=threads), settings, port=port).run()
    finally:
        lock.close()


def prepare_run(recipe: Recipe, folder: RunFolder) -> HealingRun:
    """Text, model and mapping; what is left of an interrupted save is removed. Raises `PhalanxError` with all that is wrong."""
    steps = folder.checkpoints.steps()
    if steps and not recipe.checkpoint.resume:
        rule = f"would start over in {folder.path}, which holds checkpoints of steps {', '.join(map(str, steps))}"
        hint = "give the run another --run.name, or remove that folder"
        problem = Problem(where="checkpoint.resume", value=False, rule=rule, hint=hint)
        raise ConfigError([problem], subject="the recipe")
    prepared = _prepare_text(recipe, folder)
    spec, folding = resolve_shape(recipe, world=recipe.launch.ranks, tokenizer_vocab=prepared.tokenizer.vocab_size)
    assert isinstance(folding, Folding)  # the rules refuse stages of their own with a mode, and healing without one
    resolve_pipeline(recipe, spec, folding)  # or what is wrong with it
    asked = replicas_of(recipe, world=folding.world, local_ranks=folding.world)
    replicated = asked.slots_per_rank is not None
    raise_if(heal_problems(folding, floor=asked.f, replicated=replicated), ConfigError, subject="the recipe")
    healing = Healing(
        spec=spec,
        base=folding,
        seq_len=recipe.train.seq_len,
        floor=asked.f,
        pipeline=recipe.pipeline,
        cp_method=recipe.folding.cp_method,
        state_bytes=state_dtype(DTYPES[recipe.train.dtype]).itemsize,
        zero=recipe.optim.zero,
        bucket_elements=bucket_elements(recipe.optim, state_dtype(DTYPES[recipe.train.dtype])),
        slots_per_rank=asked.slots_per_rank,
        loads=asked.loads,
    )
    again = replace(
        recipe, checkpoint=replace(recipe.checkpoint, step=None)
    )  # running the file again must not go back again
    folder.write_recipe(again, prepared.tokenizer)
    return HealingRun(recipe=recipe, folder=folder, prepared=prepared, spec=spec, healing=healing)


def _prepare_text(recipe: Recipe, folder: RunFolder) -> Prepared:
    newest = folder.checkpoints.newest() if recipe.checkpoint.step is None else recipe.checkpoint.step
    known = None
    if newest is not None and newest in folder.checkpoints.steps():
        known = folder.checkpoints.read_state(newest).loader.get("data")
    console = Console() if recipe.observe.console != "none" else None
    live = console is not None and wants_live(recipe.observe, console)
    with PreparationProgress(console, live=live) as bar:
        return prepare(recipe.data, progress=bar, resume=None if known is None else str(known))


def work(run: HealingRun, seat: Seat, *, threads: int) -> int:
    """One worker, in its own process; returns its exit code. Slot 0 is the one that a person watches."""
    recipe, begin_s = run.recipe, time.monotonic()
    torch.set_num_threads(threads)
    keep_freed_memory(threads=threads)
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    slot = int(seat.uid.split(".")[1])
    body = None
    with open_sinks(recipe.observe, folder=run.folder.path, rank=slot) as sinks:
        try:
            body = HealingBody(run, sinks)
            seat.announce(plan_hash=_plan_hash(run), version=versions()["phalanx"])
            why = run_member(seat, body, tell=body.tell, order=body.order)
        except BaseException as err:
            reason = " ".join([f"{type(err).__name__}:", *str(err).splitlines()[:2]])
            sinks(RunEnded(step=body.step if body else 0, reason=reason, seconds=time.monotonic() - begin_s))
            raise
        reason = {"stopped": "interrupted"}.get(why, why)
        sinks(RunEnded(step=body.step, reason=reason, seconds=time.monotonic() - begin_s))
    if slot == 0 and recipe.observe.console != "none" and body.outcome is not None:
        print_summary(summary_of(run.folder.path, body.outcome, seconds=time.monotonic() - begin_s))
    return 0


def _plan_hash(run: HealingRun) -> str:
    """What all members of one run have alike."""
    text = f"{dump_recipe(run.recipe)}\n{run.spec.hash}\n{run.prepared.fingerprint}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
