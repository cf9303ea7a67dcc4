"""How good plans are: the paper's nine cases, its strategies, random cases against the bound, scale; the command and the benchmark."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from speed_help import slowness
from tiers import times

from phalanx.cli.main import main
from phalanx.plan.layout.tensors import whole_layout
from phalanx.plan.reshard.best import find_bound
from phalanx.plan.reshard.bound import send_bound
from phalanx.plan.reshard.flows import Flow
from phalanx.plan.reshard.history import busy_times, greedy
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import Hosts, Move
from phalanx_lab.bench.reshard.cases import large_state, nine_cases
from phalanx_lab.bench.reshard.plan import measure_nine, measure_random, worst_with_tile_weights

pytestmark = pytest.mark.unit

NAIVE = (1, 2, 1.5, 1.875, 2, 2, 1, 1, 1.5)
SIZE_BALANCED = (1, 1, 1.5, 1.875, 1.5, 2, 1, 1, 1.5)


def test_the_papers_nine_cases(capsys: pytest.CaptureFixture[str]) -> None:
    rows = measure_nine()["rows"]
    assert max(row["rho"] for row in rows) <= 1.005
    assert max(row["cpu_s"] for row in rows) <= 0.005 * max(1.0, slowness())
    assert [row["naive"] for row in rows] == pytest.approx(NAIVE)
    assert [row["size_balanced"] for row in rows] == pytest.approx(SIZE_BALANCED)
    assert [row["greedy"] for row in rows] == pytest.approx([1] * 9)
    assert [row["greedy_tile_weights"] for row in rows] == pytest.approx([1, 1, 1, 1, 1, 4 / 3, 1, 1, 1])
    assert [row["send_recv_best_order"] for row in rows] == pytest.approx([4, 4, 4, 1, 4, 4, 8, 8, 4])
    assert "tile weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("hosts", "ranks", "send_recv", "local", "whole"),
    [(1, 1, 1, 1, 1), (1, 3, 3, 1, 1), (1, 4, 4, 1, 1), (2, 2, 4, 2, 1.5), (3, 2, 6, 3, 5 / 3), (4, 2, 8, 4, 1.75)],
)
def test_one_device_to_many(hosts: int, ranks: int, send_recv: float, local: float, whole: float) -> None:
    """The paper's single-task cases, in units of the time in which the slice leaves the sender once."""
    world = 1 + hosts * ranks
    where = Hosts(
        host_of_rank=(0, *(1 + i // ranks for i in range(hosts * ranks))),
        send_bytes_per_s=(1.0,) * (1 + hosts),
        recv_bytes_per_s=(1.0,) * (1 + hosts),
    )
    shape = (24 * 1024,)
    move = Move(name="x", itemsize=1, src=whole_layout(shape, [0]), dst=whole_layout(shape, range(1, world)))
    times = {"send_recv": send_recv, "local_all_gather": local, "global_all_gather": whole, "naive": 1, "best": 1}
    for method, expected in times.items():
        plan = plan_reshard([move], where, method=method)
        assert plan.rho == pytest.approx(expected), method
        plan.check()


def test_plans_of_the_nine_cases_pass_the_check() -> None:
    for case in nine_cases(rate=1e9):
        plan_reshard(case.moves, case.hosts).check()


@pytest.mark.parametrize("unequal", [False, True])
def test_random_cases_are_near_the_bound(unequal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    result = measure_random(20261121, times(60, 30), unequal_links=unequal)
    assert result["min_rho"] >= 1 - 1e-9
    if unequal:
        assert result["mean_rho"] <= 1.01 and result["p95_rho"] <= 1.02
    else:
        assert result["mean_rho"] <= 1.002 and result["max_rho"] <= 1.05
    assert result["greedy_mean_rho"] > result["mean_rho"] + 0.02, "the cases tell planners apart"
    assert "makespan over the bound" in capsys.readouterr().out


SCALE = """
import json, sys
from phalanx_lab.bench.reshard.plan import measure_scale
print(json.dumps(measure_scale()))
"""


def test_scale() -> None:
    """A process of its own, for the memory."""
    done = subprocess.run([sys.executable, "-c", SCALE], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    wide, state = result["wide"], result["state"]
    assert wide["unit_tasks"] == 262_144 and wide["flows"] == 4096
    slow = max(1.0, slowness())
    assert wide["cpu_s"] <= 2 * slow and wide["peak_rss_mib"] <= 300 and wide["rho"] <= 1.005
    assert state["tensors"] == 47_397 and state["rho"] <= 1.02
    assert state["cpu_s"] <= slow and state["gain_over_stage_by_stage"] >= 1.9
    assert "host 32 receives" in state["certificate"]


def test_stages_do_not_wait_for_each_other_in_the_large_state() -> None:
    case, by_stage = large_state()
    assert sum(map(len, by_stage)) == len(case.moves) == 47_397
    ranks = {move.src.ranks for move in by_stage[3]}
    assert max(map(len, ranks)) == 16 and all(48 <= rank < 64 for one in ranks for rank in one)


# ---- bounds ------------------------------------------------------------------------------------------------------------------------


def test_the_set_of_a_certificate_is_found() -> None:
    """Hosts 0 and 1 alone hold 300 bytes and are slow; host 2 could send much more than it is asked for."""
    flows = (Flow((0, 1), (3,), 300, 1), Flow((1, 2), (4,), 90, 1), Flow((2,), (3,), 10, 1))
    hosts = Hosts(host_of_rank=(0, 1, 2, 3, 4), send_bytes_per_s=(1.0, 0.5, 9, 9, 9), recv_bytes_per_s=(9.0,) * 5)
    bound, _ = find_bound(flows, hosts)
    assert (bound.kind, bound.hosts, bound.num_bytes) == ("send", (0, 1), 300)
    assert bound.seconds == pytest.approx(200)
    assert send_bound(flows, hosts, (0, 1, 2)).num_bytes == 400


def test_needers_that_send_slowly_raise_the_bound() -> None:
    """One holder and three needers that cannot pass on: it sends nearly three copies itself."""
    flows = (Flow((0,), (1, 2, 3), 900, 1),)
    rates = (1.0, 0.01, 0.01, 0.01)
    hosts = Hosts(host_of_rank=(0, 1, 2, 3), send_bytes_per_s=rates, recv_bytes_per_s=(1.0,) * 4)
    bound, _ = find_bound(flows, hosts)
    assert bound.kind == "send" and bound.hosts == (0, 1, 2, 3) and bound.num_bytes == 2700
    assert bound.seconds == pytest.approx(2700 / 1.03)


def test_weights_of_whole_tiles_mislead_the_greedy() -> None:
    case = nine_cases()[5]
    plan = plan_reshard(case.moves, case.hosts)
    assert worst_with_tile_weights(case) == pytest.approx(plan.bound.seconds * 4 / 3)


def test_the_greedy_is_the_same_for_the_same_seed() -> None:
    flows = tuple(Flow((i % 3,), (3 + i % 2,), 10 + i, 1) for i in range(9))
    hosts = Hosts(host_of_rank=tuple(range(5)), send_bytes_per_s=(1.0,) * 5, recv_bytes_per_s=(1.0,) * 5)
    assert greedy(flows, hosts, seed=3) == greedy(flows, hosts, seed=3)
    assert sorted(i for i, _ in greedy(flows, hosts)) == list(range(9))
    assert busy_times(flows, hosts, [(0, 0), (3, 0)])[1] == 10 + 13


# ---- commands ----------------------------------------------------------------------------------------------------------------------


def test_plan_reshard_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, picture = tmp_path / "new" / "p.json", tmp_path / "p.svg"
    args = [
        "plan",
        "reshard",
        "2x4 RS0R",
        "2x4 S0RR",
        "--shape",
        "64",
        "64",
        "32",
        "--json",
        str(file),
        "--svg",
        str(picture),
    ]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "bound 210 us: host 2 receives 256 KiB" in out and "1.0000 x the bound" in out
    assert "host   2 takes" in out and "checked" in out
    result = json.loads(file.read_text())
    assert result["legal"] and result["rho"] == 1.0 and result["num_hops"] == len(result["hops"]) > 0
    assert picture.read_text().startswith("<svg") and "host 3 receives" in picture.read_text()


def test_plan_reshard_names_every_problem(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.json"
    args = ["S0x", "--shape", "64", "--itemsize", "0", "--method", "gredy", "--rate", "5MB", "--slow", "1", "--json"]
    assert main(["plan", "reshard", "2x4 S2", *args, str(file)]) == 2
    problems = json.loads(file.read_text())["problems"]
    shown = capsys.readouterr().err
    assert len(problems) == 6 and all(problem in shown for problem in problems)
    assert any("did you mean 'greedy'" in p for p in problems) and any("2x4 S2" in p for p in problems)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--slow", "9=1gbit"], "must be one of 3 hosts"),
        (["--shape", "-1", "--itemsize", "0"], "2 problems with the move:\n  - --itemsize = 0"),
        (["--shape", "9" * 20], "must have at most 72,057,594,037,927,936 elements"),
        (["--staging-kib", "0"], "--staging-kib = 0: must be at least 1"),
        (["--itemsize", "5000", "--staging-kib", "1"], "holds no message"),
    ],
)
def test_plan_reshard_refuses(extra: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "reshard", "1x4 S1", "2x4 R", "--shape", "64", *extra]) == 2
    assert words in capsys.readouterr().err


def test_plan_reshard_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "reshard", "3x4 S1R", "5x4 S0R", "--shape", "1000", "100", "--slow", "1=3gbit"]) == 0
    assert "relay" in (out := capsys.readouterr().out) and "how busy a lane is" in out
    assert main(["plan", "reshard", "2x4 S01R", "2x4 S0R", "--shape", "8", "8", "--dst-first-rank", "0"]) == 0
    assert "stay inside hosts" in capsys.readouterr().out
    assert main(["plan", "reshard", "2x4 RS0", "2x4 S1R", "--shape", "64", "64", "--partial-back"]) == 0
    assert "boxes are added on" in capsys.readouterr().out
    assert main(["plan", "reshard", "1x4 R", "1x4 R", "--shape", "8", "--dst-first-rank", "0"]) == 0
    assert "nothing crosses between hosts" in capsys.readouterr().out


def test_bench_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.json"
    assert main(["bench", "reshard-plan", "--seed", "5", "--cases", "8", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result.keys() >= {"mean_rho", "p95_rho", "max_rho", "greedy_mean_rho", "geo_mean_win", "cpu_s"}
    assert main(["bench", "reshard-plan", "--seed", "5", "--cases", "2", "--unequal-links"]) == 0
    assert main(["bench", "reshard-plan", "--scale"]) == 0
    assert "faster" in capsys.readouterr().out
    assert main(["bench", "reshard-plan", "--nine", "--scale", "--cases", "0"]) == 2
    error = capsys.readouterr().err
    assert (
        "--cases = 0: must be at least 1" in error and "not together with --nine" in error and "has no effect" in error
    )
