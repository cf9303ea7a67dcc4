"""Attention: fast against a dense mask, over random documents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_help import LANES, agree, normal, pool_of

from phalanx.kernels.device import device_attention
from phalanx.kernels.ops.attention import KEY_BLOCK, _blocks, _causal_bias, causal_attention

CASES = {
    "one document": (2, 4, 4, 16, ((40,), (40,))),
    "several documents": (2, 4, 2, 16, ((1, 20, 19), (40,))),
    "single tokens": (1, 2, 1, 8, ((1,) * 9,)),
    "one token": (1, 1, 1, 8, ((1,),)),
    "longer than a block": (1, 2, 2, 8, ((KEY_BLOCK + 30, 5, 2 * KEY_BLOCK - 1),)),
    "odd head dim": (2, 3, 3, 6, ((7, 6), (13,))),
}


def _inputs(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> list[torch.Tensor]:
    return [normal(batch, length, n, dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]


@LANES
@pytest.mark.parametrize("name", CASES)
def test_agrees(name: str, lanes: int | str) -> None:
    batch, heads, kv_heads, dim, segments = CASES[name]
    with pool_of(lanes) as pool:
        agree(
            lambda q, k, v: causal_attention(q, k, v, segments, lanes=pool),
            lambda q, k, v: causal_attention(q, k, v, segments, impl="reference"),
            _inputs(batch, sum(segments[0]), heads, kv_heads, dim),
        )


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5), group=st.sampled_from([(4, 4), (4, 1), (6, 2)]))
def test_random_documents(lengths: list[int], group: tuple[int, int]) -> None:
    """Blocks of keys are larger than these sequences; `longer than a block` above is the other case."""
    segments = (tuple(lengths), (sum(lengths),))
    agree(
        lambda q, k, v: causal_attention(q, k, v, segments),
        lambda q, k, v: causal_attention(q, k, v, segments, impl="reference"),
        _inputs(2, sum(lengths), *group, 4),
        dtypes=(torch.float64,),
    )


def test_gradcheck() -> None:
    inputs = [x.requires_grad_() for x in _inputs(1, 5, 2, 1, 2)]
    assert torch.autograd.gradcheck(lambda q, k, v: causal_attention(q, k, v, ((2, 3),)), inputs)


def test_the_path_of_other_devices() -> None:
    """Torch's attention by document is what a GPU runs; here it can at least be compared."""
    for batch, heads, kv_heads, dim, segments in CASES.values():
        agree(
            lambda q, k, v, s=segments: device_attention(q, k, v, s),
            lambda q, k, v, s=segments: causal_attention(q, k, v, s, impl="reference"),
            _inputs(batch, sum(segments[0]), heads, kv_heads, dim),
            dtypes=(torch.float64, torch.float32),
        )


def test_large_scores_stay_finite() -> None:
    """A masked score far above a row's maximum must not turn into an infinity times zero."""
    q, k, v = (x.to(torch.bfloat16).requires_grad_() for x in (60 * t for t in _inputs(1, 64, 2, 2, 16)))
    causal_attention(q, k, v, ((30, 34),)).sum().backward()
    for x in (q, k, v):
        assert x.grad is not None and torch.isfinite(x.grad).all()


def test_documents_do_not_meet() -> None:
    q, k, v = _inputs(1, 12, 2, 2, 4)
    alone = causal_attention(q[:, :5], k[:, :5], v[:, :5], ((5,),))
    together = causal_attention(q, k, v, ((5, 7),))
    assert torch.allclose(alone, together[:, :5], rtol=0, atol=1e-14)


def test_blocks_see_whole_documents_and_no_more() -> None:
    block = KEY_BLOCK
    causal = _causal_bias(block, torch.float64)
    parts = _blocks((block // 2, block, 3 * block), causal)
    assert [(p.start, p.stop) for p in parts][:3] == [(0, block), (block, 2 * block), (2 * block, 3 * block)]
    assert parts[0].end == 2 * block, "the second document ends at 1.5 blocks, rounded up"
    assert parts[-1].end == sum((block // 2, block, 3 * block))
    assert all(p.bias_kq.shape == (block, block) for p in _blocks((4 * block,), causal)), (
        "one document: the diagonal only"
    )
    assert parts[0].bias_kq.shape == (block, 2 * block)
    assert torch.isinf(parts[0].bias_kq[0, block // 2 :]).all(), "the first document ends there"
