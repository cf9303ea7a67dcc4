"""Who is slow, and whether the others go on without it: the rule, and the work that times are compared by."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from phalanx.core.config import ModelConfig, PipelineConfig, RouterConfig
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.mapping.placement import LayerPlacements, Placement
from phalanx.plan.model.model import PRESETS, flops_per_token, resolve_model
from phalanx.plan.pipeline import make_pipeline
from phalanx.plan.recovery.planner import RecoveryPlanner
from phalanx.plan.recovery.stragglers import (
    REPORT_FACTOR,
    RankPace,
    StragglerRule,
    Streaks,
    Verdict,
    judge,
    slowness,
    work_of_ranks,
)

pytestmark = pytest.mark.unit
RULE = StragglerRule(factor=2.5, steps=5, least_ranks=2, least_hosts=2)


def paces(*seconds: float, work: tuple[float, ...] = (), hosts: str = "") -> list[RankPace]:
    names = hosts or "abcdefghijklmnop"[: len(seconds)]
    works = work or (1.0,) * len(seconds)
    return [
        RankPace(uid=f"{h}.{i}", host=h, seconds=s, work=w)
        for i, (h, s, w) in enumerate(zip(names, seconds, works, strict=True))
    ]


def play(steps: list[list[RankPace]], rule: StragglerRule = RULE) -> list[Verdict | None]:
    streaks, out = Streaks(), list[Verdict | None]()
    for step in steps:
        streaks, verdict = judge(step, streaks, rule)
        out.append(verdict)
    return out


def test_a_slow_one_goes_after_so_many_steps_in_a_row_and_not_before() -> None:
    told = play([paces(1, 1, 4, 1)] * 6)
    assert told[:4] == [None] * 4
    assert told[4] is not None and told[4].put_out and told[4].uids == ("c.2",) and told[4].slowness == 4.0
    assert "4.0 times as slow as the others for 5 steps" in told[4].why


def test_one_quick_step_begins_the_count_anew() -> None:
    slow, quick = paces(1, 1, 4, 1), paces(1, 1, 1, 1)
    assert play([slow] * 4 + [quick] + [slow] * 4) == [None] * 9


def test_one_long_step_puts_nobody_out() -> None:
    assert play([paces(1, 1, 1, 1)] * 9 + [paces(1, 1, 500, 1)] + [paces(1, 1, 1, 1)] * 9) == [None] * 19


def test_where_everybody_is_slow_nobody_is() -> None:
    assert play([paces(*[1.0 + 9 * (i > 3)] * 8) for i in range(30)]) == [None] * 30
    assert set(slowness(paces(9, 9, 9, 9)).values()) == {1.0}


@pytest.mark.parametrize("slow", [2, 3])
def test_half_of_the_hosts_or_more_are_never_put_out(slow: int) -> None:
    for told in play([paces(*[6.0] * slow, *[1.0] * (4 - slow))] * 20):
        assert told is None or not told.put_out
    found = play([paces(6, 6, 1, 1)] * 5)[-1]
    assert found is not None and "2 of 4 are slow" in found.why


def test_of_several_the_slowest_goes_first() -> None:
    found = play([paces(1, 4, 1, 6, 1, 1, 1, 1)] * 5)[-1]
    assert found is not None and found.put_out and found.host == "d"


def test_a_busier_rank_is_not_slow() -> None:
    """The holder of the experts that everybody chooses takes five times as long for five times the work."""
    assert play([paces(1, 5, 1, 1, work=(1, 5, 1, 1))] * 20) == [None] * 20
    found = play([paces(1, 20, 1, 1, work=(1, 5, 1, 1))] * 5)[-1]
    assert found is not None and found.put_out and found.slowness == 4.0


def test_a_rank_with_little_work_is_not_slow_for_its_overhead() -> None:
    """It has no micro-batch of its own, and takes half as long as the others for a tenth of the work."""
    assert play([paces(1, 0.5, 1, 1, work=(1, 0.1, 1, 1))] * 20) == [None] * 20
    assert play([paces(1, 1, 1, 1, work=(1, 0.0, 1, 1))] * 20) == [None] * 20


def test_a_host_is_as_slow_as_its_slowest_rank_and_goes_whole() -> None:
    found = play([paces(1, 1, 1, 5, 1, 1, hosts="aabbcc")] * 5)[-1]
    assert found is not None and found.put_out and found.uids == ("b.2", "b.3")


def test_a_slow_host_with_many_ranks_does_not_hide_among_them() -> None:
    """All ranks of host a are slow: they are not measured by one another."""
    found = play([paces(*[4.0] * 8, *[1.0] * 8, hosts="a" * 8 + "bbbbcccc")] * 5)[-1]
    assert found is not None and found.put_out and found.host == "a"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (replace(RULE, factor=0.0), "resilience.straggler = 0 excludes no rank"),
        (replace(RULE, least_ranks=4), "3 ranks would be left and the run needs 4"),
        (replace(RULE, least_hosts=4), "3 holders would be left, and resilience.f asks for 4"),
        (replace(RULE, fits=lambda ranks: ranks % 2 == 0), "3 ranks have no mapping of the same degrees"),
    ],
)
def test_it_stays_where_the_run_needs_it_and_that_is_said(rule: StragglerRule, said: str) -> None:
    found = play([paces(1, 1, 4, 1)] * 5, rule)[-1]
    assert found is not None and not found.put_out and said in found.why


def test_it_stays_where_the_others_would_be_no_faster() -> None:
    """Three ranks: the slow one takes 1.4 times as long, the two others would have 1.5 times as much to do."""
    found = play([paces(1, 1, 1.4)] * 5, replace(RULE, factor=1.2))[-1]
    assert found is not None and not found.put_out and "no faster" in found.why


def test_two_ranks_cannot_tell_who_is_slow_and_one_has_nobody_to_compare_with() -> None:
    found = play([paces(1, 9)] * 5, replace(RULE, least_ranks=1, least_hosts=1))[-1]
    assert found is not None and not found.put_out
    assert play([paces(7)] * 9) == [None] * 9


def test_it_is_told_where_nobody_is_to_be_put_out() -> None:
    off = replace(RULE, factor=0.0)
    assert off.report_factor == REPORT_FACTOR
    assert play([paces(1, 1, REPORT_FACTOR * 0.99, 1)] * 9, off) == [None] * 9
    assert play([paces(1, 1, REPORT_FACTOR * 1.01, 1)] * 5, off)[-1] is not None


def test_noise_puts_nobody_out_and_order_does_not_matter() -> None:
    rng = random.Random(1)
    for _ in range(50):
        steps = [paces(*[rng.lognormvariate(0.0, 0.4) for _ in range(8)]) for _ in range(60)]
        assert play(steps) == [None] * 60
    one = paces(1, 2, 9, 4, 1, 1)
    assert slowness(one) == slowness(one[::-1])
    assert judge(one, Streaks(), RULE)[0] == judge(one[::-1], Streaks(), RULE)[0]


def test_slowness_is_what_its_formula_says() -> None:
    """Time over the larger of two medians of the ranks of all other hosts, here written out, however many there are and whoever has nothing to do."""
    rng = random.Random(7)
    for size in (1, 2, 3, 7, 24):
        names = [rng.choice("abcde") for _ in range(size)]
        values = [rng.choice([0.0, 1.0, rng.random()]) for _ in range(2 * size)]
        told = paces(*values[:size], work=tuple(values[size:]), hosts="".join(names))
        wanted = dict.fromkeys(names, 0.0)
        for one in told:
            others = [p for p in told if p.host != one.host and p.seconds > 0]
            rates = [p.seconds / p.work for p in others if p.work > 0] or [0.0]
            usual_s = max(median(p.seconds for p in others), median(rates) * one.work) if others else one.seconds or 1.0
            wanted[one.host] = max(wanted[one.host], one.seconds / usual_s if others else 1.0)
        assert slowness(told) == wanted


# ---- work


def tiny() -> RecoveryPlanner:
    spec = resolve_model(ModelConfig(preset="tiny"), RouterConfig())
    return RecoveryPlanner(spec=spec, base=Folding(world=4, ep=2), seq_len=32, floor=2)


@pytest.mark.parametrize(
    "folding",
    [Folding(world=4, ep=2), Folding(world=4, ep=4), Folding(world=4, tp=2, ep=2), Folding(world=4, pp=2, ep=2)],
)
def test_work_adds_up_to_that_of_the_model(folding: Folding) -> None:
    run = tiny()
    spec, tokens = run.spec, 2 * 32
    shares = [7 // folding.replicas + (i < 7 % folding.replicas) for i in range(folding.replicas)]
    rng = np.random.default_rng(3)
    counts = np.stack([rng.multinomial(7 * tokens * spec.top_k, rng.dirichlet(np.ones(8))) for _ in spec.moe_layers])
    work = work_of_ranks(
        spec, folding, run.stages(folding), counts.astype(float), microbatches=shares, tokens_of_one=tokens, seq_len=32
    )
    assert sum(work) == pytest.approx(7 * tokens * flops_per_token(spec, 32))


@pytest.mark.parametrize(
    ("preset", "pp", "layers", "mtp"),
    [("tiny", 2, 2, 1), ("laptop", 4, 4, 1), ("laptop", 2, 4, 2), ("laptop", 2, 4, 0), ("deepseek-v3", 16, 61, 1)],
)
def test_ranks_that_take_as_long_as_their_stage_costs_are_not_slow(preset: str, pp: int, layers: int, mtp: int) -> None:
    """Multi-token prediction is all in the stage of the head, dense layers in the first."""
    spec, folding = replace(PRESETS[preset], num_layers=layers, mtp_layers=mtp), Folding(world=2 * pp, pp=pp)
    stages = make_pipeline(PipelineConfig(), spec, pp=pp, seq_len=256).stages
    counts = np.full((len(spec.moe_layers), spec.num_experts), 2 * 256 * spec.top_k / spec.num_experts)
    work = work_of_ranks(spec, folding, stages, counts, microbatches=[1, 1], tokens_of_one=256, seq_len=256)
    assert sum(work) == pytest.approx(2 * 256 * flops_per_token(spec, 256))
    assert work == pytest.approx([256 * stages.stages[folding.coord(rank, "pp")].cost for rank in range(folding.world)])


def test_who_has_the_busy_expert_has_the_work() -> None:
    run = tiny()
    folding, counts = Folding(world=4, ep=4), np.zeros((2, 8))
    counts[:, 5] = 1000.0
    args = {"microbatches": [1] * 4, "tokens_of_one": 64, "seq_len": 32}
    work = work_of_ranks(run.spec, folding, run.stages(folding), counts, **args)  # type: ignore[arg-type]
    row = 18.0 * run.spec.hidden * run.spec.expert_ffn
    assert work[2] - work[0] == pytest.approx(2 * 1000 * row) and work[0] == work[1] == work[3]
    shared = Placement(num_experts=8, slots=(((0, 1, 5), (2, 3, 5), (4, 6, 5), (7, 5, 5)),))
    placed = LayerPlacements(layers=dict.fromkeys(run.spec.moe_layers, shared))
    work = work_of_ranks(run.spec, folding, run.stages(folding), counts, placement=[placed], **args)  # type: ignore[arg-type]
    assert work[3] - work[0] == pytest.approx(2 * 1000 * row / 5) and work[0] == pytest.approx(work[2])


def test_the_work_of_thousands_of_ranks_is_counted_at_once() -> None:
    """Every member counts it in every step. For half as many it was 7 s of a processor, and grew with their square."""
    spec, folding = PRESETS["mixtral-8x7b"], Folding(world=2048, ep=8)
    stages = make_pipeline(PipelineConfig(), spec, pp=1, seq_len=64).stages
    counts, begin_s = np.full((len(spec.moe_layers), 8), 2048 * 64 * 2 / 8), time.process_time()
    args = {"microbatches": [1] * 2048, "tokens_of_one": 64, "seq_len": 64}
    plain = work_of_ranks(spec, folding, stages, counts, **args)  # type: ignore[arg-type]
    shared = Placement(num_experts=8, slots=(tuple((i % 8, (i + 1) % 8) for i in range(2048)),))
    placed = [LayerPlacements(layers=dict.fromkeys(spec.moe_layers, shared))]
    folding = Folding(world=2048, ep=2048)
    replicas = work_of_ranks(spec, folding, stages, counts, placement=placed, **args)  # type: ignore[arg-type]
    assert time.process_time() - begin_s < 5
    assert plain == pytest.approx([64 * flops_per_token(spec, 64)] * 2048) and replicas == pytest.approx(plain)
