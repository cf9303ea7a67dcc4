"""The gradients of a product of bf16 matrices whose result is fp32, on tensor cores: an fp32 number of 24 bits is the sum of three bf16 ones of 8.

Must never change: products of bf16 numbers are exact in fp32, in which they are added up; so the gradients are as exact as by products of fp32 matrices. Both results are asked for in fp32,
since of one in bf16 cuBLAS may round partial sums to bf16 before it adds them (split-K, `torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`).
The third part of a number below 2^-110 has bits below 2^-133, the least that bf16 holds, and loses them: no more than results lose that are rounded to bf16.

Legend: T tokens, H hidden, E experts.
"""

from __future__ import annotations

import torch

from phalanx.kernels.device.launch import launch, warps_of

BLOCK = 1024
"""Elements that a program takes."""


def three_parts(x_TE: torch.Tensor) -> torch.Tensor:
    """(T, 3E) bf16: parts of fp32 `x_TE` that sum up to it, largest first."""
    out = x_TE.new_empty(x_TE.shape[0], 3 * x_TE.shape[1], dtype=torch.bfloat16)
    if out.numel():
        from phalanx.kernels.device.programs import three_parts as programs

        count, grid = x_TE.numel(), (-(-x_TE.numel() // BLOCK),)
        launch(
            programs.three_parts, grid, x_TE.contiguous(), out, count, x_TE.shape[1],
            BLOCK=BLOCK, num_warps=warps_of(BLOCK),
        )  # fmt: skip
    return out


def wide_product_backward(
    dy_TE: torch.Tensor, x_TH: torch.Tensor, w_EH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients (T, H) and (E, H) of `x @ w.T` from fp32 `dy_TE`, in the types of bf16 `x_TH` and `w_EH`, rounded once."""
    if not dy_TE.numel():
        return torch.zeros_like(x_TH), torch.zeros_like(w_EH)
    from phalanx.kernels.device.programs import norm as programs

    parts = three_parts(dy_TE)
    dx_TH = torch.mm(parts, w_EH.repeat(3, 1), out_dtype=torch.float32).to(x_TH.dtype)
    dw_3EH = torch.mm(parts.T, x_TH, out_dtype=torch.float32)
    dw_EH = torch.empty_like(w_EH)
    count = dw_EH.numel()
    launch(
        programs.sum_parts, (-(-count // BLOCK),), dw_3EH, dw_EH, 3, count,
        ROWS=4, BLOCK=BLOCK, num_warps=warps_of(4 * BLOCK),
    )  # fmt: skip
    return dx_TH, dw_EH
