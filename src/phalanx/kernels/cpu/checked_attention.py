"""Is the result of attention what it has to be, where products are checked (`products.py`)? Sums that its products leave as they are say so.

Legend: B sequences, S positions, A query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

import math

import torch

from phalanx.kernels.cpu.products import ProductSums


def check_forward(sums: ProductSums, v_BSGD: torch.Tensor, out_BSAD: torch.Tensor) -> None:
    """An output is a mean of values of its sequence: none is larger than the largest of them."""
    most_BG = v_BSGD.abs().amax((1, 3)).to(torch.promote_types(v_BSGD.dtype, torch.float32))
    found_BG = out_BSAD.abs().unflatten(2, (most_BG.shape[1], -1)).amax((1, 3, 4)).to(most_BG.dtype)
    sums.limit(
        "attention forward",
        found_BG,
        most_BG * (1 + 8 * torch.finfo(v_BSGD.dtype).eps + 4 * v_BSGD.shape[1] * torch.finfo(most_BG.dtype).eps),
    )


def check_backward(
    sums: ProductSums,
    q_BSAD: torch.Tensor,
    k_BSGD: torch.Tensor,
    d_out_BSAD: torch.Tensor,
    grads: tuple[torch.Tensor, ...],
) -> None:
    """Two sums that the products of the backward pass leave as they are, of each sequence and key/value head.

    The weights of a query add up to one, so the rows of `dV` add up to those of `dO`; and `<dQ, Q> = sum dS S = <dK, K>`.
    """
    wide, groups = torch.promote_types(q_BSAD.dtype, torch.float32), k_BSGD.shape[2]
    eps, entropy = torch.finfo(q_BSAD.dtype).eps, math.log(q_BSAD.shape[1]) + 4.0
    eps += 4 * q_BSAD.shape[1] * torch.finfo(wide).eps
    d_q, d_k, d_v = grads

    def of_group(x_BSAD: torch.Tensor) -> torch.Tensor:
        """(B, G, D) sums over positions and the query heads of a group."""
        return x_BSAD.sum(1, dtype=wide).unflatten(1, (groups, -1)).sum(2)

    off_BGD = d_v.sum(1, dtype=wide) - of_group(d_out_BSAD)
    most_BGD = eps * (d_v.abs().sum(1, dtype=wide) + entropy * of_group(d_out_BSAD.abs()))
    sums.limit("attention, gradient of the values", off_BGD.abs(), most_BGD + torch.finfo(wide).tiny)
    of_q, of_k = (d_q * q_BSAD), (d_k * k_BSGD)
    off_BG = of_group(of_q).sum(-1) - of_k.sum((1, 3), dtype=wide)
    most_BG = 3 * eps * (of_group(of_q.abs()).sum(-1) + of_k.abs().sum((1, 3), dtype=wide))
    sums.limit("attention, gradients of queries and keys", off_BG.abs(), most_BG + torch.finfo(wide).tiny)
