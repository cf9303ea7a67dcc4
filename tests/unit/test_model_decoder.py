"""The decoder on one rank: its parameters against the table, fast against plain, recomputation, initial values of any mapping."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import threading
import time
from typing import Any

import pytest
import torch
from moe_help import context

from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models import layers
from phalanx.models.context import ForwardInfo, ModelContext, TokenBatch
from phalanx.models.decoder import Decoder
from phalanx.models.layers import initialise, local_of, new_parameter
from phalanx.plan.mapping.folding import GROUP_AXES, Folding, make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import PRESETS, MlaSpec, ModelSpec, RouterSpec, buffers, parameters
from phalanx.plan.model.rope import YarnSpec
from phalanx.runtime.comm.groups import Axis, Groups
from phalanx.train.step.loss import objective

SMALL = dataclasses.replace(PRESETS["tiny"], vocab=64)
LATENT = MlaSpec(q_rank=12, kv_rank=10, nope_dim=8, rope_dim=4, value_dim=6)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qk norm per head": {"qk_norm": "head"},
    "qk norm over hidden": {"qk_norm": "hidden"},
    "biases": {"attention_bias": True},
    "tied embeddings": {"tied_embeddings": True},
    "shared expert": {"shared_ffn": 24},
    "gated shared expert": {"shared_ffn": 24, "shared_gate": True},
    "dense first layer": {"dense_layers": 1, "dense_ffn": 40},
    "all dense": {"dense_layers": 2, "dense_ffn": 40},
    "one kv head": {"num_kv_heads": 1},
    "latent": {"mla": LATENT, "num_kv_heads": 4, "head_dim": 12},
    "latent, direct queries, YaRN": {
        "mla": dataclasses.replace(LATENT, q_rank=0, value_dim=16, rope_interleaved=False),
        "num_kv_heads": 4,
        "head_dim": 12,
        "yarn": YarnSpec(factor=4.0, original_length=8, mscale=1.0, mscale_all_dim=0.7),
    },
    "sigmoid with bias": {"router": RouterSpec(score="sigmoid", bias_rate=1e-3, renormalize=True, z_loss=1e-3)},
}
SEGMENTS = ((5, 19), (24,))


def variant(name: str) -> ModelSpec:
    return dataclasses.replace(SMALL, **VARIANTS[name])


def on_paper(spec: ModelSpec, folding: Folding, rank: int = 0, **more: Any) -> ModelContext:
    """A context whose groups exist on paper only: enough for shapes and initial values."""
    placement = plain_placement(spec.num_experts, folding)
    axes = {n: Axis(n, r := folding.group_of(rank, n), r.index(rank), None) for n in GROUP_AXES}
    groups = Groups(folding=folding, rank=rank, axes=axes)
    return dataclasses.replace(context(spec), groups=groups, placement=placement, **more)


def batch(vocab: int = 64) -> TokenBatch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab, (2, 25), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, 4] = IGNORE
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in SEGMENTS])
    return TokenBatch(tokens[:, :-1].contiguous(), labels, positions, SEGMENTS)


def gradients(spec: ModelSpec, **more: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Decoder]:
    """Objective and gradients of one micro-batch."""
    model = Decoder(context(spec, **more))
    info, (stage,) = ForwardInfo(), model.stages
    total, _ = objective(model, model(batch(), info), batch(), info, stage=stage, valid_tokens=torch.tensor(47))
    total.backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return total.detach(), found, model


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of any tensor."""
    assert got.keys() == want.keys()
    return max(
        ((got[n].double() - want[n].double()).abs().max() / want[n].double().abs().max().clamp(min=1e-8)).item()
        for n in want
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_those_of_the_table(name: str) -> None:
    spec = variant(name)
    model = Decoder(context(spec))
    table = {p.name: p.shape for p in parameters(spec)}
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == table
    assert {n: tuple(b.shape) for n, b in model.named_buffers()} == dict(buffers(spec))


@pytest.mark.parametrize("name", VARIANTS)
def test_fast_equals_plain(name: str) -> None:
    spec = variant(name)
    plain_loss, plain, _ = gradients(spec, kernels="reference")
    with Lanes(2) as lanes:
        for options in ({}, {"lanes": lanes}):
            loss, found, _ = gradients(spec, **options)
            assert torch.allclose(loss, plain_loss, rtol=1e-13, atol=0) and worst(found, plain) < 1e-11
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        _, found, _ = gradients(spec, dtype=dtype)
        size = torch.cat([g.flatten() for g in plain.values()]).norm()
        difference = torch.cat([(found[n].double() - plain[n]).flatten() for n in plain]).norm()
        assert difference < tolerance * size, f"{dtype}"


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", ["plain", "qk norm per head", "gated shared expert", "dense first layer"])
def test_recomputation_changes_nothing(name: str, mode: str) -> None:
    """Not the gradients, and not the router's counts: what the second forward pass says is thrown away."""
    for kernels in ("fast", "reference"):
        loss, want, _ = gradients(variant(name), kernels=kernels)
        again, found, _ = gradients(variant(name), kernels=kernels, recompute=mode)
        assert torch.equal(loss, again) and worst(found, want) < 1e-13
    counts = []
    for recompute in ("none", mode):
        model = Decoder(context(variant(name), recompute=recompute))
        output = model(batch(), ForwardInfo())
        before = [r.counts_E.clone() for r in output.routing]
        output.hidden_TH.sum().backward()
        assert all(torch.equal(a, r.counts_E) for a, r in zip(before, output.routing, strict=True))
        counts.append(torch.stack(before))
    assert torch.equal(*counts)


def test_recomputation_keeps_less() -> None:
    """Bytes that autograd holds between forward and backward: none > selective > full."""

    def saved_bytes(mode: str) -> int:
        model = Decoder(context(SMALL, recompute=mode, dtype=torch.float32))
        params = {p.untyped_storage().data_ptr() for p in model.parameters()}
        seen: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            storage = x.untyped_storage()
            if storage.data_ptr() not in params:
                seen[storage.data_ptr()] = storage.nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(batch(), ForwardInfo())
        return sum(seen.values())

    none, selective, full = (saved_bytes(m) for m in ("none", "selective", "full"))
    assert full < 0.5 * selective < 0.5 * none


@pytest.mark.parametrize(
    "degrees", [{"world": 8, "ep": 4, "etp": 2}, {"world": 4, "ep": 2}, {"world": 4, "tp": 2, "etp": 4}]
)
def test_initial_values_do_not_depend_on_the_mapping(degrees: dict[str, int]) -> None:
    spec = dataclasses.replace(SMALL, num_kv_heads=4, shared_ffn=24, attention_bias=True, qk_norm="hidden")
    whole = dict(Decoder(context(spec, seed=7)).named_parameters())
    folding = make_folding(**degrees)
    for rank in range(folding.world):
        ctx = on_paper(spec, folding, rank, seed=7)
        for param in parameters(spec):
            mine = new_parameter(ctx, param.name)
            initialise([(param.name, mine)], ctx)
            for piece in local_of(ctx, param.name).pieces:
                assert torch.equal(mine[piece.local.slices()], whole[param.name][piece.box.slices()]), param.name


def test_initial_values_are_drawn_by_several_threads_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """And there are never more numbers at once than the largest tensor has."""
    draw, lock = layers._drawn, threading.Lock()
    now, peak = 0, 0

    def watched(one: layers._Draw) -> torch.Tensor:
        nonlocal now, peak
        with lock:
            now += math.prod(one.shape)
            peak = max(peak, now)
        time.sleep(0.002)
        drawn = draw(one)
        with lock:
            now -= drawn.numel()
        return drawn

    spec = dataclasses.replace(SMALL, vocab=4096)
    monkeypatch.setattr(layers, "_drawn", watched)
    found, busiest = [], []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        now = peak = 0
        found.append(dict(Decoder(context(spec, seed=7, dtype=torch.float32)).named_parameters()))
        busiest.append(peak)
    assert busiest[0] == busiest[1] == spec.vocab * spec.hidden
    name = "layers.0.moe.experts.w2"
    number = int.from_bytes(hashlib.sha256(f"7/{name}/1".encode()).digest()[:8], "big", signed=True)
    expert = torch.randn(found[0][name].shape[1:], generator=torch.Generator().manual_seed(number))
    std = spec.init_std / next(p.init_over for p in parameters(spec) if p.name == name)
    for params in found:
        assert torch.equal(params[name][1], expert * std)
        assert all(torch.equal(params[n], p) for n, p in found[0].items())


def test_initial_values_follow_seed_and_table() -> None:
    first, second, other = (Decoder(context(SMALL, seed=s)) for s in (1, 1, 2))
    for param in parameters(SMALL):
        a, b, c = (m.get_parameter(param.name) for m in (first, second, other))
        assert torch.equal(a, b)
        if param.init == "normal":
            assert not torch.equal(a, c)
            std = 0.02 / param.init_over
            assert a.std().item() == pytest.approx(std, rel=0.2) and abs(a.mean().item()) < 0.1 * std
            smaller = Decoder(context(dataclasses.replace(SMALL, init_std=0.005), seed=1)).get_parameter(param.name)
            torch.testing.assert_close(smaller, a / 4)
        else:
            assert torch.equal(a, torch.full_like(a, 1.0 if param.init == "ones" else 0.0))
    experts = first.get_parameter("layers.0.moe.experts.w2")
    assert not torch.equal(experts[0], experts[1])
    low = Decoder(context(SMALL, seed=1, dtype=torch.bfloat16))
    assert torch.equal(low.embedding.weight, first.embedding.weight.to(torch.bfloat16)), "drawn in fp32, then rounded"


def test_documents_do_not_see_each_other() -> None:
    """The second document of a packed sequence gets the same hidden states as alone."""
    model = Decoder(context(SMALL))
    packed = batch()
    alone = TokenBatch(packed.tokens_BS[:1, 5:], packed.labels_BS[:1, 5:], packed.positions_BS[:1, 5:], ((19,),))
    with torch.no_grad():
        a = model(packed, ForwardInfo()).hidden_TH[5:24]
        b = model(alone, ForwardInfo()).hidden_TH
    assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def test_a_later_token_changes_nothing_before_it() -> None:
    model = Decoder(context(SMALL))
    first, second = batch(), batch()
    second.tokens_BS[1, 20] = (second.tokens_BS[1, 20] + 1) % 64
    with torch.no_grad():
        a, b = (model(x, ForwardInfo()).hidden_TH.view(2, 24, -1) for x in (first, second))
    assert torch.allclose(a[1, :20], b[1, :20], rtol=1e-12, atol=1e-13) and not torch.allclose(a[1, 20], b[1, 20])


def test_tied_embeddings_share_one_parameter() -> None:
    model = Decoder(context(variant("tied embeddings")))
    assert model.head_weight is model.embedding.weight
