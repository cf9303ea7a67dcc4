"""Members that reach the service and not each other: who is removed, how that is found out, and that it is decided once."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

import pytest

from phalanx.runtime.membership import reachability
from phalanx.runtime.membership.host_agent import FORMS_S, TOGETHER_S, HostAgent
from phalanx.runtime.membership.keys import Keys, UnixService
from phalanx.runtime.membership.membership import Announcement, FirstRule, Generation, Member, Membership, StaleMember
from phalanx.runtime.membership.reachability import (
    Answers,
    ProbeListener,
    choose_removed,
    probe_all,
    probe_key,
    remove_unreachable,
)
from phalanx.runtime.membership.service import start_store
from phalanx.runtime.membership.votes import stepped_key
from phalanx.runtime.membership.watcher import AgentSettings
from phalanx.runtime.membership.worker_agent import WorkerAgent

UIDS = ("a.0", "a.1", "b.0", "b.1", "c.0")


def cross(left: set[str], right: set[str]) -> dict[str, list[str]]:
    return {uid: sorted(right if uid in left else left) for uid in (*left, *right)}


def test_the_smaller_side_goes() -> None:
    assert set(choose_removed(UIDS, cross({"a.0", "a.1", "b.0"}, {"b.1", "c.0"}))) == {"b.1", "c.0"}
    assert set(choose_removed(UIDS, cross({"a.0"}, {"a.1", "b.0", "b.1", "c.0"}))) == {"a.0"}


def test_of_two_hosts_that_do_not_reach_each_other_one_goes() -> None:
    """c.0 reaches both; of equals the last rank goes."""
    assert set(choose_removed(UIDS, cross({"a.0", "a.1"}, {"b.0", "b.1"}))) == {"b.0", "b.1"}


def test_one_report_is_enough() -> None:
    assert choose_removed(UIDS, {"a.0": ["c.0"]}) == ("c.0",)
    assert choose_removed(UIDS, {"a.0": []}) == ()
    assert choose_removed(UIDS, {"a.0": ["gone before"], "gone before": ["a.0"]}) == ()


@pytest.mark.parametrize("seed", range(50))
def test_who_stays_reaches_each_other_and_somebody_stays(seed: int) -> None:
    rng = random.Random(seed)
    broken = [pair for pair in itertools.combinations(UIDS, 2) if rng.random() < 0.5]
    unreached: dict[str, list[str]] = {}
    for a, b in broken:
        for one, other in ((a, b), (b, a)):
            unreached.setdefault(one, []).append(other)
    out = choose_removed(UIDS, unreached)
    stay = [uid for uid in UIDS if uid not in out]
    assert stay and not any(a in stay and b in stay for a, b in broken)
    assert len(set(out)) == len(out)


def choose_slowly(uids: Sequence[str], unreached: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    """`choose_removed` as its docstring says it, counting anew each time."""
    pairs = {frozenset((a, b)) for a, others in unreached.items() for b in others if a in uids and b in uids and a != b}
    out: list[str] = []
    while pairs:
        counts = {uid: sum(uid in pair for pair in pairs) for uid in uids}
        worst = max(uids, key=lambda uid: (counts[uid], uids.index(uid)))
        out.append(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return tuple(out)


@pytest.mark.parametrize("seed", range(30))
def test_degrees_that_are_counted_once_choose_the_same(seed: int) -> None:
    rng = random.Random(seed)
    uids = [f"h{i}" for i in rng.sample(range(30), rng.randint(2, 14))]
    names = [*uids, "gone before"]
    share = rng.choice([0.1, 0.5, 0.9])
    unreached = {a: [b for b in names if rng.random() < share] for a in names}
    assert choose_removed(uids, unreached) == choose_slowly(uids, unreached)


def test_a_switch_that_parts_hundreds_is_decided_at_once() -> None:
    """Counted anew for each that goes, 256 members took 18 s, in which their generation waited."""
    uids = [f"h{i // 8}.{i % 8}" for i in range(256)]
    begin_s = time.process_time()
    assert set(choose_removed(uids, cross(set(uids[:128]), set(uids[128:])))) == set(uids[128:])
    assert time.process_time() - begin_s < 2.0


def test_a_process_that_is_stopped_answers_any_number_of_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody serves its queue, which the kernel may keep short: full, it had the host removed after 70 s of the ten minutes for which it is waited."""
    monkeypatch.setattr(reachability, "WAITING", 4)
    listener = ProbeListener("127.0.0.1")
    try:
        for _ in range(50):
            assert probe_all({"stopped": listener.address}, limit_s=5.0).answered == {"stopped"}
    finally:
        listener.close()


