"""Supervisors and their workers as real processes that train a toy: kills, freezes, notices, a service that dies, too few members."""

from __future__ import annotations

import ctypes
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from phalanx.core.events import Emit
from phalanx.runtime.membership import supervisor
from phalanx.runtime.membership.supervisor import SupervisorSettings
from phalanx.runtime.membership.watcher import AgentSettings
from phalanx.runtime.membership.worker_agent import WorkerAgent
from phalanx.runtime.processes.world import WorldInfo
from phalanx_lab.bench.storm.chaos_cluster import ChaosCluster, read_events, users_of
from phalanx_lab.bench.storm.check import problems_of
from phalanx_lab.bench.storm.members import ToyStormArgs, storm, worker
from phalanx_lab.bench.storm.toy import ToyBoard

pytestmark = pytest.mark.ranks


def test_a_storm_loses_nothing(tmp_path: Path) -> None:
    """Two faults of each kind; collectives would wait for 60 s, and nothing may."""
    result = storm(ToyStormArgs(faults=12, seed=3, between_s=0.4), tmp_path)
    assert result.failures == []
    assert (result.faults, result.hung, result.orphans, result.bitwise_equal) == (12, 0, 0, True)
    refused = [p for p in tmp_path.glob("stderr-*") if "was excluded from the run" in p.read_text()]
    assert refused, "a thawed member must learn that it was excluded"


def arena_of(
    tmp_path: Path, board: ToyBoard, *, hosts: int, slots: int, main: object = None, **rest: object
) -> ChaosCluster:
    def settings(host: str) -> SupervisorSettings:
        said = {"slots": slots, "wanted": hosts * slots, "limit_s": 2.0, "gather_s": 2.0, **rest}
        return SupervisorSettings(host=host, **{"agent": AgentSettings(timeout_s=60.0), **said})  # type: ignore[arg-type]

    run = main or worker(board, pause_s=0.01, folder=tmp_path, stop=tmp_path / "stop")
    return ChaosCluster(run, settings, hosts=hosts, slots=slots, folder=tmp_path, board=board)  # type: ignore[arg-type]


def test_too_few_members_end_cleanly_and_say_for_whom_they_waited(tmp_path: Path) -> None:
    board = ToyBoard(2)
    with arena_of(tmp_path, board, hosts=1, slots=2, minimum=2, respawns=0, wait_s=0.5) as cluster:
        cluster.wait_for(lambda: cluster.step() >= 3, "step 3")
        cluster.hurt("kill", random.Random(0), phase="compute")
        cluster.wait_for_end(90.0)
        assert cluster.codes == {"h0": 1}
    said = next(tmp_path.glob("error-h0-*")).read_text()
    assert "TooFewMembers: 1 members (h0." in said and "the run needs 2" in said
    assert users_of(tmp_path) == []


def test_a_run_that_never_has_its_minimum_ends_and_says_what_it_has(tmp_path: Path) -> None:
    board = ToyBoard(2)
    with arena_of(tmp_path, board, hosts=1, slots=2, wanted=3, minimum=3, gather_s=0.2, wait_s=0.5) as cluster:
        cluster.wait_for_end(90.0)
        assert cluster.codes == {"h0": 1}
    said = next(tmp_path.glob("error-h0-*")).read_text()
    assert "TooFewMembers: the run has not begun: 2 ranks of all hosts are ready, and it needs 3" in said
    assert users_of(tmp_path) == []


def test_a_host_with_another_plan_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    board = ToyBoard(2)
    good = worker(board, pause_s=0.01, folder=tmp_path, stop=tmp_path / "stop")

    def main(agent: WorkerAgent, place: int, tell: Emit) -> int:
        if agent.member.host == "h0":
            return int(good(agent, place, tell))
        time.sleep(0.5)
        agent.announce(plan_hash="another", version="1")
        raise AssertionError("it was let in")

    with arena_of(tmp_path, board, hosts=2, slots=1, main=main, minimum=1, gather_s=0.2) as cluster:
        cluster.wait_for(lambda: "h1" not in cluster.pids and cluster.step() >= 20, "step 20 without h1")
        assert cluster.codes == {"h1": 1} and cluster.step() >= 20
        (tmp_path / "stop").write_text(str(cluster.step() + 20))
        cluster.wait_for_end(90.0)
        assert cluster.codes["h0"] == 0
    said = next(tmp_path.glob("error-h1-*")).read_text()
    assert "plan hash = 'another': the run has 'toy'" in said


