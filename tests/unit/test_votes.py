"""Votes and decisions: by hand, and by random histories of members that die, freeze, come, and of a service that forgets everything."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from membership_help import MemoryService, World
from tiers import times

from phalanx.core.errors import PeerError, PlanError, RunError
from phalanx.plan.mapping import Folding
from phalanx.plan.recovery import StateDescriptor, StateReport
from phalanx.runtime.membership import host_agent as host_agent
from phalanx.runtime.membership.keys import ServiceLost
from phalanx.runtime.membership.member import resolve_now, run_member
from phalanx.runtime.membership.membership import Generation, Member
from phalanx.runtime.membership.votes import ABORT, Decision, InDoubt, MemberReport, Resolution, Votes, resolve
from phalanx.runtime.membership.watcher import End, Left, RunOver
from phalanx_lab.bench.storm.check import problems_of

pytestmark = pytest.mark.unit


def generation(service: MemoryService, count: int = 3, number: int = 1) -> Generation:
    return Generation(number=number, epoch=service.epoch, members=tuple(Member(f"h.{i}", "h") for i in range(count)))


def votes_of(service: MemoryService, count: int = 3) -> list[Votes]:
    found = generation(service, count)
    return [Votes(service.connect(), found, uid) for uid in found.uids]


def test_the_last_vote_decides() -> None:
    service = MemoryService()
    first, second, third = votes_of(service)
    for votes in (first, second):
        votes.keys.put(votes._vote(0, votes.uid), "1")
    assert third.vote(0, then=lambda: "next", broken=lambda: False) == Decision(True, "next")
    assert first.vote(0, then=lambda: "go on", broken=lambda: True) == Decision(True, "next")  # what stands, stands


def test_a_death_after_the_vote_changes_nothing() -> None:
    service = MemoryService()
    first, second, third = votes_of(service)
    third.keys.put(third._vote(0, third.uid), "1")  # and dies
    second.keys.put(second._vote(0, second.uid), "1")
    assert first.vote(0, then=lambda: "go on", broken=lambda: True).commit


def test_who_waits_decides_where_the_last_voter_could_not() -> None:
    """It lost its connection after its vote was heard: nobody else would look at the votes again."""
    service = MemoryService()
    first, second, third = votes_of(service)
    second.keys.put(second._vote(0, second.uid), "1")
    asked = 0

    def broken() -> bool:
        nonlocal asked
        asked += 1
        if asked == 1:
            third.keys.put(third._vote(0, third.uid), "1")  # and hears nothing any more
        return asked > 20

    assert first.vote(0, then=lambda: "go on", broken=broken).commit
    assert asked == 1


def test_a_late_vote_finds_the_abort() -> None:
    service = MemoryService()
    first, second, third = votes_of(service)
    assert first.vote(0, then=lambda: "go on", broken=lambda: True) == ABORT
    assert second.vote(0, then=lambda: "go on", broken=lambda: False) == ABORT
    assert third.vote(0, then=lambda: "go on", broken=lambda: False) == ABORT


def test_who_votes_alone_and_was_put_out_commits_nothing() -> None:
    """Nobody else would decide "abort", and the others may go on without it."""
    (alone,) = votes_of(MemoryService(), count=1)
    assert alone.vote(0, then=lambda: "go on", broken=lambda: True) == ABORT
    assert alone.vote(1, then=lambda: "go on", broken=lambda: False) == Decision(True)


def test_a_repeated_vote_counts_once() -> None:
    service = MemoryService()
    first, *_ = votes_of(service)
    for _ in range(3):
        assert not first.vote(0, then=lambda: "go on", broken=lambda: True).commit


def test_a_lost_service_leaves_a_voter_in_doubt() -> None:
    service = MemoryService()
    first, *_ = votes_of(service)

    def lose() -> bool:
        service.lose()
        return False

    with pytest.raises(InDoubt):
        first.vote(0, then=lambda: "go on", broken=lose)
    with pytest.raises(ServiceLost, match="lost the values of generation 1"):
        Votes(service.connect(), first.generation, first.uid)


def report(uid: str, step: int, **rest: Any) -> MemberReport:
    return MemberReport(uid=uid, step=step, holds=rest.pop("holds", True), **rest)


def test_a_report_is_read_as_it_was_written() -> None:
    descriptor = StateDescriptor(folding=Folding(world=4, tp=2, ep=2), rank=1, slots=((3, (0, 2)),), hosts=(0, 0, 1, 1))
    then = replace(descriptor, rank=2, moved=5, rest=descriptor)
    about = StateReport(
        descriptor=descriptor,
        then=then,
        doubt="e/3/2",
        passed="e/3/1",
        idle=True,
        history=3,
        rack="r1",
        flops_per_s=1.5,
    )
    said = report("a", 4, about=about)
    read = MemberReport.from_json(said.to_json())
    assert read == said and said.history == 3
    again = MemberReport.from_json(report("b", 4, about=about).to_json()).about.descriptor
    assert read.about.descriptor is not None and again is not None and again.hosts is read.about.descriptor.hosts
    with pytest.raises(PlanError, match="no state descriptor of a member"):
        MemberReport.from_json(said.to_json().replace("[0, 2, 2]", "[0]"))
    with pytest.raises(PlanError, match="4000000000 numbers for 4 ranks"):
        MemberReport.from_json(said.to_json().replace("[0, 2, 2]", "[0, 2000000000, 2]"))
    with pytest.raises(PlanError, match="no state descriptor of a member"):
        MemberReport.from_json(said.to_json().replace('"slots"', '"places"'))


def test_doubts_are_settled_by_who_went_on() -> None:
    found = resolve([report("a", 4, doubt=True), report("b", 5), report("c", 0, holds=False)])
    assert found == Resolution(step=5, finish=("a",), repeat=(), holders=("a", "b"))
    found = resolve([report("a", 4, doubt=True), report("b", 4), report("c", 4, doubt=True)])
    assert found == Resolution(step=4, finish=(), repeat=("a", "c"), holders=("a", "b", "c"))
    assert resolve([report("a", 0, holds=False)]).step is None


@pytest.mark.parametrize("other", [report("b", 5), report("b", 6, doubt=True)])
def test_members_that_cannot_have_come_apart_are_refused(other: MemberReport) -> None:
    with pytest.raises(RunError, match=r"others have \d, a \(4 steps"):
        resolve([report("a", 4, doubt=other.step == 6), other])


# -- random histories


def play(seed: int, monkeypatch: pytest.MonkeyPatch, **rest: Any) -> World:
    """One history: at most 60 random faults in the course of 8 steps, then calm until the run ends. Never are all members without a fault."""
    world = World(seed, **rest)
    rng = random.Random(seed * 7919 + 1)
    scheduler = world.scheduler
    clock = SimpleNamespace(monotonic=lambda: scheduler.ticks * 0.01)
    monkeypatch.setattr(host_agent, "time", clock)
    world.start_supervisor()
    for _ in range(4):
        world.start_member()
    try:
        while world.members() and scheduler.ticks < 30_000:
            scheduler.one()
            if scheduler.ticks < 6_000 and rng.random() < 0.004:
                hurt(world, rng)
            for uid in [u for u in scheduler.frozen if rng.random() < 0.002]:
                scheduler.frozen.discard(uid)
        world.over = True
    finally:
        scheduler.end()
    return world


def hurt(world: World, rng: random.Random) -> None:
    scheduler = world.scheduler
    holders = [
        u
        for u in world.members()
        if u not in scheduler.frozen | scheduler.killed | set(world.host_agent._leaving)
        and world.states.get(u) is not None
    ]
    kind = rng.choice(world.kinds)
    if kind == "service":
        world.service.lose()
    elif kind == "join" and world.host_agent.finished is None and len(world.members()) < 6:
        world.start_member()
    elif kind == "kill" and len(holders) > 2:
        uid = rng.choice(holders)
        scheduler.killed.add(uid)
        world.host_agent.died(uid, "killed")
    elif kind == "notice" and len(holders) > 3:
        for uid in rng.sample(holders, k=rng.choice([1, 2])):
            world.host_agent.leave([uid], "notice")
    elif kind == "freeze" and len(holders) > 2:
        uid = rng.choice(holders)
        scheduler.frozen.add(uid)
        if rng.random() < 0.7:  # the others are a little late only
            world.host_agent.died(uid, "said nothing")


def problems(world: World) -> list[str]:
    found = [*world.scheduler.errors]
    alive = {u: s for u, s in world.ends.items() if u not in world.refused}
    if len(set(alive.values())) != 1:
        found.append(f"members end with different runs: {alive}")
    if any(len(s) != world.steps for s in alive.values()):
        found.append("somebody ended early")
    if world.scheduler.ticks >= 30_000:
        found.append("the run did not end")
    for uid in world.left:
        if not any(uid in gone for gone, _ in world.handed):
            found.append(f"{uid} went with what it held")
    return found + problems_of(world.events, steps=world.steps)


def test_members_leave_in_some_of_the_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    worlds = [
        play(seed, monkeypatch, kinds=("kill", "freeze", "service", "join", "notice", "notice")) for seed in range(24)
    ]
    assert [problems(world) for world in worlds] == [[]] * 24
    assert sum(len(w.left) for w in worlds) > 3


@pytest.mark.parametrize("block", range(times(10, 2)))
def test_random_histories(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(block * 12, block * 12 + 12):
        world = play(seed, monkeypatch)
        assert problems(world) == [], f"seed {seed}"


def repeat_always(reports: Sequence[MemberReport]) -> Resolution:
    found = resolve([replace(r, doubt=False, step=max(x.step for x in reports)) for r in reports])
    return replace(found, finish=())


def finish_always(reports: Sequence[MemberReport]) -> Resolution:
    found = resolve(reports)
    return replace(found, finish=found.finish + found.repeat)


@pytest.mark.parametrize("wrong", [repeat_always, finish_always])
def test_a_wrong_rule_is_found_out(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(problems(play(seed, monkeypatch, resolve=wrong)) for seed in range(60))


def test_counted_votes_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Votes that any member's word completes: a commit without all of them."""
    real = Votes.vote

    def hasty(self: Votes, step: int, **rest: Any) -> Decision:
        short = replace(self.generation, members=tuple(m for m in self.generation.members if m.uid == self.uid))
        found = Votes(self.keys, short, self.uid)
        return real(found, step, **rest)

    monkeypatch.setattr(Votes, "vote", hasty)
    assert any(problems(play(seed, monkeypatch)) for seed in range(160))


