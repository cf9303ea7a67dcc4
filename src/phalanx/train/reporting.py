"""What one rank tells of a run: its beginning, every step, its status for scripts, and how it ended.

Everything goes out as events (`core/events.py`), which sinks turn into what a person sees. Must never change: a disk that refuses the status
does not end training.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

from phalanx.core.events import (
    Emit,
    ExpertLoads,
    Note,
    RunEnded,
    RunStarted,
    Sampled,
    SamplesTaken,
    StatePlaced,
    StepEnded,
    Validated,
)
from phalanx.core.messages import message
from phalanx.core.process import flush_or_drop_output, say
from phalanx.core.recipe import untrusted
from phalanx.data import MicroBatch, PreparedData
from phalanx.observe import RunSummary, print_summary, program_name
from phalanx.plan.mapping import AnyFolding, LayerPlacements, StagePlan
from phalanx.plan.model import ModelSpec, flops_per_token
from phalanx.train.setup import Rank, RunStatus
from phalanx.train.step import StepResult


@dataclass(kw_only=True, eq=False)
class RunProgress:
    """How far a run is, as this process knows it. It outlives generations."""

    start: int = 0
    """Steps that were done when this process took part first."""
    step: int = 0
    """Steps committed."""
    history: int = 0
    """Generation in which the run last went back to a checkpoint (`WentBack`), as far as what is held here belongs to that."""
    loss: float | None = None
    """Loss of the last step; None where this process has made none."""
    validation: tuple[int, float] | None = None
    """(step, loss) of the last one."""


@message
@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    reason: Literal["finished", "interrupted"]
    step: int
    total_steps: int
    tokens: int
    """Trained by this process."""
    loss: float | None
    """Loss of the last step; None where this process did none."""
    validation_loss: float | None
    validation_step: int | None
    unigram_loss: float
    sample: Sampled | None
    talks: bool
    """Trained on conversations."""
    needs_trust: bool = False
    """Its own recipe file goes on with it only where the command line trusts it."""


LOADS_S = 5.0
LOADS_SHARE = 500
"""Loads of experts are told at most every 5 s, and about 500 times while the time that a process has trained grows by a factor of e: some tens of MB in a month."""


MOST_SLOTS = 150_000
"""More are not told: a line of the log that is longer than 1 MiB is not read."""


@dataclass(frozen=True, kw_only=True)
class Team:
    """Members of a generation of an elastic run, as `StatePlaced` tells them."""

    members: tuple[str, ...] = ()
    hosts: tuple[int, ...] = ()
    minimum: int = 0
    holders: int = 0


@dataclass(kw_only=True, eq=False)
class Reporter:
    """Tells what one rank does."""

    rank: Rank
    spec: ModelSpec
    folding: AnyFolding
    prepared: PreparedData
    progress: RunProgress
    newest_checkpoint: Callable[[], int | None]
    """The step of the newest one; raises `OSError` where the disk cannot be read."""
    peak_flops_per_s: float = 0.0
    """Peak FLOP/s of all ranks together, as measured; 0: not known."""
    rated_flops_per_s: float = 0.0
    """The same by the data sheet of their GPUs, against which utilisation is told where it is known."""

    def __post_init__(self) -> None:
        self.flops_per_token = flops_per_token(self.spec, self.rank.recipe.train.seq_len)
        self.total_steps = self.rank.recipe.train.steps
        self._begin_s, self._loads_s = time.monotonic(), -math.inf
        """When it began, and when loads were told last."""

    @property
    def _keeps_ledger(self) -> bool:
        """Whether this one, of the ranks that work on the same samples, tells which they were."""
        rank = self.rank.info.rank
        first = all(self.folding.coord(rank, axis) == 0 for axis in ("tp", "cp", "pp"))
        return first and self.folding.share_of(rank)[0] == 0

    def announce(self) -> None:
        """The run begins, or goes on."""
        info, start = self.rank.info, self.progress.start
        self.rank.sinks(
            RunStarted(
                run=self.rank.recipe.run.name,
                rank=info.rank,
                world=info.world,
                step=start,
                total_steps=self.total_steps,
                num_params=self.spec.num_params,
                active_params=self.spec.active_params,
                folding=self.folding.label(),
                flops_per_token=self.flops_per_token,
                peak_flops_per_s=self.peak_flops_per_s,
                rated_flops_per_s=self.rated_flops_per_s,
                unigram_loss=self.prepared.unigram_loss,
            )
        )
        notes = self.prepared.all_notes(self.rank.recipe.train.seq_len)
        for text in notes if start == info.rank == 0 else ():
            self.rank.sinks(Note(level="info", text=text))
        if start == self.total_steps:
            text = f"all {self.total_steps} steps of this run are done; continue with a larger --train.steps"
            self.rank.sinks(Note(level="info", text=text))
        self.write_status("running")

    def step_ended(
        self,
        result: StepResult,
        micros: Sequence[MicroBatch],
        *,
        step_s: float,
        data_s: float,
        slowness: float | None = None,
    ) -> None:
        """Tell of the step that was just committed, and which samples this rank gave to it."""
        tokens_per_s, exchange = result.tokens / step_s, result.exchange
        peak = self.rated_flops_per_s or self.peak_flops_per_s
        self.rank.sinks(
            StepEnded(
                step=self.progress.step,
                loss=result.loss,
                aux_loss=result.aux_loss,
                z_loss=result.z_loss,
                mtp_loss=result.mtp_loss,
                grad_norm=result.grad_norm,
                lr=result.lr,
                tokens=result.tokens,
                step_s=step_s,
                data_s=data_s,
                tokens_per_s=tokens_per_s,
                mfu=self.flops_per_token * tokens_per_s / peak if peak else 0.0,
                load_max_over_mean=result.load_max_over_mean,
                dead_experts=result.dead_experts,
                dropped_tokens=result.dropped,
                router_entropy=result.entropy,
                peak_memory_bytes=self.rank.memory.peak_bytes(),
                exposed_forward_s=exchange.exposed_forward_s,
                hidden_forward_s=exchange.hidden_forward_s,
                exposed_backward_s=exchange.exposed_backward_s,
                hidden_backward_s=exchange.hidden_backward_s,
                slowness=slowness,
            )
        )
        if self.rank.info.rank == 0 and len(result.counts_LE):
            self._tell_loads(result)
        if self._keeps_ledger:
            self._tell_samples([m for m in micros if not m.is_empty])

    def _tell_loads(self, result: StepResult) -> None:
        """Of every expert, where it is time."""
        now_s = time.monotonic()
        if now_s - self._loads_s < max(LOADS_S, (now_s - self._begin_s) / LOADS_SHARE):
            return
        self._loads_s = now_s
        counts = tuple(map(tuple, result.counts_LE.tolist()))
        self.rank.sinks(ExpertLoads(step=self.progress.step, counts=counts))

    def _tell_samples(self, taken: Sequence[MicroBatch]) -> None:
        windows = tuple(int(w) for m in taken for w in m.sample_ids)
        numbers = tuple(m.index for m in taken)
        step, history = self.progress.step, self.progress.history
        self.rank.sinks(SamplesTaken(step=step, microbatches=numbers, windows=windows, history=history))

    def placed(self, why: str, stages: StagePlan, placements: Sequence[LayerPlacements], *, team: Team) -> None:
        """Tell, by the first rank, who holds what. `placements` of each stage of the pipeline; none: experts have no replicas."""
        if self.rank.info.rank != 0:
            return
        alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for placed in placements:
            for layer, of in placed.layers.items():
                alike.setdefault(of.slots[0], []).append(layer)
        num_slots = sum(len(held) for slots in alike for held in slots)
        self.rank.sinks(
            StatePlaced(
                step=self.progress.step,
                why=why,
                folding=self.folding.label(),
                layers=tuple(tuple(n for s in stages.of_rank(pp) for n in s.layers) for pp in range(self.folding.pp)),
                experts=self.spec.num_experts if self.spec.moe_layers else 0,
                expert_layers=tuple(self.spec.moe_layers),
                slots_per_rank=max((len(slots[0]) for slots in alike), default=0),
                slots=tuple((tuple(of), slots) for slots, of in alike.items()) if num_slots <= MOST_SLOTS else (),
                **vars(team),
            )
        )

    def validated(self, loss: float, tokens: int, *, seconds: float) -> None:
        self.progress.validation = self.progress.step, loss
        self.rank.sinks(Validated(step=self.progress.step, loss=loss, tokens=tokens, seconds=seconds))

    def write_status(self, status: Literal["running", "finished", "interrupted"]) -> None:
        """Writes the status for people and scripts, by the first rank."""
        if self.rank.info.rank != 0:
            return
        step, found = self.progress.step, self.progress.validation
        try:
            self.rank.folder.write_status(
                RunStatus(
                    status=status,
                    step=step,
                    total_steps=self.total_steps,
                    samples=step * self.rank.recipe.train.global_batch,
                    checkpoint_step=self.newest_checkpoint(),
                    validation_loss=found[1] if found else None,
                    unigram_loss=self.prepared.unigram_loss,
                )
            )
        except OSError as err:
            text = f"{self.rank.folder.path}: the status cannot be written ({err.strerror})"
            self.rank.sinks(Note(level="warning", text=text))

    def outcome(self, reason: Literal["finished", "interrupted"], sample: Sampled | None) -> Outcome:
        """How it ended, for the last words. The status says so too."""
        self.write_status(reason)
        done, t = self.progress, self.rank.recipe.train
        at, loss = done.validation or (None, None)
        return Outcome(
            reason=reason,
            step=done.step,
            total_steps=self.total_steps,
            tokens=(done.step - done.start) * t.global_batch * t.seq_len,
            loss=done.loss,
            validation_loss=loss,
            validation_step=at,
            unigram_loss=self.prepared.unigram_loss,
            sample=sample,
            talks=self.rank.recipe.data.chat_template is not None,
            needs_trust=any(n != "launch.keep_service" for n, _, _ in untrusted(self.rank.recipe, its_own=True)),
        )


class RunEnd:
    """Reports how a run ended in this process: its last event, whether it ends well or with an error, then a summary for a person."""

    def __init__(self, tell: Emit, step: Callable[[], int]) -> None:
        """`step`: how many steps of the run are committed."""
        self.reason = ""
        """Why it ended well."""
        self._emit, self._step, self._begin_s = tell, step, time.monotonic()

    def __enter__(self) -> RunEnd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tell(error)

    def tell(self, error: BaseException | None) -> None:
        """The last event."""
        reason = self.reason
        if error is not None:
            reason = " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:2]])
        self._emit(RunEnded(step=self._step(), reason=reason, seconds=self._seconds))

    def summarize(self, folder: Path, outcome: Outcome) -> None:
        """Print the summary of a run in `folder`. Where it cannot be written (a log file on a full disk), the run has ended well all the same."""
        try:
            print_summary(_summary(folder, outcome, seconds=self._seconds))
        except OSError as err:
            say(f"phalanx: warning: the summary cannot be written ({err}); the run is whole")
            flush_or_drop_output()

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._begin_s


def _summary(folder: Path, outcome: Outcome, *, seconds: float) -> RunSummary:
    return RunSummary(
        folder=folder,
        step=outcome.step,
        total_steps=outcome.total_steps,
        seconds=seconds,
        tokens=outcome.tokens,
        loss=outcome.loss,
        validation_loss=outcome.validation_loss,
        validation_step=outcome.validation_step,
        program=program_name(sys.argv[0]),
        unigram_loss=outcome.unigram_loss,
        prompt=outcome.sample.prompt if outcome.sample is not None else "",
        text=outcome.sample.text if outcome.sample is not None else None,
        talks=outcome.talks,
        needs_trust=outcome.needs_trust,
    )
