"""The experts' grouped products, on a stand-in that leaves unwritten, as NaN, all that the real one leaves unwritten on some device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.nn.functional as F
from kernel_help import close, normal, outcome

from phalanx.kernels.ops.deferred import DeferredGradients, run, target_of
from phalanx.kernels.ops.grouped import expert_ffn
from phalanx.kernels.ops.grouped_mm import grouped_ffn, products_of_groups

pytestmark = pytest.mark.unit

COUNTS = {
    "all": (5, 3, 8),
    "an empty one first": (0, 5, 3),
    "empty ones between and last": (4, 0, 0, 7, 0),
    "one row": (0, 1),
    "no rows": (0, 0, 0),
}
TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 2e-2}
HIDDEN, WIDTH = 16, 24


def poisoned_grouped_mm(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
    """`F.grouped_mm` in any type. NaN: rows behind the last group, products of groups without rows. Refuses what CUDA's refuses."""
    ends = [0, *offs.tolist()]
    groups = list(itertools.pairwise(ends))
    assert offs.dtype == torch.int32 and a.shape[-1] == b.shape[-2]
    for x in (a, b):
        if 0 in x.shape or not any(stride == 1 for stride in x.stride()[-2:]) or 0 in x.stride():
            raise RuntimeError(f"invalid operand of a grouped product: {tuple(x.shape)}, strides {x.stride()}")
    if b.dim() == 3:
        out = a.new_full((len(a), b.shape[2]), torch.nan)
        for (start, stop), w in zip(groups, b, strict=True):
            out[start:stop] = a[start:stop] @ w
        return out
    out = a.new_full((len(groups), a.shape[0], b.shape[1]), torch.nan)
    for product, (start, stop) in zip(out, groups, strict=True):
        if stop > start:
            product.copy_(a[:, start:stop] @ b[start:stop])
    return out


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the first operand of every product."""
    seen: list[tuple[int, ...]] = []

    def noted(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(a.shape))
        return poisoned_grouped_mm(a, b, offs=offs)

    monkeypatch.setattr(F, "grouped_mm", noted)
    yield seen


def _inputs(counts: Sequence[int]) -> list[torch.Tensor]:
    rows, slots = sum(counts), len(counts)
    return [
        normal(rows, HIDDEN, seed=0),
        normal(slots, 2, WIDTH, HIDDEN, seed=1, scale=HIDDEN**-0.5),
        normal(slots, HIDDEN, WIDTH, seed=2, scale=WIDTH**-0.5),
        normal(rows, seed=3).abs(),
    ]


@pytest.mark.parametrize("kind", ["random", "expanded", "transposed"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_agrees_and_nothing_unwritten_is_read(name: str, recompute: bool, kind: str) -> None:
    counts = COUNTS[name]
    inputs = _inputs(counts)

    def plain(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return expert_ffn(x, w13, w2, counts, row_weights_M=r, impl="reference")

    def grouped(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return grouped_ffn(x, w13, w2, counts, row_weights_M=r, recompute=recompute)

    want = outcome(plain, inputs, torch.float64, kind)
    for dtype, tolerance in TOLERANCE.items():
        got = outcome(grouped, inputs, dtype, kind)
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape and close(a, b, tolerance)
        for of_weight in got[2:4]:
            for gradient, count in zip(of_weight, counts, strict=True):
                assert count or not gradient.any()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_deferred_gradients_have_the_same_bits(name: str, recompute: bool) -> None:
    counts, found = COUNTS[name], []
    for put_off in (False, True):
        x, w13, w2, r = (t.to(torch.bfloat16).requires_grad_() for t in _inputs(counts))
        later = DeferredGradients() if put_off else None
        target = target_of([w13, w2], x, later)
        weights = (w13, w2) if target is None else (w13.detach(), w2.detach())
        y = grouped_ffn(x, *weights, counts, row_weights_M=r, recompute=recompute, target=target)
        y.backward(normal(*y.shape, seed=9).to(y.dtype))
        if later is not None:
            assert w13.grad is None and w2.grad is None
            run(later.take())
        found.append([x.grad, w13.grad, w2.grad, r.grad])
    for a, b in zip(*found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_no_rows_launch_no_product(poisoned: list[tuple[int, ...]]) -> None:
    x, w13, w2, r = (t.to(torch.bfloat16).requires_grad_() for t in _inputs((0, 0)))
    grouped_ffn(x, w13, w2, (0, 0), row_weights_M=r).sum().backward()
    assert poisoned == [] and x.grad is not None and x.grad.shape == (0, HIDDEN)
    assert w13.grad is not None and not w13.grad.any() and w2.grad is not None and not w2.grad.any()


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_kept_for_the_backward_pass(recompute: bool, poisoned: list[tuple[int, ...]]) -> None:
    """The first projection with `recompute` no more, and then one product more; the activation never."""
    counts, shapes = (5, 3), set()
    x, w13, w2, r = (t.to(torch.bfloat16).requires_grad_() for t in _inputs(counts))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (shapes.add(tuple(t.shape)), t)[1], lambda t: t):
        y = grouped_ffn(x, w13, w2, counts, row_weights_M=r, recompute=recompute)
    assert ((8, 2 * WIDTH) in shapes) is not recompute and (8, WIDTH) not in shapes
    poisoned.clear()
    y.sum().backward()
    assert len(poisoned) == (5 if recompute else 4)


def test_expert_ffn_hands_recompute_on(poisoned: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that computes nothing."""
    asked = []
    monkeypatch.setattr("phalanx.kernels.ops.grouped.grouped_ffn", lambda *a, **named: asked.append(named))
    x, w13, w2, r = (t.to("meta", torch.bfloat16) for t in _inputs((5, 3)))
    expert_ffn(x, w13, w2, (5, 3), row_weights_M=r, recompute=True)
    assert asked[0]["recompute"] is True and asked[0]["row_weights_M"] is r


def test_rows_of_no_group_are_refused() -> None:
    x, w13, w2, r = _inputs((5, 3))
    with pytest.raises(ValueError, match=r"counts \[5, 2\]: must sum .* and sum to 7 for 8 rows"):
        grouped_ffn(x, w13, w2, (5, 2), row_weights_M=r)


def test_products_of_groups_alone() -> None:
    a, b = normal(9, 8, seed=1), normal(9, 16, seed=2)
    got = products_of_groups(a, b, (4, 0, 5))
    assert torch.equal(got[1], torch.zeros(8, 16, dtype=a.dtype))
    torch.testing.assert_close(got[2], a[4:].T @ b[4:])
    assert not products_of_groups(a[:0], b[:0], (0, 0)).any()
