"""`phalanx gpu-check` where there is no GPU: each check runs, tiny, and what is wrong is told, whatever way it ends."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from phalanx.cli.main import run_command
from phalanx.kernels.ops import swiglu
from phalanx.runtime.moe import overlap
from phalanx.runtime.processes.world import WorldInfo
from phalanx_lab.gpu_check import healing, parity, streams, whole_runs
from phalanx_lab.gpu_check.cards import own_card
from phalanx_lab.gpu_check.checks import CheckLine, GpuCheck
from phalanx_lab.gpu_check.here import Here
from phalanx_lab.gpu_check.plan import CHECKS
from phalanx_lab.gpu_check.runner import run_all
from phalanx_lab.gpu_check.whole_runs import recipe_of

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TYRO = "import sys; sys.modules['tyro'] = None; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
ONLY_ON_A_GPU = {"A2.symmetric", "A5.launches", "A5.waits", "A6", "C4.fused", "D2"}


def program(*args: str) -> subprocess.CompletedProcess[str]:
    """The command as on a lent machine: from the sources, without tyro."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'lab'}"}
    line = [sys.executable, "-c", WITHOUT_TYRO, "gpu-check", *args]
    return subprocess.run(line, capture_output=True, text=True, timeout=280, env=env)


def run(tmp_path: Path, work: Callable[[Here], None], *, limit_s: float = 30.0) -> CheckLine:
    """The line of a check that does `work`, found by its module as all are."""
    check = GpuCheck(name="A9", title="drawn up", run="parity:planned", seconds=1, limit_s=limit_s)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity, "planned", work, raising=False)
        here = Here(device=torch.device("cpu"), told=Path(os.devnull))
        (line,) = run_all([check], here, out=tmp_path / "lines.json", limit_s=60)
    (written,) = (tmp_path / "lines.json").read_text().splitlines()
    assert json.loads(written) == vars(line)
    return line


@pytest.mark.parametrize(
    ("found", "local_rank", "is_apart"), [(8, 3, False), (4, 3, False), (3, 0, True), (1, 0, True)]
)
def test_ranks_share_a_card_only_where_there_are_too_few(
    found: int, local_rank: int, is_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    with mock.patch.dict(os.environ):
        at = own_card(WorldInfo(rank=3, world=4, local_rank=3, local_world=4))
        assert (at.local_rank, at.rank, at.world) == (local_rank, 3, 4)
        assert (os.environ.get("NCCL_HOSTID") == "rank-3") is is_apart


@pytest.mark.parametrize("stages", [pytest.param("A", marks=pytest.mark.core), "B C D"])
def test_each_check_runs_here_without_tyro(tmp_path: Path, stages: str) -> None:
    file = tmp_path / "lines.json"
    done = program("--self-test", "--json", str(file), "--keep", str(tmp_path / "kept"), "--stage", *stages.split())
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = {path.name.partition("-")[0] for path in tmp_path.glob("kept/*")}
    assert recorded >= ({"host.jsonl", "member", "killed", "printed"} if "C" in stages else set())
    lines = [json.loads(text) for text in file.read_text().splitlines()]
    assert [x["check"] for x in lines] == [c.name for c in CHECKS if c.stage in stages.split()]
    assert {x["check"] for x in lines if x["status"] != "pass"} <= ONLY_ON_A_GPU
    assert all(set(x) == {"check", "status", "value", "bar", "seconds", "why"} for x in lines)
    told = {x["check"]: sum("the state at the end" in key for key in x["bar"]) for x in lines}
    assert all(told[check] == cases for check, cases in (("C2", 3), ("C3", 1)) if check in told)


def test_the_plan_needs_no_torch() -> None:
    program_text = f"import sys; sys.modules['torch'] = None; {WITHOUT_TYRO}"
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'lab'}"}
    line = [sys.executable, "-c", program_text, "gpu-check", "--list"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert all(check.name in done.stdout for check in CHECKS)


def test_a_check_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    def hang(here: Here) -> None:
        here.tell("begun", 1.0)
        here.tell("child", subprocess.Popen(["sleep", "60"]).pid)
        os.write(1, b"now it hangs\n")
        time.sleep(60)

    line = run(tmp_path, hang, limit_s=1.5)
    assert line.status == "error" and line.value["begun"] == 1.0
    assert "killed after its 1.5 s" in line.why and "now it hangs" in line.why and "in hang" in line.why
    stat = Path(f"/proc/{line.value['child']}/stat")
    assert not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] in "ZX"


