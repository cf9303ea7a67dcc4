"""The clock of a recovery: counts of a plan, phases, what each constant adds; and how `phalanx bench predict --recovery` compares."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from phalanx.plan.layout.state import STATE_KINDS
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.plan.recovery.generation import GenerationPlan
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.state_descriptor import Fact
from phalanx.simulate.failures.recovery_time import (
    GATHERS,
    PHASES,
    Constants,
    RecoveryWork,
    notice_share,
    num_groups,
    recovery_time,
    recovery_work,
    step_after,
)
from phalanx_lab.bench.predict.command import PredictArgs, _problems
from phalanx_lab.bench.predict.recovery import BAR, RUNS, PlannedCourse, measured, recipe_of, report_of

NOTHING = Constants(**{f.name: 0.0 for f in fields(Constants) if f.name != "cores"}, cores=2.0)


def _plan(
    *, ep: int = 1, zero: int = 0, world: int = 4, lost: tuple[int, ...] = (3,), mark: str = "a"
) -> tuple[RecoveryPlanner, GenerationPlan]:
    folding = make_folding(world=world, ep=ep)
    planner = RecoveryPlanner(spec=PRESETS["tiny"], base=folding, seq_len=32, floor=2, zero=zero)
    begun = planner.plan([Fact(uid=f"local.{i}.{mark}", machine="local", descriptor=None) for i in range(world)])
    facts = [
        replace(f, descriptor=begun.state_descriptor(rank)) for rank, f in enumerate(begun.members) if rank not in lost
    ]
    return planner, planner.plan(facts)


def _work(**how: object) -> RecoveryWork:
    planner, plan = _plan(**how)  # type: ignore[arg-type]
    return recovery_work(planner, plan, lost=1, itemsize=4)


def test_decision_is_that_of_the_plan_whatever_members_are_called() -> None:
    (_, mine), (_, other), (_, another) = _plan(ep=2), _plan(ep=2, mark="zz"), _plan(ep=2, lost=(2,))
    assert mine.decision == other.decision
    assert mine.hash != other.hash
    assert mine.decision != another.decision


def test_what_moves_is_what_members_lack() -> None:
    """ep 2 becomes 1: each of three members lacks half of the experts; where all hold everything nothing moves."""
    spec = PRESETS["tiny"]
    experts = len(spec.moe_layers) * spec.num_experts * 3 * spec.hidden * spec.expert_ffn
    work = _work(ep=2)
    assert work.moved_bytes == 3 * experts // 2 * len(STATE_KINDS) * 4
    assert _work(ep=1).moved_bytes == 0
    assert _work(ep=1, zero=1).moved_bytes > 0  # shards begin elsewhere


def test_a_rank_holds_before_and_afterwards_what_the_layouts_say() -> None:
    planner, plan = _plan()
    work = recovery_work(planner, plan, lost=1, itemsize=4)
    total = sum(math.prod(m.dst.shape) for m in plan.params)
    for rank in work.ranks:
        assert rank.parameter_bytes == 4 * total
        assert rank.state_bytes == rank.held_bytes == len(STATE_KINDS) * 4 * total
        assert rank.tensors == len(plan.params)
        assert rank.messages == 0


def test_messages_are_those_of_the_programs_on_their_clock() -> None:
    """Whatever moves is in the programs of all members; no rank's link carries less than its messages one after another, and each waits for its turn."""
    work = _work(ep=2)
    exchanges = [op for program in work.waves[0] for op in program.collectives if op.collective == "exchange"]
    assert sum(op.sent_bytes for op in exchanges) == work.moved_bytes
    assert len(exchanges) == sum(rank.messages for rank in work.ranks) > 0
    constants = replace(NOTHING, message_s=1e-3)
    moved_s = recovery_time(work, constants, step_s=0.0).phases["moved"]
    busiest = max(
        sum(getattr(op, end) is not None for op in program.collectives if op.collective == "exchange")
        for program in work.waves[0]
        for end in ("sends_to", "receives_from")
    )
    one_s = 1e-3 * constants.shares(work.members)
    assert busiest * one_s <= moved_s * (1 + 1e-9) and moved_s <= len(exchanges) / 2 * one_s * (1 + 1e-9)


