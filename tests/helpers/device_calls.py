"""Operations with the shapes of real models, on fake tensors of a GPU: forward as models call them, backward as autograd would (which fake devices lack)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from phalanx.kernels.cpu.permute import combine_rows, gather_rows
from phalanx.kernels.cpu.swiglu import swiglu
from phalanx.kernels.device.swiglu import swiglu_backward

DTYPES = (torch.bfloat16, torch.float32)
TOKENS, HIDDEN = 4096, 2048
"""A micro-batch of Qwen3-30B-A3B."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def experts(dtype: torch.dtype, width: int) -> None:
    gate_up, weights = empty(8 * TOKENS, 2, width, dtype=dtype), empty(8 * TOKENS)
    y = swiglu(gate_up, row_weights_M=weights)
    swiglu_backward(gate_up, weights, y)


def permute(dtype: torch.dtype) -> None:
    x, token_of_row = empty(TOKENS, HIDDEN, dtype=dtype), empty(8 * TOKENS, dtype=torch.int64)
    rows_of_token = empty(TOKENS, 8, dtype=torch.int64)
    rows = gather_rows(x, token_of_row, rows_of_token_TK=rows_of_token)
    combine_rows(rows, rows_of_token, token_of_row_M=token_of_row)


def calls() -> dict[str, Callable[[], object]]:
    """Each is called once, under fake tensors."""
    found: dict[str, Callable[[], object]] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        found[f"permute {name}"] = partial(permute, dtype)
        found |= {f"swiglu {width} {name}": partial(experts, dtype, width) for width in (768, 14336)}
    return found
