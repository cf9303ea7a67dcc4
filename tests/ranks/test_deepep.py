"""`dispatch.transport = "deepep"` on what stands in for the library: layers, gradients and whole steps against the all-to-all transport, what is waited for, and what is refused.

The library itself has not been run: the stand-in has its calls, checks and order of tokens (`deepep_stand_in.py`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepep_stand_in import Config, Plant, Seen, stand_in
from moe_help import context, moe_spec
from program_help import TINY, Run, _Recording, one_step
from test_dispatch import Case, E, F, H, K, check_case, close, local_weights, mappings, probe, tokens_of

from phalanx.core.config import Recipe
from phalanx.core.errors import ConfigError, PeerError, Problem
from phalanx.core.recipe import load_recipe
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.moe.deepep import deepep_bytes, host_problems
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.plan.program.work import Sizes
from phalanx.plan.recipe import run_problems
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache, build_groups
from phalanx.runtime.comm.tokens import TokenBuffers
from phalanx.runtime.moe.dispatch import Dispatcher, KnownCounts
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall, run_experts
from phalanx.runtime.moe.routed import routed_experts
from ranks import run_ranks

DEEPEP = DispatchSpec(transport="deepep")
Layer = dict[str, Any]


# ---- layers ----------------------------------------------------------------------------------------------------------------


def layer(rank: int, cache: GroupCache, case: Case, dtype: torch.dtype, plant: Plant) -> Layer:
    """One layer of one rank: output and every gradient, and what the library was asked for."""
    model = moe_spec(num_experts=case.num_experts, top_k=case.top_k, hidden=H, expert_ffn=F)
    ctx = context(model, folding=case.folding, rank=rank, cache=cache, dispatch=case.spec, dtype=dtype)
    group = ctx.groups.axis("ep").group
    library = None if group is None else stand_in(group, plant=plant)
    comms = Collectives(timeout_s=240, tokens=TokenBuffers(library))
    x, weights, experts = tokens_of(
        rank, case.sizes[rank], skew=case.skew, top_k=case.top_k, num_experts=case.num_experts
    )
    x, weights, w13, w2 = (
        t.detach().to(dtype).requires_grad_()
        for t in (x, weights, *local_weights(ctx.groups, ctx.placement, case.num_experts))
    )
    dispatcher = Dispatcher(case.spec, placement=ctx.placement, groups=ctx.groups, comms=comms, top_k=case.top_k)
    call = MoeCall(x_TH=x, weights_TK=weights, experts_TK=experts, experts=ExpertWeights(w13, w2))
    y, dropped = run_experts(call, dispatcher=dispatcher)
    y.backward(probe(rank, y))
    named = {"y": y.detach(), "x": x.grad, "weights": weights.grad, "w13": w13.grad, "w2": w2.grad}
    sent = {op: counter.sent_bytes for (op, _), counter in comms.counters.items()}
    return {**named, "dropped": int(dropped), "seen": None if library is None else library.seen, "sent": sent}


def layers(rank: int, cache: GroupCache, cases: list[Case], dtype: torch.dtype, plant: Plant = "") -> list[list[Layer]]:
    """Each case by both transports."""
    specs = (DispatchSpec(), DEEPEP)
    return [[layer(rank, cache, dataclasses.replace(c, spec=s), dtype, plant) for s in specs] for c in cases]


def cases_of(world: int) -> list[Case]:
    sizes = {2: ((9, 7), (5, 0), (0, 0)), 4: ((9, 9, 9, 9), (5, 0, 3, 0), (0, 0, 1, 0), (0, 0, 0, 0))}[world]
    found = []
    for folding in mappings(world):
        if folding.etp == 1:
            found += [Case(folding, DEEPEP, tokens) for tokens in sizes]
            found += [
                Case(folding, DEEPEP, sizes[0], skew=100.0),  # every token to experts 0 and 1: most experts, and a rank, get none
                Case(folding, DEEPEP, sizes[1], top_k=E),
                Case(folding, DEEPEP, sizes[0], top_k=1, skew=100.0),
                Case(folding, DEEPEP, sizes[0], num_experts=16, top_k=4),
            ]  # fmt: skip
    return found


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("world", [2, 4])
def test_layers_equal_the_all_to_all_and_a_dense_model(world: int) -> None:
    cases = cases_of(world)
    found = run_ranks(world, layers, cases, torch.float64)
    for i, case in enumerate(cases):
        check_case(case, [ranks[i][1] for ranks in found])
        for plain, deepep in (ranks[i] for ranks in found):
            for name in ("y", "x", "weights", "w13", "w2"):
                close(deepep[name], plain[name], 1e-12)
            seen, ep = deepep["seen"], case.folding.ep  # type: ignore[attr-defined]
            assert seen == (None if ep == 1 else Seen(made=1, waits=1, cached=1, combined=2)), case


@pytest.mark.ranks
def test_layers_in_fp32_differ_by_rounding() -> None:
    cases = cases_of(4)
    for ranks in run_ranks(4, layers, cases, torch.float32):
        for plain, deepep in ranks:
            for name in ("y", "x", "weights", "w13", "w2"):
                close(deepep[name], plain[name], 2e-6)


@pytest.mark.ranks
@pytest.mark.parametrize("plant", ["order", "sum"])
def test_tokens_in_a_wrong_order_are_seen(plant: Plant) -> None:
    case = Case(make_folding(world=4, ep=4), DEEPEP, (9, 7, 8, 9))
    found = run_ranks(4, layers, [case], torch.float64, plant)
    with pytest.raises(AssertionError):
        check_case(case, [ranks[0][1] for ranks in found])


@pytest.mark.ranks
def test_a_token_travels_once_to_each_rank() -> None:
    """With all 8 experts of each token on both ranks, half of the tokens' copies cross, not half of their rows."""
    case = Case(make_folding(world=2, ep=2), DEEPEP, (9, 7), top_k=E)
    for rank, ((plain, deepep),) in enumerate(run_ranks(2, layers, [case], torch.float64)):
        own, others, row, choices = case.sizes[rank], case.sizes[1 - rank], 8 * H, 8 * E
        assert plain["sent"]["all_to_all_rows"] == 2 * (own + others) * E // 2 * row + (own + others) * E // 2 * 8
        assert deepep["sent"]["dispatch_tokens"] == own * (row + 2 * choices) + own * row  # and gradients of sums
        assert deepep["sent"]["combine_tokens"] == others * row + others * (row + choices)


