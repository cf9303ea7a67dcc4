"""Pipeline schedules: every one passes an independent check, has the bubble and the memory of the literature, and planted faults are seen."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from memory_help import small_spec
from tiers import times

from phalanx.core.config import PipelineConfig, Recipe, TrainConfig
from phalanx.core.errors import PlanError
from phalanx.plan.mapping import make_folding
from phalanx.plan.pipeline.schedule import make
from phalanx.plan.pipeline.schedule.check import order_problems
from phalanx.plan.pipeline.schedule.clock import MOST_S, ScheduleCosts, simulate, uniform_costs
from phalanx.plan.pipeline.schedule.make import (
    SCHEDULES,
    Action,
    Schedule,
    make_schedule,
    nearest_schedule,
    schedule_problems,
)
from phalanx.plan.pipeline.schedule.orders import round_sizes
from phalanx.train.setup import resolve_pipeline

pytestmark = pytest.mark.unit


def virtuals(name: str, *, most: int) -> list[int]:
    needed = SCHEDULES[name].virtual
    return [needed] if needed is not None else list(range(1, most + 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_small_schedule_passes_the_check_and_holds_exactly_what_it_promises(name: str) -> None:
    for pp in range(1, 6):
        for virtual in virtuals(name, most=3):
            for m in range(1, 13):
                made = make_schedule(name, pp=pp, virtual=virtual, num_microbatches=m)
                made.check()
                assert made.peak_live == made.max_live, (pp, virtual, m)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 16), st.integers(1, 6), st.integers(1, 70))
def test_every_schedule_passes_the_check(name: str, pp: int, virtual: int, m: int) -> None:
    made = make_schedule(name, pp=pp, virtual=SCHEDULES[name].virtual or virtual, num_microbatches=m)
    made.check()
    assert len({order[0].microbatch for order in made.actions}) == 1  # all ranks start with microbatch 0
    assert made.chunk_of_stage == tuple(made.stages_of(made.rank_of_stage[s]).index(s) for s in range(made.num_stages))


def test_an_order_in_full() -> None:
    made = make_schedule("1f1b", pp=2, virtual=1, num_microbatches=3)
    assert [" ".join(map(str, order)) for order in made.actions] == [
        "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2",
        "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2",
    ]
    split = make_schedule("zero_bubble", pp=2, virtual=1, num_microbatches=3)
    assert " ".join(map(str, split.actions[1])) == "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2"
    vee = make_schedule("zbv", pp=2, virtual=2, num_microbatches=3)
    assert vee.rank_of_stage == (0, 1, 1, 0) and vee.splits_backward and not made.splits_backward
    assert (made.pp, vee.virtual, vee.num_stages, vee.stages_of(0)) == (2, 2, 4, (0, 3))


def test_interleaved_with_one_virtual_stage_is_1f1b() -> None:
    a = make_schedule("1f1b", pp=4, virtual=1, num_microbatches=7)
    b = make_schedule("interleaved_1f1b", pp=4, virtual=1, num_microbatches=7)
    assert a.actions == b.actions and a.max_live == b.max_live


def test_rounds_cover_all_microbatches_and_are_never_too_short() -> None:
    for pp in range(1, 9):
        for m in range(1, 60):
            sizes = round_sizes(pp, m)
            assert sum(sizes) == m and min(sizes) >= min(pp, m) and max(sizes) - min(sizes) <= 1
            assert list(sizes) == sorted(sizes, reverse=True)


# ---- bubble and memory of the literature ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("f", "b"), [(1.0, 2.0), (1.0, 1.0), (3.0, 4.5)])
def test_bubbles_of_gpipe_and_1f1b(f: float, b: float) -> None:
    for name in ("gpipe", "1f1b"):
        for pp in (1, 2, 4, 7):
            for m in (pp, pp + 1, 3 * pp + 2):
                line = simulate(
                    make_schedule(name, pp=pp, virtual=1, num_microbatches=m), uniform_costs(pp, forward=f, backward=b)
                )
                assert line.bubble == pytest.approx((pp - 1) / (m + pp - 1), abs=1e-12)
                assert line.makespan == pytest.approx((m + pp - 1) * (f + b), rel=1e-12)
                assert line.idle == pytest.approx([(pp - 1) * (f + b)] * pp)


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b"])
def test_bubble_of_interleaved_stages_for_any_number_of_microbatches(name: str) -> None:
    for pp in (2, 3, 4, 8):
        for virtual in (1, 2, 3, 5):
            for m in (pp, pp + 1, 2 * pp - 1, 2 * pp, 3 * pp + 1):
                line = simulate(make_schedule(name, pp=pp, virtual=virtual, num_microbatches=m))
                assert line.bubble == pytest.approx((pp - 1) / (virtual * m + pp - 1), abs=1e-12), (pp, virtual, m)


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (2, 3, 1), (3, 2, 1), (1, 1.2, 0.8), (1, 1, 1.5), (1, 2, 3)])
def test_bubble_of_zero_bubble(f: float, i: float, w: float) -> None:
    """(p-1)(F + I - W), the ZB-H1 of arXiv 2401.10241, where W is the smallest; else what the pipeline's ends leave."""
    for pp in (2, 4, 8):
        for virtual in (1, 2, 3):
            made = make_schedule("zero_bubble", pp=pp, virtual=virtual, num_microbatches=3 * pp)
            line = simulate(made, uniform_costs(made.num_stages, forward=f, input_grad=i, weight_grad=w))
            assert line.idle == pytest.approx([(pp - 1) * (f + i - min(f, i, w))] * pp), (pp, virtual)
            if virtual == 1:
                assert made.max_live == (pp,) * pp


