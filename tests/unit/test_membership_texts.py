"""What members write for each other is text that all of them can read, whatever stands in an error: one word of one rank must not end the run of all."""

from __future__ import annotations

import os

import pytest
from membership_help import MemoryService

from phalanx.core.errors import RunError
from phalanx.core.reading import MalformedError
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.membership import FirstRule, Generation, Member, Membership
from phalanx.runtime.membership.supervisor import Supervisor, SupervisorSettings
from phalanx.runtime.membership.watcher import AgentSettings
from phalanx.runtime.membership.worker import Worker, fork_worker
from phalanx.runtime.membership.worker_agent import WorkerAgent

pytestmark = pytest.mark.unit

ODD = "cannot read \udcff.txt\x1b[2J"
"""As the error of a file whose name is not UTF-8 has it."""
SHOWN = "cannot read \\xdcff.txt\\x1b[2J"


def begun(*uids: str) -> tuple[MemoryService, Membership, Generation]:
    service = MemoryService()
    membership = Membership(service.connect())
    first = membership.start([Member(uid, uid[0]) for uid in uids], above=0, minimum=1, why="")
    return service, membership, first


def test_the_error_of_a_rank_ends_no_other() -> None:
    service, membership, _ = begun("a.0", "b.0")
    agent = HostAgent("a", service, FirstRule(wanted=2, minimum=1, gather_s=0.0), limit_s=3.0)
    agent._own.add("a.0")
    agent.died("a.0", ODD)
    agent.tick()
    found = membership.current()
    assert found is not None and (found.uids, found.why) == (("b.0",), f"a.0: {SHOWN}")


def test_a_reason_to_leave_or_to_stop_is_read_by_all() -> None:
    service, membership, first = begun("a.0", "b.0")
    membership.request_leave({"a.0": ODD})
    assert membership.leave_requests() == {"a.0": SHOWN}
    found = membership.propose_leave(["a.0"], ODD, first)
    assert found is not None and found.why == f"a.0: {SHOWN}"
    agent = HostAgent("b", service, FirstRule(wanted=2, minimum=1, gather_s=0.0), limit_s=3.0)
    agent.stop(ODD)
    agent.tick()
    assert service.values["stop"] == SHOWN


def test_who_leaves_is_written_so_that_all_read_it() -> None:
    service, _, first = begun("a.0", "b.0")
    agent = WorkerAgent(Member("b.0", "b"), service, pipe=-1, settings=AgentSettings())
    agent.team = type("Team", (), {"generation": first, "size": 2})()  # type: ignore[assignment]
    agent._leave_requests = {"a.0": ODD}
    with pytest.raises(MalformedError, match="half a surrogate pair"):
        agent.waits_or_ends()
    assert not [key for key in service.values if key.startswith("leavers/")]


def test_a_text_that_nobody_could_read_ends_its_writer_and_is_not_written() -> None:
    service, membership, first = begun("a.0", "b.0")
    with pytest.raises(MalformedError, match="half a surrogate pair"):
        membership.renew(first, ODD)
    assert "gen/2" not in service.values


def ended(error: BaseException) -> Worker:
    def work(member: Member, pipe: int) -> int:
        raise error

    worker = fork_worker(work, Member("h.0.x", "h"), slot=0)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    worker.reap()
    worker.read()
    return worker


def test_an_error_without_words_is_a_cause_all_the_same() -> None:
    assert ended(RunError("")).cause() == "RunError"
    assert ended(RunError("\n\ntwo\nlines")).cause() == "two"


def test_a_host_gives_up_by_an_error_without_words() -> None:
    found = Supervisor(lambda agent: 0, SupervisorSettings(slots=1, wanted=1), service=MemoryService())
    found._give_up(RunError(""))
    assert found.host_agent._stop == "the run was stopped: RunError"