def rows_of_both(rank: int, cache: GroupCache, folding: Any) -> list[bool]:
    """Whether rows, weights and counts of the experts are the same bits by both transports, and by a pass that runs again."""
    found = []
    for spec in (DispatchSpec(), DEEPEP):
        ctx = context(moe_spec(hidden=H), folding=folding, rank=rank, cache=cache, dispatch=spec)
        group = ctx.groups.axis("ep").group
        assert group is not None
        library = stand_in(group)
        comms = Collectives(timeout_s=240, tokens=TokenBuffers(library))
        dispatcher = Dispatcher(spec, placement=ctx.placement, groups=ctx.groups, comms=comms, top_k=K)
        known = KnownCounts()
        found += [dispatcher.dispatch(*tokens_of(rank, 5 + rank), known=known) for _ in range(2)]
        if spec.transport == "deepep":
            assert library.seen == Seen(made=1, waits=1, cached=1)
            x, weights, experts = tokens_of(rank, 5 + rank)
            dispatcher.dispatch(x, weights, (experts + 1) % E, known=known)
            assert [bool(doubt) for doubt in comms.doubts] == [False, True]
    plain = found[0]
    return [
        torch.equal(one.rows_MH, plain.rows_MH)
        and torch.equal(one.weights_M, plain.weights_M)
        and one.counts == plain.counts
        for one in found[1:]
    ]


@pytest.mark.ranks
def test_rows_come_to_the_experts_in_the_order_of_the_all_to_all() -> None:
    for folding in (make_folding(world=4, ep=4), make_folding(world=4, ep=2)):
        assert all(all(same) for same in run_ranks(4, rows_of_both, folding))


# ---- whole steps -----------------------------------------------------------------------------------------------------------


def steps(rank: int, cache: GroupCache, runs: list[Run]) -> list[tuple[Any, Any, Seen, float]]:
    """What a step sent, and what its program says."""
    out = []
    for run in runs:
        comms = _Recording()
        groups = build_groups(run.folding, rank=rank, cache=cache, table_ranks=run.planned_pipeline.stages.table_ranks)
        group = groups.axis("ep").group
        assert group is not None
        library = stand_in(group)
        comms.tokens = TokenBuffers(library)
        result, _ = one_step(rank, cache, run, comms)
        sizes = Sizes(sequences=2, seq_len=32, itemsize=run.dtype.itemsize)
        listed = [op for op in run.program(rank, sizes=sizes).ops if op.kind == "collective"]
        out.append((comms.record(), listed, library.seen, result.loss))
    return out