@pytest.mark.parametrize(("name", "most"), [("zbv", 0), ("dualpipev", 1)])
def test_v_shapes_lose_the_way_to_the_last_rank_only(name: str, most: int) -> None:
    """With F = I = W a rank waits for the first microbatch (p-1 forwards), and never again; 2p (2p+1) halves of a rank held."""
    for pp in (1, 2, 3, 4, 8):
        for m in (2 * pp, 2 * pp + 1, 5 * pp):
            line = simulate(make_schedule(name, pp=pp, virtual=2, num_microbatches=m))
            assert line.idle == pytest.approx([pp - 1] * pp)
            last = line.spans[-1]
            assert all(b.start == pytest.approx(a.end) for a, b in itertools.pairwise(last))
            assert line.peak_live == (min(2 * pp + most, 2 * m),) * pp


def test_memory_of_1f1b_and_interleaved() -> None:
    assert make_schedule("1f1b", pp=4, virtual=1, num_microbatches=9).max_live == (4, 3, 2, 1)
    assert make_schedule("gpipe", pp=4, virtual=2, num_microbatches=9).max_live == (18,) * 4
    pp, virtual = 8, 3
    live = make_schedule("interleaved_1f1b", pp=pp, virtual=virtual, num_microbatches=32).max_live
    assert live[0] == pp * virtual + pp - 1  # L (1 + (p-1)/(p v)) in units of the L/(p v) of a stage


@pytest.mark.parametrize(
    ("pp", "rows"),
    [
        (2, ((107.25, 107.0, 99.5, 98.5), (115.5, 115.0, 100.0, 99.0), (132.0, 131.0, 101.0, 100.0))),
        (4, ((121.75, 118.0, 106.5, 103.5), (138.5, 131.0, 108.0, 105.0), (172.0, 157.0, 111.0, 108.0))),
        (8, ((135.75, 134.0, 120.5, 113.5), (154.5, 151.0, 124.0, 117.0), (192.0, 185.0, 131.0, 124.0))),
    ],
)
def test_transfers_cost_what_an_independent_simulation_found(pp: int, rows: tuple[tuple[float, ...], ...]) -> None:
    """Table 5.4 of the resharding reference: blocking 1F1B, overlapped 1F1B, eager, eager with deferred W; m = 32."""
    plain, ahead, deferred = (
        make_schedule("1f1b", pp=pp, virtual=1, num_microbatches=32),
        make_schedule("eager_1f1b", pp=pp, virtual=1, num_microbatches=32),
        make_schedule("eager_1f1b_split", pp=pp, virtual=1, num_microbatches=32),
    )
    for p2p, expected in zip((0.25, 0.5, 1.0), rows, strict=True):
        free, blocking = uniform_costs(pp, p2p=p2p), uniform_costs(pp, p2p=p2p, blocking=True)
        found = (
            simulate(plain, blocking).makespan,
            simulate(plain, free).makespan,
            simulate(ahead, free).makespan,
            simulate(deferred, free).makespan,
        )
        assert found == pytest.approx(expected)
        assert found[2] == pytest.approx((32 + pp - 1) * 3 + 2 * (pp - 1) * p2p)
        assert found[3] == pytest.approx(found[2] - (pp - 1))


