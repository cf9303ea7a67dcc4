"""Programs that are one launch each on a GPU, under Triton's interpreter, against their plain references in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from kernel_help import agree, close, normal, seeded

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from phalanx.kernels.device import norm, rope
from phalanx.kernels.device.norm import fused_norm
from phalanx.kernels.device.rope import fused_normed_rope, fused_rope
from phalanx.kernels.device.rows import TakeWeighted, sum_rows, take_rows
from phalanx.kernels.device.swiglu import fused_swiglu, swiglu_backward, swiglu_forward
from phalanx.kernels.ops import grouped_mm
from phalanx.kernels.ops.grouped import expert_ffn
from phalanx.kernels.ops.grouped_mm import grouped_ffn
from phalanx.kernels.ops.norm import residual_norm
from phalanx.kernels.ops.permute import combine_rows, gather_rows, gather_weighted
from phalanx.kernels.ops.rope import HeadNorms, apply_rope, rope_table
from phalanx.kernels.ops.swiglu import PlainSwiglu, reference_swiglu
from phalanx.kernels.triton.tiles import is_interpreted

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest difference from the plain version in fp64, relative to its largest element."""


# ---- the gated activation ------------------------------------------------------------------------------------------------

SWIGLUS = pytest.mark.parametrize("swiglu", [fused_swiglu, PlainSwiglu.apply], ids=["fused", "plain"])


@pytest.mark.core
@SWIGLUS
@pytest.mark.parametrize(("rows", "width"), [(3, 5), (4, 16), (2, 1500), (0, 8)])
def test_swiglu_equals_its_reference(swiglu: object, rows: int, width: int) -> None:
    inputs = [normal(rows, 2, width, seed=1, scale=2.0), normal(rows, seed=2)]
    agree(swiglu, reference_swiglu, inputs, tolerance=TOLERANCE)
    agree(lambda x: swiglu(x, None), lambda x: reference_swiglu(x, None), inputs[:1], tolerance=TOLERANCE)


@SWIGLUS
def test_swiglu_keeps_its_inputs_alone(swiglu: object) -> None:
    kept: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept.append((x.dtype, tuple(x.shape)))
        return x

    gate_up = torch.randn(6, 2, 16, dtype=torch.bfloat16).requires_grad_()
    weights = torch.rand(6).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        swiglu(gate_up, weights).sum().backward()
    assert kept == [(torch.bfloat16, (6, 2, 16)), (torch.float32, (6,))]
    assert gate_up.grad.dtype == torch.bfloat16 and weights.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(("rows", "width"), [(3, 5), (4, 16), (2, 1500), (0, 8)])
def test_swiglu_backward_writes_over_its_operands(rows: int, width: int, weighted: bool, dtype: torch.dtype) -> None:
    """What the forward pass computed over the gradient, the gradient over the input: the same bits as in places of their own."""
    gate_up, dy = (normal(rows, *shape, width, seed=i).to(dtype) for i, shape in enumerate(((2,), ())))
    weights = normal(rows, seed=2).to(torch.promote_types(dtype, torch.float32)) if weighted else None
    d_gate_up, d_weights = swiglu_backward(gate_up, weights, dy)
    y = swiglu_forward(gate_up, weights)
    kept, apart = gate_up.clone(), torch.full_like(dy, torch.nan)
    assert torch.equal(swiglu_backward(gate_up, weights, dy, y_MF=apart)[0], d_gate_up)
    assert torch.equal(gate_up, kept) and torch.equal(apart, y)
    over, d_weights_over = swiglu_backward(gate_up, weights, dy, d_gate_up_M2F=gate_up, y_MF=dy)
    assert over is gate_up and torch.equal(over, d_gate_up) and torch.equal(dy, y)
    assert (d_weights is None and d_weights_over is None) or torch.equal(d_weights, d_weights_over)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("recompute", [False, True])
