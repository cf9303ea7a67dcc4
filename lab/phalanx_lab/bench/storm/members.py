"""A storm over members that train a toy: `phalanx bench storm-members --faults 20 --seed 0 --json F`.

Workers on emulated hosts (processes of this machine) run steps with a few collectives; faults come one after another, each at a random phase of a random
worker: kill -9 of one, of two at once, of a host, of the membership service; freeze and thaw; a notice to leave. Then

    all steps are committed, each by every member in order and in one generation, and all end with the bits of an undisturbed run
    nobody hangs, and no process is left

It asks about membership, forming and votes alone; what a model adds is asked elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from phalanx.core.arguments import read_words
from phalanx.core.events import Emit
from phalanx.core.files import check_writable, write_json
from phalanx.runtime.membership.keys import Service
from phalanx.runtime.membership.member import run_member
from phalanx.runtime.membership.supervisor import SupervisorSettings
from phalanx.runtime.membership.watcher import AgentSettings
from phalanx.runtime.membership.worker_agent import WorkerAgent
from phalanx_lab.bench.storm.chaos_cluster import KINDS, ChaosCluster, read_events, users_of
from phalanx_lab.bench.storm.check import median, problems_of, recoveries
from phalanx_lab.bench.storm.toy import PHASES, ToyBoard, ToyBody, checksum, state_after

TIMEOUT_S = 60.0
"""Timeout of collectives. Nothing may ever wait for it."""


@dataclass(frozen=True, kw_only=True)
class ToyStormArgs:
    """A storm of faults over members that train a toy."""

    faults: int = 20
    """How many."""
    hosts: int = 2
    slots: int = 2
    """Workers of a host."""
    seed: int = 0
    kinds: tuple[str, ...] = KINDS
    """Kinds of faults, in turn."""
    pause_s: float = 0.02
    """About how long a step takes."""
    between_s: float = 0.8
    """Time between faults, about."""
    limit_s: float = 1.0
    """Limit of heartbeats in seconds."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """File for the result."""


@dataclass(kw_only=True)
class ToyStormResult:
    faults: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    committed_steps: int = 0
    seconds: float = 0.0
    hung: int = 0
    orphans: int = 0
    bitwise_equal: bool = False
    failures: list[str] = field(default_factory=list)
    median_recovery_s: float | None = None
    max_recovery_s: float | None = None
    recoveries: list[dict[str, Any]] = field(default_factory=list)


def main(args: list[str]) -> int:
    """Run `phalanx bench storm-members ARGS...`; exit status 0 if everything held."""
    options = read_words(ToyStormArgs, args, prog="phalanx bench storm-members", description=__doc__)
    check_writable(options.json)
    with tempfile.TemporaryDirectory(prefix="phalanx-storm-") as folder:
        result = storm(options, Path(folder), tell=print)
    print(report(result))
    write_json(options.json, asdict(result))
    return 1 if result.failures else 0


def worker(board: ToyBoard, *, pause_s: float, folder: Path, stop: Path) -> Any:
    """What each worker of a storm runs: until the file `stop` says after how many steps the run ends."""

    def main(agent: WorkerAgent, place: int, tell: Emit) -> int:
        body = StormBody(board=board, place=place, pid=os.getpid(), pause_s=pause_s, stop=stop)
        agent.announce(plan_hash="toy", version="1")
        why = run_member(agent, body, tell=tell)
        if why == "finished" and body.holds:
            (folder / f"end-{agent.uid}").write_text(f"{body.step} {checksum(body.state.numpy())}")
        return 0

    return main


class StormBody(ToyBody):
    """The toy without a fixed number of steps: the storm writes into a file when it is over, well before that step comes."""

    def __init__(self, *, stop: Path, **rest: Any) -> None:
        super().__init__(steps=10**9, **rest)
        self._stop = stop

    def finished(self) -> bool:
        with contextlib.suppress(FileNotFoundError, ValueError):
            self.steps = int(self._stop.read_text())
        return super().finished()


def storm(
    options: ToyStormArgs,
    folder: Path,
    *,
    service: Service | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> ToyStormResult:
    """The whole experiment; events and ends are left in `folder`."""
    board = ToyBoard(options.hosts * options.slots)
    stop = folder / "stop"
    wanted = options.hosts * options.slots

    def settings(host: str) -> SupervisorSettings:
        return SupervisorSettings(
            host=host,
            slots=options.slots,
            wanted=wanted,
            limit_s=options.limit_s,
            gather_s=options.limit_s,
            zombie_s=10.0,
            respawns=10**6,
            agent=AgentSettings(heartbeat_s=0.1, timeout_s=TIMEOUT_S, meet_s=5.0, vote_s=TIMEOUT_S, service_s=30.0),
        )

    cluster = ChaosCluster(
        worker(board, pause_s=options.pause_s, folder=folder, stop=stop),
        settings,
        hosts=options.hosts,
        slots=options.slots,
        folder=folder,
        board=board,
        service=service,
    )
    begin_s = time.monotonic()
    result = ToyStormResult()
    with cluster:
        _rage(cluster, options, result, tell)
        steps = cluster.step() + 40
        temporary = folder / "stop.new"
        temporary.write_text(str(steps))
        temporary.rename(stop)
        result.hung = cluster.wait_for_end(30.0)
    result.seconds = time.monotonic() - begin_s
    _judge(result, cluster, folder, steps)
    return result


def _rage(cluster: ChaosCluster, options: ToyStormArgs, result: ToyStormResult, tell: Callable[[str], None]) -> None:
    rng = random.Random(options.seed)
    if not cluster.until(lambda: cluster.step() >= 3, 30.0):
        result.failures.append("the run did not begin")
        return
    for number in range(options.faults):
        kind = options.kinds[number % len(options.kinds)]
        before = cluster.step()
        back_s = options.limit_s + 0.7 if kind == "freeze" else 0.3
        fault = cluster.hurt(kind, rng, phase=rng.choice(PHASES[2:-1]), back_s=back_s)
        if fault is None:
            result.failures.append(f"fault {number} ({kind}) found nobody")
        else:
            tell(f"fault {number}: {kind} {', '.join(fault.victims)} in {fault.phase}, step {fault.step}")
        if not cluster.until(partial(_settled, cluster, before + 3), 30.0):
            result.failures.append(f"fault {number} ({kind}): no step within 30 s after it")
            return
        cluster.rest(options.between_s * rng.uniform(0.5, 1.5))


def _settled(cluster: ChaosCluster, step: int) -> bool:
    return cluster.calm() and cluster.step() >= step


def _judge(result: ToyStormResult, cluster: ChaosCluster, folder: Path, steps: int) -> None:
    events = read_events(folder)
    result.faults = len(cluster.faults)
    for fault in cluster.faults:
        result.by_kind[fault.kind] = result.by_kind.get(fault.kind, 0) + 1
    result.committed_steps = len({e["step"] for e in events if e["kind"] == "Committed"})
    result.failures += problems_of(events, steps=steps)
    result.failures += [f"{p.name}: {p.read_text()}" for p in sorted(folder.glob("error-*"))]
    result.failures += [f"host {h} ended with exit code {c}" for h, c in cluster.codes.items() if c]
    right = f"{steps} {checksum(state_after(steps))}"
    ends = {p.name: p.read_text() for p in folder.glob("end-*")}
    result.bitwise_equal = bool(ends) and all(text == right for text in ends.values())
    if not result.bitwise_equal:
        result.failures.append(f"members end with {sorted(ends.items())}, an undisturbed run with {right}")
    if result.hung:
        result.failures.append(f"{result.hung} hosts did not end")
    time.sleep(0.05)
    left = users_of(folder)
    result.orphans = len(left)
    if left:
        result.failures.append(f"processes {left} are left")
    found = recoveries(cluster.faults, events)
    result.recoveries = [asdict(r) for r in found]
    times = [r.resumed_s for r in found if r.kind in ("kill", "two", "host")]
    result.median_recovery_s = median(times)
    result.max_recovery_s = max((t for t in times if t is not None), default=None)


def report(result: ToyStormResult) -> str:
    """A few lines for a person."""
    lines = [
        f"{result.faults} faults ({', '.join(f'{k} {n}' for k, n in sorted(result.by_kind.items()))}), "
        f"{result.committed_steps} steps, {result.seconds:.0f} s; hung {result.hung}, orphans {result.orphans}, "
        f"bitwise equal {'yes' if result.bitwise_equal else 'NO'}"
    ]
    for kind in sorted(result.by_kind):
        own = [r for r in result.recoveries if r["kind"] == kind]
        cells = [
            f"{name[:-2]} {_ms(median([r[name] for r in own]))}"
            for name in ("detected_s", "broken_s", "reformed_s", "resumed_s")
        ]
        lines.append(f"  {kind:<8} median after the fault: {', '.join(cells)}")
    return "\n".join([*lines, *(f"FAILED: {f}" for f in result.failures)])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.0f} ms"
