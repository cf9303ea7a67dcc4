"""The router against plain loops over tokens and experts, and its losses against their formulas on any grid."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from moe_help import context, moe_spec, with_router

from phalanx.cli.predicting.packaged import packaged_recipes
from phalanx.core.errors import RunError
from phalanx.core.recipe import load_recipe
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.router import Router, choose_experts, counts_of_text, largest, routing_weights, update_expert_bias
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import RouterSpec, resolve_model
from phalanx.plan.moe.workload import forced_experts
from ranks import run_ranks

E, K, T = 8, 3, 24


def logits(seed=0, shape=(T, E), dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tied_logits(seed=0, shape=(T, E)):
    """Few distinct values, so that most choices meet ties."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(torch.float64)


# ---- one token, as the papers write it ----------------------------------------------------------------------------------


def softmax_of(values):
    top = max(values)
    powers = [math.exp(v - top) for v in values]
    return [p / sum(powers) for p in powers]


def best(values, k, allowed=None):
    """Ids of the k largest, the lowest id first among equals."""
    ids = range(len(values)) if allowed is None else allowed
    return sorted(ids, key=lambda i: (-values[i], i))[:k]


def route_token(row, spec, k, bias=None):
    """(experts, weights) of one token."""
    scores = [1 / (1 + math.exp(-v)) for v in row] if spec.score == "sigmoid" else softmax_of(row)
    after = spec.softmax_order == "after_topk"
    by_logits = after and spec.score == "softmax"
    choice = [s + b for s, b in zip(row if by_logits else scores, bias or [0.0] * len(row), strict=True)]
    width = len(row) // spec.num_groups
    members = [list(range(g * width, (g + 1) * width)) for g in range(spec.num_groups)]
    take = 2 if spec.group_score == "top2" else max(1, k // spec.group_topk)
    group_scores = [sum(sorted((choice[i] for i in m), reverse=True)[:take]) for m in members]
    allowed = sorted(i for g in best(group_scores, spec.group_topk) for i in members[g])
    chosen = best(choice, k, allowed)
    if after:
        weights = softmax_of([row[i] for i in chosen])
    else:
        weights = [scores[i] for i in chosen]
        if spec.renormalize and k > 1:
            weights = [w / (sum(weights) + 1e-20) for w in weights]
    return chosen, [w * spec.scale for w in weights]


SPECS = {
    "softmax, then top-k (Qwen2)": RouterSpec(score="softmax", softmax_order="before_topk"),
    "softmax, top-k, renormalised (Qwen3)": RouterSpec(score="softmax", softmax_order="before_topk", renormalize=True),
    "top-k, then softmax (Mixtral)": RouterSpec(score="softmax", softmax_order="after_topk", scale=0.5),
    "sigmoid": RouterSpec(score="sigmoid"),
    "sigmoid, top-k, softmax": RouterSpec(score="sigmoid", softmax_order="after_topk", bias_rate=1e-3),
    "groups, sum of top-k": RouterSpec(score="softmax", num_groups=4, group_topk=2, group_score="sum_topk"),
    "groups of logits": RouterSpec(score="softmax", softmax_order="after_topk", num_groups=2, group_topk=1),
    "DeepSeek-V3": RouterSpec(
        score="sigmoid", renormalize=True, scale=2.5, num_groups=4, group_topk=2, group_score="top2", bias_rate=1e-3
    ),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("ties", [False, True])
def test_choice_and_weights_follow_the_published_rule(name, ties):
    spec = SPECS[name]
    logits_TE = tied_logits() if ties else logits()
    bias = [0.25 * (i % 3) for i in range(E)] if spec.bias_rate else None
    router = router_of(spec, bias)
    got = router(logits_TE, ForwardInfo(), num_sequences=1)
    for t, row in enumerate(logits_TE.tolist()):
        experts, weights = route_token(row, spec, K, bias)
        assert got.experts_TK[t].tolist() == experts
        assert got.weights_TK[t].tolist() == pytest.approx(weights, rel=1e-13)
    assert got.counts_E.tolist() == [(got.experts_TK == e).sum().item() for e in range(E)]


def router_of(spec, bias=None, *, top_k=K, num_experts=E, dtype=torch.float64):
    """A router whose logits are its input."""
    model = with_router(moe_spec(num_experts=num_experts, top_k=top_k, hidden=num_experts), **vars(spec))
    router = Router(context(model, dtype=dtype), 0)
    with torch.no_grad():
        router.weight.copy_(torch.eye(num_experts))
        if bias is not None:
            router.expert_bias.copy_(torch.tensor(bias))
    return router


@pytest.mark.parametrize("name", SPECS)
def test_weights_are_differentiated(name):
    spec, x = SPECS[name], logits(3, (5, E)).requires_grad_()

    def weights(x):
        scores = torch.sigmoid(x) if spec.score == "sigmoid" else torch.softmax(x, -1)
        after = spec.score == "softmax" and spec.softmax_order == "after_topk"
        experts = choose_experts((x if after else scores).detach(), top_k=K, spec=spec)
        return routing_weights(x, scores, experts, spec)

    assert torch.autograd.gradcheck(weights, (x,))


def test_logits_gradient_keeps_narrow_input():
    router = router_of(SPECS["sigmoid"])
    x = logits(4, (7, E)).requires_grad_()
    probe = logits(5, (7, K))
    (router(x, ForwardInfo(), num_sequences=1).weights_TK * probe).sum().backward()
    weight = torch.eye(E, dtype=torch.float64, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    scores = torch.sigmoid(x2 @ weight.T)
    (scores.gather(-1, largest(scores.detach(), K)) * probe).sum().backward()
    torch.testing.assert_close(x.grad, x2.grad, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-13, atol=1e-15)


def test_equal_scores_go_to_the_lowest_expert():
    assert largest(torch.zeros(2, 5), 3).tolist() == [[0, 1, 2]] * 2
    assert largest(torch.tensor([[1.0, 3.0, 3.0, 1.0, 3.0]]), 4).tolist() == [[1, 2, 4, 0]]
    zero = router_of(SPECS["DeepSeek-V3"])(torch.zeros(3, E, dtype=torch.float64), ForwardInfo(), num_sequences=1)
    assert zero.experts_TK.tolist() == [[0, 1, 2]] * 3


def test_no_group_is_chosen_for_a_masked_expert():
    spec = RouterSpec(score="softmax", softmax_order="after_topk", num_groups=4, group_topk=2)
    scores = torch.full((1, 8), -50.0, dtype=torch.float64)
    scores[0, 6] = 50.0
    assert choose_experts(scores, top_k=4, spec=spec).tolist() == [[6, 0, 1, 7]]


def test_bfloat16_tokens_are_scored_in_float32():
    router = router_of(SPECS["softmax, then top-k (Qwen2)"], dtype=torch.bfloat16)
    with torch.no_grad():
        router.weight.copy_(torch.full((E, E), 0.25) + torch.eye(E) / 256)  # differences that a bf16 logit would lose
    x = (torch.arange(E).flip(0) / 8 + 8).to(torch.bfloat16).expand(2, E).contiguous().requires_grad_()
    got = router(x, ForwardInfo(), num_sequences=1)
    assert got.weights_TK.dtype == torch.float32
    assert got.experts_TK.tolist() == [[0, 1, 2]] * 2
    assert len(set(got.weights_TK[0].tolist())) == K
    exact = torch.softmax(x.detach().double() @ router.weight.detach().double().T, -1)[:, :K]
    torch.testing.assert_close(got.weights_TK.double(), exact, rtol=1e-5, atol=0)
    got.weights_TK.sum().backward()
    assert x.grad.dtype == router.weight.grad.dtype == torch.bfloat16


def test_a_single_weight_is_not_divided_by_itself():
    spec = RouterSpec(score="softmax", renormalize=True)
    got = router_of(spec, top_k=1)(logits(), ForwardInfo(), num_sequences=1)
    assert (got.weights_TK < 1).all()


# ---- losses -------------------------------------------------------------------------------------------------------------


def aux_by_hand(probs_TE, counts_E, coef, k):
    """coef * E / (K T^2) * sum_i f_i sum_x p_i(x) for one set of tokens."""
    n, e = probs_TE.shape
    return coef * e / (k * n * n) * sum(int(counts_E[i]) * sum(p for p in probs_TE[:, i]) for i in range(e))


def free_counts(rows_TE, k):
    return [sum(i in best(row, k) for row in rows_TE.tolist()) for i in range(rows_TE.shape[1])]


def step_by_hand(tokens_MBSE, spec, k, padding_MB):
    """(aux, z) of a step: M micro-batches of B sequences of S tokens, given as logits, the last of which may be padding."""
    size = tokens_MBSE.shape[2]
    text = [
        [x_SE[: size - n] for x_SE, n in zip(x_BSE, padding_B, strict=True)]
        for x_BSE, padding_B in zip(tokens_MBSE, padding_MB, strict=True)
    ]
    micro_batches = [torch.cat(sequences) for sequences in text]
    sets = {
        "micro_batch": micro_batches,
        "sequence": list(itertools.chain(*text)),
        "global_batch": [torch.cat(micro_batches)],
    }
    terms = []
    for x_TE in sets[spec.aux_scope]:
        probs = torch.softmax(x_TE, -1)
        if spec.score == "sigmoid":
            probs = torch.sigmoid(x_TE) / torch.sigmoid(x_TE).sum(-1, keepdim=True)
        terms.append(aux_by_hand(probs, free_counts(probs, k), spec.aux_loss, k) if len(probs) else 0.0)
    squares = [torch.logsumexp(x_TE, -1).square() for x_TE in micro_batches]
    z = spec.z_loss * sum(x_T.sum() / max(len(x_T), 1) for x_T in squares) / len(squares)
    return sum(terms) / len(terms), z


LOSSES = [
    (score, scope, limited)
    for score, scope in itertools.product(("softmax", "sigmoid"), ("micro_batch", "sequence", "global_batch"))
    for limited in (False, True)
]


def loss_spec(score, scope, limited):
    more = {"num_groups": 4, "group_topk": 2, "bias_rate": 0.1} if limited else {}
    return RouterSpec(score=score, aux_loss=0.3, aux_scope=scope, z_loss=0.02, **more)


GRIDS = [{"world": 1}, {"world": 2}, {"world": 4, "tp": 2}, {"world": 4, "cp": 2, "tp": 2}, {"world": 2, "tp": 2}]


NO_PADDING = [(0, 0)] * 4
PADDING = [(0, 3), (8, 8), (0, 0), (8, 2)]
"""Of sequences of 8, in each micro-batch: one has none, one nothing else, one a sequence of it."""


def text_of(x_BSE, part, padding_B):
    """Of a rank that has one of the equal parts of each sequence."""
    count, own = x_BSE.shape[:2]
    whole, mine = (torch.zeros(count, size, dtype=torch.int64) for size in (own * part.size, own))
    index_BS = torch.arange(count).unsqueeze(1) * own * part.size + part.index * own + torch.arange(own)
    segments = ((own * part.size,),) * count
    return TokenBatch(
        mine, mine, mine, segments, index_BS.flatten(), TokenBatch(whole, whole, whole, segments), padding=padding_B
    ).text


def losses_on(rank, cache, grid, microbatches, data_MBSE, cases, padding_MB):
    """This rank's sums of shares and its gradient of the tokens, for each case."""
    folding = make_folding(**grid)
    groups = context(moe_spec(hidden=E), folding=folding, rank=rank, cache=cache).groups
    dp, part = groups.axis("dp"), groups.axis("tp_cp")
    out = []
    for case in cases:
        spec = with_router(moe_spec(num_experts=E, top_k=K, hidden=E), **vars(loss_spec(*case)))
        router = Router(context(spec, folding=folding, rank=rank, cache=cache), 0)
        with torch.no_grad():
            router.weight.copy_(torch.eye(E))
            if router.expert_bias is not None:
                router.expert_bias.copy_(torch.arange(E) * 0.1)  # must not matter for the losses
        mine = data_MBSE[dp.index * microbatches : (dp.index + 1) * microbatches]
        mine = mine.chunk(part.size, dim=2)[part.index].clone().requires_grad_()  # (m, B, S / tp_cp, E)
        texts = [text_of(x, part, padding_MB[dp.index * microbatches + j]) for j, x in enumerate(mine)]
        known = None
        if case[1] == "global_batch" and microbatches > 1:
            info = ForwardInfo(num_microbatches=microbatches * dp.size)
            with torch.no_grad():
                first = [
                    router(x.reshape(-1, E), info, num_sequences=x.shape[0], text=text)
                    for x, text in zip(mine, texts, strict=True)
                ]
            assert all(float(r.aux_loss) == 0 for r in first)
            known = sum(r.balance_counts_E for r in first).view(1, E).to(torch.float64)
            router.comms.all_reduce(known, groups.axis("tp_dp_cp"))
            known = counts_of_text(known, pairs=K * data_MBSE[..., 0].numel())
        total = torch.zeros(2, dtype=torch.float64)
        for j, x in enumerate(mine):
            info = ForwardInfo(microbatch=j, num_microbatches=microbatches * dp.size, balance_counts_LE=known)
            got = router(x.reshape(-1, E), info, num_sequences=x.shape[0], text=texts[j])
            total = total + torch.stack([got.aux_loss, got.z_loss])
        total.sum().backward()
        out.append((total.detach(), mine.grad, router.weight.grad))
    return out, dp.index, part.index


@pytest.mark.core
@pytest.mark.ranks
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("padding", [NO_PADDING, PADDING], ids=["", "padding"])
def test_losses_do_not_depend_on_the_mapping(grid, microbatches, padding):
    """The shares of all ranks add up to the formula over the step's text; gradients likewise."""
    world = grid["world"]
    dp = world // (grid.get("tp", 1) * grid.get("cp", 1))
    data = logits(11, (dp * microbatches, 2, 8, E))
    padding = padding[: len(data)]
    results = run_ranks(world, losses_on, grid, microbatches, data, LOSSES, padding)
    for i, case in enumerate(LOSSES):
        x = data.clone().requires_grad_()
        weight = torch.eye(E, dtype=torch.float64, requires_grad=True)
        aux, z = step_by_hand(x @ weight.T, loss_spec(*case), K, padding)
        (aux + z).backward()
        total = sum(cases[i][0] for cases, _, _ in results)
        assert total.tolist() == pytest.approx([aux.item(), z.item()], rel=1e-12)
        grad_w = sum(cases[i][2] for cases, _, _ in results)
        torch.testing.assert_close(grad_w, weight.grad, rtol=1e-12, atol=1e-15)
        for cases, d, p in results:
            want = x.grad[d * microbatches : (d + 1) * microbatches].chunk(world // dp, dim=2)[p]
            torch.testing.assert_close(cases[i][1], want, rtol=1e-12, atol=1e-15)


def test_balance_loss_of_even_routing_is_the_coefficient():
    """With uniform counts and probabilities the loss is exactly its coefficient, whatever E and K (Switch, section 2.2)."""
    x = torch.eye(E, dtype=torch.float64).repeat(4, 1)
    got = router_of(RouterSpec(aux_loss=0.7), top_k=1)(x, ForwardInfo(), num_sequences=1)
    assert got.aux_loss.detach().item() == pytest.approx(0.7, rel=1e-14)


def test_the_recipe_of_olmoe_has_the_losses_of_its_trainer():
    """0.01 and 0.001 of its configuration, added up over layers as its trainer does (github.com/Muennighoff/megablocks, branch olmoe)."""
    recipe = load_recipe(packaged_recipes()["olmoe-1b-7b-8"])
    spec = resolve_model(recipe.model, recipe.router)
    num_layers, e, k, n = spec.num_layers, spec.num_experts, spec.top_k, 32
    x_LTE, ours = logits(3, (num_layers, n, e)), torch.zeros((), dtype=torch.float64)
    router = Router(context(dataclasses.replace(spec, hidden=e)), 0)
    with torch.no_grad():
        router.weight.copy_(torch.eye(e))
        for x_TE in x_LTE:
            got = router(x_TE, ForwardInfo(), num_sequences=1)
            ours += torch.stack([got.aux_loss, got.z_loss]).sum()
    scores_LE = torch.softmax(x_LTE, -1).mean(1)
    counts_LE = torch.tensor([free_counts(x_TE, k) for x_TE in x_LTE], dtype=torch.float64)
    balance = 0.01 * e / (num_layers * n * k) * (counts_LE * scores_LE).sum()
    z = 0.001 * torch.logsumexp(x_LTE, -1).square().sum() / (num_layers * n * k)
    assert float(ours) == pytest.approx(float(balance + z), rel=1e-12)


def test_global_balance_without_counts_is_an_error_where_it_would_be_wrong():
    router = router_of(RouterSpec(aux_loss=0.1, aux_scope="global_batch"))
    with pytest.raises(RunError, match="balance_counts_LE"):
        router(logits(), ForwardInfo(num_microbatches=2), num_sequences=1)
    with torch.no_grad():
        assert float(router(logits(), ForwardInfo(num_microbatches=2), num_sequences=1).aux_loss) == 0


def test_no_tokens():
    spec = RouterSpec(aux_loss=0.1, z_loss=0.1, aux_scope="sequence", num_groups=4, group_topk=2)
    x = torch.zeros(0, E, dtype=torch.float64, requires_grad=True)
    got = router_of(spec)(x, ForwardInfo(), num_sequences=1)
    (got.aux_loss + got.z_loss + got.weights_TK.sum()).backward()
    assert got.experts_TK.shape == got.weights_TK.shape == (0, K)
    assert [v.detach().item() for v in (got.aux_loss, got.z_loss, got.entropy_sum)] == [0.0] * 3


def test_entropy():
    x = torch.zeros(4, E, dtype=torch.float64)
    got = router_of(RouterSpec())(x, ForwardInfo(), num_sequences=1)
    assert float(got.entropy_sum) == pytest.approx(4 * math.log(E))
    assert not got.entropy_sum.requires_grad


# ---- expert bias --------------------------------------------------------------------------------------------------------


def test_expert_bias_is_a_float32_buffer_that_no_gradient_reaches():
    router = router_of(SPECS["DeepSeek-V3"])
    assert dict(router.named_buffers())["expert_bias"].dtype == torch.float32
    assert [n for n, _ in router.named_parameters()] == ["weight"]
    assert router_of(SPECS["sigmoid"]).expert_bias is None
    router(logits().requires_grad_(), ForwardInfo(), num_sequences=1).weights_TK.sum().backward()
    assert router.expert_bias.grad is None


def test_expert_bias_moves_towards_balance():
    bias = torch.zeros(4)
    update_expert_bias(bias, torch.tensor([9, 3, 4, 0]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.5]
    update_expert_bias(bias, torch.tensor([2**53 + 1, 2**53, 2**53, 2**53 - 1]), 0.5)  # compared as integers
    assert bias.tolist() == [-1.0, 0.5, 0.0, 1.0]


def test_expert_bias_balances_a_skewed_router():
    spec = RouterSpec(score="sigmoid", bias_rate=0.01)
    router = router_of(spec)
    x = logits(7, (256, E)) * 0.3 + torch.linspace(1, 0, E)
    before = router(x, ForwardInfo(), num_sequences=1).counts_E
    for _ in range(100):
        update_expert_bias(router.expert_bias, router(x, ForwardInfo(), num_sequences=1).counts_E, spec.bias_rate)
    after = router(x, ForwardInfo(), num_sequences=1).counts_E
    assert after.max() * 1.8 < before.max() and after.min() > 10 * before.min()


# ---- forced workloads ---------------------------------------------------------------------------------------------------


@pytest.mark.unit
@pytest.mark.parametrize("mode", ["balanced", "imbalanced"])
def test_forced_workload_depends_on_its_arguments_alone(mode):
    def make(**change):
        base = {"num_tokens": 96, "num_experts": 8, "top_k": 3, "seed": 1, "step": 2, "layer": 3}
        return forced_experts(mode, **{**base, **change})

    first = make()
    np.random.default_rng(0).random(3)
    assert (make() == first).all()
    for change in ({"seed": 2}, {"step": 3}, {"layer": 4}, {"step": 3, "layer": 2}, {"step": 1, "layer": 4}):
        assert (make(**change) != first).any()
    assert first.shape == (96, 3) and first.dtype == np.int64
    assert all(len(set(row)) == 3 for row in first.tolist())
    counts = np.bincount(first.ravel(), minlength=8)
    if mode == "balanced":
        assert counts.max() - counts.min() <= 1
    else:
        assert counts.max() > 2 * counts.min()
        flat = np.bincount(make(skew=0.0).ravel(), minlength=8)
        assert flat.max() - flat.min() < counts.max() - counts.min()


def test_forced_imbalance_has_the_weights_that_it_names():
    """Two experts with skew 1: weights 1 and 1/2."""
    chosen = forced_experts("imbalanced", num_tokens=6000, num_experts=2, top_k=1, seed=0, step=0, layer=0)
    assert np.bincount(chosen.ravel()).max() == pytest.approx(4000, abs=150)


def forced_counts(rank, cache, tp):
    spec = with_router(moe_spec(hidden=E, top_k=K), force="imbalanced", force_skew=1.5)
    folding = make_folding(world=2, tp=tp)
    router = Router(context(spec, folding=folding, rank=rank, cache=cache), 0)
    tokens = 16 // folding.tp
    mine = torch.arange(tokens * (rank % tp), tokens * (rank % tp + 1))
    x = logits(rank, (tokens, 16))[:, :E]
    got = router(x, ForwardInfo(step=4), num_sequences=1, token_index_T=mine if tp > 1 else None)
    return got.experts_TK


@pytest.mark.ranks
def test_forced_workload_ignores_data_and_mapping():
    whole, again = run_ranks(2, forced_counts, 1)
    assert torch.equal(whole, again)  # other data, same workload
    assert torch.equal(torch.cat(run_ranks(2, forced_counts, 2)), whole)
