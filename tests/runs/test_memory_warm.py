"""Warming up: every shape that routing can bring was met before the run, so that later ones generate no code and take no memory."""

import ctypes

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiers import times

from phalanx.core.processor import MULTIPLIES_BF16, Processor, this_processor
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.ops.attention import causal_attention
from phalanx.kernels.ops.grouped import _pieces, expert_ffn
from phalanx.models.context import ModelContext
from phalanx.plan.mapping.folding import make_folding
from phalanx.plan.mapping.placement import plain_placement
from phalanx.plan.model.model import ModelSpec
from phalanx.plan.moe.dispatch import DispatchSpec
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import GroupCache, build_groups
from phalanx.simulate.memory import kernel_facts as facts
from phalanx.train.warm import LONGEST, expert_sizes, warm_kernels
from ranks import run_ranks

SPEC = ModelSpec(
    name="warm", num_layers=1, hidden=96, num_heads=2, num_kv_heads=1, head_dim=48, vocab=64, num_experts=2, top_k=1, expert_ffn=160
)  # fmt: skip


def context(dispatch: DispatchSpec | None = None, *, dtype: torch.dtype = torch.bfloat16) -> ModelContext:
    folding = make_folding(world=1)
    return ModelContext(
        spec=SPEC,
        dispatch=dispatch or DispatchSpec(),
        placement=plain_placement(SPEC.num_experts, folding),
        groups=build_groups(folding, rank=0, cache=GroupCache()),
        comms=Collectives(),
        dtype=dtype,
        device=torch.device("cpu"),
        lanes=Lanes(1),
    )


@given(st.lists(st.integers(0, 5000), min_size=1, max_size=4))
@settings(deadline=None, max_examples=times(100, 40))
def test_every_piece_has_a_size_that_was_met(counts: list[int]) -> None:
    met = set(expert_sizes(context(), num_tokens=max(counts)))
    assert {p.size for p in _pieces(counts, torch.bfloat16)} <= met


def test_capacity_limits_the_sizes_and_static_sizes_need_none() -> None:
    dropping = context(DispatchSpec(policy="drop", capacity_factor=0.5))
    assert max(expert_sizes(dropping, num_tokens=256)) == 64
    assert max(expert_sizes(context(), num_tokens=256)) == 256
    padded = context(DispatchSpec(policy="drop", pad_to_capacity=True))
    assert expert_sizes(padded, num_tokens=256) == ()


class _Heap(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def _used_bytes() -> int:
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _Heap
    found = info()
    return int(found.uordblks + found.hblkhd)


def _growth(rank: int, cache: GroupCache, warm: bool) -> int:
    """Heap that stays after experts and attention met sizes in no order."""
    tokens, ctx = 384, context()
    if warm:
        warm_kernels(ctx, micro_batch=1, processor=MULTIPLIES_BF16, seq_len=tokens)
    w13 = torch.zeros(1, 2, SPEC.expert_ffn, SPEC.hidden, dtype=torch.bfloat16, requires_grad=True)
    w2 = torch.zeros(1, SPEC.hidden, SPEC.expert_ffn, dtype=torch.bfloat16, requires_grad=True)
    before = _used_bytes()
    for rows in (200, 7, 333, 90, 145, 31, 384):
        x = torch.zeros(rows, SPEC.hidden, dtype=torch.bfloat16, requires_grad=True)
        y = expert_ffn(x, w13, w2, [rows], row_weights_M=torch.ones(rows, requires_grad=True))
        torch.autograd.grad(y, [x, w13, w2], torch.zeros_like(y))
        q = torch.zeros(1, rows, 1, SPEC.head_dim, dtype=torch.bfloat16)
        causal_attention(q, q, q, ((rows,),))
    del x, y, q
    return _used_bytes() - before


@pytest.mark.ranks
def test_new_sizes_take_no_memory_after_warming_up() -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library does not say how much of the heap is in use")
    if not this_processor().multiplies_bf16:
        pytest.skip("on this processor nothing is generated for a shape")
    (cold,) = run_ranks(1, _closure(warm=False))
    (warm,) = run_ranks(1, _closure(warm=True))
    assert cold > 8 << 20, "nothing was generated, so the test shows nothing"
    assert warm < cold / 10


def _growth_of_a_product(rank: int, cache: GroupCache) -> float:
    x, w, out = (
        torch.zeros(1024, 128, dtype=torch.bfloat16),
        torch.zeros(128, 64, dtype=torch.bfloat16),
        torch.zeros(1024, 64, dtype=torch.bfloat16),
    )
    torch.mm(x, w, out=out)
    sizes = range(16, 1024, 16)
    before = _used_bytes()
    for rows in sizes:
        torch.mm(x[:rows], w, out=out[:rows])
    return (_used_bytes() - before) / len(sizes)


@pytest.mark.ranks
def test_a_new_shape_of_a_product_takes_what_the_estimate_says() -> None:
    """Generated code where the processor multiplies bf16, a note where it widens them, nothing where torch multiplies them itself."""
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("the C library does not say how much of the heap is in use")
    (each,) = run_ranks(1, _growth_of_a_product)
    here = this_processor()
    noted = facts.NOTED_PRODUCT_BYTES if here.widens_bf16 else 0
    known = facts.PRODUCT_BYTES if here.multiplies_bf16 else noted
    assert each == pytest.approx(known, rel=0.3, abs=1024)


def _closure(*, warm: bool):  # type: ignore[no-untyped-def]
    """A closure gets processes of its own: what one generates the other must not find."""
    return lambda rank, cache: _growth(rank, cache, warm)


def test_other_types_and_long_documents_are_left_alone() -> None:
    plain, endless = Processor(flags=frozenset({"avx512f"})), 1 << 30  # would not end if it did anything
    warm_kernels(context(dtype=torch.float32), micro_batch=1, seq_len=endless, processor=MULTIPLIES_BF16)
    warm_kernels(context(), micro_batch=1, seq_len=endless, processor=plain)
    assert LONGEST < 1200
