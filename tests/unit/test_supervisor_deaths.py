"""Which deaths of workers end a host's part in a run, with workers that are no processes."""

from __future__ import annotations

import errno
import os
import signal
import time
from base64 import b64encode
from dataclasses import replace
from types import SimpleNamespace

import pytest
from membership_help import MemoryService

from phalanx.core import messages
from phalanx.core.errors import RunError
from phalanx.core.events import Event
from phalanx.runtime.membership import supervisor
from phalanx.runtime.membership.membership import Member, Membership, TooFewMembers
from phalanx.runtime.membership.supervisor import ServiceRestarted, Supervisor, SupervisorSettings
from phalanx.runtime.membership.worker import STALE_CODE, Worker

pytestmark = pytest.mark.unit

EXITED = {code: code << 8 for code in (1, STALE_CODE)}


class NoProcess(Worker):
    """A worker that is none: no process is asked for or ended."""

    def __init__(self, uid: str, slot: int) -> None:
        super().__init__(Member(uid, "h"), slot=slot, pid=os.getpid(), pipe=-1)

    def reap(self) -> bool:
        return self.ended

    def kill(self) -> None:
        self.status = self.status if self.ended else int(signal.SIGKILL)


class Host(Supervisor):
    """Starts workers that are not there."""

    def _start(self, slot: int) -> None:
        self.workers.append(NoProcess(f"h.{slot}.{self.started}", slot))
        self.started += 1

    def all_end(self, status: int, count: int | None = None) -> None:
        for worker in [w for w in self.workers if not w.ended][:count]:
            worker.status = status
            self._ended(worker)


def host(slots: int) -> Host:
    found = Host(lambda agent: 0, SupervisorSettings(slots=slots, wanted=slots), service=MemoryService())
    for slot in range(slots):
        found._start(slot)
    return found


@pytest.mark.parametrize("status", [EXITED[STALE_CODE], int(signal.SIGKILL), int(signal.SIGTERM)])
@pytest.mark.parametrize("slots", [4, 12, 64])
def test_a_host_comes_back_from_a_cut_and_from_kills_whatever_its_size(status: int, slots: int) -> None:
    found = host(slots)
    found.all_end(status)
    assert found.stops == 0 and found.error is None
    assert sum(not w.ended for w in found.workers) == slots


def test_faults_of_their_own_end_a_host_after_some_rounds() -> None:
    found = host(12)
    for _ in range(2):
        found.all_end(EXITED[1])
        assert found.stops == 0
    found.all_end(EXITED[1])
    assert found.stops == 1
    assert isinstance(found.error, RunError) and "36 workers ended one after another" in str(found.error)


@pytest.mark.parametrize("status", [int(signal.SIGSEGV), int(signal.SIGKILL)])
def test_a_slot_whose_workers_never_make_a_step_ends_its_host(status: int) -> None:
    """A kernel without memory ends them from outside, again and again."""
    found = host(2)
    for _ in range(9):
        found.all_end(status, count=None)
    assert found.stops == (1 if status == signal.SIGSEGV else 0)
    found.all_end(status)
    assert found.stops == 1


def test_a_step_forgives_what_was_before() -> None:
    found = host(2)
    for _ in range(30):
        found.all_end(int(signal.SIGKILL))
        found.deaths.clear()  # what `_handle` does with the word of a step
    assert found.stops == 0


def test_a_slot_that_was_too_slow_is_filled_again_after_its_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SupervisorSettings(slots=2, wanted=2, rest_s=1000.0)
    found, now = Host(lambda agent: 0, settings, service=MemoryService()), time.monotonic()
    for slot in range(2):
        found._start(slot)
    monkeypatch.setattr(NoProcess, "read", lambda self: [{"rest": True}] if self.slot else [])
    found._read_workers()
    found.workers[1].status = 0
    found._ended(found.workers[1])
    for later_s, workers in ((990, 2), (1010, 3)):
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda at=now + later_s: at))
        found._fill()
        assert len(found.workers) == workers