def test_uneven_stages_cost_at_least_the_slowest_rank() -> None:
    made = make_schedule("interleaved_1f1b", pp=3, virtual=2, num_microbatches=7)
    rng = random.Random(3)
    f, i, w = (tuple(rng.uniform(0.5, 2) for _ in range(6)) for _ in range(3))
    costs = ScheduleCosts(
        forward=f, backward=tuple(x + y for x, y in zip(i, w, strict=True)), input_grad=i, weight_grad=w, p2p=0.1
    )
    line = simulate(made, costs)
    for rank, spans in enumerate(line.spans):
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans))
        work = 7 * sum(f[s] + i[s] + w[s] for s in made.stages_of(rank))
        assert line.busy[rank] == pytest.approx(work) and line.makespan >= work
    ends = {span.action: span.end for spans in line.spans for span in spans}
    for spans in line.spans:
        for (kind, stage, mb), start, _ in spans:
            source = Action(kind, stage - 1 if kind == "F" else stage + 1, mb)
            if source in ends:
                assert start >= ends[source] + 0.1 - 1e-12


# ---- forwards ahead ---------------------------------------------------------------------------------------------------------------


EAGER = ("eager_1f1b", "eager_1f1b_split")


def legal_extras(pp: int) -> list[tuple[int, ...]]:
    """All numbers of forwards ahead, by rank, with which every rank gets its forwards before it needs them."""
    every = itertools.product(*(range(pp - rank) for rank in range(pp)))
    return [extra for extra in every if all(b <= a + 1 for a, b in itertools.pairwise(extra))]


@pytest.mark.parametrize("name", EAGER)
def test_eager_holds_exactly_one_more_for_each_rank_behind(name: str) -> None:
    for pp in range(1, 7):
        for m in (1, 2, pp, 2 * pp - 1, 2 * pp, 5 * pp):
            made = make_schedule(name, pp=pp, virtual=1, num_microbatches=m)
            assert made.peak_live == tuple(min(m, 2 * (pp - rank) - 1) for rank in range(pp))


@pytest.mark.parametrize("name", EAGER)
def test_any_legal_number_of_forwards_ahead_passes_the_check_and_no_other_is_let_through(name: str) -> None:
    for pp in (1, 2, 3, 4):
        legal = legal_extras(pp)
        for extra in itertools.product(range(pp + 1), repeat=pp):
            found = schedule_problems(name, pp=pp, virtual=1, num_microbatches=9, extra_warmup=extra)
            if pp > 1:
                assert (extra in legal) == (not found), extra
        for extra in legal:
            for m in (1, 3, 9):
                made = make_schedule(name, pp=pp, virtual=1, num_microbatches=m, extra_warmup=extra)
                made.check()
                assert made.peak_live == tuple(min(m, pp - r + e) for r, e in enumerate(extra))
                assert made.extra_warmup == extra


def test_none_ahead_is_1f1b_and_each_number_has_its_hash() -> None:
    plain = make_schedule("1f1b", pp=3, virtual=1, num_microbatches=7)
    made = [make_schedule("eager_1f1b", pp=3, virtual=1, num_microbatches=7, extra_warmup=e) for e in legal_extras(3)]
    assert made[0].actions == plain.actions and made[0].max_live == plain.max_live
    assert len({schedule.hash for schedule in [*made, plain]}) == len(made) + 1
    assert "forwards ahead of 1F1B, by rank: 2 1 0" in made[-1].explain()
    # orders of accumulation are those of 1F1B
    for rank in range(3):
        assert [a for a in made[-1].actions[rank] if a.kind == "B"] == [a for a in plain.actions[rank] if a.kind == "B"]


