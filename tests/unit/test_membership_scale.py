"""What the membership asks of its service as hosts grow: the same for each member and host, so linear in hosts for the whole job."""

from __future__ import annotations

import random
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from membership_help import MemoryKeys, MemoryService

from phalanx.runtime.membership import host_agent as host_agent_module, keys
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.keys import ASKED_PER_S, KeysStore, Over
from phalanx.runtime.membership.membership import Announcement, FirstRule, Generation, Member, Membership
from phalanx.runtime.membership.rendezvous import meet, ready_keys
from phalanx.runtime.membership.votes import Votes
from phalanx.runtime.membership.watcher import AgentSettings
from phalanx.runtime.membership.worker_agent import WorkerAgent
from phalanx.runtime.processes.world import GLOO_EASED

pytestmark = pytest.mark.unit

SLOTS = 8
HOSTS = (4, 12, 36)


class CountingService(MemoryService):
    """Counts calls and the names in them, by who asks."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        super().__init__()

    def connect(self, who: str = "") -> CountingKeys:  # type: ignore[override]
        return CountingKeys(self, who)


class CountingKeys(MemoryKeys):
    def __init__(self, service: CountingService, who: str) -> None:
        super().__init__(service)
        self.counts, self.who = service, who

    def _values(self) -> dict[str, str]:
        self.counts.calls[self.who] += 1
        return super()._values()

    def values(self, keys):  # type: ignore[no-untyped-def]
        self.counts.names[self.who] += len(keys)
        return super().values(keys)

    def all_there(self, keys):  # type: ignore[no-untyped-def]
        self.counts.names[self.who] += len(keys)
        return super().all_there(keys)

    def wait(self, key: str, timeout_s: float, *, sharing: int = 1, over: Over | None = None) -> bool:
        assert sharing > 0
        return super().wait(key, timeout_s)


class OneHost:
    """The service as a host's supervisor reaches it."""

    def __init__(self, service: CountingService, host: str) -> None:
        self.service, self.host = service, host

    def connect(self) -> CountingKeys:
        return self.service.connect(self.host)


def run_of(hosts: int) -> list[Member]:
    return [Member(f"h{i}.{slot}", f"h{i}") for i in range(hosts) for slot in range(SLOTS)]


