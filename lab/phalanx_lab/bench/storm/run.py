"""A storm over the real trainer: faults one after another, each at a phase of a step; then the end of the run, and what must hold.

Each fault finds a run in full strength (all members back, some steps done) and must be followed by further steps within `HANG_S`.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.observe.event_log import read_events
from phalanx.runtime.membership.keys import ServiceLost
from phalanx.train.recovery.watch import PHASES
from phalanx_lab.bench.storm.chaos_cluster import KINDS, MORE_KINDS, STILL_KINDS, ChaosCluster, users_of
from phalanx_lab.bench.storm.check import median, put_out_though_sound, recoveries
from phalanx_lab.bench.storm.joins import joins
from phalanx_lab.bench.storm.ledger import calm_steps, judge, read_ledger
from phalanx_lab.bench.storm.trainer import STORM, StormSetup, different, digests, final_step, train_calmly

HANG_S = 30.0
"""Seconds after a fault without a step that count as a hang: half of what a collective would wait."""
LOCAL_KINDS = (*KINDS, *MORE_KINDS)
LINK_KINDS = ("cut", "slow", "part")
"""Need links: the testbed's."""
AIM_S = {"checkpoint": 6.0}
"""How long to wait for a phase that not every step has."""
ONCE_S = 1.5
"""Seconds for any other."""
IN_STEP = ("data", "forward", "all-to-all", "backward", "reduction", "vote")
"""Phases in which a worker that is still is found after `resilience.hang_s`."""
OUT = ("kill", "two", "host", "two hosts")
"""Faults whose recovery is that of kill -9."""

Tell = Callable[[str], None]


@dataclass(kw_only=True)
class StormResult:
    """What `phalanx bench storm` writes."""

    faults: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    by_phase: dict[str, int] = field(default_factory=dict)
    mode: str = "exact"
    where: str = "local"
    not_here: tuple[str, ...] = ()
    """Kinds of faults that this place cannot do."""
    committed_steps: int = 0
    lost_samples: int = 0
    doubled_samples: int = 0
    bitwise_equal: bool = False
    worst_difference: float = 0.0
    """Largest relative difference of a loss."""
    rollbacks: int = 0
    """While fewer than f hosts were out."""
    rollbacks_allowed: int = 0
    """Rollbacks that are allowed: with f or more out at once."""
    hung: int = 0
    orphans: int = 0
    zombies_refused: int = 0
    sound_put_out: list[str] = field(default_factory=list)
    """Workers that were removed although no fault was theirs."""
    hang_s: float = 0.0
    """Bound of a worker that is still, at least."""
    after_hang_s: float | None = None
    """Median from when a worker that is still was removed to the next committed step."""
    median_recovery_s: float | None = None
    """kill -9 to the next committed step."""
    max_recovery_s: float | None = None
    frozen_max_s: float | None = None
    """The same of frozen ranks; the heartbeat limit is in it."""
    service_max_s: float | None = None
    """Longest recovery of a service that was killed, from its restart, in seconds."""
    join_used_max_s: float | None = None
    """Longest time from the start of a host's program to its first committed step in seconds, joins apart during which another
    fault struck."""
    join_stopped_max_s: float | None = None
    """How long the others stood still for it, the same joins."""
    joins_struck: int = 0
    """Joins during which another fault struck."""
    moved_bytes: int = 0
    limit_s: float = 0.0
    seconds: float = 0.0
    recoveries: list[dict[str, Any]] = field(default_factory=list)
    joins: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class StormPlan:
    """What is done to a run."""

    faults: int
    seed: int = 0
    kinds: tuple[str, ...] = LOCAL_KINDS
    phases: tuple[str, ...] = PHASES[1:]
    back_s: float = 0.3
    """How long a host or the service stays away."""
    between_s: float = 0.5
    full_s: float = 60.0
    """How long all may take to be back."""


