"""Sums that do not depend on their order: gradients in 64-bit fixed point.

A number x becomes the integer round(x * 2^bits); integers are added, on this rank and between ranks, and the sum is turned back once. Integer
addition is associative, so who adds what when cannot change a bit. Rounding loses at most 2^-(bits + 1) a summand: with 52 binary places a sum
of 64 gradients of 1e-8 is as exact as fp32 holds it. `top` is the largest magnitude that came in: whoever reads a sum asks first whether
there was room (`limit`), for an integer that has overflowed cannot be told from a sound one.

    fixed_add_       x -> integers, added                       16 bytes of memory traffic an element and the read of x, in one pass
    fixed_read       integers -> numbers                        one pass
    fixed_squares    sum of squares in three integers           one pass; exact enough for a norm whatever the sizes of its elements

Must never change: the result for an element depends on that element alone (no block, no lane, no vector tail shows in it).

Reference: int64 sums of 2 million elements over gloo cost a third more than fp32 (reference "resilience", section 7.3). The idea of sums in
fixed bins that any order fills alike: Demmel and Nguyen, "Parallel reproducible summation", IEEE TC 64(7), 2015.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes

PIECE = 1 << 20
"""Elements of a piece of work for a lane."""
SQUARE_PLACES = (20, 52, 84)
"""Binary places of the three integers that hold a sum of squares; each takes what the one before it leaves."""
ROOM = 62
"""Binary digits of a sum that are used: one stays free beside the sign."""


def limit(bits: int, summands: int) -> float:
    """Magnitudes below this fit: `summands` of them add up to less than 2^62 units."""
    return 2.0 ** (ROOM - bits) / summands


def bits_for(top: float, summands: int) -> int:
    """Most binary places with which `summands` numbers of at most `top` fit."""
    return ROOM - 1 - math.frexp(top * summands)[1]


def fixed_add_(total: torch.Tensor, x: torch.Tensor, *, bits: int, impl: Impl = "fast", lanes: Lanes = SERIAL) -> float:
    """Add contiguous `x` (any float type) to contiguous int64 `total` of as many elements; the largest magnitude, inf where one is not finite.

    An element of `limit(bits, 1)` or more adds garbage. Waits for a device.
    """
    flat, out = x.reshape(-1), total.view(-1)
    native = lanes.rows_for(flat) if impl == "fast" and flat.is_contiguous() and out.is_contiguous() else None
    if native is None:
        return _plain_add(out, flat, bits)
    tops = [0.0] * max(1, -(-flat.numel() // PIECE))

    def run(start: int, lane: int) -> None:
        part = slice(start, start + PIECE)
        tops[start // PIECE] = native.fixed_add(flat[part], out[part], 2.0**bits)

    lanes.run(run, range(0, flat.numel(), PIECE))
    return max(tops)


def _plain_add(total: torch.Tensor, x: torch.Tensor, bits: int) -> float:
    if not x.numel():
        return 0.0
    wide = x.to(torch.float64)
    total += torch.round(wide * 2.0**bits).to(torch.int64)
    top = float(wide.abs().max())  # SYNC: says whether the sum may be trusted
    return top if math.isfinite(top) else math.inf


def fixed_read(
    total: torch.Tensor, *, bits: int, dtype: torch.dtype, impl: Impl = "fast", lanes: Lanes = SERIAL
) -> torch.Tensor:
    """The sums of contiguous int64 `total` as numbers of `dtype` (fp32 or fp64)."""
    out = torch.empty(total.shape, dtype=dtype, device=total.device)
    native = lanes.rows_for(out) if impl == "fast" and total.is_contiguous() else None
    if native is None:
        return out.copy_(total.to(torch.float64) * 2.0**-bits)
    flat, result = total.view(-1), out.view(-1)

    def run(start: int, lane: int) -> None:
        part = slice(start, start + PIECE)
        native.fixed_read(flat[part], result[part], 2.0**-bits)

    lanes.run(run, range(0, flat.numel(), PIECE))
    return out


def fixed_squares(
    x: torch.Tensor, *, scale: float = 1.0, impl: Impl = "fast", lanes: Lanes = SERIAL
) -> tuple[int, int, int]:
    """The squares of `scale * x`, added up in units of 2^-20, 2^-52 and 2^-84: an element's square is cut into three integers.

    Sums over any division of the elements agree exactly. `scale` is a power of two. |scale * x| < 2^11, and all squares together below 2^42.
    """
    flat = x.reshape(-1)
    native = lanes.rows_for(flat) if impl == "fast" and flat.is_contiguous() else None
    if native is None:
        return _plain_squares(flat, scale)
    found: dict[int, tuple[int, int, int]] = {}

    def run(start: int, lane: int) -> None:
        found[start] = native.fixed_squares(flat[start : start + PIECE], scale)

    lanes.run(run, range(0, flat.numel(), PIECE))
    a, b, c = (sum(part[i] for part in found.values()) for i in range(3))
    return a, b, c


def _plain_squares(x: torch.Tensor, scale: float) -> tuple[int, int, int]:
    left = (x.to(torch.float64) * scale).square()
    sums = []
    for places in SQUARE_PLACES:
        units = torch.round(left * 2.0**places)
        left = left - units * 2.0**-places
        sums.append(int(units.to(torch.int64).sum()))  # SYNC: for the vote
    return sums[0], sums[1], sums[2]


def root_of_squares(sums: tuple[int, int, int], *, scale: float = 1.0) -> float:
    """The norm that `fixed_squares` of all parts add up to."""
    last = SQUARE_PLACES[-1]
    whole = sum(n << (last - places) for n, places in zip(sums, SQUARE_PLACES, strict=True))
    return math.sqrt(whole / 2**last) / scale  # division of integers rounds once


class FixedSum:
    """One weight's running sum, slot by slot; `total` is int64 of the weight's shape."""

    def __init__(self, total: torch.Tensor) -> None:
        self.total = total
        self.bits = 0
        self.tops: dict[int, float] = {}

    def begin(self, bits: int) -> None:
        """Start a sum of `bits` binary places; whoever owns `total` has set it to zero."""
        self.bits = bits
        self.tops = {}

    def add(self, x: torch.Tensor, *, lanes: Lanes = SERIAL, impl: Impl = "fast") -> None:
        """Add a gradient of the whole weight."""
        self._note(0, fixed_add_(self.total, x, bits=self.bits, lanes=lanes, impl=impl))

    def add_slot(self, slot: int, x: torch.Tensor, *, lanes: Lanes = SERIAL, impl: Impl = "fast") -> None:
        """Add a gradient of `weight[slot]`. Lanes may call this at once, each for slots of its own."""
        self._note(slot, fixed_add_(self.total[slot], x, bits=self.bits, lanes=lanes, impl=impl))

    def _note(self, index: int, top: float) -> None:
        self.tops[index] = max(self.tops.get(index, 0.0), top)

    @property
    def top(self) -> float:
        """Largest magnitude since `begin`; inf where something was not finite."""
        return max(self.tops.values(), default=0.0)


class FixedSums:
    """The running sums of a rank's weights, found by the weight. Made before the model, filled by who owns the buffers."""

    def __init__(self, *, chunk_rows: int) -> None:
        self.chunk_rows = chunk_rows
        self._of: dict[int, FixedSum] = {}

    def take(self, sums: Iterable[tuple[torch.Tensor, FixedSum]]) -> None:
        """Makes `of` find these from now on. Weights are told apart by identity."""
        self._of = {id(weight): each for weight, each in sums}

    def of(self, weight: torch.Tensor) -> FixedSum | None:
        """Where the gradient of `weight` goes; None in a model that is not trained."""
        return self._of.get(id(weight))
