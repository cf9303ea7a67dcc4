"""The trainer as a `Body` of `runtime/membership/member.py`: a member of a run that goes on when others die, inside its process.

Each generation has a `Trainer` of its own (groups, modules, buffers for its mapping), filled from what its members hold. What a generation
must not lose lives here: the step, and the last trainer's state until the next one has taken it over.

    order     plan (`plan/recovery/generation.py`): mapping, ranks, what moves
    enter     build ─ examine, move and compare state (`train/placement/heal_state.py`), or read the newest checkpoint ─ adopt
    compute   parameters of the last step, from who has rounded them ─ what is due between steps ─ forward, backward, reduction (`train/step.py: reduce_step`)
    commit    the update, alone; the step is told

A member that the mapping has no rank for is *idle*: it waits for the others in each step, votes with them, and gives away what it holds until the first commit
makes that stale.

Must never change: nothing that was held is dropped before `adopt`, but where all go back to a checkpoint; nobody initialises anew once a step of the run was committed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.core.config import Recipe
from phalanx.core.errors import CheckpointError, FinalError, PeerError, PlanError, RunError
from phalanx.core.events import Event, Note
from phalanx.data import MicroBatch, Prefetch, Prepared
from phalanx.kernels.native import compiled_rows
from phalanx.observe import Sinks
from phalanx.plan.mapping import ModelSpec
from phalanx.plan.recovery import Healing, HealPlan, Standing, heal_order
from phalanx.runtime.checkpoint import CheckpointManager, Writer, import_beside
from phalanx.runtime.comm import (
    Axis,
    Collectives,
    Escape,
    Peers,
    StopRequest,
    WorldInfo,
    build_groups,
    with_second_groups,
)
from phalanx.runtime.membership import Generation, NoMapping, Report, Resolution, Team, own_host
from phalanx.runtime.reshard import hosts_by_name
from phalanx.runtime.state import ShardedState
from phalanx.train.closing import Outcome
from phalanx.train.machine import MemoryMeter, matmul_flops_per_s
from phalanx.train.optim import learning_rate
from phalanx.train.placement.heal_state import Everyone, Examined, Moved, examine, take_state
from phalanx.train.placement.replacing import Prepared as NewPlacement, Where
from phalanx.train.recording import MoveRecorder, Recorder
from phalanx.train.recovery.facts import facts_of
from phalanx.train.recovery.fallback import despite_disk
from phalanx.train.recovery.pace import PaceWatch
from phalanx.train.recovery.rehearsal import rehearse
from phalanx.train.recovery.start import from_disk
from phalanx.train.recovery.tell import Entry, Telling
from phalanx.train.recovery.watch import MemberWatch, Phase, collective_watch
from phalanx.train.run_folder import RunFolder
from phalanx.train.setup import DTYPES, Rank, Told, message_ctas, name_of_rows, resolve_pipeline
from phalanx.train.step import ReducedStep, StepResult, commit_step, publish, reduce_step
from phalanx.train.trainer import PREFETCH_STEPS, Trainer, make_loader, make_parts

WAIT_S = 0.5
"""Between two looks whether there are enough members for a mapping."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HealingRun:
    """What all members of a run have from the start: made once, before their processes are forked."""

    recipe: Recipe
    folder: RunFolder
    prepared: Prepared
    spec: ModelSpec
    healing: Healing
    kept: Recipe | None = None
    """What the run folder is to keep once the others have accepted this host; None: it does."""


