"""Latent attention against its definition written out for one token at a time; padding of values; YaRN's frequencies; its settings."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from moe_help import context

from phalanx.core.config import ModelConfig, RouterConfig
from phalanx.core.errors import ConfigError
from phalanx.kernels.cpu.lanes import SERIAL
from phalanx.kernels.ops.attention import causal_attention
from phalanx.kernels.ops.rope import rope_table
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.latent import LATENT_EPS, LatentAttention
from phalanx.models.layers import initialise
from phalanx.plan.model.model import PRESETS, MlaSpec, ModelSpec, parameters, resolve_model
from phalanx.plan.model.rope import YarnSpec, amplitude, frequencies, softmax_factor

MLA = MlaSpec(q_rank=12, kv_rank=10, nope_dim=8, rope_dim=4, value_dim=6)
YARN = YarnSpec(factor=4.0, original_length=8, mscale=1.0, mscale_all_dim=0.7)
SEGMENTS = ((3, 6), (9,))
H = 16


def spec_of(mla: MlaSpec, yarn: YarnSpec | None = None) -> ModelSpec:
    width = mla.nope_dim + mla.rope_dim
    return dataclasses.replace(
        PRESETS["tiny"], hidden=H, num_heads=3, num_kv_heads=3, head_dim=width, mla=mla, yarn=yarn, rope_theta=20.0
    )


def attention_of(spec: ModelSpec, **more: Any) -> LatentAttention:
    ctx = context(spec, dtype=torch.float64, **more)
    module = LatentAttention(ctx, 0)
    initialise([(f"layers.0.attention.{n}", p) for n, p in module.named_parameters()], ctx)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.2 * noise if p.dim() == 1 else noise / p.shape[-1] ** 0.5)
    return module


def batch_of() -> TokenBatch:
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in SEGMENTS])
    return TokenBatch(torch.zeros_like(positions), torch.zeros_like(positions), positions, SEGMENTS)


def run(module: LatentAttention, spec: ModelSpec, x_TH: torch.Tensor) -> torch.Tensor:
    batch = batch_of()
    table = rope_table(
        batch.positions_BS, head_dim=spec.rotary_dim, theta=spec.rope_theta, dtype=x_TH.dtype, yarn=spec.yarn
    )
    return module(x_TH, table=table, info=ForwardInfo(), batch=batch)


# ---- the definition ---------------------------------------------------------------------------------------------------------------


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean() + LATENT_EPS).sqrt() * weight


def turned(x_R: torch.Tensor, position: int, spec: ModelSpec) -> torch.Tensor:
    """Each pair as a complex number, times `size * exp(i * position * frequency)`."""
    assert spec.mla is not None
    per_position = torch.tensor(frequencies(spec.rotary_dim, spec.rope_theta, spec.yarn), dtype=torch.float64)
    pairs = x_R.view(-1, 2) if spec.mla.rope_interleaved else x_R.view(2, -1).T
    z = torch.complex(pairs[:, 0], pairs[:, 1]) * torch.polar(
        torch.full_like(per_position, amplitude(spec.yarn)), position * per_position
    )
    return torch.cat((z.real, z.imag))


def by_hand(m: LatentAttention, spec: ModelSpec, x_TH: torch.Tensor) -> torch.Tensor:
    """Document by document, token by token, head by head (arXiv 2405.04434, equations 9 to 19 and 37 to 47)."""
    mla, out, start = spec.mla, [], 0
    assert mla is not None
    for length in (n for row in SEGMENTS for n in row):
        keys, values = [], []
        for t in range(length):
            x = x_TH[start + t]
            down = m.wkv_a.weight @ x
            latent = norm(down[: mla.kv_rank], m.kv_norm.weight)
            up = (m.wkv_b.weight @ latent).view(spec.num_heads, -1)
            shared = turned(down[mla.kv_rank :], t, spec)
            keys.append([torch.cat((head[: mla.nope_dim], shared)) for head in up])
            values.append([head[mla.nope_dim :] for head in up])
            if m.wq is None:
                q = m.wq_b.weight @ norm(m.wq_a.weight @ x, m.q_norm.weight)
            else:
                q = m.wq.weight @ x
            heads = []
            for a, head in enumerate(q.view(spec.num_heads, -1)):
                query = torch.cat((head[: mla.nope_dim], turned(head[mla.nope_dim :], t, spec)))
                scores = torch.stack([query @ k[a] for k in keys]) * softmax_factor(spec.yarn)
                weights = torch.softmax(scores / math.sqrt(mla.nope_dim + mla.rope_dim), 0)
                heads.append(sum(w * v[a] for w, v in zip(weights, values, strict=True)))
            out.append(m.wo.weight @ torch.cat(heads))
        start += length
    return torch.stack(out)


VARIANTS = {
    "as published": (MLA, None),
    "halves": (dataclasses.replace(MLA, rope_interleaved=False), None),
    "direct queries": (dataclasses.replace(MLA, q_rank=0), None),
    "wide values": (dataclasses.replace(MLA, value_dim=20), None),
    "equal widths": (dataclasses.replace(MLA, value_dim=12), None),
    "stretched": (MLA, YARN),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kernels", ["fast", "reference"])
def test_output_and_gradients_are_those_of_the_definition(name: str, kernels: str) -> None:
    spec = spec_of(*VARIANTS[name])
    module = attention_of(spec, kernels=kernels)
    x = torch.randn(18, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    weight = torch.randn(18, H, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    params = [x, *module.parameters()]
    got, want = run(module, spec, x), by_hand(module, spec, x)
    assert torch.allclose(got, want, rtol=1e-11, atol=1e-12)
    found, wanted = (torch.autograd.grad((y * weight).sum(), params) for y in (got, want))
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-11)


def test_recomputation_changes_nothing() -> None:
    spec = spec_of(MLA, YARN)
    x = torch.randn(18, H, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    grads = []
    for recompute in ("none", "selective"):
        module = attention_of(spec, recompute=recompute)
        run(module, spec, x).square().sum().backward()
        grads.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_padding_with_zeros_changes_no_output() -> None:
    """What the fast path does with values of another width than queries, here with the plain kernel on both sides."""
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(2, 9, 3, w, generator=generator, dtype=torch.float64) for w in (12, 12, 6))
    padded = torch.nn.functional.pad(v, (0, 6))
    plain = causal_attention(q, k, padded, SEGMENTS, impl="reference")
    fast = causal_attention(q, k, padded, SEGMENTS, impl="fast", lanes=SERIAL)
    assert torch.allclose(plain, fast, rtol=1e-11) and not plain[..., 6:].any()


# ---- YaRN -----------------------------------------------------------------------------------------------------------------------


def test_yarn_slows_the_slow_pairs_only() -> None:
    """64 dims, theta 10000, 4096 positions, factor 40: by hand the ramp runs from pair 10 to pair 23."""
    yarn = YarnSpec(factor=40.0, original_length=4096)
    plain, slow = frequencies(64, 1e4), frequencies(64, 1e4, yarn)
    assert plain == tuple(10000 ** (-j / 32) for j in range(32))
    assert slow[:11] == plain[:11]
    assert slow[23:] == pytest.approx([f / 40 for f in plain[23:]], rel=1e-14)
    middle = [a / b for a, b in zip(slow[10:24], plain[10:24], strict=True)]
    assert middle == pytest.approx([1 - (1 - 1 / 40) * i / 13 for i in range(14)], rel=1e-12)


def test_yarn_factors() -> None:
    assert amplitude(None) == softmax_factor(None) == 1.0
    plain = YarnSpec(factor=40.0, original_length=4096)
    assert amplitude(plain) == pytest.approx(0.1 * math.log(40) + 1) and softmax_factor(plain) == 1.0
    v3 = dataclasses.replace(plain, mscale=1.0, mscale_all_dim=1.0)
    assert amplitude(v3) == 1.0 and softmax_factor(v3) == pytest.approx((0.1 * math.log(40) + 1) ** 2)


def test_a_shrunken_deepseek_is_a_recipe() -> None:
    model = ModelConfig(
        preset="deepseek-v3", num_layers=3, dense_layers=1, hidden=64, num_heads=4, vocab=256, num_experts=16, top_k=2,
        expert_ffn=32, shared_ffn=32, dense_ffn=96, q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16,
        yarn_factor=4.0, yarn_original_length=64,
    )  # fmt: skip
    spec = resolve_model(model, RouterConfig(num_groups=4, group_topk=2))
    assert spec.mla == MlaSpec(q_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)
    assert (spec.head_dim, spec.rotary_dim, spec.num_kv_heads) == (24, 8, 4)
    assert spec.yarn == YarnSpec(factor=4.0, original_length=64)
    shapes = {p.name.removeprefix("layers.0.attention."): p.shape for p in parameters(spec) if p.layer == 0}
    assert shapes["wkv_b.weight"] == (4 * 32, 16) and shapes["wo.weight"] == (64, 64)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"preset": "tiny", "kv_rank": 8}, "model.kv_rank = 8: has no effect: tiny has no multi-head latent attention"),
    ({"preset": "tiny", "yarn_mscale": 1.0}, "model.yarn_mscale = 1.0: has no effect: model.yarn_factor is not set"),
    (
        {"preset": "tiny", "yarn_factor": 2.0, "yarn_original_length": 64, "yarn_mscale": 1.0},
        "model.yarn_mscale = 1.0: has no effect: model.yarn_mscale_all_dim is not set",
    ),
    (
        {"preset": "tiny", "yarn_factor": 2.0, "yarn_original_length": 64, "yarn_mscale_all_dim": 1.0},
        "model.yarn_mscale_all_dim = 1.0: has no effect: model.yarn_mscale is not set, and attention is not latent",
    ),
    ({"preset": "tiny", "yarn_factor": 2.0}, "model.yarn_original_length: is needed with model.yarn_factor"),
    ({"preset": "tiny", "shared_gate": True}, "model.shared_gate = true: has no effect: there is no shared expert"),
    ({"preset": "deepseek-v3", "rope_dim": 7}, "model.rope_dim = 7: must be even"),
    (
        {"preset": "tiny", "yarn_factor": 2.0, "yarn_original_length": 64, "yarn_beta_fast": 0.5},
        "model.yarn_beta_fast = 0.5: must not be below yarn_beta_slow",
    ),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[next(reversed(s)) for s, _ in WRONG])
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_model(ModelConfig(**settings), RouterConfig())
    assert message in str(error.value)
