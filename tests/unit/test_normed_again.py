"""What is normed is made again in the backward pass: the same gradients, from a tensor that is gone in between."""

from __future__ import annotations

import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from phalanx.models.recompute import normed_again


def draw(*shape: int, seed: int) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.requires_grad_()


def _ran(again: bool) -> tuple[list[torch.Tensor], list[int], bool]:
    """Gradients; rows of what was normed each time; whether the first result was there when the backward pass began."""
    x, gain, a, b = draw(6, 8, seed=1), draw(8, seed=2), draw(5, 8, seed=3), draw(3, 8, seed=4)
    calls: list[int] = []

    def norm(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return F.rms_norm(x, (8,), gain, 1e-6)

    y = norm(x)
    with normed_again(y, norm, x) if again else nullcontext():
        out = F.linear(y.view(2, 3, 8), a).square().sum() + (F.linear(y, b).tanh() * 2).sum()
    gone = weakref.ref(y.untyped_storage())
    del y
    was_there = gone() is not None
    out.backward()
    return [t.grad for t in (x, gain, a, b) if t.grad is not None], calls, was_there


def test_gradients_are_the_same_and_nothing_is_kept() -> None:
    plain, once, kept = _ran(again=False)
    made, twice, kept_again = _ran(again=True)
    assert len(plain) == 4 and all(torch.equal(a, b) for a, b in zip(plain, made, strict=True))
    assert len(once) == 1 and len(twice) > 1
    assert kept and not kept_again


def test_a_norm_that_is_another_shows() -> None:
    x, weight = draw(4, 8, seed=1), draw(3, 8, seed=2)
    y = F.rms_norm(x, (8,))
    with normed_again(y, lambda x: 2 * F.rms_norm(x, (8,)), x):
        out = F.linear(y, weight)
    out.sum().backward()
    assert weight.grad is not None
    assert torch.allclose(weight.grad, 2 * F.rms_norm(x.detach(), (8,)).sum(0).expand(3, 8))


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_not_normed_is_kept_as_ever(inside: bool) -> None:
    x, other = draw(4, 8, seed=1), draw(4, 8, seed=2)
    y = F.rms_norm(x, (8,))
    with normed_again(y, lambda x: F.rms_norm(x, (8,)), x) if inside else nullcontext():
        out = (other.exp() * y).sum()
    out.backward()
    assert other.grad is not None and torch.allclose(other.grad, (other.exp() * y).detach())
