"""Who is put out although his process exists: silent and still workers, when all are at once, and what a rank's own thread shows of its progress."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from membership_help import MemoryService

from phalanx.runtime.comm.abortable import AbortableCall
from phalanx.runtime.comm.progress import RankProgress
from phalanx.runtime.membership import host_agent
from phalanx.runtime.membership.hangs import HangRule, Hangs, OtherHosts
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.membership import BEAT, Beat, FirstRule, Generation, Member, Membership
from phalanx.runtime.membership.reachability import Answers
from phalanx.runtime.membership.watcher import BEATS
from phalanx.runtime.membership.worker import Worker
from phalanx.runtime.membership.worker_agent import WorkerAgent

pytestmark = pytest.mark.unit
NOW = 1000.0
ALONE = OtherHosts()
RULE = HangRule(limit_s=3.0, hang_s=10.0, timeout_s=100.0, wait_s=600.0, f=2)


def worker(
    slot: int, *, silent_s: float = 0.0, still_s: float = 0.0, waits_s: float = 0.0, quick: bool = True
) -> Worker:
    found = Worker(Member(f"h.{slot}.x", "h"), slot=slot, pid=os.getpid(), pipe=-1)
    found.last_read_s = NOW - silent_s
    found.still_since_s = NOW - still_s if still_s else 0.0
    found.waits_since_s = NOW - waits_s if waits_s else 0.0
    found.quick, found.stands = quick, "forward of step 8, loader.py:7 in read"
    return found


def waiting(*slots: int, waits_s: float = 11.0) -> list[Worker]:
    return [worker(slot, waits_s=waits_s) for slot in slots]


def put_out(workers: list[Worker], others: OtherHosts = ALONE, **rule: float) -> dict[int, str]:
    changed = HangRule(**{**vars(RULE), **rule})
    return {w.slot: why for w, why in Hangs(changed).put_out(workers, others, NOW).items()}


def test_one_that_is_silent_is_put_out() -> None:
    assert put_out([worker(0, silent_s=3.1), *waiting(1, 2)]) == {0: "was silent for 3.1 s"}
    assert put_out([worker(0, silent_s=2.9), *waiting(1, 2)]) == {}


def test_one_that_is_still_is_put_out_by_name_and_place_where_others_wait() -> None:
    (why,) = put_out([worker(0, still_s=10.5), *waiting(1, 2)]).values()
    assert why == "made no progress for 10.5 s while others waited for it (forward of step 8, loader.py:7 in read)"
    assert put_out([worker(0, still_s=10.5), worker(1), worker(2)]) == {}, "nobody waits: all may do the same"
    assert put_out([worker(0, still_s=9.5), *waiting(1, 2)]) == {}
    assert put_out([worker(0, still_s=10.5), *waiting(1, 2, waits_s=1.0)]) == {}, "they have waited for a moment only"
    assert put_out([worker(0, still_s=10.5)], OtherHosts(hosts=2, waits_s=9.0)).keys() == {0}, "others wait elsewhere"


def test_a_sound_pause_of_this_run_gives_ten_times_as_long() -> None:
    slow = waiting(1, 2, waits_s=80.0)
    slow[0].pause_s = 5.0
    assert put_out([worker(0, still_s=49.0), *slow]) == {}
    assert put_out([worker(0, still_s=51.0), *slow]).keys() == {0}


def test_no_pause_of_before_makes_a_step_longer_than_what_may_take_long() -> None:
    slow = [worker(0, still_s=50.5), *waiting(1, 2, waits_s=50.5)]
    slow[0].pause_s = 30.0
    assert list(Hangs(RULE).put_out(slow, ALONE, NOW)) == [slow[0]], "half of timeout_s, not 300 s"


def test_between_steps_the_bound_is_that_of_collectives() -> None:
    assert put_out([worker(0, still_s=49.0, quick=False), *waiting(1, 2, waits_s=48.0)]) == {}
    assert put_out([worker(0, still_s=51.0, quick=False), *waiting(1, 2, waits_s=48.0)]).keys() == {0}


@pytest.mark.parametrize("f", [1, 2, 3])
def test_as_many_at_once_as_may_hold_something_alone_are_awaited(f: int) -> None:
    """One of them crosses the limit a moment before the others: they count from half of it on."""
    for silent in range(1, 5):
        workers = [worker(0, silent_s=3.05), *(worker(i, silent_s=2.9) for i in range(1, silent)), *waiting(5, 6)]
        assert bool(put_out(workers, f=f)) == (silent < f)


def test_everybody_is_awaited_until_wait_s_and_then_put_out() -> None:
    hangs, workers = Hangs(RULE), [worker(slot, silent_s=4.0) for slot in range(3)]
    assert hangs.put_out(workers, OtherHosts(), NOW) == {}
    assert hangs.awaited.startswith("3 of 3 ranks are silent or still at once (here h.0.x, h.1.x, h.2.x)")
    assert hangs.put_out(workers, OtherHosts(), NOW + 599.0) == {}
    assert len(hangs.put_out(workers, OtherHosts(), NOW + 601.0)) == 3
    awake = [worker(slot) for slot in range(3)]
    hangs = Hangs(RULE)
    hangs.put_out(workers, OtherHosts(), NOW)
    assert hangs.put_out(awake, OtherHosts(), NOW) == {} and hangs.awaited == ""


def test_the_last_one_to_wake_up_has_another_limit() -> None:
    """All were stopped. One after another goes on, and the last one's silence alone would be too long."""
    hangs, workers = Hangs(RULE), [worker(slot, silent_s=6.0) for slot in range(3)]
    assert hangs.put_out(workers, ALONE, NOW) == {}
    for w in workers[1:]:
        w.last_read_s = NOW + 0.1
    assert hangs.put_out(workers, ALONE, NOW + 0.2) == {}
    for w in workers[1:]:
        w.last_read_s = NOW + 3.0
    assert hangs.put_out(workers, ALONE, NOW + 2.9) == {}
    assert list(hangs.put_out(workers, ALONE, NOW + 3.1)) == [workers[0]], "it did not come back"


