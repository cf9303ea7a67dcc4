"""The dispatcher over forked ranks: rows arrive where the plan says, and layer and gradients equal a dense model of all ranks.

Every rank has its own tokens and routing, so a row that goes astray changes the result.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dispatch_by_hand import rows_by_hand
from moe_help import context, dense_experts, moe_spec

from phalanx.core.errors import PeerError
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.layers import initialise
from phalanx.models.moe import MoE
from phalanx.models.router import largest
from phalanx.plan.mapping.folding import GROUP_AXES, make_folding
from phalanx.plan.mapping.placement import Placement, plain_placement
from phalanx.plan.moe.dispatch import DispatchSpec, capacity, kept_pairs as kept_by_hand, plan_dispatch
from phalanx.plan.moe.dispatch_local import plan_local_dispatch
from phalanx.runtime.comm.abortable import AbortableCall
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, Groups
from phalanx.runtime.moe.dispatch import (
    CountsUnderWay,
    Dispatcher,
    KnownCounts,
    counts_on_host,
    kept_pairs,
    stable_order,
    to_host,
)
from phalanx.runtime.moe.experts import ExpertWeights, MoeCall, run_experts
from phalanx.runtime.moe.overlap_lists import entries_of_all, told_places
from ranks import run_ranks

E, K, H, F = 8, 2, 6, 8

DROPLESS = DispatchSpec()
DROP = DispatchSpec(policy="drop", capacity_factor=0.8)
POLICIES = {
    "dropless": DROPLESS,
    "drop": DROP,
    "drop by position": dataclasses.replace(DROP, drop_by="position"),
    "drop, full sequence": dataclasses.replace(DROP, drop_scope="full_sequence"),
    "drop by position, full sequence": dataclasses.replace(DROP, drop_by="position", drop_scope="full_sequence"),
    "padded": dataclasses.replace(DROP, pad_to_capacity=True),
    "padded, full sequence": dataclasses.replace(DROP, pad_to_capacity=True, drop_scope="full_sequence"),
}
SPECS = {
    f"{name}, {transport}": dataclasses.replace(spec, transport=transport)
    for name, spec in POLICIES.items()
    for transport in ("all_to_all", "all_gather")
}


def generator(*key):
    numbers = tuple(
        k if isinstance(k, int) else zlib.crc32(k.encode()) for k in key
    )  # a word's hash differs from run to run
    return torch.Generator().manual_seed(hash(numbers) % 2**31)


def tokens_of(rank, num_tokens, *, skew=0.0, top_k=K, num_experts=E):
    """(x, weights, experts) of one rank; larger `skew` prefers low experts."""
    g = generator(rank, num_tokens)
    x = torch.randn(num_tokens, H, generator=g, dtype=torch.float64)
    scores = torch.rand(num_tokens, num_experts, generator=g, dtype=torch.float64)
    scores = scores + skew * torch.linspace(1, 0, num_experts)
    experts = largest(scores, top_k)
    weights = torch.softmax(scores.gather(-1, experts), -1)
    return x, weights, experts


def expert_weights(num_experts=E):
    g = generator(999)
    w13 = torch.randn(num_experts, 2, F, H, generator=g, dtype=torch.float64)
    return w13, torch.randn(num_experts, H, F, generator=g, dtype=torch.float64)


def local_weights(groups, placement, num_experts=E):
    """This rank's slots and etp slice."""
    f, rank = groups.folding, groups.rank
    held = list(placement.local_experts(edp=f.coord(rank, "edp"), ep=f.coord(rank, "ep")))
    w13, w2 = expert_weights(num_experts)
    part, n = f.coord(rank, "etp"), F // f.etp
    cut = slice(part * n, (part + 1) * n)
    return w13[held][:, :, cut].clone().requires_grad_(), w2[held][:, :, cut].clone().requires_grad_()


def mappings(world):
    return [
        make_folding(world=world, ep=ep, etp=etp)
        for ep, etp in itertools.product((1, 2, 4, 8), repeat=2)
        if world % (ep * etp) == 0
    ]


# ---- whole layers, gradients included, against one dense model ------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    folding: object
    spec: DispatchSpec
    sizes: tuple[int, ...]
    skew: float = 0.0
    placement: Placement | None = None
    num_experts: int = E
    top_k: int = K