def test_numbers_that_would_wait_for_ever_really_would() -> None:
    """Rank 1 wants five forwards before its first backward, rank 0 gives four before it waits for that backward's gradient."""
    made = make_schedule("eager_1f1b", pp=4, virtual=1, num_microbatches=9, extra_warmup=(0, 1, 1, 0))
    wished = make_schedule("eager_1f1b", pp=4, virtual=1, num_microbatches=9, extra_warmup=(3, 2, 1, 0))
    orders = [list(made.actions[0]), list(wished.actions[1]), *map(list, made.actions[2:])]
    assert any("deadlocks" in problem for problem in problems_of(orders, made))
    problem = schedule_problems("eager_1f1b", pp=4, virtual=1, num_microbatches=9, extra_warmup=(0, 2, 1, 0))[0]
    assert "extra_warmup[1] = 2: must be at most 1" in str(problem) and "nearest legal: 0 1 1 0" in str(problem)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("1f1b", (1,), "has no effect: 1f1b runs no extra warm-up forwards"),
        ("eager_1f1b", (1, 1), "gives one number for each of the 4 ranks, or one for all; nearest legal: 1 1 0 0"),
        ("eager_1f1b", (4,), "must be 0 to 3"),
        ("eager_1f1b", (3, 2, 2, 0), "extra_warmup[2] = 2: must be 0 to 1"),
    ],
)
def test_wrong_numbers_ahead_are_named(name: str, given: tuple[int, ...], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        make_schedule(name, pp=4, virtual=1, num_microbatches=8, extra_warmup=given)
    assert says in str(caught.value)


@pytest.mark.parametrize("fault", ["fewer", "other numbers"])
def test_the_check_sees_another_number_of_forwards_ahead(fault: str) -> None:
    made = make_schedule("eager_1f1b", pp=3, virtual=1, num_microbatches=8)
    if fault == "fewer":
        plain = make_schedule("1f1b", pp=3, virtual=1, num_microbatches=8)
        broken = dataclasses.replace(made, actions=(plain.actions[0], *made.actions[1:]))
    else:
        broken = dataclasses.replace(made, extra_warmup=(1, 1, 0))
    with pytest.raises(PlanError, match="forwards before its first backward"):
        broken.check()


# ---- the check sees faults --------------------------------------------------------------------------------------------------------


def problems_of(orders: list[list[Action]], made: Schedule) -> list[str]:
    found = order_problems(orders, made.rank_of_stage, num_microbatches=made.num_microbatches, max_live=made.max_live)
    return [str(problem) for problem in found]


def faulty(fault: str) -> list[str]:
    """Problems of a schedule with one planted fault."""
    made = make_schedule("zero_bubble", pp=3, virtual=1, num_microbatches=4)
    orders = [list(order) for order in made.actions]
    at = orders[1].index
    if fault == "left out":
        orders[1].remove(Action("W", 1, 2))
    elif fault == "twice":
        orders[1].append(Action("F", 1, 0))
    elif fault == "both":
        orders[1].append(Action("B", 1, 0))
    elif fault == "wrong rank":
        orders[0].append(orders[1].pop())
    elif fault == "unknown":
        orders[1].append(Action("F", 1, 9))
    elif fault == "W before I":
        i, j = at(Action("I", 1, 3)), at(Action("W", 1, 3))
        orders[1][i], orders[1][j] = orders[1][j], orders[1][i]
    elif fault == "backward first":
        i, j = at(Action("F", 1, 3)), at(Action("I", 1, 3))
        orders[1][i], orders[1][j] = orders[1][j], orders[1][i]
    elif fault == "accumulation":
        i, j = at(Action("W", 1, 2)), at(Action("W", 1, 3))
        orders[1][i], orders[1][j] = orders[1][j], orders[1][i]
    elif fault == "deadlock":  # rank 0 wants a gradient before it sends the activation that rank 2 needs first
        orders[2].sort(key=lambda a: (a.kind == "W", "FI".find(a.kind), a.microbatch))
        orders[0] = [a for mb in range(4) for a in (Action("F", 0, mb), Action("I", 0, mb), Action("W", 0, mb))]
    elif fault == "memory":
        orders[0].sort(key=lambda a: ("FIW".index(a.kind), a.microbatch))
        made = dataclasses.replace(made, max_live=(3, 3, 3))
    return problems_of(orders, made)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("left out", "schedule.stage1.microbatch2"),
        ("twice", "passed forward once"),
        ("both", "one B, or one I and one W"),
        ("wrong rank", "the stage is on another rank"),
        ("unknown", "microbatches 0 .. 3"),
        ("W before I", "comes after I1.3"),
        ("backward first", "comes after F1.3"),
        ("accumulation", "order decides bits"),
        ("deadlock", "deadlocks"),
        ("memory", "holds more activations than the 3"),
    ],
)
def test_the_check_sees(fault: str, said: str) -> None:
    assert any(said in problem for problem in faulty(fault)), faulty(fault)


def can_finish(orders: list[list[Action]], made: Schedule) -> bool:
    """Another way to ask whether in-order ranks come to the end: no cycle among 'before' of ranks and stages."""
    before: dict[Action, set[Action]] = {a: set() for order in orders for a in order}
    for order in orders:
        for a, b in itertools.pairwise(order):
            before[b].add(a)
    for a in before:
        step = {"F": -1, "B": 1, "I": 1}.get(a.kind)
        if step is not None and 0 <= a.stage + step < made.num_stages:
            kinds = "F" if a.kind == "F" else "BI"
            before[a] |= {x for kind in kinds if (x := Action(kind, a.stage + step, a.microbatch)) in before}  # type: ignore[arg-type]
    done: set[Action] = set()
    while True:
        ready = {a for a, needs in before.items() if a not in done and needs <= done}
        if not ready:
            return len(done) == len(before)
        done |= ready


