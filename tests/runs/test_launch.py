"""Local ranks: started together, ended together, and the first cause is what the user reads."""

import contextlib
import os
import signal
import textwrap
import time
from pathlib import Path

import pytest
from train_help import Running, start_program

from phalanx.core.process import usable_cores
from phalanx.runtime.processes.launch import threads_per_rank

pytestmark = pytest.mark.ranks

PRELUDE = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from phalanx.core.errors import ConfigError, PhalanxError, Problem, RunError
from phalanx.runtime.processes.world import close_world, init_world
from phalanx.runtime.processes.launch import run_local
folder = Path(sys.argv[1])

def note(name, text=""):
    path = folder / f".{name}"
    path.write_text(str(text))
    path.rename(folder / name)

def run(main, ranks=3, **more):
    try:
        sys.exit(run_local(main, ranks=ranks, threads=1, **more))
    except PhalanxError as err:
        print(type(err).__name__, err, file=sys.stderr)
        sys.exit(2)
"""


def start(folder: Path, body: str) -> Running:
    return start_program(PRELUDE + textwrap.dedent(body), str(folder))


def finish(process: Running, timeout_s: float = 60.0) -> tuple[int | None, str, str]:
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def wait_for(folder: Path, *names: str, timeout_s: float = 40.0) -> list[str]:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if all((folder / n).exists() for n in names):
            return [(folder / n).read_text() for n in names]
        time.sleep(0.02)
    raise AssertionError(f"{names} did not appear; there are {os.listdir(folder)}")


def gone(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def wait_gone(*pids: int, timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not all(gone(p) for p in pids):
        assert time.monotonic() < end_s, f"still there: {[p for p in pids if not gone(p)]}"
        time.sleep(0.02)


SLEEPERS = """
def main(info, stop):
    note(f"up{info.rank}", os.getpid())
    while not stop.requested:
        time.sleep(0.02)
    note(f"stopped{info.rank}")
    return 0
run(main)
"""


@pytest.mark.core
def test_ranks_meet_and_compute(tmp_path: Path) -> None:
    body = """
    def main(info, stop):
        init_world(info, timeout_s=30)
        x = torch.full((4,), float(info.rank))
        dist.all_reduce(x)
        close_world()
        note(f"sum{info.rank}", f"{x[0].item():g} {torch.get_num_threads()}")
        return 0
    run(main)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 0, err
    assert wait_for(tmp_path, "sum0", "sum1", "sum2") == ["3 1"] * 3


def test_what_a_rank_says_before_it_ends_itself_is_told_before_the_error_of_a_peer(tmp_path: Path) -> None:
    body = """
    from phalanx.core.errors import PeerError
    from phalanx.runtime.comm import LostPeers
    from phalanx.runtime.processes import report_error
    def main(info, stop):
        if info.rank != 1:
            time.sleep(0.1)
            raise PeerError("received nothing from rank 1")
        lost = LostPeers(report_error)
        with lost.telling(lambda _: time.sleep(4)):  # a sink that is slow; the launcher does not wait for it
            lost.end(RunError("the rows of rank 1 are gone"))
    run(main)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 2 and "RunError the rows of rank 1 are gone" in err and "received nothing" not in err
    assert err.count("the rows of rank 1") == 1, "the launcher says it"


@pytest.mark.core
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path) -> None:
    process = start(tmp_path, SLEEPERS)
    pids = [int(p) for p in wait_for(tmp_path, "up0", "up1", "up2")]
    os.kill(pids[1], signal.SIGKILL)
    begin_s = time.monotonic()
    code, _, err = finish(process)
    assert code == 2
    assert time.monotonic() - begin_s < 30.0
    assert f"rank 1 (process {pids[1]}) was killed by SIGKILL" in err
    assert err.rstrip().endswith("the other ranks were stopped"), "whether anything goes on is the caller's to say"
    wait_gone(*pids)


def test_the_caller_says_what_to_do_after_a_kill(tmp_path: Path) -> None:
    body = """
    def main(info, stop):
        os.kill(os.getpid(), signal.SIGBUS)
    run(main, ranks=1, after_kill="Start it again")
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 2 and "was killed by SIGBUS; the other ranks were stopped. Start it again" in err


