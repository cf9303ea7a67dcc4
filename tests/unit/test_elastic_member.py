"""What a member of an elastic run does with what the others say: which state counts, for whom it waits, what it forgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.core.config import Recipe
from phalanx.core.errors import CheckpointError, PeerError
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.recovery.state_descriptor import StateDescriptor, StateReport
from phalanx.runtime.membership.membership import Generation, Member
from phalanx.runtime.membership.votes import MemberReport, Resolution, resolve
from phalanx.train.placement.state_transfer import Moved
from phalanx.train.recovery import elastic
from phalanx.train.recovery.elastic import ElasticMember, facts_of

pytestmark = pytest.mark.unit
OLD = StateDescriptor(folding=Folding(world=3), rank=0)
NEW = replace(OLD, folding=Folding(world=2))


def report(uid: str, step: int, *, doubt: bool = False, holds: bool = True, **about: Any) -> MemberReport:
    return MemberReport(uid=uid, step=step, holds=holds, doubt=doubt, about=StateReport(**about))


def test_state_of_an_abandoned_history_or_of_the_step_before_is_no_source() -> None:
    reports = [
        report("a", 5, descriptor=NEW, history=3),
        report("moves", 4, descriptor=OLD, then=NEW, doubt=True, history=3),  # experts, in the step in doubt
        report("idle", 4, descriptor=OLD, idle=True, doubt=True, history=3),
        report("older", 9, descriptor=OLD, history=1),
        report("new", 0, holds=False),
    ]
    generation = Generation(number=5, epoch="e", members=tuple(Member(r.uid, "host") for r in reports))
    found = {fact.uid: fact.descriptor for fact in facts_of(generation, reports)}
    assert found == {"a": NEW, "moves": NEW, "idle": None, "older": None, "new": None}


# ---- one method at a time, with all around it made up


def a_member(said: list[str], **have: Any) -> Any:
    """A stand-in for `self`. What it does goes to `said`."""
    what: dict[str, Any] = {
        "_idle": False, "_others_idle": False, "_may_lack": False, "step": 4, "progress": SimpleNamespace(step=4, history=0),
        "_forget": lambda: said.append("forget"), "_wait_with_all": lambda value=None: said.append("wait") or [value],
        "_now": said.append, "_stand": said.append, "_plan_moved": "moved",
        "_mine": SimpleNamespace(
            moving=None, compute=lambda: said.append("compute"), commit=lambda: said.append("commit"),
            recorder=SimpleNamespace(voted=lambda: None),
        ),
    }  # fmt: skip
    return SimpleNamespace(**{**what, **have})


def test_an_idle_member_forgets_what_it_holds_with_the_next_step() -> None:
    said: list[str] = []
    me = a_member(said, _idle=True)
    ElasticMember.commit(me)
    assert said == ["forget"] and me.progress.step == 5


def test_a_step_in_which_experts_moved_leaves_a_member_where_they_are_now() -> None:
    said: list[str] = []
    me = a_member(said)
    ElasticMember.commit(me)
    me._mine.moving = "experts"
    ElasticMember.commit(me)
    assert said == ["commit", "moved", "commit"]


@pytest.mark.parametrize(
    ("idle", "others", "want"),
    [(True, False, ["wait"]), (False, True, ["compute", "wait", "vote"]), (False, False, ["compute", "vote"])],
)
def test_nobody_votes_before_idle_members_have_come(idle: bool, others: bool, want: list[str]) -> None:
    said: list[str] = []
    ElasticMember.compute(a_member(said, _idle=idle, _others_idle=others))
    assert said == want


@pytest.mark.parametrize(("said", "goes"), [((True, None), True), ((True, False), False), ((None, False), False)])
@pytest.mark.parametrize("idle", [False, True])
def test_members_leave_when_nobody_says_that_state_would_be_lost(
    idle: bool, said: Sequence[bool | None], goes: bool
) -> None:
    told: list[Any] = []
    run = SimpleNamespace(planner=SimpleNamespace(missing=lambda places: []))
    me = a_member([], _idle=idle, _others_idle=not idle, run=run, place_of={"a": OLD})
    me._wait_with_all = lambda value: told.append(value) or list(said)
    assert ElasticMember.hand_over(me, ["a"]) is goes and told == [None if idle else True]


def test_a_last_save_that_failed_because_a_member_was_lost_is_no_matter_of_the_disk() -> None:
    def fails(*_: object, **__: object) -> None:
        raise CheckpointError.of("step-4", "not saved", "no", subject="saving")

    def lost(value: object) -> None:
        raise PeerError("a peer is lost")

    me = a_member([])
    me._mine = SimpleNamespace(close=fails, rank=SimpleNamespace(peers=SimpleNamespace(gather=lambda value: [value])))
    with pytest.raises(CheckpointError):
        ElasticMember.close(me, stopped=False)
    me._mine.rank.peers.gather = lost
    with pytest.raises(PeerError):
        ElasticMember.close(me, stopped=False)


def entered(
    reports: Sequence[MemberReport], resolution: Resolution, monkeypatch: pytest.MonkeyPatch, *, begun: bool = True
) -> tuple[list[str], int]:
    """What the first of them forgets as it enters generation 6, and the history of what it then holds."""
    said: list[str] = []
    uids = tuple(r.uid for r in reports)
    plan: Any = SimpleNamespace(
        uids=uids, members=[SimpleNamespace(descriptor=None)] * len(uids), remarks=(), missing=(), folding=OLD.folding, decision=""
    )  # fmt: skip
    team: Any = SimpleNamespace(uid=uids[0], uids=uids, rank=0, begun=begun, reports=reports)
    team.generation = Generation(number=6, epoch="e", members=tuple(Member(uid, "host") for uid in uids))
    monkeypatch.setattr(elastic, "take_state", lambda *_, **__: Moved())
    me = a_member(
        said, _plan=plan, holds=True, recipe=Recipe(), _is_new=False, _candidates=[], _keep_recipe=lambda: None, _signs=SimpleNamespace(holders=1),
        run=SimpleNamespace(planner=SimpleNamespace(floor=1)), _telling=SimpleNamespace(entry=None),
        _keep_watched=lambda team: None, _keep_state=lambda place: SimpleNamespace(begin=lambda move: None),
        _connect=lambda team: SimpleNamespace(peers=SimpleNamespace(gather=lambda value: [value])), _build=lambda team, plan: None,
        _examine=lambda plan, held, everyone: SimpleNamespace(plan=plan), _move_recorder=lambda *_, **__: None,
        _adopt=lambda *_, **__: None,
    )  # fmt: skip
    ElasticMember.enter(me, team, resolution)
    return [what for what in said if what == "forget"], me.progress.history


def test_what_belongs_to_an_abandoned_history_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what comes instead is of the history that the others have."""
    reports = [report("a", 9, history=1), report("b", 5, history=3), report("c", 5, history=3)]
    assert entered(reports, resolve(reports), monkeypatch) == (["forget"], 3)
    assert entered(reports[1:], resolve(reports[1:]), monkeypatch) == ([], 3)


@pytest.mark.parametrize(("begun", "history"), [(True, 6), (False, 0)])
def test_going_back_to_a_checkpoint_begins_a_history(
    begun: bool, history: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By which the state of whoever missed it is told from what comes after it."""
    nobody = Resolution(step=None, finish=(), repeat=(), holders=())
    assert entered([report("a", 0, holds=False)], nobody, monkeypatch, begun=begun)[1] == history
