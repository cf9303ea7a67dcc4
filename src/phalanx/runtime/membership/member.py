"""The loop of one member of a run: connect, agree on the step, compute, vote, commit; and again when a member is lost or joins.

It knows no model. What is computed is a `Body`: the trainer's, or the small vectors of `phalanx_lab/bench/storm/toy.py`.

Must never change: `commit` is called once for each step, in order; nothing that a step computes is visible in the body's state before.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.core.clock import now_s
from phalanx.core.errors import PeerError, RunError
from phalanx.core.events import Emit, Event, ignore
from phalanx.plan.recovery import StateReport
from phalanx.runtime.comm import DeviceThread
from phalanx.runtime.membership.keys import ServiceLost
from phalanx.runtime.membership.rendezvous import GroupEpoch, Order, as_listed
from phalanx.runtime.membership.steps import ABORT, Decision, run_steps
from phalanx.runtime.membership.votes import InDoubt, MemberReport, Resolution, resolve
from phalanx.runtime.membership.watcher import End, Left, RunOver
from phalanx.runtime.membership.worker_agent import WorkerAgent

SAME_FAILURES = 3
"""A step that fails so often although no member is lost has another cause than a lost peer."""


class Body(Protocol):
    """What a member computes. All methods are called by the worker's own thread, or by that of a group epoch while the worker's waits for it."""

    @property
    def step(self) -> int:
        """Steps committed."""

    @property
    def holds(self) -> bool:
        """Whether it has state."""

    def describe(self) -> tuple[str, StateReport]:
        """(checksum, what else the others must know) for the report to them."""

    def enter(self, team: GroupEpoch, resolution: Resolution) -> None:
        """Take the state of `resolution.step` where this member lacks it, from `resolution.holders`; build groups, plans. Collective.

        If no member holds state (`resolution.step` is None): start from scratch only in a run that has never begun, else from a checkpoint.
        """

    def compute(self) -> None:
        """One step up to its reduced gradients; changes no state. Raises `PeerError` or `RuntimeError` where a peer is lost."""

    def commit(self) -> None:
        """Apply what was reduced. Needs no other member."""

    def too_slow(self) -> Mapping[str, str]:
        """Members that the run is to continue without, and why; asked after a commit, the same on all that were in the step."""

    def abort(self) -> None:
        """Drop what was reduced, whole or in part."""

    def hand_over(self, stay: Sequence[str]) -> bool:
        """Some members leave: give what only they hold to those that `stay`, over the groups that all are still in. Collective.

        False on all if it failed although no rank was lost: then no member leaves.
        """

    def close(self, *, stopped: bool) -> None:
        """All steps are done, or (`stopped`) the run is to end here: save what must be kept. Collective; no member has left yet.

        Called again, in the next generation, where a peer is lost in it.
        """

    def leave_epoch(self) -> None:
        """Drop every process group, plan and message of the group epoch."""

    def finished(self) -> bool:
        """Whether all steps are done; the same answer on all members at the same step."""


@dataclass(frozen=True, kw_only=True)
class Reformed(Event):
    """A generation is connected, as one member saw it."""

    uid: str
    generation: int
    life: str
    """Life of the service: `Generation.epoch`."""
    members: int
    why: str
    at_s: float
    lost_s: float
    """When the supervisor detected a loss; 0: no member was lost."""
    told_s: float
    """How long it took until this member knew."""
    broken_s: float
    """When this member saw that the last group epoch was broken; 0 where it was not."""
    formed_s: float
    """How long the barrier and the groups took."""
    entered_s: float
    """How long the state took that came from others."""
    step: int
    """Steps committed."""


@dataclass(frozen=True, kw_only=True)
class Committed(Event):
    """A member applied a step."""

    uid: str
    generation: int
    step: int
    """Steps committed, this one included."""
    at_s: float
    doubt: bool = False
    """It had voted and learned the decision from the members of a later generation only."""


def run_member(
    agent: WorkerAgent, body: Body, *, tell: Emit = ignore, order: Order = as_listed, thread: DeviceThread | None = None
) -> str:
    """Take part until the run ends; returns why it did: finished, stopped, left or missed the end. The worker agent has been announced.

    `order` decides the ranks of each generation from its reports. `thread`: where group epochs run, on devices (`runtime/comm/devices.py`, "thread"); None: in the thread that calls.

    Raises `StaleMember`, and whatever the body raises that is no lost peer.
    """
    agent.tell = tell
    return _Loop(agent, body, tell, order, thread).run()


class _Loop:
    def __init__(
        self, agent: WorkerAgent, body: Body, tell: Emit, order: Order, thread: DeviceThread | None = None
    ) -> None:
        self.agent, self.body, self.tell, self.order = agent, body, tell, order
        self.thread = thread
        self.doubt = 0
        """Generation in which this member voted without learning the decision; 0: none."""
        self.broken_s = 0.0
        self.failures: list[tuple[int, str]] = []
        """(step, error) of failures since the membership last changed."""
        self.uids: tuple[str, ...] = ()

    def run(self) -> str:
        while True:
            try:
                team = self.agent.next_epoch(self._report(), order=self.order)
            except Left:
                return "left"
            except RunOver as err:
                return self._at_the_end(err.end)
            why = self._run_epoch(team) if self.thread is None else self._run_in(self.thread, team)
            self.body.leave_epoch()
            if why:
                return why

    def _report(self) -> MemberReport:
        checksum, about = self.body.describe()
        return MemberReport(
            uid=self.agent.uid,
            step=self.body.step,
            holds=self.body.holds,
            doubt=self.doubt > 0,
            sum=checksum,
            about=about,
        )

    def _run_in(self, thread: DeviceThread, team: GroupEpoch) -> str:
        def epoch() -> str:
            self.agent.progress.take_over()
            return self._run_epoch(team)

        try:
            return thread.run(epoch)
        finally:
            self.agent.progress.take_over()

    def _run_epoch(self, team: GroupEpoch) -> str:
        """Steps until the group epoch ends; why the run ends, or an empty string."""
        if team.generation.uids != self.uids:
            self.failures.clear()
        self.uids = team.generation.uids
        self._settle_doubt(team)
        begin_s = now_s()
        if self._failed(lambda: self.body.enter(team, resolve_now(team, self.body.step))):
            return ""
        self.tell(
            Reformed(
                uid=self.agent.uid,
                generation=team.generation.number,
                life=team.generation.epoch,
                members=team.size,
                why=team.generation.why,
                at_s=now_s(),
                lost_s=team.generation.lost_s,
                told_s=self.agent.told_s(team.generation),
                broken_s=self.broken_s,
                formed_s=team.formed_s,
                entered_s=now_s() - begin_s,
                step=self.body.step,
            )
        )
        self.broken_s = 0.0
        if not team.generation.enough:
            return self._too_few()
        while not self.body.finished():
            decision = run_steps(self.body, self._step)
            if decision.then == "stop" and not self.body.finished():
                return self._stop()
            if not decision.commit or decision.then == "next":
                return ""
            if decision.then == "leave" and self._part(self.agent.leavers):
                return ""
        if self._failed(lambda: self.body.close(stopped=False)):
            return ""
        self.agent.finish(self.body.step)
        return "finished"

    def _too_few(self) -> str:
        """The group epoch was formed only to save the state of its members, or of some that leave."""
        leavers: dict[str, str] = {}
        if self._failed(lambda: leavers.update(self.agent.waits_or_ends())):
            return ""
        if not leavers:
            return self._stop()
        self._part(lambda: leavers)
        return ""

    def _stop(self) -> str:
        if self._failed(lambda: self.body.close(stopped=True)):
            return ""
        self.agent.stopped()
        return "stopped"

    def _settle_doubt(self, team: GroupEpoch) -> None:
        resolution = resolve(team.reports)
        if self.agent.uid in resolution.finish:
            self._commit(team.generation.number, doubt=True)
        elif self.doubt:
            self.body.abort()
        self.doubt = 0

    def _step(self) -> Decision:
        decision = self._try_step()
        if decision.commit and decision.then != "stop":
            self.agent.request_exclusion(self.body.too_slow())
        return decision

    def _try_step(self) -> Decision:
        step, number = self.body.step, self.agent.team.generation.number if self.agent.team else 0
        if self._failed(self.body.compute):
            self.body.abort()
            self.agent.settle(step)
            return ABORT
        try:
            decision = self.agent.vote(step)
        except InDoubt:
            return self._after_doubt(step, number)
        except ServiceLost:  # before the vote was written; the others wait for it
            self._broken()
            self.body.abort()
            self.agent.settle(step)
            return ABORT
        if decision.commit:
            self._commit(number)
        else:
            self._broken()
            self.body.abort()
        return decision

    def _after_doubt(self, step: int, number: int) -> Decision:
        """A service that was unavailable for a moment and lost nothing still knows the decision; else the next generation settles it."""
        self._broken()
        decision = self.agent.settle(step)
        if decision is None:
            self.doubt = number
            return ABORT
        if decision.commit:
            self._commit(number)
        else:
            self.body.abort()
        return decision

    def _commit(self, generation: int, *, doubt: bool = False) -> None:
        self.body.commit()
        self.tell(Committed(uid=self.agent.uid, generation=generation, step=self.body.step, at_s=now_s(), doubt=doubt))

    def _part(self, leavers: Callable[[], Mapping[str, str]]) -> bool:
        """Some members leave; returns whether the group epoch ends. They stay members until their state is with the others: if one of
        these is lost meanwhile, the leavers are members of the next generation too, and a source of its state."""
        done: list[Mapping[str, str]] = []

        def give() -> None:
            found = leavers()
            if found and self.body.hand_over(self._stay(found)):
                done.append(found)

        if self._failed(give):
            return True
        if done:
            self.agent.gave_up(done[0], given_to=self._stay(done[0]))
        else:
            self.agent.kept()
        return bool(done)

    def _stay(self, leavers: Mapping[str, str]) -> list[str]:
        return [] if self.agent.team is None else [uid for uid in self.agent.team.uids if uid not in leavers]

    def _failed(self, work: Callable[[], None]) -> bool:
        """Run `work`; True where a peer was lost in it. The error keeps no frame alive, and with it no message."""
        try:
            work()
            return False
        except (PeerError, RuntimeError) as err:
            text, where = f"{type(err).__name__}: {err}", "".join(traceback.format_tb(err.__traceback__)[-3:])
            err.__traceback__ = None
        except Exception as err:
            if not self.agent.may_be_invalid():
                raise
            text, where = f"{type(err).__name__}: {err}", ""
            err.__traceback__ = None
        self._broken()
        if self.thread is not None:
            self.thread.is_spoiled = True
            self.agent.leave_broken()
            useless = self.thread.why_useless()
            if useless:
                raise RunError(
                    f"the device does no more work for this process, which ends ({useless}): {text}\n{where}"
                )
        self.failures.append((self.body.step, text))
        same = [t for s, t in self.failures if s == self.body.step]
        if len(same) >= SAME_FAILURES and not self.agent.broken():
            raise RunError(
                f"step {self.body.step + 1} failed {len(same)} times although no rank was lost: {same[-1]}\n{where}"
            )
        return True

    def _broken(self) -> None:
        if not self.broken_s:
            self.broken_s = now_s()

    def _at_the_end(self, end: End | None) -> str:
        """The run is over without this member. A doubt about the very last step of the very generation that ended it is settled by that."""
        if end is None:
            return "stopped"
        if self.doubt == end.generation and self.body.step + 1 == end.step:
            self._commit(end.generation, doubt=True)
        return "finished" if self.body.step == end.step else "missed the end"


def resolve_now(team: GroupEpoch, own_step: int) -> Resolution:
    """Resolution of the reports, once every doubt is settled."""
    found = resolve(team.reports)
    if found.step is not None and team.uid in found.holders and own_step > found.step:
        raise RunError(f"this member has committed {own_step} steps and the others {found.step}; nothing was changed")
    return found
