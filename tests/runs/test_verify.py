"""The oracle itself: which cases it makes, how it measures, that it finds every planted fault and nothing in health."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from train_help import phalanx as program_in_time

from phalanx.cli.main import main as program
from phalanx.cli.verify import split_overrides
from phalanx.core.config import FoldingConfig, PipelineConfig, Recipe
from phalanx.core.errors import RunError
from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.plan.layout.parameters import Box
from phalanx.plan.mapping.folding import Folding, fit_problems, legal_foldings
from phalanx.plan.mapping.placement import LayerPlacements
from phalanx.plan.mapping.stage_foldings import staged_problems
from phalanx.plan.model.model import PRESETS
from phalanx.plan.moe.dispatch import DispatchSpec, plan_dispatch
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.train.step.transaction import StepResult
from phalanx.train.step.vote import ExchangeTimes
from phalanx.verify import session
from phalanx.verify.compare import RankReport, errors, gradient_errors, not_saved_once, uncovered
from phalanx.verify.forced import force_overlap
from phalanx.verify.many_steps import Curve, judge
from phalanx.verify.numbers import microbatch
from phalanx.verify.pairwise import pairwise
from phalanx.verify.reference import Reference, reference_run
from phalanx.verify.replicas import NEARER, Listener, placement_of
from phalanx.verify.session import CaseTask, VerifyJob, run_job
from phalanx.verify.setups import (
    AXES,
    FACTORS,
    PIPELINES,
    REPLICA_STEPS,
    ROUNDED_AXES,
    SCHEDULES,
    SEQ_LEN,
    SKEW,
    Case,
    Setup,
    default_cases,
    recipe_cases,
    replicated_cases,
    shrink,
    small_model,
)
from phalanx.verify.store import load_outline, load_reference, save_reference
from phalanx_lab.faults.faults import FAULTS, Fault, fault_named


def phalanx(*args: str) -> subprocess.CompletedProcess[str]:
    return program_in_time(*args, timeout_s=280)


# ---- cases ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=2, max_size=7), st.integers(0, 5))
def test_pairwise_covers_every_pair_and_repeats_itself(sizes: list[int], seed: int) -> None:
    factors = {f"f{i}": range(size) for i, size in enumerate(sizes)}
    cases = pairwise(factors, seed=seed)
    for a, b in itertools.combinations(factors, 2):
        assert {(c[a], c[b]) for c in cases} == set(itertools.product(factors[a], factors[b]))
    assert cases == pairwise(factors, seed=seed)
    first, second = sorted(sizes)[-2:]
    assert len(cases) <= max(4, 2.5 * first * second)


def test_dear_levels_are_taken_only_where_a_new_pair_needs_them() -> None:
    factors = {"a": range(9), "b": range(8), "slow": range(3)}
    plain, spared = pairwise(factors), pairwise(factors, dear=("slow",))
    for a, b in itertools.combinations(factors, 2):
        assert {(c[a], c[b]) for c in spared} == set(itertools.product(factors[a], factors[b]))
    assert sum(c["slow"] > 0 for c in spared) < sum(c["slow"] > 0 for c in plain)
    assert len(spared) <= 1.1 * len(plain)


default_cases = cache(default_cases)  # a second or two for 8 and 16 ranks


def plain_cases(world: int) -> list[Case]:
    """Those in which no expert has replicas."""
    return [c for c in default_cases(world) if c.setup.replicas is None]


def uniform_cases(world: int) -> list[Case]:
    """Of these, those in which all stages have the same folding."""
    return [c for c in plain_cases(world) if isinstance(c.folding, Folding)]


@pytest.mark.parametrize(
    ("world", "mappings"), [(1, 1), (2, 9), (4, 36), (8, 90), pytest.param(16, 168, marks=pytest.mark.slow)]
)
def test_default_cases_take_every_mapping_and_meet_every_option(world: int, mappings: int) -> None:
    cases = uniform_cases(world)
    staged = [c for c in plain_cases(world) if c not in cases]
    assert bool(staged) == (world >= 4) and not any(
        staged_problems(c.folding, c.setup.spec, world=world, seq_len=SEQ_LEN)
        for c in staged  # type: ignore[arg-type]
    )
    legal = list(legal_foldings(world, small_model("verify"), seq_len=SEQ_LEN, axes=AXES))
    assert {c.folding for c in cases if c.folding.pp == 1} == set(legal) and len(legal) == mappings
    piped = {(c.folding.pp, c.pipe) for c in cases if c.folding.pp > 1}
    assert piped == {(pp, pipe) for pp in PIPELINES if world % pp == 0 for pipe in SCHEDULES}
    assert all(not fit_problems(c.folding, c.setup.spec, seq_len=SEQ_LEN) for c in cases)
    assert {c.setup.zero for c in cases} == set(FACTORS["zero"])
    assert {c.setup.dispatch.policy for c in cases} == {"dropless", "drop"}
    assert {c.setup.spec.router.aux_scope for c in cases if c.setup.spec.router.aux_loss} == set(FACTORS["aux"][1:])


def test_shards_have_several_holders_on_every_axis_that_leaves_them_copies() -> None:
    cases = [c for c in default_cases(4) if c.setup.holders > 1]
    assert {c.setup.holders for c in cases} == {2, 3} and len({c.folding for c in cases}) == 5
    assert all(c.setup.zero == 1 and c.folding.dp * c.folding.cp >= 2 for c in cases if isinstance(c.folding, Folding))
    assert [c for c in default_cases(1) if c.setup.holders > 1] == []
    assert len([c for c in default_cases(3) if c.setup.holders > 1]) == 1


@pytest.mark.parametrize(("world", "sides"), [(1, 0), (4, 15), (8, 16), (16, 16)])
def test_experts_have_replicas_on_many_mappings(world: int, sides: int) -> None:
    cases = [c for c in default_cases(world) if c.setup.replicas is not None]
    found = {c.folding for c in cases}
    assert len(found) == sides and all(isinstance(f, Folding) and f.edp == 1 and f.ep > 1 for f in found)
    if not sides:
        return
    asked = [c.setup.replicas for c in cases if c.setup.replicas is not None]
    assert max(r.steps for r in asked) == REPLICA_STEPS and {r.kind for r in asked} == {"random", "planned"}
    assert {r.state for r in asked} == {"whole", "sharded"} and {f.pp for f in found if isinstance(f, Folding)} == {
        1,
        2,
    }
    assert {c.setup.dispatch.transport for c in cases} == {"all_to_all", "all_gather"}
    for case in cases:
        assert isinstance(case.folding, Folding) and case.setup.replicas is not None
        slots = case.setup.replicas.slots_per_rank
        assert not fit_problems(case.folding, case.setup.spec, seq_len=SEQ_LEN, slots_per_rank=slots)


@pytest.mark.parametrize("world", [2, 3, 4, 5, 7, 8, 9, 12, 16, 32])
def test_replicas_are_placed_and_judged_whether_or_not_ep_divides_the_experts(world: int) -> None:
    """What each rank does with the cases' replicas, by the plans alone: 16 ranks are too many to start here, and 3 do not divide 8 experts either."""
    cases = replicated_cases(world)
    assert {c.setup.replicas.kind for c in cases if c.setup.replicas} == {"random", "planned"}
    for case in cases:
        assert isinstance(case.folding, Folding) and case.setup.replicas is not None
        ep, num_experts = case.folding.ep, case.setup.spec.num_experts
        loads_E = 1 / np.arange(1, num_experts + 1) ** SKEW.force_skew
        counts_PE = np.tile(np.floor(1000 * loads_E).astype(np.int64), (ep * case.folding.etp, 1))
        stages = case.pipeline.stages.of_rank(0)
        tables = np.tile(counts_PE.sum(0), (len(case.setup.spec.moe_layers), 1))
        placement = placement_of(case.setup, case.folding, stages, 0, loads_LE=tables)
        assert isinstance(placement, LayerPlacements)
        listener = Listener()
        for layer, placed in placement.layers.items():
            assert any(len(placed.holders(e)) > 1 for e in range(num_experts))
            slots_G = [expert for held in placed.slots[0] for expert in held]
            plan = plan_dispatch(counts_PE, slots_G, ep=ep, etp=case.folding.etp)
            listener._hear(layer)(plan, counts_PE)
        with_them, without = listener.max_over_mean
        assert not listener.failures and min(with_them, without) >= 1
        if case.setup.replicas.kind == "planned":
            assert without - 1 >= NEARER * (with_them - 1), (with_them, without)


