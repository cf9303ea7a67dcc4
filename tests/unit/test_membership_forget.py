"""What a service keeps of a long run: old generations are emptied and never made a second time; the dead are forgotten; what a host's end says."""

from __future__ import annotations

import pytest
from membership_help import MemoryService
from test_membership import announcement, first, members

from phalanx.core.events import Event
from phalanx.runtime.membership import host_agent as host_agent_module
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.membership import KEPT, FirstRule, Generation, Member, Membership
from phalanx.runtime.membership.supervisor import (
    REMOVED_CODE,
    RespawnsUsedUp,
    Supervisor,
    SupervisorSettings,
    exit_code,
)
from phalanx.runtime.membership.votes import stepped_key
from phalanx.runtime.membership.worker import STALE_CODE

pytestmark = pytest.mark.unit


def many(membership: Membership, count: int) -> list[Generation]:
    """In each generation slot 1 dies and comes back as another process."""
    out = [first(membership, "a.0", "b.1.0")]
    for uid in ("a.0", "b.1.0"):
        membership.announce(announcement(uid))
    for i in range(count):
        membership.announce(announcement(f"b.1.{i + 1}"))
        membership.request_leave({f"b.1.{i}": "told"})
        for made in (
            membership.propose_death([f"b.1.{i}"], "killed", out[-1]),
            membership.propose_join(members(f"b.1.{i + 1}"), None),
        ):
            assert made is not None
            out.append(made)
    return out


def test_an_emptied_generation_keeps_its_number() -> None:
    service = MemoryService()
    membership, other = Membership(service.connect()), Membership(service.connect())
    made = many(membership, 3)
    newest = made[-1]
    assert membership.forget(2, newest) == [] and membership.forget(3, newest) == ["b.1.1"]
    assert membership.forget(3, newest) == [] and membership.forget(newest.number, newest) == []
    assert membership.keys.listed("member/") == ["member/a.0", "member/b.1.0", "member/b.1.2", "member/b.1.3"]
    assert membership.keys.listed("leave-request/") == ["leave-request/b.1.0", "leave-request/b.1.2"]
    # who stood still since the first generation finds the newest, and makes no number a second time
    assert other.current(made[0]) == newest == other.wait(made[0], 0.0)
    assert other.propose_death(["b.1.0"], "late", made[0]) == newest
    assert other.renew(made[0], "late") == newest
    joined = other.propose_join(members("c.0"), made[1])
    assert joined is not None and joined.number == newest.number + 1 and joined.uids == (*newest.uids, "c.0")
    between = other.between(made[0], newest)
    assert [g.number for g in between] == [2, 3, 4, 5, 6, 7] and [g.forgotten for g in between][:2] == [True, True]
    assert all(
        "a.0" not in g.uids for g in between if g.forgotten
    )  # so whoever missed it is removed (`MembershipWatcher._check_missed`)


def test_a_proposal_that_meets_an_emptied_number_goes_on_from_the_newest() -> None:
    """The proposer read the second generation as the newest, and stood still."""
    service = MemoryService()
    membership = Membership(service.connect())
    made = many(membership, 3)
    for number in range(1, 5):
        membership.forget(number, made[-1])
    asked: list[int] = []

    class Late(Membership):
        def current(self, known: Generation | None = None) -> Generation | None:
            asked.append(0 if known is None else known.number)
            return made[1] if len(asked) == 1 else super().current(known)

    found = Late(service.connect()).propose_join(members("c.0"), made[1])
    assert found is not None and found.number == made[-1].number + 1 and "c.0" in found.uids
    assert membership.current() == found


def test_the_host_agent_empties_what_is_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agent_module, "KEPT", 3)
    monkeypatch.setattr(host_agent_module, "TIDY_SOON_S", 0.0)
    monkeypatch.setattr(host_agent_module, "TIDY_S", 0.0)
    monkeypatch.setattr(host_agent_module, "LOOK_S", 0.0)
    service = MemoryService()
    keys = service.connect()
    membership = Membership(keys)
    made = many(membership, 5)
    host = HostAgent("a", service, FirstRule(wanted=2, minimum=1, gather_s=1.0), limit_s=600.0)
    host.announced(Member("a.0", "a"))
    membership.announce(announcement("a.9"))
    host.announced(Member("a.9", "a"))
    host.died("a.9", "killed")  # it was never in a generation
    for _ in range(30):
        host.tick()
    assert all(not Generation.from_json(keys.get(f"gen/{g.number}") or "").forgotten for g in made), "while one forms"
    keys.put(stepped_key(made[-1]), "1")
    for _ in range(30):
        host.tick()
    forgotten = [g.number for g in made if Generation.from_json(keys.get(f"gen/{g.number}") or "").forgotten]
    assert forgotten == list(range(1, made[-1].number - 2 - 3 + 1))
    left = {name.removeprefix("member/") for name in keys.listed("member/")}
    assert {"a.0", "b.1.5"} <= left and not {"a.9", "b.1.0", "b.1.1"} & left
    assert membership.current() == made[-1] and KEPT > 3