@settings(max_examples=times(150, 50), deadline=None)
@given(st.data())
def test_the_check_agrees_with_a_search_for_cycles(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SCHEDULES)))
    virtual = SCHEDULES[name].virtual or data.draw(st.integers(1, 2))
    made = make_schedule(name, pp=data.draw(st.integers(2, 4)), virtual=virtual, num_microbatches=4)
    made = dataclasses.replace(made, max_live=(10**6,) * made.pp)
    orders = [list(order) for order in made.actions]
    for _ in range(data.draw(st.integers(1, 3))):
        order = orders[data.draw(st.integers(0, made.pp - 1))]
        i = data.draw(st.integers(0, len(order) - 2))
        j = data.draw(st.integers(i + 1, min(len(order) - 1, i + 6)))
        order.insert(i, order.pop(j))
    found = problems_of(orders, made)
    local = [p for p in found if "comes after" in p or "order decides" in p]
    if not local:
        assert (not found) == can_finish(orders, made), found
    changed = dataclasses.replace(made, actions=tuple(map(tuple, orders)))
    if found and not local:
        with pytest.raises(PlanError, match="deadlocks"):
            simulate(changed)


# ---- names, errors, sameness ------------------------------------------------------------------------------------------------------


def test_all_problems_at_once_with_legal_values() -> None:
    with pytest.raises(PlanError) as caught:
        make_schedule("1f1c", pp=0, virtual=-1, num_microbatches=0)
    text = str(caught.value)
    assert len(caught.value.problems) == 4 and "did you mean '1f1b'" in text
    assert "schedule.pp = 0: must be at least 1; nearest legal: 1" in text
    assert "or interleaved_1f1b" in str(schedule_problems("1f1b", pp=2, virtual=2, num_microbatches=2)[0])
    assert "nearest legal: 2" in str(schedule_problems("zbv", pp=2, virtual=3, num_microbatches=2)[0])
    for asked in (("1f1b", 0, 5, -1), ("zbv", 4, 1, 3), ("no", 2, 0, 8)):
        name, pp, virtual, m = nearest_schedule(asked[0], pp=asked[1], virtual=asked[2], num_microbatches=asked[3])
        make_schedule(name, pp=pp, virtual=virtual, num_microbatches=m).check()


def test_costs_are_checked() -> None:
    made = make_schedule("1f1b", pp=2, virtual=1, num_microbatches=2)
    with pytest.raises(PlanError) as caught:
        simulate(made, uniform_costs(3, forward=0, p2p=-1))
    assert len(caught.value.problems) == 6
    with pytest.raises(PlanError, match=r"costs\.forward = 5e\+306: a pass takes a positive time, 1e\+100 at most"):
        simulate(made, uniform_costs(2, forward=5e306))
    with pytest.raises(PlanError, match=r"costs = 2: .* 1e\+09 times as long as the shortest pass at most; use 1e-08"):
        simulate(made, uniform_costs(2, forward=1e-17))
    with pytest.raises(PlanError, match=r"costs = 1e\+20: "):
        simulate(made, uniform_costs(2, p2p=1e20))
    longest = simulate(
        made, uniform_costs(2, forward=MOST_S, input_grad=MOST_S / 2, weight_grad=MOST_S / 2, p2p=MOST_S)
    )
    assert 0 < longest.bubble < 1


def test_explain_says_what_matters() -> None:
    text = make_schedule("zbv", pp=2, virtual=2, num_microbatches=4).explain()
    assert "2 ranks x 2 virtual stages, 4 microbatches" in text and "0 1 1 0" in text and "4 4" in text


def test_same_plan_whatever_the_hash_seed() -> None:
    code = (
        "from phalanx.plan.pipeline.schedule.make import make_schedule as m; from phalanx.plan.pipeline.comm import plan_pipeline as p;"
        "print(p(m('dualpipev', pp=3, virtual=2, num_microbatches=7)).hash)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_an_installed_schedule_that_forgets_a_pass_is_refused_when_a_run_is_set_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = SCHEDULES["1f1b"]
    short = dataclasses.replace(plain, order=lambda *sizes: plain.order(*sizes)[: -1 if sizes[3] > 4 else None])
    monkeypatch.setattr(make, "extensions", lambda group, *, taken: {"short": SimpleNamespace(load=lambda kind: short)})
    recipe = Recipe(pipeline=PipelineConfig(schedule="short"), train=TrainConfig(global_batch=16, micro_batch=2))
    make.schedules.cache_clear()
    try:
        with pytest.raises(PlanError, match=r"microbatch7 = {'F': 1, 'B': 0"):
            resolve_pipeline(recipe, small_spec(), make_folding(world=2, pp=2))
    finally:
        make.schedules.cache_clear()