def storm(
    cluster: ChaosCluster, setup: StormSetup, plan: StormPlan, folder: Path, *, tell: Tell = lambda text: None
) -> StormResult:
    """The whole experiment; the cluster is not entered yet. Events, errors and runs are left in `folder`."""
    result = StormResult(mode=setup.mode, limit_s=setup.limit_s, hang_s=setup.hang_s)
    begin_s = time.monotonic()
    with cluster:
        _rage(cluster, setup, plan, result, tell)
        _end_run(cluster, result)
        result.hung += cluster.wait_for_end(HANG_S)
    result.seconds = time.monotonic() - begin_s
    _look_for_orphans(result, cluster, folder)
    judge_storm(result, cluster, setup, folder, tell=tell)
    return result


# ---- the faults


def _rage(cluster: ChaosCluster, setup: StormSetup, plan: StormPlan, result: StormResult, tell: Tell) -> None:
    rng = random.Random(plan.seed)
    if not cluster.until(lambda: _full(cluster) and cluster.step() >= 3, plan.full_s):
        result.failures.append("the run did not begin")
        return
    for number in range(plan.faults):
        kind, phase = plan.kinds[number % len(plan.kinds)], rng.choice(plan.phases)
        if not _one_fault(cluster, setup, plan, rng, kind, phase, result, tell):
            return
        cluster.rest(plan.between_s * rng.uniform(0.5, 1.5))


def _one_fault(
    cluster: ChaosCluster,
    setup: StormSetup,
    plan: StormPlan,
    rng: random.Random,
    kind: str,
    phase: str,
    result: StormResult,
    tell: Tell,
) -> bool:
    """Whether the run got over it."""
    place = None
    if kind in STILL_KINDS:  # elsewhere a worker may take as long as a collective
        phase, begun = rng.choice(IN_STEP), cluster.step()
        cluster.until(lambda: cluster.step() >= begun + 2, ONCE_S)
    if kind in ("two", "two hosts"):
        # what they take along may be nowhere else: then all go back to a checkpoint, and a run without one ends
        cluster.until(lambda: final_step(cluster.folder / "runs" / STORM) is not None, plan.full_s)
    if phase == "migration":  # somebody must come for it
        place = _make_joiner(cluster, plan, rng, tell)
    back_s = setup.limit_s + 0.7 if kind in ("freeze", "cut", "all silent") else plan.back_s
    before = cluster.step()
    aim_s = AIM_S.get(phase, ONCE_S) if place is None else plan.full_s
    fault = cluster.hurt(kind, rng, phase=phase, back_s=back_s, place=place, aim_s=aim_s)
    if fault is None:
        result.failures.append(f"{kind} in {phase} found nobody")
    else:
        tell(f"{len(cluster.faults)}: {kind} {', '.join(fault.victims)} in {fault.phase}, step {fault.step}")
    if not cluster.until(lambda: cluster.step() >= before + 2, HANG_S):
        result.hung += 1
        result.failures.append(f"{kind} in {phase}: no step within {HANG_S:g} s after it ({_board(cluster)})")
        return False
    if not cluster.until(lambda: cluster.calm() and _full(cluster) and cluster.step() >= before + 3, plan.full_s):
        result.failures.append(f"{kind} in {phase}: not all were back within {plan.full_s:g} s ({_board(cluster)})")
        return False
    return True


def _make_joiner(cluster: ChaosCluster, plan: StormPlan, rng: random.Random, tell: Tell) -> int | None:
    """Kill a worker so that its successor joins, and with it comes a migration; the place of a member that will take part in that, or of the joiner."""
    places = cluster.places()
    gone = rng.choice(places)
    pid, before = cluster.board.read(gone)[0], cluster.step()
    fault = cluster.hurt("kill", rng, phase="forward", place=gone, aim_s=ONCE_S)
    tell(
        f"{len(cluster.faults)}: kill {cluster.name_of(gone)}, so that another one joins" if fault else "nobody to kill"
    )
    cluster.until(lambda: cluster.board.read(gone)[0] != pid and cluster.step() >= before + 1, plan.full_s)
    return rng.choice([p for p in places if cluster.host_of(p) != cluster.host_of(gone)] or places)