def test_the_only_rank_of_a_run_is_awaited() -> None:
    assert put_out([worker(0, silent_s=4.0)]) == {}


def test_a_whole_host_counts_once_and_hosts_that_say_the_same_count_with_it() -> None:
    silent = [worker(slot, silent_s=4.0) for slot in range(4)]
    assert len(put_out(silent, OtherHosts(hosts=3))) == 4, "the other hosts hold what these held"
    assert put_out(silent, OtherHosts(hosts=3, quiet=1)) == {}


def test_one_after_another_is_at_once() -> None:
    """The second one falls silent before what the first one held was copied again."""
    hangs = Hangs(RULE)
    first, second, *rest = worker(0, silent_s=3.1), worker(1, silent_s=1.0), *waiting(2, 3)
    assert list(hangs.put_out([first, second, *rest], OtherHosts(), NOW)) == [first]
    for one in (second, *rest):
        one.last_read_s += 4.0
    second.last_read_s = NOW + 1.0
    assert hangs.put_out([second, *rest], OtherHosts(), NOW + 4.5) == {}
    hangs.stepped()
    assert list(hangs.put_out([second, *rest], OtherHosts(), NOW + 4.5)) == [second]


def test_who_joins_holds_nothing() -> None:
    still, silent = worker(0, still_s=10.5), worker(1, silent_s=4.0)
    both = [still, silent, *waiting(2, 3)]
    assert Hangs(RULE).put_out(both, ALONE, NOW) == {}, "two of them, and f is 2"
    still.joins = silent.joins = True
    assert list(Hangs(RULE).put_out(both, ALONE, NOW)) == [still, silent]
    assert list(Hangs(RULE).put_out([still], OtherHosts(hosts=4, quiet=1, waits_s=9.0), NOW)) == [still]
    all_silent = [silent, *(worker(slot, silent_s=4.0) for slot in (2, 3))]
    assert Hangs(RULE).put_out(all_silent, ALONE, NOW) == {}, "with the others it is awaited"


def test_a_worker_joins_until_it_forms_a_generation() -> None:
    end, write = os.pipe()
    found = Worker(Member("h.0.x", "h"), slot=0, pid=os.getpid(), pipe=end)
    os.set_blocking(end, False)
    for line, joins in (
        (b'{"announced": true, "joins": true}', True),
        (b".", True),
        (b'{"formed": true}', False),
    ):
        os.write(write, line + b"\n")
        found.read()
        assert found.joins is joins
    os.close(write)
    os.close(end)


