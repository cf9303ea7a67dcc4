"""Products that add the gradient of a weight where it is summed, as Megatron-Core's fused gradient accumulation does (arXiv 1909.08053's code), instead of a tensor of its own in bf16 that another
pass over memory adds: of a parameter that pass moved 10 bytes a micro-batch; the product now reads and writes 4 each where it wrote 2, beside what it computes. The gradient is rounded to the type
of the sum only.

    WeightSums        which weights have such a sum; made with the model, filled by who owns the sums (`runtime/state/gradients.py`)
    WeightSum.add     one product, of a projection
    add_groups        one product for each group of rows, of experts: a launch each, where a grouped product has one for all. It pays where a product fills the device by itself (`LARGE_EXPERT`)

Legend: M rows, N and K columns of two matrices of rows, e groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

LARGE_EXPERT = 2**23
"""Elements of an expert's second projection, from which on its products add their gradients themselves: 512 tiles of 128 x 128, four for each multiprocessor of an H100."""


@dataclass(frozen=True, eq=False)
class WeightSum:
    """Where the gradient of one weight is summed. `begin` gives the sum, and whether something is in it; whoever calls it adds something."""

    begin: Callable[[], tuple[torch.Tensor, bool]]

    def add(self, a_MN: torch.Tensor, b_MK: torch.Tensor) -> None:
        """Add `a^T b`, (N, K) or of as many elements."""
        total, add = self.begin()
        _add_product(total.view(a_MN.shape[1], b_MK.shape[1]), a_MN, b_MK, add=add)

    def add_groups(self, a_MN: torch.Tensor, b_MK: torch.Tensor, counts: Sequence[int]) -> None:
        """Add `a^T b` over the rows of each group, `counts` of them, to its part of the sum, (e, N, K) or of as many elements."""
        total, add = self.begin()
        pairs = zip(a_MN.split(list(counts)), b_MK.split(list(counts)), strict=True)
        for total_NK, (a_mN, b_mK) in zip(total.view(len(counts), a_MN.shape[1], -1), pairs, strict=True):
            if len(a_mN):
                _add_product(total_NK, a_mN, b_mK, add=add)
            elif not add:
                total_NK.zero_()


class WeightSums:
    """The sums of a rank's weights, found by the weight."""

    def __init__(self) -> None:
        self._of: dict[int, WeightSum] = {}

    def take(self, sums: Iterable[tuple[torch.Tensor, WeightSum]]) -> None:
        """Makes `of` find these from now on. Weights are told apart by identity."""
        self._of = {id(weight): each for weight, each in sums}

    def of(self, weight: torch.Tensor) -> WeightSum | None:
        """Where the gradient of `weight`, a parameter or all of one in another shape, is summed; None where it is made as ever."""
        base = weight._base
        if base is None or base.numel() != weight.numel() or not weight.is_contiguous():
            return self._of.get(id(weight))
        return self._of.get(id(base))


def sums_of(sums: WeightSums | None, weights: Sequence[torch.Tensor]) -> tuple[WeightSum | None, ...]:
    """Of each weight; () where none has one, or no backward pass will come."""
    found = () if sums is None or not torch.is_grad_enabled() else tuple(sums.of(weight) for weight in weights)
    return found if any(found) else ()


def sums_of_experts(sums: WeightSums | None, *weights: torch.Tensor) -> tuple[WeightSum, ...]:
    """Of the weights of experts, (e, ...) each, the second projection last; () where grouped products make their gradients."""
    found = sums_of(sums, weights)
    return tuple(x for x in found if x is not None) if all(found) and weights[-1][0].numel() >= LARGE_EXPERT else ()


def _add_product(total_NK: torch.Tensor, a_MN: torch.Tensor, b_MK: torch.Tensor, *, add: bool) -> None:
    """`total = a^T b`, or with `add` what it was plus that."""
    a_NM, factor = a_MN.T, int(add)  # with 0 what is there is not read
    if total_NK.dtype == a_MN.dtype:
        torch.addmm(total_NK, a_NM, b_MK, beta=factor, out=total_NK)
    elif total_NK.device.type != "cpu":
        torch.addmm(total_NK, a_NM, b_MK, out_dtype=total_NK.dtype, beta=factor, out=total_NK)
    else:  # which has no product of two types
        torch.addmm(total_NK, a_NM.to(total_NK.dtype), b_MK.to(total_NK.dtype), beta=factor, out=total_NK)
