"""Host functions of `kernels/device` with the shapes of real models, on fake tensors of a GPU: forward and backward of each, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from phalanx.kernels.device.swiglu import swiglu_backward, swiglu_forward

DTYPES = (torch.bfloat16, torch.float32)
TOKENS, HIDDEN = 4096, 2048
"""A micro-batch of Qwen3-30B-A3B."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def swiglu(dtype: torch.dtype, width: int) -> None:
    gate_up, weights = empty(8 * TOKENS, 2, width, dtype=dtype), empty(8 * TOKENS)
    y = swiglu_forward(gate_up, weights)
    swiglu_backward(gate_up, weights, y)


def calls() -> dict[str, Callable[[], object]]:
    """Each is called once, under fake tensors."""
    found: dict[str, Callable[[], object]] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        found |= {f"swiglu {width} {name}": partial(swiglu, dtype, width) for width in (768, 14336)}
    return found
