"""The expert network: fast against plain, over every kind of row count."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from kernel_help import LANES, agree, normal, pool_of, seeded

from phalanx.kernels.cpu.shapes import padded_rows
from phalanx.kernels.ops.grouped import MAX_PIECE, _pieces, expert_ffn

COUNTS = {
    "mixed": (5, 0, 3, 20),
    "empty": (0, 0),
    "one row": (0, 1),
    "full sizes": (64, 128),
    "overfull": (MAX_PIECE + 7, 0, 30),
    "three pieces": (2 * MAX_PIECE + 1,),
}


def _inputs(counts: tuple[int, ...], *, hidden: int, width: int) -> list[torch.Tensor]:
    rows, slots = sum(counts), len(counts)
    weights = torch.rand(rows, generator=seeded(3), dtype=torch.float64).to(torch.bfloat16).to(torch.float64)
    return [
        normal(rows, hidden, seed=0),
        normal(slots, 2, width, hidden, seed=1, scale=hidden**-0.5),
        normal(slots, hidden, width, seed=2, scale=width**-0.5),
        weights,
    ]


@pytest.mark.parametrize("recompute", [False, True])
@LANES
@pytest.mark.parametrize("name", COUNTS)
def test_agrees(name: str, lanes: int | str, recompute: bool) -> None:
    counts = COUNTS[name]
    with pool_of(lanes) as pool:
        agree(
            lambda x, w13, w2, r: expert_ffn(x, w13, w2, counts, row_weights_M=r, recompute=recompute, lanes=pool),
            lambda x, w13, w2, r: expert_ffn(x, w13, w2, counts, row_weights_M=r, impl="reference"),
            _inputs(counts, hidden=16, width=24),
        )


@pytest.mark.parametrize(("hidden", "width"), [(7, 5), (1, 1), (33, 12)])
def test_odd_sizes(hidden: int, width: int) -> None:
    """Rows that are no multiple of 16 bytes."""
    counts = (3, 17, 1)
    agree(
        lambda x, w13, w2: expert_ffn(x, w13, w2, counts),
        lambda x, w13, w2: expert_ffn(x, w13, w2, counts, impl="reference"),
        _inputs(counts, hidden=hidden, width=width)[:3],
    )


def test_gradcheck() -> None:
    inputs = [x.requires_grad_() for x in _inputs((2, 0, 3), hidden=3, width=2)]
    assert torch.autograd.gradcheck(lambda x, w13, w2, r: expert_ffn(x, w13, w2, (2, 0, 3), row_weights_M=r), inputs)


def test_wide_row_weights_keep_their_type() -> None:
    x, w13, w2, r = _inputs((4, 6), hidden=8, width=8)
    weights = r.to(torch.float32).requires_grad_()
    expert_ffn(*(t.to(torch.bfloat16) for t in (x, w13, w2)), (4, 6), row_weights_M=weights).sum().backward()
    assert weights.grad is not None and weights.grad.dtype == torch.float32


def test_frozen_weights_and_inputs() -> None:
    """Only what needs a gradient gets one."""
    x, w13, w2, _ = _inputs((4, 6), hidden=8, width=8)
    x.requires_grad_()
    expert_ffn(x, w13, w2, (4, 6)).sum().backward()
    assert x.grad is not None and w13.grad is None
    with torch.no_grad():
        assert not expert_ffn(x, w13, w2, (4, 6)).requires_grad


@LANES
@pytest.mark.parametrize("which", range(4))
def test_what_alone_needs_a_gradient_gets_it(which: int, lanes: int | str) -> None:
    """Weights are frozen one by one, too."""
    counts = (4, 0, 6)

    def gradients(needed: Sequence[int]) -> list[torch.Tensor]:
        inputs = _inputs(counts, hidden=8, width=8)
        leaves = [inputs[i].requires_grad_() for i in needed]
        with pool_of(lanes) as pool:
            out = expert_ffn(*inputs[:3], counts, row_weights_M=inputs[3], lanes=pool)  # type: ignore[arg-type]
            return list(torch.autograd.grad(out.square().sum(), leaves))

    assert torch.equal(gradients([which])[0], gradients(range(4))[which])


def test_strided_rows() -> None:
    counts = (9, 4)
    inputs = _inputs(counts, hidden=16, width=8)[:3]
    agree(
        lambda x, w13, w2: expert_ffn(x.T.contiguous().T, w13, w2, counts),
        lambda x, w13, w2: expert_ffn(x, w13, w2, counts, impl="reference"),
        inputs,
    )


def test_bits_do_not_depend_on_lanes() -> None:
    counts = (700, 0, 90, 1500)
    inputs = _inputs(counts, hidden=32, width=16)

    def run(lanes: int | str) -> list[torch.Tensor]:
        leaves = [t.to(torch.bfloat16).requires_grad_() for t in inputs]
        with pool_of(lanes) as pool:
            y = expert_ffn(*leaves[:3], counts, row_weights_M=leaves[3], lanes=pool)
            y.backward(torch.ones_like(y))
        return [y.detach(), *(t.grad for t in leaves if t.grad is not None)]

    for a, b in zip(run(2), run(4), strict=True):
        assert torch.equal(a, b)


def test_a_second_backward_pass_gives_the_same() -> None:
    x, w13, w2, _ = _inputs((4, 6), hidden=8, width=8)
    x.requires_grad_()
    y = expert_ffn(x, w13, w2, (4, 6))
    first, second = (torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_pieces_cover_the_rows_and_shapes_are_few() -> None:
    for counts in COUNTS.values():
        pieces = _pieces(counts, torch.bfloat16)
        rows = [r for p in pieces for r in range(p.start, p.stop)]
        assert rows == list(range(sum(counts)))
        assert all(p.num_rows <= p.size and p.num_rows <= MAX_PIECE for p in pieces)
        assert [p.at for p in pieces] == [sum(p.size for p in pieces[:i]) for i in range(len(pieces))]
    sizes = {padded_rows(n, torch.bfloat16) for n in range(1, 1025)}
    assert len(sizes) <= 48 and max(s / n for n in range(128, 1025) for s in [padded_rows(n, torch.bfloat16)]) <= 1.125
    assert padded_rows(513, torch.float64) == 513 and padded_rows(0, torch.bfloat16) == 0


def test_row_weights_of_zero_and_nearly_zero() -> None:
    """The gradient of a row weight is divided by the weight in the fast path, and must be right where it cannot be."""
    weights = normal(70, seed=3)
    weights[::3] = 0.0
    weights[1::3] *= 2.0**-40
    agree(
        lambda x, w13, w2, r: expert_ffn(x, w13, w2, [40, 30], row_weights_M=r),
        lambda x, w13, w2, r: expert_ffn(x, w13, w2, [40, 30], row_weights_M=r, impl="reference"),
        [normal(70, 16), normal(2, 2, 24, 16, seed=1), normal(2, 16, 24, seed=2), weights],
    )
