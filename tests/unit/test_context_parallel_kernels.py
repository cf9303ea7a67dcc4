"""Attention block by block, on one process: every rank of a ring in turn, against attention over whole sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_help import DTYPES, TOLERANCE, attention_of_torch, close, distance, error, normal

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.ops import block_attention
from phalanx.kernels.ops.attention import causal_attention
from phalanx.kernels.ops.block_attention import (
    TILE,
    PartialAttention,
    SavedAttention,
    attend,
    attend_backward,
    strips,
    wide_type,
)
from phalanx.plan.attention.zigzag import (
    AttentionBlock,
    SequenceLayout,
    attention_blocks,
    first_and_last,
    gathered_blocks,
    make_layout,
    ring_source,
)

Documents = tuple[tuple[int, ...], ...]
Turn = tuple[torch.Tensor, tuple[tuple[AttentionBlock, ...], ...]]
"""Places in the sequence of the keys that a rank has, and the blocks that it computes with them."""

CASES: dict[str, tuple[int, int, int, int, Documents]] = {
    # cp, query heads, key/value heads, head dim, documents
    "one document": (4, 4, 4, 16, ((64,), (64,))),
    "several documents": (2, 4, 2, 8, ((5, 1, 30, 28), (64,))),
    "single tokens": (2, 2, 1, 8, ((1,) * 16,)),
    "one token a chunk": (8, 4, 1, 6, ((16,), (3, 13))),
    "longer than a tile": (2, 2, 1, 8, ((2 * TILE + 30, 5, 1, 2 * TILE - 36),)),
    "many tiles": (2, 2, 2, 4, ((6 * TILE,),)),
}


def ring_turns(layout: SequenceLayout, documents: Documents, rank: int) -> list[Turn]:
    out = []
    for step in range(layout.cp):
        source = ring_source(rank, step, cp=layout.cp)
        blocks = tuple(attention_blocks(layout, row, q_rank=rank, kv_rank=source) for row in documents)
        out.append((torch.from_numpy(layout.positions(source)), blocks))
    return out


def parted_turns(layout: SequenceLayout, documents: Documents, rank: int) -> list[Turn]:
    """As in the backward pass of the ring."""
    out = []
    for places, blocks in ring_turns(layout, documents, rank):
        parts = [first_and_last(row) for row in blocks]
        out += [(places, tuple(part[i] for part in parts)) for i in range(2)]
    return out


def gathered_turns(layout: SequenceLayout, documents: Documents, rank: int) -> list[Turn]:
    blocks = tuple(gathered_blocks(layout, row, q_rank=rank) for row in documents)
    return [(torch.arange(layout.seq_len), blocks)]


TURNS: dict[str, Callable[[SequenceLayout, Documents, int], list[Turn]]] = {
    "ring": ring_turns,
    "parted": parted_turns,
    "gathered": gathered_turns,
}


def inputs_of(cp: int, heads: int, kv: int, dim: int, documents: Documents) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    shape = (len(documents), sum(documents[0]))
    return [normal(*shape, n, dim, seed=i) for i, n in enumerate((heads, kv, kv, heads))]


def by_blocks(
    inputs: Sequence[torch.Tensor],
    documents: Documents,
    *,
    cp: int,
    turns: str = "ring",
    dtype: torch.dtype = torch.float64,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> list[torch.Tensor]:
    """Output and gradients of q, k, v, every rank's share put in its place."""
    q, k, v, d_out = (x.to(dtype) for x in inputs)
    layout, wide = make_layout("zigzag", seq_len=q.shape[1], cp=cp), wide_type(dtype)
    out = torch.empty_like(q)
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
    for rank in range(cp):
        own = torch.from_numpy(layout.positions(rank))
        todo, partial = TURNS[turns](layout, documents, rank), PartialAttention.empty(q[:, own])
        for places, blocks in todo:
            attend((q[:, own], k[:, places], v[:, places]), blocks, partial, impl=impl, lanes=lanes)
        out[:, own] = partial.out_BLAD.to(dtype)
        known = SavedAttention.of(out[:, own], partial.lse_BAL, d_out[:, own])
        for places, blocks in todo:
            parts = [torch.zeros(x.shape, dtype=wide) for x in (q[:, own], k[:, places], v[:, places])]
            attend_backward(
                (q[:, own], k[:, places], v[:, places]), blocks, known, tuple(parts), impl=impl, lanes=lanes
            )
            for total, at, part in zip((dq, dk, dv), (own, places, places), parts, strict=True):
                total[:, at] += part
    return [out, dq, dk, dv]