def run_case(rank, cache, case, comms):
    model = moe_spec(num_experts=case.num_experts, top_k=case.top_k, hidden=H, expert_ffn=F)
    ctx = context(
        model,
        folding=case.folding,
        rank=rank,
        cache=cache,
        dispatch=case.spec,
        comms=comms,
        placement=case.placement,
    )
    x, weights, experts = tokens_of(
        rank, case.sizes[rank], skew=case.skew, top_k=case.top_k, num_experts=case.num_experts
    )
    x.requires_grad_()
    weights.requires_grad_()
    w13, w2 = local_weights(ctx.groups, ctx.placement, case.num_experts)
    dispatcher = Dispatcher(
        ctx.dispatch, placement=ctx.placement, groups=ctx.groups, comms=comms, top_k=case.top_k, kernels=ctx.kernels
    )
    call = MoeCall(x_TH=x, weights_TK=weights, experts_TK=experts, experts=ExpertWeights(w13, w2))
    y, dropped = run_experts(call, dispatcher=dispatcher)
    y.backward(probe(rank, y))
    return {
        "y": y.detach(),
        "x": x.grad,
        "weights": weights.grad,
        "w13": w13.grad,
        "w2": w2.grad,
        "dropped": int(dropped),
    }


def probe(rank, y):
    return torch.randn(y.shape, generator=generator("probe", rank), dtype=y.dtype)


def run_cases(rank, cache, cases):
    out = []
    for case in cases:
        comms = Collectives(timeout_s=240)
        got = run_case(rank, cache, case, comms)
        out.append({**got, "bytes": {k: c.sent_bytes for k, c in comms.counters.items()}})
    return out


def kept_experts(case):
    """Experts per rank with -1 for what the policy drops, by the loop rule over each capacity scope."""
    f, spec = case.folding, case.spec
    data = [
        tokens_of(r, n, skew=case.skew, top_k=case.top_k, num_experts=case.num_experts)
        for r, n in enumerate(case.sizes)
    ]
    experts = [d[2].clone() for d in data]
    if spec.policy == "dropless":
        return data, experts
    scopes = f.groups("tp_cp") if spec.drop_scope == "full_sequence" else [(r,) for r in range(f.world)]
    for ranks in scopes:
        all_experts = torch.cat([data[r][2] for r in ranks])
        all_weights = torch.cat([data[r][1] for r in ranks])
        rows = capacity(spec, num_tokens=len(all_experts), top_k=case.top_k, num_experts=case.num_experts)
        kept = torch.from_numpy(kept_by_hand(all_experts, all_weights, rows=rows, by=spec.drop_by))
        parts = torch.where(kept, all_experts, -1).split([case.sizes[r] for r in ranks])
        for r, part in zip(ranks, parts, strict=True):
            experts[r] = part
    return data, experts


@dataclasses.dataclass(frozen=True)
class OneProcess:
    """The dense layer over all ranks' tokens; `y`, `x` and `weights` (the last two: gradients) by rank."""

    kept: list[torch.Tensor]
    y: list[torch.Tensor]
    x: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    copies: list[tuple[torch.Tensor, torch.Tensor]]
    """Weights of the experts with their gradients, of each edp: not yet summed over it."""


def one_process(case):
    f, world = case.folding, case.folding.world
    data, kept = kept_experts(case)
    x = torch.cat([d[0] for d in data]).requires_grad_()
    weights = torch.cat([d[1] for d in data]).requires_grad_()
    copies = [tuple(w.clone().requires_grad_() for w in expert_weights(case.num_experts)) for _ in range(f.edp)]
    tokens, parts = x.split(case.sizes), weights.split(case.sizes)
    y = [dense_experts(tokens[r], parts[r], kept[r], *copies[f.coord(r, "edp")]) for r in range(world)]
    torch.autograd.backward(y, [probe(r, y[r]) for r in range(world)])
    y = [part.detach() for part in y]
    return OneProcess(kept, y, x.grad.split(case.sizes), weights.grad.split(case.sizes), copies)


def slot_sums_of(case, results):
    """Gradients of all experts by edp, put together from the slots of the ranks."""
    f = case.folding
    sums = [[torch.zeros_like(w) for w in expert_weights(case.num_experts)] for _ in range(f.edp)]
    for r, got in enumerate(results):
        add_slots(sums[f.coord(r, "edp")], case, r, got)
    return sums


def check_case(case, results, rtol=1e-12):
    """Outputs and every gradient of every rank against one dense model over all ranks' tokens."""
    want = one_process(case)
    for r, got in enumerate(results):
        close(got["y"], want.y[r], rtol)
        close(got["x"], want.x[r], rtol)
        close(got["weights"], want.weights[r], rtol)
        assert got["dropped"] == int((want.kept[r] < 0).sum())
    for (w13, w2), (sum13, sum2) in zip(want.copies, slot_sums_of(case, results), strict=True):
        close(sum13, grad_of(w13), rtol)
        close(sum2, grad_of(w2), rtol)


def grad_of(w):
    return torch.zeros_like(w) if w.grad is None else w.grad


def add_slots(sums, case, rank, got):
    """Slots add up to their experts; a plain placement adds each once."""
    f = case.folding
    placement = case.placement or plain_placement(case.num_experts, f)
    held = placement.local_experts(edp=f.coord(rank, "edp"), ep=f.coord(rank, "ep"))
    n = F // f.etp
    cut = slice(f.coord(rank, "etp") * n, (f.coord(rank, "etp") + 1) * n)
    for slot, expert in enumerate(held):
        sums[0][expert][:, cut] += got["w13"][slot]
        sums[1][expert][:, cut] += got["w2"][slot]