def calls_of_supervisors(hosts: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of each host in five quiet seconds of a run."""
    service, now = CountingService(), SimpleNamespace(s=100.0)
    monkeypatch.setattr(host_agent_module, "time", SimpleNamespace(monotonic=lambda: now.s))
    rule = FirstRule(wanted=hosts * SLOTS, minimum=1, gather_s=1.0)
    host_agents = [HostAgent(f"h{i}", OneHost(service, f"h{i}"), rule, limit_s=3.0) for i in range(hosts)]
    membership = Membership(service.connect())
    for member, host_agent in [(m, host_agents[i // SLOTS]) for i, m in enumerate(run_of(hosts))]:
        membership.announce(Announcement(member=member, plan_hash="p", version="1"))
        host_agent.announced(member)

    def pass_time(seconds: float) -> None:
        end_s = now.s + seconds
        while now.s < end_s:
            now.s += 0.05
            for host_agent in host_agents:
                host_agent.tick()

    pass_time(3.0)
    service.calls.clear()
    pass_time(5.0)
    assert membership.current() is not None and len(membership.current().uids) == hosts * SLOTS  # type: ignore[union-attr]
    return service.calls


def test_a_supervisor_asks_as_often_whatever_the_number_of_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {hosts: calls_of_supervisors(hosts, monkeypatch) for hosts in HOSTS}
    most = {hosts: max(calls.values()) for hosts, calls in found.items()}
    assert len(set(most.values())) == 1, most
    assert most[4] < 200, "forty calls a second: 20 looks for a generation, 5 beats, 2 looks at all others"


def test_hundreds_of_supervisors_ask_more_rarely_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here with 24 hosts that count as many; they look at the beats of all others, so these are bounded for all hosts together."""
    often = sum(calls_of_supervisors(24, monkeypatch).values())
    monkeypatch.setattr(host_agent_module, "MANY_HOSTS", 4)
    seldom = sum(calls_of_supervisors(24, monkeypatch).values())
    monkeypatch.setattr(host_agent_module, "BEATS_PER_S", 24 * 24 / 4)
    assert often > 1.8 * seldom > 1.8 * sum(calls_of_supervisors(24, monkeypatch).values())


def test_a_member_that_watches_makes_two_calls_a_look() -> None:
    service, member = CountingService(), Member("h.0.a", "h")
    agent = WorkerAgent(member, service, pipe=-1, settings=AgentSettings())
    keys = agent._glance(service.connect("watch"), 0.0)
    service.calls.clear()
    agent._glance(keys, 0.0)
    assert service.calls == {"watch": 2}


def votes_of_a_step(members: int) -> tuple[CountingService, int]:
    """One committed step: each votes, in a random order; the last one decides and the others read."""
    service = CountingService()
    uids = [f"h{i // SLOTS}.{i % SLOTS}" for i in range(members)]
    generation = Generation(number=1, epoch=service.epoch, members=tuple(Member(u, u.split(".")[0]) for u in uids))
    votes = {u: Votes(service.connect(u), generation, u) for u in uids}
    order = random.Random(members).sample(uids, members)
    for uid in order[:-1]:
        own = votes[uid]
        own.keys.put(own._vote(0, uid), "1")
        assert not own._all_voted(0)
    assert votes[order[-1]].vote(0, then=lambda: "go on", broken=lambda: False).commit
    assert all(votes[uid].settle(0).commit for uid in uids)
    deletes = 0
    for uid in uids:
        deletes = max(deletes, len(votes[uid].written(0)))
        for key in votes[uid].written(0):
            votes[uid].keys.delete(key)
    left = [k for k in service.values if k.startswith(("vote", "decision"))]
    assert left == [], "every vote is deleted by the member that wrote it"
    return service, deletes


def test_a_step_asks_as_often_of_each_member_and_names_as_many_votes_as_there_are_members() -> None:
    found = {members: votes_of_a_step(members) for members in (16, 64, 512)}
    most = {members: max(service.calls.values()) for members, (service, _) in found.items()}
    assert most[512] == most[64] <= most[16] + 3, most
    assert max(deletes for _, deletes in found.values()) <= 3, "nobody deletes for all"
    named = {members: sum(service.names.values()) / members for members, (service, _) in found.items()}
    assert named[512] <= 1.25 * named[16] + 2, named


def test_a_block_that_is_not_complete_stops_the_commit() -> None:
    service = CountingService()
    uids = [f"h.{i}" for i in range(40)]
    generation = Generation(number=1, epoch=service.epoch, members=tuple(Member(u, "h") for u in uids))
    votes = {u: Votes(service.connect(u), generation, u) for u in uids}
    for uid in uids[:-1]:
        votes[uid].keys.put(votes[uid]._vote(0, uid), "1")
    assert not any(votes[uid]._all_voted(0) for uid in uids)
    votes[uids[-1]].keys.put(votes[uids[-1]]._vote(0, uids[-1]), "1")
    assert votes[uids[-1]]._all_voted(0)
    assert all(votes[uid]._all_voted(0) for uid in uids), "whoever counts again finds the same"


@pytest.mark.parametrize("silent", [0, 15, 16, 31, 32, 39])
def test_a_commit_waits_for_every_member_of_every_block(silent: int) -> None:
    """Whoever is missing: the last of a block of 16 like any other."""
    service = CountingService()
    uids = [f"h.{i}" for i in range(40)]
    generation = Generation(number=1, epoch=service.epoch, members=tuple(Member(u, "h") for u in uids))
    votes = {u: Votes(service.connect(u), generation, u) for u in uids}
    for uid in (u for u in uids if u != uids[silent]):
        votes[uid].keys.put(votes[uid]._vote(0, uid), "1")
    assert not any(votes[uid]._all_voted(0) for uid in uids)
    assert votes[uids[silent]].vote(0, then=lambda: "go on", broken=lambda: False).commit


def test_members_that_meet_look_at_a_part_at_a_time() -> None:
    service = CountingService()
    generation = Generation(number=1, epoch=service.epoch, members=tuple(Member(f"h.{i}", "h") for i in range(512)))
    one = service.connect("one")
    for key in ready_keys(generation):
        one.put(key, "{}")
    service.calls.clear()
    service.names.clear()
    meet(generation, one, limit_s=1.0, newer=lambda: False)
    assert service.calls["one"] == 8 and service.names["one"] == 512


def test_all_that_wait_ask_no_more_often_together_than_one_service_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`poll` itself, with a clock that it moves."""
    for sharing in (1, 100, 1000):
        assert looks_in_ten_seconds(sharing, monkeypatch) * sharing / 10.0 <= max(150.0, 1.2 * ASKED_PER_S), sharing


def looks_in_ten_seconds(sharing: int, monkeypatch: pytest.MonkeyPatch) -> int:
    clock, looks = SimpleNamespace(s=0.0), list[float]()

    def look() -> bool:
        looks.append(clock.s)
        return False

    def sleep(seconds: float) -> None:
        clock.s += seconds

    monkeypatch.setattr(keys, "time", SimpleNamespace(monotonic=lambda: clock.s, sleep=sleep))
    assert not keys.poll(look, 10.0, sharing=sharing)
    return len(looks)


class Asked(KeysStore):
    """Notes what gloo writes and asks."""

    def __init__(self, service: CountingService, asked: list[str], words: list[int]) -> None:
        super().__init__(service.connect("gloo"), timeout_s=60.0)
        self.asked, self.words = asked, words

    def set(self, key: str, value: str | bytes) -> None:
        self.words.append(len(value))
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self.asked.append("one")
        return super().get(key)

    def multi_get(self, keys):  # type: ignore[no-untyped-def]
        self.asked.append("all")
        return super().multi_get(keys)

    def wait(self, keys, timeout=None) -> None:  # type: ignore[no-untyped-def]
        while not self.check(keys):
            time.sleep(0.001)


def gloo_asks(size: int) -> tuple[list[str], set[int]]:
    """What the ranks of a group ask of their store, and how long the words are that they write."""
    service, asked, words = CountingService(), list[str](), list[int]()
    stores = [Asked(service, asked, words) for _ in range(size)]
    with ThreadPoolExecutor(size) as threads:
        limit = timedelta(seconds=60)
        made = threads.map(lambda rank: dist.ProcessGroupGloo(stores[rank], rank, size, limit), range(size))
        assert len(list(made)) == size == len(words)
    return asked, set(words)


def test_words_of_all_are_waited_for_as_long_as_a_store_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo asks for all at once without a limit of its own: of a first group, whose members plan for some seconds, some come later than others."""
    service, limits = CountingService(), list[float]()
    first, late = (KeysStore(service.connect(name), timeout_s=60.0) for name in ("first", "late"))

    def wait(keys: MemoryKeys, key: str, limit_s: float, *, over: Over | None = None) -> bool:
        limits.append(limit_s)
        if len(limits) > 1:
            late.set("y", b"2")
        return True

    monkeypatch.setattr(MemoryKeys, "wait", wait)
    first.set("x", b"1")
    assert first.multi_get(["x", "y"]) == [b"1", b"2"] and all(59.0 < limit_s <= 60.0 for limit_s in limits)


def test_a_rank_asks_once_for_all_others_when_a_group_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself gloo asks for each, and what it reads is 8 bytes longer for each: the cube of the number of ranks together."""
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", **GLOO_EASED}.items():
        monkeypatch.setenv(name, value)
    (asked, words), (more, same) = gloo_asks(3), gloo_asks(9)
    assert (asked, more) == (["all"] * 3, ["all"] * 9) and words == same and len(words) == 1
