"""What happens to jobs: a run under a real SLURM of emulated nodes, hurt once, and held against an undisturbed run.

    down      a node is set DOWN by an administrator
    lose      kill -9 of everything on a node: slurmd, slurmstepd, ranks
    ranks     kill -9 of a node's rank alone
    requeue   scontrol requeue of the job
    grow      a second job brings a node
    preempt   a job in a partition that comes first takes all nodes, and gives them back

The scripts are those that `phalanx launch slurm` writes: in the elastic way the others go on, in the fixed way the job is queued again. The seed decides when it happens and to which node.
Run it: `python -m phalanx_lab.bench.slurm`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.core.arguments import WordParser
from phalanx.core.errors import RunError, TestbedError
from phalanx.observe.event_log import read_events
from phalanx_lab.bench.cluster import write_text
from phalanx_lab.bench.storm.ledger import CalmStep, calm_steps, judge, read_ledger
from phalanx_lab.testbed.slurm import SlurmCluster, free_ports

EVENTS = ("down", "lose", "ranks", "requeue", "grow", "preempt")
SURVIVED = ("down", "lose", "ranks", "grow")
"""Events in which the job goes on, in the elastic way."""
TOLD = ("requeue", "preempt")
"""Events of which the ranks are told before: they save the step under way."""
SCRIPTS = {"elastic": "slurm.sh", "fixed": "slurm-torchrun.sh"}
CASES = tuple((way, event) for way in SCRIPTS for event in EVENTS if (way, event) != ("fixed", "grow"))
INTERVAL = 50
"""Steps between checkpoints."""
STEPS, LONG = 120, 400
"""Steps of a run, and of one in which another job has to start meanwhile. What step n is does not depend on them."""
NODES = 3
WAIT_S, LOOK_S = 180.0, 0.1
BATCH_OF_A_LIFE = 100_000
_STEP = re.compile(rb'"kind":"StepEnded","time_s":[0-9.]+,"step":([0-9]+)')
Record = dict[str, Any]


@dataclass(kw_only=True)
class JobOutcome:
    """One event."""

    way: str
    event: str
    seed: int
    at_step: int = 0
    """Newest step when it happened."""
    next_step_s: float = 0.0
    """Seconds from then until the next step of another generation was committed (`grow`: from its last step before)."""
    again_steps: int = 0
    """Steps that were trained once more, after a checkpoint."""
    lost_samples: int = 0
    doubled_samples: int = 0
    job_ended: str = ""
    """In SLURM's words."""
    ended_s: float = 0.0
    """Seconds from the run's last step until the job was over."""
    problems: list[str] = field(default_factory=list)


def settings() -> list[str]:
    """A run of seconds: byte tokens, a tiny model, steps of about 0.1 s. In mode exact, so that every loss and norm has to be that of the undisturbed run: in mode
    fast two undisturbed runs, of one rank and of two, differ by 2e-3 within 400 steps, since a rounding sends one token to another expert (step 31)."""
    own = {
        "data.sources": '["text"]', "data.builtin_bytes": "none", "data.cache": "cache", "data.validation_fraction": 0.2, "train.steps": LONG, "train.seq_len": 32,
        "train.global_batch": 6, "train.micro_batch": 1, "train.eval_interval": 0, "train.eval_batches": 1, "optim.lr": 3e-4,
        "optim.schedule": "constant", "optim.warmup_steps": 10, "checkpoint.interval": INTERVAL, "folding.ep": 1, "observe.tensorboard": "false", "launch.threads": 1, "resilience.mode": "exact",
    }  # fmt: skip
    return [word for name, value in own.items() for word in (f"--{name}", str(value))]


def environment() -> dict[str, str]:
    """For programs in another folder than this one."""
    path = os.pathsep.join(str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p)
    return {"PYTHONPATH": path}


def prepare(folder: Path, *, nodes: int = NODES) -> None:
    """Text and the script of each way, in `folder`."""
    write_text(folder / "text")
    for way in SCRIPTS:
        words = ("--nodes", str(nodes), "--gpus-per-node", "0", "--launch.ranks", "1", f"--{way}")
        phalanx(folder, "launch", "slurm", "recipes/tiny.toml", *words, *settings())


def phalanx(folder: Path, *words: str) -> None:
    """Runs `phalanx WORDS...` in a folder. Raises `RunError` where it fails."""
    command = [sys.executable, "-m", "phalanx", *words]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment()}, capture_output=True, text=True)
    if done.returncode:
        raise RunError(f"{' '.join(words[:3])} failed: {done.stderr[-2000:]}")