def close(got, want, rtol):
    assert got.shape == want.shape
    if want.numel():
        scale = want.abs().max().item()
        assert (got - want).abs().max().item() <= rtol * max(scale, 1e-8)


def run_and_check(world, cases):
    results = run_ranks(world, run_cases, cases)
    for i, case in enumerate(cases):
        check_case(case, [r[i] for r in results])
    return [[r[i] for r in results] for i in range(len(cases))]


@pytest.mark.ranks
@pytest.mark.parametrize("name", SPECS)
def test_every_mapping_of_4_ranks(name):
    sizes = (9,) * 4
    run_and_check(4, [Case(f, SPECS[name], sizes, skew) for f in mappings(4) for skew in (0.0, 2.0)])


@pytest.mark.ranks
@pytest.mark.parametrize("grid", [{"tp": 2}, {"cp": 2}, {"tp": 2, "cp": 2}], ids=str)
def test_full_sequence_dropping_spans_the_ranks_of_a_micro_batch(grid):
    specs = [s for n, s in SPECS.items() if "full" in n]
    foldings = [make_folding(world=4, ep=ep, etp=etp, **grid) for ep, etp in ((4, 1), (2, 2), (2, 1))]
    run_and_check(4, [Case(f, s, (8,) * 4, 1.5) for f in foldings for s in specs])


def token_order_case(rank, cache, places, spec, is_text):
    """Full-sequence dropping where the micro-batch's tokens do not lie rank by rank (zigzag)."""
    ctx = context(moe_spec(), folding=make_folding(world=2, cp=2), rank=rank, cache=cache, dispatch=spec)
    dispatcher = Dispatcher(spec, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K)
    x, weights, experts = tokens_of(0, 16, skew=2.0)
    mine = torch.tensor(places[rank])
    is_text_T = None if is_text is None else is_text[mine]
    sent = dispatcher.dispatch(x[mine], weights[mine], experts[mine], token_index_T=mine, is_text_T=is_text_T)
    return sent.state.rows_of_token >= 0


@pytest.mark.ranks
def test_position_means_the_place_in_the_micro_batch():
    kept = kept_of_two_ranks(POLICIES["drop by position, full sequence"])
    _, weights, experts = tokens_of(0, 16, skew=2.0)
    assert torch.equal(kept, torch.from_numpy(kept_by_hand(experts, weights, rows=CAPACITY, by="position")))


CAPACITY = capacity(DROP, num_tokens=16, top_k=K, num_experts=E)


def kept_of_two_ranks(spec, is_text=None):
    places = [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    kept = torch.zeros(16, K, dtype=torch.bool)
    for mine, got in zip(places, run_ranks(2, token_order_case, places, spec, is_text), strict=True):
        kept[mine] = got
    return kept


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name in POLICIES if "full" in name])
def test_padding_takes_no_place_of_text_on_another_rank(name):
    """One of the two ranks has padding, before the other's text."""
    spec, is_text = POLICIES[name], torch.ones(16, dtype=torch.bool)
    is_text[4:11] = False
    _, weights, experts = tokens_of(0, 16, skew=2.0)
    want = torch.zeros(16, K, dtype=torch.bool)
    of_text = kept_by_hand(experts[is_text], weights[is_text], rows=CAPACITY, by=spec.drop_by)
    want[is_text] = torch.from_numpy(of_text)
    got = kept_of_two_ranks(spec, is_text)
    assert torch.equal(got, want) and not torch.equal(got, kept_of_two_ranks(spec))


@pytest.mark.parametrize("name", POLICIES)
def test_padding_behind_two_sequences_in_a_layer(name):
    """Nothing of it is computed or told, and what is dropped is text."""
    spec = POLICIES[name]
    ctx = context(LAYER, dispatch=spec)
    layer = MoE(ctx, 0)
    fill(layer, ctx)
    layer.shared = None
    x = torch.randn(16, 16, generator=generator("padding"), dtype=torch.float64)
    x[5:8], x[13:] = x[5], x[5]
    is_text = torch.arange(16) % 8 < 5
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    with torch.no_grad():
        y, stats = layer(x, ForwardInfo(), TokenBatch(tokens, tokens, tokens, ((5, 3),) * 2, padding=(3, 3)))
        routing = layer.router(x, ForwardInfo(), num_sequences=2)
    experts = torch.where(is_text.unsqueeze(1), routing.experts_TK, -1)
    dropped = 0
    if spec.policy == "drop":
        rows = capacity(spec, num_tokens=16, top_k=K, num_experts=E)
        kept = torch.from_numpy(kept_by_hand(experts[is_text], routing.weights_TK[is_text], rows=rows, by=spec.drop_by))
        experts[is_text] = torch.where(kept, experts[is_text], -1)
        dropped = int((~kept).sum())
    assert int(stats.dropped) == dropped
    close(y, dense_experts(x, routing.weights_TK, experts, layer.experts.w13, layer.experts.w2).detach(), 1e-12)
    counts = torch.bincount(routing.experts_TK[is_text].flatten(), minlength=E)
    assert torch.equal(stats.counts_E, counts) and torch.equal(stats.balance_counts_E, counts)


