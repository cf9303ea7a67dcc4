"""Which passes are pairs: neighbours that do not need each other, no rank deadlocks, and the plan's clock says that it can pay."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from itertools import pairwise

import pytest

from phalanx.core.config import (
    DispatchConfig,
    FoldingConfig,
    LaunchConfig,
    PipelineConfig,
    Recipe,
    TrainConfig,
)
from phalanx.core.errors import PlanError
from phalanx.core.rules import recipe_problems
from phalanx.plan.model.model import PRESETS
from phalanx.plan.pipeline.comm import Run, plan_pipeline
from phalanx.plan.pipeline.run import make_pipeline
from phalanx.plan.pipeline.schedule.clock import Pair, simulate, uniform_costs
from phalanx.plan.pipeline.schedule.make import SCHEDULES, Action, Schedule, make_schedule
from phalanx.plan.pipeline.schedule.pairs import PAYS_AT, break_even, choose_pairs, neighbour_pairs, why_no_pairs
from phalanx.plan.recipe import run_problems

pytestmark = pytest.mark.unit


def schedules() -> Iterator[Schedule]:
    """Every schedule with 1 to 4 ranks, all its virtual stages up to 3, and 1 to 9 micro-batches."""
    for name, rule in SCHEDULES.items():
        for pp in (1, 2, 3, 4):
            for virtual in (rule.virtual,) if rule.virtual else (1, 2, 3):
                if virtual > 1 and name in ("1f1b", "eager_1f1b", "eager_1f1b_split"):
                    continue
                for m in (1, 2, 3, 5, 9):
                    yield make_schedule(name, pp=pp, virtual=virtual, num_microbatches=m)


def all_pairs(schedule: Schedule) -> tuple[Pair, ...]:
    return tuple(pair for order in schedule.actions for pair in neighbour_pairs(order))


def test_every_schedule_comes_to_its_end_with_all_of_its_pairs() -> None:
    """On the clock, and with sends and receives that block: `check` runs the programs so."""
    found = 0
    for schedule in schedules():
        pairs = all_pairs(schedule)
        plan = plan_pipeline(schedule, pairs=pairs)
        plan.check()
        found += len(pairs)
        for rank, order in enumerate(schedule.actions):
            posted = plan.posted(rank, ahead=2)
            runs = [op.action for op in posted if isinstance(op, Run)]
            assert tuple(runs) == order
            together = {(a.action, b.action) for a, b in pairwise(posted) if isinstance(a, Run) and isinstance(b, Run)}
            assert set(neighbour_pairs(order)) <= together
    assert found > 1500


def test_the_two_passes_of_a_pair_do_not_need_each_other() -> None:
    for schedule in schedules():
        for first, second in all_pairs(schedule):
            assert first.kind != "F" and second.kind == "F"
            assert first.microbatch != second.microbatch  # neither can be an input of the other, near or far


def test_pairs_of_the_other_kind_would_wait_for_ever() -> None:
    """Why a forward pass is never paired with the backward pass behind it."""
    schedule = make_schedule("1f1b", pp=2, virtual=1, num_microbatches=4)
    first, second = schedule.actions
    mixed = [(first[1], first[2]), (second[1], second[2])]
    assert [str(a) for pair in mixed for a in pair] == ["F0.1", "B0.0", "B1.0", "F1.1"]
    with pytest.raises(PlanError, match="deadlocks"):
        simulate(schedule, pairs=mixed)


def test_peak_of_activations_grows_by_one_at_most() -> None:
    for schedule in schedules():
        seconds = dict(all_pairs(schedule))
        for order, peak in zip(schedule.actions, schedule.peak_live, strict=True):
            swapped: list[Action] = []
            for action in order:  # the forward pass begins before the backward pass has ended
                if swapped and seconds.get(swapped[-1]) == action:
                    swapped.insert(-1, action)
                else:
                    swapped.append(action)
            live = most = 0
            split = {(a.stage, a.microbatch) for a in order if a.kind == "W"}
            for a in swapped:
                live += (a.kind == "F") - (a.kind == "W" or (a.kind == "B" and (a.stage, a.microbatch) not in split))
                most = max(most, live)
            assert most <= peak + 1


def test_without_a_pipeline_each_backward_pass_is_beside_the_next_forward_pass() -> None:
    schedule = make_schedule("1f1b", pp=1, virtual=1, num_microbatches=4)
    assert [f"{a} {b}" for a, b in choose_pairs(schedule)] == ["B0.0 F0.1", "B0.1 F0.2", "B0.2 F0.3"]
    assert break_even(schedule) == 1.0
    half = simulate(schedule, pairs=choose_pairs(schedule), paired_share=0.5)
    assert half.makespan == 1 + 3 * 1.5 + 2 and half.busy == (half.makespan,)


def test_plain_1f1b_has_no_slack_and_says_what_has() -> None:
    for pp in (2, 3, 4):
        schedule = make_schedule("1f1b", pp=pp, virtual=1, num_microbatches=8)
        assert choose_pairs(schedule) == ()
        (problem,) = why_no_pairs(schedule)
        assert "leave each other no slack" in str(problem) and "eager_1f1b" in problem.hint
        pairs = all_pairs(schedule)
        assert (
            simulate(schedule, pairs=pairs).makespan > 1.4 * simulate(schedule).makespan
        )  # ranks take turns of a whole pair
        assert 0.5 <= break_even(schedule) < PAYS_AT
    for name, virtual in (("eager_1f1b", 1), ("interleaved_1f1b", 2)):
        schedule = make_schedule(name, pp=4, virtual=virtual, num_microbatches=8)
        assert (
            choose_pairs(schedule) == all_pairs(schedule)
            and break_even(schedule) == 1.0
            and why_no_pairs(schedule) == []
        )


def test_what_is_chosen_pays_and_what_is_refused_does_not() -> None:
    for schedule in schedules():
        pairs, every = choose_pairs(schedule), all_pairs(schedule)
        assert bool(pairs) != bool(why_no_pairs(schedule))
        if every:
            ratio = simulate(schedule, pairs=every, paired_share=PAYS_AT).makespan / simulate(schedule).makespan
            assert (ratio < 1) == bool(pairs)


def test_pairs_that_are_no_neighbours_are_refused() -> None:
    schedule = make_schedule("1f1b", pp=1, virtual=1, num_microbatches=3)
    b0, f1, b1, f2 = Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1), Action("F", 0, 2)
    with pytest.raises(PlanError, match=r"'B0\.0 F0\.2': are not neighbours"):
        simulate(schedule, pairs=[(b0, f2)])
    with pytest.raises(PlanError, match=r"'F0\.1': is in two pairs"):
        simulate(schedule, pairs=[(b0, f1), (f1, b1)])
    plan = plan_pipeline(make_schedule("eager_1f1b", pp=2, virtual=1, num_microbatches=4))
    first, second = next((a, b) for a, b in all_pairs(plan.schedule) if a.stage == 1)
    with pytest.raises(PlanError, match="is followed by the other pass of its pair"):
        dataclasses.replace(plan, pairs=((first, second),)).check()


def test_a_plan_tells_its_pairs() -> None:
    spec = dataclasses.replace(PRESETS["tiny"], num_layers=4)
    config = PipelineConfig(schedule="eager_1f1b", pair_passes=True)
    plan = make_pipeline(config, spec, pp=2, seq_len=32).plan(4)
    plain = make_pipeline(dataclasses.replace(config, pair_passes=False), spec, pp=2, seq_len=32).plan(4)
    assert "B0.0 F0.3" in json.loads(plan.to_json())["pairs"]
    assert "pairs" not in json.loads(plain.to_json()) and plan.hash != plain.hash
    assert plan.schedule == plain.schedule


def test_a_pair_takes_its_share_of_both() -> None:
    schedule = make_schedule("eager_1f1b", pp=2, virtual=1, num_microbatches=6)
    costs = uniform_costs(2, forward=1, backward=2, p2p=0.25)
    pairs = choose_pairs(schedule)
    times = [simulate(schedule, costs, pairs=pairs, paired_share=share).makespan for share in (1.0, 0.75, 0.5)]
    assert times == sorted(times, reverse=True) and times[-1] < 0.8 * times[0]
    line = simulate(schedule, costs, pairs=pairs, paired_share=0.5)
    spans = {span.action: span for spans in line.spans for span in spans}
    for first, second in pairs:
        assert (spans[first].start, spans[first].end) == (spans[second].start, spans[second].end)
        assert spans[first].end - spans[first].start == 1.5


# ---- recipes --------------------------------------------------------------------------------------------------------------------


def recipe(*, batch: int = 32, **changes: object) -> Recipe:
    pipeline = PipelineConfig(pair_passes=True, **changes)  # type: ignore[arg-type]
    return Recipe(pipeline=pipeline, train=TrainConfig(global_batch=batch, micro_batch=4))


def said(recipe: Recipe, world: int) -> list[str]:
    return [str(p) for p in run_problems(recipe, world=world, tokenizer_vocab=512) if p.where == "pipeline.pair_passes"]


def test_recipes_that_can_pair() -> None:
    assert said(recipe(), 2) == []
    eager = dataclasses.replace(recipe(schedule="eager_1f1b"), folding=FoldingConfig(pp=2))
    assert said(eager, 4) == []
    staged = dataclasses.replace(recipe(schedule="eager_1f1b"), folding=FoldingConfig(stages=("tp2", "dp2.ep2")))
    assert said(staged, 4) == []


def test_recipes_that_cannot_say_why() -> None:
    (text,) = said(recipe(), 1)
    assert "has nothing to hide: with tp, cp, ep and etp of 1 no pass communicates" in text
    (text,) = said(recipe(batch=8), 2)
    assert "has nothing to pair: each rank has one micro-batch a step" in text and "halve train.micro_batch" in text
    (text,) = said(dataclasses.replace(recipe(), folding=FoldingConfig(pp=2)), 4)
    assert "loses time in 1f1b" in text and "unless a pair takes less than 0." in text
    (text,) = said(dataclasses.replace(recipe(schedule="gpipe"), folding=FoldingConfig(pp=2, ep=2)), 4)
    assert "finds no backward pass with a forward pass right after it in gpipe" in text
    auto = recipe(schedule="eager_1f1b", extra_warmup="auto")
    (text,) = said(dataclasses.replace(auto, folding=FoldingConfig(pp=2, ep=2)), 4)
    assert 'cannot go with pipeline.extra_warmup = "auto"' in text
    (text,) = said(dataclasses.replace(recipe(schedule="zbv", batch=16), folding=FoldingConfig(pp=2, ep=2)), 4)
    assert "gains nothing in zbv" in text or "loses time" in text
    on_gpu = dataclasses.replace(recipe(), launch=LaunchConfig(ranks=2, device="cuda"))
    assert any("pipeline.pair_passes" in p.where and "cuda" in str(p) for p in recipe_problems(on_gpu, world=2))
    assert recipe_problems(dataclasses.replace(recipe(), dispatch=DispatchConfig()), world=2) == []