def test_a_check_beyond_its_bar_fails_with_its_values(tmp_path: Path) -> None:
    def slow(here: Here) -> None:
        here.tell("of dense", 0.5, least=0.8)
        here.tell("error", float("nan"), most=1e-5)
        here.tell("fine", 1, most=1)

    line = run(tmp_path, slow)
    assert line.status == "fail" and line.why == "of dense is 0.5, not >= 0.8; error is nan, not <= 1e-05"
    assert line.bar == {"of dense": ">= 0.8", "error": "<= 1e-05", "fine": "<= 1"}


def test_a_check_that_dies_keeps_what_it_found(tmp_path: Path) -> None:
    def die(here: Here) -> None:
        here.tell("found", [1, 2])
        with here.told.open("a") as file:
            file.write('{"name": "cut o')
        faulthandler.disable()  # its report would stand among the dots
        os.abort()

    line = run(tmp_path, die)
    assert line.status == "error" and line.value == {"found": [1, 2]} and "SIGABRT" in line.why


def test_an_error_names_its_line(tmp_path: Path) -> None:
    def wrong(here: Here) -> None:
        parity.error(torch.ones(2), torch.ones(3))

    line = run(tmp_path, wrong)
    assert line.status == "error" and "must match" in line.why and "gpu_check/parity.py:" in line.why


def test_a_wrong_kernel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = swiglu.swiglu

    def wrong(x: torch.Tensor, *, row_weights_M: torch.Tensor | None = None, impl: str = "fast") -> torch.Tensor:
        scale = 1.001 if impl == "fast" else 1.0
        return scale * right(x, row_weights_M=row_weights_M, impl=impl)  # type: ignore[arg-type]

    monkeypatch.setattr(swiglu, "swiglu", wrong)
    line = run(tmp_path, parity.check_rows)
    assert line.status == "fail" and "swiglu float32" in line.why and "rope" not in line.why


def test_what_is_unwritten_is_found() -> None:
    assert parity.error(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")


def test_the_time_of_all_bounds_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = GpuCheck(name="A9", title="long", run="parity:planned", seconds=1, limit_s=60.0)
    monkeypatch.setattr(parity, "planned", lambda here: time.sleep(60), raising=False)
    here = Here(device=torch.device("cpu"), told=Path(os.devnull))
    lines = run_all([check, check], here, out=tmp_path / "lines.json", limit_s=1.0)
    assert [x.status for x in lines] == ["error", "error"] and lines[0].seconds < 30


def test_checks_after_the_limit_are_told(tmp_path: Path) -> None:
    here = Here(device=torch.device("cpu"), told=Path(os.devnull))
    lines = run_all(CHECKS[:2], here, out=None, limit_s=-1.0)
    assert [x.status for x in lines] == ["error", "error"] and "--only A1" in lines[0].why
    assert not torch.cuda.is_initialized()


def test_a_name_of_no_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("gpu-check", ["--only", "A8"], debug=False) == 2
    said = capsys.readouterr().err
    assert "--only" in said and "'A8'" in said and "A3.loss" in said


def test_a_run_that_stands_still_is_killed_and_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    debugger = tmp_path / "debugger"
    debugger.write_text(
        "#!/bin/sh\necho 'Thread 1 (LWP 7)'; echo '#0 in commReclaim (ncclComm*)'; echo \"#1 main of $2\"; exec sleep 60\n"
    )
    debugger.chmod(0o755)
    monkeypatch.setattr(whole_runs, "DEBUGGERS", ("no-such-debugger", str(debugger)))
    monkeypatch.setattr(whole_runs, "DEBUGGER_S", 2.0)  # which it does not end in

    def stand_still() -> int:
        time.sleep(60)
        return 0

    def program() -> int:
        pid = os.fork()
        if pid == 0:
            stand_still()
        os.waitpid(pid, 0)
        return 0

    ended = whole_runs.run_bounded(program, folder=tmp_path, marks=time.monotonic_ns, still_s=20.0, limit_s=1.0)
    assert ended.code is None and ended.seconds < 15 and "in stand_still" in ended.words
    ended = whole_runs.run_bounded(program, folder=tmp_path, marks=lambda: 0, still_s=1.0)
    assert ended.code is None and ended.seconds < 30 and "in stand_still" in ended.words
    assert "#0 in commReclaim (ncclComm*)" in ended.native and "#1 main" not in ended.native
    assert all("#1 main" in path.read_text() for path in tmp_path.glob("native-*"))


def test_other_losses_and_missing_steps_are_found() -> None:
    want = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}]
    assert whole_runs.worst_difference([*want, want[0]], want) == 0
    assert whole_runs.worst_difference([want[0], {"step": 2, "loss": 4.001}], want) > 1e-5
    for got in ([], want[:1], [want[0], {"step": 2, "loss": float("nan")}]):
        assert whole_runs.worst_difference(got, want) == float("inf")