def test_fewer_holders_than_asked_for_count() -> None:
    """f was lowered to 1: the one that is silent may be the only one that holds something."""
    one = [worker(0, silent_s=3.1), *waiting(1, 2)]
    assert list(Hangs(RULE).put_out(one, ALONE, NOW, f=2)) == [one[0]]
    assert Hangs(RULE).put_out(one, ALONE, NOW, f=1) == {}


def test_all_that_stand_still_with_nobody_waiting_are_said_and_waited_for() -> None:
    """A dead network file system under all ranks: there is nobody to go on without them."""
    hangs = Hangs(RULE)
    assert hangs.put_out([worker(slot, still_s=20.0) for slot in range(3)], ALONE, NOW) == {}
    assert hangs.awaited.startswith("all 3 ranks of this host stand still (forward of step 8, loader.py:7 in read)")
    assert hangs.put_out([worker(0, still_s=20.0), worker(1)], ALONE, NOW) == {}


# ---- what heartbeats say ---------------------------------------------------------------------------------------------


def test_progress_tells_still_from_waiting() -> None:
    mine = RankProgress()
    assert mine.look() == "still" and mine.look() == "still"
    mine.at("forward of step 3", quick=True)
    assert mine.look() == "moves" and mine.look() == "still"
    with mine.waiting():
        assert mine.look() == "moves" and mine.look() == "waits"
    assert mine.look() == "moves" and mine.look() == "still"
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(mine.stands()))
    thread.start()
    thread.join()
    assert found[0].startswith("forward of step 3, threading.py:")


def test_a_wait_of_another_thread_says_nothing_of_the_own_one() -> None:
    mine, inside, go = RankProgress(), threading.Event(), threading.Event()

    def other() -> None:
        with mine.waiting():
            inside.set()
            go.wait(5)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(5)
    assert mine.look() == "still"
    go.set()
    thread.join()


def test_every_call_between_ranks_is_a_wait() -> None:
    mine = RankProgress()
    call = AbortableCall(lambda: False, progress=mine)
    seen = call.run(lambda: (time.sleep(0.01), mine.look(), mine.look())[1:])
    assert seen == ("moves", "waits") and mine.look() == "moves"
    call.close()


def test_a_device_waits_as_long_as_its_last_message_is_under_way() -> None:
    """Nothing else is asked of it: `is_completed` holds Python's lock while it waits for the driver's."""

    class Message:
        def __init__(self) -> None:
            self.result: torch.futures.Future[int] | None = torch.futures.Future()

        def get_future_result(self) -> torch.futures.Future[int]:
            if self.result is None:
                raise NotImplementedError("Work::getFutureResult not implemented.")
            return self.result

    mine, message = RankProgress(), Message()
    mine.handed_over(message)
    assert mine.look() == "moves" and mine.look() == "waits"
    assert message.result is not None
    message.result.set_result(0)
    assert mine.look() == "still"
    message.result = None
    assert mine.look() == "still"


@pytest.mark.parametrize(("result", "failed"), [(0, False), (1, True), (2, True), (None, False)])
def test_what_torch_notes_of_a_message_that_ends_badly_is_seen(result: int | None, failed: bool) -> None:
    """Its limit is over (`WorkResult.TIMEOUT`), or its communicator has an error (`COMM_ERROR`)."""
    future: torch.futures.Future[int] = torch.futures.Future()
    mine = RankProgress()
    assert not mine.message_failed
    mine.handed_over(SimpleNamespace(get_future_result=lambda: future))
    if result is not None:
        future.set_result(result)
    assert mine.message_failed is failed
    mine.forget()
    assert not mine.message_failed


def test_pauses_of_committed_steps_are_kept_and_fade() -> None:
    mine = RankProgress()
    mine.at("forward", quick=True)
    time.sleep(0.03)
    mine.at("vote", quick=True)
    mine.committed()
    first = mine.pause_s
    assert first >= 0.03
    mine.at("checkpoint")
    time.sleep(0.05)
    mine.at("forward", quick=True)
    with mine.waiting():
        time.sleep(0.05)
    mine.committed()
    assert 0.9 * first < mine.pause_s < first, "neither saving nor waiting is a pause of a step"
    mine.at("backward", quick=True)
    time.sleep(0.2)
    mine.at("waits")  # the step was given up
    mine.committed()
    assert mine.pause_s < first