def test_a_member_that_all_probe_at_once_answers_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "WAITING", 128)
    listener = ProbeListener("127.0.0.1")
    answered: list[int] = []

    def probe() -> None:
        for _ in range(8):
            found = probe_all({f"m{i}": listener.address for i in range(16)}, limit_s=10.0)
            answered.append(len(found.answered))

    threads = [threading.Thread(target=probe) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        listener.close()
    assert answered == [16] * 64


@pytest.fixture
def nowhere() -> Iterator[str]:
    """An address whose kernel is silent: a queue of connections that is full."""
    with socket.socket() as server, contextlib.ExitStack() as stack:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_listener_answers_for_a_process_that_does_nothing(nowhere: str) -> None:
    listener = ProbeListener("127.0.0.1")
    try:
        for _ in range(3):
            assert probe_all({"there": listener.address}) == Answers(frozenset(), frozenset(), frozenset({"there"}))
            listener.clear()
        closed = socket.create_server(("127.0.0.1", 0))
        refused = f"127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        assert probe_all({"there": listener.address, "far": nowhere}, limit_s=0.2) == Answers(
            frozenset({"far"}), frozenset(), frozenset({"there"})
        )
        assert probe_all({"far": nowhere, "gone": refused}).refused == {
            "gone"
        }  # at once, before anybody is called silent
        assert probe_all({"far": nowhere}, over=lambda: True) == Answers(frozenset(), frozenset())
    finally:
        listener.close()


@pytest.fixture
def service() -> Iterator[UnixService]:
    store = start_store()
    yield store.address
    store.stop()


def test_who_is_gone_is_removed_at_once(service: UnixService) -> None:
    listeners = {uid: ProbeListener("127.0.0.1") for uid in ("a.0", "b.0")}
    keys = service.connect()
    for uid, listener in listeners.items():
        keys.put(probe_key(uid), listener.address)
    first = Membership(keys).start([Member(uid, uid[0]) for uid in listeners], above=0, minimum=1, why="")
    assert not remove_unreachable(keys, first, own="a.0")
    listeners["b.0"].close()
    assert remove_unreachable(keys, first, own="a.0")
    now = Membership(keys).current()
    assert now is not None and (now.uids, now.why) == (("a.0",), "b.0: its process is gone")
    listeners["a.0"].close()