def _full(cluster: ChaosCluster) -> bool:
    """Whether all places take part."""
    if len(cluster.places()) < cluster.board.places:
        return False
    steps = [cluster.board.read(place)[2] for place in range(cluster.board.places)]
    return min(steps) >= max(steps) - 1  # one that has just come has committed nothing


def _board(cluster: ChaosCluster) -> str:
    return "; ".join(f"{cluster.name_of(p)} {cluster.board.read(p)}" for p in range(cluster.board.places))


def _end_run(cluster: ChaosCluster, result: StormResult) -> None:
    """Ends the run as a person would: all members stop after the same step and write it down."""
    end_s = time.monotonic() + HANG_S
    while cluster.running() and time.monotonic() < end_s:
        with contextlib.suppress(ServiceLost):
            cluster.stop_run("the storm is over")
            return
        time.sleep(0.1)
    result.failures.append("the run could not be told to end")


# ---- what must hold


def _look_for_orphans(result: StormResult, cluster: ChaosCluster, folder: Path) -> None:
    end_s = time.monotonic() + 2.0
    while (left := [*users_of(folder), *cluster.left()]) and time.monotonic() < end_s:
        time.sleep(0.05)  # the kernel is about to end them
    result.orphans = len(left)
    if left:
        result.failures.append(f"{left} are left")


def judge_storm(
    result: StormResult, cluster: ChaosCluster, setup: StormSetup, folder: Path, *, tell: Tell = lambda text: None
) -> None:
    """Hold what all members told against an undisturbed run, which is trained here."""
    result.faults = len(cluster.faults)
    for fault in cluster.faults:
        result.by_kind[fault.kind] = result.by_kind.get(fault.kind, 0) + 1
        result.by_phase[fault.phase] = result.by_phase.get(fault.phase, 0) + 1
    result.failures += [f"{p.name}: {p.read_text()[:2000]}" for p in sorted(folder.glob("error-*"))]
    result.failures += [f"host {h} ended with exit code {c}" for h, c in cluster.codes.items() if c]
    result.failures += cluster.wrong
    result.failures += [
        f"the bit for {cluster.name_of(p)} was never spoiled"
        for p in range(cluster.board.places)
        if cluster.board.spoils(p)
    ]
    if result.hung:
        result.failures.append(f"hung: {result.hung}")
    storm_run = folder / "runs" / STORM
    steps = final_step(storm_run)
    if steps is None:
        result.failures.append("the run left no checkpoint")
        return
    tell(f"undisturbed: {steps} steps")
    calm_run = train_calmly(setup, folder, steps=steps)
    calm = calm_steps(list(read_events(p)) for p in sorted((calm_run / "events").glob("*.jsonl")))
    logs = worker_logs(folder)
    verdict = judge(read_ledger(logs), calm, steps=steps, tolerance=0.0 if setup.mode == "exact" else 1e-5)
    result.committed_steps, result.lost_samples = verdict.committed_steps, verdict.lost_samples
    result.doubled_samples, result.worst_difference = verdict.doubled_samples, verdict.worst
    needless = [r for r in verdict.rollbacks if len(r.lost_hosts) < setup.f]
    result.rollbacks, result.rollbacks_allowed = len(needless), len(verdict.rollbacks) - len(needless)
    result.failures += [f"training went back although fewer than {setup.f} hosts were out: {r}" for r in needless]
    result.failures += verdict.problems
    apart = different(digests(storm_run), digests(calm_run)) if setup.mode == "exact" else []
    result.bitwise_equal = setup.mode == "exact" and verdict.equal and not apart
    if apart:
        result.failures.append(f"{len(apart)} tensors end with other bits: {apart[:4]}")
    _measure(result, cluster, folder, logs)


def worker_logs(folder: Path) -> list[list[dict[str, Any]]]:
    """Events of each worker process, in order."""
    return [list(read_events(path)) for path in sorted(folder.glob("worker-*.jsonl"))]