@pytest.mark.ranks
def test_a_step_does_what_its_program_lists() -> None:
    everywhere = dataclasses.replace(TINY, top_k=TINY.num_experts)  # then bytes are known
    folding = make_folding(world=4, ep=4)
    runs = [
        Run(folding=folding, spec=everywhere, dispatch=dispatch, recompute=recompute, num_microbatches=2)
        for recompute in ("none", "selective", "full")
        for dispatch in (DispatchSpec(), DEEPEP)
    ]
    for told in run_ranks(4, steps, runs):
        for i, run in enumerate(runs):
            record, listed, seen, loss = told[i]
            assert Counter(record.ops) == Counter((op.id, op.collective, op.axis) for op in listed)
            assert loss == pytest.approx(told[0][3], rel=1e-6)
            layers = len(run.spec.moe_layers) * run.num_microbatches
            if run.dispatch.transport == "deepep":
                sent = {(op.id, op.sent_bytes) for op in listed if op.collective.endswith("_tokens")}
                assert {(e.op_id, float(e.sent_bytes)) for e in record.events if e.op.endswith("_tokens")} == sent
                again = layers if run.recompute == "full" else 0
                assert (seen.waits, seen.cached) == (layers, layers + again)


# ---- what is refused -------------------------------------------------------------------------------------------------------

GIVEN = {
    "model.preset": "qwen3-30b-a3b",
    "launch.device": "cuda",
    "launch.ranks": "8",
    "train.dtype": "bfloat16",
    "dispatch.transport": "deepep",
    "folding.ep": "8",
    "train.global_batch": "8",
    "train.micro_batch": "1",
}


def problems(world: int = 8, **changed: str) -> list[str]:
    """What is said of `dispatch.transport` and whatever else is wrong."""
    words = {**GIVEN, **{key.replace("__", "."): value for key, value in changed.items()}}

    def check(recipe: Recipe) -> list[Problem]:
        return run_problems(recipe, world=world)

    try:
        load_recipe(None, [word for key, value in words.items() for word in (f"--{key}", value)], check=check)
    except ConfigError as err:
        return [str(problem) for problem in err.problems]
    return []


@pytest.mark.unit
def test_a_recipe_that_it_can_carry_has_no_problem() -> None:
    assert problems() == []
    assert problems(folding__tp="2", folding__cp="2", train__recompute="full", resilience__mode="fast") == []
    assert problems(16, folding__ep="16", launch__ranks="16", train__global_batch="16") == []


@pytest.mark.unit
@pytest.mark.parametrize(
    ("changed", "rule", "legal"),
    [
        ({"launch__device": "cpu"}, 'launch.device = "cpu" has none', 'launch.device = "cuda"'),
        ({"train__dtype": "float32"}, 'carries bfloat16, and train.dtype = "float32"', 'train.dtype = "bfloat16"'),
        ({"dispatch__policy": "drop"}, "leaves some out", 'dispatch.policy = "dropless"'),
        ({"train__deterministic": "true"}, "deterministic algorithms", "train.deterministic = false"),
        ({"resilience__slots_per_rank": "20", "resilience__heal": "false"}, "slots_per_rank = 20 makes replicas", "leave that out"),
        ({"resilience__heal": "true", "resilience__mode": "fast"}, "waits on the device for a lost rank", "resilience.heal = false"),
        ({"resilience__check": "sums"}, "moves tokens by itself", 'resilience.check = "off"'),
        ({"folding__ep": "4", "folding__etp": "2"}, "folding.etp = 2 cuts them", "folding.etp = 1"),
        ({"folding__ep": "1", "folding__etp": "2"}, "folding.etp = 2 cuts them", "folding.etp = 1"),
        ({"folding__ep": "6", "model__num_experts": "126", "model__top_k": "6"}, "and folding.ep = 6", "folding.ep = 2, or"),
        ({"model__hidden": "2056"}, "carries widths up to 8176 that 16 divides, and the model's is 2056", "model.hidden = 2048"),
        ({"model__top_k": "40"}, "takes 32 choices of a token, and the model has 40", "model.top_k = 32"),
        ({"model__num_experts": "2048"}, "takes 128 experts of a rank within a host, and folding.ep = 8 gives 256", "model.num_experts = 1024"),
        ({"model__num_experts": "512", "folding__ep": "2"}, "takes 128 experts of a rank within a host, and folding.ep = 2 gives 256", "folding.ep = 4"),
        ({"dispatch__overlap": "coarse:2"}, 'and dispatch.transport = "deepep" whole tokens', 'transport "all_to_all"'),
        ({"folding__ep": "1"}, "keep every row where it is", "leave it out"),
    ],
)  # fmt: skip
def test_a_recipe_that_it_cannot_carry_is_refused_with_a_way_out(
    changed: dict[str, str], rule: str, legal: str
) -> None:
    world = 6 if changed.get("folding__ep") == "6" else 8
    if world == 6:
        changed = {**changed, "train__global_batch": "6", "launch__ranks": "6"}
    found = [text for text in problems(world, **changed) if "transport" in text]
    assert any(rule in text and legal in text for text in found), found


def between_hosts(world: int, **changed: str) -> list[str]:
    size = str(world)
    return problems(world, **{"folding__ep": size, "launch__ranks": size, "train__global_batch": size, **changed})


