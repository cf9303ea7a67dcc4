"""`phalanx bench recovery`: traces, ledgers from logs, the model, and one small run of both systems through a failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phalanx.core.errors import ConfigError
from phalanx.simulate.failures.goodput import read_nodes
from phalanx.train.recovery.drained_slots import DRAINED_SLOTS_FILE, DrainedSlotsFile, write_drained_slots
from phalanx_lab.bench.cluster import Logs
from phalanx_lab.bench.recovery.command import OURS, PAPER, RecoveryArgs, make_case, problems, report, result
from phalanx_lab.bench.recovery.model import (
    Figures,
    best_interval,
    mean_in_use,
    paper_figures,
    predict,
    restarts,
    where_as_good,
)
from phalanx_lab.bench.recovery.ours import PhalanxSystem
from phalanx_lab.bench.recovery.replay import replay
from phalanx_lab.bench.recovery.table import RunHistory, score
from phalanx_lab.bench.recovery.torchrun import Torchrun
from phalanx_lab.bench.recovery.trace import BAMBOO, Change, Trace, bamboo, every, from_nodes, random_failures
from phalanx_lab.bench.recovery.workload import Workload, workloads

# ---- traces ----------------------------------------------------------------------------------------------------------


def test_bamboo_is_what_its_authors_published() -> None:
    events = read_nodes(BAMBOO)
    kinds = [kind for _, kind, _ in events]
    assert (len(events), kinds.count("add"), kinds.count("remove")) == (344, 177, 167)
    assert events[-1][0] == 682 * 60
    alive, most = set(), 0
    for _, kind, node in events:
        (alive.add if kind == "add" else alive.discard)(node)
        most = max(most, len(alive))
    assert most == 32
    removed = [at_s for at_s, kind, _ in events if kind == "remove"]
    assert len(set(removed)) == 79 and max(removed.count(at) for at in set(removed)) == 6


@pytest.mark.parametrize("slots", [4, 8, 10])
def test_bamboo_capped(slots: int) -> None:
    """The removals that hit the first `slots` nodes, and the next nodes that come."""
    trace = bamboo(slots=slots)
    trace.check()
    assert trace.duration_s == 4800 and trace.present()[0][1] == frozenset(range(slots))
    assert trace.changes[0] == Change(at_s=34 * 60, lost=(2,))
    assert trace.changes[1] == Change(at_s=43 * 60, back=(2,))
    assert trace.changes[2].lost == (0, 1) and trace.changes[4] == Change(at_s=61 * 60, back=(0, 1, 3))
    assert max(len(there) for _, there in trace.present()) == slots
    later = bamboo(slots=slots, start_s=1800, duration_s=1920)
    assert [c.at_s for c in later.changes] == [c.at_s - 1800 for c in trace.changes if 1800 < c.at_s < 3720]


def test_nodes_that_replace_each_other_at_once_are_lost_and_back() -> None:
    events = [(0.0, "add", "a"), (0.0, "add", "b"), (5.0, "remove", "a"), (5.0, "add", "c"), (6.0, "remove", "x")]
    trace = from_nodes(events, slots=2, start_s=0.0, duration_s=10.0)
    assert trace.changes == (Change(at_s=5.0, lost=(0,), back=(0,)),)
    trace.check()
    with pytest.raises(ConfigError, match="only 2 of 3 slots"):
        from_nodes(events, slots=3, start_s=0.0, duration_s=10.0)


def test_poisson_is_a_function_of_its_seed_and_leaves_enough() -> None:
    first, again, other = (
        random_failures(2.0, slots=4, duration_s=100.0, back_s=3.0, least=2, seed=s) for s in (1, 1, 2)
    )
    assert first == again != other
    for trace in (first, other):
        trace.check()
        assert min(len(there) for _, there in trace.present()) == 2 and trace.num_losses > 20


def test_one_after_another() -> None:
    trace = every(10.0, slots=8, leave=4, seed=3)
    trace.check()
    assert trace.num_losses == 4 and trace.duration_s == 50.0
    assert trace.scaled(0.5).changes[0].at_s == 5.0


def test_traces_that_cannot_be_are_refused() -> None:
    changes = (
        Change(at_s=5, lost=(0,)),
        Change(at_s=4, lost=(0,)),
        Change(at_s=6, back=(1,)),
        Change(at_s=20, lost=(1,)),
    )
    with pytest.raises(ConfigError) as found:
        Trace(name="bad", slots=2, duration_s=10, changes=changes).check()
    for words in ("must come in order", "not there", "slots that are there", "leaves no slot"):
        assert words in str(found.value)


# ---- ledger ----------------------------------------------------------------------------------------------------------


def _step(at_s: float, step: int, slot: int, windows: tuple[int, ...]) -> list[dict[str, Any]]:
    return [
        {"kind": "SamplesTaken", "time_s": at_s, "step": step, "slot": slot, "windows": list(windows)},
        {"kind": "StepEnded", "time_s": at_s, "step": step, "slot": slot},
    ]


def _history() -> list[dict[str, Any]]:
    """Two ranks do steps 1 to 4, a kill at 4.5, back to step 2 with one rank at 8, steps 3 to 6."""
    out: list[dict[str, Any]] = []
    for step in range(1, 5):
        for slot in range(2):
            out += _step(step + slot / 100, step, slot, (10 * step + slot,))
    out.append({"kind": "CheckpointSaved", "bytes": 1000, "time_s": 2.5, "step": 2, "slot": 0, "blocked_s": 0.25})
    out.append({"kind": "RunStarted", "time_s": 8.0, "step": 2, "slot": 0})
    for step in range(3, 7):
        out += _step(6.0 + step, step, 0, (10 * step, 10 * step + 1))
    return out


def test_a_step_that_was_taken_back_counts_once() -> None:
    found = score(_history(), system="x", global_batch=2, begin_s=1.5, end_s=13.0, changes=[(4.5, "slot 1 lost")])
    assert (found.committed_steps, found.committed_samples, found.steps_again) == (5, 10, 2)
    assert (found.doubled_samples, found.untold_samples, found.saves, found.save_s) == (0, 0, 1, 0.25)
    (outage,) = found.outages
    assert (outage.running_s, outage.resumed_s, outage.caught_up_s) == (3.5, 4.5, 6.5)
    early = score(_history(), system="x", global_batch=2, begin_s=1.5, end_s=8.5)
    assert early.committed_steps == 1  # back at step 2
    assert RunHistory(_history()).at(7.0) == 4


def test_a_sample_that_is_trained_on_twice_is_found() -> None:
    records = _history() + _step(12.5, 7, 0, (70, 70))
    assert RunHistory(records).doubled() == 1
    lost = [r for r in _history() if not (r["kind"] == "SamplesTaken" and r["step"] == 4 and r["time_s"] > 8)]
    assert RunHistory(lost).untold(0, 6, global_batch=2) == 2


# ---- model -----------------------------------------------------------------------------------------------------------

FIGURES = Figures(step_s=0.1, save_s=0.2, restart_s=5.0, elastic_step_s=0.1, repair_s=0.5)


def test_the_baseline_restarts_for_slots_in_use_only() -> None:
    trace = every(10.0, slots=8, leave=4, seed=3)
    hits, grows = restarts(trace, 4)
    assert len(hits) <= 4 and grows == []
    assert mean_in_use(trace, 4) == pytest.approx((8 + 4 * 4) / 5) and mean_in_use(trace, 1) == pytest.approx(6.0)
    back = Trace(name="t", slots=4, duration_s=30, changes=(Change(at_s=5, lost=(3,)), Change(at_s=9, back=(3,))))
    assert restarts(back, 2) == ([5], [9])


def test_predictions_by_hand() -> None:
    trace = Trace(name="t", slots=4, duration_s=100.0, changes=(Change(at_s=50.0, lost=(3,)),))
    found = predict(FIGURES, trace, ep=2, interval_steps=98, own_speed=False)  # a cycle of 9.8 + 0.2 s
    assert found.baseline == pytest.approx((5 * 9.8 + 4.5 * 9.8) / 0.1, rel=0.02)
    assert found.ratio == pytest.approx((99.5 - 2 * 0.2) / (5 * 9.8 + 4.5 * 9.8), rel=0.03)
    own = predict(FIGURES, trace, ep=2, interval_steps=98, own_speed=True)
    assert own.ratio / found.ratio == pytest.approx(3.5 / 3.0)


def test_checkpoints_are_as_good_where_failures_are_rare_and_restarts_cheap() -> None:
    rows = where_as_good(FIGURES, 10.0, factors=(1, 100, 1000), restart_factors=(1.0, 0.1))
    by = {(r["failure_s"], r["restart_s"]): r["ratio"] for r in rows}
    assert by[10.0, 5.0] > 1.5 > by[1000.0, 5.0] and by[10000.0, 0.5] < 1.05
    assert best_interval(FIGURES, 10.0) == 20


def test_the_papers_set_up_is_stated() -> None:
    small, large = workloads(8)["small"], workloads(8)["large"]
    assert paper_figures(small).save_s == pytest.approx(5.8, abs=0.05)
    assert paper_figures(large).save_s == pytest.approx(19.0, abs=0.05)
    assert (small.ep, large.ep, workloads(4)["large"].ep) == (2, 4, 2)
    case = make_case("failures", large, FIGURES, RecoveryArgs(slots=8))
    assert case.failure_s == pytest.approx(10.0) and case.trace.num_losses == 4
    assert case.proportions["paper"]["steps_between_failures"] == pytest.approx(333, abs=1)
    assert case.proportions["here"]["restart"] == pytest.approx(case.proportions["paper"]["restart"])
    assert "predicted ratios" in report([case]) and result(RecoveryArgs(), [case])["ratio_large"] is None


def test_systems_that_met_unequal_shares_of_the_processors_are_not_compared() -> None:
    case = make_case("failures", workloads(8)["large"], FIGURES, RecoveryArgs(slots=8))
    found = score(_history(), system=OURS, global_batch=2, begin_s=1.5, end_s=13.0, changes=[(4.5, "slot 1 lost")])
    case.scores = {OURS: [found], PAPER: [replace(found, stolen=0.04)]}
    assert "4.0% of the processor time stolen" in report([case]) and "NOT COMPARABLE" not in report([case])
    case.scores[PAPER] = [replace(found, stolen=0.3)]
    assert "NOT COMPARABLE" in report([case])


def test_arguments_are_checked_together() -> None:
    bad = RecoveryArgs(slots=3, restart_share=2.0, failure_s=-1.0, rounds=0, what=("file",))
    assert [p.where for p in problems(bad)] == ["--slots", "--restart-share", "--failure-s", "--rounds", "--trace"]
    assert problems(RecoveryArgs()) == []


def test_a_folder_with_old_runs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "away").write_text("3")
    (problem,) = problems(RecoveryArgs(folder=tmp_path))
    assert problem.where == "--folder" and problems(RecoveryArgs(folder=tmp_path / "new")) == []


def test_both_systems_get_the_same_run(tmp_path: Path) -> None:
    workload = replace(workloads(4)["small"], skew=2.2)
    ours = PhalanxSystem(workload, tmp_path / "a", slots=4, mode="fast", interval=50)
    base = Torchrun(workload, tmp_path / "b", slots=4, interval=10, asynchronous=False, name="base")
    differs = {k for k in ours.settings | base.settings if ours.settings.get(k) != base.settings.get(k)}
    own = {"resilience.heal", "resilience.mode", "optim.zero", "launch.ranks"}
    assert differs == own | {"run.folder", "checkpoint.interval", "checkpoint.asynchronous"}
    assert base.settings["router.force_skew"] == 2.2
    spread = PhalanxSystem(workload, tmp_path / "c", slots=4, mode="fast", interval=50, replica_slots=6)
    assert spread.settings["resilience.slots_per_rank"] == 6 and "folding.ep" not in spread.settings


# ---- slots that are away ---------------------------------------------------------------------------------------------


def test_slots_are_away_until_they_are_back(tmp_path: Path) -> None:
    read = DrainedSlotsFile(tmp_path / DRAINED_SLOTS_FILE)
    assert read() == frozenset()
    write_drained_slots(tmp_path, frozenset({1, 3}))
    assert read() == read() == {1, 3}
    (tmp_path / DRAINED_SLOTS_FILE).write_text("2, x 0\n")
    assert read() == {0}
    (tmp_path / DRAINED_SLOTS_FILE).unlink()
    assert read() == frozenset()


# ---- both systems ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Workload:
    return Workload(
        name="tiny", layers=1, hidden=32, expert_hidden=32, num_experts=4, ep=2, paper_step_s=0.6, paper_params=1e6,
        seq_len=16, global_batch=8,
    )  # fmt: skip


@pytest.mark.ranks
@pytest.mark.slow
def test_both_systems_go_on_after_a_loss(tiny: Workload, tmp_path: Path) -> None:
    """Slot 1 is lost and, for the one that is elastic, comes back. The baseline runs on one expert-parallel group in place of two."""
    loss, back = Change(at_s=1.0, lost=(1,)), Change(at_s=3.0, back=(1,))
    ours = PhalanxSystem(tiny, tmp_path / "ours", slots=4, mode="fast", interval=1000)
    elastic = replay(
        ours,
        Trace(name="t", slots=4, duration_s=60, changes=(loss, back)),
        global_batch=8,
        stop_when_resumed=True,
    )
    teams = [r for r in Logs(ours.folder, slots=4).new() if r["kind"] == "TeamFormed" and r["slot"] == 0]
    assert [r["members"] for r in teams] == [4, 3, 4]
    base = Torchrun(tiny, tmp_path / "base", slots=4, interval=1, asynchronous=False, name="base")  # any step saves
    restarted = replay(
        base, Trace(name="t", slots=4, duration_s=60, changes=(loss,)), global_batch=8, stop_when_resumed=True
    )
    assert base.active == (0, 2) and base.launches == 2 and base.restarts == 0
    assert (elastic.steps_again, elastic.doubled_samples, restarted.doubled_samples) == (0, 0, 0)
    assert restarted.saves > 0 and restarted.outages[0].resumed_s is not None
    assert elastic.committed_samples > 0 and len(elastic.outages) == 2
    assert not ours.cluster.pids and not base.cluster.pids
