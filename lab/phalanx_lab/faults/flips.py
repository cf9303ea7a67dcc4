"""Planted flips of single bits: in results of matrix products, in messages on their way, in what a product left behind, in the state at rest.

Each takes the place of what looks for such things (`kernels/cpu/products.py`, `runtime/comm/sums.py`), so that it gets in exactly there: after a result is made and before it is
looked at, after a message has arrived and before it is summed. The product code is not touched. A flip is aimed at the n-th event of a step on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from phalanx.kernels.cpu.products import Factors, ProductSums
from phalanx.kernels.native import CompiledRows, Seen
from phalanx.runtime.comm.sums import MessageSums, Passed

Flip = Callable[[torch.Tensor], None]


@dataclass
class Aim:
    """What is to be flipped in the next step: the tensor of event number `at`, by `flip`; None: nothing. `hit` names the place once it has happened."""

    at: int = -1
    flip: Flip | None = None
    events: int = 0
    """Events of the step so far."""
    hit: str = ""

    def begin(self, at: int = -1, flip: Flip | None = None) -> None:
        """A step begins."""
        self.at, self.flip, self.events, self.hit = at, flip, 0, ""

    def passes(self, place: str, x: torch.Tensor) -> None:
        """An event."""
        if self.events == self.at and self.flip is not None:
            self.flip(x)
            self.hit = place
        self.events += 1


class FlippedProducts(ProductSums):
    """A bit of a result flips as it is made (`made`), or when it was looked at and is yet to be used (`left`)."""

    looks_late = False

    def __init__(self) -> None:
        super().__init__()
        self.made, self.left = Aim(), Aim()

    def check(
        self,
        place: str,
        c_mn: torch.Tensor,
        *factors: Factors,
        rows: CompiledRows | None = None,
        seen: Seen | None = None,
    ) -> None:
        self.made.passes(place, c_mn)
        super().check(place, c_mn, *factors, rows=rows, seen=seen)
        self.left.passes(place, c_mn)

    def look(self, place: str, x_mN: torch.Tensor, rows: CompiledRows | None) -> bool:
        self.made.passes(place, x_mN)
        found = super().look(place, x_mN, rows)
        self.left.passes(place, x_mN)
        return found


class FlippedMessages(MessageSums):
    """A bit of a message flips on its way."""

    def __init__(self, rank: int, *, rows: CompiledRows | None = None) -> None:
        super().__init__(rank, rows=rows)
        self.way = Aim()

    def received(self, place: str, passed: Sequence[Passed]) -> None:
        for _, x, _ in passed:
            self.way.passes(place, x)
        super().received(place, passed)

    def add(
        self, place: str, ranks: Sequence[int], parts_PN: torch.Tensor, own_N: torch.Tensor, out_N: torch.Tensor
    ) -> None:
        for peer, part_N in zip(ranks, parts_PN, strict=True):
            if peer != self.rank:
                self.way.passes(place, part_N)
        super().add(place, ranks, parts_PN, own_N, out_N)

    def majority(self, copies_3N: torch.Tensor) -> torch.Tensor:
        self.way.passes("few whole numbers", copies_3N)
        return super().majority(copies_3N)


@dataclass
class BitFlip:
    """Flips one bit of one element: `element` and `bit` in [0, 1) say which. Called again with the same tensor, it flips it back."""

    element: float
    bit: float
    exponent: bool = False
    """Only one of the eight bits below the sign: most of those that matter are there."""
    was: dict[str, Any] = field(default_factory=dict)
    """What was flipped: bit, and the element before and after."""

    def __call__(self, x: torch.Tensor) -> None:
        if x.numel() == 0:
            return
        at = int(self.element * x.numel())
        where = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))
        one = x[where].clone().view(1)
        bytes_of = one.view(torch.uint8)
        bits = 8 * len(bytes_of)
        bit = bits - 9 + int(self.bit * 8) if self.exponent else int(self.bit * bits)
        before = float(one)
        bytes_of[bit // 8] ^= 1 << (bit % 8)
        x[where] = one[0]
        self.was = {"bit": bit, "of": bits, "before": before, "after": float(one)}