def test_a_supervisor_reads_what_a_worker_writes() -> None:
    reads, writes = os.pipe2(os.O_NONBLOCK)
    found = Worker(Member("h.0.x", "h"), slot=0, pid=os.getpid(), pipe=reads)
    for state, quick, waits, still in (
        ("waits", True, True, False),
        ("still", True, False, True),
        ("moves", False, False, False),
    ):
        os.write(writes, BEATS[state, quick])  # type: ignore[index]
        assert found.read() == []
        assert (found.waits_since_s > 0, found.still_since_s > 0, found.quick) == (waits, still, quick)
    os.write(writes, BEATS["still", True] + b'{"stands": "data, loader.py:7 in read"}\n{"step": 3, "pause": 0.5}\n')
    assert found.read() == [{"stands": "data, loader.py:7 in read"}, {"step": 3, "pause": 0.5}]
    assert (found.stands, found.pause_s) == ("data, loader.py:7 in read", 0.5) and found.still_since_s
    found.forgive()
    assert not found.still_since_s
    os.close(writes)


# ---- between hosts ---------------------------------------------------------------------------------------------------


def hosts(*names: str) -> tuple[MemoryService, Generation]:
    service = MemoryService()
    members = [Member(f"{name}.0.x", name) for name in names]
    return service, Membership(service.connect()).start(members, above=0, minimum=1, why="the run begins")


def agent_of(service: MemoryService, name: str) -> HostAgent:
    found = HostAgent(name, service, FirstRule(wanted=3, minimum=1, gather_s=1.0), limit_s=1.0, f=2, alone=False)
    found._own.add(f"{name}.0.x")
    found.tick()
    return found


def test_hosts_hear_of_each_other_who_is_quiet_and_who_waits() -> None:
    service, _ = hosts("a", "b", "c")
    a, b, c = (agent_of(service, name) for name in "abc")
    b.workers_are(quiet=True, waits_s=0.0)
    c.workers_are(quiet=False, waits_s=7.5)
    c._beat_s = 0.0
    for agent in (b, c, a):
        agent._looked_s = agent._watched_s = 0.0
        agent.tick()
    assert a.other_hosts() == OtherHosts(hosts=2, quiet=1, waits_s=7.5)
    assert Beat.read(Beat(3, waits_s=7.5, quiet=True).text) == Beat(3, waits_s=7.5, quiet=True)
    assert Beat.read("what is this") == Beat(0) == Beat.read(None)


def test_silent_hosts_whose_processes_exist_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three hosts fall silent at once. Where their kernels refuse, they are gone; where these answer, they are waited for."""
    for exists in (False, True):
        service, first = hosts("a", "b", "c")
        a = agent_of(service, "a")
        agent_of(service, "b"), agent_of(service, "c")
        a._watched_s = a._looked_s = 0.0
        a.tick()

        def answers(keys: object, uids: list[str], *, exists: bool = exists, **_: object) -> Answers:
            """Of one host one member was killed before: the others of it count."""
            return Answers(
                frozenset(), frozenset() if exists else frozenset(uids), frozenset(uids) if exists else frozenset()
            )

        monkeypatch.setattr(host_agent, "probe_members", answers)
        now = time.monotonic()
        a._others = {host: (beat, now - 1.5) for host, (beat, _) in a._others.items()}
        a._watched_s = now - 0.26  # not so long ago that the look itself was late
        a._watch_hosts(Membership(service.connect()))
        assert a.newest is not None
        assert a.newest.uids == (first.uids if exists else ("a.0.x",))
        assert ("b, c and others are silent at once" in a.awaited) == exists
    for late_s, members in ((0.7, 3), (1.1, 2)):  # b goes on, and c has another limit
        woken, now = a._together[0], time.monotonic()
        a._together = woken, now - late_s
        a._others = {"b": (Beat(99).text, now), "c": (a._others["c"][0], now - 1.5 - late_s)}
        a._watched_s = now - 0.26
        service.connect().put(BEAT + "b", Beat(99).text)
        a._watch_hosts(Membership(service.connect()))
        assert len(a.newest.uids) == members


def test_a_generation_that_does_not_form_is_said_once() -> None:
    told: list[Any] = []
    agent: Any = SimpleNamespace(_renewed=0, tell=told.append, uid="h.0.x")
    for number in range(5):
        WorkerAgent._say_renewed(agent, SimpleNamespace(number=number), f"h.{number}.x does not answer")
    (event,) = told
    assert (event.uid, event.generation, event.why) == ("h.0.x", 1, "h.1.x does not answer")
