"""One AdamW step (arXiv 1711.05101) over flat buffers.

Must never change: moments and master weights are fp32 (fp64 in fp64); the compute-type copy is rounded from the new master.
"""

from __future__ import annotations

import math

import torch

from phalanx.kernels.choice import Impl


def adamw_(
    master: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    out: torch.Tensor | None = None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    scale: float | torch.Tensor = 1.0,
    impl: Impl = "fast",
) -> None:
    """Update 1-d `master`, `exp_avg`, `exp_avg_sq` in place from `scale * grad` (any float type) and round `master` into `out`.

    `step` counts from 1. `scale` (a number or a 0-d tensor) is the clipping factor. All tensors have the same length.
    """
    wide = grad.to(master.dtype) * scale
    exp_avg.lerp_(wide, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(wide, wide, value=1 - beta2)
    denominator = (exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step)).add_(eps)
    master.mul_(1 - lr * weight_decay)
    master.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))
    if out is not None:
        out.copy_(master)
