"""A run on one rank: build, resume, step, validate, save, and say how it went.

    build_trainer     recipe -> Trainer that stands after the step it resumes from
    Trainer.run       the loop; every rank takes the same turns, the vote of each step says when to stop
    train             all of it, with the errors and the closing words

Must never change: a step counts only when `train_step` has committed it; a checkpoint of step n holds the state after n committed steps and
nothing of the next; all ranks leave the loop after the same step.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import metadata
from typing import Literal

import torch

from phalanx.core.config import Recipe
from phalanx.core.errors import CheckpointError, ConfigError, Problem, raise_if
from phalanx.core.events import (
    CheckpointSaved,
    Note,
    RunEnded,
    RunStarted,
    Sampled,
    SamplesTaken,
    StepEnded,
    Validated,
    WarmupChosen,
)
from phalanx.core.processor import this_processor
from phalanx.core.recipe import dump_recipe
from phalanx.core.samples import num_rounds
from phalanx.data import Loader, MicroBatch, Prefetch, Prepared, ValidationLoader
from phalanx.models import TokenBatch, part_of
from phalanx.observe import print_summary
from phalanx.plan.mapping import AnyFolding, AnyPlacement, ModelSpec, flops_per_token, to_json_dict
from phalanx.plan.pipeline import Pipeline
from phalanx.runtime.checkpoint import CheckpointManager, RunState, Saved
from phalanx.runtime.comm import StopRequest, WorldInfo, close_world, own_group
from phalanx.train.assemble import assemble
from phalanx.train.closing import Outcome, summary_of
from phalanx.train.exact import exact_sums
from phalanx.train.generate import Sampling, generate
from phalanx.train.machine import matmul_flops_per_s
from phalanx.train.optim import learning_rate
from phalanx.train.passes import choose_measured
from phalanx.train.placement.replacing import Prepared as NewPlacement, Replacing
from phalanx.train.recording import Recorder
from phalanx.train.run_folder import RunStatus
from phalanx.train.setup import (
    PATIENCE_S,
    Rank,
    make_context,
    open_rank,
    prepare_text,
    resolve_pipeline,
    resolve_shape,
)
from phalanx.train.step import StepParts, StepResult, eval_loss, train_step
from phalanx.train.warm import warm_kernels
from phalanx.train.warmup import PassTimes, with_none_ahead

SAMPLE_TOKENS = 80
PROMPT_TOKENS = 12
PREFETCH_STEPS = 2


def train(recipe: Recipe, info: WorldInfo, stop: StopRequest) -> int:
    """Run `recipe` as rank `info.rank`; returns the exit code. Raises `PhalanxError` for whatever a person can act on."""
    rank, begin_s = open_rank(recipe, info), time.monotonic()
    trainer = None
    with rank.sinks:
        try:
            trainer = build_trainer(rank, stop)
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
    text = "finishing the step and saving a checkpoint; once more stops at once"
    if rank.speaks:
        rank.sinks(Note(level="info", text=text))
    elif rank.info.rank == 0:
        print(text, file=sys.stderr, flush=True)


# ---- building --------------------------------------------------------------------------------------------------------


def build_trainer(rank: Rank, stop: StopRequest) -> Trainer:
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
    step = resume_step(rank, manager)
    prepared = prepare_text(rank, resume=_train_fingerprint(rank, step), stop=stop)
    spec, folding = resolve_shape(recipe, world=rank.info.world, tokenizer_vocab=prepared.tokenizer.vocab_size)
    pipeline = resolve_pipeline(recipe, spec, folding)
    if recipe.pipeline.extra_warmup == "auto":
        pipeline = with_none_ahead(pipeline)
    loader = make_loader(recipe, prepared)
    if step is not None:
        state = manager.read_state(step, model=json.loads(spec.to_json()))
        step = loader.check_state(state.loader) if state.loader else step  # an import drew no sample yet
        check_length(recipe, step)
    parts = make_parts(rank, spec, folding, pipeline)
    if step is not None:
        manager.load(parts.state.boxes(), step=step)
        parts.state.restore(parts.comms)
    kept = replace(
        recipe, checkpoint=replace(recipe.checkpoint, step=None)
    )  # running the file again must not go back again
    rank.peers.first(lambda: rank.folder.write_recipe(kept, prepared.tokenizer))
    if left:
        rank.sinks(Note(level="info", text=f"removed what an interrupted save left: {', '.join(left)}"))
    if recipe.checkpoint.step is not None and (aside := manager.go_back(recipe.checkpoint.step)):
        text = f"later checkpoints are in checkpoints/abandoned: {', '.join(aside)}"
        rank.sinks(Note(level="info", text=text))
    return Trainer(
        rank=rank, stop=stop, prepared=prepared, spec=spec, folding=folding, parts=parts, loader=loader, manager=manager,
        start=step or 0,
    )  # fmt: skip


def make_parts(
    rank: Rank,
    spec: ModelSpec,
    folding: AnyFolding,
    pipeline: Pipeline,
    *,
    warm: bool = True,
    drawn: bool = True,
    placement: AnyPlacement | None = None,
    hosts: Sequence[int] | None = None,
    racks: Sequence[int] = (),
) -> StepParts:
    """Groups, and this rank's part of a freshly initialised run. Collective.

    `warm`: kernels first meet the shapes that vary (`train/warm.py`). `drawn`: weights get their initial values; else their state must come from elsewhere. `placement` of the experts of its stage; None: as the recipe says. `hosts` of all
    ranks, for copies of shards; None: each stands for one. `racks` likewise; empty: not known.
    """
    recipe, microbatches = rank.recipe, microbatches_per_rank(rank.recipe, folding)
    ctx = replace(make_context(rank, spec, folding, pipeline, placement), drawn=drawn)
    if warm:
        t = recipe.train
        warm_kernels(ctx, micro_batch=t.micro_batch, seq_len=t.seq_len, processor=this_processor())
    parts = assemble(
        ctx,
        optim=recipe.optim,
        num_microbatches=microbatches,
        pipeline=pipeline,
        samples=recipe.train.global_batch // recipe.train.micro_batch,
        exact=exact_sums(recipe.resilience, recipe.train, folding, spec=spec, rank=rank.info.rank),
        holders=recipe.resilience.shard_holders,
        hosts=hosts,
        racks=racks,
    )
    parts.runner.agree(microbatches)
    return parts


def resume_step(rank: Rank, manager: CheckpointManager) -> int | None:
    """The checkpoint to go on from, or None for a new run."""
    config = rank.recipe.checkpoint
    if config.resume:
        return manager.choose(config.step)

    def refuse_to_mix() -> None:
        steps = manager.folder.steps()
        rule = f"would start over in {rank.folder.path}, which holds checkpoints of steps {', '.join(map(str, steps))}"
        hint = "give the run another --run.name, or remove that folder"
        problem = Problem(where="checkpoint.resume", value=False, rule=rule, hint=hint)
        raise_if([problem] if steps else [], ConfigError, subject="the recipe")

    rank.peers.first(refuse_to_mix)
    return None


def _train_fingerprint(rank: Rank, step: int | None) -> str | None:
    """What the run that goes on was trained on, so that preparation finds it again."""
    if step is None:
        return None
    found = rank.peers.first(lambda: rank.folder.checkpoints.read_state(step).loader.get("data"))
    return str(found) if found is not None else None


def check_length(recipe: Recipe, step: int) -> None:
    if step > recipe.train.steps:
        rule, hint = (
            f"is less than the {step} steps that this run has done",
            f"use {step} or more, or --checkpoint.step",
        )
        raise ConfigError(
            [Problem(where="train.steps", value=recipe.train.steps, rule=rule, hint=hint)], subject="the recipe"
        )


def make_loader(recipe: Recipe, prepared: Prepared) -> Loader:
    t = recipe.train
    return Loader(
        prepared.train, seq_len=t.seq_len, global_batch=t.global_batch, micro_batch=t.micro_batch, seed=t.seed,
        any_ranks=recipe.resilience.mode != "off",
    )  # fmt: skip


def microbatches_per_rank(recipe: Recipe, folding: AnyFolding) -> int:
    return num_rounds(recipe.train.global_batch // recipe.train.micro_batch, owners=folding.replicas)


def token_batch(micro: MicroBatch, device: torch.device, *, folding: AnyFolding, rank: int) -> TokenBatch:
    """The part of a micro-batch of the loader that `rank` works on, as tensors on `device`."""
    tokens, labels, positions = (torch.from_numpy(a).to(device) for a in (micro.tokens, micro.labels, micro.positions))
    whole = TokenBatch(
        tokens_BS=tokens, labels_BS=labels, positions_BS=positions, segments=micro.segments,
        is_empty=micro.is_empty,
    )  # fmt: skip
    return part_of(whole, folding, rank)


# ---- running ---------------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Trainer:
    """One rank of a run that is ready to step. `start` steps are done already."""

    rank: Rank
    stop: StopRequest
    prepared: Prepared
    spec: ModelSpec
    folding: AnyFolding
    parts: StepParts
    loader: Loader
    manager: CheckpointManager
    start: int

    def __post_init__(self) -> None:
        recipe = self.rank.recipe
        t = recipe.train
        self.total_steps = t.steps
        self.step = self.start
        """Steps committed."""
        self.saved_step = self.start if self.start else None
        """Step of the newest checkpoint that was begun."""
        self.history = 0
        """Of a run that heals itself (`WentBack`)."""
        self.validation = ValidationLoader(
            self.prepared.validation, seq_len=t.seq_len, global_batch=t.global_batch, micro_batch=t.micro_batch,
            batches=t.eval_batches, any_ranks=recipe.resilience.mode != "off",
        )  # fmt: skip
        self.recorder = Recorder(
            recipe.observe.trace_steps, comms=self.parts.comms, peers=self.rank.peers, emit=self.rank.sinks
        )
        self.flops_per_token = flops_per_token(self.spec, t.seq_len)
        self.peak_flops_per_s = 0.0
        self.replacing = Replacing(recipe, self.spec)
        self.last_loss: float | None = None
        self.last_validation: tuple[int, float] | None = None

    @cached_property
    def recipe_hash(self) -> str:
        """For checkpoints."""
        return hashlib.sha256(dump_recipe(self.rank.recipe).encode()).hexdigest()[:16]

    # ---- the loop

    def run(self) -> Outcome:
        """Step until the end or until some rank wants to stop; then save, validate and write a sample. Collective."""
        self._measure_machine()
        self.announce()
        interrupted = self._run_steps()
        self.save_last()
        if interrupted:
            return self.outcome("interrupted", None)
        self.validate()
        shown = self.rank.recipe.observe.console != "none"
        return self.outcome("finished", self.sample() if shown else None)

    def _run_steps(self) -> bool:
        steps = range(self.start, self.total_steps)
        with Prefetch(self.load, steps, depth=PREFETCH_STEPS) as batches:
            for step in steps:
                self.recorder.prepare(step + 1)
                begin_s = time.perf_counter()
                with self.recorder.recording(step + 1):
                    with self.parts.comms.doing("data", "host"):
                        micros = next(batches)
                    data_s = time.perf_counter() - begin_s
                    result = self._step(step, [self.token_batch(m) for m in micros])
                self.step, self.last_loss = step + 1, result.loss
                self.replacing.committed(result.counts_LE)
                self.report(result, micros, step_s=time.perf_counter() - begin_s, data_s=data_s)
                self.recorder.tell()
                self.hear_of_checkpoints()
                if result.stop:
                    return self.step < self.total_steps
                self._between_steps()
        return False

    def _step(self, step: int, batches: Sequence[TokenBatch]) -> StepResult:
        lr = learning_rate(step, self.rank.recipe.optim, total_steps=self.total_steps)
        if step != self.start or self.rank.recipe.pipeline.extra_warmup != "auto":
            return train_step(self.parts, batches, step=step, lr=lr, stop=self.stop.requested, companion=self.replacing)
        measured = replace(self.parts, times=PassTimes())
        result = train_step(measured, batches, step=step, lr=lr, stop=self.stop.requested)
        self._choose_warmup(measured, batches)
        return result

    def _choose_warmup(self, measured: StepParts, batches: Sequence[TokenBatch]) -> None:
        """From the second step on as many forwards ahead as the first one's times ask for. Collective."""
        choice = choose_measured(measured.runner, batches, memory_gb=self.rank.recipe.pipeline.memory_gb)
        pipeline = replace(self.parts.pipeline, extra_warmup=choice.extra_warmup)
        self.parts = replace(self.parts, pipeline=pipeline)
        self.parts.runner.agree(len(batches))
        self.rank.sinks(
            WarmupChosen(
                step=self.start + 1, extra_warmup=choice.extra_warmup, transfer_s=choice.costs.p2p,
                forward_s=choice.costs.forward, backward_s=choice.costs.backward, live_bytes=choice.live_bytes,
                reason=choice.explain(),
            )
        )  # fmt: skip

    def _between_steps(self) -> None:
        """Validation, checkpoints and another placement that are due, but not those that the end of the run makes anyway."""
        recipe = self.rank.recipe
        if self.step == self.total_steps:
            return
        if recipe.train.eval_interval and self.step % recipe.train.eval_interval == 0:
            self.validate()
        if recipe.checkpoint.interval and self.step % recipe.checkpoint.interval == 0:
            self.save()
        self.recorder.prepare(self.step + 1)
        found = self.replacing.between(self.parts, self.rank, step=self.step, recorder=self.recorder)
        if found is not None:
            self.move_in(found)

    def move_in(self, new: NewPlacement) -> None:
        """From here on experts are where `new` has them; what was held before is dropped."""
        self.parts.buffers.close()
        self.parts = new.parts
        self.rank.sinks(new.event)

    def load(self, step: int) -> list[MicroBatch]:
        return self.loader.microbatches(step, dp_index=self._replica, dp_size=self.folding.replicas)

    def token_batch(self, micro: MicroBatch) -> TokenBatch:
        return token_batch(micro, self.rank.device, folding=self.folding, rank=self.rank.info.rank)

    @property
    def _first_of_replica(self) -> bool:
        """Of the ranks that work on the same samples one keeps the ledger."""
        rank = self.rank.info.rank
        first = all(self.folding.coord(rank, axis) == 0 for axis in ("tp", "cp", "pp"))
        return first and self.folding.share_of(rank)[0] == 0

    @property
    def _replica(self) -> int:
        return self.folding.replica_of(self.rank.info.rank)

    # ---- what a person sees

    def _measure_machine(self) -> None:
        """All ranks at once, as they compute in training."""
        self.rank.peers.gather(None)
        rate = matmul_flops_per_s(self.parts.model.dtype, self.rank.device)
        self.peak_flops_per_s = sum(self.rank.peers.gather(rate))

    def announce(self) -> None:
        info, run = self.rank.info, self.rank.recipe.run
        self.rank.sinks(
            RunStarted(
                run=run.name, rank=info.rank, world=info.world, step=self.start, total_steps=self.total_steps,
                num_params=self.spec.num_params, active_params=self.spec.active_params, folding=self.folding.label(),
                flops_per_token=self.flops_per_token, peak_flops_per_s=self.peak_flops_per_s,
                unigram_loss=self.prepared.unigram_loss,
            )
        )  # fmt: skip
        if self.start == self.total_steps:
            text = f"all {self.total_steps} steps of this run are done; --train.steps with a larger number goes on"
            self.rank.sinks(Note(level="info", text=text))
        self._write_status("running")

    def report(
        self,
        result: StepResult,
        micros: Sequence[MicroBatch],
        *,
        step_s: float,
        data_s: float,
        slowness: float | None = None,
    ) -> None:
        tokens_per_s = result.tokens / step_s
        peak = self.peak_flops_per_s
        self.rank.sinks(
            StepEnded(
                step=self.step, loss=result.loss, aux_loss=result.aux_loss, z_loss=result.z_loss,
                mtp_loss=result.mtp_loss,
                grad_norm=result.grad_norm, lr=result.lr, tokens=result.tokens, step_s=step_s, data_s=data_s,
                tokens_per_s=tokens_per_s, mfu=self.flops_per_token * tokens_per_s / peak if peak else 0.0,
                load_max_over_mean=result.load_max_over_mean, dead_experts=result.dead_experts,
                dropped_tokens=result.dropped, router_entropy=result.entropy,
                peak_memory_bytes=self.rank.memory.peak_bytes(),
                exposed_forward_s=result.exchange.exposed_forward_s, hidden_forward_s=result.exchange.hidden_forward_s,
                exposed_backward_s=result.exchange.exposed_backward_s, hidden_backward_s=result.exchange.hidden_backward_s,
                slowness=slowness,
            )
        )  # fmt: skip
        if self._first_of_replica:
            taken = [m for m in micros if not m.is_empty]
            windows = tuple(int(w) for m in taken for w in m.sample_ids)
            numbers = tuple(m.index for m in taken)
            self.rank.sinks(SamplesTaken(step=self.step, microbatches=numbers, windows=windows, history=self.history))

    def validate(self) -> None:
        begin_s = time.perf_counter()
        batches = [
            self.token_batch(micro)
            for number in range(self.validation.num_batches)
            for micro in self.validation.microbatches(number, dp_index=self._replica, dp_size=self.folding.replicas)
        ]
        loss, tokens = eval_loss(self.parts, batches, step=self.step)
        self.parts.comms.complete(self.rank.device)
        self.last_validation = (self.step, loss)
        seconds = time.perf_counter() - begin_s
        self.rank.sinks(Validated(step=self.step, loss=loss, tokens=tokens, seconds=seconds))

    def sample(self) -> Sampled:
        """A continuation of the first validation text. All ranks compute it (the model is spread over them), all get the same."""
        first = self.validation.microbatches(0)[0]
        prompt = first.tokens[0][: min(PROMPT_TOKENS, first.segments[0][0])].tolist()
        tokenizer = self.prepared.tokenizer
        new = generate(
            self.parts.runner, prompt, num_tokens=SAMPLE_TOKENS, window=self.rank.recipe.train.seq_len,
            vocab=tokenizer.vocab_size, sampling=Sampling(seed=self.rank.recipe.train.seed),
        )  # fmt: skip
        tokens = list(new)
        if tokenizer.eos_id in tokens:
            tokens = tokens[: tokens.index(tokenizer.eos_id)]
        sampled = Sampled(step=self.step, prompt=tokenizer.decode(prompt), text=tokenizer.decode(tokens))
        self.rank.sinks(sampled)
        return sampled

    # ---- checkpoints

    def save(self) -> None:
        self.hear_of_checkpoints(wait=True)
        self.manager.save(self.parts.state.boxes(), self._run_state())
        self.saved_step = self.step

    def hear_of_checkpoints(self, *, wait: bool = False) -> None:
        """Tell about saves that ended. One that failed costs a warning: training goes on, and what was saved before is there."""
        try:
            saved = self.manager.finish() if wait else self.manager.poll()
        except CheckpointError as err:
            self.rank.sinks(Note(level="warning", text=f"{err}\ntraining goes on; the next checkpoint tries again"))
            return
        if saved is not None:
            self._tell_saved(saved)
            self._write_status("running")

    def _tell_saved(self, saved: Saved) -> None:
        self.rank.sinks(
            CheckpointSaved(
                step=saved.step, path=str(saved.path), bytes=saved.bytes, blocked_s=saved.blocked_s,
                total_s=saved.total_s,
            )
        )  # fmt: skip

    def save_last(self) -> None:
        """The state at the end must be on the disk: here a failure is an error, whichever save it was."""
        self.hear_of_checkpoints(wait=True)
        newest = self.manager.choose()
        if self.step and (self.saved_step != self.step or newest != self.step):
            self.manager.save(self.parts.state.boxes(), self._run_state())
            saved = self.manager.finish()
            if saved is not None:
                self._tell_saved(replace(saved, blocked_s=saved.total_s))

    def _run_state(self) -> RunState:
        t = self.rank.recipe.train
        samples = self.step * t.global_batch
        return RunState(
            step=self.step, samples=samples, tokens=samples * t.seq_len, seed=t.seed, loader=self.loader.state(self.step),
            model=json.loads(self.spec.to_json()), model_hash=self.spec.hash, recipe_hash=self.recipe_hash,
            folding=to_json_dict(self.folding), world=self.rank.info.world, versions=versions(),
        )  # fmt: skip

    def _write_status(self, status: Literal["running", "finished", "interrupted"]) -> None:
        """For people and scripts; a disk that refuses it does not end training."""
        if self.rank.info.rank != 0:
            return
        try:
            self.rank.folder.write_status(
                RunStatus(
                    status=status, step=self.step, total_steps=self.total_steps,
                    samples=self.step * self.rank.recipe.train.global_batch,
                    checkpoint_step=self.manager.folder.newest(),
                    validation_loss=self.last_validation[1] if self.last_validation else None,
                    unigram_loss=self.prepared.unigram_loss,
                )
            )  # fmt: skip
        except OSError as err:
            text = f"{self.rank.folder.path}: the status cannot be written ({err.strerror})"
            self.rank.sinks(Note(level="warning", text=text))

    def outcome(self, reason: Literal["finished", "interrupted"], sample: Sampled | None) -> Outcome:
        self._write_status(reason)
        (at, loss), t = self.last_validation or (None, None), self.rank.recipe.train
        return Outcome(
            reason=reason, step=self.step, total_steps=self.total_steps,
            tokens=(self.step - self.start) * t.global_batch * t.seq_len, loss=self.last_loss,
            validation_loss=loss, validation_step=at,
            unigram_loss=self.prepared.unigram_loss, sample=sample,
        )  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of what decides a run."""
    found = {"python": platform.python_version()}
    for package in ("phalanx", "torch", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found