# ---- adversarial routing -------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
def test_adversarial_routing(transport):
    """Ranks without tokens, one token in total, none at all, everything to the lowest experts, all experts for every token."""
    spec = dataclasses.replace(DROPLESS, transport=transport)
    cases = []
    for f in mappings(4):
        cases += [
            Case(f, spec, (5, 0, 3, 0)),
            Case(f, spec, (0, 0, 1, 0)),
            Case(f, spec, (0, 0, 0, 0)),
            Case(f, spec, (6, 7, 8, 9), skew=100.0),  # every token to experts 0 and 1
            Case(f, spec, (0, 9, 0, 0), skew=100.0),
            Case(f, spec, (3, 1, 2, 4), top_k=E),
            Case(f, spec, (4, 4, 4, 4), top_k=1, skew=100.0),  # all tokens to one expert
        ]
    for case, results in zip(cases, run_and_check(4, cases), strict=True):
        assert all(r["dropped"] == 0 for r in results), case


@pytest.mark.ranks
def test_adversarial_dropping():
    """Capacity of one row, of everything, and a policy that drops nearly all."""
    tiny, wide = (dataclasses.replace(DROP, capacity_factor=c) for c in (1e-9, 100.0))
    specs = [dataclasses.replace(s, pad_to_capacity=p) for s in (tiny, wide) for p in (False, True)]
    run_and_check(4, [Case(f, s, (6,) * 4, 100.0) for f in mappings(4) for s in specs])
    uneven = [Case(f, s, (6, 0, 1, 3), 100.0) for f in mappings(4) for s in (tiny, wide)]
    run_and_check(4, uneven)


# ---- replicated experts --------------------------------------------------------------------------------------------------


def replicated(folding, *groups):
    placement = Placement(num_experts=4, slots=tuple(groups) if len(groups) == folding.edp else groups * folding.edp)
    placement.check()
    return placement


@pytest.mark.ranks
@pytest.mark.parametrize("name", SPECS)
def test_replicas_share_the_rows_of_their_expert(name):
    """Hot experts on several ranks, twice on one, in odd order, differently in each expert-parallel group."""
    four = make_folding(world=4, ep=4)
    pairs = make_folding(world=4, ep=2, etp=2)
    two = make_folding(world=4, ep=2)
    one = make_folding(world=4, ep=1)
    cases = [
        (four, replicated(four, ((0, 3), (0, 1), (2, 0), (1, 0)))),
        (pairs, replicated(pairs, ((3, 0, 0), (1, 0, 2)))),
        (two, replicated(two, ((0, 1, 2), (3, 0, 0)), ((2, 3, 1), (1, 1, 0)))),
        (one, replicated(one, ((2, 0, 1, 3, 0),))),
        (four, replicated(four, ((3,), (2,), (1,), (0,)))),  # one replica each, but not in order
    ]
    run_and_check(
        4,
        [Case(f, SPECS[name], (7,) * 4, skew, placement=p, num_experts=4) for f, p in cases for skew in (0.0, 3.0)],
    )


# ---- order, identity and bytes -------------------------------------------------------------------------------------------


def arrival_case(rank, cache, folding, spec, placement, sizes):
    ctx = context(moe_spec(num_experts=4), folding=folding, rank=rank, cache=cache, dispatch=spec, placement=placement)
    dispatcher = Dispatcher(spec, placement=ctx.placement, groups=ctx.groups, comms=ctx.comms, top_k=K)
    _, weights, experts = tokens_of(rank, sizes[rank], num_experts=4, skew=0.5)
    code = torch.stack([torch.full((sizes[rank],), float(rank)), torch.arange(sizes[rank], dtype=torch.float32)], 1)
    sent = dispatcher.dispatch(code, weights, experts)
    return sent.rows_MH, sent.weights_M, sent.counts


