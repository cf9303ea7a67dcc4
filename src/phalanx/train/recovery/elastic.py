"""A member of an elastic run: it trains on when others die or come, inside its process. A `Body` of `runtime/membership/member.py`.

Each generation has a `Trainer` of its own (groups, modules, buffers for its mapping), filled from what its members hold. What must outlive a generation lives
here: progress, the step hook, and the last trainer's state until the next one has taken it over, wave by wave.

    order     the plan of the generation (`plan/recovery/generation.py`): mapping, ranks, what moves
    enter     drop all of the last trainer but masters, moments and buffers ─ build ─ examine, move and compare state (`train/placement/state_transfer.py`), or read the newest checkpoint ─ adopt
    compute, commit, close    those of the trainer (`train/loop.py`)

A member that the mapping has no rank for is *idle*: it waits for the others in each step, votes with them, and gives away what it holds until the first commit
makes that stale.

Must never change: nothing of the state is dropped before all members have what takes its place, but where all go back to a checkpoint; no member initialises anew once a step of the run was committed.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.core.config import Recipe
from phalanx.core.errors import CheckpointError, PlanError, RunError
from phalanx.core.events import Event, Note
from phalanx.data import PreparedData
from phalanx.kernels.native import compiled_rows
from phalanx.observe import Sinks, open_watched
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import dispatch_spec
from phalanx.plan.recovery import (
    Fact,
    GenerationPlan,
    RecoveryPlanner,
    StateDescriptor,
    StateReport,
    state_move_order,
    wanted_ranks,
)
from phalanx.runtime.checkpoint import CheckpointManager, Writer, import_beside
from phalanx.runtime.comm import (
    AbortableCall,
    Axis,
    Collectives,
    PeerQuestions,
    Peers,
    RankProgress,
    build_groups,
    with_second_groups,
)
from phalanx.runtime.membership import Generation, GroupEpoch, MemberReport, NoMapping, Reformed, Resolution, resolve
from phalanx.runtime.processes import StopRequest, WorldInfo, takes_spare_messages
from phalanx.runtime.reshard import hosts_by_name
from phalanx.train import (
    Elastic,
    MoveRecorder,
    Outcome,
    Recorder,
    RunProgress,
    Team,
    Trainer,
    Where,
    make_loader,
    make_parts,
    open_checkpoints,
    start_candidates,
)
from phalanx.train.placement import Everyone, Examined, HeldState, Moved, Rebalancer, examine, take_state
from phalanx.train.recovery.fallback import from_disk
from phalanx.train.recovery.messages import Entry, Telling
from phalanx.train.recovery.pace import PaceWatch
from phalanx.train.recovery.warm_up import warm_up
from phalanx.train.recovery.watch import MemberWatch, Phase, collective_watch
from phalanx.train.setup import (
    DTYPES,
    Announced,
    MemoryMeter,
    Rank,
    RunFolder,
    lasting_rate,
    matmul_flops_per_s,
    message_ctas,
    name_of_rows,
    own_host,
    own_lanes,
    rated_flops_per_s,
    resolve_pipeline,
)
from phalanx.train.step import StepResult

IN_STEP: frozenset[Phase] = frozenset(("data", "forward", "all-to-all", "backward", "reduction", "vote"))
"""Phases that no member should be in for long."""
WAIT_S = 0.5
"""Seconds between two looks whether there are enough members for a mapping."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ElasticRun:
    """What all members of a run have from the start: made once, before their processes are forked."""

    recipe: Recipe
    folder: RunFolder
    prepared: PreparedData
    spec: ModelSpec
    planner: RecoveryPlanner
    kept: Recipe | None = None
    """What the run folder is to keep once the run goes on with it: a checkpoint may refuse it, and so may the other hosts. None: it does."""