def test_idle_members_hold_nothing_afterwards() -> None:
    folding = make_folding(world=4, pp=2)
    planner = RecoveryPlanner(spec=PRESETS["tiny"], base=folding, seq_len=32, floor=2)
    begun = planner.plan([Fact(uid=f"local.{i}.a", machine="local", descriptor=None) for i in range(4)])
    facts = [replace(f, descriptor=begun.state_descriptor(rank)) for rank, f in enumerate(begun.members)][:3]
    work = recovery_work(planner, planner.plan(facts), lost=1, itemsize=4)
    assert work.members == 3 and work.folding.world == 2
    assert work.ranks[2].parameter_bytes == 0 and work.ranks[2].state_bytes == 0


def test_groups_are_counted_once_each() -> None:
    assert num_groups(make_folding(world=1), members=1) == 0
    assert num_groups(make_folding(world=2), members=2) == 1  # all axes are of both: the world's, and one for control
    assert num_groups(make_folding(world=4, ep=2), members=4) == 1 + 4  # ep: (0 1) (2 3); edp: (0 2) (1 3)


def test_without_costs_only_the_step_is_left() -> None:
    found = recovery_time(_work(ep=2), NOTHING, step_s=0.3)
    assert found.seconds == pytest.approx(0.3)
    assert tuple(found.phases) == PHASES
    assert found.hash in (_plan(ep=2)[1].decision,)


@pytest.mark.parametrize("name", [f.name for f in fields(Constants) if f.name != "cores"])
def test_every_constant_counts(name: str) -> None:
    work = _work(ep=2, zero=0)
    base = recovery_time(work, NOTHING, step_s=0.1).seconds
    assert recovery_time(work, replace(NOTHING, **{name: 1e-3}), step_s=0.1).seconds > base


def test_without_programs_the_counts_of_the_ranks_stand_for_their_messages() -> None:
    """Three ranks on one processor: of the busiest, its messages and the larger of what goes out and what comes in; and the gathers, which nobody computes for."""
    work = _work(ep=2)
    ranks = tuple(
        replace(rank, messages=n, sent_bytes=sent, received_bytes=received)
        for rank, n, sent, received in zip(work.ranks, (3, 7, 2), (50, 400, 100), (60, 100, 900), strict=True)
    )
    constants = replace(NOTHING, cores=1.0, gather_s=0.5, message_s=0.1, message_s_per_byte=1e-3)
    found = recovery_time(replace(work, ranks=ranks, waves=()), constants, step_s=0.0)
    assert found.phases["moved"] == pytest.approx(GATHERS * 0.5 + 3 * max(0.7 + 0.4, 0.2 + 0.9))
    fewer = replace(work, ranks=(replace(ranks[0], messages=0), ranks[1]), waves=())
    assert recovery_time(fewer, constants, step_s=0.0).phases["moved"] == pytest.approx(GATHERS * 0.5 + 3 * 1.1)
    alone = replace(work, ranks=ranks[1:2], waves=(), members=1)
    assert recovery_time(alone, constants, step_s=0.0).phases["moved"] == pytest.approx(1.1)


def test_ranks_that_share_processors_take_turns_and_messages_do_not_hide() -> None:
    work = _work(ep=2)
    constants = replace(NOTHING, tensor_s=1e-3)
    alone, crowded = (recovery_time(work, replace(constants, cores=c), step_s=0.0) for c in (4.0, 1.0))
    assert crowded.phases["built"] == pytest.approx(3 * alone.phases["built"])


def test_who_computes_notices_late_but_not_later_than_his_gap() -> None:
    work = _work()
    late = recovery_time(work, replace(NOTHING, exit_s=0.02), step_s=0.0, notice_s=0.5)
    assert late.seconds == pytest.approx(0.5)  # detected meanwhile
    soon = recovery_time(work, replace(NOTHING, exit_s=0.02), step_s=0.0, notice_s=0.01)
    assert soon.seconds == pytest.approx(0.02 * 2)  # four processes on two cores


def test_memory_that_was_given_back_is_not_new() -> None:
    work = _work()
    constants = replace(NOTHING, fresh_s_per_byte=1e-9)
    assert recovery_time(work, constants, step_s=0.0, fresh=False).seconds == 0.0
    assert recovery_time(work, constants, step_s=0.0).seconds > 0.0