@pytest.mark.ranks
@pytest.mark.parametrize("transport", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("ep,etp", [(4, 1), (2, 2), (1, 4)])
def test_rows_arrive_in_the_order_of_the_plan(ep, etp, transport):
    folding = make_folding(world=4, ep=ep, etp=etp)
    sizes = (5, 0, 8, 3)
    slots = {4: ((0, 3), (0, 1), (2, 0), (1, 0)), 2: ((3, 0, 0), (1, 0, 2)), 1: ((2, 0, 1, 3, 0),)}[ep]
    placement = replicated(folding, slots)
    spec = dataclasses.replace(DROPLESS, transport=transport)
    results = run_ranks(4, arrival_case, folding, spec, placement, sizes)
    data = [tokens_of(r, n, num_experts=4, skew=0.5) for r, n in enumerate(sizes)]
    counts = np.array([np.bincount(d[2].flatten(), minlength=4) for d in data])
    plan = plan_local_dispatch(counts, placement.group_slots(0), ep=ep, etp=etp)
    wanted = rows_by_hand([d[2].numpy() for d in data], plan)
    e = plan.slots_per_rank
    for rank, (rows, weights, expert_counts) in enumerate(results):
        p = folding.coord(rank, "ep")
        mine = wanted[p * e : (p + 1) * e]
        of_expert = dict.fromkeys(plan.slots_G[p * e : (p + 1) * e], 0)
        for expert, here in zip(plan.slots_G[p * e : (p + 1) * e], mine, strict=True):
            of_expert[expert] += len(here)
        assert list(expert_counts) == list(of_expert.values())
        flat = [row for rows in mine for row in rows]
        assert rows.int().tolist() == [[source, token] for source, token, _ in flat]
        assert weights.tolist() == [data[s][1][t, k].item() for s, t, k in flat]


def bytes_case(rank, cache, folding, spec, sizes):
    comms = Collectives(timeout_s=240)
    case = Case(folding, spec, sizes)
    run_case(rank, cache, case, comms)
    return {k: (c.calls, c.sent_bytes) for k, c in comms.counters.items()}


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("ep,etp", [(4, 1), (2, 2), (1, 4), (2, 1)])
def test_bytes_are_those_of_the_plan(ep, etp):
    """Forward and backward: one count exchange; rows over ep twice, over etp once each way; weights once; backward mirrored."""
    folding, sizes = make_folding(world=4, ep=ep, etp=etp), (9, 4, 0, 6)
    results = run_ranks(4, bytes_case, folding, DROPLESS, sizes)
    for rank, got in enumerate(results):
        plan, here = plan_of(folding, sizes, rank)
        sends, receives = plan.sends(**here), plan.receives(**here)
        m, sizes_etp = sum(receives), plan.etp_sizes(ep=here["ep"])
        away, back = sum(sends) - sends[here["ep"]], m - receives[here["ep"]]
        row, weight = H * 8, 8
        want = {}
        if ep * etp > 1:
            want[("all_gather", "ep_etp")] = (1, E * 8 * (ep * etp - 1))
        if ep > 1:  # rows there and back, weights there; their gradients the other way
            want[("all_to_all_rows", "ep")] = (6, (2 * row + weight) * (away + back))
        if etp > 1:
            gathered = (row + weight) * m * (etp - 1) + row * m * (
                etp - 1
            )  # forward, and the gradient of the reduce-scatter
            scattered = (2 * row + weight) * (sum(sizes_etp) - m)
            want[("all_gather_rows", "etp")] = (3, gathered)
            want[("reduce_scatter_rows", "etp")] = (3, scattered)
        assert got == want


def plan_of(folding, sizes, rank):
    members = folding.group_of(rank, "ep_etp")
    counts = [np.bincount(tokens_of(r, sizes[r])[2].flatten(), minlength=E) for r in members]
    plan = plan_dispatch(counts, range(E), ep=folding.ep, etp=folding.etp)
    return plan, {"ep": folding.coord(rank, "ep"), "etp": folding.coord(rank, "etp")}


@pytest.mark.ranks
def test_bytes_of_balanced_routing_are_the_formula_of_the_paper():
    """n K H (EP - 1) / EP elements each way over ep, n K H (ETP - 1) over etp (folding reference, section 1.4)."""
    n = 8
    for ep, etp in ((4, 1), (2, 2), (1, 4)):
        folding = make_folding(world=4, ep=ep, etp=etp)
        for got in run_ranks(4, balanced_bytes, folding, n):
            if ep > 1:
                assert got[("all_to_all_rows", "ep")] == (3, 8 * (2 * n * K * H + n * K) * (ep - 1) // ep)
            if etp > 1:
                assert got[("all_gather_rows", "etp")] == (2, 8 * (n * K * H + n * K) * (etp - 1))
                assert got[("reduce_scatter_rows", "etp")] == (1, 8 * n * K * H * (etp - 1))


def balanced_bytes(rank, cache, folding, n):
    comms = Collectives(timeout_s=240)
    ctx = context(moe_spec(), folding=folding, rank=rank, cache=cache, comms=comms)
    dispatcher = Dispatcher(DROPLESS, placement=ctx.placement, groups=ctx.groups, comms=comms, top_k=K)
    experts = (torch.arange(n * K) % E).view(n, K)
    sent = dispatcher.dispatch(torch.ones(n, H, dtype=torch.float64), torch.ones(n, K, dtype=torch.float64), experts)
    dispatcher.combine(sent.rows_MH, sent.state)
    return {k: (c.calls, c.sent_bytes) for k, c in comms.counters.items()}


@pytest.mark.ranks
def test_padded_mode_exchanges_no_counts():
    folding = make_folding(world=4, ep=2, etp=2)
    for transport, gathers in (("all_to_all", 0), ("all_gather", 0)):
        spec = dataclasses.replace(POLICIES["padded"], transport=transport)
        for got in run_ranks(4, bytes_case, folding, spec, (8,) * 4):
            assert got.get(("all_gather", "ep_etp"), (0, 0))[0] == gathers


# ---- one rank, no processes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_one_rank_needs_no_communication(name):
    comms = Collectives()
    case = Case(make_folding(world=1), POLICIES[name], (11,), 1.0)
    check_case(case, [run_case(0, None, case, comms)])
    assert comms.counters == {}


@pytest.mark.parametrize("by", ["probability", "position"])
def test_kept_pairs_equal_the_loop(by):
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        experts = largest(torch.rand(13, 6, generator=g), 3)
        weights = torch.randint(0, 4, (13, 3), generator=g) / 4.0  # many exact ties
        for rows in (0, 1, 4, 13):
            got = kept_pairs(weights, experts, rows=rows, by=by)
            assert (got.numpy() == kept_by_hand(experts, weights, rows=rows, by=by)).all()


def test_stable_order_of_many_experts():
    keys = torch.randint(0, 40000, (500,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(stable_order(keys, 40000), torch.sort(keys, stable=True).indices)
    for most in (2**15 - 1, 2**15):  # the last one of 16 bits with a sign, and the first that is none
        assert stable_order(torch.tensor([most, 5, 0, most]), most).tolist() == [2, 1, 0, 3]
    small = keys % 7
    assert torch.equal(stable_order(small, 7), torch.sort(small, stable=True).indices)


class SilentCollectives(Collectives):
    """Answers with tensors of the right shape and no data."""

    def all_to_all_rows(self, x, *, out_splits, axis, **_):
        return x if axis.size == 1 else x.new_empty((sum(out_splits), *x.shape[1:]))

    def all_gather_rows(self, x, *, sizes, axis, **_):
        return x if axis.size == 1 else x.new_empty((sum(sizes), *x.shape[1:]))

    def reduce_scatter_rows(self, x, *, sizes, axis, **_):
        return x if axis.size == 1 else x.new_empty((sizes[axis.index], *x.shape[1:]))


class CountingDispatcher(Dispatcher):
    """Answers the one question that needs the host from a table, counts how often it is asked, and takes down when rows are picked and when the host waits."""

    asked = 0
    order: tuple[str, ...] = ()

    def finish_list(self, begun):
        self.order += ("wait",)
        return super().finish_list(begun)

    def pick(self, *given, **how):
        self.order += ("rows",)
        return super().pick(*given, **how)

    def _gather_counts(self, counts_E, told, op_prefix, known):
        self.asked += 1
        size, further = self.ep_etp.size, 0 if told is None else len(told)
        table = np.concatenate([np.full((size, E), 8 * K // E), np.full((size, further), 8)], axis=1)
        return CountsUnderWay(torch.empty(table.size, dtype=torch.int64, device="meta"), torch.from_numpy(table))


@pytest.mark.core
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("ep,etp", [(1, 1), (2, 2), (4, 1)])
def test_host_synchronisations(name, ep, etp):
    """On tensors without data nothing can be read back: one look at the host in dropless and dropping mode, none when padded."""
    spec, folding = SPECS[name], make_folding(world=4, ep=ep, etp=etp)
    axes = {n: Axis(n, folding.group_of(0, n), 0, None) for n in GROUP_AXES}
    groups = Groups(folding=folding, rank=0, axes=axes)
    dispatcher = CountingDispatcher(
        spec,
        placement=plain_placement(E, folding),
        groups=groups,
        comms=SilentCollectives(),
        top_k=K,
        kernels="reference",
    )
    x = torch.empty(8, H, device="meta", requires_grad=True)
    weights = torch.empty(8, K, device="meta", requires_grad=True)
    experts = torch.empty(8, K, dtype=torch.int64, device="meta")
    sent = dispatcher.dispatch(x, weights, experts)
    y = dispatcher.combine(sent.rows_MH * sent.weights_M.unsqueeze(1), sent.state)
    if ep * etp == 1:
        y.sum().backward()
        assert x.grad.shape == x.shape and weights.grad.shape == weights.shape
    assert y.shape == x.shape
    assert dispatcher.asked == (0 if spec.is_static else 1)
    if not spec.is_static and (spec.transport == "all_to_all" or ep * etp == 1):
        early = spec.policy == "dropless"  # all pairs travel: rows are picked while the counts come
        assert dispatcher.order == (("rows", "wait") if early else ("wait", "rows"))


# ---- the layer -----------------------------------------------------------------------------------------------------------


def layer_case(rank, cache, folding, spec, model, data_RTH, dtype):
    ctx = context(
        model,
        folding=folding,
        rank=rank,
        cache=cache,
        dispatch=spec,
        dtype=dtype,
    )
    layer = MoE(ctx, 0)
    fill(layer, ctx)
    x = data_RTH[rank].to(dtype).requires_grad_()
    tokens = torch.zeros(2, len(x) // 2, dtype=torch.int64)
    batch = TokenBatch(tokens, tokens, tokens, ((len(x) // 2,),) * 2)
    y, stats = layer(x, ForwardInfo(microbatch=rank, num_microbatches=len(data_RTH)), batch)
    (y.square().sum() / 64 + stats.aux_loss + stats.z_loss).backward()
    grads = {n: p.grad for n, p in layer.named_parameters() if not n.startswith("experts")}
    return y.detach(), x.grad, grads, stats.counts_E, int(stats.dropped)


def fill(layer, ctx):
    initialise([(f"layers.0.moe.{n}", p) for n, p in layer.named_parameters()], ctx)
    with torch.no_grad():
        for p in layer.parameters():
            p.mul_(10)  # 0.02 is too small to see errors


LAYER = dataclasses.replace(
    moe_spec(hidden=16, expert_ffn=32, aux_loss=0.1, z_loss=0.01, renormalize=True), shared_ffn=16, shared_gate=True
)


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("dtype,rtol", [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=str)
def test_layer_is_the_same_on_every_mapping(dtype, rtol):
    data = torch.randn(4, 8, 16, generator=generator("layer"), dtype=torch.float64)
    for policy in ("dropless", "padded"):
        spec = POLICIES[policy]
        want = run_ranks(4, layer_case, make_folding(world=4), spec, LAYER, data, dtype)
        for folding in mappings(4)[1:]:
            for got, one in zip(run_ranks(4, layer_case, folding, spec, LAYER, data, dtype), want, strict=True):
                assert torch.equal(got[3], one[3]) and got[4] == one[4]
                for a, b in [(got[0], one[0]), (got[1], one[1]), *((got[2][n], one[2][n]) for n in one[2])]:
                    close(a.double(), b.double(), rtol)


def test_shared_expert_and_gate():
    ctx = context(LAYER)
    layer = MoE(ctx, 0)
    fill(layer, ctx)
    assert [n for n, _ in layer.named_parameters()] == [
        "router.weight",
        "experts.w13",
        "experts.w2",
        "shared.w13",
        "shared.w2",
        "shared.gate",
    ]
    x = torch.randn(6, 16, generator=generator("shared"), dtype=torch.float64)
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    y, stats = layer(x, ForwardInfo(), TokenBatch(tokens, tokens, tokens, ((6,),)))
    routing = layer.router(x, ForwardInfo(), num_sequences=1)
    routed = dense_experts(x, routing.weights_TK, routing.experts_TK, layer.experts.w13, layer.experts.w2)
    gate, up = x @ layer.shared.w13[0].T, x @ layer.shared.w13[1].T
    shared = (gate * torch.sigmoid(gate) * up) @ layer.shared.w2.T
    close(y.detach(), (routed + shared * torch.sigmoid(x @ layer.shared.gate.T)).detach(), 1e-12)
    assert int(stats.counts_E.sum()) == 6 * K and int(stats.dropped) == 0


def odd_layer_case(rank, cache, folding, sizes, top_k, ties):
    """A layer on odd numbers of tokens; with `ties` all router scores are equal."""
    spec = dataclasses.replace(LAYER, top_k=top_k)
    ctx = context(spec, folding=folding, rank=rank, cache=cache)
    layer = MoE(ctx, 0)
    fill(layer, ctx)
    if ties:
        with torch.no_grad():
            layer.router.weight.zero_()
    n = sizes[rank]
    x = torch.randn(n, 16, generator=generator("odd", rank), dtype=torch.float64).requires_grad_()
    y, stats = layer(x, ForwardInfo(), batch_of(n))
    (y.square().sum() + stats.aux_loss + stats.z_loss).backward()
    want = layer_by_hand(x.detach(), layer.router.weight.detach(), spec, ctx)
    close(y.detach(), want, 1e-12)
    return stats.counts_E.tolist(), bool(torch.isfinite(x.grad).all()), layer.experts.w13.grad.abs().sum().item()


def batch_of(num_tokens):
    tokens = torch.zeros(1, num_tokens, dtype=torch.int64)
    return TokenBatch(tokens, tokens, tokens, ((num_tokens,),))


def layer_by_hand(x, router_weight, spec, ctx):
    """The layer's output from whole weights, as every rank can compute it for its own tokens."""
    alone = context(spec)
    alone = dataclasses.replace(ctx, groups=alone.groups, placement=alone.placement)
    whole = MoE(alone, 0)
    fill(whole, alone)
    probs = torch.softmax(x @ router_weight.T, -1)
    experts = largest(probs, spec.top_k)
    weights = probs.gather(-1, experts)
    if spec.top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    with torch.no_grad():
        return dense_experts(x, weights, experts, whole.experts.w13, whole.experts.w2) + whole.shared(
            x, ForwardInfo(), batch_of(len(x))
        )


@pytest.mark.ranks
@pytest.mark.parametrize("ep,etp", [(4, 1), (2, 2), (1, 4), (2, 1)])
def test_layer_survives_adversarial_routing(ep, etp):
    """Exact ties (all tokens to the lowest experts), ranks without tokens, one token in total, none, a single expert for all."""
    folding = make_folding(world=4, ep=ep, etp=etp)
    for sizes in ((8, 8, 8, 8), (0, 5, 0, 2), (0, 0, 0, 1), (0, 0, 0, 0)):
        for top_k in (1, 2, E):
            got = run_ranks(4, odd_layer_case, folding, sizes, top_k, True, timeout_s=400)
            for n, (counts, finite, _) in zip(sizes, got, strict=True):
                assert finite and counts == [n] * top_k + [0] * (E - top_k)
            assert sum(g[2] for g in got) > 0 or sum(sizes) == 0
    run_ranks(4, odd_layer_case, folding, (0, 0, 1, 3), 2, False, timeout_s=400)


class AbortedCollectives(SilentCollectives):
    """Answers with tensors of the right shape that hold anything, as NCCL's kernels do that were aborted."""

    def all_to_all_rows(self, x, *, out_splits, axis, **_):
        return x if axis.size == 1 else anything(x, sum(out_splits))

    def all_gather_rows(self, x, *, sizes, axis, **_):
        return x if axis.size == 1 else anything(x, sum(sizes))

    def all_gather(self, x, axis, **_):
        return x if axis.size == 1 else anything(x, axis.size * len(x))


def anything(x, rows):
    shape = (rows, *x.shape[1:])
    if x.is_floating_point():
        return x.detach().new_full(shape, torch.nan)
    info = torch.iinfo(x.dtype)
    return torch.randint(info.min, info.max, shape, dtype=x.dtype, generator=generator(3))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("ep,etp", [(2, 2), (4, 1)])
def test_nothing_is_indexed_by_what_an_aborted_message_holds(name, ep, etp):
    """The device works on what was launched before the abort, and an index outside of a tensor ends a process on a GPU. Sizes were known by then."""
    spec, folding = SPECS[name], make_folding(world=4, ep=ep, etp=etp)
    axes = {n: Axis(n, folding.group_of(0, n), 0, None) for n in GROUP_AXES}
    dispatcher = CountingDispatcher(
        spec,
        placement=plain_placement(E, folding),
        groups=Groups(folding=folding, rank=0, axes=axes),
        comms=AbortedCollectives(),
        top_k=K,
        kernels="reference",
    )
    sent = dispatcher.dispatch(torch.zeros(8, H), torch.ones(8, K), torch.arange(8 * K).view(8, K) % E)
    y = dispatcher.combine(sent.rows_MH * sent.weights_M.unsqueeze(1), sent.state)
    assert y.shape == (8, H)


@pytest.mark.parametrize("aborted", [False, True])
def test_sizes_are_read_of_no_message_that_was_aborted(aborted):
    comms, counts = Collectives(escape=AbortableCall(lambda: aborted)), torch.arange(6)
    under_way = CountsUnderWay(counts, counts, done=SimpleNamespace(synchronize=lambda: None), comms=comms)
    with pytest.raises(PeerError, match="aborted") if aborted else nullcontext():
        assert counts_on_host(under_way).tolist() == counts.tolist()


def test_a_layer_that_runs_again_goes_by_the_counts_of_its_first_run():
    comms, counts = Collectives(), torch.arange(6)
    known = KnownCounts(counts=counts, table=counts.numpy())
    for gathered, otherwise in ((counts.clone(), False), (anything(counts, 6), True)):
        assert to_host(gathered, known, comms).gathered is counts
        assert bool(comms.doubts.pop()) is otherwise


def test_places_that_another_rank_tells_are_within_its_rows():
    places = told_places(anything(torch.zeros(1, dtype=torch.int32), 40))
    (found,) = entries_of_all([(places, (10, 40), None)])
    assert int(found.outbound_of_row.min()) >= 0 and int(found.outbound_of_row.max()) < 40
    right = torch.arange(40, dtype=torch.int32)
    assert torch.equal(told_places(right), right.to(torch.int64))