def _measure(
    result: StormResult, cluster: ChaosCluster, folder: Path, logs: Sequence[Sequence[dict[str, Any]]]
) -> None:
    events = [event for log in logs for event in log]
    events += [event for path in sorted(folder.glob("host-*.jsonl")) for event in read_events(path)]
    result.sound_put_out = put_out_though_sound(cluster.faults, events)
    result.failures += [f"a sound rank was removed: {text}" for text in result.sound_put_out]
    found = recoveries(cluster.faults, events)
    result.recoveries = [asdict(r) for r in found]
    times = [r.resumed_s for r in found if r.kind in OUT]
    result.median_recovery_s, result.max_recovery_s = median(times), _most(times)
    result.after_hang_s = median(
        None if r.resumed_s is None or r.detected_s is None else r.resumed_s - r.detected_s
        for r in found
        if r.kind in STILL_KINDS
    )
    result.frozen_max_s = _most(r.resumed_s for r in found if r.kind == "freeze")
    away = {f.at_s: back_s for f, back_s in zip(cluster.faults, cluster.away_s, strict=True)}
    result.service_max_s = _most(
        None if r.resumed_s is None else max(0.0, r.resumed_s - away[f.at_s])
        for f, r in zip(cluster.faults, found, strict=True)
        if r.kind == "service"
    )
    came = joins(cluster.begun, events, [fault.at_s for fault in cluster.faults])
    result.joins = [asdict(j) for j in came]
    result.join_used_max_s = _most(j.used_s for j in came if not j.struck)
    result.join_stopped_max_s = _most(j.stopped_s for j in came if not j.struck)
    result.joins_struck = sum(j.struck for j in came)
    result.moved_bytes = sum(e["moved_bytes"] for e in events if e["kind"] == "TeamFormed")
    result.zombies_refused = sum("was excluded from the run" in text for text in cluster.said())


def _of_joins(result: StormResult) -> str:
    parts = []
    for struck, what in ((False, "joins"), (True, "more, during which another fault struck")):
        own = [j for j in result.joins if j["struck"] == struck]
        used, stopped = ([j[name] for j in own] for name in ("used_s", "stopped_s"))
        parts.append(
            f"{len(own)} {what}: used after {_ms(median(used))}, {_ms(_most(used))} at most, others stopped {_ms(median(stopped))}, {_ms(_most(stopped))} at most"
        )
    return "; ".join(parts if result.joins_struck else parts[:1])


def _most(values: Any) -> float | None:
    return max((v for v in values if v is not None), default=None)


def report(result: StormResult) -> str:
    """A few lines for a person."""
    kinds = ", ".join(f"{k} {n}" for k, n in sorted(result.by_kind.items()))
    lines = [
        f"{result.faults} faults ({kinds}) on {result.where}, {result.committed_steps} steps, {result.seconds:.0f} s",
        f"samples lost {result.lost_samples}, doubled {result.doubled_samples}; bitwise equal "
        f"{'yes' if result.bitwise_equal else 'NO' if result.mode == 'exact' else 'not asked'}, largest difference of a loss {result.worst_difference:.1e}; "
        f"rollbacks {result.rollbacks} (and {result.rollbacks_allowed} with f hosts out); hung {result.hung}, orphans {result.orphans}",
        f"kill -9 to the next step: median {_ms(result.median_recovery_s)}, max {_ms(result.max_recovery_s)}; frozen max "
        f"{_ms(result.frozen_max_s)} (limit {result.limit_s:g} s); still, from its removal, median {_ms(result.after_hang_s)} (bound {result.hang_s:g} s); service, from its restart, max {_ms(result.service_max_s)}",
        _of_joins(result),
    ]
    for kind in sorted(result.by_kind):
        own = [r for r in result.recoveries if r["kind"] == kind]
        names = ("detected_s", "broken_s", "reformed_s", "resumed_s")
        cells = [f"{name[:-2]} {_ms(median([r[name] for r in own]))}" for name in names]
        lines.append(f"  {kind:<9} median after the fault: {', '.join(cells)}")
    if result.not_here:
        lines.append(f"not done here: {', '.join(result.not_here)} (they need links: --testbed)")
    return "\n".join([*lines, *(f"FAILED: {f}" for f in result.failures)])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1000:.0f} ms"
