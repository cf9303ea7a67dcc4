"""Norm, rotation, activation, projection, embedding, permutation: fast against plain."""

from __future__ import annotations

import pytest
import torch
from kernel_help import LANES, agree, normal, pool_of, seeded

from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.shapes import BLOCK
from phalanx.kernels.ops.embedding import embed
from phalanx.kernels.ops.linear import COLUMNS, ROWS, _Projections, linear, projections
from phalanx.kernels.ops.norm import residual_norm, rms_norm
from phalanx.kernels.ops.permute import combine_rows, gather_rows
from phalanx.kernels.ops.rope import apply_rope, rope_table
from phalanx.kernels.ops.swiglu import swiglu


@LANES
@pytest.mark.parametrize("shape", [(7, 16), (0, 8), (1, 5), (2, 3, 4, 6), (BLOCK // 64 + 3, 64)])
def test_rms_norm(shape: tuple[int, ...], lanes: int | str) -> None:
    with pool_of(lanes) as pool:
        agree(
            lambda x, w: rms_norm(x, w, 1e-5, lanes=pool),
            lambda x, w: rms_norm(x, w, 1e-5, impl="reference"),
            [normal(*shape), normal(shape[-1], seed=1)],
        )


@LANES
def test_residual_norm(lanes: int | str) -> None:
    """The stream that goes on, and its norm; gradients come back through both."""
    inputs = [normal(700, 48), normal(700, 48, seed=1), normal(48, seed=2)]
    with pool_of(lanes) as pool:
        agree(
            lambda x, d, w: residual_norm(x, d, w, 1e-5, lanes=pool),
            lambda x, d, w: residual_norm(x, d, w, 1e-5, impl="reference"),
            inputs,
        )
        agree(
            lambda x, w: residual_norm(x, None, w, 1e-5, lanes=pool),
            lambda x, w: residual_norm(x, None, w, 1e-5, impl="reference"),
            [inputs[0], inputs[2]],
        )
    x, d, w = (t.requires_grad_() for t in (normal(3, 4), normal(3, 4, seed=1), normal(4, seed=2)))
    assert torch.autograd.gradcheck(lambda x, d, w: residual_norm(x, d, w, 1e-5), (x, d, w))
    residual_norm(x, d, w, 1e-5)[1].sum().backward()
    assert x.grad is not None and d.grad is not None and torch.equal(x.grad, d.grad), "without a gradient of the stream"


def test_rms_norm_of_zero_and_of_huge_rows() -> None:
    x = torch.tensor([[0.0, 0.0], [3e38, 3e38]], dtype=torch.float64).requires_grad_()
    w = torch.ones(2, dtype=torch.float64)
    y = rms_norm(x, w, 1e-5)
    assert torch.equal(y[0], torch.zeros(2, dtype=torch.float64)) and torch.allclose(
        y[1], torch.ones(2, dtype=torch.float64)
    )


@LANES
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 3, 2), (8, 8, 64)])
def test_rope(heads: int, kv_heads: int, dim: int, lanes: int | str) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 100_000]])

    def rotate(impl: str, pool: Lanes):
        def run(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, ...]:
            table = rope_table(positions, head_dim=dim, theta=1e4, dtype=q.dtype)
            return apply_rope(q, k, table=table, impl=impl, lanes=pool)

        return run

    with pool_of(lanes) as pool:
        inputs = [normal(2, 5, n, dim, seed=i) for i, n in enumerate((heads, kv_heads))]
        agree(rotate("fast", pool), rotate("reference", pool), inputs)


@LANES
def test_rope_of_no_token(lanes: int | str) -> None:
    q, k = (normal(2, 0, n, 8).requires_grad_() for n in (4, 2))
    table = rope_table(torch.zeros(2, 0, dtype=torch.int64), head_dim=8, theta=1e4, dtype=q.dtype)
    with pool_of(lanes) as pool:
        turned = apply_rope(q, k, table=table, lanes=pool)
        torch.autograd.backward([x.sum() for x in turned])
    assert [x.shape for x in turned] == [q.shape, k.shape] and q.grad is not None and q.grad.shape == q.shape