class ElasticMember:
    """One member: the `Body` of `runtime/membership/member.py`."""

    def __init__(
        self,
        run: ElasticRun,
        sinks: Sinks,
        *,
        watch: MemberWatch | None = None,
        progress: RankProgress | None = None,
        joins: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """`device`: where its tensors live (None: the CPU). `joins`: the run is under way. Then the rate of this machine is taken for that of the others: measured beside their training it would be another one, and
        the core is theirs."""
        self.run, self.sinks, self.recipe, self.watch = run, sinks, run.recipe, watch
        self._signs = RankProgress() if progress is None else progress
        self._is_in_step = False
        """Whether it has committed a step in this generation, so that the next one should not take long."""
        self.device = torch.device("cpu") if device is None else device
        self.memory, self.lanes = MemoryMeter(self.device), own_lanes(self.device)
        self.flops_per_s = 0.0 if joins else self._measure_machine()
        self._about = self._describe_process()
        self.trainer: Trainer | None = None
        self.held: HeldState | None = None
        """The state, where no trainer has it: from the moment a generation is entered until it is adopted, and while this member is idle."""
        self._passed = ""
        """The wave of state that completed the trainer's."""
        self._is_new = True
        """Whether this process has had no trainer, or none since it forgot its state."""
        self.progress, self.hook = RunProgress(), Rebalancer(run.recipe, run.spec)
        self.outcome: Outcome | None = None
        self.place: StateDescriptor | None = None
        """Where the state that it holds stands."""
        self.place_of: dict[str, StateDescriptor] = {}
        """State descriptors of the members of the generation that this one has entered, but for those that are idle."""
        self._is_warm = False
        self._may_lack = joins
        """Whether this process has perhaps not imported what saves need (`run.py`: it would have kept it from taking part)."""
        self._plan: GenerationPlan | None = None
        """Plan of the generation that forms."""
        self._candidates: list[int] = []
        """Checkpoints from which a run that has not begun goes on."""
        self._entered: GenerationPlan | None = None
        """Plan of the generation that this member has entered; experts may lie elsewhere since."""
        self._waits_for = ""
        self._everyone: Everyone | None = None
        self._escape: AbortableCall | None = None
        self._idle = self._others_idle = False
        self._telling = Telling(sinks)
        self._pace = PaceWatch(run.recipe, run.planner)
        self._too_slow: dict[str, str] = {}

    def _measure_machine(self) -> float:
        dtype, threads = DTYPES[self.recipe.train.dtype], self.lanes.count
        measured = matmul_flops_per_s(dtype, self.device, threads=threads)
        sharing = self.recipe.launch.ranks
        return lasting_rate(measured, dtype=dtype, device=self.device, threads=threads, sharing=sharing)

    def _describe_process(self) -> StateReport:
        """What this process reports to all members as long as it lives."""
        rows = compiled_rows() if self.recipe.kernels.compiled and self.device.type == "cpu" else None
        return StateReport(
            host=own_host(),
            node=socket.gethostname(),
            kernels=name_of_rows(rows),
            rack=self.recipe.launch.rack or "",
        )

    def warm_up(self) -> None:
        """Do alone whatever takes long the first time, so that no member waits for it later. Call it before the member announces itself."""
        run = self.run
        warm_up(
            self.recipe, run.spec, run.planner.base, prepared=run.prepared, device=self.device, folder=run.folder, lanes=self.lanes
        )  # fmt: skip
        self._is_warm = True

    # -- what the loop asks

    def _now(self, phase: Phase) -> None:
        self._signs.at(f"{phase} of step {self.step + 1}", quick=self._is_in_step and phase in IN_STEP)
        if self.watch is not None:
            self.watch.phase(phase, self.step)

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def holds(self) -> bool:
        return self.trainer is not None or (
            self.held is not None and (self.held.descriptor or self.held.then) is not None
        )

    def describe(self) -> tuple[str, StateReport]:
        self._now("waits")
        then, place, passed, doubt = None, self.place, self._passed, ""
        if self.trainer is not None and self.trainer.moving is not None:
            then = self._plan_moved.state_descriptor(self.trainer.rank.info.rank)
        if self.held is not None:
            then, place, passed, doubt = self.held.then, self.held.descriptor, self.held.passed, self.held.doubt
        return "", replace(
            self._about,
            descriptor=place,
            then=then,
            passed=passed,
            doubt=doubt,
            idle=self._idle,
            history=self.progress.history,
            flops_per_s=self.flops_per_s,
            watched=self.sinks.is_watched,
        )

    def order(self, generation: Generation, reports: Sequence[MemberReport]) -> Sequence[str]:
        """Ranks of a new generation, as the plan says that all members make of the reports. For `run_member`.

        Raises `PeerError` where they make no mapping, so that the members ask for another generation, until others have come.
        """
        try:
            self._plan = self.run.planner.plan(facts_of(generation, reports))
        except PlanError as err:
            if str(err) != self._waits_for:
                self._waits_for = str(err)
                self.sinks(Note(level="warning", text=f"waiting for more members: {err}"))
            time.sleep(WAIT_S)
            raise NoMapping(str(err)) from None
        return self._plan.uids

    def finished(self) -> bool:
        return self.step >= self.recipe.train.steps

    def leave_epoch(self) -> None:
        """Groups go with the trainer, which stays until the next one has its state: sockets are shut by then, and no member waits for them."""
        self._telling.entry, self._everyone = None, None
        if self.trainer is not None:
            self.trainer.drop_batches()
        self.hook.drop()
        if self._escape is not None:
            self._escape.close()

    # -- a generation begins

    def enter(self, team: GroupEpoch, resolution: Resolution) -> None:
        plan, begin_s, self._is_in_step = self._plan, time.perf_counter(), False
        if plan is None or plan.uids != team.uids:
            raise RunError("a generation was formed without the plan of its ranks")
        if self.holds and team.uid not in resolution.holders:
            self._forget()  # what it holds belongs to an abandoned history
        self._keep_watched(team)
        held = self._keep_state(plan.members[team.rank].descriptor)
        held.begin(f"{team.generation.epoch}/{team.generation.number}")
        self._everyone = everyone = self._connect(team)
        trainer = self._build(team, plan)
        built_s, begin_s = time.perf_counter() - begin_s, time.perf_counter()
        self._now("migration")
        first, moved, step = self._is_new, Moved(), resolution.step
        found = self._examine(plan, held, everyone) if step is not None else None
        if found is None or found.plan.missing:
            del held
            self._forget()
            begins = 0
            if trainer is not None:
                lost = found.plan if found else plan
                begins = from_disk(trainer, team, lost, committed=step, candidates=self._candidates)
            step, first = everyone.peers.gather(begins)[0], True
            if team.rank == 0 and not team.begun:
                self._keep_recipe()
            history = team.generation.number if team.begun else 0
        else:
            history = max(r.history for r in team.reports if r.uid in resolution.holders)
            self.progress.step, self.progress.history = step or 0, history  # of what comes from now on
            record = self._move_recorder(team, found, everyone, step=step or 0)
            parts = None if trainer is None else trainer.parts
            moved = take_state(found, parts, held=held, everyone=everyone, record=record)
            if moved.repeated:
                text = "some member received other bits of the state than were sent to it: all was sent again, and is equal now"
                self.sinks(Note(level="warning", text=text))
        assert step is not None
        self.progress.history = history
        self._adopt(trainer, step, plan, announce=first)
        for text in plan.remarks:
            self.sinks(Note(level="info" if plan.exact else "warning", text=text))
        self._telling.entry = Entry(
            folding=plan.folding.label(), plan=plan.decision, built_s=built_s, moved_s=time.perf_counter() - begin_s, moved=moved,
            wanted=wanted_ranks(self.recipe), holders=self._signs.holders, holders_wanted=self.run.planner.floor,
        )  # fmt: skip

    def _keep_recipe(self) -> None:
        """What is kept is what is trained. A disk that refuses costs that, and not the member."""
        run = self.run
        if run.kept is None:
            return
        try:
            run.folder.write_recipe(run.kept, run.prepared.tokenizer, run.prepared.template)
        except RunError as err:
            self.sinks(Note(level="warning", text=f"the recipe of the run could not be kept: {err}"))

    def _keep_watched(self, team: GroupEpoch) -> None:
        """A run whose first host is lost goes on being watched: at the first rank, until that host is back. On one host its supervisor starts the process anew."""
        watched = [rank for rank, report in enumerate(team.reports) if report.about.watched]
        if self.sinks.has_taken_place and watched != [team.rank]:
            self.sinks.give_place_back()
        elif not watched and team.rank == 0 and team.begun and self.recipe.resilience.service is not None:
            observe, folder = self.recipe.observe, self.run.folder.path
            if observe.is_for_people:
                observe = replace(observe, console="plain")  # the terminal of this host is not this process's
            self.sinks.take_place(lambda: open_watched(observe, folder=folder, patient=True))

    def _connect(self, team: GroupEpoch) -> Everyone:
        """What all members talk over, those that are idle too."""
        asks = PeerQuestions().left if takes_spare_messages() else None
        self._escape = AbortableCall(lambda: team.aborted, keep=team.groups.all, progress=self._signs, asks=asks)
        ranks = tuple(range(team.size))
        return Everyone(
            comms=Collectives(
                emit=self.sinks,
                timeout_s=self.recipe.launch.timeout_s,
                escape=self._escape,
            ),
            axis=Axis("everyone", ranks, team.rank, team.groups.get(ranks)),
            peers=Peers(team.groups.get(ranks, purpose="control"), escape=self._escape),
            hosts=hosts_by_name([r.about.node for r in team.reports], ranks),
            device=self.device,
        )

    def _keep_state(self, reported: StateDescriptor | None) -> HeldState:
        """Drop all of the last generation's trainer but its state: gradients of a step that was lost and weights, which are rounded masters, are of no more use. `reported`: where all members
        take it that this one stands."""
        self._idle = False  # from here on it stands as it says, whatever it was
        if self.trainer is not None:
            self.trainer.saving.drop()
            self.trainer.parts.buffers.close()
            self.held, self.trainer = HeldState(self.trainer.parts.state, self.place, passed=self._passed), None
        elif self.held is None:
            self.held = HeldState(None, None)
        elif self.held.then is not None and self.held.then == reported:
            self.held.accept()
        return self.held

    def _examine(self, plan: GenerationPlan, held: HeldState, everyone: Everyone) -> Examined:
        """Whether holders of the same piece agree; what is left out is said."""
        found = examine(plan, held=held, everyone=everyone)
        for text in found.suspects.explain(plan.uids):
            self.sinks(Note(level="warning", text=text))
        return found

    def _move_recorder(
        self, team: GroupEpoch, found: Examined, everyone: Everyone, *, step: int
    ) -> MoveRecorder | None:
        """Recorder of the move of state after `step` steps, where the next one is recorded. Collective."""
        traced = self.recipe.observe.trace_steps
        recorder = Recorder(traced, comms=everyone.comms, peers=everyone.peers, emit=self.sinks)
        recorder.rank, recorder.generation = team.rank, team.generation.number
        recorder.prepare(step + 1)
        return recorder.moves(step, lambda: state_move_order(found.plan, found.suspects.all))

    def _build(self, team: GroupEpoch, plan: GenerationPlan) -> Trainer | None:
        """A trainer for the team, with initial weights where the run begins with them, else with no memory for its state; None where this member is idle. Groups are made by
        all members, in one order."""
        if team.rank >= plan.folding.world:
            _groups_of_others(self.recipe, self.run.spec, plan, team)
            return None
        rank, where = self._rank(team, plan), Where(plan.hosts, plan.racks)
        manager = self._manager(team, rank)
        self._candidates = [] if team.begun else rank.peers.first(lambda: start_candidates(self.recipe, manager.folder))
        parts = make_parts(
            rank, self.run.spec, plan.folding, resolve_pipeline(self.recipe, self.run.spec, plan.folding),
            warm=not self._is_warm, drawn=not (team.begun or self._candidates), placement=plan.placement_of(team.rank), where=where,
        )  # fmt: skip
        self._is_warm = True
        if self.watch is not None:
            parts.comms.watch = collective_watch(self._now)
        trainer = Trainer(
            rank=rank, stop=StopRequest(), prepared=self.run.prepared, spec=self.run.spec, folding=plan.folding, parts=parts,
            loader=make_loader(self.recipe, self.run.prepared), manager=manager,
            hook=self.hook, progress=self.progress,
            elastic=Elastic(where=where, others_idle=bool(plan.idle), pace=self._watch_pace, at=self._now, team=self._team(team, plan)),
        )  # fmt: skip
        trainer.recorder.rank, trainer.recorder.generation = team.rank, team.generation.number
        told = [r.about.flops_per_s for r in team.reports[: plan.folding.world]]
        trainer.reporter.peak_flops_per_s = self._peak(rank.peers, told)
        rated = rated_flops_per_s(self.device, DTYPES[self.recipe.train.dtype])
        trainer.reporter.rated_flops_per_s = rated * plan.folding.world
        return trainer

    def _team(self, team: GroupEpoch, plan: GenerationPlan) -> Team:
        minimum = team.generation.minimum
        return Team(members=plan.uids, hosts=plan.hosts, minimum=minimum, holders=plan.holders)

    def _rank(self, team: GroupEpoch, plan: GenerationPlan) -> Rank:
        """This member as a rank of the mapping."""
        size = plan.folding.world
        reports = team.reports[:size]
        return Rank(
            recipe=self.recipe,
            info=WorldInfo(rank=team.rank, world=size, local_rank=team.rank, local_world=size),
            device=self.device,
            peers=Peers(team.groups.get(tuple(range(size)), purpose="control"), escape=self._escape),
            escape=self._escape,
            cache=team.groups,
            folder=self.run.folder,
            sinks=self.sinks,
            memory=self.memory,
            lanes=self.lanes,
            lock=None,
            told=Announced(hosts=tuple(r.about.host for r in reports), kernels=tuple(r.about.kernels for r in reports)),
        )

    def _manager(self, team: GroupEpoch, rank: Rank) -> CheckpointManager:
        """Checkpoints of this generation. Once the run has begun members hold everything, and a recovery waits for no disk."""
        writer = Writer(generation=team.generation.number, life=team.generation.epoch, check=team.check)
        return open_checkpoints(rank, group=rank.peers.group, writer=writer, later=team.begun)

    def _peak(self, peers: Peers, told: Sequence[float]) -> float:
        """Peak FLOP/s of all ranks together. Members that joined later have not measured; where none is left that has, all do. Collective."""
        known = [rate for rate in told if rate]
        if not known:
            self.flops_per_s = self._measure_machine()
            return sum(peers.gather(self.flops_per_s))
        self.flops_per_s = self.flops_per_s or sum(known) / len(known)
        return len(told) * sum(known) / len(known)

    def _forget(self) -> None:
        """Drop what this member holds: the run does not continue from it, and in the next generation it must not count as a holder."""
        if self.trainer is not None:
            self.trainer.saving.drop()
        self.trainer, self.held, self.place, self._passed, self._is_new = None, None, None, "", True
        self.progress, self.hook = RunProgress(), Rebalancer(self.recipe, self.run.spec)

    def _adopt(self, trainer: Trainer | None, step: int, plan: GenerationPlan, *, announce: bool) -> None:
        """Makes the new trainer's state what this member holds; an idle one keeps what it has, until the others have gone on."""
        self.place_of = {uid: plan.state_descriptor(rank) for rank, uid in enumerate(plan.uids[: plan.folding.world])}
        self._idle, self._others_idle, self._entered = trainer is None, bool(plan.idle), plan
        self._pace.formed()
        self._signs.holders = plan.holders
        self.progress.step = step
        if trainer is None:
            return
        if self._is_new:
            self.progress.start = step
        if self.held is not None:
            self._passed = self.held.passed
        self.held, self._is_new = None, False
        trainer.go_on(self.progress, self.hook)
        self.hook.formed(step)
        self.trainer, self.place = trainer, plan.state_descriptor(trainer.rank.info.rank)
        if announce:
            trainer.reporter.announce()

    def _wait_with_all(self, value: Any = None) -> list[Any]:
        """Waits until every member of the generation is here; returns what each says."""
        assert self._everyone is not None
        return self._everyone.peers.gather(value)

    # -- a step

    def compute(self) -> None:
        if self._idle:
            self._wait_with_all()
            return
        self._mine.compute()
        if self._others_idle:
            self._wait_with_all()
        self._mine.recorder.voted()
        self._now("vote")

    def commit(self) -> None:
        if self._idle:  # what it holds is of the step before
            step = self.step + 1
            self._forget()
            self.progress.step = step
            return
        if self._mine.moving is not None:
            self._stand(self._plan_moved)
        self._mine.commit()
        self._is_in_step = True
        if self._may_lack:
            self._may_lack = False
            import_beside()

    def abort(self) -> None:
        if self.trainer is not None:
            self.trainer.abort()

    def _watch_pace(self, result: StepResult) -> float | None:
        """How slow the slowest member is; who is to go for it is kept until the loop asks."""
        assert self._entered is not None
        slowness, verdict = self._pace.committed(result, self._entered)
        if verdict is not None:
            told = self._pace.to_tell(verdict, self.step)
            if told is not None:
                self.sinks(told)
            if verdict.put_out:
                self._too_slow = dict.fromkeys(verdict.uids, verdict.why)
        return slowness

    def too_slow(self) -> Mapping[str, str]:
        """Members that the others go on without, and why: the same on all but those that are idle, which hear of it from them."""
        found, self._too_slow = self._too_slow, {}
        return found

    @property
    def _plan_moved(self) -> GenerationPlan:
        """The plan of this generation, but for where experts will be."""
        assert self._entered is not None and self._mine.moving is not None
        return replace(self._entered, placement=self._mine.moving.placements)

    def _stand(self, plan: GenerationPlan) -> None:
        """Where this member and the others stand from now on."""
        self._entered = plan
        self.place_of = {uid: plan.state_descriptor(rank) for rank, uid in enumerate(plan.uids[: plan.folding.world])}
        self.place = plan.state_descriptor(self._mine.rank.info.rank)

    # -- the end, or a part of it

    def hand_over(self, stay: Sequence[str]) -> bool:
        """Those that stay hold everything, or a checkpoint does."""
        done: bool | None = None  # idle members have nothing to give, and wait for the others
        if not self._idle:
            places = [self.place_of[uid] for uid in stay if uid in self.place_of]
            done = not self.run.planner.missing(places) or self._mine.saving.now(self._mine.parts, self.step)
        said = self._wait_with_all(done) if self._idle or self._others_idle else [done]
        return all(said_done is not False for said_done in said)

    def close(self, *, stopped: bool) -> None:
        if self._idle:
            self.outcome = self._wait_with_all()[0]
            return
        try:
            self.outcome = self._mine.close(stopped=stopped)
        except CheckpointError:
            self._mine.rank.peers.gather(None)  # raises `PeerError` where the cause is a member that was lost
            raise
        self._wait_with_all(self.outcome)  # no member leaves before all are done

    # -- what is reported

    def tell(self, event: Event, /) -> None:
        """Events of the loop, as a person wants them."""
        if self.watch is not None:
            self.watch.tell(event)
        self._telling(event)
        if isinstance(event, Reformed) and self.trainer is not None and self._entered is not None:
            self.trainer.tell_placed("members", self._entered.placement)

    @property
    def _mine(self) -> Trainer:
        if self.trainer is None:
            raise RunError("this member has entered no generation")
        return self.trainer


def _groups_of_others(recipe: Recipe, spec: ModelSpec, plan: GenerationPlan, team: GroupEpoch) -> None:
    """An idle member makes the groups of the mapping too, as all processes must, in the same order."""
    pipeline = resolve_pipeline(recipe, spec, plan.folding)
    team.groups.get(tuple(range(plan.folding.world)), purpose="control")
    groups = build_groups(
        plan.folding,
        rank=team.rank,
        cache=team.groups,
        table_ranks=pipeline.stages.table_ranks,
        message_ctas=message_ctas(recipe),
        in_order=recipe.launch.device == "cuda",
        rows=dispatch_spec(recipe.dispatch).rows_over,
    )
    if pipeline.pair_passes:
        with_second_groups(groups, cache=team.groups)


# ---- what the members of a generation have reported ------------------------------------------------------------------


def facts_of(generation: Generation, reports: Sequence[MemberReport]) -> list[Fact]:
    """What the reports say of the members; a member that holds an abandoned history has nothing. An idle one that learns only now that a step was committed holds the state before it; one that
    was cut off in a move of state has the wave that it was in doubt about if any member has passed it."""
    machine, found = {member.uid: member.host for member in generation.members}, resolve(reports)
    passed = {report.about.passed for report in reports} - {""}
    return [
        Fact(
            uid=report.uid,
            machine=machine[report.uid],
            rack=report.about.rack,
            descriptor=_descriptor_of(report, finish=report.uid in found.finish, accept=report.about.doubt in passed)
            if report.uid in found.holders
            else None,
        )
        for report in reports
    ]


def _descriptor_of(report: MemberReport, *, finish: bool, accept: bool) -> StateDescriptor | None:
    """`finish`: the member commits the step that it was in doubt about, before the plan is carried out; `accept`: the wave."""
    about = report.about
    if not report.holds or (about.idle and finish):
        return None
    return about.then if (finish or accept) and about.then is not None else about.descriptor
