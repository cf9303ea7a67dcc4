"""A run whose rank is really slow: it is stopped and continued again and again, as on a processor that somebody else uses."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from test_elastic import RANKS, SETTINGS, _command
from train_help import Running, train_args, write_text

from phalanx_lab.bench.cluster import workers_of

pytestmark = pytest.mark.ranks
STEPS, SLOT = 60, 2


def slow_down(pid: int, over: threading.Event, *, stopped_s: float = 0.05, runs_s: float = 0.008) -> None:
    try:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(runs_s)
    except ProcessLookupError:
        pass  # it has left


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = []
    for slot in range(RANKS):
        path = folder / "events" / f"rank-{slot}.jsonl"
        if path.exists():
            said = path.read_text().splitlines()
            found += [{**json.loads(t), "slot": slot} for t in said if f'"kind":"{kind}"' in t]
    return found


def play(base: Path, **changes: str) -> Path:
    """The folder of a run whose slot `SLOT` is slowed down from its second step on."""
    settings = {
        **SETTINGS,
        "run__name": "slow",
        "train__steps": str(STEPS),
        "resilience__mode": "exact",
        "resilience__limit_s": "10",
        "observe__console": "plain",
        **changes,
    }
    running = Running(_command, ["train", *train_args(base, **settings)], "", {}, folder=base / "printed")
    folder, over = base / "runs" / "slow", threading.Event()
    end_s = time.monotonic() + 60
    while not any(e["step"] >= 2 for e in lines(folder, "StepEnded")) and time.monotonic() < end_s:
        time.sleep(0.05)
    slot = workers_of(folder, running.process.pid or 0, ranks=RANKS)[SLOT]
    slower = threading.Thread(target=slow_down, args=(slot, over))
    slower.start()
    try:
        out, err = running.communicate(150)
        assert running.returncode == 0, err + out
    finally:
        over.set()
        slower.join()
        running.kill()
    return folder


def test_a_slow_rank_hands_over_leaves_and_stays_away(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    folder = play(tmp_path, resilience__straggler="2", resilience__straggler_steps="4")
    out = [e for e in lines(folder, "Straggling") if e["put_out"]]
    assert out and {e["host"].split(".")[1] for e in out} == {str(SLOT)}
    step = out[0]["step"]
    assert {(e["step"], e["host"]) for e in out} == {(step, out[0]["host"])}  # all have decided alike
    teams = [e for e in lines(folder, "TeamFormed") if e["generation"] > 1]
    assert {e["members"] for e in teams} == {RANKS - 1} and all(
        "times as slow as the others" in e["why"] for e in teams
    )
    assert {e["lost_s"] for e in teams} == {0.0} and not lines(folder, "WentBack")
    slowed = [e["slowness"] for e in lines(folder, "StepEnded") if e["step"] == step]
    assert min(slowed) > 2
    ended = lines(folder, "StepEnded")
    assert max(e["step"] for e in ended if e["slot"] == SLOT) <= step + 10
    assert max(e["step"] for e in ended) == STEPS
    assert "is slow: " in (tmp_path / "printed" / "out").read_text()
    told: dict[int, set[float]] = {}
    for event in ended:
        told.setdefault(event["step"], set()).add(event["loss"])
    assert sorted(told) == list(range(1, STEPS + 1)) and all(len(losses) == 1 for losses in told.values())


@pytest.mark.slow
def test_without_the_setting_it_is_told_of_and_stays(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
    folder = play(tmp_path, resilience__straggler_steps="4", train__steps="24")
    told = lines(folder, "Straggling")
    assert told and not any(e["put_out"] for e in told) and "resilience.straggler = 0" in told[0]["why"]
    assert {e["generation"] for e in lines(folder, "TeamFormed")} == {1}