class HealingBody:
    """One member. All methods are called by the worker's own thread."""

    def __init__(
        self,
        run: HealingRun,
        sinks: Sinks,
        *,
        watch: MemberWatch | None = None,
        joins: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """`device`: where its tensors live (None: the CPU). `joins`: the run is under way. Then the rate of this machine is taken for that of the others: measured beside their training it would be another one, and
        the core is theirs."""
        self.run, self.sinks, self.recipe, self.watch = run, sinks, run.recipe, watch
        self.device = torch.device("cpu") if device is None else device
        self.memory = MemoryMeter(self.device)
        self.flops_per_s = 0.0 if joins else matmul_flops_per_s(DTYPES[self.recipe.train.dtype], self.device)
        self.trainer: Trainer | None = None
        self.place: Standing | None = None
        """Where the state that it holds stands."""
        self.place_of: dict[str, Standing] = {}
        """Of the members of the generation that this one has entered, but for those that are idle."""
        self.outcome: Outcome | None = None
        self.history = 0
        """Generation in which the run last went back to a checkpoint, as far as what is held here belongs to that."""
        self._step = 0
        rows = compiled_rows() if self.recipe.kernels.compiled and self.device.type == "cpu" else None
        self._told = {
            "host": own_host(), "node": socket.gethostname(), "kernels": name_of_rows(rows), "rack": self.recipe.launch.rack or "",
        }  # fmt: skip
        """Of this process, for all."""
        self._is_warm = False
        self._may_lack = joins
        """Whether this process has perhaps not imported what saves need (`run.py`: it would have kept it from taking part)."""
        self._plan: HealPlan | None = None
        """Of the generation that forms."""
        self._entered: HealPlan | None = None
        """Of the one that this member has entered; experts may lie elsewhere since."""
        self._waits_for = ""
        self._everyone: Everyone | None = None
        self._idle = False
        self._others_idle = False
        self._escape: Escape | None = None
        self._due = False
        """Whether what belongs between steps is still to do; the same on all members."""
        self._is_first = False
        """Whether nothing was done between steps in this generation yet; the same on all members."""
        self._reduced: tuple[ReducedStep, list[MicroBatch], float, float] | None = None
        self._moving: NewPlacement | None = None
        """Experts lie there from the commit of the step on that is computed with it."""
        self._telling = Telling(sinks)
        self._pace = PaceWatch(run.recipe, run.healing)
        self._too_slow: dict[str, str] = {}
        self._batches: Prefetch[list[MicroBatch]] | None = None

    def rehearse(self) -> None:
        """Do alone whatever takes long the first time, so that nobody waits for it later. Before the member says that it is ready."""
        run = self.run
        rehearse(self.recipe, run.spec, run.healing.base, prepared=run.prepared, device=self.device, folder=run.folder)
        self._is_warm = True

    # -- what the loop asks

    def _now(self, phase: Phase) -> None:
        if self.watch is not None:
            self.watch.phase(phase, self._step)

    @property
    def step(self) -> int:
        return self._step

    @property
    def holds(self) -> bool:
        return self.trainer is not None

    def describe(self) -> tuple[str, dict[str, Any]]:
        self._now("waits")
        standing = None if self.place is None else self.place.to_dict()
        then = None if self._moving is None else self._plan_moved.standing(self._mine.rank.info.rank).to_dict()
        about = {"standing": standing, "then": then, "idle": self._idle, "history": self.history}
        return "", {**about, **self._told, "flops_per_s": self.flops_per_s}

    def order(self, generation: Generation, reports: Sequence[Report]) -> Sequence[str]:
        """Ranks of a new generation, as the plan says that all members make of the reports. For `run_member`.

        Raises `PeerError` where they make no mapping, so that the members ask for another generation, until others have come.
        """
        try:
            self._plan = self.run.healing.plan(facts_of(generation, reports))
        except PlanError as err:
            if str(err) != self._waits_for:
                self._waits_for = str(err)
                self.sinks(Note(level="warning", text=f"waiting for more members: {err}"))
            time.sleep(WAIT_S)
            raise NoMapping(str(err)) from None
        return self._plan.uids

    def finished(self) -> bool:
        return self._step >= self.recipe.train.steps

    def leave_team(self) -> None:
        """Groups go with the trainer, which stays until the next one has its state: sockets are shut by then, and make nobody wait."""
        self._telling.entry, self._everyone = None, None
        if self._batches is not None:
            self._batches.close()
        self._batches = None
        if self.trainer is not None:
            self.trainer.replacing.drop()
        if self._escape is not None:
            self._escape.close()

    # -- a generation begins

    def enter(self, team: Team, resolution: Resolution) -> None:
        plan, begin_s = self._plan, time.perf_counter()
        if plan is None or plan.uids != team.uids:
            raise RunError("a generation was formed without the plan of its ranks")
        if self.trainer is not None and team.uid not in resolution.holders:
            self._forget()  # what it holds is of a history that was given up
        self._everyone = self._connect(team)
        trainer = self._build(team, plan)
        built_s, begin_s = time.perf_counter() - begin_s, time.perf_counter()
        self._now("migration")
        first, moved, step = self.trainer is None, Moved(received_bytes=0, checked=0), resolution.step
        found = self._examine(plan) if step is not None else None
        if found is None or found.plan.missing:
            self._forget()
            begins = 0 if trainer is None else from_disk(trainer, team, found.plan if found else plan, committed=step)
            step, first = self._everyone.peers.gather(begins)[0], True
            self.history = team.generation.number if team.begun else 0
        else:
            parts = None if trainer is None else trainer.parts
            record = self._move_recorder(team, found, step)
            moved = take_state(found, parts, old=self._state, everyone=self._everyone, record=record)
            self.history = max(r.history for r in team.reports if r.uid in resolution.holders)
        assert step is not None
        self._adopt(trainer, step, plan, announce=first)
        for text in plan.remarks:
            self.sinks(Note(level="info" if plan.exact else "warning", text=text))
        moved_s = time.perf_counter() - begin_s
        self._telling.entry = Entry(
            folding=plan.folding.label(), plan=plan.decision, built_s=built_s, moved_s=moved_s, moved=moved
        )

    def _connect(self, team: Team) -> Everyone:
        """What all members talk over, those that are idle too."""
        self._escape = Escape(lambda: team.kicked, keep=team.groups.all)
        ranks = tuple(range(team.size))
        return Everyone(
            comms=Collectives(emit=self.sinks, timeout_s=self.recipe.launch.timeout_s, escape=self._escape),
            axis=Axis("everyone", ranks, team.rank, team.groups.get(ranks)),
            peers=Peers(team.groups.get(ranks, second=True), escape=self._escape),  # control mixes with no tensors
            hosts=hosts_by_name([r.data["node"] for r in team.reports], ranks),
            device=self.device,
        )

    def _examine(self, plan: HealPlan) -> Examined:
        """Whether holders of the same piece agree; what is left out is said."""
        assert self._everyone is not None
        found = examine(plan, old=self._state, everyone=self._everyone)
        for text in found.suspects.explain(plan.uids):
            self.sinks(Note(level="warning", text=text))
        return found

    def _move_recorder(self, team: Team, found: Examined, step: int | None) -> MoveRecorder | None:
        """For the move of state after `step` steps, where the next one is recorded. Collective."""
        assert self._everyone is not None and step is not None
        everyone = self._everyone
        recorder = Recorder(
            self.recipe.observe.trace_steps, comms=everyone.comms, peers=everyone.peers, emit=self.sinks
        )
        recorder.rank, recorder.generation = team.rank, team.generation.number
        recorder.prepare(step + 1)
        return recorder.moves(step, lambda: heal_order(found.plan, found.suspects.all))

    def _build(self, team: Team, plan: HealPlan) -> Trainer | None:
        """A trainer for the team, with initial weights as long as the run may begin with them; None where this member is idle. Groups are made by all members,
        in one order."""
        self._drop_save()
        size, folding = plan.folding.world, plan.folding
        group = team.groups.get(tuple(range(size)), second=True)
        pipeline = resolve_pipeline(self.recipe, self.run.spec, folding)
        if team.rank >= size:
            groups = build_groups(
                folding,
                rank=team.rank,
                cache=team.groups,
                table_ranks=pipeline.stages.table_ranks,
                message_ctas=message_ctas(self.recipe),
            )
            if pipeline.pair_passes:
                with_second_groups(groups, cache=team.groups)
            return None
        rank = Rank(
            recipe=self.recipe,
            info=WorldInfo(rank=team.rank, world=size, local_rank=team.rank, local_world=size),
            device=self.device,
            peers=Peers(group, escape=self._escape),
            escape=self._escape,
            cache=team.groups,
            folder=self.run.folder,
            sinks=self.sinks,
            memory=self.memory,
            lock=None,
            told=Told(
                hosts=tuple(r.data["host"] for r in team.reports[:size]),
                kernels=tuple(r.data["kernels"] for r in team.reports[:size]),
            ),
        )
        parts = make_parts(
            rank, self.run.spec, folding, pipeline, warm=not self._is_warm, drawn=not team.begun, placement=plan.placement_of(team.rank),
            hosts=plan.hosts, racks=plan.racks,
        )  # fmt: skip
        self._is_warm = True
        manager = CheckpointManager(
            self.run.folder.checkpoints.path,
            group=group,
            keep_last=self.recipe.checkpoint.keep_last,
            asynchronous=self.recipe.checkpoint.asynchronous and self.recipe.checkpoint.interval > 0,
            by_steps=True,
            write_rate=self.recipe.checkpoint.write_rate,
            escape=self._escape,
            writer=Writer(generation=team.generation.number, life=team.generation.epoch, check=team.check),
        )
        if team.begun:  # members hold everything, and a recovery waits for no disk
            manager.open_later()
        else:
            manager.open()
        trainer = Trainer(
            rank=rank, stop=StopRequest(), prepared=self.run.prepared, spec=self.run.spec, folding=folding, parts=parts,
            loader=make_loader(self.recipe, self.run.prepared), manager=manager, start=self._step,
        )  # fmt: skip
        if self.watch is not None:
            trainer.parts.comms.watch = collective_watch(self._now)
        trainer.recorder.rank, trainer.recorder.generation = team.rank, team.generation.number
        trainer.peak_flops_per_s = self._peak(trainer, [float(r.data["flops_per_s"]) for r in team.reports[:size]])
        return trainer

    def _peak(self, trainer: Trainer, told: Sequence[float]) -> float:
        """Of all ranks together. Who came later has not measured; where nobody is left who has, all do. Collective."""
        known = [rate for rate in told if rate]
        if not known:
            self.flops_per_s = matmul_flops_per_s(DTYPES[self.recipe.train.dtype], self.device)
            return sum(trainer.rank.peers.gather(self.flops_per_s))
        self.flops_per_s = self.flops_per_s or sum(known) / len(known)
        return len(told) * sum(known) / len(known)

    def _forget(self) -> None:
        """What this member holds is of no use: nobody goes on from it, and in the next generation it must not count as a holder."""
        self._drop_save()
        self.trainer, self.place, self._reduced, self._step, self.history = None, None, None, 0, 0

    def _adopt(self, trainer: Trainer | None, step: int, plan: HealPlan, *, announce: bool) -> None:
        """From here on the new trainer's state is what this member holds; an idle one keeps what it has, until the others have gone on."""
        self.place_of = {uid: plan.standing(rank) for rank, uid in enumerate(plan.uids[: plan.folding.world])}
        self._idle, self._others_idle, self._entered = trainer is None, bool(plan.idle), plan
        self._step, self._reduced, self._due, self._is_first = step, None, step > 0, True
        self._pace.formed()
        if trainer is None:
            return
        if self.trainer is not None:
            trainer.last_loss, trainer.last_validation = self.trainer.last_loss, self.trainer.last_validation
            trainer.start, trainer.replacing = self.trainer.start, self.trainer.replacing
            self.trainer.parts.buffers.close()
        else:
            trainer.start = step
        trainer.step, trainer.history, trainer.saved_step = step, self.history, step or None
        trainer.replacing.formed(step)
        self.trainer, self.place = trainer, plan.standing(trainer.rank.info.rank)
        if announce:
            trainer.announce()

    def _wait_with_all(self, value: Any = None) -> list[Any]:
        """Until every member of the generation is here; what each says."""
        assert self._everyone is not None
        return self._everyone.peers.gather(value)

    # -- a step

    def compute(self) -> None:
        if self._idle:
            self._wait_with_all()
            return
        trainer, step = self._mine, self._step
        with trainer.recorder.publishing():
            publish(trainer.parts)
        trainer.recorder.prepare(step + 1)
        if self._due:
            self._between_steps(trainer)
            self._due = False
        trainer.recorder.begin(step + 1)
        begin_s = time.perf_counter()
        with trainer.parts.comms.doing("data", "host"):
            micros = self._next_batch(trainer, step)
        data_s = time.perf_counter() - begin_s
        lr = learning_rate(step, self.recipe.optim, total_steps=self.recipe.train.steps)
        self._now("forward")
        parts = trainer.parts if self._moving is None else self._moving.parts
        try:
            reduced = reduce_step(parts, [trainer.token_batch(m) for m in micros], step=step, lr=lr)
        except PeerError:
            raise
        except RunError as err:  # not finite: a function of state and samples, so it would be again
            trainer.parts.comms.complete(
                self.device
            )  # unless it came from nowhere: the kick may come while it waits for the device, and the loop asks at once
            raise FinalError(str(err)) from None
        trainer.replacing.reduced(parts, reduced)
        trainer.parts.comms.complete(self.device)
        self._reduced = reduced, micros, begin_s, data_s
        if self._others_idle:
            self._wait_with_all()
        trainer.recorder.voted()
        self._now("vote")

    def _next_batch(self, trainer: Trainer, step: int) -> list[MicroBatch]:
        """Loaded ahead, as long as this generation lasts: another one has other shares."""
        if self._batches is None:
            steps = range(step, self.recipe.train.steps)
            self._batches = Prefetch(trainer.load, steps, depth=PREFETCH_STEPS)
        return next(self._batches)

    def commit(self) -> None:
        if self._idle:  # what it holds is of the step before
            step = self._step + 1
            if self.trainer is not None:
                self.trainer.parts.buffers.close()
            self._forget()
            self._step = step
            return
        if self._reduced is None:
            raise RunError("a commit without a reduced gradient")
        trainer, (reduced, micros, begin_s, data_s) = self._mine, self._reduced
        trainer.recorder.decided()
        self._now("commit")
        if self._moving is not None:
            self._move_in(trainer, self._moving)
        result = commit_step(trainer.parts, reduced)
        trainer.replacing.applied(trainer.parts, reduced)
        self._step += 1
        self._reduced, self._due = None, True
        trainer.step, trainer.last_loss = self._step, result.loss
        trainer.recorder.end()
        trainer.replacing.committed(result.counts_LE)
        slowness = self._watch_pace(result)
        trainer.report(result, micros, step_s=time.perf_counter() - begin_s, data_s=data_s, slowness=slowness)
        trainer.recorder.tell()
        if self._may_lack:
            self._may_lack = False
            import_beside()

    def _watch_pace(self, result: StepResult) -> float | None:
        """How slow the slowest member is; who is to go for it is kept until the loop asks."""
        assert self._entered is not None
        slowness, verdict = self._pace.committed(result, self._entered)
        if verdict is not None:
            told = self._pace.to_tell(verdict, self._step)
            if told is not None:
                self.sinks(told)
            if verdict.put_out:
                self._too_slow = dict.fromkeys(verdict.uids, verdict.why)
        return slowness

    def too_slow(self) -> Mapping[str, str]:
        """Members that the others go on without, and why: the same on all but those that are idle, which hear of it from them."""
        found, self._too_slow = self._too_slow, {}
        return found

    def abort(self) -> None:
        self._reduced = None
        if self.trainer is not None:
            self.trainer.recorder.decided()
            self.trainer.recorder.end(committed=False)
            self.trainer.recorder.tell()
        if self._moving is not None:
            self._moving.parts.buffers.close()
            self._moving = None

    def _between_steps(self, trainer: Trainer) -> None:
        """Validation and a checkpoint, where they are due; again in the next generation where a member is lost in it. Collective."""
        train, interval = self.recipe.train, self.recipe.checkpoint.interval
        if train.eval_interval and self._step % train.eval_interval == 0:
            trainer.validate()
        if trainer.manager.pending:
            self._now("checkpoint")
            trainer.hear_of_checkpoints()
        if interval and (self._step % interval == 0 or self._is_first) and self._lacks(trainer, interval):
            self._now("checkpoint")
            trainer.save()
            trainer.hear_of_checkpoints(
                wait=self._is_first
            )  # else members that come and go could keep it from ever being complete
        self._is_first = False
        assert self._entered is not None
        where = Where(self._entered.hosts, self._entered.racks)
        self._moving = trainer.replacing.between(
            trainer.parts,
            trainer.rank,
            step=self._step,
            where=where,
            recorder=trainer.recorder,
            others_idle=self._others_idle,
        )

    def _drop_save(self) -> None:
        """Who would complete it is not in the next generation, or knows of no save."""
        if self.trainer is None:
            return
        if self.trainer.manager.pending:
            text = f"the members change while the checkpoint of step {self.trainer.saved_step} is written: it is given up, and one is made first thing"
            self.sinks(Note(level="info", text=text))
        self.trainer.manager.close()

    def _lacks(self, trainer: Trainer, interval: int) -> bool:
        """Whether the checkpoint that was due last is missing: one that was under way when a generation ended is lost. Collective."""
        due = self._step // interval * interval
        if not due:
            return False
        newest = despite_disk(trainer.manager.choose, None, self.sinks)
        return newest != due if due == self._step else newest is None or newest < due

    @property
    def _plan_moved(self) -> HealPlan:
        """The plan of this generation, but for where experts will be."""
        assert self._entered is not None and self._moving is not None
        return replace(self._entered, placement=self._moving.placements)

    def _move_in(self, trainer: Trainer, new: NewPlacement) -> None:
        """With the commit of the step, so that all members do it or none: until then each has what it had."""
        self._entered = self._plan_moved
        self._moving = None
        self._stand(trainer, self._entered)
        trainer.move_in(new)

    def _stand(self, trainer: Trainer, plan: HealPlan) -> None:
        """Where this member and the others stand from now on."""
        self.place_of = {uid: plan.standing(rank) for rank, uid in enumerate(plan.uids[: plan.folding.world])}
        self.place = plan.standing(trainer.rank.info.rank)

    # -- the end, or a part of it

    def hand_over(self, stay: Sequence[str]) -> bool:
        """Those that stay hold everything, or a checkpoint does."""
        done: bool | None = None  # idle members have nothing to give, and wait for the others
        if not self._idle:
            places = [self.place_of[uid] for uid in stay if uid in self.place_of]
            done = not self.run.healing.missing(places) or self._saved_now(self._mine)
        said = self._wait_with_all(done) if self._idle or self._others_idle else [done]
        return all(said_done is not False for said_done in said)

    def _saved_now(self, trainer: Trainer) -> bool:
        """Whether a checkpoint holds the state after the last step. Collective."""
        trainer.hear_of_checkpoints(wait=True)
        if despite_disk(trainer.manager.choose, None, self.sinks) != self._step:
            trainer.save()
            trainer.hear_of_checkpoints(wait=True)
        return despite_disk(trainer.manager.choose, None, self.sinks) == self._step

    def close(self, *, stopped: bool) -> None:
        if self._idle:
            self.outcome = self._wait_with_all()[0]
            return
        trainer = self._mine
        with trainer.recorder.publishing():
            publish(trainer.parts)
        try:
            trainer.save_last()
        except CheckpointError:
            trainer.rank.peers.gather(None)  # raises `PeerError` where the cause is a member that was lost
            raise
        if not stopped:
            trainer.validate()
        shown = not stopped and self.recipe.observe.console != "none"
        self.outcome = trainer.outcome("interrupted" if stopped else "finished", trainer.sample() if shown else None)
        self._wait_with_all(self.outcome)  # nobody leaves before all are through

    # -- what is told

    def tell(self, event: Event, /) -> None:
        """Events of the loop, as a person wants them."""
        if self.watch is not None:
            self.watch.tell(event)
        self._telling(event)

    @property
    def _state(self) -> ShardedState | None:
        """What this member holds."""
        return None if self.trainer is None else self.trainer.parts.state

    @property
    def _mine(self) -> Trainer:
        if self.trainer is None:
            raise RunError("this member has entered no generation")
        return self.trainer
