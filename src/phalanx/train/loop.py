"""The loop of training, as one rank runs it: a step is computed, decided and committed; what is due between two steps stands before the next one.

    compute    parameters of the last step for all ranks ─ what is due since it ─ forward, backward, sums of gradients, figures of all ranks (`train/step/transaction.py`)
    decide     whether the step counts, and what follows it
    commit     the update, which needs no other rank; then the step is reported
    close      the last checkpoint, the last validation, a sample

    due        how many forwards go ahead in the pipeline (once) ─ validation ─ checkpoint ─ experts that move

A fixed world is a membership of one generation, which always commits: `Trainer.run`. Where members come and go (`train/recovery/`) each generation has a trainer,
`runtime/membership/member.py` decides with all members, and a step that was lost is computed again in the next generation, with what is due before it.

Must never change: a step counts only once it is decided, and nothing that it computes is visible before `commit`; a checkpoint of step n holds the state after n
committed steps and nothing of the next; all ranks leave the loop after the same step.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from phalanx.core.errors import FinalError, PeerError, RunError, UnsoundError
from phalanx.core.events import Note, Sampled, WarmupChosen
from phalanx.data import Loader, MicroBatch, Prefetch, PreparedData, Tokenizer, ValidationLoader, continued
from phalanx.models import TokenBatch
from phalanx.plan.mapping import AnyFolding, LayerPlacements
from phalanx.plan.model import ModelSpec
from phalanx.runtime.checkpoint import CheckpointManager
from phalanx.runtime.membership import Decision, run_steps
from phalanx.runtime.processes import StopRequest
from phalanx.train.build import token_batch
from phalanx.train.generation import Sampling, generate
from phalanx.train.recording import Recorder
from phalanx.train.reporting import Outcome, Reporter, RunProgress, Team
from phalanx.train.saving import Saving, run_state
from phalanx.train.setup import Rank, lasting_rate, matmul_flops_per_s, rated_flops_per_s
from phalanx.train.step import (
    PassTimes,
    ReducedStep,
    StepParts,
    StepResult,
    choose_measured,
    commit_step,
    eval_loss,
    learning_rate,
    measures_warmup,
    publish,
    reduce_step,
)
from phalanx.train.step_hook import NOWHERE, NewPlacement, StepHook, Where

SAMPLE_TOKENS = 80
PROMPT_TOKENS = 12
PREFETCH_STEPS = 2

At = Literal["data", "forward", "commit", "checkpoint"]


@dataclass(kw_only=True, eq=False)
class Elastic:
    """What a trainer of one of several generations needs to know of its members."""

    where: Where
    """Where the ranks of its mapping are."""
    others_idle: bool
    """Whether there are members for which the mapping has no rank."""
    pace: Callable[[StepResult], float | None]
    """Called with each committed step; returns how slow the slowest member is."""
    at: Callable[[At], None]
    """Called with what the rank does next."""
    team: Team


def beginning(batch: MicroBatch, tokenizer: Tokenizer) -> tuple[list[int], set[int]]:
    """First tokens of the first text in `batch`, of a conversation all up to its first answer, and the tokens that end what follows."""
    tokens, predicted = batch.tokens[0].tolist(), batch.labels[0] >= 0
    asked = int(predicted.argmax())
    if not asked:
        return tokens[: min(PROMPT_TOKENS, batch.segments[0][0])], {tokenizer.eos_id}
    answered = int((~predicted[asked:]).argmax()) or len(tokens) - asked
    last = int(batch.labels[0][asked + answered - 1])
    return tokens[: asked + 1], {tokenizer.eos_id} if tokenizer.decode([last]) else {tokenizer.eos_id, last}


@dataclass(frozen=True, kw_only=True)
class _Reduced:
    """A step that waits for its decision."""

    step: ReducedStep
    micros: list[MicroBatch]
    begin_s: float
    data_s: float


@dataclass(kw_only=True)
class _Measured:
    """The first step, whose passes say how many forwards go ahead from then on."""

    times: PassTimes
    batches: Sequence[TokenBatch] = ()
    """Batches of that step, once it was computed."""


@dataclass(kw_only=True, eq=False)
class Trainer:
    """One rank that is ready to step, in a world that is fixed or in one generation of members."""

    rank: Rank
    stop: StopRequest
    """Asked of this rank alone; members that come and go are asked to stop through their service."""
    prepared: PreparedData
    spec: ModelSpec
    folding: AnyFolding
    parts: StepParts
    loader: Loader
    manager: CheckpointManager
    hook: StepHook
    progress: RunProgress
    elastic: Elastic | None = None
    """None: the world is fixed, and whoever is lost ends the run."""
    moving: NewPlacement | None = field(default=None, init=False)
    """Experts lie there from the commit of the step on that is computed with it."""

    def __post_init__(self) -> None:
        recipe, progress = self.rank.recipe, self.progress
        t = recipe.train
        self.total_steps = t.steps
        self._at: Callable[[At], None] = (lambda name: None) if self.elastic is None else self.elastic.at
        self.due = False
        """Whether what belongs between steps is still to do; the same on all ranks."""
        self.validation = ValidationLoader(
            self.prepared.validation, seq_len=t.seq_len, global_batch=t.global_batch, micro_batch=t.micro_batch,
            batches=t.eval_batches, any_ranks=recipe.resilience.mode != "off",
        )  # fmt: skip
        self.recorder = Recorder(
            recipe.observe.trace_steps, comms=self.parts.comms, peers=self.rank.peers, emit=self.rank.sinks
        )
        self.reporter = Reporter(
            rank=self.rank, spec=self.spec, folding=self.folding, prepared=self.prepared, progress=progress,
            newest_checkpoint=self.manager.folder.newest,
        )  # fmt: skip
        self.saving = Saving(
            recipe=recipe, manager=self.manager, tell=self.rank.sinks, begun=progress.step or None,
            state_after=partial(run_state, recipe, self.spec, self.folding, self.loader),
            wait_s=recipe.checkpoint.wait_s, on_begin=self._at, on_saved=partial(self.reporter.write_status, "running"),
        )  # fmt: skip
        self._first = False
        """Whether nothing was done between steps in this generation yet; the same on all members."""
        self._measured = _Measured(times=PassTimes()) if measures_warmup(recipe, self.parts.pipeline) else None
        self._reduced: _Reduced | None = None
        self._batches: Prefetch[list[MicroBatch]] | None = None

    def go_on(self, progress: RunProgress, hook: StepHook) -> None:
        """Take up a run where other members left it: no member may have done yet what is due after its last step."""
        self.progress = self.reporter.progress = progress
        self.hook, self.saving.begun = hook, progress.step or None
        self.due, self._first = progress.step > 0, True

    @property
    def step(self) -> int:
        """Steps committed."""
        return self.progress.step

    # ---- a fixed world

    def run(self) -> Outcome:
        """All steps, or those until some rank wants to stop; then what a run ends with. Collective."""
        self._measure_machine()
        self.reporter.announce()
        self.tell_placed("start", self.hook.placements(self.parts, self.rank))
        try:
            run_steps(self, self._step)
        finally:
            self.drop_batches()
        outcome = self.close(stopped=not self.finished())
        if self.elastic is None:
            self.rank.peers.part(timeout_s=self.rank.recipe.launch.timeout_s)
        return outcome

    def _measure_machine(self) -> None:
        """All ranks at once, as they compute in training."""
        self.rank.peers.gather(None)
        rank, dtype = self.rank, self.parts.model.dtype
        threads, sharing = rank.lanes.count, rank.info.local_world
        measured = matmul_flops_per_s(dtype, rank.device, threads=threads)
        rate = lasting_rate(measured, dtype=dtype, device=rank.device, threads=threads, sharing=sharing)
        rates = rank.peers.gather((rate, rated_flops_per_s(rank.device, dtype)))
        self.reporter.peak_flops_per_s, self.reporter.rated_flops_per_s = (sum(of) for of in zip(*rates, strict=True))

    def tell_placed(self, why: str, placements: Sequence[LayerPlacements]) -> None:
        """Who holds what from the next step on. `placements` of each stage of the pipeline, where experts have replicas."""
        team = Team() if self.elastic is None else self.elastic.team
        self.reporter.placed(why, self.parts.pipeline.stages, placements, team=team)

    def _step(self) -> Decision:
        """One step, which counts on all ranks once it is reduced on all."""
        try:
            stop = self.compute().tally.stop
        except BaseException:
            self.abort()
            raise
        self.commit()
        return Decision(commit=True, then="stop" if stop else "go on")

    # ---- a step

    def finished(self) -> bool:
        """Whether all steps are done; the same answer on all ranks at the same step."""
        return self.step >= self.total_steps

    def compute(self) -> ReducedStep:
        """Do what is due and then one step, up to its sums and votes; changes no state. Collective.

        Raises `RunError` where the step is not finite, `FinalError` where other members would compute it again; `PeerError` where a rank is lost.
        """
        with self.recorder.publishing():
            publish(self.parts)
        self.recorder.prepare(self.step + 1)
        if self.due:
            self._between_steps()
            self.due = False
        self.recorder.begin(self.step + 1)
        begin_s = time.perf_counter()
        self._at("data")
        with self.parts.comms.doing("data", "host"):
            micros = self._next_batch()
        data_s = time.perf_counter() - begin_s
        self._at("forward")
        parts, batches = self._parts_of_step(), [self.token_batch(m) for m in micros]
        reduced = self._reduce(parts, batches)
        for text in reduced.findings:
            self.rank.sinks(Note(level="warning", text=f"step {self.step + 1} was given up and made again: {text}"))
        self.hook.reduced(parts, reduced)
        if self.elastic is not None:
            self.parts.comms.complete(self.rank.device)
        if self._measured is not None:
            self._measured.batches = batches
        self._reduced = _Reduced(step=reduced, micros=micros, begin_s=begin_s, data_s=data_s)
        return reduced

    def _parts_of_step(self) -> StepParts:
        parts = self.parts if self.moving is None else self.moving.parts
        return parts if self._measured is None else replace(parts, times=self._measured.times)

    def _reduce(self, parts: StepParts, batches: Sequence[TokenBatch]) -> ReducedStep:
        lr = learning_rate(self.step, self.rank.recipe.optim, total_steps=self.total_steps)
        try:
            return reduce_step(parts, batches, step=self.step, lr=lr, stop=self.stop.requested)
        except (PeerError, UnsoundError):
            raise
        except RunError as err:
            if self.elastic is None:
                raise
            # The numbers of a device may come from a member that was lost; then the next line raises `PeerError`.
            parts.comms.complete(self.rank.device)
            # Else they are a function of state and samples, and would be the same again.
            raise FinalError(str(err)) from None

    def _next_batch(self) -> list[MicroBatch]:
        """Loaded ahead, as long as these are the ranks: others would have other shares."""
        if self._batches is None:
            self._batches = Prefetch(self.load, range(self.step, self.total_steps), depth=PREFETCH_STEPS)
        return next(self._batches)

    def commit(self) -> None:
        """Apply the step that was computed, and tell of it. Needs no other rank where members come and go."""
        done, self._reduced = self._reduced, None
        if done is None:
            raise RunError("cannot commit a step whose gradient was not reduced")
        self.recorder.decided()
        self._at("commit")
        self.manager.order()
        if self.moving is not None:
            self._move_in(self.moving)
        result = commit_step(self.parts, done.step)
        self.hook.applied(self.parts, done.step)
        if self.elastic is None:
            publish(self.parts)
        self.progress.step, self.progress.loss, self.due = self.step + 1, result.loss, True
        self.recorder.end()
        self.hook.committed(result.counts_LE)
        slowness = None if self.elastic is None else self.elastic.pace(result)
        step_s = time.perf_counter() - done.begin_s
        self.reporter.step_ended(result, done.micros, step_s=step_s, data_s=done.data_s, slowness=slowness)
        self.recorder.tell()

    def abort(self) -> None:
        """Drop what was reduced, whole or in part."""
        self._reduced = None
        self.recorder.decided()
        self.recorder.end(committed=False)
        self.recorder.tell()
        if self.moving is not None:
            self.moving.parts.buffers.close()
            self.moving = None

    def drop_batches(self) -> None:
        """Discard the batches that were loaded ahead."""
        if self._batches is not None:
            self._batches.close()
        self._batches = None

    # ---- between two steps

    def _between_steps(self) -> None:
        """What is due after the last step, but not what the end of the run makes anyway; again in the next generation where a member is lost in it. Collective."""
        recipe, step = self.rank.recipe, self.step
        if self._measured is not None and self._measured.batches:
            self._choose_warmup(self._measured)
        if recipe.train.eval_interval and step % recipe.train.eval_interval == 0:
            self.validate()
        self.saving.between(self.parts, step, first=self._first)
        self._first = False
        self._move_experts()

    def _choose_warmup(self, measured: _Measured) -> None:
        """Makes the pipeline run, from now on, as many forwards ahead as the measured step's times ask for. Collective."""
        self._measured = None
        runner = replace(self.parts, times=measured.times).runner
        choice = choose_measured(runner, measured.batches, memory_gb=self.rank.recipe.pipeline.memory_gb)
        self.parts = replace(self.parts, pipeline=replace(self.parts.pipeline, extra_warmup=choice.extra_warmup))
        self.parts.runner.agree(len(measured.batches))
        self.rank.sinks(
            WarmupChosen(
                step=self.step,
                extra_warmup=choice.extra_warmup,
                transfer_s=choice.costs.p2p,
                forward_s=choice.costs.forward,
                backward_s=choice.costs.backward,
                live_bytes=choice.live_bytes,
                reason=choice.explain(),
            )
        )

    def _move_experts(self) -> None:
        """Experts that are to lie elsewhere do so from the commit of the next step on, so that all members move them or none; in a fixed world at once."""
        elastic = self.elastic
        self.moving = self.hook.between(
            self.parts,
            self.rank,
            step=self.step,
            where=NOWHERE if elastic is None else elastic.where,
            recorder=self.recorder,
            others_idle=elastic is not None and elastic.others_idle,
        )
        if self.moving is not None and elastic is None:
            self._move_in(self.moving)

    def _move_in(self, new: NewPlacement) -> None:
        """What was held before is dropped."""
        self.manager.order()
        self.parts.buffers.close()
        self.parts, self.moving = new.parts, None
        self.rank.sinks(new.event)
        self.tell_placed(new.event.why, new.placements)

    def validate(self) -> None:
        """The loss over the validation text. Collective."""
        begin_s = time.perf_counter()
        share = {"dp_index": self._replica, "dp_size": self.folding.replicas}
        numbers = range(self.validation.num_batches)
        batches = [self.token_batch(m) for n in numbers for m in self.validation.microbatches(n, **share)]
        loss, tokens = eval_loss(self.parts, batches, step=self.step)
        self.parts.comms.complete(self.rank.device)
        self.reporter.validated(loss, tokens, seconds=time.perf_counter() - begin_s)

    # ---- the end

    def close(self, *, stopped: bool) -> Outcome:
        """Write down what must stay, and say how the run ended. Collective."""
        with self.recorder.publishing():
            publish(self.parts)
        self.saving.last(self.parts, self.step)
        if stopped:
            return self.reporter.outcome("interrupted", None)
        self.validate()
        shown = self.rank.recipe.observe.is_for_people
        return self.reporter.outcome("finished", self._sample() if shown else None)

    def _sample(self) -> Sampled:
        """A continuation of the first validation text. All ranks compute it (the model is spread over them), all get the same."""
        tokenizer = self.prepared.tokenizer
        prompt, stops = beginning(self.validation.microbatches(0)[0], tokenizer)
        new = generate(
            self.parts.runner, prompt, num_tokens=SAMPLE_TOKENS, window=self.rank.recipe.train.seq_len,
            vocab=tokenizer.vocab_size, sampling=Sampling(seed=self.rank.recipe.train.seed),
        )  # fmt: skip
        tokens = list(itertools.takewhile(lambda token: token not in stops, list(new)))
        before, text = continued(tokenizer, prompt, tokens)
        sampled = Sampled(step=self.step, prompt=before, text=text)
        self.rank.sinks(sampled)
        return sampled

    # ---- samples

    def load(self, step: int) -> list[MicroBatch]:
        """This rank's micro-batches of a step."""
        return self.loader.microbatches(step, dp_index=self._replica, dp_size=self.folding.replicas)

    def token_batch(self, micro: MicroBatch) -> TokenBatch:
        """The part of one that this rank works on."""
        return token_batch(micro, self.rank.device, folding=self.folding, rank=self.rank.info.rank)

    @property
    def _replica(self) -> int:
        return self.folding.replica_of(self.rank.info.rank)
