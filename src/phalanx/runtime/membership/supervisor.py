"""The supervisor of one host: starts its workers, sees them die or freeze, and reports that to the membership service at once.

It runs no tensor operation and has no thread, so that it may fork at any time; it waits for processes, for the pipes of its workers, and for
signals. One of all supervisors also keeps the service where that is a store of our own (`runtime/membership/service.py`), and starts it again when it ends or hangs.

    a worker ends             known by its process handle; removed from the run, and a new one started in its place
    a worker is silent        removed after `limit_s`; if it wakes up again it is refused; its process is killed after `zombie_s`
    a worker is still         removed after `hang_s` where others wait for it, and killed (`hangs.py` has both rules, and says when nobody is removed)
    a whole host is silent    the other supervisors remove its members (heartbeats of supervisors pass through the service)
    SIGTERM, SIGINT           all members of this host leave: the step under way ends, they hand over, they go; alone, the run stops in good order
    SIGINT after that         ends everything at once

Must never change: no process of this host outlives its supervisor; nothing here decides what a worker holds or computes.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

from phalanx.core.clock import now_s
from phalanx.core.errors import PhalanxError, RunError, first_line, printable
from phalanx.core.events import Emit, Event, ignore
from phalanx.core.process import say
from phalanx.runtime.membership.hangs import HangRule, Hangs, longest_wait_s
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.keys import Service
from phalanx.runtime.membership.membership import FirstRule, Member, TooFewMembers
from phalanx.runtime.membership.service import END_S, HUNG_S, StoreProcess, start_store
from phalanx.runtime.membership.watcher import AgentSettings, too_few
from phalanx.runtime.membership.worker import STALE_CODE, Worker, fork_worker
from phalanx.runtime.membership.worker_agent import WorkerAgent
from phalanx.runtime.processes import (
    ANSWER_STOP,
    STOP_SIGNALS,
    STOPPED,
    STOPPING,
    WorldInfo,
    ends_at_once,
    free_screen,
    leave_terminal,
    on_stop,
    own_device,
)

TICK_S = 0.05
"""Longest time between two looks at what no handle announces."""
REMOVED_CODE = 69
"""Exit code of a host whose workers the others removed and were not replaced, while the run continues: start the host again (`EX_UNAVAILABLE` of sysexits.h)."""
OVER_S = 1.0
"""How often a host without a worker asks whether the run is over."""
FORK_S = 10.0
"""How long the place of a worker stays empty that could not be forked."""
ROUNDS = 3
"""A cause that ends all workers of a host, however many slots it has, may do so this often before the host gives up."""


@dataclass(frozen=True, kw_only=True)
class SupervisorSettings:
    """How one host takes part in a run."""

    host: str = "local"
    slots: int
    """Workers of this host."""
    wanted: int
    """Members of the whole run when it begins."""
    minimum: int = 1
    """The run waits while it has fewer members."""
    limit_s: float = 3.0
    """A worker, or a host, that is silent for so long is removed."""
    hang_s: float = 30.0
    """A worker that is still for so long while others wait is removed (`HangRule`)."""
    f: int = 2
    """Hosts (on one machine: ranks) that hold each piece of state at least."""
    gather_s: float = 5.0
    """How long the first generation (of a run, or after the service lost its values) waits for members that have not announced themselves."""
    wait_s: float = 600.0
    """How long a run with fewer members than `minimum` waits before it ends; before it begins, `gather_s` longer."""
    zombie_s: float = 30.0
    """A process that was removed while it did not answer is ended after so long."""
    respawns: int = 100
    """New workers in the place of those that ended, at most."""
    quick_deaths: int = 10
    """So many deaths in one slot, or by faults of their own in all slots (`ROUNDS` in each at least), with no step committed in between, end this host's part."""
    alone: bool = True
    """No other host can take part: a stop of this one, before the run begins, is a stop of the run."""
    rest_s: float = 600.0
    """How long the place of a worker stays empty that the others removed for being slow."""
    screen_slot: int | None = None
    """The slot whose worker draws on the terminal, and answers a stop there (`ANSWER_STOP`)."""
    drained_slots: Callable[[], frozenset[int]] = frozenset
    """Returns the slots that have no worker for now; called repeatedly (`train/recovery/drained_slots.py`)."""
    agent: AgentSettings = field(default_factory=AgentSettings)