def test_work_without_replicas_is_that_of_every_expert_on_one_rank() -> None:
    counts_PE = np.array([[7, 1, 2, 2], [1, 1, 1, 1]])
    listener = Listener()
    with pytest.raises(RunError, match="this rank has seen no dispatch"):
        _ = listener.max_over_mean
    hear = listener._hear(0)
    hear(
        plan_dispatch(counts_PE, [0, 1, 2, 3], ep=2, etp=1), counts_PE
    )  # ep divides the experts: the plain placement itself
    assert listener.max_over_mean == (10 / 8, 10 / 8)
    one, alone = (
        np.array([[8, 2, 4, 2]]),
        Listener(),
    )  # 4 experts on 5 ranks: one has none, and the busiest has 8 of 16 rows
    alone._hear(0)(plan_dispatch(one, [0, 0, 1, 0, 2, 0, 3, 0, 2, 1], ep=5, etp=1), one)
    assert alone.max_over_mean[1] == 8 / (16 / 5) and not alone.failures


@pytest.mark.ranks
def test_planned_replicas_of_8_experts_on_3_ranks() -> None:
    """As on 16 ranks, ep does not divide the experts; all that the command does with such a case."""
    case = next(c for c in replicated_cases(3) if c.setup.replicas is not None and c.setup.replicas.kind == "planned")
    (report,) = run_job(VerifyJob(tasks=[CaseTask(case)], world=3, dtype=torch.float64))
    assert not report.failures and 1 <= report.work[0] < report.work[1]


