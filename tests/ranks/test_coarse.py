"""Chunks of tokens in a pipeline (`coarse:N`): outputs and gradients are those of a dense model of all ranks, and messages travel while others compute."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial

import pytest
import torch
from moe_help import context, moe_spec
from test_dispatch import (
    DROP,
    DROPLESS,
    POLICIES,
    Case,
    E,
    F,
    H,
    check_case,
    local_weights,
    mappings,
    probe,
    replicated,
    tokens_of,
)
from torch.utils.checkpoint import checkpoint

from phalanx.core.errors import ConfigError
from phalanx.kernels.ops.deferred import DeferredGradients, run as run_later
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import Placement
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.moe.coarse import chunk_sizes, run_coarse
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall, run_experts
from ranks import run_ranks

CHUNKS = (3, 16)
"""The last one is more than the tokens of any case."""


@dataclasses.dataclass(frozen=True)
class Way:
    """How a layer is run."""

    chunks: int
    recompute: bool = False
    checkpoint: bool = False
    later: bool = False
    synchronous: bool = False


def run_case(rank, cache, case, way, comms):
    model = moe_spec(num_experts=case.num_experts, top_k=case.top_k, hidden=H, expert_ffn=F)
    ctx = context(
        model, folding=case.folding, rank=rank, cache=cache, dispatch=case.spec, comms=comms, placement=case.placement
    )
    x, weights, experts = tokens_of(
        rank, case.sizes[rank], skew=case.skew, top_k=case.top_k, num_experts=case.num_experts
    )
    x.requires_grad_()
    weights.requires_grad_()
    w13, w2 = local_weights(ctx.groups, ctx.placement, case.num_experts)
    dispatcher = Dispatcher(ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=comms, top_k=case.top_k)
    later = DeferredGradients() if way.later else None

    def layer(x, weights):
        call = MoeCall(
            x_TH=x,
            weights_TK=weights,
            experts_TK=experts,
            experts=ExpertWeights(w13, w2),
            later=later,
            recompute=way.recompute,
            op_prefix="mb0.L0.fwd.",
        )
        return run_coarse(call, dispatcher=dispatcher, chunks=way.chunks)

    y, dropped = checkpoint(layer, x, weights, use_reentrant=False) if way.checkpoint else layer(x, weights)
    y.backward(probe(rank, y))
    if later is not None:
        assert w13.grad is None
        run_later(later.take())
    grads = {"x": x.grad, "weights": weights.grad, "w13": w13.grad, "w2": w2.grad}
    return {"y": y.detach(), **grads, "dropped": int(dropped)}


def run_cases(rank, cache, cases):
    out = []
    for case, way in cases:
        comms = Collectives(timeout_s=240, synchronous=way.synchronous)
        got = run_case(rank, cache, case, way, comms)
        out.append({**got, "counters": {k: (c.calls, c.sent_bytes) for k, c in comms.counters.items()}})
    return out


def run_and_check(world, cases):
    results = run_ranks(world, run_cases, cases)
    for i, (case, _) in enumerate(cases):
        check_case(case, [r[i] for r in results])
    return results


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in POLICIES if "full" not in name])
def test_every_mapping_of_4_ranks(name):
    cases = [(Case(f, POLICIES[name], (9,) * 4, 1.0), Way(3)) for f in mappings(4)]
    run_and_check(4, [*cases, (cases[-1][0], Way(16))])


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_few_ranks(world):
    specs = [POLICIES[p] for p in ("dropless", "drop", "padded")]
    cases = [Case(f, s, (7,) * world, 1.0) for f in mappings(world) for s in specs]
    run_and_check(world, [(case, Way(chunks)) for case in cases for chunks in CHUNKS])


@pytest.mark.ranks
def test_full_sequence_dropping_spans_the_ranks_of_a_micro_batch():
    specs = [s for n, s in POLICIES.items() if "full" in n]
    foldings = [make_folding(world=4, ep=ep, etp=etp, tp=2) for ep, etp in ((4, 1), (2, 2))]
    run_and_check(4, [(Case(f, s, (8,) * 4, 1.5), Way(3)) for f in foldings for s in specs])


@pytest.mark.core
@pytest.mark.ranks
def test_ranks_without_tokens_and_overfull_experts():
    cases = []
    for f in (make_folding(world=4, ep=4), make_folding(world=4, ep=2, etp=2)):
        cases += [
            Case(f, DROPLESS, (5, 0, 3, 0)),
            Case(f, DROPLESS, (0, 0, 1, 0)),
            Case(f, DROPLESS, (0, 0, 0, 0)),
            Case(f, DROPLESS, (6, 7, 8, 9), skew=100.0),
            Case(f, DROPLESS, (3, 1, 2, 4), top_k=E),
            Case(f, DROP, (6, 0, 1, 3), skew=100.0),
        ]
    run_and_check(4, [(case, Way(2)) for case in cases])


@pytest.mark.ranks
def test_replicas_share_the_rows_of_their_expert():
    four, pairs = make_folding(world=4, ep=4), make_folding(world=4, ep=2, etp=2)
    placements: list[tuple[object, Placement]] = [
        (four, replicated(four, ((0, 3), (0, 1), (2, 0), (1, 0)))),
        (pairs, replicated(pairs, ((3, 0, 0), (1, 0, 2)))),
    ]
    run_and_check(
        4,
        [
            (Case(f, POLICIES[name], (7,) * 4, 3.0, placement=p, num_experts=4), Way(3))
            for f, p in placements
            for name in ("dropless", "drop", "padded")
        ],
    )


@pytest.mark.ranks
def test_recomputed_put_off_and_synchronous():
    case = Case(make_folding(world=2, ep=2), DROP, (9, 4), 1.0)
    ways = [
        Way(3, recompute=True),
        Way(3, checkpoint=True),
        Way(3, later=True),
        Way(3, synchronous=True),
        Way(3, recompute=True, checkpoint=True, later=True),
    ]
    run_and_check(2, [(case, way) for way in ways])


# ---- what travels, and when ----------------------------------------------------------------------------------------------------


def order_case(rank, cache, num_tokens, chunks):
    """Ids of the exchanges of a layer in the order in which they began and ended, forward and backward."""
    log: list[str] = []

    class Logged(Collectives):
        def start_all_to_all_raw(self, x, axis, in_splits, out_splits, op_id):
            log.append(f"begin {op_id}")
            out, exchange = super().start_all_to_all_raw(x, axis, in_splits, out_splits, op_id)
            wait = exchange.wait

            def logged():
                log.append(f"end {op_id}")
                wait()

            exchange.wait = logged
            return out, exchange

    case = Case(make_folding(world=2, ep=2), DROPLESS, (num_tokens,) * 2)
    run_case(rank, cache, case, Way(chunks), Logged(timeout_s=30))
    return [line for line in log if line.endswith("rows")]


@pytest.mark.ranks
def test_messages_travel_while_others_are_computed_both_ways():
    for lines in run_ranks(2, order_case, 8, 3):
        words = [line.replace("mb0.L0.", "").replace(".chunk", "").replace(".rows", "") for line in lines]
        forward, backward = words[: len(words) // 2], words[len(words) // 2 :]
        there = ["begin fwd.dispatch0"]
        for i in range(3):
            there += [f"begin fwd.dispatch{i + 1}"] if i < 2 else []
            there += [f"end fwd.dispatch{i}", f"begin fwd.combine{i}"]  # experts of chunk i between the two
        assert forward == there + [f"end fwd.combine{i}" for i in range(3)]
        assert backward[:3] == [f"begin bwd.combine{i}" for i in (2, 1, 0)]
        at = {word: i for i, word in enumerate(backward)}
        for i in (2, 1, 0):
            assert at[f"begin bwd.dispatch{i}"] == at[f"end bwd.combine{i}"] + 1  # experts of chunk i between the two
            if i:  # the gradient of chunk i travels while that of chunk i - 1 is computed
                assert at[f"begin bwd.dispatch{i}"] < at[f"end bwd.combine{i - 1}"] < at[f"end bwd.dispatch{i}"]
        assert len(at) == 12


@pytest.mark.ranks
def test_one_count_exchange_and_no_more_bytes_than_the_plain_layer():
    folding = make_folding(world=2, ep=2)
    results = run_ranks(2, bytes_case, Case(folding, DROPLESS, (12, 9)))
    for plain, coarse in results:
        assert coarse["all_to_all_rows", "ep"] == (
            4 * plain["all_to_all_rows", "ep"][0],
            plain["all_to_all_rows", "ep"][1],
        )
        assert coarse["all_gather", "ep_etp"][0] == plain["all_gather", "ep_etp"][0] == 1


def bytes_case(rank, cache, case):
    comms = Collectives(timeout_s=240)
    run_case(rank, cache, case, Way(4), comms)
    coarse = {k: (c.calls, c.sent_bytes) for k, c in comms.counters.items()}
    comms.counters.clear()
    ctx = context(moe_spec(hidden=H, expert_ffn=F), folding=case.folding, rank=rank, cache=cache, comms=comms)
    x, weights, experts = tokens_of(rank, case.sizes[rank])
    x.requires_grad_()
    weights.requires_grad_()
    dispatcher = Dispatcher(ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=comms, top_k=case.top_k)
    held = ExpertWeights(*local_weights(ctx.groups, ctx.placement))
    call = MoeCall(x_TH=x, weights_TK=weights, experts_TK=experts, experts=held)
    y, _ = run_experts(call, dispatcher=dispatcher)
    y.backward(probe(rank, y))
    return {k: (c.calls, c.sent_bytes) for k, c in comms.counters.items()}, coarse


# ---- memory -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize("chunks", [0, 2], ids=["serial", "coarse"])
@torch.no_grad()
def test_routed_rows_are_gone_when_the_shared_expert_computes(chunks):
    """A wide shared expert beside them would raise the peak of a forward pass; tensors of this width are counted."""
    width, found = 1237, []
    ctx = context(moe_spec(num_experts=4, top_k=2, hidden=width, expert_ffn=F))
    dispatcher = Dispatcher(ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=2)
    held = ExpertWeights(torch.ones(4, 2, F, width), torch.ones(4, width, F))
    x, experts = torch.ones(6, width), torch.tensor([[0, 1], [1, 2], [2, 3]]).repeat(2, 1)

    def beside():
        gc.collect()
        of_width = [t.shape for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[1:] == (width,)]
        found.append(sorted(of_width))
        return x

    call = MoeCall(x_TH=x, weights_TK=torch.ones(6, 2), experts_TK=experts, experts=held, beside=beside)
    run = partial(run_coarse, chunks=chunks) if chunks else run_experts
    run(call, dispatcher=dispatcher)
    assert found == [[(6, width), (6, width)]]  # tokens, and the sum of the routed experts


# ---- what is refused ------------------------------------------------------------------------------------------------------------


def refused_case(rank, cache):
    spec = DispatchSpec(transport="all_gather")
    ctx = context(moe_spec(hidden=H), folding=make_folding(world=2, ep=2), rank=rank, cache=cache, dispatch=spec)
    dispatcher = Dispatcher(spec, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=2)
    held = ExpertWeights(*local_weights(ctx.groups, ctx.placement))
    x, weights, experts = tokens_of(rank, 4)
    call = MoeCall(x_TH=x, weights_TK=weights, experts_TK=experts, experts=held)
    try:
        run_coarse(call, dispatcher=dispatcher, chunks=0)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.ranks
def test_what_cannot_be_cut_is_said_at_once():
    for text in run_ranks(2, refused_case):
        assert "chunks = 0: must be at least 1" in text
        assert "dispatch.transport = 'all_gather'" in text and "use all_to_all" in text


def wrong_splits_case(rank, cache):
    axis = Axis("ep", (0, 1), rank, cache.get((0, 1)))
    x, said = torch.ones(3, 2), []
    for comms, splits in ((Collectives(), (1, 1)), (Collectives(check_splits=True), (1, 2))):
        try:
            comms.start_all_to_all_rows(x, in_splits=splits, out_splits=(2, 2), axis=axis).wait()
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    under_way = Collectives().start_all_to_all_rows(x, in_splits=(1, 2), out_splits=(1 + rank,) * 2, axis=axis)
    assert len(under_way.wait()) == 2 * (1 + rank)
    try:
        under_way.wait()
    except ValueError as error:
        said.append(str(error))
    return said


@pytest.mark.ranks
def test_sizes_are_checked_before_anything_is_posted():
    for said in run_ranks(2, wrong_splits_case):
        assert said[0].startswith("ValueError: start_all_to_all_rows over ep: splits (1, 1) do not divide 3 rows")
        assert said[1].startswith("RunError: all_to_all_rows over ep")
        assert "was waited for already" in said[2]


def test_chunks_are_even():
    assert chunk_sizes(7, 3) == [3, 2, 2] and chunk_sizes(2, 4) == [1, 1, 0, 0] and chunk_sizes(0, 2) == [0, 0]