@dataclass(frozen=True, kw_only=True)
class MemberLost(Event):
    """A worker of this host was lost."""

    uid: str
    host: str
    why: str
    at_s: float
    """When the supervisor knew."""
    told_s: float
    """How long it took until the service had the generation without it."""
    generation: int


@dataclass(frozen=True, kw_only=True)
class MemberStarted(Event):
    """A worker process was started."""

    uid: str
    host: str
    slot: int
    pid: int
    at_s: float


@dataclass(frozen=True, kw_only=True)
class ServiceRestarted(Event):
    """The membership service has ended, or did not answer any more, and is there again, without its values."""

    at_s: float
    pid: int


@dataclass(frozen=True, kw_only=True)
class RespawnsUsedUp(Event):
    """No new workers are started on this host any more: the places of those that end stay empty."""

    host: str
    started: int
    """Number started in the place of others, all that `SupervisorSettings.respawns` allows."""
    uid: str
    """Uid of the worker whose place stays empty."""
    why: str
    """What ended it."""


@dataclass(frozen=True, kw_only=True)
class SilentAwaited(Event):
    """So many are silent or still at once that nobody is removed for now."""

    host: str
    why: str


MemberMain = Callable[[WorkerAgent], int]
"""Body of one worker, run in a forked process: announces itself on its worker agent and takes part; returns its exit code."""