def test_killed_parent_takes_its_ranks_along(tmp_path: Path) -> None:
    process = start(tmp_path, SLEEPERS)
    pids = [int(p) for p in wait_for(tmp_path, "up0", "up1", "up2")]
    process.kill()
    wait_gone(*pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_asks_all_ranks_to_finish(tmp_path: Path, number: int) -> None:
    process = start(tmp_path, SLEEPERS)
    wait_for(tmp_path, "up0", "up1", "up2")
    process.send_signal(number)
    code, _, err = finish(process)
    assert code == 0 and err == ""
    wait_for(tmp_path, "stopped0", "stopped1", "stopped2")


def test_sigterm_of_a_whole_job_asks_once(tmp_path: Path) -> None:
    """A scheduler sends it to every process, whoever started them passes it on, and it comes again before SIGKILL."""
    process = start(tmp_path, SLEEPERS.replace("time.sleep(0.02)", "time.sleep(0.5)"))
    pids = [int(p) for p in wait_for(tmp_path, "up0", "up1", "up2")]
    for _ in range(2):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 0 and err == ""
    wait_for(tmp_path, "stopped0", "stopped1", "stopped2")


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    body = """
    def main(info, stop):
        note(f"up{info.rank}", os.getpid())
        while True:
            time.sleep(0.02)
            if stop.requested:
                note(f"asked{info.rank}")
    run(main)
    """
    process = start(tmp_path, body)
    pids = [int(p) for p in wait_for(tmp_path, "up0", "up1", "up2")]
    process.send_signal(signal.SIGINT)
    wait_for(tmp_path, "asked0", "asked1", "asked2")
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    wait_gone(*pids)


def test_error_of_a_rank_is_raised_with_its_type(tmp_path: Path) -> None:
    body = """
    def main(info, stop):
        if info.rank == 1:
            raise ConfigError([Problem(where="train.steps", value=-1, rule="must be positive", hint="use 1")], subject="recipe")
        time.sleep(60)
        return 0
    run(main)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 2
    assert err.strip().splitlines() == [
        "ConfigError 1 problem with recipe:",
        "  - train.steps = -1: must be positive; use 1",
    ]


def test_unexpected_error_comes_with_rank_and_traceback(tmp_path: Path) -> None:
    body = """
    def broken():
        return 1 // 0
    def main(info, stop):
        if info.rank == 2:
            broken()
        time.sleep(60)
        return 0
    run(main)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 2
    assert "rank 2 failed" in err and "in broken" in err and "ZeroDivisionError" in err


def test_a_dead_rank_is_the_cause_not_its_peers_complaint(tmp_path: Path) -> None:
    body = """
    def main(info, stop):
        init_world(info, timeout_s=30)
        if info.rank == 2:
            os.kill(os.getpid(), signal.SIGSEGV)
        dist.all_reduce(torch.ones(1))
        return 0
    run(main)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 2
    assert "rank 2" in err and "killed by SIGSEGV" in err and "Traceback" not in err


def test_a_bug_in_one_rank_is_the_cause_not_its_peers_complaint(tmp_path: Path) -> None:
    body = """
    from phalanx.runtime.comm.peers import Peers, own_group
    def main(info, stop):
        init_world(info, timeout_s=30)
        peers = Peers(own_group(3, timeout_s=30))
        if info.rank == 2:
            time.sleep(0.2)
            1 // 0
        peers.gather(None)
        return 0
    run(main)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 2
    assert "rank 2 failed" in err and "ZeroDivisionError" in err


def test_exit_code_without_a_word_is_reported(tmp_path: Path) -> None:
    body = """
    def main(info, stop):
        if info.rank == 1:
            os._exit(7)
        time.sleep(60)
        return 0
    run(main)
    """
    code, _, err = finish(start(tmp_path, body))
    assert code == 2
    assert "rank 1 failed" in err and "exit code 7" in err


def test_threads_share_the_cores() -> None:
    assert threads_per_rank(1) == usable_cores() >= 1
    assert threads_per_rank(10_000) == 1
    assert threads_per_rank(4, threads=3) == 3


def test_what_a_rank_left_behind_does_not_hold_up_its_error(tmp_path: Path) -> None:
    """A process that it forked (a data loader's) has the pipe open through which it told."""
    body = """
    def main(info, stop):
        if os.fork() == 0:
            note("child", os.getpid())
            time.sleep(120)
            os._exit(0)
        while not (folder / "child").exists():
            time.sleep(0.01)
        raise ValueError("boom")
    run(main, ranks=1)
    """
    process = start(tmp_path, body)
    (child,) = map(int, wait_for(tmp_path, "child"))
    try:
        code, _, err = finish(process)
        assert code == 2 and "ValueError: boom" in err
        assert not gone(child)
    finally:
        os.kill(child, signal.SIGKILL)
