"""Context-parallel layouts: positions, the way back, and blocks that cover every pair that may attend once, with packed documents."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers import times
from zigzag_ring import RingPlan, plan_ring

from phalanx.core.errors import PlanError
from phalanx.plan.attention.zigzag import AttentionBlock, attention_blocks, layout_problems, make_layout, ring_source

pytestmark = pytest.mark.unit


@st.composite
def rings(draw: st.DrawFn) -> RingPlan:
    cp, name = draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.sampled_from(["zigzag", "contiguous"]))
    seq_len = 2 * cp * draw(st.integers(1, 6))

    def documents() -> tuple[int, ...]:
        cuts = sorted(draw(st.sets(st.integers(1, max(1, seq_len - 1)), max_size=7)) - {seq_len})
        return tuple(np.diff([0, *cuts, seq_len]).tolist())

    return plan_ring(make_layout(name, seq_len=seq_len, cp=cp), [documents() for _ in range(draw(st.integers(1, 2)))])


@settings(max_examples=times(150, 50), deadline=None)
@given(rings())
def test_blocks_cover_each_pair_once_one_block_a_document(plan: RingPlan) -> None:
    plan.check()
    for rank, steps in enumerate(plan.blocks):
        for step, sequences in enumerate(steps):
            for blocks, documents in zip(sequences, plan.segments, strict=True):
                assert len(blocks) <= len(documents)
                assert all(b.causal == (step == 0) for b in blocks) and ring_source(rank, 0, cp=8) == rank
                spans = [(b.q_start, b.q_stop) for b in blocks]
                assert spans == sorted(spans) and all(b.num_pairs > 0 for b in blocks)
    lengths = [n for row in plan.segments for n in row]
    assert plan.work.sum() == sum(n * (n + 1) // 2 for n in lengths)


@settings(max_examples=60, deadline=None)
@given(rings())
def test_attention_by_blocks_equals_attention_at_once(plan: RingPlan) -> None:
    """Softmax over the ring with running maxima and sums, in float64, against the whole masked matrix."""
    layout, rng = plan.layout, np.random.default_rng(0)
    for index, row in enumerate(plan.segments):
        q, k, v = (rng.normal(size=(layout.seq_len, 4)) for _ in range(3))
        ids = np.repeat(np.arange(len(row)), row)
        allowed = np.tril(ids[:, None] == ids[None, :])
        scores = np.where(allowed, q @ k.T, -np.inf)
        weight = np.exp(scores - scores.max(axis=1, keepdims=True))
        expected = weight @ v / weight.sum(axis=1, keepdims=True)
        parts = []
        for rank in range(layout.cp):
            mine = layout.positions(rank)
            top, total, out = np.full(len(mine), -np.inf), np.zeros(len(mine)), np.zeros((len(mine), 4))
            for step in range(layout.cp):
                theirs = layout.positions(ring_source(rank, step, cp=layout.cp))
                for b in plan.blocks[rank][step][index]:
                    at, keys = slice(b.q_start, b.q_stop), theirs[b.k_start : b.k_stop]
                    part = q[mine[at]] @ k[keys].T
                    part = np.where(np.tril(np.ones_like(part)) > 0, part, -np.inf) if b.causal else part
                    new = np.maximum(top[at], part.max(axis=1))
                    shrink, e = np.exp(top[at] - new), np.exp(part - new[:, None])
                    total[at], top[at] = total[at] * shrink + e.sum(axis=1), new
                    out[at] = out[at] * shrink[:, None] + e @ v[keys]
            parts.append(out / total[:, None])
        assert np.allclose(np.concatenate(parts)[layout.inverse], expected, atol=1e-12)


@given(st.sampled_from(["zigzag", "contiguous"]), st.integers(1, 9), st.integers(1, 5))
def test_positions_partition_the_sequence_and_come_back(name: str, cp: int, size: int) -> None:
    layout = make_layout(name, seq_len=2 * cp * size, cp=cp)
    layout.check()
    x = np.arange(layout.seq_len) * 7
    assert np.array_equal(x[layout.order][layout.inverse], x)
    for rank in range(cp):
        at = layout.positions(rank)
        assert len(at) == layout.local_len and (np.diff(at) > 0).all()
        assert np.array_equal(layout.order[rank * layout.local_len : (rank + 1) * layout.local_len], at)


def test_zigzag_in_full() -> None:
    layout = make_layout("zigzag", seq_len=8, cp=2)
    assert layout.positions(0).tolist() == [0, 1, 6, 7] and layout.positions(1).tolist() == [2, 3, 4, 5]
    assert layout.inverse.tolist() == [0, 1, 4, 5, 6, 7, 2, 3]
    assert attention_blocks(layout, [8], q_rank=0, kv_rank=0) == (AttentionBlock(0, 4, 0, 4, True),)
    assert attention_blocks(layout, [8], q_rank=0, kv_rank=1) == (AttentionBlock(2, 4, 0, 4, False),)
    assert attention_blocks(layout, [8], q_rank=1, kv_rank=0) == (AttentionBlock(0, 4, 0, 2, False),)
    assert attention_blocks(layout, [3, 5], q_rank=1, kv_rank=0) == (AttentionBlock(0, 1, 0, 2, False),)
    assert attention_blocks(layout, [3, 5], q_rank=0, kv_rank=1) == (AttentionBlock(2, 4, 1, 4, False),)
    assert "rank 0: 0-1 and 6-7" in layout.explain()


@pytest.mark.parametrize("cp", [2, 4, 8, 16])
def test_zigzag_balances_every_step_and_contiguous_does_not(cp: int) -> None:
    size = 64 * cp
    zigzag = plan_ring(make_layout("zigzag", seq_len=size, cp=cp), [[size]])
    plain = plan_ring(make_layout("contiguous", seq_len=size, cp=cp), [[size]])
    assert (zigzag.work == zigzag.work[0]).all() and zigzag.balance == 1.0
    assert plain.balance > 1.3 and plain.work.sum() == zigzag.work.sum()
    assert "over the mean: 1.000" in zigzag.explain()


def test_documents_shorter_than_a_chunk_need_no_other_rank() -> None:
    plan = plan_ring(make_layout("zigzag", seq_len=64, cp=4), [[8] * 8])
    assert (plan.work[:, 1:] == 0).all()
    plan.check()


def test_one_rank_is_contiguous() -> None:
    layout = make_layout("zigzag", seq_len=7, cp=1)
    assert layout.name == "contiguous" and layout.positions(0).tolist() == list(range(7))


def test_errors_name_all_problems_and_legal_values() -> None:
    assert [str(p) for p in layout_problems("zigzag", seq_len=30, cp=4)] == [
        "seq_len = 30: must be a positive multiple of the 8 equal chunks of zigzag over cp 4; nearest legal: 32"
    ]
    with pytest.raises(PlanError) as caught:
        make_layout("zigzig", seq_len=0, cp=0)
    assert len(caught.value.problems) == 3 and "did you mean 'zigzag'" in str(caught.value)
    layout = make_layout("zigzag", seq_len=8, cp=2)
    for segments, said in (
        ([3, 3], "sum to the 8 tokens"),
        ([8, 0], "at least one token"),
        ([], "sum to the 8 tokens"),
    ):
        with pytest.raises(PlanError, match=said):
            attention_blocks(layout, segments, q_rank=0, kv_rank=0)


def test_the_check_sees_wrong_blocks() -> None:
    plan = plan_ring(make_layout("zigzag", seq_len=16, cp=2), [[5, 11]])

    def with_first(blocks: tuple[AttentionBlock, ...]) -> RingPlan:
        rank = ((blocks,), *plan.blocks[0][1:])
        return dataclasses.replace(plan, blocks=(rank, *plan.blocks[1:]))

    own = plan.blocks[0][0][0]
    for blocks, said in (
        (own[1:], "is not computed"),
        ((*own, own[0]), "too often"),
        ((own[0]._replace(causal=False), *own[1:]), "must not be"),
        ((AttentionBlock(0, 8, 0, 8, True),), "must not be"),
    ):
        with pytest.raises(PlanError, match=said):
            with_first(blocks).check()


def test_a_long_sequence_of_many_documents() -> None:
    layout = make_layout("zigzag", seq_len=131_072, cp=8)
    plan, other = plan_ring(layout, [[1024] * 128]), plan_ring(layout, [[2048] * 64])
    assert plan.work.sum() == 128 * (1024 * 1025 // 2)
    assert plan.hash == plan_ring(layout, ((1024,) * 128,)).hash != other.hash