def test_a_worker_is_one_process() -> None:
    """kill(-1) is everybody."""
    for pid in (-1, 0):
        with pytest.raises(ValueError, match="is not the id of a process"):
            Worker(Member("h.0.x", "h"), slot=0, pid=pid, pipe=-1)


def forked() -> Worker:
    """A worker whose process has ended and whose status nobody has collected."""
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return Worker(Member("h.0.x", "h"), slot=0, pid=pid, pipe=-1)


@pytest.mark.parametrize("first", ["reap", "kill"])
def test_a_signal_handler_may_kill_a_worker_whose_status_is_being_collected(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler of the second Ctrl-C comes behind `waitpid`, before its result is kept."""
    worker, wait = forked(), os.waitpid

    def interrupted(pid: int, options: int) -> tuple[int, int]:
        monkeypatch.setattr(os, "waitpid", wait)
        found = wait(pid, options)
        worker.kill()
        return found

    monkeypatch.setattr(os, "waitpid", interrupted)
    getattr(worker, first)()
    assert worker.code == 3


def test_a_kill_that_a_signal_handler_was_faster_with_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pid, kill = os.fork(), os.kill
    if pid == 0:
        signal.pause()
    worker = Worker(Member("h.0.x", "h"), slot=0, pid=pid, pipe=-1)

    def interrupted(pid: int, number: int) -> None:
        monkeypatch.setattr(os, "kill", kill)
        worker.kill()
        kill(pid, number)

    monkeypatch.setattr(os, "kill", interrupted)
    worker.kill()
    assert worker.code == -signal.SIGKILL


def test_a_worker_that_is_forked_while_a_second_stop_comes_is_not_waited_for() -> None:
    found = host(2)
    found.signals = 2
    assert not found._has_work


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_ends_or_hangs_is_replaced_at_its_address(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Event] = []
    monkeypatch.setattr(supervisor, "HUNG_S", 0.1)
    found = Supervisor(lambda agent: 0, SupervisorSettings(slots=1, wanted=1), tell=told.append)
    store = found.store
    assert store is not None
    try:
        epoch, pid, address = found.service.connect().epoch, store.pid, store.address
        found.host_agent.tick()
        os.kill(pid, number)
        end_s = time.monotonic() + 60.0
        while not told and time.monotonic() < end_s:
            found.host_agent.tick()
            found._keep_service()
        assert [type(event) for event in told] == [ServiceRestarted]
        assert store.pid != pid and store.address == address and found.service.connect().epoch != epoch
    finally:
        store.stop()


def test_a_worker_that_hangs_before_it_takes_part_is_replaced() -> None:
    """In an import, say: its heartbeats go on, and it is in no generation."""
    here = host(2)
    hung, other = here.workers
    hung.still_since_s, hung.stands = time.monotonic() - 599.0, "start, loader.py:7 in read"
    here._find_hung()
    assert not hung.ended
    hung.still_since_s -= 2.0
    here._find_hung()
    assert hung.ended and not other.ended and len(here.workers) == 3
    (lost,) = here.host_agent._unreported
    assert "made no progress for 601" in lost.why and "before it took part (start, loader.py:7 in read)" in lost.why


def test_a_worker_that_hangs_after_the_last_step_is_ended() -> None:
    here = host(2)
    here.host_agent.finished = "8 1"
    here._find_hung()
    assert not any(w.ended for w in here.workers)
    here._finished_s -= here.settings.zombie_s + 1.0
    here._find_hung()
    assert all(w.ended for w in here.workers) and len(here.workers) == 2, "and nobody is started any more"


def in_turns(found: Supervisor) -> int:
    """`run` where no process is there to be waited for."""
    found._wait = found._find_hung = lambda: None  # type: ignore[method-assign]
    return found.run()


@pytest.mark.parametrize("slots", [1, 4])
def test_a_stop_while_workers_are_forked_is_heard(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fork_worker` holds signals back until its worker is there, and it is no member of the list yet then."""
    forked: list[NoProcess] = []

    def fork(work: object, member: Member, *, slot: int, close: object) -> Worker:
        forked.append(NoProcess(member.uid, slot))
        if len(forked) == min(2, slots):
            found._on_signal(signal.SIGTERM, None)
        return forked[-1]

    monkeypatch.setattr(supervisor, "fork_worker", fork)
    settings = SupervisorSettings(host="h", slots=slots, wanted=9, alone=False)
    found = Supervisor(lambda agent: 0, settings, service=MemoryService())
    assert in_turns(found) == 0
    assert len(forked) == min(2, slots) and all(w.ended for w in forked)
    assert found.host_agent._dead.keys() == {w.uid for w in forked}


def test_a_worker_that_is_forked_while_its_host_leaves_is_no_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replacement, in a run under way."""
    found = member_host("h", "other")
    monkeypatch.setattr(supervisor, "fork_worker", lambda *_, slot, **__: told_while_forking(found, slot))
    Supervisor._start(found, 1)
    old, new = found.workers
    assert new.ended and new.removed_s and not old.ended
    assert set(found.host_agent._leaving) == {old.uid, new.uid}


def told_while_forking(found: Supervisor, slot: int) -> Worker:
    found._on_signal(signal.SIGTERM, None)
    return NoProcess(f"h.{slot}.new", slot)


def member_host(*hosts: str, slots: int = 1) -> Host:
    """The first of these hosts, in a run under way."""
    found = Host(lambda agent: 0, SupervisorSettings(host="h", slots=slots, wanted=slots), service=MemoryService())
    for slot in range(slots):
        found._start(slot)
    others = [Member(f"{name}.0.x", name) for name in hosts[1:]]
    keys = found.service.connect()
    found.host_agent.newest = Membership(keys).start(
        [*(w.member for w in found.workers), *others], above=0, minimum=1, why=""
    )
    found.host_agent._own.update(w.uid for w in found.workers)
    return found


def test_one_ctrl_c_after_a_host_gave_up_is_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    found = member_host("h", slots=2)
    found._give_up(RunError("the disk of slot 0 is broken"))
    assert found.stops
    found._on_signal(signal.SIGINT, None)
    assert not any(w.ended for w in found.workers) and found._has_work
    assert found.host_agent._stop == "the run was stopped: the disk of slot 0 is broken", "and that stays the reason"
    found._on_signal(signal.SIGINT, None)
    assert all(w.ended for w in found.workers) and not found._has_work


def test_a_host_that_gave_up_and_is_stopped_at_once_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = Host(lambda agent: 0, SupervisorSettings(slots=1, wanted=1), service=MemoryService())
    found.error, found.stops, found.signals = RunError("the disk is broken"), True, 2
    assert found.run() == 130
    assert "the disk is broken" in capsys.readouterr().err


def test_a_host_without_a_worker_ends_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its slots are drained when the others make the last step; it asks once a second."""
    service, asked = MemoryService(), [0]
    settings = SupervisorSettings(host="h", slots=2, wanted=4, alone=False, drained_slots=lambda: frozenset({0, 1}))
    found = Host(lambda agent: 0, settings, service=service)
    for slot in range(2):
        found._start_or_wait(slot)
    is_over = found.host_agent.is_over
    monkeypatch.setattr(found.host_agent, "is_over", lambda: asked.__setitem__(0, asked[0] + 1) or is_over())
    for _ in range(20):
        assert found._has_work
    assert asked == [1]
    service.values["finished"] = "8 1"
    found._over_s -= supervisor.OVER_S
    assert not found._has_work
    assert in_turns(Host(lambda agent: 0, settings, service=service)) == 0


def test_what_fails_after_the_last_step_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = host(2)
    first, second = found.workers
    found.host_agent.finished = "8 1"
    first._error = b64encode(messages.encode(RunError("runs/x/summary: no space left on device"))).decode()
    found._ended(with_status(first, EXITED[1]))
    found._ended(with_status(second, 0))
    found._start_or_wait = lambda slot: None  # type: ignore[method-assign]
    assert in_turns(found) == 1
    assert "all steps are done, and a worker of this host failed: runs/x/summary: no space" in capsys.readouterr().err


def with_status(worker: Worker, status: int) -> Worker:
    worker.status = status
    return worker


@pytest.mark.parametrize("finished", [None, "8 1"])
def test_a_host_that_leaves_while_a_worker_is_frozen_does_not_say_that_all_is_well(finished: str | None) -> None:
    """What that one holds is not handed over."""
    found = member_host("h", "other", slots=2)
    frozen, other = found.workers
    found._on_signal(signal.SIGTERM, None)
    found.host_agent.finished = finished
    frozen.last_read_s -= found.settings.limit_s + 1.0
    other.joins = True  # else both hosts are waited for
    found._find_hung()
    assert frozen.removed_s
    for worker in found.workers:
        found._ended(with_status(worker, 0))
    assert in_turns(found) == (0 if finished else 128 + signal.SIGKILL)


def test_a_fork_that_fails_ends_no_other_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container may run so many processes and no more."""
    found, now = member_host("h", slots=2), time.monotonic()
    files = len(os.listdir("/proc/self/fd"))

    def no_room() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", no_room)
        for _ in range(3):
            Supervisor._start(found, 1)
    assert found.empty == {1} and found._has_work and not any(w.ended for w in found.workers)
    assert len(os.listdir("/proc/self/fd")) == files
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("host h: cannot start a worker in slot 1 ([Errno 11] Resource temporarily unavailable)")
    for later_s, workers in ((9, 2), (11, 3)):
        monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda at=now + later_s: at))
        found._fill()
        assert len(found.workers) == workers


def test_a_worker_that_is_to_leave_before_it_joins_ends() -> None:
    """It waited for a generation for ever, and held its slot."""
    found = member_host("h", "other")
    (member,) = found.workers
    found._start(1)
    joiner = found.workers[1]
    found.host_agent.announced(joiner.member)
    for worker in (member, joiner):
        found._leave_alone(worker)
    assert joiner.ended and not member.ended
    found.host_agent.tick()
    newest = found.host_agent.newest
    assert newest is not None and joiner.uid not in newest.uids and member.uid in newest.uids
    assert set(Membership(found.service.connect()).leave_requests()) == {member.uid}


def test_a_run_to_which_nobody_comes_back_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service lost its values, this host's member died with it, and that of the other host may live."""
    clock = [100.0]
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = member_host("h", "other")
    dead = found.workers[0]
    found.host_agent.died(dead.uid, "killed by SIGKILL")
    found.host_agent.announced(Member("h.0.new", "h"))
    assert found.host_agent.newest is not None
    found.host_agent._epoch = found.host_agent.newest.epoch
    found._watch_minimum()
    assert not found._short_since_s, "the generation is that of this life of the service"
    found.host_agent._epoch = "another life"
    for later_s in (0.0, found.settings.wait_s, found.settings.gather_s + 1.0):
        assert found.error is None
        clock[0] += later_s
        found._watch_minimum()
    assert isinstance(found.error, TooFewMembers) and found.stops
    assert "of the members of generation 1 (" in str(found.error) and "The same command continues" in str(found.error)


@pytest.mark.parametrize("screen", [0, 1, None])
def test_the_loss_of_the_rank_that_draws_is_told_by_its_supervisor(
    screen: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """All other losses are told by that rank."""
    found = member_host("h", slots=2)
    found.settings = replace(found.settings, screen_slot=screen)
    worker = found.workers[1]
    worker.status = signal.SIGKILL
    found._ended(worker)
    assert (f"host h: {worker.uid} killed by SIGKILL\n" in capsys.readouterr().err) == (screen == 1)
