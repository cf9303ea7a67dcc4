"""A run under a real SLURM of emulated nodes: what its page promises is executed, and each event of a job's life costs no sample and little time."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from phalanx.core.errors import RunError
from phalanx.observe.event_log import read_events
from phalanx_lab.bench import slurm
from phalanx_lab.bench.storm.ledger import CalmStep, judge, read_ledger
from phalanx_lab.testbed.owner import processes_of
from phalanx_lab.testbed.slurm import PACKAGES, SlurmCluster, free_ports, missing_programs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/how-to/run-on-slurm.md"
NEXT_S = 2.0
SLOWER = 5.0
"""A test beside others has a part of the machine: the bar of 2 s is that of `python -m phalanx_lab.bench.slurm`."""

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(bool(missing_programs()), reason=f"SLURM is not installed here: {PACKAGES}"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster(nodes=slurm.NODES, cpus=2) as found:
        yield found
    assert processes_of(found.owner) == [] and not found.folder.exists()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script and the text of `slurm.settings`."""
    folder = tmp_path_factory.mktemp("slurm")
    slurm.prepare(folder)
    return folder


@pytest.fixture(scope="module")
def right(prepared: Path) -> dict[int, CalmStep]:
    return slurm.calm(prepared)


def commands_of_page() -> list[str]:
    """The commands that the page gives for a run on two nodes, the first one of a clone."""
    found = re.search(r"```sh [^\n]*three commands[^\n]*\n(.*?)```", PAGE.read_text(), re.S)
    assert found is not None
    return found[1].strip().splitlines()


@pytest.mark.core
def test_three_commands_of_the_page_survive_a_node_that_goes_down(cluster: SlurmCluster, tmp_path: Path) -> None:
    first, *commands = commands_of_page()
    assert first == "make env" and len(commands) == 2
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "phalanx").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m phalanx "$@"\n')
    (programs / "phalanx").chmod(0o755)
    environ = {**cluster.environ, **slurm.environment(), "HOME": str(tmp_path), "PORT": str(free_ports(1)[0])}
    environ["PATH"] = f"{programs}:{environ['PATH']}"
    said = ""
    for command in commands:
        words = command.replace(".venv/bin/phalanx", "phalanx").partition("  #")[0]
        done = subprocess.run(words, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said += done.stdout
    number = int(re.findall(r"Submitted batch job (\d+)", said)[0])
    events = tmp_path / "runs/tiny/events"

    def steps() -> list[tuple[float, int]]:
        return [
            (e["time_s"], e["step"])
            for p in events.glob("rank-*.jsonl")
            for e in read_events(p)
            if e["kind"] == "StepEnded"
        ]

    def teams() -> list[tuple[float, int]]:
        """When each team formed, and of how many members."""
        return sorted(
            (e["time_s"], e["members"])
            for p in events.glob("rank-*.jsonl")
            for e in read_events(p)
            if e["kind"] == "TeamFormed"
        )

    def rows() -> list[int]:
        """Steps of the rows that the job's log shows."""
        return [int(n) for n in re.findall(r"^ +(\d+) +\d+\.\d+ ", (tmp_path / f"tiny-{number}.log").read_text(), re.M)]

    try:
        cluster.wait(lambda: [m for _, m in teams()][-1:] == [2], "a team of both nodes", limit_s=120.0)
        newest = max((s for _, s in steps()), default=0)
        cluster.wait(lambda: max((s for _, s in steps()), default=0) >= newest + 3, "steps of both", limit_s=60.0)
        node, at_s = cluster.nodes_of(number)[1], time.time()
        cluster.set_down(node)
        cluster.wait(lambda: teams()[-1][0] > at_s, "the survivors' team", limit_s=60.0)
        newest = max(s for _, s in steps())
        cluster.wait(lambda: max(s for _, s in steps()) >= newest + 3, "steps of the others", limit_s=60.0)
        assert teams()[-1][1] == 1
        cluster.wait(
            lambda: max(rows(), default=0) > newest, "rows in the log of the job, whichever node drew", limit_s=60.0
        )
        assert cluster.job_state(number) == "RUNNING"
    finally:
        cluster.call("scancel", str(number))
        cluster.wait(lambda: cluster.is_over(number), "the end of the job")
        cluster.set_up(node)
    kept = sorted(p.name for p in (tmp_path / "runs/tiny/checkpoints").glob("step-*"))
    assert kept and int(kept[-1].removeprefix("step-")) == max(s for _, s in steps()), "scancel saves the last step"


@pytest.mark.slow
@pytest.mark.parametrize(("way", "event"), slurm.CASES)
def test_no_event_costs_a_sample(
    cluster: SlurmCluster, prepared: Path, right: dict[int, CalmStep], tmp_path: Path, way: str, event: str
) -> None:
    for shared in ("text", "cache", slurm.SCRIPTS[way]):
        os.symlink(prepared / shared, tmp_path / shared)
    seed = slurm.EVENTS.index(event) + time.localtime().tm_yday
    found = slurm.run_event(cluster, tmp_path, way=way, event=event, seed=seed, right=right)
    assert found.problems == [] and (found.lost_samples, found.doubled_samples) == (0, 0), found
    assert found.job_ended == "COMPLETED", found
    if way == "elastic" and event in slurm.SURVIVED:
        assert found.next_step_s <= NEXT_S * SLOWER, found


def test_a_process_that_ended_before_it_took_part_is_one_of_its_own() -> None:
    formed = {
        "kind": "TeamFormed",
        "time_s": 2.0,
        "life": "a",
        "uid": "n2.0.b",
        "generation": 2,
        "members": 1,
        "step": 0,
    }
    log = [
        {"kind": "RunEnded", "time_s": 1.0, "step": 0, "reason": "StaleMember: n2.0.a was excluded"},
        {"kind": "RunStarted", "time_s": 2.0, "step": 0, "world": 1},
        formed,
        {"kind": "StepEnded", "time_s": 3.0, "step": 1, "loss": 1.0, "grad_norm": 1.0},
        {"kind": "SamplesTaken", "time_s": 3.0, "step": 1, "windows": [4]},
    ]
    found = slurm.members_of([log])
    assert [[e["kind"] for e in one] for one in found] == [["Reformed", "StepEnded", "SamplesTaken"]]
    calm = {1: CalmStep(loss=1.0, norm=1.0, windows=frozenset({4}))}
    assert judge(read_ledger(found), calm, steps=1).problems == []
    with pytest.raises(RunError, match="rank 1 told of step 1 before"):
        slurm.members_of([log, log[3:]])


def test_a_cluster_without_its_programs_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx_lab.testbed.slurm.missing_programs", lambda: ["slurmd"])
    with pytest.raises(Exception, match=r"slurmd.*apt-get install"), SlurmCluster():
        pass
