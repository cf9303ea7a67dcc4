"""Several membership services, one of which keeps the values: the rules by themselves, and with torchft's lighthouse (skipped by name without it)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from membership_help import MemoryKeys, MemoryService

from phalanx.cli.service import main, read
from phalanx.core.clock import since_boot_s
from phalanx.core.errors import ConfigError
from phalanx.core.service_address import ServiceAddress, parse_service
from phalanx.runtime.membership import worker_agent as agent_module
from phalanx.runtime.membership.keys import ServiceLost, TcpKeys, TcpService
from phalanx.runtime.membership.lighthouse import Claim, Tenure, _LeasedStore, keeper_of, longest_lease
from phalanx.runtime.membership.membership import Member
from phalanx.runtime.membership.reachability import probe_key
from phalanx.runtime.membership.service import AnyService, service_at, start_store
from phalanx.runtime.membership.watcher import AgentSettings

LEASE = 10


@pytest.mark.unit
def test_a_keeper_stays_while_it_takes_part() -> None:
    assert keeper_of([Claim("b"), Claim("a")]) == ("a", 1)
    assert keeper_of([Claim("a"), Claim("b", "b", 3)]) == ("b", 3)
    assert keeper_of([Claim("c", "b", 3), Claim("a", "c", 2)]) == ("a", 4)
    assert keeper_of([Claim("a", "a", 1), Claim("b", "c", 2)]) == ("a", 3)  # c has had it since


class Drawn:
    """A service in time steps: asks, is in a quorum or not, hears of it some time later, sleeps."""

    def __init__(self, name: str, lease: int, longest: int) -> None:
        self.tenure = Tenure(name, lease)
        self.longest: float = longest
        """That it says in quorums."""
        self.keeper, self.term = "", 0
        self.asked: int | None = None
        self.answer: tuple[int, int, str, int, float] | None = None
        """(when it is heard, number of the quorum, keeper, term, longest lease)"""
        self.sleeps = 0

    def turn(self, now: int, draw: random.Random) -> None:
        if self.answer is not None and now >= self.answer[0]:
            _, number, self.keeper, self.term, longest = self.answer
            assert self.asked is not None
            self.longest = max(self.longest, longest)
            self.tenure.observe(self.keeper, quorum=number, asked_s=self.asked, now_s=now, longest_s=self.longest)
            self.asked = self.answer = None
            self.sleeps = now + (draw.randrange(30) if draw.random() < 0.03 else 1)
        if self.asked is None and now >= self.sleeps:
            self.asked = now


def quorums(seed: int, *, leases: Sequence[int] = (LEASE,) * 3, told: int = 0) -> tuple[int, int]:
    """(most services that held values at once, time steps in which one did), of a lighthouse that takes any of those who ask into a quorum.

    `told`: the longest lease that all have heard of.
    """
    draw = random.Random(seed)
    services = [Drawn(name, lease, max(lease, told)) for name, lease in zip("abc", leases, strict=True)]
    number, members, most, held = 0, list[str](), 0, 0
    for now in range(600):
        for s in services:
            s.turn(now, draw)
        ask = [s for s in services if s.asked is not None and s.answer is None]
        together = [s for s in ask if draw.random() < 0.98]
        if together and (len(ask) == 3 or draw.random() < 0.1):
            names = [s.tenure.name for s in together]
            number, members = number + (names != members), names
            claims = [Claim(s.tenure.name, s.keeper, s.term, s.longest) for s in together]
            (keeper, term), longest = keeper_of(claims), longest_lease(claims)
            for s in together:
                s.answer = (now + (draw.randrange(25) if draw.random() < 0.05 else 0), number, keeper, term, longest)
        holding = sum(s.tenure.look(now) for s in services)
        most, held = max(most, holding), held + bool(holding)
    return most, held


@pytest.mark.unit
def test_never_two_keep_values_at_once() -> None:
    drawn = [quorums(seed) for seed in range(60)]
    assert max(most for most, _ in drawn) == 1
    assert sum(held for _, held in drawn) > 60 * 600 / 10


@pytest.mark.unit
def test_a_planted_shorter_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.runtime.membership.lighthouse.WAIT", 0.3)
    assert max(quorums(seed)[0] for seed in range(60)) > 1


@pytest.mark.unit
def test_services_with_different_leases_wait_for_the_longest_that_they_know_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leases = (LEASE, 3 * LEASE, 2 * LEASE)
    drawn = [quorums(seed, leases=leases, told=max(leases)) for seed in range(60)]
    assert max(most for most, _ in drawn) == 1 and any(held for _, held in drawn)
    tenure = Tenure("a", 10.0)
    tenure.observe("b", quorum=1, asked_s=0.0, now_s=0.0, longest_s=30.0)
    for now in range(1, 39):  # b, with the longer lease, is gone, and nobody in the quorum has one
        tenure.observe("a", quorum=2, asked_s=now, now_s=now, longest_s=10.0)
        assert not tenure.look(now)
    assert tenure.look(38.6)  # 1 + 1.25 x 30
    monkeypatch.setattr(Tenure, "observe", planted)
    assert max(quorums(seed, leases=leases, told=max(leases))[0] for seed in range(60)) > 1


def planted(self: Tenure, keeper: str, *, longest_s: float, **words: Any) -> None:
    """Each waits for its own lease."""
    OBSERVE(self, keeper, **words)


OBSERVE = Tenure.observe


@pytest.mark.unit
def test_a_service_says_that_another_has_a_longer_lease() -> None:
    said = list[str]()
    keeps = _LeasedStore(Tenure("a", 10.0), ServiceAddress("127.0.0.1", 1), said.append)
    for _ in range(2):
        keeps.observe({"keeper": "b", "quorum": 1, "asked_s": 0.0, "longest_s": 30.0})
    assert said == [
        "the quorum selects b",
        "another service has --lease 30, this one 10: waiting for the longer one; give all the same --lease",
    ]


@pytest.mark.unit
def test_a_lease_runs_out_while_the_machine_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other clock stands still then."""
    monkeypatch.setattr(time, "monotonic", lambda: 5.0)
    begun = since_boot_s()
    while since_boot_s() == begun:
        pass
    if hasattr(time, "CLOCK_BOOTTIME"):
        assert abs(since_boot_s() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 60.0


@pytest.mark.unit
def test_a_missed_quorum_begins_the_wait_anew() -> None:
    tenure = Tenure("a", 10.0)
    for now in range(0, 12):
        tenure.observe("a", quorum=6 if now < 8 else 8, asked_s=now, now_s=now)
        assert not tenure.look(now)
    for now in range(12, 22):
        tenure.observe("a", quorum=8, asked_s=now, now_s=now)
    assert tenure.look(20.6) and not tenure.look(31.0)  # from 8 on 12.5; the last one was asked for at 21
    tenure.observe("b", quorum=9, asked_s=32.0, now_s=32.0)
    assert not tenure.look(32.0)


@pytest.mark.unit
def test_addresses_of_several() -> None:
    found = parse_service("node0:29400,10.0.0.2:1")
    assert found == ServiceAddress("node0", 29400, standbys=(("10.0.0.2", 1),)) and not found.is_etcd
    assert not found.is_here
    here = parse_service("127.0.0.1:1,localhost:2")
    assert here is not None and here.is_here
    assert [parse_service(t) for t in ("a:1,", "a:1,a:1", "a:1,etcd://b:1/x", "a:1,b", ",")] == [None] * 5


class Told(TcpService):
    """A service that answers, or whose name does not resolve."""

    def connect(self) -> MemoryKeys:  # type: ignore[override]
        if self.host.startswith("gone"):
            raise ServiceLost(f"{self.host} cannot be reached: Name or service not known")
        return MemoryService().connect()


@pytest.mark.unit
def test_a_listener_opens_towards_the_service_that_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the first is gone, and its name with it."""
    asked = list[str]()

    class Opened:
        address = "10.0.0.1:5"

        def __init__(self, host: str, port: int) -> None:
            asked.append(host)
            if host.startswith("gone") or len(asked) < 3:
                raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(agent_module, "ProbeListener", Opened)
    several = AnyService([Told("gone0", 1), Told("node1", 2), Told("gone2", 3)])
    listed = several.services
    agent = agent_module.WorkerAgent(
        Member("a.0.x", "a"), several, pipe=-1, settings=AgentSettings(probe_peers=True, service_s=60.0)
    )
    agent.announce(plan_hash="p", version="1")
    assert asked == ["node1"] * 3 and agent.keys().get(probe_key("a.0.x")) == Opened.address
    assert (several.host, several.port) == ("node1", 2) and [s.host for s in listed] == ["gone0", "node1", "gone2"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("n:1,m:1", "address"),
        ("n:1 --lighthouse n9", "--lighthouse"),
        ("--lighthouse", "--lighthouse"),
        ("--lease 3", "--lease"),
        ("--lighthouse http://n:1 --lease x", "--lease"),
        ("--lighthouse http://n:1 --lease 0.1", "--lease"),
    ],
)
def test_words_that_are_refused(words: str, where: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(words.split())
    assert where in str(caught.value)
    assert read(["n:1", "--lighthouse", "http://n9:2", "--lease", "1.5"])[1:] == ("http://n9:2", 1.5)


@pytest.mark.unit
@pytest.mark.skipif(find_spec("torchft") is not None, reason="torchft is here")
def test_without_torchft_it_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match="phalanx\\[lighthouse\\]"):
        main(["127.0.0.1:1", "--lighthouse", "http://127.0.0.1:2"])


@pytest.mark.ranks
def test_a_store_ends_with_its_lease_and_another_answers() -> None:
    store, other = start_store(until_s=since_boot_s() + 0.6), start_store()
    try:
        both = AnyService([store.address, other.address])
        epochs = [s.connect().epoch for s in (store.address, other.address)]
        assert both.connect().epoch == epochs[0]
        store.renew(since_boot_s() + 1.2)
        time.sleep(0.8)
        assert not store.reap()
        until(store.reap)
        assert both.connect().epoch == epochs[1] and both.services[0] == other.address
        other.stop()
        with pytest.raises(ServiceLost, match=str(store.address.port)):
            both.connect()
    finally:
        store.stop()
        other.stop()


# -- with a real lighthouse

needs_torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="no torchft here: extra `lighthouse`")
SERVE = """
import sys, time
from phalanx.runtime.membership.lighthouse import engine
server = engine().LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500, quorum_tick_ms=20, heartbeat_timeout_ms=600)
print("http://127.0.0.1:" + server.address().rsplit(":", 1)[1], flush=True)
time.sleep(600)
"""


@pytest.fixture
def lighthouse() -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    yield process.stdout.readline().strip()
    process.kill()
    process.wait()


class Standby:
    """`phalanx service` with a lighthouse, as a program."""

    def __init__(self, port: int, lighthouse: str, log: Path) -> None:
        self.port, self.log = port, log
        words = ["service", f"127.0.0.1:{port}", "--lighthouse", lighthouse, "--lease", "1.5"]
        with log.open("w") as out:
            self.process = subprocess.Popen([sys.executable, "-m", "phalanx", *words], stdout=out, stderr=out)

    def is_open(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=0.5).close()
            return True
        return False

    def children(self) -> list[int]:
        words = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in words.split()]

    def signal(self, number: int) -> None:
        for pid in (self.process.pid, *self.children()):
            os.kill(pid, number)

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(20)


def until(there: Callable[[], object], *, most_s: float = 60.0) -> None:
    end_s = time.monotonic() + most_s
    while not there():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.02)


def ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in found:
            sock.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in found]


@pytest.mark.slow
@pytest.mark.ranks
@needs_torchft
def test_a_standby_takes_over_and_a_frozen_keeper_gives_up(lighthouse: str, tmp_path: Path) -> None:
    services = [Standby(port, lighthouse, tmp_path / f"{port}.log") for port in ports(3)]
    try:
        address = parse_service(",".join(f"127.0.0.1:{s.port}" for s in services))
        assert address is not None
        both = service_at(address)

        def keeper() -> Standby:
            until(lambda: any(s.is_open() for s in services))
            (found,) = (s for s in services if s.is_open())
            return found

        first = keeper()
        keys = both.connect()
        assert isinstance(keys, TcpKeys)
        keys.put("k", "v")
        first.signal(signal.SIGSTOP)  # its machine stands still: the kernel goes on to take connections
        others = [s for s in services if s is not first]
        until(lambda: any(s.is_open() for s in others))
        first.signal(signal.SIGCONT)
        until(lambda: not first.is_open())
        second = keeper()
        again = second_keys = both.connect()
        assert second is not first and again.epoch != keys.epoch and second_keys.get("k") is None
        for pid in (*second.children(), second.process.pid):  # the machine is lost
            os.kill(pid, signal.SIGKILL)
        second.process.wait()
        services.remove(second)
        assert keeper() is not second and both.connect().epoch not in (keys.epoch, again.epoch)
    finally:
        codes = [s.stop() for s in services]
    assert codes == [0, 0], [s.log.read_text() for s in services]
