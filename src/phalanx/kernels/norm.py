"""Root-mean-square normalisation (arXiv 1910.07467), over the last dim.

Must never change: the mean of squares is taken in fp32 (fp64 for fp64 input), whatever the storage type.

Legend: T rows, H size of the normalised dim.
"""

from __future__ import annotations

import torch

from phalanx.kernels.choice import Impl


def rms_norm(x_TH: torch.Tensor, w_H: torch.Tensor, eps: float, *, impl: Impl = "fast") -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * w` over the last dim, any leading dims; result in the type of `x`."""
    return _reference(x_TH, w_H, eps)


def _reference(x_TH: torch.Tensor, w_H: torch.Tensor, eps: float) -> torch.Tensor:
    wide = torch.promote_types(x_TH.dtype, torch.float32)
    x = x_TH.to(wide)
    scale_T1 = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale_T1 * w_H.to(wide)).to(x_TH.dtype)
