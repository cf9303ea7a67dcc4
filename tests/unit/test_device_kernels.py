"""Programs that are one launch each on a GPU, under Triton's interpreter, against their plain references in float64."""

from __future__ import annotations

import pytest
import torch
from kernel_help import agree, normal

pytest.importorskip("triton", reason="Triton is not installed: pip install 'phalanx[gpu]'")

from phalanx.kernels.cpu.swiglu import PlainSwiglu, reference_swiglu
from phalanx.kernels.device.swiglu import fused_swiglu
from phalanx.kernels.triton.tiles import is_interpreted

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="Triton was told to compile (TRITON_INTERPRET=0)")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest difference from the plain version in fp64, relative to its largest element."""


# ---- the gated activation ------------------------------------------------------------------------------------------------

SWIGLUS = pytest.mark.parametrize("swiglu", [fused_swiglu, PlainSwiglu.apply], ids=["fused", "plain"])


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


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_swiglu_of_large_numbers_is_finite() -> None:
    """exp(-gate) overflows at -90 in fp32."""
    gate_up = torch.tensor([[[-200.0, 200.0, 0.0], [1.0, 1.0, 1.0]]]).requires_grad_()
    y = fused_swiglu(gate_up, None)
    y.sum().backward()
    assert y.tolist() == [[0.0, 200.0, 0.0]]
    assert gate_up.grad.isfinite().all()
