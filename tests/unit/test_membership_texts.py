"""What members write for each other is text that all of them can read, whatever stands in an error: one word of one rank must not end the run of all."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import pytest
from membership_help import MemoryService

from phalanx.core.errors import RunError
from phalanx.core.reading import MalformedError
from phalanx.runtime.membership.host_agent import HostAgent
from phalanx.runtime.membership.keys import SocketKeys
from phalanx.runtime.membership.membership import FirstRule, Generation, Member, Membership, StaleMember
from phalanx.runtime.membership.store import LENGTH
from phalanx.runtime.membership.supervisor import Supervisor, SupervisorSettings
from phalanx.runtime.membership.votes import Votes
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
    agent.team = SimpleNamespace(generation=first, size=2)  # type: ignore[assignment]
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


def test_whatever_ends_the_watching_thread_ends_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for a lost member for ever, and so would the others for it."""
    _, _, first = begun("a.0")
    agent = WorkerAgent(Member("a.0", "a"), MemoryService(), pipe=-1, settings=AgentSettings())
    aborted: list[int] = []
    agent.team = SimpleNamespace(generation=first, abort=lambda: aborted.append(1))  # type: ignore[assignment]

    def glance(keys: object, wait_s: float) -> None:
        raise KeyError("responses")

    monkeypatch.setattr(agent, "_glance", glance)
    agent._watch()
    assert aborted and agent.broken()
    with pytest.raises(KeyError, match="responses"):
        agent._next_generation(first)


class Served:
    """The client's end of a connection on which a long answer is there already."""

    def __init__(self, answer: bytes) -> None:
        self.data, self.at = answer, 0

    def recv(self, most: int) -> bytes:
        self.at += most
        return self.data[self.at - most : self.at]

    def settimeout(self, seconds: float) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        pass


def test_a_long_answer_is_read_in_a_time_that_grows_with_its_length() -> None:
    """10,000 reports of 6 kB took longer than a service may, so that it counted as lost."""
    hello, answer = (json.dumps(["ok", found]).encode() for found in ("life", ["y" * 6000] * 8000))
    data = b"".join(LENGTH.pack(len(part)) + part for part in (hello, answer))
    keys = SocketKeys("here", lambda: Served(data), timeout_s=100.0)  # type: ignore[arg-type,return-value]
    begin_s = time.process_time()
    assert len(keys.values(["r"])) == 8000
    taken_s, begin_s = time.process_time() - begin_s, time.process_time()
    for _ in range(4):
        json.loads(answer)
    assert taken_s < 2.0 + 4 * (time.process_time() - begin_s)


def test_a_host_that_came_back_is_waited_for_by_who_keeps_the_service() -> None:
    service, _, _ = begun("a.0", "b.0")
    rule = FirstRule(wanted=2, minimum=1, gather_s=0.0)
    HostAgent("b", service, rule, limit_s=3.0).close()
    keeper, back = (HostAgent(host, service, rule, limit_s=3.0) for host in ("a", "b"))
    keeper._own.add("a.0")
    keeper.tick()
    back._own.add("b.0")
    back.tick()
    assert keeper.others_alive()
    back.close()
    assert not keeper.others_alive()


def test_a_member_that_was_alone_and_is_out_commits_nothing_and_ends_nothing() -> None:
    """The others joined while it stood still, and went on without it: nobody else decides in its generation."""
    service, membership, first = begun("a.0")
    votes = Votes(service.connect(), first, "a.0")
    assert votes.vote(0, then=lambda: "go on", broken=lambda: False).commit
    membership.propose_join([Member("b.0", "b")], first)
    membership.propose_death(["a.0"], "host a was silent", first)
    assert not votes.vote(1, then=lambda: "go on", broken=lambda: True).commit
    agent = WorkerAgent(Member("a.0", "a"), service, pipe=-1, settings=AgentSettings())
    agent.last = first
    with pytest.raises(StaleMember, match=r"a\.0 was excluded from the run in generation 3"):
        agent.finish(8)
    assert "finished" not in service.values


def test_a_member_ends_the_run_also_where_another_was_lost_after_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    service, membership, first = begun("a.0", "b.0")
    agent = WorkerAgent(Member("a.0", "a"), service, pipe=-1, settings=AgentSettings())
    monkeypatch.setattr(agent, "_say", lambda words: None)
    agent.last = first
    membership.propose_death(["b.0"], "killed", first)
    agent.finish(8)
    assert service.values["finished"] == "8 0"