@pytest.mark.parametrize("world", [4, 8, 16])
def test_every_two_options_meet_in_some_case(world: int) -> None:
    """Options that share nothing with each other, as seen in the cases (not in the table they come from)."""
    cases = [c for c in plain_cases(world) if c.folding.pp == 1]

    def seen(case: Case) -> dict[str, object]:
        s = case.setup
        return {
            "recompute": s.recompute,
            "accumulation": s.accumulation,
            "dispatch": (s.dispatch.policy, s.dispatch.drop_by, s.dispatch.drop_scope, s.dispatch.pad_to_capacity),
            "router": (
                s.spec.router.score,
                s.spec.router.softmax_order,
                s.spec.router.num_groups,
                s.spec.router.renormalize,
            ),
            "zero": s.zero,
            "attention side": (case.folding.tp, case.folding.cp),
            "expert side": (case.folding.ep, case.folding.etp),
        }

    rows = [seen(case) for case in cases]
    for a, b in itertools.combinations(rows[0], 2):
        both = {(row[a], row[b]) for row in rows}
        assert len(both) == len({row[a] for row in rows}) * len({row[b] for row in rows}), (a, b)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_options_of_some_cases_only_meet_all_others_in_those(world: int) -> None:
    """Norms of queries and biases belong to grouped attention, a way to exchange keys to cp > 1: elsewhere they are not exercised."""

    def seen(case: Case) -> dict[str, object]:
        s, grouped = case.setup, case.setup.spec.mla is None
        return {
            "qk_norm": s.spec.qk_norm if grouped else None,
            "bias": s.spec.attention_bias if grouped else None,
            "cp_method": s.cp_method if case.folding.cp > 1 else None,
            "mtp": s.spec.mtp_layers,
            "recompute": s.recompute,
            "kernels": s.kernels,
            "accumulation": s.accumulation,
            "packed": s.packed,
            "buckets": s.buckets,
            "aux": s.spec.router.aux_scope if s.spec.router.aux_loss else "none",
            "expert side": (case.folding.ep, case.folding.etp),
        }

    rows = [seen(c) for c in plain_cases(world) if c.folding.pp == 1]
    for a, b in itertools.combinations(rows[0], 2):
        levels = [{row[name] for row in rows} - {None} for name in (a, b)]
        assert set(itertools.product(*levels)) <= {(row[a], row[b]) for row in rows}, (a, b)
    sides = [(c.folding.tp, c.setup.spec.qk_norm) for c in uniform_cases(world) if c.setup.spec.mla is None]
    assert {(tp, norm) for tp, norm in sides} >= set(itertools.product((1, 2), FACTORS["qk_norm"][1:]))


def test_excluded_pairs_do_not_meet_and_all_others_do() -> None:
    factors = {"a": range(4), "b": range(3), "c": range(3), "d": range(2)}

    def excluded(settings: Mapping[str, int]) -> bool:
        return settings.get("a", 0) > 1 and settings.get("b", 0) > 0

    cases = pairwise(factors, excluded=excluded)
    for x, y in itertools.combinations(factors, 2):
        want = {(i, j) for i, j in itertools.product(factors[x], factors[y]) if not excluded({x: i, y: j})}
        assert {(c[x], c[y]) for c in cases} == want