def test_a_step_of_fewer_ranks() -> None:
    four, three, one = (make_folding(world=n) for n in (4, 3, 1))
    assert step_after(1.0, samples=8, before=four, after=three, cores=2) == pytest.approx(1.0)  # the cores were busy
    assert step_after(1.0, samples=8, before=four, after=one, cores=2) == pytest.approx(2.0)
    assert step_after(1.0, samples=8, before=four, after=three, cores=8) == pytest.approx(3 / 2)  # 3, 3 and 2 of them


def test_all_runs_have_a_prediction(tmp_path: Path) -> None:
    """Of every kill of every run, with members and hashes of their own."""
    hashes = []
    for victims in RUNS:
        course = PlannedCourse(recipe_of(victims, tmp_path, "x"), NOTHING)
        left = victims.ranks
        for slots in victims.kills:
            left -= len(slots)
            found = course.after(slots, step_s=0.2)
            assert found.members == left
            assert found.seconds > 0
            hashes.append(found.hash)
    assert len(RUNS) >= 8 and len(set(hashes)) == len(hashes)
    assert {victims.ranks for victims in RUNS} == {2, 3, 4}


def test_gaps_between_collectives_say_when_a_death_is_noticed(tmp_path: Path) -> None:
    by_name = {victims.name: victims for victims in RUNS}
    course = PlannedCourse(recipe_of(by_name["small, ep 2"], tmp_path, "x"), NOTHING)
    program = course._program(course.first)
    assert 0 < notice_share(program) < 0.1  # dispatch and combine in every layer
    alone = PlannedCourse(recipe_of(by_name["2 ranks"], tmp_path, "x"), NOTHING)
    assert 0.3 < notice_share(alone._program(alone.first)) <= 0.5  # nothing before the last backward


# ---- the comparison ---------------------------------------------------------------------------------------------------


def _told(kind: str, at_s: float, **more: object) -> dict[str, object]:
    return {"kind": kind, "time_s": at_s, **more}


def _team(at_s: float, **more: object) -> dict[str, object]:
    words = {"generation": 2, "lost_s": 100.1, "built_s": 0.2, "moved_s": 0.3, "moved_bytes": 5, "plan": "p"}
    return _told("TeamFormed", at_s, **{**words, **more})


def test_phases_end_with_the_last_member() -> None:
    told = [
        _team(101.0),
        _team(101.2),
        _told("TrainingResumed", 101.5),
        _told("TrainingResumed", 101.6),
    ]
    found = measured(told, 100.0)
    assert found["seconds"] == pytest.approx(1.6)
    assert sum(found["phases"].values()) == pytest.approx(1.6)
    assert found["phases"]["detected"] == pytest.approx(0.1)
    assert found["phases"]["formed"] == pytest.approx(0.6)
    assert found["phases"]["step"] == pytest.approx(0.4)
    assert found["moved_bytes"] == 10 and found["hash"] == "p"


def _row(error: float, *, same: bool = True) -> dict[str, object]:
    return {
        "case": f"c{error}",
        "error": error,
        "plan_hash": {"predicted": "a", "measured": ["a"] if same else ["a", "b"]},
    }


def test_the_bar_is_of_the_median_and_of_equal_plans() -> None:
    assert report_of([_row(0.1), _row(-0.2), _row(0.9)])["met"]
    assert not report_of([_row(BAR + 0.01), _row(-0.3), _row(0.0)])["met"]
    assert not report_of([_row(0.0), _row(0.0, same=False)])["met"]
    assert json.dumps(report_of([_row(0.1)]))


def test_options_without_effect_are_refused() -> None:
    assert not _problems(PredictArgs(recovery=True, only=("tp 2",)))
    wrong = _problems(PredictArgs(recovery=True, real=True, kills=0))
    assert {p.where for p in wrong} == {"--real", "--kills"}
    assert {p.where for p in _problems(PredictArgs(kills=4))} == {"--kills"}
    assert {p.where for p in _problems(PredictArgs(recovery=True, only=("tp2",)))} == {"--only"}