def test_a_service_lost_before_the_vote_leaves_no_step_undecided() -> None:
    """The others wait for the vote: once the service is back, the step is given up at once and not after the patience of a vote."""
    settled: list[int] = []
    team: Any = SimpleNamespace(reports=(), uid="h.0", uids=("h.0",), size=1, formed_s=0.0)
    team.generation = Generation(number=1, epoch="t", members=(Member("h.0", "h"),))
    teams = iter([team])

    def next_epoch(report: object, *, order: object) -> object:
        found = next(teams, None)
        if found is None:
            raise Left("over")
        return found

    def vote(step: int) -> Decision:
        raise ServiceLost("away")

    place: Any = SimpleNamespace(
        uid="h.0", team=None, told_s=lambda g: 0.0, settle=settled.append, next_epoch=next_epoch, vote=vote
    )
    body: Any = SimpleNamespace(
        step=4, holds=False, describe=lambda: ("", {}), enter=lambda team, found: None, compute=lambda: None,
        abort=lambda: None, leave_epoch=lambda: None, finished=lambda: False,
    )  # fmt: skip
    assert run_member(place, body) == "left" and settled == [4]


# -- the loop of one member, with an agent and a body that do what they are told


def looped(uids: Sequence[Sequence[str]], said: list[str], *, over: Exception | None = None, **does: Any) -> str:
    """How it ends for `a`, four steps into a run, in generations of these members; what its body does goes to `said`. `does`: of agent and body."""
    team: Any = SimpleNamespace(uid="a", formed_s=0.0, begun=True)
    teams = iter(uids)

    def next_epoch(report: MemberReport, *, order: object) -> Any:
        team.uids = tuple(next(teams, ()))
        if not team.uids:
            raise over or Left("over")
        team.generation = Generation(number=1, epoch="e", members=tuple(Member(uid, "h") for uid in team.uids))
        team.size, team.reports = len(team.uids), [report, *(replace(report, uid=uid) for uid in team.uids[1:])]
        return team

    def commit() -> None:
        said.append("commit")
        body.step += 1

    body: Any = SimpleNamespace(
        step=4, holds=True, describe=lambda: ("", StateReport()), compute=lambda: None, commit=commit,
        enter=lambda team, found: said.append("enter"), abort=lambda: said.append("abort"),
        leave_epoch=lambda: None, finished=lambda: False,
    )  # fmt: skip
    agent: Any = SimpleNamespace(
        uid="a", team=team, told_s=lambda g: 0.0, settle=lambda step: None, next_epoch=next_epoch, broken=lambda: False
    )
    for name, work in does.items():
        setattr(body if hasattr(body, name) else agent, name, work)
    return run_member(agent, body)