@pytest.mark.parametrize("pp", [2, 4])
def test_pipelines_meet_the_prediction_of_further_tokens(pp: int) -> None:
    cases = [c for c in plain_cases(4) if c.folding.pp == pp and c.setup.spec.mtp_layers]
    assert {c.pipe for c in cases} == set(SCHEDULES) and {c.setup.spec.tied_embeddings for c in cases} == {False, True}


def test_rounding_is_kept_from_two_layers_with_experts_and_no_more() -> None:
    deep = Setup(label="deep", spec=small_model("deep", num_layers=3), dispatch=DispatchSpec())
    with pytest.raises(RunError, match="3 layers with experts: use float64"):
        reference_run(deep, num_microbatches=1, dtype=torch.float32)
    assert not any(c.setup.spec.mtp_layers for c in default_cases(4, axes=ROUNDED_AXES))


def test_a_recipe_keeps_its_pipeline() -> None:
    recipe = Recipe(pipeline=PipelineConfig(virtual=2, layers=(1, 1, 1, 1)), folding=FoldingConfig(cp_method="ulysses"))
    folding = Folding(world=16, tp=2, cp=2, pp=2, ep=8)
    case = recipe_cases(recipe, PRESETS["tiny"], folding, DispatchSpec())[0]
    assert case.pipeline.schedule == "interleaved_1f1b" and case.pipeline.virtual == 2
    assert case.setup.spec.num_layers == 4 and case.setup.cp_method == "ulysses"  # a layer a stage


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_shrinks_onto_every_mapping(preset: str) -> None:
    spec = PRESETS[preset]
    for folding in legal_foldings(8, spec, seq_len=4096, axes=("ep", "etp")):
        small = shrink(spec, folding)
        assert not fit_problems(folding, small, seq_len=SEQ_LEN)
        assert small.num_params < 1_500_000
        assert dataclasses.replace(small.router, force="none") == dataclasses.replace(spec.router, force="none")
        assert (small.shared_ffn > 0) == (spec.shared_ffn > 0) and small.qk_norm == spec.qk_norm
        assert len(small.moe_layers) == 2 and small.top_k == spec.top_k
        cases = recipe_cases(Recipe(), spec, folding, DispatchSpec())
        assert [c.setup.accumulation for c in cases] == [1, 2] and all(c.folding == folding for c in cases)


def test_microbatches_differ_and_are_the_same_whoever_asks() -> None:
    setup = next(c.setup for c in default_cases(8) if c.setup.packed)
    batches = [microbatch(setup, j) for j in range(8)]
    assert len({tuple(b.tokens_BS.flatten().tolist()) for b in batches}) == 8
    assert len({int((b.labels_BS != IGNORE).sum()) for b in batches}) > 3
    again = microbatch(setup, 5)
    assert torch.equal(again.tokens_BS, batches[5].tokens_BS) and again.segments == batches[5].segments
    for b in batches:
        assert all(sum(lengths) == SEQ_LEN for lengths in b.segments) and any(len(x) > 1 for x in b.segments)
        text = [lengths[: len(lengths) - (n > 0)] for lengths, n in zip(b.segments, b.padding, strict=True)]
        starts = [int(b.tokens_BS[s, sum(x[:i])]) for s, x in enumerate(text) for i in range(len(x))]
        assert len(set(starts)) == len(starts)
    assert {sum(n > 0 for n in b.padding) for b in batches} == {0, 1}
    patched = microbatch(setup, 5, patches=[(1, 3, 0)])
    assert int(patched.tokens_BS[1, 3]) == 0


