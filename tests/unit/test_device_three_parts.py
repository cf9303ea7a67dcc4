"""The gradients of the router's product by parts in bf16, under Triton's interpreter, are as exact as by matrices in fp32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from kernel_help import normal, seeded

from phalanx.kernels.device.three_parts import three_parts, wide_product_backward
from phalanx.kernels.triton.tiles import is_interpreted

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)")

LARGEST = torch.finfo(torch.float32).max
T, H, E = 96, 40, 12


def numbers(*shape: int, least: int, most: int, seed: int) -> torch.Tensor:
    """fp32 of both signs and with all of their 24 bits, from 2^least to 2^most."""
    rng = seeded(seed)
    size = torch.randint(least, most, shape, generator=rng).to(torch.float64)
    digits = torch.randint(2**23, 2**24, shape, generator=rng).to(torch.float64) / 2**23
    sign = torch.randint(0, 2, shape, generator=rng) * 2 - 1
    return (sign * digits * torch.exp2(size)).to(torch.float32)


def summed(x_TE: torch.Tensor) -> torch.Tensor:
    parts = three_parts(x_TE)
    assert parts.dtype == torch.bfloat16 and parts.shape == (x_TE.shape[0], 3 * x_TE.shape[1])
    return parts.to(torch.float64).unflatten(1, (3, -1)).sum(1)


@pytest.mark.parametrize("shape", [(7, 5), (3, 1), (2, 1500), (0, 4)])
def test_parts_sum_up_to_the_number(shape: tuple[int, int]) -> None:
    x = numbers(*shape, least=-110, most=128, seed=1)
    x.flatten()[:3] = torch.tensor([0.0, LARGEST, -LARGEST])[: x.numel()]
    assert torch.equal(summed(x), x.to(torch.float64))
    assert torch.equal(summed(x.T.contiguous().T), x.to(torch.float64)), "a gradient that is not dense"


def test_tiny_numbers_lose_what_no_result_would_hold() -> None:
    """Below 2^-133, the least number of bf16; the least of fp32 among them."""
    x = numbers(40, 9, least=-149, most=-110, seed=2)
    x[0, 0] = 2.0**-149
    assert (summed(x) - x.to(torch.float64)).abs().max() < 2.0**-133


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_shows(value: float) -> None:
    x = torch.ones(2, 3)
    x[1, 2] = value
    found = summed(x)
    assert not found[1, 2].isfinite() and found.isfinite().sum() == 5


def split_mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """What tensor cores compute of bf16 operands, which CPUs refuse: exact products, added up in fp32, but for parts of the depth, which are added in the type of the result."""
    assert a.dtype == b.dtype == torch.bfloat16
    parts = zip(a.split(E // 2, 1), b.split(E // 2), strict=True)
    return sum((left.to(torch.float32) @ right.to(torch.float32)).to(out_dtype) for left, right in parts)


GRADIENTS = {
    "of one size": numbers(T, E, least=-20, most=-19, seed=3),
    "of all sizes": numbers(T, E, least=-100, most=0, seed=4),
    "that cancel": normal(T // 2, E // 2, seed=5).to(torch.float32).repeat_interleave(2, 0).repeat(1, 2)
    * torch.tensor([1.0, -1.0]).repeat(T // 2).unsqueeze(1)
    * torch.tensor([1.0, -1.0]).repeat_interleave(E // 2)
    + numbers(T, E, least=-12, most=-11, seed=6),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_as_exact_as_in_fp32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are equal in pairs, and so are experts, so that gradients that cancel leave what only further parts hold. Errors but those of the last rounding, of the sum of sizes."""
    monkeypatch.setattr(torch, "mm", split_mm)
    dy, w = GRADIENTS[name], normal(E // 2, H, seed=8).to(torch.bfloat16).repeat(2, 1)
    x = normal(T // 2, H, seed=7).to(torch.bfloat16).repeat_interleave(2, 0)
    dx, dw = wide_product_backward(dy, x, w)
    monkeypatch.undo()
    for got, a, b in ((dx, dy, w), (dw, dy.T, x)):
        want, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()
        plain = (((a @ b.float()).double() - want).abs() / sizes).max()
        assert plain <= 1e-6
        bit = want.abs() * 2.0**-7 if got.dtype == torch.bfloat16 else 0.0  # the interpreter cuts where a GPU rounds
        assert (((got.double() - want).abs() - bit) / sizes).max() <= 2e-6


def test_no_tokens() -> None:
    x, w = torch.zeros(0, H, dtype=torch.bfloat16), torch.ones(E, H, dtype=torch.bfloat16)
    dx, dw = wide_product_backward(torch.zeros(0, E), x, w)
    assert dx.shape == x.shape and torch.equal(dw, torch.zeros_like(w)) and dx.dtype == dw.dtype == w.dtype
