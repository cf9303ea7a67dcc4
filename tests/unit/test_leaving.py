"""Members that leave in good order: nobody goes before what it holds was handed over to members that are still there."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from membership_help import MemoryService

from phalanx.core.errors import PeerError
from phalanx.core.events import ignore
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.member import _Loop
from phalanx.runtime.membership.membership import FirstRule, Generation, Member, Membership
from phalanx.runtime.membership.rendezvous import as_listed
from phalanx.runtime.membership.votes import Decision
from phalanx.runtime.membership.watcher import AgentSettings, Left
from phalanx.runtime.membership.worker_agent import WorkerAgent

pytestmark = pytest.mark.unit
UIDS = ("a.0.x", "b.0.x", "c.0.x", "d.0.x")


def begun(service: MemoryService, *, minimum: int = 1) -> Generation:
    members = [Member(uid, uid[0]) for uid in UIDS]
    return Membership(service.connect()).start(members, above=0, minimum=minimum, why="the run begins")


def host_agent_of(service: MemoryService, host: str) -> HostAgent:
    host_agent = HostAgent(host, service, FirstRule(wanted=4, minimum=1, gather_s=0.0), limit_s=60.0)
    host_agent.announced(Member(f"{host}.0.x", host))
    return host_agent


def agent_of(service: MemoryService, uid: str, generation: Generation) -> WorkerAgent:
    """It is in a team of `generation`, and has heard what the service says."""
    agent = WorkerAgent(Member(uid, uid[0]), service, pipe=-1, settings=AgentSettings())
    agent._say = lambda words: None  # type: ignore[method-assign]
    agent.team = team_of(generation, uid)
    agent._keys = service.connect()
    for _ in range(2):
        agent._glance(service.connect(), 0.0)
    return agent


def team_of(generation: Generation, uid: str) -> Any:
    uids = generation.uids
    return SimpleNamespace(
        generation=generation, uid=uid, uids=uids, size=len(uids), rank=uids.index(uid), abort=lambda: 0
    )


class Body:
    """`gives` is what a hand-over says, or raises."""

    step = 1

    def __init__(self, gives: bool | Exception = True) -> None:
        self.gives, self.given = gives, list[tuple[str, ...]]()

    def hand_over(self, stay: Sequence[str]) -> bool:
        self.given.append(tuple(stay))
        if isinstance(self.gives, Exception):
            raise self.gives
        return self.gives


def loop_of(agent: WorkerAgent, body: Body) -> _Loop:
    return _Loop(agent, body, ignore, as_listed)  # type: ignore[arg-type]


def newest(service: MemoryService) -> Generation:
    found = Membership(service.connect()).current()
    assert found is not None
    return found


def test_a_notice_alone_puts_nobody_out() -> None:
    """Its host may tell the service at any time: also while another generation forms, which then has it as a source."""
    service = MemoryService()
    first = begun(service)
    for host in ("a", "b"):
        host_agent = host_agent_of(service, host)
        host_agent.tick()
        host_agent.leave([f"{host}.0.x"], "its host got SIGTERM")
        host_agent.tick()
    assert newest(service) == first
    assert Membership(service.connect()).leave_requests() == dict.fromkeys(UIDS[:2], "its host got SIGTERM")


def test_one_decision_says_who_leaves_and_those_that_come_too_late_stay() -> None:
    service = MemoryService()
    first = begun(service)
    Membership(service.connect()).request_leave({"a.0.x": "notice"})
    early = agent_of(service, "a.0.x", first)
    Membership(service.connect()).request_leave({"b.0.x": "notice"})
    late = agent_of(service, "b.0.x", first)
    assert [early._then(), late._then()] == ["leave", "leave"]
    assert early.leavers() == late.leavers() == {"a.0.x": "notice"}
    body = Body()
    for agent in (early, late):
        assert loop_of(agent, body)._part(agent.leavers)
    assert body.given == [UIDS[1:]] * 2
    assert newest(service).uids == UIDS[1:] and newest(service).leaving == UIDS[:1]
    late.team = team_of(newest(service), "b.0.x")  # it is a member of that one, hands over in it, and goes then
    late._glance(service.connect(), 0.0)
    assert late._then() == "leave" and late.leavers() == {"b.0.x": "notice"}


def test_a_hand_over_to_somebody_who_is_dead_counts_for_nothing() -> None:
    service = MemoryService()
    first = begun(service)
    membership = Membership(service.connect())
    membership.request_leave({"a.0.x": "notice"})
    agent = agent_of(service, "a.0.x", first)
    assert agent._then() == "leave"
    membership.propose_death(
        ["c.0.x"], "killed by SIGKILL"
    )  # after the hand-over, before anybody could say that it is done
    assert loop_of(agent, Body())._part(agent.leavers)
    assert newest(service).uids == ("a.0.x", "b.0.x", "d.0.x") and newest(service).leaving == ()
    agent._glance(service.connect(), 0.0)
    assert agent._is_for_me(newest(service))  # a source for one more forming


def test_a_hand_over_that_breaks_leaves_everybody_a_member() -> None:
    service = MemoryService()
    first = begun(service)
    Membership(service.connect()).request_leave({"a.0.x": "notice"})
    agent = agent_of(service, "a.0.x", first)
    assert agent._then() == "leave"
    assert loop_of(agent, Body(PeerError("c is gone")))._part(agent.leavers)
    assert newest(service) == first


def test_a_disk_that_refuses_the_hand_over_keeps_the_team_and_tries_later() -> None:
    service = MemoryService()
    first = begun(service)
    Membership(service.connect()).request_leave({"a.0.x": "notice"})
    agent = agent_of(service, "a.0.x", first)
    assert agent._then() == "leave"
    assert not loop_of(agent, Body(gives=False))._part(agent.leavers)
    assert newest(service) == first and agent._then() == "go on"


def test_who_has_handed_over_is_out() -> None:
    service = MemoryService()
    first = begun(service)
    Membership(service.connect()).request_leave({"a.0.x": "notice"})
    agent = agent_of(service, "a.0.x", first)
    assert agent._then() == "leave" and loop_of(agent, Body())._part(agent.leavers)
    agent._glance(service.connect(), 0.0)
    with pytest.raises(Left):
        agent._is_for_me(newest(service))


def test_where_all_are_told_to_leave_the_run_stops() -> None:
    service = MemoryService()
    first = begun(service)
    Membership(service.connect()).request_leave(dict.fromkeys(UIDS, "notice"))
    assert agent_of(service, "a.0.x", first)._then() == "stop"


def test_a_run_that_waits_for_members_meets_to_take_over_from_one_that_leaves() -> None:
    service = MemoryService()
    first = begun(service, minimum=5)
    agents = [agent_of(service, uid, first) for uid in UIDS]
    assert not any(agent._is_for_me(first) for agent in agents)
    Membership(service.connect()).request_leave({"a.0.x": "notice"})
    body = Body()
    for agent in agents:
        agent._glance(service.connect(), 0.0)
    for agent in agents:
        assert agent._is_for_me(first)
        assert loop_of(agent, body)._too_few() == ""
    assert body.given == [UIDS[1:]] * 4 and newest(service).uids == UIDS[1:]


def test_decisions_are_read_as_they_were_written() -> None:
    for then in ("go on", "next", "leave", "stop"):
        assert Decision.read(Decision(True, then).text) == Decision(True, then)  # type: ignore[arg-type]
