"""`phalanx plan`: exit codes, JSON keys, messages; and no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main
from phalanx.core.units import format_bytes, format_count, format_rate, format_seconds

pytestmark = pytest.mark.unit
KEYS = {"legal", "problems", "pp_groups_equal", "num_groups", "seconds"}


def test_legal_folding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "f.json"
    args = "plan folding --world 16 --tp 2 --cp 2 --pp 2 --ep 8 --etp 1 --preset mixtral-8x7b --seq 4096 --json"
    assert main([*args.split(), str(file)]) == 0
    result = json.loads(file.read_text())
    assert result.keys() >= KEYS
    assert (result["legal"], result["problems"], result["pp_groups_equal"]) == (True, [], True)
    assert result["num_groups"] == 43 and result["folding"]["edp"] == 1
    assert "attention  tp 2 x cp 2 x dp 2 x pp 2" in capsys.readouterr().out


def test_1024_ranks_in_well_under_a_second(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    args = "plan folding --world 1024 --tp 4 --cp 2 --pp 8 --ep 8 --etp 2 --json"
    assert main([*args.split(), str(file)]) == 0
    assert (
        json.loads(file.read_text())["seconds"] < 10
    )  # 5 ms; a plan that goes through all pairs of ranks takes minutes


def test_illegal_folding_exits_2_and_still_writes_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.json"
    args = "plan folding --world 16 --tp 3 --ep 9 --preset tiny --seq 30 --json"
    assert main([*args.split(), str(file)]) == 2
    result = json.loads(file.read_text())
    assert result.keys() >= KEYS and result["legal"] is False and result["pp_groups_equal"] is False
    assert len(result["problems"]) == 6
    shown = capsys.readouterr().err
    assert all(problem in shown for problem in result["problems"])
    assert "nearest legal mapping: --world 16 --tp 2 --cp 1 --pp 1 --ep 8 --etp 1" in shown


@pytest.mark.parametrize("degree", [0, -2])
def test_degrees_below_one(tmp_path: Path, degree: int) -> None:
    file = tmp_path / "f.json"
    assert main(["plan", "folding", "--world", "8", "--pp", str(degree), "--json", str(file)]) == 2
    assert json.loads(file.read_text())["problems"] == [f"folding.pp = {degree}: must be at least 1; use 1"]


def test_a_mapping_that_tiles_but_does_not_fit_the_model_shows_its_groups(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    assert main(["plan", "folding", "--world", "16", "--ep", "16", "--preset", "tiny", "--json", str(file)]) == 2
    result = json.loads(file.read_text())
    assert result["pp_groups_equal"] is True and result["num_groups"] == 1
    assert "num_experts = 8" in result["problems"][0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("folding --world 8 --seq 5", "--seq = 5: has no effect without --preset"),
        ("folding --world 8 --cp 2 --cp-method ulysses", "--cp-method = 'ulysses': has no effect without --preset"),
        ("folding --world 8 --cp 8 --cp-method ulysses --preset tiny", "must divide 4, the query heads of a tp rank"),
        ("folding --world 8 --preset tinny", "did you mean 'tiny'?"),
        ("folding", "--world: must say how many ranks"),
        ("folding --stages tp1 tp3 --tp 2", "--tp = 2: has no effect with --stages"),
        ("folding --stages tp1 xp3", "--stages[1] = 'xp3': is made of degrees"),
        ("folding --stages tp1 tp3 --preset tiny --seq 64", "must divide num_heads"),
        ("folding --stages tp1 tp2 --world 4 --preset tiny --seq 64", "has 3 ranks in all (1 + 2), and the run has 4"),
        ("model mixtral-8x7", "did you mean 'mixtral-8x7b'"),
        ("folding --world 8 --json /proc/none/f.json", "cannot write /proc/none/f.json"),
    ],
)
def test_wrong_arguments(args: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *args.split()]) == 2
    assert message in capsys.readouterr().err


def test_stages_with_foldings_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "f.json"
    args = ["--stages", "tp1", "tp2", "tp4", "tp2", "--preset", "tiny", "--seq", "64", "--json", str(file)]
    assert main(["plan", "folding", *args]) == 0
    result = json.loads(file.read_text())
    assert result["legal"] and result["folding"]["world"] == 9 and result["groups"]["tp"] == 4
    assert "stage 2 on ranks 3-6: attention tp 4" in capsys.readouterr().out


def test_plan_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "m.json"
    assert main(["plan", "model", "mixtral-8x22b", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert sum(result["parts"].values()) == result["num_params"]
    assert set(result["parts"]) == {"embedding", "attention", "norms", "router", "experts", "head"}
    shown = capsys.readouterr().out
    assert "140,6" in shown and "242 GFLOP (causal half), 251 GFLOP (full scores)" in shown


def test_planning_imports_no_torch() -> None:
    code = (
        "import sys; from phalanx.cli.main import main; main(['plan', 'folding', '--world', '8', '--ep', '4']);"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_units() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1024, 1536, 2**20 - 1, 10 * 2**20, 150 * 2**30)] == [
        "0 B", "1023 B", "1.00 KiB", "1.50 KiB", "1.00 MiB", "10.0 MiB", "150 GiB",
    ]  # fmt: skip
    assert [format_count(n) for n in (0, 999, 1000, 999_950, 46_702_792_704, 6.7e11)] == [
        "0", "999", "1.00K", "1.00M", "46.7B", "670B",
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0, 5e-7, 1e-3, 0.9999, 59.9, 59.96, 3599.9, 3725, 1e6, float("inf"))] == [
        "0 s", "500 ns", "1.00 ms", "1.00 s", "59.9 s", "1 min 00 s", "1 h 00 min", "1 h 02 min", "11 d 13 h", "unknown",
    ]  # fmt: skip
    assert format_rate(2.2e12, "FLOP") == "2.20 TFLOP/s" and format_rate(12345, "tokens") == "12.3 ktokens/s"
