"""Weight gradients that are put off: the same bits as those of a backward pass that does all at once, and not one product more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from phalanx.kernels.choice import Impl
from phalanx.kernels.ops.deferred import DeferredGradients, run
from phalanx.kernels.ops.grouped import expert_ffn
from phalanx.kernels.ops.linear import linear, projections

pytestmark = pytest.mark.unit
IMPLS: tuple[Impl, ...] = ("fast", "reference")
COUNTS = (5, 0, 17, 1)


class _CountProducts(TorchDispatchMode):
    """Multiply-adds of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._opname in ("mm", "addmm", "addmm_", "bmm"):
            left, right = args[-2:]
            self.total += left.numel() * right.shape[-1]
        return out


@contextmanager
def products() -> Iterator[_CountProducts]:
    with _CountProducts() as counter:
        yield counter


def gradients(
    leaves: list[torch.Tensor], loss: Callable[[DeferredGradients | None], torch.Tensor], *, put_off: bool
) -> tuple[list[torch.Tensor], int, int]:
    """Gradients of the leaves, multiply-adds of the backward pass, and those of the jobs that it put off."""
    for leaf in leaves:
        leaf.grad = None
    later = DeferredGradients() if put_off else None
    out = loss(later)
    with products() as first:
        out.backward()
    jobs = later.take() if later is not None else []
    with products() as second:
        run(jobs)
    assert all(leaf.grad is not None for leaf in leaves)
    return [leaf.grad for leaf in leaves if leaf.grad is not None], first.total, second.total


def same_bits(leaves: list[torch.Tensor], loss: Callable[[DeferredGradients | None], torch.Tensor]) -> None:
    whole, at_once, none = gradients(leaves, loss, put_off=False)
    split, before, after = gradients(leaves, loss, put_off=True)
    assert all(torch.equal(a, b) for a, b in zip(whole, split, strict=True))
    assert none == 0 and after > 0
    assert before + after == at_once


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", IMPLS)
def test_linear_with_a_view_of_a_parameter(impl: Impl, dtype: torch.dtype) -> None:
    x, w = draw(2, 9, 16, dtype=dtype, seed=1), draw(2, 12, 16, dtype=dtype, seed=2)
    b, c = draw(24, dtype=dtype, seed=3), draw(2, 9, 24, dtype=dtype, seed=4).detach()
    same_bits([x, w, b], lambda later: (linear(x, w.flatten(0, 1), b, impl=impl, later=later) * c).sum())


@pytest.mark.parametrize("impl", IMPLS)
def test_several_projections_of_one_input(impl: Impl) -> None:
    x = draw(9, 16, dtype=torch.float32, seed=1)
    weights = [draw(n, 16, dtype=torch.float32, seed=n) for n in (8, 12)]

    def loss(later: DeferredGradients | None) -> torch.Tensor:
        parts = projections(x, weights, [None, None], impl=impl, later=later)
        return torch.cat(parts, 1).square().sum()

    same_bits([x, *weights], loss)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_experts(impl: Impl, *, weighted: bool, dtype: torch.dtype, recompute: bool) -> None:
    rows, h, f = sum(COUNTS), 16, 24
    x, w13 = draw(rows, h, dtype=dtype, seed=1), draw(len(COUNTS), 2, f, h, dtype=dtype, seed=2)
    w2, p = draw(len(COUNTS), h, f, dtype=dtype, seed=3), draw(rows, dtype=torch.float32, seed=4)

    def loss(later: DeferredGradients | None) -> torch.Tensor:
        weights = p if weighted else None
        y = expert_ffn(x, w13, w2, COUNTS, row_weights_M=weights, recompute=recompute, impl=impl, later=later)
        return (y * torch.arange(h, dtype=dtype)).sum()

    leaves = [x, w13, w2, *([p] if weighted else [])]
    if impl == "fast":
        same_bits(leaves, loss)
        return
    whole, *_ = gradients(leaves, loss, put_off=False)
    split, *_ = gradients(leaves, loss, put_off=True)
    for a, b in zip(whole, split, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12 if dtype == torch.float64 else 2e-2, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_parameter_hears_of_its_gradient_once(impl: Impl) -> None:
    """Hooks take the first gradient after `GradientBuffers.final` for the last one."""
    rows, h, f = sum(COUNTS), 16, 24
    x, w13 = draw(rows, h, dtype=torch.float32, seed=1), draw(len(COUNTS), 2, f, h, dtype=torch.float32, seed=2)
    w2, later, heard = draw(len(COUNTS), h, f, dtype=torch.float32, seed=3), DeferredGradients(), []
    for name, w in (("w13", w13), ("w2", w2)):
        w.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    expert_ffn(x, w13, w2, COUNTS, impl=impl, later=later).sum().backward()
    assert heard == []
    run(later.take())
    assert sorted(heard) == ["w13", "w2"]


def test_nothing_is_put_off_where_no_gradient_is_taken() -> None:
    later = DeferredGradients()
    with torch.no_grad():
        linear(torch.ones(2, 4), torch.ones(3, 4, requires_grad=True), later=later)
    assert later.take() == []


def test_an_input_without_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="only where the layer's input has a gradient"):
        linear(torch.ones(2, 4), torch.ones(3, 4, requires_grad=True), later=DeferredGradients())


def test_hooks_of_jobs_run_in_the_thread_that_runs_them() -> None:
    """On a GPU autograd would take another one for leaves, and hooks post messages."""
    x, w, found = draw(5, 4, dtype=torch.float32, seed=1), draw(3, 4, dtype=torch.float32, seed=2).requires_grad_(), []
    w.register_post_accumulate_grad_hook(lambda _: found.append(torch._C._is_multithreading_enabled()))
    later = DeferredGradients()
    linear(x.requires_grad_(), w, later=later).sum().backward()
    run(later.take())
    assert found == [False] and torch._C._is_multithreading_enabled()
