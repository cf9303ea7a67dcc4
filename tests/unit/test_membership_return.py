"""A host that comes to a run: what it takes over from the run, what it may say of its own; and a run that begins again after its service lost its values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from membership_help import MemoryService

from phalanx.core.config import HOST_BEAT_S, CheckpointConfig, Recipe, ResilienceConfig
from phalanx.core.rules import LIMITS
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.keys import Keys, ServiceLost
from phalanx.runtime.membership.membership import Announcement, FirstRule, Generation, Member, Membership, StaleMember
from phalanx.runtime.membership.service import run_at
from phalanx.runtime.membership.watcher import AgentSettings
from phalanx.runtime.membership.worker_agent import WorkerAgent
from phalanx.train.recovery import run
from phalanx.train.recovery.run import _plan_hash
from phalanx.train.setup import RunFolder

pytestmark = pytest.mark.unit


def members(*uids: str) -> tuple[Member, ...]:
    return tuple(Member(u, u.split(".")[0]) for u in uids)


def announcement(uid: str, last: Generation | None, steps: int = 0) -> Announcement:
    return Announcement(member=members(uid)[0], plan_hash="p", version="1", last=last, data={"steps": steps})


def hash_of(**rest: Any) -> str:
    begun: Any = SimpleNamespace(
        recipe=replace(Recipe(), **rest), spec=SimpleNamespace(hash="s"), prepared=SimpleNamespace(fingerprint="t")
    )
    return _plan_hash(begun)


def test_where_to_begin_is_no_part_of_the_plan() -> None:
    """A host that comes back with the command of the start, or without what was for the start alone."""
    plain = hash_of()
    assert hash_of(checkpoint=CheckpointConfig(resume=False)) == plain
    assert hash_of(checkpoint=CheckpointConfig(step=40)) == plain
    assert hash_of(checkpoint=CheckpointConfig(interval=7)) != plain
    assert hash_of(resilience=ResilienceConfig(wanted=Recipe().launch.ranks)) == plain
    assert hash_of(resilience=ResilienceConfig(wanted=99)) != plain, "the mapping rests on it"


def test_a_host_that_comes_later_takes_the_number_of_ranks_that_the_run_began_with() -> None:
    service = MemoryService()
    assert run_at(service, wanted=16) == (16, False)
    Membership(service.connect()).start(members("a.0"), above=0, minimum=1, why="the run begins")
    assert run_at(service, wanted=8) == (16, True)


def test_a_host_that_began_before_the_service_takes_that_number_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Text is prepared meanwhile; with another number of ranks the mapping is another one."""
    service, prepared, alone = MemoryService(), list[int | None](), list[int]()
    recipe = replace(Recipe(), resilience=ResilienceConfig(service="node0:29400", wanted=8))

    def comes(*_: Any, **__: Any) -> None:
        run.run_at(service, wanted=16)  # another host's
        monkeypatch.setattr(run, "service_at", lambda address: service)

    def prepare(recipe: Recipe, *_: Any, **__: Any) -> Any:
        assert alone
        prepared.append(recipe.resilience.wanted)
        return recipe

    @contextmanager
    def preparing() -> Iterator[None]:
        alone.append(1)
        yield
        alone.pop()

    def first_place(slots: int) -> int:
        assert alone, "another host may take its place at the same moment"
        return 5

    monkeypatch.setattr(run, "service_at", lambda address: Lost())
    monkeypatch.setattr(run, "expect_service", comes)
    monkeypatch.setattr(run, "prepare_run", prepare)
    lock: Any = SimpleNamespace(preparing=preparing, first_place=first_place)
    found: Any = run._prepare_with_others(recipe, RunFolder(Path("x")), lock, kept=None)
    assert prepared == [8, 16] and found[0].resilience.wanted == 16 and found[1:] == (5, False)


class Lost:
    def connect(self) -> Keys:
        raise ServiceLost("nothing listens")


def test_a_limit_is_several_heartbeats() -> None:
    limit = LIMITS["resilience.limit_s"]
    assert limit.least is not None and limit.least >= 5 * HOST_BEAT_S
    assert limit.least <= ResilienceConfig().limit_s


# -- a service that lost its values

LAST = Generation(number=7, epoch="old", members=members("a.0", "a.1", "b.0", "b.1", "c.0", "c.1"))
RULE = FirstRule(wanted=6, minimum=1, gather_s=5.0, lone_s=600.0)