def test_another_state_at_the_end_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"master/w": torch.tensor([1.0, -4.0]), "bias": torch.zeros(3), "none": torch.zeros(0)}
    ends = {"plain": right, "gone": {}, "fewer": {**right, "master/w": torch.ones(1)}}
    ends["rounded"] = {**right, "master/w": torch.tensor([1.0, -4.0001])}
    ends["other"] = {**right, "master/w": torch.tensor([1.01, -4.0])}
    ends["lacks one"] = {"master/w": right["master/w"], "none": right["none"]}
    ends["more"] = {**right, "odd": torch.zeros(1)}
    ends["no number"] = {**right, "bias": torch.full((3,), torch.nan)}
    monkeypatch.setattr(whole_runs, "tensors_at_the_end", lambda folder: ends[folder.name])
    recipes = {name: recipe_of(tmp_path, name) for name in ends}

    def tell(here: Here) -> None:
        for name, recipe in recipes.items():
            whole_runs.tell_state(here, name, recipe, recipes["plain"])

    line = run(tmp_path, tell)
    found = {text.partition(":")[0] for text in line.why.split("; ")}
    assert found == ends.keys() - {"plain", "rounded"} and line.value["other: in"] == "master/w"


def test_a_survivor_that_does_not_go_on_is_found(tmp_path: Path) -> None:
    def member(worker: str, kind: str, at_s: float, generation: int) -> dict[str, object]:
        more = {"members": 4, "lost_s": 0.0, "told_s": 0.0, "broken_s": 0.0, "formed_s": 0.0, "doubt": False}
        return {"worker": worker, "kind": kind, "at_s": at_s, "generation": generation, **more}

    kills: healing.Kills = {"commit": (3, 2)}
    told = [member(w, "Reformed", 1.0, 1) for w in "abcd"] + [member(w, "Committed", 9.0, 2) for w in "abd"]
    told += [member(w, "Reformed", 8.5, 2) for w in "abd"]
    told += [{"worker": "c", "kind": "Killed", "at_s": 2.0, "generation": 1, "phase": "commit"}]
    told += [{"worker": "a", "kind": "TeamFormed", "time_s": 3.0, "generation": 2, "checked": 1, "noticed_s": 0.0,
              "built_s": 0.0, "moved_s": 0.0, "moved_bytes": 0}]  # fmt: skip
    line = run(tmp_path, lambda here: healing.tell_kills(here, told, kills))
    assert line.status == "pass" and line.value["commit: next step s"] == 7
    late = [r for r in told if (r["worker"], r["kind"]) != ("b", "Committed")]
    (tmp_path / "lines.json").unlink()
    line = run(tmp_path, lambda here: healing.tell_kills(here, late, kills))
    assert line.status == "fail" and line.why == "commit: survivors that went on is 2, not >= 3"


def test_a_wrong_overlapped_layer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = overlap.run_overlapped

    def wrong(*args: Any, **words: Any) -> tuple[torch.Tensor, torch.Tensor]:
        y_TH, dropped = right(*args, **words)
        return 1.001 * y_TH, dropped

    monkeypatch.setattr(overlap, "run_overlapped", wrong)
    line = run(tmp_path, streams.check_tiles)
    assert line.status == "error" and "against the serial layer" in line.why
