"""The storm over the real trainer, short; and what its checker must find: a doubled sample, a step that is not there, another bit, a needless way back, an orphan."""

from __future__ import annotations

import copy
import math
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recovery_plan_help import after, fresh, new_member, planner, shuffled

from phalanx.plan.layout.tensors import TensorLayout
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.reshard.plan import plan_reshard
from phalanx.plan.reshard.types import equal_hosts
from phalanx.train.recovery.watch import PHASES, collective_watch
from phalanx_lab.bench.storm.board import PhaseBoard
from phalanx_lab.bench.storm.chaos_cluster import ChaosCluster, users_of
from phalanx_lab.bench.storm.command import StormArgs, run_storm
from phalanx_lab.bench.storm.joins import joins
from phalanx_lab.bench.storm.ledger import CalmStep, StormVerdict, calm_steps, judge, read_ledger

STEPS, MEMBERS, SAMPLES = 6, 3, 6
Log = list[dict[str, Any]]


# ---- the ledger, with logs by hand: three members, of which the last one dies after step 3, and a new one comes


def step_of(step: int, rank: int, size: int) -> Log:
    windows = [step * 100 + s for s in range(SAMPLES) if s * size // SAMPLES == rank]
    return [
        {"kind": "StepEnded", "step": step, "loss": 1.0 / step, "grad_norm": 0.1 * step},
        {"kind": "SamplesTaken", "step": step, "windows": windows, "microbatches": []},
    ]


def entered(uid: str, generation: int, step: int, *, members: int = 3) -> dict[str, Any]:
    return {"kind": "Reformed", "uid": uid, "generation": generation, "step": step, "members": members}


def logs() -> list[Log]:
    found = []
    for rank, uid in enumerate(("a.0.x", "b.0.x", "c.0.x")):
        log = [entered(uid, 1, 0)]
        for step in (1, 2, 3):
            log += step_of(step, rank, 3)
        if rank < 2:
            log.append(entered(uid, 2, 3))
            log += [*step_of(4, rank, 2), entered(uid, 3, 4), *step_of(5, rank, 3), *step_of(6, rank, 3)]
        found.append(log)
    found.append([entered("c.0.y", 3, 4), *step_of(5, 2, 3), *step_of(6, 2, 3)])
    return found


def calm() -> dict[int, CalmStep]:
    return calm_steps([[event for step in range(1, STEPS + 1) for event in step_of(step, 0, 1)]])


def verdict_of(changed: list[Log], **options: Any) -> StormVerdict:
    return judge(read_ledger(changed), calm(), steps=STEPS, **options)


def without(log: Log, step: int) -> Log:
    return [event for event in log if event["kind"] == "Reformed" or event["step"] != step]


def test_a_run_as_it_should_be() -> None:
    found = verdict_of(logs())
    assert found.problems == [] and found.equal and found.rollbacks == []
    assert (found.committed_steps, found.lost_samples, found.doubled_samples) == (STEPS, 0, 0)


def test_a_rank_that_was_killed_may_lack_its_last_line_and_nobody_else() -> None:
    changed = logs()
    changed[2] = without(changed[2], 3)
    assert verdict_of(changed).problems == []
    changed = logs()
    changed[1] = without(changed[1], 4)  # it goes on: so it was there, and did not take its samples
    found = verdict_of(changed)
    assert found.lost_samples == SAMPLES // 2 and "were taken by nobody" in found.problems[0]


def test_a_doubled_sample_is_found() -> None:
    changed = logs()
    for event in changed[0]:
        if event["kind"] == "SamplesTaken" and event["step"] == 2:
            event["windows"] = [*event["windows"], event["windows"][0]]
    found = verdict_of(changed)
    assert found.doubled_samples == 1 and "1 samples twice" in found.problems[0]


def test_a_sample_of_another_step_is_found() -> None:
    changed = logs()
    changed[0][2]["windows"] = [999, *changed[0][2]["windows"]]
    assert "[999] of another step" in verdict_of(changed).problems[0]


def test_two_groups_at_one_step_are_found() -> None:
    """d goes on from step 4 while the others do, under a later number; then a commits a step that it has committed before."""
    changed = [*logs(), [entered("d.0.x", 4, 4), *step_of(5, 0, 1), *step_of(6, 0, 1)]]
    assert verdict_of(changed).problems == ["generation 4 goes back from step 6 to 4, and nobody said so"]
    changed = logs()
    changed[0] += [entered("a.0.x", 4, 6), *step_of(6, 0, 1)]
    found = verdict_of(changed)
    assert found.doubled_samples == SAMPLES and found.problems == ["step 6 was committed in generations [3, 4]"]


def test_a_missing_step_is_found() -> None:
    found = verdict_of([without(log, 4) for log in logs()])
    assert found.lost_samples == SAMPLES and "step 4 was never committed" in found.problems


def test_another_bit_is_found() -> None:
    changed = logs()
    changed[1][1]["loss"] = 1.0 + 2**-52
    found = verdict_of(changed)
    assert not found.equal and "1 steps differ, the first one is 1" in found.problems[-1]
    assert verdict_of(changed, tolerance=1e-5).equal
    changed[1][1]["loss"] = 1.0 + 2e-5
    assert not verdict_of(changed, tolerance=1e-5).equal


def test_going_back_is_seen_and_must_be_said() -> None:
    """All of a and c, who held something, are gone after step 5; b goes back to step 3, and all is done again: nothing is counted twice."""
    before = [[entered(u, 1, 0), *(e for t in range(1, 6) for e in step_of(t, r, 3))] for r, u in enumerate("abc")]
    before[1] += [entered("b", 2, 3), *(e for t in range(4, 7) for e in step_of(t, 0, 1))]
    found = verdict_of(copy.deepcopy(before))
    (back,) = found.rollbacks
    assert (back.step, back.steps, back.lost_hosts, back.told) == (3, 2, ("a", "c"), False)
    assert found.problems == ["generation 2 goes back from step 5 to 3, and nobody said so"]
    said = {"kind": "WentBack", "step": 3, "from_step": 5}
    before[1].insert(-6, said)
    found = verdict_of(before)
    assert found.problems == [] and (found.lost_samples, found.doubled_samples) == (0, 0)


def test_who_was_lost_counts_from_the_last_generation_that_all_had_entered() -> None:
    """c joined last and had committed nothing when it was lost with a: two hosts are out, not one. If a was lost in a generation that b alone has entered, it counts too."""
    a = [entered("a", 1, 0, members=2), *(e for t in (1, 2, 3) for e in step_of(t, 0, 2)), entered("a", 2, 3)]
    b = [entered("b", 1, 0, members=2), *(e for t in (1, 2, 3) for e in step_of(t, 1, 2)), entered("b", 2, 3)]
    b += [entered("b", 4, 1, members=1), *(e for t in range(2, 7) for e in step_of(t, 0, 1))]
    for between in ([], [entered("b", 3, 3, members=2)]):
        log = [a, [*b[:8], *between, *b[8:]], [entered("c", 2, 3)]]
        (back,) = verdict_of(log).rollbacks
        assert back.lost_hosts == ("a", "c")
    log = [a, [*b[:8], entered("b", 3, 3, members=1), *b[8:]], [entered("c", 2, 3)]]
    assert verdict_of(log).rollbacks[0].lost_hosts == ()


def test_a_step_that_only_a_dead_member_knew_is_no_way_back() -> None:
    """The service died between the decision and the others: they do the step again, and nobody who goes on has seen it."""
    changed = logs()
    changed[2] = [*changed[2], *step_of(4, 2, 3)]
    found = verdict_of(changed)
    assert found.problems == [] and found.rollbacks == []


def test_joins_count_from_the_start_of_the_program() -> None:
    def committed(uid: str, generation: int, at_s: float) -> dict[str, Any]:
        return {"kind": "Committed", "uid": uid, "generation": generation, "at_s": at_s}

    events = [committed("a.0.x", 1, 10.0), committed("a.0.x", 2, 14.5), committed("b.0.y", 2, 14.6)]
    (join,) = joins([("a", 1.0), ("b", 2.0), ("b", 11.0)], events)
    assert (join.host, round(join.used_s, 6), round(join.stopped_s, 6), join.struck) == ("b", 3.6, 4.5, False)
    (join,) = joins([("b", 11.0)], [committed("a.0.x", 1, 9.8), *events], [12.0])
    assert join.struck and round(join.step_s, 6) == 0.2
    assert not joins([("b", 11.0)], events, [9.0, 15.0])[0].struck


# ---- bytes


@pytest.mark.parametrize("seed", range(6))
def test_what_moves_is_the_least_that_can_move(seed: int) -> None:
    """Of what a member needs, exactly what it does not hold comes to it, whichever ranks share hosts."""
    rng = random.Random(seed)
    run = planner(Folding(world=4, ep=2))
    before = run.plan(fresh(rng.randint(3, 6)))
    lost = rng.choice(before.uids)
    plan = run.plan(
        shuffled([*after(before, lost=[lost]), *(new_member(50 + i) for i in range(rng.randint(0, 2)))], rng)
    )
    moves, ranks = plan.params, range(len(plan.uids))

    def there(layout: TensorLayout, rank: int) -> np.ndarray:
        mask = np.zeros(layout.shape, dtype=bool)
        for held in layout.of_rank(rank):
            mask[tuple(slice(o, o + s) for o, s in zip(held.box.offsets, held.box.sizes, strict=True))] = True
        return mask

    least = sum(int((there(m.dst, r) & ~there(m.src, r)).sum()) * m.itemsize for m in moves for r in ranks)
    for hosts in (0, 1, 2):
        made = plan_reshard(moves, equal_hosts([r // hosts if hosts else 0 for r in ranks]))
        parts = [part for r in ranks for hop in made.program(r) if hop.dst == r for part in hop.parts]
        assert sum(math.prod(p.box.sizes) * moves[p.move].itemsize for p in parts) == least


# ---- traps and phases


def test_a_trap_holds_a_worker_in_the_phase_that_is_wanted(tmp_path: Path) -> None:
    mine = PhaseBoard(2, PHASES, path=tmp_path / "board")
    mine.set_trap(1, "vote")
    pid = os.fork()
    if pid == 0:
        other = PhaseBoard(2, PHASES, path=tmp_path / "board")
        for step in range(100):
            for phase in ("forward", "vote", "commit"):
                other.write(1, os.getpid(), phase, step)
        os._exit(0)
    end_s = time.monotonic() + 10.0
    while not mine.caught(1) and time.monotonic() < end_s:
        time.sleep(0.001)
    assert mine.caught(1) and mine.read(1) == (pid, "vote", 0)
    mine.release(1)
    assert os.waitpid(pid, 0)[1] == 0 and mine.read(1) == (pid, "commit", 99)


def test_collectives_tell_the_phase() -> None:
    told: list[str] = []
    watch = collective_watch(told.append)
    for op_id, begins in (
        ("mb0.L1.fwd.dispatch.rows", True),
        ("mb0.L1.fwd.dispatch.rows", False),
        ("mb0.L1.bwd.combine.rows", True),
        ("mb0.L1.bwd.combine.rows", False),
        ("gradient/dense/dp_cp", True),
        ("vote", True),
    ):
        watch(op_id, begins)
    assert told == ["all-to-all", "forward", "all-to-all", "backward", "reduction"]


# ---- whole storms


def test_an_orphan_is_found(tmp_path: Path) -> None:
    """A process that has a file of the storm open."""
    pid = os.fork()
    if pid == 0:
        os.open(tmp_path / "stderr-h0-1", os.O_WRONLY | os.O_CREAT)
        signal.pause()
        os._exit(0)
    try:
        end_s = time.monotonic() + 10.0
        while users_of(tmp_path) != [pid] and time.monotonic() < end_s:
            time.sleep(0.01)
        assert users_of(tmp_path) == [pid]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_two_notices_go_to_two_hosts_and_both_come_back(tmp_path: Path) -> None:
    told, begun = [], []

    class Still(ChaosCluster):
        def signal_host(self, name: str, number: signal.Signals) -> None:
            told.append((name, number))

        def start_host(self, name: str) -> None:
            begun.append(name)

    cluster = Still(hosts=3, slots=1, folder=tmp_path, board=PhaseBoard(3, PHASES), service=object())  # type: ignore[arg-type]
    cluster.pids = {"h0": 1, "h1": 2, "h2": 3}
    struck = cluster._strike("two notices", 1, random.Random(0), 0.0)
    assert struck is not None and struck[0] == "h1" and len(set(struck)) == 2
    assert told == [(name, signal.SIGTERM) for name in struck]
    cluster.pids = {}  # both have left
    cluster.running()
    assert begun == struck
    cluster.pids = {"h2": 3}
    assert cluster._strike("two notices", 2, random.Random(0), 0.0) == ["h2"]


@pytest.mark.ranks
def test_a_short_storm_loses_nothing(tmp_path: Path) -> None:
    result = run_storm(StormArgs(faults=6, seed=1, between_s=0.1), tmp_path)
    assert result.failures == []
    assert result.faults >= 6 and len(result.by_kind) >= 6
    assert (result.lost_samples, result.doubled_samples, result.bitwise_equal) == (0, 0, True)
    assert (result.rollbacks, result.hung, result.orphans) == (0, 0, 0)
    assert result.zombies_refused >= 1
    assert all(r["resumed_s"] is None or r["resumed_s"] < 50.0 for r in result.recoveries)


def etcd_program() -> Path | None:
    fetched = Path(__file__).resolve().parents[2] / ".etcd" / "root" / "usr" / "bin" / "etcd"
    found = shutil.which("etcd")
    return Path(found) if found else fetched if fetched.exists() else None


@pytest.mark.slow
@pytest.mark.ranks
def test_a_storm_with_etcd_loses_nothing(tmp_path: Path) -> None:
    program = etcd_program()
    if program is None:
        pytest.skip("no etcd here: `sh scripts/etcd.sh` fetches it from the distribution's packages")
    kinds = ("kill", "service", "host")
    result = run_storm(StormArgs(faults=3, seed=1, between_s=0.1, kinds=kinds, etcd=program), tmp_path)
    assert result.failures == []
    assert (result.lost_samples, result.doubled_samples, result.bitwise_equal) == (0, 0, True)
    assert (result.rollbacks, result.hung, result.orphans) == (0, 0, 0)