def test_references_are_read_as_they_were_saved(tmp_path: Path) -> None:
    result = StepResult(
        **dict.fromkeys(("step", "loss", "aux_loss", "z_loss", "mtp_loss", "lr", "tokens", "dropped", "entropy"), 1),
        grad_norm=2.5,
        counts_LE=np.arange(4).reshape(1, 4),
        stop=False,
        exchange=ExchangeTimes(),
    )
    tensors = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.tensor(7.0),
        "c": torch.empty(0, 2),
        "d": torch.randn(4).double(),
    }
    saved = Reference(
        patches=(((0, 1, 2),), ()), initial=tensors, gradients={"d": tensors["d"]}, after={}, result=result
    )
    path = tmp_path / "0.reference"
    save_reference(path, saved)
    read, outline = load_reference(path), load_outline(path)
    assert isinstance(read, Reference) and isinstance(outline, Reference)
    assert read.initial.keys() == tensors.keys() and outline.initial == {}
    for name, tensor in tensors.items():
        assert read.initial[name].dtype == tensor.dtype and torch.equal(read.initial[name], tensor)
    assert torch.equal(read.gradients["d"], tensors["d"])
    assert read.patches == outline.patches == saved.patches and outline.result.grad_norm == 2.5
    read.gradients["d"].zero_()
    again = load_reference(path)
    assert isinstance(again, Reference) and torch.equal(again.gradients["d"], tensors["d"])
    save_reference(path, RunError("no such data"))
    assert str(load_reference(path)) == str(load_outline(path)) == "no such data"


# ---- measures ------------------------------------------------------------------------------------------------------------------


def box(tensor: list[float], start: int = 0) -> BoxTensor:
    part = torch.tensor(tensor)
    return BoxTensor("x", (4,), Box((start,), (len(tensor),)), part, primary=False)


def test_error_is_relative_to_the_whole_tensor_and_to_the_norm() -> None:
    want = {"x": torch.tensor([1.0, -8.0, 0.0, 0.0])}
    assert errors([box([1.0, -8.0, 0.0, 0.0])], want, floor=0.0) == {"x": 0.0}
    assert errors([box([2.0], 0), box([0.0], 3)], want, floor=0.0) == {"x": 1 / 8}
    assert errors([box([2.0])], want, floor=100.0) == {"x": 1 / 100}
    assert errors([box([float("nan")])], want, floor=0.0) == {"x": float("inf")}
    assert errors([box([1e-9])], {"x": torch.zeros(4)}, floor=1e-8)["x"] == pytest.approx(0.1)


def test_in_bfloat16_what_cancels_counts_as_half_of_the_root_mean_square() -> None:
    tensors = {"large": [4.0, 4.0], "small.weight": [0.1], "0.wk.bias": [0.1], "k_norm.weight": [8.0]}
    gradients = {name: torch.tensor(values) for name, values in tensors.items()}
    whole = torch.cat(list(gradients.values()))
    want: Any = SimpleNamespace(result=SimpleNamespace(grad_norm=whole.norm().item()), gradients=gradients)
    boxes = [BoxTensor(n, (len(x),), Box((0,), (len(x),)), x + 1e-3, primary=False) for n, x in gradients.items()]
    exact = {"large": 1e-3 / 4, "small.weight": 1e-2, "0.wk.bias": 1e-2, "k_norm.weight": 1e-3 / 8}
    half = 0.5 * whole.square().mean().sqrt().item()
    for dtype, changed in ((torch.float64, {}), (torch.float32, {}), (torch.bfloat16, {"0.wk.bias": 1e-3 / half})):
        found = gradient_errors(boxes, want, dtype=dtype)
        assert found == pytest.approx({**exact, **changed}, rel=1e-3)


def test_what_nobody_compared_is_a_failure() -> None:
    half = RankReport(case=0, rank=0, covered=[("x", [0, 0], [2, 2])])
    rest = RankReport(case=0, rank=1, covered=[("x", [2, 0], [2, 2])])
    assert uncovered({"x": (4, 2)}, [half, rest]) == []
    assert uncovered({"x": (4, 2)}, [half]) == ["x: 4 elements of its gradient were compared on no rank"]


def test_what_nobody_would_save_or_two_would_is_reported() -> None:
    half = RankReport(case=0, rank=0, saved=[("x", [0, 0], [2, 2])])
    rest = RankReport(case=0, rank=1, saved=[("x", [2, 0], [2, 2])])
    assert not_saved_once({"x": (4, 2)}, [half, rest]) == []
    assert not_saved_once({"x": (4, 2)}, [half]) == ["x: elements of it would be saved by 0 to 1 ranks"]
    assert not_saved_once({"x": (4, 2)}, [half, rest, rest]) == ["x: elements of it would be saved by 1 to 2 ranks"]


def _leaves(parts):
    if parts.groups.rank == 1:
        raise RuntimeError("a rank went away")
    return parts