@pytest.mark.core
def test_a_worker_that_fails_by_itself_ends_the_run_with_its_error(tmp_path: Path) -> None:
    board = ToyBoard(1)

    def main(agent: WorkerAgent, place: int, tell: Emit) -> int:
        agent.announce(plan_hash="toy", version="1")
        raise ZeroDivisionError("a mistake of its own")

    with arena_of(tmp_path, board, hosts=1, slots=1, main=main, quick_deaths=3) as cluster:
        cluster.wait_for_end(90.0)
        assert cluster.codes == {"h0": 1}
    assert "a mistake of its own" in next(tmp_path.glob("error-h0-*")).read_text()


@pytest.mark.core
def test_a_run_that_is_stopped_ends_after_a_step(tmp_path: Path) -> None:
    board = ToyBoard(2)
    with arena_of(tmp_path, board, hosts=1, slots=2) as cluster:
        cluster.wait_for(lambda: cluster.step() >= 5, "step 5")
        for _ in range(
            3
        ):  # a scheduler sends it to every process, each passes it on, and it comes again before SIGKILL
            cluster.signal_host("h0", signal.SIGTERM)
            time.sleep(0.01)
        cluster.wait_for_end(90.0)
        assert cluster.codes == {"h0": 0}
    events = list(read_events(tmp_path))
    last = max(e["step"] for e in events if e["kind"] == "Committed")
    assert problems_of(events, steps=last) == []
    assert sum(e["kind"] == "Committed" and e["step"] == last for e in events) == 2, "both commit the last step"


def test_a_stop_does_not_wait_for_a_worker_that_is_in_no_generation_yet(tmp_path: Path) -> None:
    """One is killed, its successor never says that it is ready, and the run is stopped meanwhile."""
    board, successor = ToyBoard(2), tmp_path / "successor"
    toy = worker(board, pause_s=0.01, folder=tmp_path, stop=tmp_path / "stop")

    def main(agent: WorkerAgent, place: int, tell: Emit) -> int:
        if any(e["kind"] == "Committed" for e in read_events(tmp_path)):
            successor.touch()
            time.sleep(60.0)
        return toy(agent, place, tell)

    with arena_of(tmp_path, board, hosts=1, slots=2, main=main) as cluster:
        cluster.wait_for(lambda: cluster.step() >= 3, "step 3")
        cluster.hurt("kill", random.Random(0), phase="compute")
        cluster.wait_for(successor.exists, "a successor")
        begin_s = time.monotonic()
        cluster.signal_host("h0", signal.SIGTERM)
        cluster.wait_for_end(90.0)
        assert time.monotonic() - begin_s < 40.0
        assert cluster.codes == {"h0": 0}


@pytest.mark.core
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_worker_may_be_silent_until_it_has_its_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """Making CUDA's context holds Python's lock, so that no thread sends a heartbeat; on a CPU nothing may."""
    sleep, first = ctypes.PyDLL(None).sleep, tmp_path / "first"

    def make_context(info: WorldInfo, device: str) -> torch.device:
        if not first.exists():
            first.touch()
            sleep(3)
        return torch.device("cpu")

    def main(agent: WorkerAgent, place: int, tell: Emit) -> int:
        agent.announce(plan_hash="toy", version="1")
        time.sleep(0.5)
        return 0

    monkeypatch.setattr(supervisor, "own_device", make_context)
    agent = AgentSettings(timeout_s=60.0, device=device)
    with arena_of(tmp_path, ToyBoard(1), hosts=1, slots=1, main=main, limit_s=1.2, agent=agent) as cluster:
        cluster.wait_for_end(90.0)
        assert cluster.codes == {"h0": 0}
    lost = [e["why"] for e in read_events(tmp_path) if e["kind"] == "MemberLost"]
    assert bool(lost) == (device == "cpu") and all("was silent for" in why for why in lost)