def calm(folder: Path) -> dict[int, CalmStep]:
    """The undisturbed run, on this machine."""
    words = ["--run.name", "calm", "--launch.ranks", "1", "--observe.console", "none"]
    phalanx(folder, "train", "recipes/tiny.toml", *settings(), *words)
    return calm_steps([[*read_events(path)] for path in (folder / "runs/calm/events").glob("rank-*.jsonl")])


class SlurmJob:
    """A job of the run in a folder."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *, way: str, nodes: int, steps: int) -> None:
        self.cluster, self.folder, self.way = cluster, folder, way
        self.words = (SCRIPTS[way], "recipes/tiny.toml", "--train.steps", str(steps))
        self.environ = {**environment(), "HOME": str(folder), "RANKS_MINIMUM": "1", "PORT": str(free_ports(1)[0])}
        self.number = cluster.submit(f"--nodes={nodes}", "--exclusive", *self.words, more=self.environ, cwd=folder)

    def join(self) -> int:
        """A second job, with one more node."""
        more = {**self.environ, "JOIN": str(self.number)}
        return self.cluster.submit("--nodes=1", "--exclusive", *self.words, more=more, cwd=self.folder)

    def logs(self) -> list[list[Record]]:
        """Events of each rank so far."""
        return [[*read_events(path)] for path in sorted((self.folder / "runs/tiny/events").glob("rank-*.jsonl"))]

    def step(self) -> int:
        """The newest step that any rank told of: from the ends of the logs, for this is asked often."""
        newest = 0
        for path in (self.folder / "runs/tiny/events").glob("rank-*.jsonl"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 8000))
                newest = max([newest, *(int(n) for n in _STEP.findall(file.read()))])
        return newest

    def rank_on(self, node: str) -> int:
        """Process id of the rank on a node."""
        if self.way == "fixed":
            lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.cluster.processes_on(node)}
            return min(p for p, line in lines.items() if b"phalanx\0train" in line and b"torch.distributed" not in line)
        host = self.folder / f"runs/tiny/events/host-{node}.jsonl"
        return int([e for e in read_events(host) if e["kind"] == "MemberStarted"][-1]["pid"])

    def wait_for(self, step: int) -> None:
        """Raises `RunError` with what the job printed where that step does not come, or the job is over before."""
        end_s = time.monotonic() + WAIT_S
        while self.step() < step:
            if self.ended() or time.monotonic() > end_s:
                state = self.cluster.job_state(self.number)
                raise RunError(f"step {step} did not come; the job is {state}\n{self.said()}")
            time.sleep(LOOK_S)

    def said(self) -> str:
        """What the job printed."""
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in self.folder.glob("*.log"))

    def ended(self) -> bool:
        return self.cluster.is_over(self.number)


def hurt(job: SlurmJob, event: str, node: str) -> int | None:
    """Do it; the number of another job that it took."""
    cluster = job.cluster
    if event == "down":
        cluster.set_down(node)
    elif event == "lose":
        cluster.lose(node)
    elif event == "ranks":
        os.kill(job.rank_on(node), signal.SIGKILL)
    elif event == "requeue":
        cluster.call("scontrol", "requeue", str(job.number))
    elif event == "grow":
        return job.join()
    elif event == "preempt":
        first = job.folder / "first.sh"
        first.write_text("#!/bin/bash\nsleep 3\n")
        return cluster.submit(
            f"--nodes={len(cluster.nodes)}",
            "--partition=first",
            "--exclusive",
            "--output=/dev/null",
            str(first),
            cwd=job.folder,
        )
    return None


def run_event(
    cluster: SlurmCluster, folder: Path, *, way: str, event: str, seed: int, right: dict[int, CalmStep]
) -> JobOutcome:
    """A run from its beginning to its end, hurt once. Ends its jobs."""
    draw = random.Random(seed)
    spare = event == "grow" or way == "fixed"  # a node that joins, or takes the place of one that was lost
    nodes = NODES - 1 if spare else NODES
    steps = LONG if event == "grow" else STEPS
    job = SlurmJob(cluster, folder, way=way, nodes=nodes, steps=steps)
    other: int | None = None
    try:
        job.wait_for(draw.randrange(5, 20) if event == "grow" else draw.randrange(10, 50))
        node = draw.choice(cluster.nodes_of(job.number)[1:])  # the first one has the batch script
        outcome, at_s = JobOutcome(way=way, event=event, seed=seed, at_step=job.step()), time.time()
        other = hurt(job, event, node)
        job.wait_for(steps)
        last_s = time.time()
        cluster.wait(job.ended, "the end of the job", limit_s=WAIT_S)
        outcome.ended_s, outcome.job_ended = time.time() - last_s, cluster.job_state(job.number)
    finally:
        for number in (job.number, other):
            if number is not None:
                with contextlib.suppress(TestbedError):  # it is over
                    cluster.call("scancel", str(number))
        for name in cluster.nodes:
            cluster.set_up(name)
        cluster.wait(lambda: all(cluster.state_of(n) == "IDLE" for n in cluster.nodes), "idle nodes")
    logs = job.logs()
    outcome.next_step_s = next_step_s(
        logs, at_s, formed="TeamFormed" if way == "elastic" else "RunStarted", joins=event == "grow"
    )
    verdict = judge(read_ledger(members_of(logs)), right, steps=steps, tolerance=0.0)
    outcome.lost_samples, outcome.doubled_samples = verdict.lost_samples, verdict.doubled_samples
    outcome.again_steps = sum(back.steps for back in verdict.rollbacks)
    most = 0 if way == "elastic" or event in TOLD else INTERVAL
    outcome.problems = [*verdict.problems, *(f"training went back: {b}" for b in verdict.rollbacks if b.steps > most)]
    return outcome


def members_of(logs: Sequence[Sequence[Record]]) -> list[list[Record]]:
    """Logs as the ledger reads them: of each process its own, with the generations of a later life of the service above those of the earlier ones. In the fixed way each start is a generation.

    One that the others went on without before it took part (it was silent for `resilience.limit_s`, as on a machine that has more to do) tells nothing but its end. Raises `RunError` for a step of such a one.
    """
    lives = sorted((e["time_s"], e["life"]) for log in logs for e in log if e["kind"] == "TeamFormed")
    order = list(dict.fromkeys(life for _, life in lives))
    found: list[list[Record]] = []
    for rank, log in enumerate(logs):
        starts = 0
        for event in log:
            if event["kind"] == "RunStarted":
                found.append([])
                starts += 1
                if not lives:
                    formed = {"uid": f"r{rank}.{starts}", "generation": starts, "members": event["world"]}
                    found[-1] += [{**event, "kind": "WentBack"}, {**event, "kind": "Reformed", **formed}]
            elif event["kind"] == "TeamFormed":
                number = BATCH_OF_A_LIFE * order.index(event["life"]) + event["generation"]
                found[-1].append({**event, "kind": "Reformed", "uid": f"r{rank}.{len(found)}", "generation": number})
            elif starts:
                found[-1].append(event)
            elif event["kind"] == "StepEnded":
                raise RunError(f"rank {rank} told of step {event['step']} before it took part")
    return found


def next_step_s(logs: Sequence[Sequence[Record]], at_s: float, *, formed: str, joins: bool) -> float:
    """Seconds to the first step of the next generation, which begins with an event `formed`: from `at_s`, or (`joins`) from the last step before that generation."""
    first = min((e["time_s"] for log in logs for e in log if e["kind"] == formed and e["time_s"] > at_s), default=None)
    steps = [e["time_s"] for log in logs for e in log if e["kind"] == "StepEnded"]
    after = [s for s in steps if first is not None and s > first]
    if first is None or not after:
        raise RunError("no generation came after the event")
    return min(after) - (max(s for s in steps if s < first) if joins else at_s)


def main() -> int:
    """Every event with every seed; prints a line for each, and all of them as JSON."""
    parser = WordParser(
        prog="python -m phalanx_lab.bench.slurm", description="Jobs that are hurt under a SLURM of emulated nodes."
    )
    parser.add_argument("--events", nargs="+", choices=EVENTS, default=EVENTS)
    parser.add_argument("--ways", nargs="+", choices=tuple(SCRIPTS), default=tuple(SCRIPTS))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    found = []
    with SlurmCluster(nodes=NODES, cpus=2) as cluster, tempfile.TemporaryDirectory() as name:
        base = Path(name)
        prepare(base)
        right = calm(base)
        for seed, (way, event) in itertools.product(range(args.seeds), CASES):
            if way not in args.ways or event not in args.events:
                continue
            folder = base / f"{way}-{event}-{seed}"
            folder.mkdir()
            for shared in ("text", "cache", SCRIPTS[way]):
                (folder / shared).symlink_to(base / shared)
            found.append(run_event(cluster, folder, way=way, event=event, seed=seed, right=right))
            print(found[-1], flush=True)
    print(json.dumps([asdict(one) for one in found], indent=1))
    return int(any(one.problems for one in found))


if __name__ == "__main__":
    sys.exit(main())