def whole(inputs: Sequence[torch.Tensor], documents: Documents) -> list[torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = causal_attention(q, k, v, documents, impl="reference")
    out.backward(inputs[3])
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def worst(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    return max(error(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("name", CASES)
def test_blocks_make_the_whole(name: str, turns: str, impl: Impl) -> None:
    cp, *shape, documents = CASES[name]
    inputs = inputs_of(cp, *shape, documents)  # type: ignore[call-arg]
    want = whole(inputs, documents)
    for dtype in DTYPES if turns == "ring" else DTYPES[:1]:
        got = by_blocks(inputs, documents, cp=cp, turns=turns, dtype=dtype, impl=impl)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert close(a, b, TOLERANCE[dtype]), f"{dtype}, tensor {i}: off by {error(a, b):.1e}"


@settings(max_examples=25, deadline=None)
@given(
    cp=st.sampled_from([2, 3, 4]),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    turns=st.sampled_from(list(TURNS)),
    heads=st.sampled_from([(4, 4), (4, 1), (6, 2)]),
)
def test_random_documents(cp: int, lengths: list[int], turns: str, heads: tuple[int, int]) -> None:
    fill = -sum(lengths) % (2 * cp)
    documents = ((*lengths, fill) if fill else tuple(lengths), (sum(lengths) + fill,))
    inputs = inputs_of(cp, *heads, 4, documents)
    assert worst(by_blocks(inputs, documents, cp=cp, turns=turns), whole(inputs, documents)) < 1e-13


def test_lanes_change_no_bit() -> None:
    documents: Documents = ((TILE + 9, TILE - 9), (2 * TILE,))
    inputs = inputs_of(2, 4, 2, 8, documents)
    alone = by_blocks(inputs, documents, cp=2, dtype=torch.bfloat16)
    with Lanes(3) as pool:
        for a, b in zip(by_blocks(inputs, documents, cp=2, dtype=torch.bfloat16, lanes=pool), alone, strict=True):
            assert torch.equal(a, b)


def test_large_scores_stay_finite() -> None:
    documents: Documents = ((30, 34),)
    inputs = [60 * x for x in inputs_of(2, 2, 2, 16, documents)]
    for got in by_blocks(inputs, documents, cp=2, dtype=torch.bfloat16):
        assert torch.isfinite(got).all()


def test_a_query_without_keys_is_zero() -> None:
    q, k, v, _ = inputs_of(2, 2, 2, 8, ((8,),))
    partial = PartialAttention.empty(q)
    attend((q, k, v), ((AttentionBlock(4, 8, 0, 4, False),),), partial)
    assert (partial.out_BLAD[:, :4] == 0).all() and (partial.lse_BAL[..., :4] == -math.inf).all()
    assert torch.isfinite(partial.lse_BAL[..., 4:]).all()


def test_long_blocks_are_not_one_matrix() -> None:
    """The plain version in chunks of queries: the same numbers as in one."""
    documents: Documents = ((4 * 96,),)
    inputs = inputs_of(2, 2, 1, 4, documents)
    want = by_blocks(inputs, documents, cp=2, impl="reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_attention, "CHUNK", 40)
        got = by_blocks(inputs, documents, cp=2, impl="reference")
    assert worst(got, want) < 1e-13


# ---- strips ---------------------------------------------------------------------------------------------------------------------


def seen_by_strips(blocks: tuple[AttentionBlock, ...], queries: int, keys: int) -> np.ndarray:
    """How often each pair is computed."""
    found = np.zeros((queries, keys), dtype=int)
    for strip in strips(blocks, queries, keys):
        part = found[strip.q_start : strip.q_stop, strip.k_start : strip.k_stop]
        if not strip.seen:
            part += 1
        for q0, q1, k0, k1, diagonal in strip.seen:
            inside = np.arange(q0, q1)[:, None] - np.arange(k0, k1)
            part[q0:q1, k0:k1] += True if diagonal is None else inside >= diagonal
    return found


def seen_by_blocks(blocks: tuple[AttentionBlock, ...], queries: int, keys: int) -> np.ndarray:
    found = np.zeros((queries, keys), dtype=int)
    for b in blocks:
        part = np.ones((b.q_stop - b.q_start, b.k_stop - b.k_start), dtype=int)
        found[b.q_start : b.q_stop, b.k_start : b.k_stop] += np.tril(part) if b.causal else part
    return found


@settings(max_examples=40, deadline=None)
@given(cp=st.sampled_from([2, 4]), lengths=st.lists(st.integers(1, 900), min_size=1, max_size=5), data=st.data())
def test_strips_cover_the_blocks_once(cp: int, lengths: list[int], data: st.DataObject) -> None:
    total = -(-sum(lengths) // (2 * cp)) * 2 * cp
    documents = (*lengths, total - sum(lengths)) if total > sum(lengths) else tuple(lengths)
    layout = make_layout("zigzag", seq_len=total, cp=cp)
    rank, source = data.draw(st.integers(0, cp - 1)), data.draw(st.integers(0, cp - 1))
    blocks = attention_blocks(layout, documents, q_rank=rank, kv_rank=source)
    want = seen_by_blocks(blocks, layout.local_len, layout.local_len)
    assert (seen_by_strips(blocks, layout.local_len, layout.local_len) == want).all()
    parts = first_and_last(blocks)
    assert (sum(seen_by_blocks(part, *want.shape) for part in parts) == want).all()
    gathered = gathered_blocks(layout, documents, q_rank=rank)
    own = layout.positions(rank)
    ids = np.repeat(np.arange(len(documents)), documents)
    may = (ids[own][:, None] == ids[None, :]) & (np.arange(total)[None, :] <= own[:, None])
    assert (seen_by_blocks(gathered, layout.local_len, total) == may).all()


def test_whole_tiles_are_joined() -> None:
    (square,) = strips((AttentionBlock(0, 4 * TILE, 0, TILE, False),), 4 * TILE, TILE)
    assert not square.seen and square.q_stop == 4 * TILE
    causal = strips((AttentionBlock(0, 4 * TILE, 0, 4 * TILE, True),), 4 * TILE, 4 * TILE)
    assert sum(bool(s.seen) for s in causal) == 4  # the diagonal
    assert len(causal) == 7 and len({s.seen for s in causal if s.seen}) == 1


def gradients_in_two_turns(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of q, k and v of one sequence whose keys come in eight blocks; `tensors` are q, k, v and the gradient of the output."""
    *qkv, d_out = tensors
    layout = make_layout("zigzag", seq_len=qkv[0].shape[1], cp=1)
    (whole,) = attention_blocks(layout, (layout.seq_len,), q_rank=0, kv_rank=0)
    size = layout.seq_len // 8
    blocks = [AttentionBlock(i * size, (i + 1) * size, i * size, (i + 1) * size, True) for i in range(8)]
    blocks += [AttentionBlock((i + 1) * size, whole.q_stop, i * size, (i + 1) * size, False) for i in range(7)]
    partial = PartialAttention.empty(qkv[0])
    attend((qkv[0], qkv[1], qkv[2]), (tuple(blocks),), partial)
    known = SavedAttention.of(partial.out_BLAD.to(d_out.dtype), partial.lse_BAL, d_out)
    grads = [torch.zeros_like(x, dtype=wide_type(x.dtype)) for x in qkv]
    attend_backward((qkv[0], qkv[1], qkv[2]), (tuple(blocks),), known, (grads[0], grads[1], grads[2]))
    return grads


def test_merging_leaves_no_error_where_gradients_cancel() -> None:
    """Values around one: a gradient of keys is a small difference from the output. Shares that sum to one but for the rounding of the
    log-sum-exp made it five times as inexact as whole sequences do (a Qwen2-MoE with biases, cp 2)."""
    at = (1, 256, 4, 8)
    inputs = [1 + 0.2 * normal(*at, seed=i) for i in range(4)]
    want = gradients_in_two_turns(*inputs)
    got = gradients_in_two_turns(*(x.float() for x in inputs))
    leaves = [x.float().requires_grad_() for x in inputs[:3]]
    causal_attention(leaves[0], leaves[1], leaves[2], ((256,),)).backward(inputs[3].float())
    for mine, right, leaf in zip(got, want, leaves, strict=True):
        assert leaf.grad is not None
        assert error(mine, right) < max(2 * error(leaf.grad, right), 1e-6)


def test_gradients_of_keys_are_sums_of_queries_as_they_are() -> None:
    """1 / sqrt(8) is no power of two: a scaled bf16 query would be rounded once more, which is no business of the gradients. Queries of one
    size, which gain 0.36 % by it, would make all gradients of keys larger by as much. Keys are small, so that scores do not matter."""
    inputs = [normal(1, 256, 4, 8, seed=i).bfloat16() for i in range(4)]
    inputs[0], inputs[1] = 1.453125 * torch.sign(inputs[0]), inputs[1] / 64
    want = gradients_in_two_turns(*(x.double() for x in inputs))[1]
    found = gradients_in_two_turns(*inputs)[1].double()
    assert abs(float((found * want).sum() / want.square().sum()) - 1) < 1e-3


@pytest.mark.parametrize("dim", [32, 64, 128, 192])
@pytest.mark.parametrize("size", [1.0, 4.0])
def test_gradients_in_bf16_are_as_exact_as_those_of_torch(dim: int, size: float) -> None:
    """Scores up to 100: queries that are scaled by 1 / sqrt(D) and rounded again make weights that do not sum to one (3 % off at 128)."""
    documents: Documents = ((512,),)
    inputs = inputs_of(2, 2, 2, dim, documents)
    inputs = [size * x if i < 2 else x for i, x in enumerate(inputs)]
    want = whole(inputs, documents)[1:]
    leaves = [x.bfloat16().requires_grad_() for x in inputs[:3]]
    known = torch.autograd.grad(attention_of_torch(leaves[0], leaves[1], leaves[2]), leaves, inputs[3].bfloat16())
    found = by_blocks(inputs, documents, cp=2, dtype=torch.bfloat16)[1:]
    for name, ours, theirs, right in zip("qkv", found, known, want, strict=True):
        assert distance(ours, right) < max(1.5 * distance(theirs, right), 1e-2), name


def test_own_work_is_parted_one_to_two() -> None:
    first, last = first_and_last(
        (AttentionBlock(0, 3000, 0, 3000, True), AttentionBlock(0, 1, 4, 5, True), AttentionBlock(0, 5, 0, 9, False))
    )
    own = [sum(b.num_pairs for b in part) for part in (first[:1], last)]
    assert own[1] / own[0] == pytest.approx(2, rel=1e-2)
    assert first[1:] == (AttentionBlock(0, 1, 4, 5, True), AttentionBlock(0, 5, 0, 9, False))


# ---- planted bugs ---------------------------------------------------------------------------------------------------------------


def _forget_the_scale(self: PartialAttention, at: block_attention._At, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Merge the log-sum-exps, but take what the newest block put out with its own weight."""
    old = self.lse_BAL[at.sequences, at.heads, at.queries]
    total = torch.logaddexp(old, lse.to(old.dtype))
    before = (old - total).exp().transpose(1, 2).unsqueeze(-1)
    self.out_BLAD[at.sequences, at.queries, at.heads].mul_(before).add_(out)
    old.copy_(total)


def _forget_the_sum(self: PartialAttention, at: block_attention._At, out: torch.Tensor, lse: torch.Tensor) -> None:
    """The output is right, the log-sum-exp is that of the newest block: only gradients show it."""
    old = self.lse_BAL[at.sequences, at.heads, at.queries].clone()
    merge(self, at, out, lse)
    self.lse_BAL[at.sequences, at.heads, at.queries] = torch.maximum(old, lse.to(old.dtype))


merge = PartialAttention.merge


@pytest.mark.parametrize("wrong", [_forget_the_scale, _forget_the_sum])
def test_a_wrong_merge_is_caught(wrong: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cp, *shape, documents = CASES["one document"]
    inputs = inputs_of(cp, *shape, documents)  # type: ignore[call-arg]
    want = whole(inputs, documents)
    monkeypatch.setattr(PartialAttention, "merge", wrong)
    assert worst(by_blocks(inputs, documents, cp=cp), want) > 1e-2


def test_wrong_places_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of a contiguous part where zigzag ones are meant."""
    cp, *shape, documents = CASES["one document"]
    inputs = inputs_of(cp, *shape, documents)  # type: ignore[call-arg]

    def contiguous(layout: SequenceLayout, documents: Documents, rank: int) -> list[Turn]:
        plain = make_layout("contiguous", seq_len=layout.seq_len, cp=layout.cp)
        turns = ring_turns(layout, documents, rank)
        places = [torch.from_numpy(plain.positions(ring_source(rank, step, cp=cp))) for step in range(cp)]
        return [(at, blocks) for at, (_, blocks) in zip(places, turns, strict=True)]

    monkeypatch.setitem(TURNS, "ring", contiguous)
    assert worst(by_blocks(inputs, documents, cp=cp), whole(inputs, documents)) > 1e-2
