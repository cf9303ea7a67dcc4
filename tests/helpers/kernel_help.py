"""Compares a kernel's fast version with its plain one: forward and every gradient, in three types, with awkward gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.native import compiled_rows

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest difference from the plain version in fp64, relative to its largest element."""
DTYPES = tuple(TOLERANCE)

Kernel = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
UPSTREAM = ("random", "expanded", "transposed")
"""Gradients that kernels meet: ordinary, that of `sum` (no memory of its own), and one that is not contiguous."""

LANES = pytest.mark.parametrize("lanes", [1, 3, "compiled"])
"""One lane, more of them, and with the compiled elementwise kernels."""


def pool_of(lanes: int | str) -> Lanes:
    if lanes != "compiled":
        return Lanes(int(lanes))
    rows = compiled_rows()
    if rows is None:
        pytest.skip("needs a C++ compiler")
    return Lanes(3, rows=rows)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Random numbers that every type can hold exactly."""
    return (
        (torch.randn(shape, generator=seeded(seed), dtype=torch.float64) * scale).to(torch.bfloat16).to(torch.float64)
    )


def upstream(like: torch.Tensor, kind: str, *, seed: int = 99) -> torch.Tensor:
    if kind == "expanded":
        return torch.ones((), dtype=like.dtype).expand(like.shape)
    grad = normal(*like.shape, seed=seed).to(like.dtype)
    return grad if kind == "random" or grad.dim() < 2 else grad.transpose(0, 1).contiguous().transpose(0, 1)


def outcome(kernel: Kernel, inputs: Sequence[torch.Tensor], dtype: torch.dtype, kind: str) -> list[torch.Tensor]:
    """Outputs, then gradients of the inputs (None as an empty tensor)."""
    leaves = [x.detach().to(dtype, copy=True).requires_grad_() for x in inputs]
    out = kernel(*leaves)
    outputs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(list(outputs), [upstream(y, kind, seed=99 + i) for i, y in enumerate(outputs)])
    return [y.detach() for y in outputs] + [torch.empty(0) if x.grad is None else x.grad for x in leaves]


def agree(
    fast: Kernel,
    plain: Kernel,
    inputs: Sequence[torch.Tensor],
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    tolerance: Mapping[torch.dtype, float] = TOLERANCE,
) -> None:
    """Assert that `fast` in every type equals `plain` in fp64, forward and backward."""
    for kind in UPSTREAM:
        want = outcome(plain, inputs, torch.float64, kind)
        for dtype in dtypes:
            got = outcome(fast, inputs, dtype, kind)
            assert len(got) == len(want)
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert a.shape == b.shape, f"{kind}, {dtype}, tensor {i}: shape {tuple(a.shape)}, not {tuple(b.shape)}"
                assert close(a, b, tolerance[dtype]), f"{kind}, {dtype}, tensor {i}: off by {error(a, b):.2e}"


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    if want.numel() == 0:
        return 0.0
    return ((got.to(torch.float64) - want).abs().max() / want.abs().max().clamp(min=1e-30)).item()


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference, relative to that of `want`."""
    return ((got.to(torch.float64) - want).norm() / want.norm()).item()


def attention_of_torch(q_BSAD: torch.Tensor, k_BSAD: torch.Tensor, v_BSAD: torch.Tensor) -> torch.Tensor:
    """Causal attention over whole sequences; its gradients in bf16 are what ours are measured against."""
    parts = (x.transpose(1, 2) for x in (q_BSAD, k_BSAD, v_BSAD))
    return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


def close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    if want.numel() == 0:
        return True
    difference = (got.to(torch.float64) - want).abs().max()
    return bool(difference <= tolerance * want.abs().max().clamp(min=0.05))  # NaN is not close