class Supervisor:
    """One host. `service`: where members meet; a store that was started is kept by this supervisor, and None starts one for this machine alone."""

    def __init__(
        self,
        main: MemberMain,
        settings: SupervisorSettings,
        *,
        service: Service | StoreProcess | None = None,
        tell: Emit = ignore,
    ) -> None:
        self.main, self.settings, self.tell = main, settings, tell
        service = start_store() if service is None else service
        self.store = service if isinstance(service, StoreProcess) else None
        self.service: Service = service.address if isinstance(service, StoreProcess) else service
        self.host_agent = HostAgent(
            settings.host,
            self.service,
            FirstRule(
                wanted=settings.wanted,
                minimum=settings.minimum,
                gather_s=settings.gather_s,
                lone_s=max(settings.wait_s, settings.gather_s),
            ),
            limit_s=settings.limit_s,
            f=settings.f,
            alone=settings.alone,
        )
        self.hangs = Hangs(
            HangRule(
                limit_s=settings.limit_s,
                hang_s=settings.hang_s,
                timeout_s=settings.agent.timeout_s,
                wait_s=settings.wait_s,
                f=settings.f,
            )
        )
        self._awaited = ""
        self._finished_s = 0.0
        """When all steps were done: what a worker still does then takes `zombie_s` at most."""
        self.workers: list[Worker] = []
        self.empty: set[int] = set()
        """Slots without a worker until they are no longer drained or resting."""
        self.rests: dict[int, float] = {}
        """Slots whose worker was too slow or could not be forked, and until when they stay empty."""
        self._over, self._over_s = False, 0.0
        """Whether the run is over, as far as a host without a worker knows, and when it asked last."""
        self._fork_failed = False
        self.started = 0
        self.deaths: Counter[int] = Counter()
        """Deaths of each slot since the last step, but for workers that were refused: that says nothing about the next
        one."""
        self.faults = 0
        """Those among them that no signal from outside caused."""
        self.signals = 0
        """Stop signals that counted: the second one ends all at once."""
        self.stops = False
        """This host leaves: by a signal, or because it gave up."""
        self._why_stop = ""
        self.codes: list[int] = []
        self.error: PhalanxError | None = None
        self._cause: PhalanxError | None = None
        """Error of the first worker that ended with one since the last step: the errors of its successors follow from it."""
        self._announce_stop = False
        self._short_since_s = 0.0
        self._wake, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> int:
        """Runs until all workers have ended; returns the exit code. Raises `RunError` where the run cannot go on. Call it from the
        main thread.

        0: the run is over, or this host has left it in good order. 130: stopped at once. Else that of a worker that failed, or 128
        + the signal that killed one whose place
        stayed empty (its state was not handed over), as a shell reports it, or `REMOVED_CODE` where the others removed one whose place
        stayed empty.
        """
        with self._listening():
            gc.freeze()
            for slot in range(self.settings.slots):
                if not self.stops:
                    self._start_or_wait(slot)
            try:
                while self._has_work:
                    self._turn()
                over = self.host_agent.finished is not None or (any(self.codes) and self.host_agent.is_over())
            finally:
                self._end_all()
        if self.signals > 1:
            if self.error is not None:
                say(printable(str(self.error)))
            return STOPPED
        if self.error is not None and self.host_agent.finished is None:
            raise self.error
        code = exit_code(self.codes, finished=self.host_agent.finished is not None, over=over)
        if self.error is not None and code:
            say(
                printable(
                    f"host {self.settings.host}: all steps are done, and a worker of this host failed: {self.error}"
                )
            )
        return code

    @property
    def _has_work(self) -> bool:
        """Whether a worker runs or may still be started. A worker that was forked while a second stop came is ended with the run."""
        if self.signals > 1:
            return False
        return any(not w.ended for w in self.workers) or bool(
            self.empty and self._goes_on and not self._ended_elsewhere()
        )

    # -- one turn

    def _answer_stop(self) -> None:
        screen = next((w for w in self.workers if w.slot == self.settings.screen_slot and not w.ended), None)
        if screen is not None:
            screen.send(ANSWER_STOP)
        else:
            say(STOPPING)

    def _turn(self) -> None:
        self._wait()
        if self.signals == 1 and self._announce_stop:
            self._announce_stop = False
            self._answer_stop()
        self._read_workers()
        self._reap()
        self._find_hung()
        self._fill()
        self._keep_service()
        self.host_agent.tick()
        self._report_lost()
        self._watch_minimum()

    def _wait(self) -> None:
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            for worker in self.workers:
                if not worker.ended and hasattr(os, "pidfd_open"):
                    with contextlib.suppress(ProcessLookupError):  # a signal handler has collected its status
                        handle = os.pidfd_open(worker.pid)
                        stack.callback(os.close, handle)
                        poll.register(handle, select.POLLIN)
                if worker.pipe >= 0:
                    poll.register(worker.pipe, select.POLLIN)
            asked_s = time.monotonic()
            poll.poll(TICK_S * 1000)
            slept_s = time.monotonic() - asked_s
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        if (
            slept_s > TICK_S + self.settings.limit_s / 4
        ):  # this process itself was stopped: the silence of others means nothing
            for worker in self.workers:
                worker.forgive()
            self.host_agent.forgive()

    def _read_workers(self) -> None:
        for worker in self.workers:
            self._handle(worker)

    def _handle(self, worker: Worker) -> None:
        for words in worker.read():
            if "announced" in words:
                self.host_agent.announced(worker.member)
            if "leave" in words:
                self._leave_alone(worker)
            if "rest" in words:
                self.rests[worker.slot] = time.monotonic() + self.settings.rest_s
            if "begun" in words:
                self.host_agent.begun = True
            if "step" in words:
                self.hangs.stepped()
                self.deaths.clear()
                self.faults, self._cause = 0, None
            if "finished" in words:
                self.host_agent.finished = str(words["finished"])

    def _leave_alone(self, worker: Worker) -> None:
        """One worker was asked to leave. One that is to join a run under way holds nothing, and would wait for ever: it is not proposed any more."""
        self.host_agent.leave([worker.uid], "was asked to leave")
        newest = self.host_agent.newest
        if newest is not None and worker.uid not in newest.uids and not worker.ended:
            worker.removed_s = worker.removed_s or time.monotonic()
            self.host_agent.died(worker.uid, "was asked to leave before it took part")
            worker.kill()

    def _reap(self) -> None:
        for worker in list(self.workers):
            if worker.killed:
                worker.reap()
            elif not worker.ended and worker.reap():
                self._handle(worker)
                self._ended(worker)

    def _ended(self, worker: Worker) -> None:
        worker.close()
        if worker.left_well:
            self.codes.append(0)
            self.host_agent.gone(worker.uid)
            if worker.slot in self.rests and self._goes_on:
                self.empty.add(worker.slot)
            return
        self.host_agent.died(worker.uid, worker.cause())
        self.host_agent.tick()  # the others wait for this; a new process can come later
        if worker.slot == self.settings.screen_slot:  # who told of losses cannot tell of its own
            free_screen()
            say(printable(f"host {self.settings.host}: {worker.uid} {worker.cause()}"))
        if worker.removed_s:
            return
        self.deaths[worker.slot] += worker.code != STALE_CODE
        self.faults += worker.failed
        self.error = worker.error() or self.error
        if self._may_respawn(worker):
            self._start_or_wait(worker.slot)
        else:
            self.codes.append(worker.code)

    def _may_respawn(self, worker: Worker) -> bool:
        if self.stops or self.host_agent.finished is not None or self._is_used_up(worker):
            return False
        if isinstance(self.error, PhalanxError) and not isinstance(self.error, RunError):
            self._give_up(self.error)  # what the user must change: it would be the same again
            return False
        most = self.settings.quick_deaths
        if self.deaths[worker.slot] >= most or self.faults >= max(most, ROUNDS * self.settings.slots):
            count = sum(self.deaths.values())
            self._give_up(
                self.error or RunError(f"{count} workers ended one after another, the last one: {worker.cause()}")
            )
            return False
        self._cause, self.error = self._cause or self.error, None
        return True

    def _is_used_up(self, worker: Worker) -> bool:
        """Whether its slot stays empty because all restarts are used up; reported each time, because each time the run shrinks."""
        most = self.settings.respawns
        if self.started < self.settings.slots + most:
            return False
        why = worker.cause() if worker.ended else "was silent for too long"
        text = f"host {self.settings.host}: slot {worker.slot} will not be restarted ({why}): the limit of {most} restarts is used up"
        say(printable(text))
        self.tell(RespawnsUsedUp(host=self.settings.host, started=most, uid=worker.uid, why=why))
        return True

    def _give_up(self, error: PhalanxError) -> None:
        if self._cause is not None and isinstance(error, RunError) and str(self._cause) != str(error):
            error = RunError(f"{error}\nbefore that: {self._cause}")
        self.error = error
        self.stops, self._why_stop = True, first_line(error)
        mine = [w.uid for w in self.workers if not w.ended]
        self.host_agent.leave_or_stop(mine, self._why_stop)
        self._end_joiners()

    def _find_hung(self) -> None:
        now, uids = time.monotonic(), () if self.host_agent.newest is None else self.host_agent.newest.uids
        running = [w for w in self.workers if not w.ended and not w.removed_s]
        members = [w for w in running if w.uid in uids]
        self.host_agent.workers_are(quiet=bool(self.hangs.quiet(members, now)), waits_s=longest_wait_s(members, now))
        f = self.host_agent.f = min([self.settings.f, *(w.holders for w in members if w.holders)])
        for worker, why in self.hangs.put_out(members, self.host_agent.other_hosts(), now, f=f).items():
            self._put_out(worker, why)
            if self.stops:  # what it holds is not handed over
                self.codes.append(-signal.SIGKILL)
        for worker in running:
            if worker.uid not in uids:
                self._find_hung_joiner(worker, now)
        if self.host_agent.finished is not None:
            self._finished_s = self._finished_s or now
        for worker in self.workers:
            late_s = now - (worker.removed_s or self._finished_s or now)
            if not worker.ended and late_s > self.settings.zombie_s:
                worker.kill()
        self._say_awaited("; ".join(filter(None, (self.hangs.awaited, self.host_agent.awaited))))

    def _find_hung_joiner(self, worker: Worker, now: float) -> None:
        """One that is in no generation holds nothing."""
        silent_s, limit_s, agent = now - worker.last_read_s, self.settings.agent.timeout_s, self.settings.agent
        begins = agent.device != "cpu" and not worker.was_heard  # it has no device yet (`_work`)
        if silent_s > (max(self.settings.limit_s, agent.meet_s) if begins else self.settings.limit_s):
            self._put_out(worker, f"was silent for {silent_s:.1f} s")
        elif worker.still_since_s and now - worker.still_since_s > limit_s:
            still_s = now - worker.still_since_s
            self._put_out(worker, f"made no progress for {still_s:.1f} s before it took part ({worker.stands})")

    def _put_out(self, worker: Worker, why: str) -> None:
        """The run continues without a worker whose process exists. One that is silent may wake up and say so; one that is still never will."""
        worker.removed_s = time.monotonic()
        self.host_agent.died(worker.uid, why)
        if worker.still_since_s:
            worker.kill()
        if self._goes_on and self._is_used_up(worker):
            self.codes.append(-signal.SIGKILL)
        elif self._goes_on:
            self._start_or_wait(worker.slot)

    def _say_awaited(self, text: str) -> None:
        """Once, until it is over: the numbers in it change meanwhile."""
        if text and not self._awaited:
            say(f"host {self.settings.host}: {text}")
            self.tell(SilentAwaited(host=self.settings.host, why=text))
        self._awaited = text

    def _keep_service(self) -> None:
        """Start a store again that has ended, or has not answered for `HUNG_S`: at the same address, which this process holds."""
        if self.store is None:
            return
        if self.host_agent.unanswered_s > HUNG_S:
            self.store.kill()
            self.host_agent.forgive()
        if self.store.reap():
            self.store.start()
            self.tell(ServiceRestarted(at_s=now_s(), pid=self.store.pid))

    def _report_lost(self) -> None:
        for lost in self.host_agent.take_lost():
            self.tell(
                MemberLost(
                    uid=lost.uid,
                    host=self.settings.host,
                    why=lost.why,
                    at_s=lost.at_s,
                    told_s=lost.told_s,
                    generation=lost.generation,
                )
            )

    def _watch_minimum(self) -> None:
        """A run that has waited too long for members ends; its workers save what they hold. One that never began, or not again after its service lost its values, ends on each host by itself."""
        newest, begins = self.host_agent.newest, self.host_agent.waits
        if self.stops or not (begins or (newest is not None and not newest.enough)):
            self._short_since_s = 0.0
            return
        limit_s = self.settings.wait_s + (self.settings.gather_s if begins else 0.0)
        if not self._short_since_s:
            self._short_since_s = time.monotonic()
        elif time.monotonic() - self._short_since_s > limit_s:
            if newest is not None and not begins:
                self._end_run(too_few(newest, limit_s))
            else:
                self.error, self.stops = self._never_began(limit_s), True
                self._end_joiners()

    def _never_began(self, waited_s: float) -> PhalanxError:
        s, newest = self.settings, self.host_agent.newest
        if newest is not None:
            return TooFewMembers(
                f"the membership service lost its values, and of the members of generation {newest.number} ({', '.join(newest.uids) or 'none'}) none that may live "
                f"came back; host {s.host} waited {waited_s:g} s (resilience.wait_s, and {s.gather_s:g} s for ranks that start). The same command continues from the newest checkpoint"
            )
        return TooFewMembers(
            f"the run has not begun: {self.host_agent.num_ready()} ranks of all hosts are ready, and it needs {s.minimum} (resilience.minimum); host {s.host} waited "
            f"{waited_s:g} s (resilience.wait_s, and {s.gather_s:g} s for ranks that start). Start this host again together with the others"
        )

    def _end_run(self, error: PhalanxError) -> None:
        """Ends the run on all hosts. No member leaves alone, so that those that are left save their state together."""
        self.error, self.stops = error, True
        self.host_agent.stop(first_line(error))
        self._end_joiners()

    # -- processes and signals

    @property
    def _goes_on(self) -> bool:
        return not self.stops and self.host_agent.finished is None

    def _ended_elsewhere(self) -> bool:
        """Whether the run is over. For a host all of whose slots are empty (resting, drained): none of its workers could report that."""
        now = time.monotonic()
        if not self._over and now - self._over_s >= OVER_S:
            self._over, self._over_s = self.host_agent.is_over(), now
        return self._over

    def _start_or_wait(self, slot: int) -> None:
        if slot in self.settings.drained_slots():
            self.empty.add(slot)
        else:
            self._start(slot)

    def _fill(self) -> None:
        """Start workers in slots that are no longer drained or resting."""
        if not self.empty or not self._goes_on:
            return
        now = time.monotonic()
        self.rests = {slot: until_s for slot, until_s in self.rests.items() if until_s > now}
        back = self.empty - self.settings.drained_slots() - set(self.rests)
        self.empty -= back
        for slot in sorted(back):
            self._start(slot)

    def _start(self, slot: int) -> None:
        uid = f"{self.settings.host}.{slot}.{secrets.token_hex(3)}"
        sys.stdout.flush()
        sys.stderr.flush()
        member, pipes = Member(uid=uid, host=self.settings.host), [w.pipe for w in self.workers]
        try:
            worker = fork_worker(partial(self._work, slot), member, slot=slot, close=pipes)
        except OSError as err:
            self._start_later(slot, err)
            return
        self._fork_failed = False
        self.workers.append(worker)
        self.started += 1
        self.tell(MemberStarted(uid=uid, host=self.settings.host, slot=slot, pid=worker.pid, at_s=now_s()))
        if self.stops:  # a signal came while it was forked, and did not find it among the workers
            self._leave(self._why_stop)

    def _start_later(self, slot: int, err: OSError) -> None:
        """The machine, or its container, has no room for another process now: that ends none of those which are there."""
        self.empty.add(slot)
        self.rests[slot] = time.monotonic() + FORK_S
        if not self._fork_failed:
            self._fork_failed = True
            say(
                f"host {self.settings.host}: cannot start a worker in slot {slot} ({first_line(err)}); tries again every {FORK_S:g} s"
            )

    def _work(self, slot: int, member: Member, pipe: int) -> int:
        """Does the worker's part in the forked process. Heartbeats begin once it has its device: making CUDA's context holds Python's lock for seconds, on all ranks at once for longer."""
        for fd in (self._wake, self._waker):
            os.close(fd)
        slots = self.settings.slots
        own_device(WorldInfo(rank=slot, world=slots, local_rank=slot, local_world=slots), self.settings.agent.device)
        with WorkerAgent(member, self.service, pipe=pipe, settings=self.settings.agent) as agent:
            signal.signal(signal.SIGTERM, lambda number, frame: agent.leave())
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, lambda number, frame: leave_terminal())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            return self.main(agent)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        before = on_stop(self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for fd in (self._wake, self._waker):
                os.close(fd)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
            for worker in self.workers:
                worker.send(signal.SIGHUP)
        if self.signals and not ends_at_once(number):
            return
        self.signals += 1
        if self.signals == 1:
            self._announce_stop = True
            if not self.stops:  # else this host has given up, and leaves already
                self.stops, self._why_stop = True, f"its host got {signal.Signals(number).name}"
                self._leave(self._why_stop)
        else:
            for worker in self.workers:
                worker.kill()
        with contextlib.suppress(OSError):
            os.write(self._waker, b"!")

    def _leave(self, why: str) -> None:
        """This host's workers leave after a hand-over; those that hold nothing end at once. May be repeated."""
        self.host_agent.leave_or_stop([w.uid for w in self.workers if not w.ended], why)
        if self.host_agent.newest is not None or not self.settings.alone:
            self._end_joiners()

    def _end_joiners(self) -> None:
        """Workers that are in no generation yet hold nothing, and would wait for one for ever."""
        taking_part = () if self.host_agent.newest is None else self.host_agent.newest.uids
        for worker in self.workers:
            if not worker.ended and worker.uid not in taking_part:
                worker.removed_s = worker.removed_s or time.monotonic()
                worker.kill()

    def _end_all(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.close()
        end_s = time.monotonic() + END_S
        while not all(w.gone for w in self.workers) and time.monotonic() < end_s:
            time.sleep(0.001)
        self.host_agent.close()
        if self.store is not None:
            self._wait_for_others()
            self.store.stop()

    def _wait_for_others(self) -> None:
        """The service stays until the other hosts have ended, for a short while."""
        end_s = time.monotonic() + self.settings.limit_s
        while self.host_agent.others_alive() and time.monotonic() < end_s:
            time.sleep(TICK_S)


def exit_code(codes: Sequence[int], *, finished: bool, over: bool) -> int:
    """Exit code of a host whose last workers ended with `codes`, below 0: by that signal.

    `finished`: all steps are done, so a killed worker is not missed. `over`: they are, or the run was stopped, so that no host
    can join it again.
    """
    failed = [code for code in codes if code > 0 and code != STALE_CODE]
    killed = [128 - code for code in codes if code < 0 and not finished]
    removed_s = [REMOVED_CODE for code in codes if code == STALE_CODE and not over]
    return max(failed or killed or removed_s, default=0)