def test_experts_write_over_what_is_theirs(recompute: bool, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept for the backward pass stays as it was: a second one has the same bits. The host may be told counts; the device knows where groups end."""
    monkeypatch.setattr(F, "grouped_mm", _grouped_mm)
    monkeypatch.setattr(grouped_mm, "runs_programs", lambda x: True)
    counts = (3, 0, 4)
    inputs = [normal(7, 8), normal(3, 2, 24, 8, seed=1), normal(3, 8, 24, seed=2), normal(7, seed=3)]
    x, w13, w2, r = leaves = [x.clone().requires_grad_() for x in inputs]
    dy = normal(7, 8, seed=4)
    ends = torch.tensor([3, 3, 7], dtype=torch.int32)
    y = grouped_ffn(x, w13, w2, counts if told else None, row_weights_M=r, ends_e=ends, recompute=recompute)
    first, second = (torch.autograd.grad(y, leaves, dy, retain_graph=True) for _ in range(2))
    plain = expert_ffn(x, w13, w2, counts, row_weights_M=r, impl="reference")
    for a, b, want in zip(first, second, torch.autograd.grad(plain, leaves, dy), strict=True):
        assert torch.equal(a, b) and close(a, want, 1e-12)


def _grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """`F.grouped_mm` in fp64: rows of each group by its matrix, or products over the rows of each group, anything for one without rows."""
    groups = list(itertools.pairwise([0, *offs.tolist()]))
    if b.dim() == 3:
        return torch.cat([a[i:j] @ w for (i, j), w in zip(groups, b, strict=True)])
    return torch.stack([a[:, i:j] @ b[i:j] + (0 if j > i else torch.nan) for i, j in groups])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_swiglu_of_large_numbers_is_finite() -> None:
    """exp(-gate) overflows at -90 in fp32."""
    gate_up = torch.tensor([[[-200.0, 200.0, 0.0], [1.0, 1.0, 1.0]]]).requires_grad_()
    y = fused_swiglu(gate_up, None)
    y.sum().backward()
    assert y.tolist() == [[0.0, 200.0, 0.0]]
    assert gate_up.grad.isfinite().all()


# ---- rows to experts and back --------------------------------------------------------------------------------------------


def _routed(tokens: int, copies: int, *, index: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """A map of rows with two fill rows, and one of tokens with every fifth copy dropped."""
    rows_of_token = torch.full((tokens * copies,), -1, dtype=index)
    kept = torch.arange(tokens * copies)[torch.arange(tokens * copies) % 5 != 3]
    rows_of_token[kept] = torch.randperm(len(kept), generator=seeded(3)).to(index)
    token_of_row = torch.full((len(kept) + 2,), -1, dtype=index)
    token_of_row[rows_of_token[kept].long()] = (kept // copies).to(index)
    return token_of_row, rows_of_token.view(tokens, copies)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("index", [torch.int64, torch.int32])
@pytest.mark.parametrize(("tokens", "copies", "width"), [(7, 3, 24), (3, 1, 5), (2, 8, 2100)])
def test_rows_are_taken_and_summed(
    tokens: int, copies: int, width: int, dtype: torch.dtype, index: torch.dtype
) -> None:
    token_of_row, rows_of_token = _routed(tokens, copies, index=index)
    x, y = normal(tokens, width, seed=4), normal(len(token_of_row), width, seed=5)
    taken = take_rows(x.to(dtype), token_of_row)
    assert torch.equal(taken, gather_rows(x, token_of_row, rows_of_token_TK=rows_of_token, impl="reference").to(dtype))
    want = combine_rows(y, rows_of_token, token_of_row_M=token_of_row, impl="reference")
    out = torch.full((tokens, width), torch.nan, dtype=dtype)
    assert sum_rows(y.to(dtype), rows_of_token, out) is out
    assert close(out, want, TOLERANCE[dtype])
    assert torch.equal(out, sum_rows(y.to(dtype).T.contiguous().T, rows_of_token)), "rows that are not dense"


@pytest.mark.parametrize(("tokens", "copies", "width"), [(7, 3, 24), (3, 1, 5), (2, 8, 2100)])
def test_rows_are_taken_with_their_weights(tokens: int, copies: int, width: int) -> None:
    """Fill rows and dropped pairs among them; gradients of weights go back to their pairs."""
    token_of_row, rows_of_token = _routed(tokens, copies, index=torch.int64)
    pair_of_row = torch.full_like(token_of_row, -1)
    kept = rows_of_token.flatten() >= 0
    pair_of_row[rows_of_token.flatten()[kept]] = kept.nonzero().squeeze(1)
    maps = {"token_of_row_M": token_of_row, "pair_of_row_M": pair_of_row, "rows_of_token_TK": rows_of_token}
    inputs = [normal(tokens, width, seed=4), normal(tokens, copies, seed=5)]

    def both(taken: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.cat([taken[0], taken[1].unsqueeze(1)], 1)

    agree(
        lambda x, weights: both(TakeWeighted.apply(x, weights, *maps.values())),
        lambda x, weights: both(gather_weighted(x, weights, **maps, impl="reference")),
        inputs,
        tolerance=TOLERANCE,
    )


def test_rows_of_nothing() -> None:
    none, two = torch.empty(0, 4), torch.full((2,), -1)
    assert torch.equal(take_rows(none, two), torch.zeros(2, 4))
    assert take_rows(torch.ones(3, 4), two[:0]).shape == (0, 4)
    assert torch.equal(sum_rows(none, two.view(1, 2)), torch.zeros(1, 4))
    assert sum_rows(torch.ones(3, 4), torch.empty(0, 2, dtype=torch.int64)).shape == (0, 4)


def test_copies_are_added_in_order_and_rounded_once() -> None:
    """1 is lost beside 2^24 in fp32 unless it comes before; in bf16 sums 256 + 1 + 1 would stay 256."""
    y = torch.tensor([[2.0**24], [1.0], [-(2.0**24)], [1.0]])
    assert sum_rows(y, torch.tensor([[0, 1, 2, 3]])).item() == 1.0
    assert sum_rows(y, torch.tensor([[0, 2, 1, 3]])).item() == 2.0
    narrow = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert sum_rows(narrow, torch.tensor([[0, 1, 2]])).item() == 258.0


# ---- rotary position embedding -------------------------------------------------------------------------------------------


SHAPES_OF_HEADS = pytest.mark.parametrize(
    ("shape", "heads", "keys", "dim"),
    [((2, 3), 4, 2, 8), ((1, 5), 3, 1, 6), ((1, 2), 5, 5, 64), ((2, 1), 40, 3, 64), ((1, 0), 4, 2, 8)],
)


@SHAPES_OF_HEADS
def test_rope_equals_its_reference(shape: tuple[int, int], heads: int, keys: int, dim: int) -> None:
    positions = torch.arange(shape[0] * shape[1]).view(shape) * 1000

    def fused(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = rope_table(positions, head_dim=dim, theta=1e4, dtype=q.dtype)
        return fused_rope(q, k, table.cos_BSN, table.sin_BSN)

    def plain(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = rope_table(positions, head_dim=dim, theta=1e4, dtype=q.dtype)
        return apply_rope(q, k, table=table, impl="reference")

    agree(fused, plain, [normal(*shape, heads, dim), normal(*shape, keys, dim, seed=1)], tolerance=TOLERANCE)


@SHAPES_OF_HEADS
@pytest.mark.parametrize("parts", [2, 1024])
def test_rope_of_normed_heads_equals_its_reference(
    shape: tuple[int, int], heads: int, keys: int, dim: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several tokens a part, the last of which has fewer; and with more parts than rows of the last sum."""
    monkeypatch.setattr(rope, "PARTS", parts)
    monkeypatch.setattr(rope, "SUMS", 4)
    positions = torch.arange(shape[0] * shape[1]).view(shape) * 1000

    def fused(q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = rope_table(positions, head_dim=dim, theta=1e4, dtype=q.dtype)
        return fused_normed_rope(q, k, weights, 1e-2, (table.cos_BSN, table.sin_BSN))

    def plain(q: torch.Tensor, k: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        table = rope_table(positions, head_dim=dim, theta=1e4, dtype=q.dtype)
        return apply_rope(q, k, table=table, norms=HeadNorms(*weights, 1e-2), impl="reference")  # type: ignore[call-arg]

    inputs = [normal(*shape, heads, dim), normal(*shape, keys, dim, seed=1, scale=0.2)]
    agree(fused, plain, [*inputs, normal(dim, seed=2), normal(dim, seed=3)], tolerance=TOLERANCE)


def test_rope_of_normed_heads_that_are_apart() -> None:
    """Queries and keys as columns of one wider product, and gradients as attention gives them, heads first. Inputs alone are kept."""
    whole, w = normal(1, 6, 9 * 8).requires_grad_(), [normal(8, seed=i).requires_grad_() for i in (1, 2)]
    _, q, k, _ = whole.unflatten(-1, (9, 8)).split((1, 4, 2, 2), dim=2)
    table = rope_table(torch.arange(6).view(1, 6), head_dim=8, theta=100.0, dtype=torch.float64)
    dy = [normal(1, n, 6, 8, seed=n).transpose(1, 2) for n in (4, 2)]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        got = fused_normed_rope(q, k, (w[0], w[1]), 1e-6, (table.cos_BSN, table.sin_BSN))
    assert [tuple(x.shape) for x in kept] == [(1, 6, 4, 8), (1, 6, 2, 8), (8,), (8,), (1, 6, 4), (1, 6, 4)]
    want = apply_rope(q, k, table=table, norms=HeadNorms(w[0], w[1], 1e-6), impl="reference")
    for a, b in zip(*(torch.autograd.grad(y, (whole, *w), dy, retain_graph=True) for y in (got, want)), strict=True):
        assert close(a, b, 1e-12)


def test_rope_turns_parts_of_heads() -> None:
    """As latent attention has them: the last dims of each head, and keys of one head beside something else."""
    q, k = normal(2, 3, 4, 12)[..., 4:], normal(2, 3, 1, 11, seed=1)[..., 3:]
    table = rope_table(torch.arange(6).view(2, 3), head_dim=8, theta=100.0, dtype=torch.float64)
    got = fused_rope(q, k, table.cos_BSN, table.sin_BSN)
    for turned, want in zip(got, apply_rope(q, k, table=table, impl="reference"), strict=True):
        assert turned.is_contiguous() and close(turned, want, 1e-12)


# ---- norms ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(5, 12), (1, 3), (150, 128), (3, 2100), (0, 8)])
def test_norm_equals_its_reference(rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few parts, so that each has several tiles of rows, and more parts than rows of the last sum."""
    x, delta, weight = normal(rows, width), normal(rows, width, seed=1), normal(width, seed=2)

    def plain(x: torch.Tensor, delta: torch.Tensor | None, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return residual_norm(x, delta, w, 1e-6, impl="reference")

    for parts in (2, 512):
        monkeypatch.setattr(norm, "PARTS", parts)
        monkeypatch.setattr(norm, "SUMS", 4)
        agree(lambda x, d, w: fused_norm(x, d, w, 1e-6), plain, [x, delta, weight], tolerance=TOLERANCE)
        agree(
            lambda x, w: fused_norm(x, None, w, 1e-6), lambda x, w: plain(x, None, w), [x, weight], tolerance=TOLERANCE
        )


def test_norm_of_rows_that_are_apart() -> None:
    """As the latent of latent attention is: the first columns of a wider product. Only the norm is asked for."""
    x, w, dy = normal(6, 11).requires_grad_(), normal(8, seed=1).requires_grad_(), normal(6, 8, seed=2)
    got = torch.autograd.grad(fused_norm(x[:, :8], None, w, 1e-6)[1], (x, w), dy)
    want = torch.autograd.grad(residual_norm(x[:, :8], None, w, 1e-6, impl="reference")[1], (x, w), dy)
    assert all(close(a, b, 1e-12) for a, b in zip(got, want, strict=True))


def test_the_norm_is_of_the_rounded_stream() -> None:
    """So a block that is run again from the stream alone finds the same bits."""
    x, delta, w = (normal(3, 40, seed=i).to(torch.bfloat16) / 3 for i in range(3))
    stream, out = fused_norm(x, delta, w[0], 1e-6)
    assert torch.equal(out, fused_norm(stream, None, w[0], 1e-6)[1])


def test_stream_alone_has_a_gradient() -> None:
    x, delta, w = (normal(3, 4, seed=i).requires_grad_() for i in range(3))
    stream, _ = fused_norm(x, delta, w[0], 1e-6)
    stream.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 4)) and torch.equal(delta.grad, x.grad) and w.grad is None
