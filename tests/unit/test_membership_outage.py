"""Supervisors of several hosts, by hand and with a clock of the test's own: a service that is away for long, hosts that are told to stop before the run begins."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from membership_help import MemoryKeys, MemoryService

from phalanx.core.errors import RunError
from phalanx.runtime.membership import host_agent as host_agent_module
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.keys import ServiceLost
from phalanx.runtime.membership.membership import Announcement, FirstRule, Member, Membership
from phalanx.runtime.membership.service import expect_service

pytestmark = pytest.mark.unit

LIMIT_S = 3.0


class Outages(MemoryService):
    """Values that nobody reaches for a while. They stay as they were."""

    away = False
    cuts = 0

    def cut(self) -> None:
        self.away, self.cuts = True, self.cuts + 1

    def connect(self) -> MemoryKeys:
        if self.away:
            raise ServiceLost("away")
        return _CutKeys(self)


class _CutKeys(MemoryKeys):
    def __init__(self, service: Outages) -> None:
        super().__init__(service)
        self.cuts = service.cuts

    def _values(self) -> dict[str, str]:
        assert isinstance(self.service, Outages)
        if self.service.away or self.service.cuts != self.cuts:
            raise ServiceLost("away")
        return super()._values()


class Hosts:
    """One host agent for each host, with one worker each; time passes when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, **rest: object) -> None:
        self.now_s, self.service = 100.0, Outages()
        monkeypatch.setattr(host_agent_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        rule = FirstRule(wanted=count, minimum=1, gather_s=1.0)
        self.host_agents = [HostAgent(f"h{i}", self.service, rule, limit_s=LIMIT_S, **rest) for i in range(count)]  # type: ignore[arg-type]

    def announce(self) -> None:
        membership = Membership(self.service.connect())
        for host_agent in self.host_agents:
            member = Member(f"{host_agent.host}.0", host_agent.host)
            membership.announce(Announcement(member=member, plan_hash="p", version="1"))
            host_agent.announced(member)

    def run(self, seconds: float, rng: random.Random, only: list[HostAgent] | None = None) -> None:
        """Every host agent looks about every 50 ms, in an order that nobody knows."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            for host_agent in rng.sample(only or self.host_agents, len(only or self.host_agents)):
                self.now_s += 0.05 / len(self.host_agents) * rng.random() * 2
                host_agent.tick()

    def uids(self) -> set[str]:
        newest = Membership(self.service.connect()).current()
        assert newest is not None
        return set(newest.uids)


@pytest.mark.parametrize("seed", range(20))
def test_a_service_that_was_away_longer_than_the_limit_costs_no_host(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, rng = Hosts(monkeypatch, 4), random.Random(seed)
    hosts.announce()
    hosts.run(2.0, rng)
    everyone = hosts.uids()
    assert len(everyone) == 4
    hosts.service.cut()
    hosts.run(LIMIT_S + rng.uniform(0.1, 3.0), rng)
    hosts.service.away = False
    hosts.run(2 * LIMIT_S, rng)
    assert hosts.uids() == everyone


@pytest.mark.parametrize("seed", range(5))
def test_a_service_that_answers_late_costs_no_host(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody loses his connection: all wait in the same call."""
    hosts, rng = Hosts(monkeypatch, 4), random.Random(seed)
    hosts.announce()
    hosts.run(2.0, rng)
    everyone = hosts.uids()
    hosts.now_s += LIMIT_S * 1.1
    hosts.run(2 * LIMIT_S, rng)
    assert hosts.uids() == everyone


def test_a_host_that_dies_while_the_service_is_away_is_put_out_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, rng = Hosts(monkeypatch, 3), random.Random(0)
    hosts.announce()
    hosts.run(2.0, rng)
    hosts.service.cut()
    hosts.run(LIMIT_S + 1.0, rng)
    hosts.service.away = False
    alive = hosts.host_agents[:2]
    hosts.run(LIMIT_S * 0.8, rng, alive)
    assert hosts.uids() == {"h0.0", "h1.0", "h2.0"}
    hosts.run(LIMIT_S * 0.2 + 1.2, rng, alive)
    assert hosts.uids() == {"h0.0", "h1.0"}


def test_a_host_that_is_stopped_before_the_run_begins_stops_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, rng = Hosts(monkeypatch, 2, alone=False), random.Random(0)
    one, two = hosts.host_agents
    hosts.announce()
    one.leave_or_stop(["h0.0"], "its host got SIGTERM")
    one.tick()
    one.close()
    hosts.run(3.0, rng, [two])
    assert hosts.service.values.get("stop") is None
    assert hosts.uids() == {"h1.0"}, "and it is not waited for either"


def test_a_host_that_another_has_just_begun_with_is_put_out_when_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, rng = Hosts(monkeypatch, 2, alone=False), random.Random(0)
    one, two = hosts.host_agents
    hosts.announce()
    hosts.run(1.0, rng, [two])
    assert hosts.uids() == {"h0.0", "h1.0"} and one.newest is None
    one.leave_or_stop(["h0.0"], "its host got SIGTERM")
    one.close()
    assert hosts.uids() == {"h1.0"}


def test_a_run_of_one_machine_that_is_stopped_before_it_begins_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(monkeypatch, 1)
    hosts.host_agents[0].leave_or_stop(["h0.0"], "its host got SIGTERM")
    hosts.host_agents[0].tick()
    assert hosts.service.values["stop"] == "the run was stopped: its host got SIGTERM"


@pytest.mark.parametrize(
    "key, said",
    [("stopped", r"was stopped \(no reason given\)"), ("stop", r"is being stopped \(its host got SIGTERM\)")],
)
def test_the_service_of_a_stopped_run_is_refused_with_what_to_do(key: str, said: str) -> None:
    service = MemoryService()
    service.connect().put(key, "1" if key == "stopped" else "its host got SIGTERM")
    with pytest.raises(
        RunError,
        match=f"the run of the membership service at node0:29400 {said}.*Start another service",
    ):
        expect_service(service, "node0:29400", wait_s=1.0, tell=print)