def test_the_smaller_part_does_not_begin_soon() -> None:
    """Two of six: the other four may have removed them and trained on."""
    few = [announcement("c.0", LAST), announcement("c.1", LAST)]
    assert RULE.members(few, above=None, dead=(), waited_s=60.0) is None
    assert RULE.members(few, above=None, dead=("a.0", "a.1", "b.0", "b.1"), waited_s=0.0) is not None, "all others died"
    assert RULE.members(few, above=None, dead=("a.0", "a.1", "b.0"), waited_s=6.0) is not None, "two of three"
    half = [*few, announcement("b.0", LAST)]
    assert RULE.members(half, above=None, dead=(), waited_s=60.0) is None
    assert RULE.members([*half, announcement("b.1", LAST)], above=None, dead=(), waited_s=6.0) is not None
    assert RULE.members(few, above=None, dead=(), waited_s=601.0) is not None


def test_a_run_all_of_whose_members_are_known_to_be_dead_begins_with_others() -> None:
    """They died with the service: nobody can have gone on, and what they held is lost."""
    new = [announcement(uid, None) for uid in ("c.9", "a.9")]
    rule, dead = replace(RULE, wanted=2), LAST.uids
    assert rule.members(new, above=LAST, dead=dead, waited_s=0.0) == ([*members("a.9"), *members("c.9")], 7)
    assert rule.members(new, above=LAST, dead=dead[1:], waited_s=6000.0) is None, "a.0 may live"
    assert rule.members([*new, announcement("b.0", LAST)], above=None, dead=dead[:-1], waited_s=6000.0) is None
    assert RULE.members(new, above=LAST, dead=dead, waited_s=0.0) is None, "others may still start"
    assert RULE.members(new, above=LAST, dead=dead, waited_s=6.0) is not None
    assert rule.members(new, above=replace(LAST, members=()), dead=(), waited_s=0.0) is not None, "they died before it"


def test_how_far_those_were_that_begin_again_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    from phalanx.runtime.membership import host_agent as module

    clock = SimpleNamespace(s=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.s))
    service = MemoryService()
    membership = Membership(service.connect())
    for uid in ("c.0", "c.1"):
        membership.announce(announcement(uid, LAST, steps=40))
    host_agent = HostAgent("c", service, RULE, limit_s=3.0)
    host_agent._own |= {"c.0", "c.1"}
    for seconds in (0.0, 60.0, 500.0):
        clock.s += seconds
        host_agent.tick()
        assert membership.current() is None
    clock.s += 100.0
    host_agent.tick()
    found = membership.current()
    assert found is not None
    assert "2 of 6 members of generation 7 continue from step 40; THE OTHERS MAY HAVE COMMITTED MORE STEPS" in found.why


def test_a_host_whose_supervisor_is_a_new_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host a kept the service, died with it and is back: its workers of before are dead."""
    from phalanx.runtime.membership import host_agent as module

    clock = SimpleNamespace(s=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.s))
    service, last = MemoryService(), replace(LAST, members=members("a.0", "b.0"))
    membership = Membership(service.connect())
    membership.announce(announcement("b.0", last))
    host_agents = [HostAgent(host, service, RULE, limit_s=3.0) for host in ("a", "b")]
    host_agents[1]._own.add("b.0")
    host_agents[1].tick()
    assert membership.current() is None, "a may live"
    host_agents[0].tick()
    host_agents[1].tick()
    found = membership.current()
    assert found is not None and found.uids == ("b.0",)


def test_who_knew_a_newer_generation_than_the_run_begins_again_with_says_so() -> None:
    """It would wait for ever otherwise: numbers only grow."""
    service = MemoryService()
    agent = WorkerAgent(members("a.0")[0], service, pipe=-1, settings=AgentSettings())
    agent.last = agent.newest = LAST
    agent._committed = 44
    Membership(service.connect()).start(members("c.0", "c.1"), above=4, minimum=1, why="begun with 40 steps")
    with pytest.raises(
        StaleMember,
        match=r"a\.0 has 44 steps.*generation 7.*as generation 5 \(begun with 40 steps\), FROM AN OLDER STATE",
    ):
        agent._glance(None, 0.0)


# -- what moves of experts took