def test_two_that_do_not_reach_each_other_put_one_out_once(service: UnixService, nowhere: str) -> None:
    """a and b reach the service and c, and not each other; both probe, report and propose at the same time."""
    listeners = {uid: ProbeListener("127.0.0.1") for uid in ("a.0", "b.0", "c.0")}
    keys = service.connect()
    for uid, listener in listeners.items():
        keys.put(probe_key(uid), listener.address)
    first = Membership(keys).start([Member(uid, uid[0]) for uid in listeners], above=0, minimum=1, why="")
    seen: dict[str, bool] = {}

    def member(uid: str, unreachable: str) -> None:
        mine: Keys = Blind(service.connect(), unreachable, nowhere)  # type: ignore[assignment]
        seen[uid] = remove_unreachable(mine, first, own=uid)

    threads = [
        threading.Thread(target=member, args=pair) for pair in (("a.0", "b.0"), ("b.0", "a.0"), ("c.0", "nobody"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    now = Membership(keys).current()
    assert seen == {"a.0": True, "b.0": True, "c.0": False}
    assert isinstance(now, Generation) and (now.number, now.uids) == (2, ("a.0", "c.0"))
    assert now.why == "b.0: could not be reached by a.0"
    for listener in listeners.values():
        listener.close()


class Blind:
    """Keys of a member for whom one address never answers."""

    def __init__(self, keys: Keys, uid: str, nowhere: str) -> None:
        self._keys, self._uid, self._nowhere = keys, uid, nowhere

    def __getattr__(self, name: str) -> object:
        return getattr(self._keys, name)

    def get(self, key: str) -> str | None:
        return self._nowhere if key == probe_key(self._uid) else self._keys.get(key)

    def values(self, keys: Sequence[str]) -> list[str | None]:
        return [self.get(key) for key in keys]


def test_a_host_that_was_cut_off_does_not_bring_its_old_members_back(service: UnixService) -> None:
    """Its supervisor and its worker were away while generation 2 was without them; both read that when they are back."""
    keys = service.connect()
    membership = Membership(keys)
    a, b = Member("a.0.x", "a"), Member("b.0.x", "b")
    host_agent = HostAgent("a", service, FirstRule(wanted=2, minimum=1, gather_s=1.0), limit_s=60.0)
    for member in (a, b):
        membership.announce(Announcement(member=member, plan_hash="p", version="1"))
    host_agent.announced(a)
    first = membership.start([a, b], above=0, minimum=1, why="")
    host_agent.tick()
    without_a = membership.propose_death(["a.0.x"], "host a said nothing")
    assert without_a is not None
    keys.put(stepped_key(without_a), "1")  # nothing else keeps it from joining
    end_s = time.monotonic() + 4 * TOGETHER_S
    while time.monotonic() < end_s:
        host_agent.tick()
        time.sleep(0.02)
    now = membership.current()
    assert now is not None and now.uids == ("b.0.x",)
    membership.propose_join([a])  # somebody who does not know better
    back = membership.current()
    assert back is not None and back.uids == ("b.0.x", "a.0.x")
    agent = WorkerAgent(a, service, pipe=-1, settings=AgentSettings())
    agent.last = first
    with pytest.raises(StaleMember, match="host a said nothing"):
        agent._check_missed(membership, back)


def test_a_first_generation_does_not_wait_for_a_host_that_gave_up(service: UnixService) -> None:
    """Neither for its workers, which had announced themselves, nor for a worker that died before there was a generation."""
    rule = FirstRule(wanted=2, minimum=2, gather_s=60.0)
    gone, stays = HostAgent("a", service, rule, limit_s=60.0), HostAgent("b", service, rule, limit_s=60.0)
    membership = Membership(service.connect())

    def comes(host_agent: HostAgent, uid: str) -> None:
        member = Member(uid, uid[0])
        membership.announce(Announcement(member=member, plan_hash="p", version="1"))
        host_agent.announced(member)
        host_agent.tick()

    comes(gone, "a.0.x")
    gone.close()
    comes(stays, "b.0.x")
    stays.died("b.0.x", "killed by SIGKILL")
    stays.tick()
    comes(stays, "b.0.y")
    assert membership.current() is None  # one of two that are wanted lives
    again = HostAgent("a", service, rule, limit_s=60.0)  # the host is started again and knows nothing of before
    comes(again, "a.0.y")
    end_s = time.monotonic() + 5.0
    while (now := membership.current()) is None and time.monotonic() < end_s:
        again.tick()
        time.sleep(0.02)
    assert now is not None and set(now.uids) == {"a.0.y", "b.0.y"}


def test_workers_of_a_host_join_together(service: UnixService) -> None:
    membership = Membership(service.connect())
    members = [Member(f"{uid}.x", uid[0]) for uid in ("b.0", "a.0", "a.1")]
    for member in members:
        membership.announce(Announcement(member=member, plan_hash="p", version="1"))
    first = membership.start(members[:1], above=0, minimum=1, why="")
    membership.keys.put(stepped_key(first), "1")
    host_agent = HostAgent("a", service, FirstRule(wanted=1, minimum=1, gather_s=1.0), limit_s=60.0)
    host_agent.announced(members[1])
    host_agent.tick()
    host_agent.announced(members[2])
    end_s = time.monotonic() + 4 * TOGETHER_S
    while (now := membership.current()) and len(now.members) < 3 and time.monotonic() < end_s:
        host_agent.tick()
        time.sleep(0.02)
    assert now is not None and (now.number, now.uids) == (2, ("b.0.x", "a.0.x", "a.1.x"))


@pytest.mark.parametrize("stepped", [True, False])
def test_a_worker_leaves_a_generation_alone_that_has_not_made_a_step(service: UnixService, stepped: bool) -> None:
    """Whoever interrupts one that forms makes the others form again: two stops in one. But not for ever: steps may take long."""
    membership = Membership(service.connect())
    members = [Member(f"{uid}.x", uid[0]) for uid in ("b.0", "a.0")]
    for member in members:
        membership.announce(Announcement(member=member, plan_hash="p", version="1"))
    first = membership.start(members[:1], above=0, minimum=1, why="")
    host_agent = HostAgent("a", service, FirstRule(wanted=1, minimum=1, gather_s=1.0), limit_s=60.0)
    host_agent.announced(members[1])
    begin_s = time.monotonic()
    while (now := membership.current()) and now.number == 1 and time.monotonic() < begin_s + 2 * FORMS_S:
        host_agent.tick()
        if stepped and time.monotonic() > begin_s + 2 * TOGETHER_S:
            membership.keys.put(stepped_key(first), "1")
        time.sleep(0.02)
    waited_s = time.monotonic() - begin_s
    assert now is not None and now.uids == ("b.0.x", "a.0.x")
    assert waited_s > 2 * TOGETHER_S if stepped else waited_s > FORMS_S
    assert waited_s < FORMS_S or not stepped


def test_a_member_publishes_an_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the machine that keeps the service, too, whose own name leads to loopback (Debian): others would find nothing there, and take the process for ended."""
    asked: list[str] = []
    monkeypatch.setattr(reachability, "address_towards", lambda host: asked.append(host) or "127.0.0.7")
    listener = ProbeListener("node0")
    assert listener.address.startswith("127.0.0.7:") and asked == ["node0"]
    listener.close()
    monkeypatch.setattr(reachability, "address_towards", lambda host: "")
    with pytest.raises(OSError, match="no address on the way to node0"):
        ProbeListener("node0")