def test_rope_turns_pairs_of_halves_by_their_position() -> None:
    """By hand: dim 0 and 2 turn by the position, dim 1 and 3 by position / 10 (theta = 100, D = 4)."""
    table = rope_table(torch.tensor([[0, 3]]), head_dim=4, theta=100.0, dtype=torch.float64)
    q = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64).expand(1, 2, 1, 4)
    turned, _ = apply_rope(q, q, table=table)
    a, b = torch.tensor(3.0, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    assert torch.allclose(turned[0, 0, 0], q[0, 0, 0])
    assert torch.allclose(turned[0, 1, 0], torch.stack([a.cos(), -b.sin(), a.sin(), b.cos()]))


@LANES
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_swiglu(rows: int, lanes: int | str) -> None:
    with pool_of(lanes) as pool:
        agree(lambda x: swiglu(x, lanes=pool), lambda x: swiglu(x, impl="reference"), [normal(rows, 2, 10)])
    weights = torch.rand(rows, generator=seeded(1), dtype=torch.float64)
    agree(
        lambda x: swiglu(x, row_weights_M=weights),
        lambda x: swiglu(x, row_weights_M=weights, impl="reference"),
        [normal(rows, 2, 10)],
    )


@LANES
@pytest.mark.parametrize("rows", [0, 1, 37, ROWS + 90])
def test_linear(rows: int, lanes: int | str) -> None:
    with pool_of(lanes) as pool:
        agree(
            lambda x, w, b: linear(x, w, b, lanes=pool),
            lambda x, w, b: linear(x, w, b, impl="reference"),
            [normal(rows, 12), normal(COLUMNS + 9, 12, seed=1), normal(COLUMNS + 9, seed=2)],
        )


@LANES
def test_several_projections_of_one_input(lanes: int | str) -> None:
    inputs = [normal(2, 9, 12), *(normal(n, 12, seed=n) for n in (5, 8, 3)), normal(8, seed=4)]

    def run(impl: str, pool: Lanes):
        def kernel(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, bias: torch.Tensor):
            return projections(x, [a, b, c], [None, bias, None], impl=impl, lanes=pool)

        return kernel

    with pool_of(lanes) as pool:
        agree(run("fast", pool), run("reference", pool), inputs)


def test_several_projections_on_the_path_of_devices() -> None:
    inputs = [normal(2, 9, 12), *(normal(n, 12, seed=n) for n in (5, 8, 3)), normal(8, seed=4)]
    agree(
        lambda x, a, b, c, bias: _Projections.apply(3, (), x, a, b, c, None, bias, None),
        lambda x, a, b, c, bias: projections(x, [a, b, c], [None, bias, None], impl="reference"),
        inputs,
    )


@LANES
def test_embedding(lanes: int | str) -> None:
    tokens = torch.randint(0, 11, (300,), generator=seeded())
    tokens[:200] = 3  # bf16 sums of 200 equal gradients stop growing at 256 of them
    with pool_of(lanes) as pool:
        agree(lambda w: embed(tokens, w, lanes=pool), lambda w: embed(tokens, w, impl="reference"), [normal(13, 70)])
        agree(
            lambda w: embed(tokens[:0], w, lanes=pool),
            lambda w: embed(tokens[:0], w, impl="reference"),
            [normal(13, 6)],
        )


def test_the_plain_embedding_loses_no_frequent_token_either() -> None:
    def plain(weight_VH: torch.Tensor) -> torch.Tensor:
        return embed(torch.full((2000,), 3), weight_VH, impl="reference")

    agree(plain, plain, [normal(13, 70)])


def _maps(*, tokens: int, copies: int, fill: int, dropped: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Index maps of a random permutation with fill rows and, if asked, some dropped copies."""
    pairs = tokens * copies
    place = torch.randperm(pairs + fill, generator=seeded(5))[:pairs]
    if dropped:
        place[:: max(1, pairs // 3)] = -1
    token_of_row = torch.full((pairs + fill,), -1)
    kept = place >= 0
    token_of_row[place[kept]] = torch.arange(pairs)[kept] // copies
    return token_of_row, place.view(tokens, copies)


@LANES
@pytest.mark.parametrize(
    ("tokens", "copies", "fill", "dropped"),
    [
        (9, 2, 0, False),
        (9, 2, 5, True),
        (6, 1, 0, False),
        (6, 3, 2, True),
        (1, 2, 0, False),
        (0, 2, 0, False),
        (4, 8, 0, False),
    ],
)
def test_permutation(tokens: int, copies: int, fill: int, dropped: bool, lanes: int | str) -> None:
    token_of_row, rows_of_token = _maps(tokens=tokens, copies=copies, fill=fill, dropped=dropped)
    there = {"rows_of_token_TK": rows_of_token}
    back = {"token_of_row_M": token_of_row}
    with pool_of(lanes) as pool:
        agree(
            lambda x: gather_rows(x, token_of_row, **there, lanes=pool),
            lambda x: gather_rows(x, token_of_row, **there, impl="reference"),
            [normal(tokens, 10)],
        )
        agree(
            lambda y: combine_rows(y, rows_of_token, **back, lanes=pool),
            lambda y: combine_rows(y, rows_of_token, **back, impl="reference"),
            [normal(len(token_of_row), 10)],
        )


def test_gradchecks() -> None:
    x, w = normal(5, 4).requires_grad_(), normal(4, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, w))
    assert torch.autograd.gradcheck(swiglu, (normal(3, 2, 4).requires_grad_(),))
    assert torch.autograd.gradcheck(linear, (x, normal(3, 4).requires_grad_()))
    q, k = (normal(1, 3, n, 4, seed=n).requires_grad_() for n in (2, 1))
    table = rope_table(torch.arange(3).unsqueeze(0), head_dim=4, theta=10.0, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, k: apply_rope(q, k, table=table), (q, k))


def test_fill_rows_hold_zeros_even_where_token_zero_is_not_finite() -> None:
    token_of_row, rows_of_token = torch.tensor([0, -1]), torch.tensor([[0]])
    x = torch.full((1, 4), float("inf"))
    for impl in ("fast", "reference"):
        rows = gather_rows(x, token_of_row, rows_of_token_TK=rows_of_token, impl=impl)
        assert torch.equal(rows[1], torch.zeros(4))