@pytest.mark.core
def test_a_case_that_ends_the_ranks_is_reported_and_the_others_run() -> None:
    case = next(c for c in default_cases(2) if c.folding.ep == 2)
    away = Fault(name="away", summary="rank 1 raises", alter=_leaves)
    job = VerifyJob(
        tasks=[CaseTask(case), CaseTask(case, away), CaseTask(case)], world=2, dtype=torch.float64, timeout_s=10
    )
    sound, ended, after = run_job(job)
    assert not sound.failures and not after.failures
    assert ended.crashed and "a rank went away" in ended.failures[0] and "rank 1 failed" in ended.failures[0]


def test_when_too_many_cases_end_the_ranks_the_rest_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_CRASHES", 0)
    case = next(c for c in default_cases(2) if c.folding.ep == 2)
    away = Fault(name="away", summary="rank 1 raises", alter=_leaves)
    job = VerifyJob(tasks=[CaseTask(case, away), CaseTask(case)], world=2, dtype=torch.float64, timeout_s=10)
    ended, rest = run_job(job)
    assert ended.crashed and rest.failures == ["not run: too many cases ended the ranks"]


# ---- the command ---------------------------------------------------------------------------------------------------------------

KEYS = {
    "mappings",
    "worst_gradient_rel_error",
    "worst_norm_rel_error",
    "worst_step_rel_error",
    "seconds",
    "failures",
}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("dtype", "limit"),
    [
        pytest.param("float64", 1e-12, marks=pytest.mark.slow),
        ("float32", 1e-5),
        pytest.param("bfloat16", 2e-2, marks=pytest.mark.slow),
    ],
)
def test_all_mappings_of_two_ranks_agree_with_one(dtype: str, limit: float, tmp_path: Path) -> None:
    """The first is a quick part of what CI runs with 4 and 8 ranks."""
    done = phalanx("verify", "--ranks", "2", "--dtype", dtype, "--json", str(tmp_path / "v.json"))
    result = json.loads((tmp_path / "v.json").read_text())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    mappings = 10 if dtype == "float64" else 3  # rounding would route tokens otherwise: the axes of the experts alone
    assert result.keys() >= KEYS and result["failures"] == [] and result["mappings"] == mappings
    for name in ("worst_gradient_rel_error", "worst_norm_rel_error", "worst_step_rel_error"):
        assert result[name] <= limit
    assert result["worst_gradient_rel_error"] > 0  # a comparison with itself would say 0
    assert "cases agree" in done.stdout


@pytest.mark.parametrize(
    ("value", "counts"),
    [("serial", (165, 0, 0, 0, 0)), ("fine", (56, 70, 17, 14, 8)), ("coarse:3", (78, 70, 17, 0, 0))],
)
def test_overlap_is_forced_where_it_can_apply_and_the_rest_is_counted(value: str, counts: tuple[int, ...]) -> None:
    cases = default_cases(4)
    forced = force_overlap(cases, value)
    assert len(forced.cases) == len(cases) == sum(counts) and forced.num_forced == counts[0]
    kept = [
        sum(n for why, n in forced.kept.items() if word in why)
        for word in ("etp = 1", "whole tokens", "capacity", "replicas")
    ]
    assert tuple(kept) == counts[1:]
    for before, after in zip(cases, forced.cases, strict=True):
        dispatch = dataclasses.replace(after.setup.dispatch, overlap=before.setup.dispatch.overlap)
        setup = dataclasses.replace(after.setup, dispatch=dispatch, label=before.setup.label)
        assert dataclasses.replace(after, setup=setup) == before  # nothing else
        assert after is before or f"overlap={value}" in after.label