def unsettled(step: int) -> Decision:
    raise InDoubt("away")


def lost() -> None:
    raise PeerError("a peer is lost")


def test_a_step_in_doubt_that_nobody_has_committed_is_dropped_before_anything_else() -> None:
    said: list[str] = []
    assert looped(["ab", "a"], said, vote=unsettled) == "left"
    assert said == ["enter", "abort", "enter"]


@pytest.mark.parametrize(("ended_in", "counts"), [(1, True), (2, False)])
def test_the_end_settles_a_doubt_of_its_own_generation_alone(ended_in: int, counts: bool) -> None:
    """In a later one the others made the step again, perhaps with other bits."""
    said: list[str] = []
    over = RunOver(End(step=5, generation=ended_in), "over")
    assert looped(["ab"], said, vote=unsettled, over=over) == ("finished" if counts else "missed the end")
    assert said == ["enter", "commit"][: 1 + counts]


def test_failures_of_other_members_than_these_are_not_counted() -> None:
    """Each time somebody else was lost, which the step has nothing to do with."""
    said: list[str] = []
    assert looped(["abcd", "abc", "ab", "a"], said, compute=lost) == "left" and said.count("abort") == 4
    with pytest.raises(RunError, match="step 5 failed 3 times although no rank was lost: PeerError"):
        looped(["ab"] * 4, said, compute=lost)


def test_a_member_ahead_of_the_others_changes_nothing() -> None:
    team: Any = SimpleNamespace(uid="a", reports=[report("a", 4), report("b", 4)])
    assert resolve_now(team, 4).step == 4
    with pytest.raises(RunError, match="has committed 5 steps and the others 4; nothing was changed"):
        resolve_now(team, 5)