@pytest.mark.unit
def test_between_hosts_widths_and_experts_are_fewer() -> None:
    (text,) = between_hosts(16, model__hidden="8192")
    assert "widths up to 7936 that 256 divides, and the model's is 8192" in text and "model.hidden = 7936" in text
    assert between_hosts(16, model__num_experts="1024") == []
    (text,) = between_hosts(16, model__num_experts="1040")
    assert "takes 64 experts of a rank between hosts, and folding.ep = 16 gives 65" in text
    assert "model.num_experts = 1024" in text  # a host of 8 ranks would have 130 on each
    (text,) = between_hosts(32, folding__ep="16", model__num_experts="2048")
    assert "folding.ep = 16 gives 128" in text and "folding.ep = 32" in text


@pytest.mark.unit
def test_each_eight_ranks_are_a_host() -> None:
    problems = partial(host_problems, num_experts=64)
    assert problems(()) == problems((3,) * 8) == problems((0,) * 8 + (1,) * 8) == []
    (problem,) = problems((0, 0, 0, 0, 1, 1, 1, 1))
    assert "on hosts 0, 0, 0, 0, 1, 1, 1, 1" in problem.rule and "folding.ep = 4, or" in problem.hint
    (problem,) = problems((0, 0, 0, 0, 0, 0, 1, 1))
    assert problem.hint.startswith("folding.ep = 2, or")  # 6 is no size of it, and 4 would lie on both hosts
    (problem,) = problems((0, 0, 0, 0, 1, 1))
    assert problem.hint.startswith("folding.ep = 2, or")  # 4 would lie as it must, and does not divide 6
    (problem,) = problems((0,) * 12 + (1,) * 12)
    assert problem.hint.startswith("folding.ep = 4, or")
    (problem,) = problems((0, 1))
    assert problem.hint == '"all_to_all"'
    (problem,) = host_problems([i // 2 for i in range(16)], num_experts=384)
    assert "folding.ep" not in problem.hint  # groups of 2 would lie on hosts, with 192 experts on a rank


@pytest.mark.unit
def test_without_the_package_the_error_says_what_to_install() -> None:
    with mock.patch.dict(sys.modules, {"deep_ep": None}), pytest.raises(ConfigError) as err:
        TokenBuffers().library()
    assert "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP" in str(err.value)
    with mock.patch.dict(sys.modules, {"deep_ep": mock.Mock(spec=[])}), pytest.raises(ConfigError, match="no Buffer"):
        TokenBuffers().library()


class OnPcie:
    """What the library's check of NVLink does on a card with PCIE in its name, before any rank is asked anything."""

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(2)

    get_combine_config = get_dispatch_config

    def __init__(self, group: Any, **_: Any) -> None:
        assert group.size() <= 2, "PCIe GPUs only have pairwise NVLink connections"


class LosesARank(OnPcie):
    def __init__(self, group: Any, **_: Any) -> None:
        raise PeerError("rank 1 was lost")


@pytest.mark.unit
def test_a_card_on_which_it_cannot_open_its_buffers_is_told_with_a_way_out() -> None:
    axis = Axis(name="ep", ranks=(0, 1), index=0, group=None)
    x_TH = torch.zeros(2, H, dtype=torch.bfloat16)
    with pytest.raises(ConfigError) as err:
        TokenBuffers(SimpleNamespace(Buffer=OnPcie)).of(Collectives(timeout_s=5), axis, x_TH)
    for word in ("dispatch.transport", "deepep", "NVLink", "on cpu", "AttributeError", "PCIe", 'use "all_to_all"'):
        assert word in str(err.value)
    with pytest.raises(PeerError, match="rank 1 was lost"):
        TokenBuffers(SimpleNamespace(Buffer=LosesARank)).of(Collectives(timeout_s=5), axis, x_TH)


def on_two_hosts(rank: int, cache: GroupCache) -> str:
    ctx = context(moe_spec(), folding=make_folding(world=2, ep=2), rank=rank, cache=cache, dispatch=DEEPEP)
    dispatcher = Dispatcher(DEEPEP, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K)
    with pytest.raises(ConfigError) as err:
        routed_experts(dispatcher, host_of_rank=(0, 1))
    return str(err.value)


@pytest.mark.ranks
def test_a_group_on_two_hosts_is_refused_when_the_run_begins() -> None:
    for text in run_ranks(2, on_two_hosts):
        assert "each 2 ranks of a group to be one host's" in text and '; "all_to_all"' in text


@pytest.mark.unit
def test_its_buffers_take_what_the_library_asks_for() -> None:
    assert deepep_bytes(ranks=8, hidden=7168) == 10 * 8 * 256 * (2 * 7168 + 8 + 128 * 16)
    assert 0.6e9 < deepep_bytes(ranks=64, hidden=7168) < 0.8e9