@pytest.mark.slow
@pytest.mark.ranks
def test_forced_cases_agree_and_the_command_says_how_many(tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    done = phalanx("verify", "--ranks", "2", "--dtype", "float32", "--overlap", "coarse:3", "--json", str(path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads(path.read_text())
    assert result["overlap"] == "coarse:3" and result["failures"] == []
    assert result["overlap_forced"] + sum(result["overlap_kept"].values()) == result["cases"]
    forced = [label for label in result["labels"] if label.endswith("overlap=coarse:3")]
    assert len(forced) == result["overlap_forced"] > 10
    said = " ".join(done.stdout.split())
    assert f"dispatch.overlap = coarse:3 in {len(forced)} of {result['cases']} cases" in said
    assert all(f"{n} as they are: coarse:3 {why}" in said for why, n in result["overlap_kept"].items())


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    path = tmp_path_factory.mktemp("faults") / "faults.json"
    done = phalanx("verify", "--plant", "all", "--ranks", "4", "--json", str(path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    result = json.loads(path.read_text())
    assert result["not_on_these_ranks"] == [] and len(result["escaping_a_loss_check"]) >= 10
    return {row["name"]: row for row in result["faults"]}


FIRST_SIGN = {  # regular expressions: which of several wrong numbers is the worst depends on the case
    "experts-divided-by-edp": "moe.experts",
    "no-edp-reduction": "moe.experts",
    "experts-over-dp-cp": "moe.experts",
    "replicated-not-reduced": "norm|wkv_a|wq_a|router",  # what all ranks of tp hold alike
    "aux-counts-not-reduced": r"gradient/layers\.\d\.(moe.router|ffn_norm)",
    "router-losses-per-rank": r"gradient/layers\.\d\.(moe.router|ffn_norm)",
    "replicas-averaged": "moe.experts",
    "holder-left-out": "moe.experts",
    "replicas-rounded-by-rank": "at its replicas",
    "norm-skips-experts": "grad_norm",
    "norm-skips-experts-of-tp": "grad_norm",
    "norm-counts-replicas": "grad_norm",
    "router-not-summed-over-tp": "moe.router.weight",
    "norms-not-summed-over-tp": "norm.weight",
    "aux-not-scaled-by-cp": "gradient/layers.",
    "aux-counts-of-own-part": "gradient/layers.",
    "contiguous-positions": "gradient/layers.",
    "old-weights-forward": "gradient/layers.",
    "new-weights-backward": "gradient/layers.",
    "part-overwritten": r"gradient/layers\.\d\.moe\.experts\.w2",
    "router-of-part-lost": "gradient/.*(router|norm)",
    "chunk-router-detached": "gradient/.*(router|norm)",
    "stale-bias": "expert_bias",
    "bias-from-own-counts": "expert_bias|tokens per expert|entropy",  # whose mean is over the tokens counted
    "shards-not-published": "param/",
    "copy-without-gradient": "gradient/",
}
"""Where the first complaint must point; for the others any parameter's gradient or state."""


@pytest.mark.ranks
@pytest.mark.parametrize("name", [fault.name for fault in FAULTS])
def test_fault_is_found(name: str, planted: dict[str, dict[str, object]]) -> None:
    row = planted[name]
    assert row["caught"] and row["cases"]
    signs = row["found_by"]
    assert isinstance(signs, list) and all(re.search(FIRST_SIGN.get(name, "/"), sign) for sign in signs), signs


@pytest.mark.core
@pytest.mark.ranks
def test_planting_one_fault_fails_and_names_the_parameter(tmp_path: Path) -> None:
    done = phalanx("verify", "--plant", "no-edp-reduction", "--ranks", "2", "--json", str(tmp_path / "v.json"))
    result = json.loads((tmp_path / "v.json").read_text())
    assert done.returncode == 1 and "found" in done.stdout
    assert result["planted"] == "no-edp-reduction" and any("moe.experts.w13" in text for text in result["failures"])


@pytest.mark.ranks
def test_a_recipe_is_verified_on_its_own_mapping(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        '[model]\npreset = "tiny"\nshared_ffn = 32\n[folding]\nep = 2\n[launch]\nranks = 2\n'
        '[dispatch]\npolicy = "drop"\ncapacity_factor = 0.75\n[router]\nz_loss = 0.001\n'
    )
    done = phalanx("verify", str(recipe), "--json", str(tmp_path / "v.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "v.json").read_text())
    assert result["mappings"] == 1 and result["cases"] == 2 and all("dp2|ep2" in label for label in result["labels"])


def test_following_judges_losses_drops_and_progress() -> None:
    case = recipe_cases(Recipe(), PRESETS["tiny"], Folding(world=2, ep=2), DispatchSpec(policy="drop"))[0]
    falling = [5.0 - 0.1 * i for i in range(10)]
    want = Curve(losses=falling, norms=[1.0] * 10, dropped=3)
    assert judge(case, dataclasses.replace(want), want).failures == []
    off = dataclasses.replace(want, losses=[*falling[:6], falling[6] * (1 + 1e-8), *falling[7:]])
    assert "the loss of step 6" in judge(case, off, want).failures[0]
    nan = dataclasses.replace(want, losses=[*falling[:9], float("nan")])
    assert judge(case, nan, want).worst_loss_rel_error == float("inf") and judge(case, nan, want).failures
    assert judge(case, dataclasses.replace(want, dropped=2), want).failures == ["2 rows were dropped, on one rank 3"]
    flat = Curve(losses=[5.0] * 10, norms=[1.0] * 10, dropped=0)
    told = judge(case, flat, flat).failures
    assert len(told) == 2 and "no row was dropped" in told[0] and "did not fall" in told[1]


@pytest.mark.ranks
@pytest.mark.parametrize("scope", [pytest.param("sub_sequence", marks=pytest.mark.slow), "full_sequence"])
def test_steps_follow_one_rank(scope: str, tmp_path: Path) -> None:
    """A small one of what docs/explanation/verification.md shows on 16 ranks."""
    folding = ("--folding.tp", "2", "--folding.pp=2", "--folding.ep", "2", "--pipeline.virtual", "2")
    drop = ("--dispatch.policy", "drop", "--dispatch.drop_scope", scope)
    path = tmp_path / "f.json"
    done = phalanx("verify", "recipes/tiny.toml", "--ranks", "4", "--steps", "4", *folding, *drop, "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["steps"] == 4 and result["failures"] == [] and result["seconds"] > 0
    assert 0 < result["worst_loss_rel_error"] <= 1e-9 and result["dropped"] > 0
    assert len(set(result["losses"])) == 4 and "tp2.pp2|ep2.pp2  interleaved_1f1b x2" in result["label"]


def test_settings_are_told_from_arguments() -> None:
    own, overrides = split_overrides(["r.toml", "--folding.tp", "2", "--ranks", "4", "--folding.ep=2", "--train.flag"])
    assert own == ["r.toml", "--ranks", "4"]
    assert overrides == ["--folding.tp", "2", "--folding.ep=2", "--train.flag"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--steps", "5"), "needs a recipe or settings of one"),
        (("--steps", "0", "--folding.ep", "2"), "must be at least 1"),
        (("--steps", "5", "--folding.ep", "2", "--dtype", "float32"), "compared in float64"),
        (("--steps", "5", "--folding.eq", "2"), "folding.eq"),
        (("--plant", "all", "--folding.ep", "2"), "has no effect with a recipe"),
        (("--plant", "no-edp-reductoin"), "did you mean 'no-edp-reduction'"),
        (("--plant", "no-edp-reduction", "--ranks", "1"), "exists in no mapping of 1 rank;"),
        (("--ranks", "0"), "must lie between 1 and 64"),
        (
            ("--overlap", "fien"),
            "--overlap = 'fien': must be serial, coarse:N, tiles, tiles:KEY=VALUE,..., fine, auto or fused",
        ),
        (("--overlap", "fused"), "runs on GPUs only"),
        (
            ("--overlap", "fine", "--ranks", "1"),
            "--overlap = 'fine': applies to none of the 58 cases of these ranks: needs",
        ),
        (
            ("--dispatch.overlap", "fused", "--optim.bucket_mb", "0", "--launch.device", "cuda", "--ranks", "2"),
            "runs on GPUs only",
        ),
        (("--overlap", "coarse:1"), "--overlap = 'coarse:1': coarse takes a number of chunks"),
        (("--overlap", "fine", "--folding.ep", "2"), "set --dispatch.overlap instead"),
        (("--overlap", "fine", "--plant", "all"), "each with its own overlap"),
        (("--plant", "all", "--dtype", "bfloat16"), "told from rounding only in float64"),
        (("--ranks", "1", "--json", "/proc/none/v.json"), "cannot write /proc/none/v.json"),
    ],
)
def test_wrong_arguments_end_in_one_message(
    args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(["verify", *args]) == 2
    told = capsys.readouterr().err
    assert says in told and "Traceback" not in told


def test_recipe_that_does_not_fit_the_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[model]\npreset = "tiny"\n[folding]\nep = 3\n')
    assert program(["verify", str(recipe), "--ranks", "4"]) == 2
    assert "folding.ep" in capsys.readouterr().err
    assert program(["verify", str(recipe), "--plant", "all"]) == 2
    assert "has no effect with a recipe" in capsys.readouterr().err


def test_fault_names_are_unique_and_found_by_name() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 10
    assert fault_named(FAULTS[3].name) is FAULTS[3]