def test_who_was_a_member_is_not_taken_back_however_long_its_host_was_away_and_who_never_was_may_come() -> None:
    service = MemoryService()
    membership = Membership(service.connect())
    made = many(membership, 3)
    host = HostAgent("b", service, FirstRule(wanted=2, minimum=1, gather_s=1.0), limit_s=600.0)
    membership.announce(announcement("b.1.7"))
    was, never = members("b.1.1", "b.1.7")
    for forgotten in (False, True):
        for number in range(2, made[-1].number) if forgotten else ():
            membership.forget(number, made[-1])
        host.newest, host._own, host._taken = made[0], {was.uid, never.uid}, set()
        host._note_taken(membership, made[-1])
        assert [g.forgotten for g in membership.between(made[0], made[-1])][:-1] == [forgotten] * 5
        assert not host._may_join(was, membership) and host._may_join(never, membership)


def test_the_exit_code_says_what_happened() -> None:
    goes_on, done = {"finished": False, "over": False}, {"finished": True, "over": True}
    assert exit_code([0, 0], **goes_on) == 0 == exit_code([], **done)
    assert exit_code([0, -9], **goes_on) == 137 and exit_code([-15, -9], **goes_on) == 143
    assert exit_code([0, -9], **done) == 0 and exit_code([0, -9], finished=False, over=True) == 137
    assert exit_code([0, 1, -9], **done) == 1 == exit_code([-9, 1], **goes_on)


def test_a_host_that_was_put_out_is_to_be_started_again() -> None:
    """0 would be the end of its part: a pod that never comes back."""
    goes_on = {"finished": False, "over": False}
    assert exit_code([STALE_CODE] * 4, **goes_on) == REMOVED_CODE == exit_code([0, STALE_CODE], **goes_on)
    assert exit_code([STALE_CODE, -9], **goes_on) == 137 and exit_code([STALE_CODE, 1], **goes_on) == 1
    assert exit_code([STALE_CODE], finished=True, over=True) == 0 == exit_code([STALE_CODE], finished=False, over=True)


@pytest.mark.parametrize(("over", "code"), [(False, REMOVED_CODE), (True, 0)])
def test_whether_the_run_goes_on_is_asked_when_all_were_put_out(over: bool, code: int) -> None:
    service = MemoryService()
    settings = SupervisorSettings(host="h", slots=2, wanted=2, respawns=0)
    supervisor = Refused(lambda agent: 0, settings, service=service)  # type: ignore[arg-type]
    if over:
        service.values["finished"] = "3 1"
    assert supervisor.run() == code and supervisor.codes == [STALE_CODE] * 2


class Refused(Supervisor):
    """Whose workers, which are no processes, were removed at once."""

    def _start(self, slot: int) -> None:
        self.started += 1
        self.codes.append(STALE_CODE)


class _Ended:
    slot, uid, ended = 2, "h.2.ab", True

    @staticmethod
    def cause() -> str:
        return "killed by SIGKILL"


def test_respawns_that_are_used_up_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Event] = []
    settings = SupervisorSettings(host="h", slots=3, wanted=3, respawns=4)
    supervisor = Supervisor(lambda agent: 0, settings, service=MemoryService(), tell=told.append)  # type: ignore[arg-type]
    supervisor.started = 6
    assert not supervisor._is_used_up(_Ended()) and not told  # type: ignore[arg-type]
    supervisor.started = 7
    assert supervisor._is_used_up(_Ended())  # type: ignore[arg-type]
    assert told == [RespawnsUsedUp(host="h", started=4, uid="h.2.ab", why="killed by SIGKILL")]
    assert "slot 2 will not be restarted (killed by SIGKILL): the limit of 4 restarts" in capsys.readouterr().err


def test_who_left_long_ago_is_not_listed_any_more() -> None:
    """A host that goes and comes back with every spot notice: the list is as long as what anybody may still compare with."""
    membership = Membership(MemoryService().connect())
    now = first(membership, "a.0", "b.0")
    for i in range(2 * KEPT):
        joined = membership.propose_join(members(f"c.{i}"), now)
        assert joined is not None
        left = membership.propose_leave([f"c.{i}"], "told", joined)
        assert left is not None and left.lost_of(joined) == () and left.leaving[-1] == f"c.{i}"
        now = Generation.from_json(left.to_json())
        assert now == left
    assert len(now.leaving) <= KEPT // 2 + 1
    old = [g for g in membership.between(first_of(membership), now) if now.number - g.number < KEPT]
    assert all(now.lost_of(generation) == () for generation in old)


def first_of(membership: Membership) -> Generation:
    text = membership.keys.get("first")
    assert text is not None
    return Generation.from_json(text)
