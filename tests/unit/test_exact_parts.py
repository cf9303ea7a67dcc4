"""The parts of exact mode, each by itself: shares of samples, fixed-point sums, products by chunks, the update, empty micro-batches."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from data_help import counting_stream, make_dataset
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.core.config import ResilienceConfig, TrainConfig
from phalanx.core.samples import num_rounds, owned
from phalanx.data.loader import Loader, ValidationLoader
from phalanx.kernels.cpu.fixed_point import (
    FixedSum,
    bits_for,
    fixed_add_,
    fixed_read,
    fixed_squares,
    limit,
    root_of_squares,
)
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows
from phalanx.kernels.ops.adamw import adamw_
from phalanx.kernels.ops.exact_experts import chunks_of, exact_expert_ffn
from phalanx.kernels.ops.grouped import expert_ffn
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.model.model import PRESETS
from phalanx.train.step.exact import CHUNK_ROWS, default_chunk_rows, exact_sums

pytestmark = pytest.mark.unit
DTYPES = (torch.bfloat16, torch.float32, torch.float64)


def lanes_of(kind: str) -> Lanes:
    return Lanes(1, rows=compiled_rows() if kind == "compiled" else None)


# ---- shares ------------------------------------------------------------------------------------------------------------


@given(samples=st.integers(1, 300), owners=st.integers(1, 80))
def test_every_sample_has_the_owner_that_the_rule_gives_it(samples: int, owners: int) -> None:
    ranges = [owned(samples, owners=owners, owner=r) for r in range(owners)]
    assert [s for own in ranges for s in own] == list(range(samples))
    assert all(s * owners // samples == r for r, own in enumerate(ranges) for s in own)
    assert max(map(len, ranges)) == num_rounds(samples, owners=owners)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 11])
def test_any_number_of_ranks_shares_the_same_micro_batches(ranks: int) -> None:
    dataset = make_dataset([counting_stream(64, 4)])
    loader = Loader(dataset, seq_len=4, global_batch=16, micro_batch=2, seed=0, any_ranks=True)
    validation = ValidationLoader(dataset, seq_len=4, global_batch=16, micro_batch=2, batches=1, any_ranks=True)
    for source in (loader, validation):
        alone = {b.index: b.tokens.tolist() for b in source.microbatches(0)}
        told = [source.microbatches(0, dp_index=r, dp_size=ranks) for r in range(ranks)]
        assert {len(found) for found in told} == {num_rounds(8, owners=ranks)}
        real = [b for found in told for b in found if not b.is_empty]
        assert Counter(b.index for b in real) == Counter(range(8))
        assert all(b.tokens.tolist() == alone[b.index] for b in real)
        spare = [b for found in told for b in found if b.is_empty]
        assert all((b.labels == -100).all() and (b.sample_ids == -1).all() for b in spare)


# ---- fixed point -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["compiled", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_and_squares_are_the_same_in_any_order_and_division(dtype: torch.dtype, kind: str) -> None:
    generator, lanes = torch.Generator().manual_seed(0), lanes_of(kind)
    xs = [torch.randn(5003, generator=generator).mul(10.0**-i).to(dtype) for i in range(6)]
    totals = []
    for order in ((0, 1, 2, 3, 4, 5), (3, 5, 1, 0, 4, 2)):
        parts = [torch.zeros(5003, dtype=torch.int64) for _ in range(3)]
        for place, i in enumerate(order):
            fixed_add_(parts[place % 3], xs[i], bits=52, lanes=lanes)
        totals.append(parts[0] + parts[1] + parts[2])
    assert torch.equal(*totals)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    read = fixed_read(totals[0], bits=52, dtype=wide, lanes=lanes)
    truth = torch.stack([x.to(torch.float64) for x in xs]).sum(0)
    assert (read.to(torch.float64) - truth).abs().max() <= 2.0**-50 + truth.abs().max() * torch.finfo(wide).eps

    cuts = (0, 1, 18, 2047, 2048, 4999, 5003)
    pieces = [fixed_squares(read[a:b], lanes=lanes) for a, b in itertools.pairwise(cuts)]
    whole = fixed_squares(read, lanes=lanes)
    assert tuple(map(sum, zip(*pieces, strict=True))) == whole
    assert root_of_squares(whole) == pytest.approx(read.to(torch.float64).norm().item(), rel=1e-13)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_compiled_kernels_give_the_bits_of_the_plain_ones(dtype: torch.dtype) -> None:
    if compiled_rows() is None:
        pytest.skip("no C++ compiler")
    lanes, x = lanes_of("compiled"), torch.randn(4099, generator=torch.Generator().manual_seed(1)).to(dtype)
    a, b = torch.zeros(4099, dtype=torch.int64), torch.zeros(4099, dtype=torch.int64)
    assert fixed_add_(a, x, bits=50, lanes=lanes) == fixed_add_(b, x, bits=50, impl="reference") == float(x.abs().max())
    assert torch.equal(a, b)
    if dtype != torch.bfloat16:
        read = [fixed_read(a, bits=50, dtype=dtype, lanes=lanes), fixed_read(a, bits=50, dtype=dtype, impl="reference")]
        assert torch.equal(*read)
    assert fixed_squares(x, scale=0.25, lanes=lanes) == fixed_squares(x, scale=0.25, impl="reference")


@pytest.mark.parametrize("kind", ["compiled", "plain"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(value: float, kind: str) -> None:
    x, total = torch.zeros(70), FixedSum(torch.zeros(70, dtype=torch.int64))
    x[66] = value
    total.begin(52)
    total.add(torch.ones(70), lanes=lanes_of(kind))
    total.add(x, lanes=lanes_of(kind))
    total.add(torch.ones(70), lanes=lanes_of(kind))
    assert total.top == math.inf
    total.begin(52)
    assert total.top == 0.0


@given(top=st.floats(1e-30, 1e30), summands=st.integers(1, 10**6))
@settings(max_examples=times(200, 66))
def test_the_places_chosen_for_a_magnitude_leave_it_room(top: float, summands: int) -> None:
    bits = bits_for(top, summands)
    assert top < limit(bits, summands)
    assert top >= limit(bits + 3, summands)  # and are not far fewer than need be


# ---- products by chunks --------------------------------------------------------------------------------------------------


def test_chunks_are_of_one_slot_and_one_source() -> None:
    assert chunks_of([[5, 0], [2, 9]], 4) == ((4, 1, 2, 4, 4, 1), (0, 0, 1, 1, 1, 1))


def ffn(counts, rows, *, kind="compiled", dtype=torch.float32, chunk_rows=16, impl="fast"):
    """Output, gradients of rows and row weights, and sums of those of the weights, for rows given source by source."""
    generator = torch.Generator().manual_seed(7)
    w13 = torch.randn(2, 2, 36, 20, generator=generator).to(dtype)
    w2 = torch.randn(2, 20, 36, generator=generator).to(dtype)
    x, weight, dy = (t.detach().clone() for t in rows)
    x.requires_grad_()
    weight.requires_grad_()
    into = FixedSum(torch.zeros(w13.shape, dtype=torch.int64)), FixedSum(torch.zeros(w2.shape, dtype=torch.int64))
    for each in into:
        each.begin(40)
    y = exact_expert_ffn(
        x, w13, w2, counts, chunk_rows=chunk_rows, into=into, row_weights_M=weight, impl=impl, lanes=lanes_of(kind)
    )
    y.backward(dy)
    return y.detach(), x.grad, weight.grad, into[0].total, into[1].total, (w13, w2)


def some_rows(num: int, dtype: torch.dtype, seed: int = 3):
    generator = torch.Generator().manual_seed(seed)
    x, dy = torch.randn(2, num, 20, generator=generator).to(dtype)
    return x, torch.rand(num, generator=generator), dy


@pytest.mark.parametrize(("kind", "impl"), [("compiled", "fast"), ("plain", "fast"), ("plain", "reference")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_a_source_have_their_bits_whoever_else_is_there(dtype: torch.dtype, kind: str, impl: str) -> None:
    """Three sources together, and each alone: the same rows, and sums of weight gradients that add up to the same integers."""
    counts = [[19, 3, 33], [1, 40, 0]]
    rows = some_rows(96, dtype)
    together = ffn(counts, rows, kind=kind, dtype=dtype, impl=impl)
    starts = np.cumsum([0, *(n for slot in counts for n in slot)])
    sums = [torch.zeros_like(together[i]) for i in (3, 4)]
    for source in range(3):
        at = torch.cat([torch.arange(starts[3 * e + source], starts[3 * e + source + 1]) for e in range(2)])
        alone = ffn([[c[source]] for c in counts], [t[at] for t in rows], kind=kind, dtype=dtype, impl=impl)
        for i in range(3):
            assert torch.equal(alone[i], together[i][at]), i
        for total, part in zip(sums, alone[3:5], strict=True):
            total += part
    assert torch.equal(sums[0], together[3])
    assert torch.equal(sums[1], together[4])


@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_products_by_chunks_are_those_of_whole_slots(impl: str) -> None:
    counts, rows = [[19, 3, 33], [1, 40, 0]], some_rows(96, torch.float64)
    y, dx, d_weight, sum13, sum2, (w13, w2) = ffn(counts, rows, dtype=torch.float64, impl=impl)
    leaves = [t.detach().clone().requires_grad_() for t in (rows[0], w13, w2, rows[1])]
    truth = expert_ffn(*leaves[:3], [sum(c) for c in counts], row_weights_M=leaves[3], impl="reference")
    truth.backward(rows[2])
    found = (y, dx, *(t.to(torch.float64) * 2.0**-40 for t in (sum13, sum2)), d_weight)
    for a, b in zip(found, (truth.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        rtol = 1e-6 if b.dtype == torch.float32 else 1e-10  # row weights are fp32, whatever the products are
        torch.testing.assert_close(a, b, rtol=rtol, atol=1e-9, check_dtype=False)


# ---- the update ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["compiled", "reference"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_an_update_does_not_depend_on_how_the_state_is_sharded(kind: str, out: torch.dtype) -> None:
    if kind == "compiled" and compiled_rows() is None:
        pytest.skip("no C++ compiler")
    generator, num = torch.Generator().manual_seed(0), 3011
    grad = torch.randn(num, generator=generator) * 1e-3
    start = [torch.randn(num, generator=generator), torch.zeros(num), torch.zeros(num), torch.zeros(num, dtype=out)]
    rule = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "scale": 0.37}
    ended = []
    for cuts in ((0, num), (0, 1, 18, 97, 98, 1111, 2048, 2063, num)):
        state = [t.clone() for t in start]
        for step in (1, 2, 3):
            for a, b in itertools.pairwise(cuts):
                given = [state[0][a:b], grad[a:b].clone(), *(t[a:b] for t in state[1:])]
                impl = "reference" if kind == "reference" else "fast"
                adamw_(*given, **rule, step=step, impl=impl, lanes=lanes_of(kind))
        ended.append(state)
    assert all(torch.equal(a, b) for a, b in zip(*ended, strict=True))


# ---- settings ------------------------------------------------------------------------------------------------------------


def test_the_room_of_a_sum_does_not_depend_on_the_number_of_ranks() -> None:
    train, spec = TrainConfig(), PRESETS["tiny"]
    for config in (ResilienceConfig(mode="exact", chunk_rows=64), ResilienceConfig(mode="exact", slots_per_rank=4)):
        found = {
            exact_sums(config, train, make_folding(world=n, ep=ep), spec=spec, rank=0)
            for n, ep in ((1, 1), (2, 2), (3, 1), (8, 4))
        }
        assert len(found) == 1
    assert exact_sums(ResilienceConfig(mode="fast"), train, make_folding(world=2), spec=spec, rank=0) is None


@pytest.mark.parametrize(("micro_batch", "chunk_rows"), [(1, 256), (16, 256), (64, 512), (512, 2048)])
def test_chunks_of_experts_with_replicas_are_a_quarter_of_what_a_micro_batch_brings(micro_batch, chunk_rows) -> None:
    spec, config = PRESETS["tiny"], ResilienceConfig(mode="exact", slots_per_rank=4)
    train = TrainConfig(micro_batch=micro_batch, seq_len=32 * spec.num_experts // spec.top_k)
    assert default_chunk_rows(config, train, spec, parts=1) == chunk_rows
    assert default_chunk_rows(ResilienceConfig(mode="exact"), train, spec, parts=1) == CHUNK_ROWS
