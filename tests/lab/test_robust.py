"""`phalanx bench robust`: a few kills and a short run, and that it tells ranks that hang, abort or complain unclearly, memory that grows, and wrong results."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import random
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from phalanx.core.errors import ConfigError, PeerError, RunError
from phalanx.plan.mapping.folding import make_folding
from phalanx_lab.bench.robust import command as robust, rank as robust_rank
from phalanx_lab.bench.robust.command import (
    LongRun,
    RobustArgs,
    RobustResult,
    Survivor,
    count_trial,
    growth,
    judge_iterations,
)
from phalanx_lab.bench.robust.rank import METHODS, RAISED, MemorySample, Raised, heap_in_use

TWO = make_folding(world=2, ep=2)
SAMPLE = MemorySample(iteration=0, resident_bytes=100_000, in_use_bytes=1000, objects=10)


def test_a_method_that_computes_nan_differs() -> None:
    class Layer(robust_rank.RobustLayer):
        rank = 1

        def __init__(self, broken: str) -> None:
            self.broken = broken

        def run(self, number: int, method: str) -> list[torch.Tensor]:
            return [torch.ones(3), torch.full((3,), float("nan") if method == self.broken else 2.0), torch.empty(0)]

    assert Layer("").differs(7) == ""
    assert f"pass 7 of rank 1: {METHODS[0]} differs" in Layer(METHODS[0]).differs(7)


@pytest.mark.ranks
def test_killed_a_few_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "robust.json"
    assert robust.main(["--trials", str(len(robust.FOLDINGS)), "--iterations", "0", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["raised_within_10s"] == found["trials"] == len(robust.FOLDINGS)
    assert found["hung"] == found["aborted"] == found["unclear"] == 0 and found["failures"] == []
    assert 0 < found["slowest_s"] < 10 and set(found["interrupted"]) <= set(METHODS)
    assert sum(found["interrupted"].values()) == sum(f.world - 1 for f in robust.FOLDINGS)
    assert found["iterations"] == 0 and found["memory_growth"] is None
    assert "6 kills: in 6 every other rank raised within 10 s" in capsys.readouterr().out


@pytest.mark.ranks
def test_all_methods_agree_in_a_short_run() -> None:
    found = robust.run_iterations(200)
    assert found.wrong == [] and found.compared == 2
    assert [[s.iteration for s in of_rank] for of_rank in found.samples] == [[50, 100, 150, 200]] * 2
    assert all(s.resident_bytes > 0 and s.objects < 50_000 for of_rank in found.samples for s in of_rank)


# ---- ranks that do it wrong ----------------------------------------------------------------------------------------------------


def misbehave(end, info, *, what):
    """A rank that does one thing after it has begun."""
    end.send("running")
    time.sleep(0.3)  # the other one has been killed
    if what == "hang":
        time.sleep(60)
    elif what == "abort":
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGABRT)
    elif what == "leave":
        os._exit(0)
    end.send(Raised(at_s=time.monotonic(), error="ValueError", text="?", clear=what != "complain", method="fine"))
    os._exit(RAISED if what != "crash later" else 139)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("what", "end", "text"),
    [
        ("hang", "hung", ""),
        ("abort", "aborted", "exit code -6"),
        ("leave", "aborted", "exit code 0"),
        ("crash later", "aborted", "exit code 139"),
        ("complain", "unclear", "ValueError: ?"),
        ("raise", "raised", "ValueError: ?"),
    ],
)
def test_what_a_rank_does_is_told(what: str, end: str, text: str) -> None:
    (found,), _ = robust.run_trial(TWO, random.Random(0), limit_s=1.5, body=partial(misbehave, what=what))
    assert (found.end, found.text) == (end, text)
    result = RobustResult(trials=1)
    count_trial(result, [found], 0)
    assert (result.raised_within_10s, bool(result.failures)) == (end == "raised", end != "raised")
    assert getattr(result, end, 1) == 1


def never_begins(end, info):
    end.send("no memory")
    time.sleep(60)


@pytest.mark.ranks
def test_ranks_that_do_not_begin_are_an_error() -> None:
    with pytest.raises(RunError, match=r"rank 0 of .*did not begin: it said no memory"):
        robust.run_trial(TWO, random.Random(0), body=never_begins)


@pytest.mark.parametrize(
    ("error", "clear"),
    [
        (PeerError("send over axis ep_etp, ranks (0, 1), failed on rank 0: a rank left"), True),
        (RunError("send over axis ep, ranks (0, 1)"), True),
        (PeerError("something went wrong"), False),
        (RuntimeError("axis ep, ranks (0, 1)"), False),
    ],
    ids=str,
)
def test_a_clear_error_is_ours_and_names_axis_and_ranks(error: Exception, clear: bool) -> None:
    assert robust_rank._raised(error, "fine").clear == clear


def test_an_answer_that_comes_late_counts_as_none() -> None:
    told = Raised(at_s=20.0, error="PeerError", text="late", clear=True, method="fine")
    assert robust._judge(0, told, RAISED, 5.0, 10.0).end == "hung"
    assert robust._judge(0, told, RAISED, 11.0, 10.0).end == "raised"


def test_a_trial_while_nothing_ran_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    good = [Survivor(rank=0, end="raised", seconds=0.1)]
    late = [Survivor(rank=0, end="hung", seconds=10.0)]
    answers = iter([(late, 9.0), (good, 0.0), (good, 0.2)])
    monkeypatch.setattr(robust, "run_trial", lambda folding, chance: next(answers))
    told: list[str] = []
    found = robust.measure(RobustArgs(trials=2, iterations=0), tell=told.append)
    assert (found.raised_within_10s, found.hung, found.disturbed) == (2, 0, 1)
    assert told == ["trial 0 again: nothing ran for 9.0 s"]
    monkeypatch.setattr(robust, "run_trial", lambda folding, chance: (late, 9.0))
    with pytest.raises(RunError, match="stands still too often"):
        robust.measure(RobustArgs(trials=1, iterations=0), tell=told.append)


# ---- memory ------------------------------------------------------------------------------------------------------------------


def long_run(slope: float, wrong: tuple[str, ...] = (), iterations: int = 5000) -> LongRun:
    """Two ranks, the second of which takes `slope` more of what it has in the first iterations, per iteration behind `SETTLED`."""
    steps = range(50, iterations + 1, 50)
    flat = [dataclasses.replace(SAMPLE, iteration=n) for n in steps]
    grown = [
        dataclasses.replace(s, resident_bytes=int(100_000 * (1 + slope * max(0, s.iteration - robust.SETTLED))))
        for s in flat
    ]
    return LongRun(samples=[flat, grown], wrong=list(wrong), compared=iterations // 100)


@pytest.mark.parametrize(("slope", "fails"), [(0.0, False), (1e-6, False), (4e-6, True)])
def test_growth_is_that_of_the_worst_rank(slope: float, fails: bool) -> None:
    result = RobustResult(trials=0, iterations=5000)
    judge_iterations(result, long_run(slope))
    assert result.memory_growth == pytest.approx(slope * 4250, abs=1e-5) and bool(result.failures) == fails
    assert result.heap_growth_bytes == result.object_growth == 0 and result.compared == 50


def test_a_moment_of_much_memory_is_no_growth() -> None:
    """A peak between the windows, or one in a window, moves no median; what comes before iteration 500 is no growth either."""
    (flat, _) = long_run(0.0).samples
    for at in (2, 40, -2):
        peak = list(flat)
        peak[at] = dataclasses.replace(peak[at], resident_bytes=900_000)
        assert growth(peak, "resident_bytes") == (100_000, 0)
    first = [dataclasses.replace(s, resident_bytes=1) if s.iteration < robust.SETTLED else s for s in flat]
    assert growth(first, "resident_bytes") == (100_000, 0)


def test_methods_that_differ_and_memory_that_grows_are_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for found, says in (
        (long_run(0.0, ("pass 100 of rank 1: fine differs from serial",)), "fine differs from serial"),
        (long_run(1e-5), "grew by 4"),
    ):
        monkeypatch.setattr(robust, "run_iterations", lambda iterations, found=found: found)
        assert robust.main(["--trials", "0"]) == 1
        said = capsys.readouterr().out
        assert "FAILED" in said and says in said


def test_what_is_allocated_is_counted() -> None:
    before = heap_in_use()
    block = bytearray(50_000_000)
    assert before == 0 or heap_in_use() >= before + len(block)  # 0: another C library


def test_products_ask_for_no_memory_after_the_buffers_were_filled() -> None:
    """In a thread of its own, for buffers are a thread's: products as they come keep up to 22 MB otherwise, where torch has MKL."""
    shape, grown = robust_rank.RobustShape(tokens=128, hidden=64, ffn=64), []

    def products() -> None:
        torch.set_num_threads(1)
        robust_rank.fill_buffers(shape, most_rows=256)
        weights, before = torch.zeros(128, 64), heap_in_use()
        for rows in (3, 9, 17, 25, 33, 60, 97, 110, 118, 127, 128, 200, 256):
            torch.mm(torch.zeros(rows, 64), weights.T)
        grown.append(heap_in_use() - before)

    thread = threading.Thread(target=products)
    thread.start()
    thread.join()
    assert grown[0] < 1_000_000


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trials": -1}, "trials = -1: must be 0 or more"),
        ({"iterations": 600}, "iterations = 600: must be 0, or at least 1500"),
        ({"trials": 0, "iterations": 0}, "leaves nothing to do"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        robust.measure(RobustArgs(**options))
