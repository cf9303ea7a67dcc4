"""Checksums of matrix products (ABFT: Huang and Abraham, IEEE Transactions on Computers C-33(6), 1984): is `c` what `a b` has to be?

    sum of the rows of c   =   (sum of the rows of a) b          n numbers, for m k + k n + m n additions beside m k n of the product

Rounding makes the two sides differ by at most `u * sum |c|` (each element of `c` was rounded once, to its type) and by `(m + k) * w * sum |a| |b|` (sums of
fp32, or fp64, in the product and here; Higham, Accuracy and Stability of Numerical Algorithms, section 3.1). Both are bounds and no estimates, so no sound
product exceeds them, on any processor; they are doubled, and the second once more, for units that round differently. A wrong element is found where it is off by more than
about 1.6 % of `m` times a typical element of its column.

An error that changes the step of thousands of tokens stands out of its matrix, and to see that is a reading of `c` alone. So with the compiled kernels those products are
summed of which an element is above `STANDS_OUT` times a typical one and above `BESIDE` times one of its row, or not finite, and one in `EVERY` besides; elsewhere all are.

Decides nothing about what follows (`train/step/check.py`). Must never change: nothing that is computed depends on a check.

Legend: m rows, k inner, n columns of a product; T rows, H inputs, O outputs of a projection.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.kernels.native import CompiledRows, Seen

Factors = tuple[torch.Tensor, torch.Tensor]
"""`a` (m, k) and `b` (k, n)."""
STANDS_OUT = 32.0
"""Times the root of the mean square."""
BESIDE = 6.0
"""Times that of the other elements of its row: some tokens have large gradients, and a row of large elements is none that stands out."""
EVERY = 251
"""Products of which one is summed whatever it looks like: a prime, so that after some steps each has had its turn."""


@dataclass(frozen=True, kw_only=True)
class WrongProduct:
    """A product that is not what its operands make."""

    place: str
    number: int
    """Which check of the step it was, from 1."""
    ratio: float
    """How many times what rounding allows."""

    def __str__(self) -> str:
        return f"{self.place} (check {self.number} of the step) is off by {self.ratio:.3g} times what rounding allows"


class ProductSums:
    """Checks products and collects those that are wrong, until `take`. Any lane may call it."""

    looks_late = True
    """Whether a kernel that reads a product anyway may look at it on the way; else it is looked at before."""

    def __init__(self) -> None:
        self.checked = 0
        """Checks since the beginning."""
        self._begun = 0
        self._found: list[WrongProduct] = []
        self._pending: list[tuple[str, int, torch.Tensor]] = []
        """On a device: ratios that the host has not seen."""

    def take(self) -> list[WrongProduct]:
        """Those found since the last call, in the order of the checks."""
        if self._pending:
            ratios = torch.stack([ratio for *_, ratio in self._pending]).tolist()  # SYNC: of the vote
            for (place, number, _), ratio in zip(self._pending, ratios, strict=True):
                self._told(place, number, ratio)
            self._pending.clear()
        found, self._found = self._found, []
        self._begun = self.checked
        return sorted(found, key=lambda wrong: wrong.number)

    def check(
        self,
        place: str,
        c_mn: torch.Tensor,
        *factors: Factors,
        rows: CompiledRows | None = None,
        seen: Seen | None = None,
    ) -> None:
        """Compare `c` with the sum of the products of `factors`, which was rounded after each. `rows`: the compiled kernels of the lane, if it has any; `seen`: what a
        look at `c` found, where somebody has looked."""
        self.checked += 1
        number, rows = self.checked - self._begun, rows if can_look(c_mn) else None
        if rows is not None and self.checked % EVERY and not stands_alone(c_mn, seen or rows.look(c_mn), rows):
            return
        if 0 in c_mn.shape or any(0 in a.shape for a, _ in factors):
            return
        if rows is not None and all(x.dtype == c_mn.dtype and 1 in x.stride() for pair in factors for x in pair):
            self._told(place, number, rows.deviation(c_mn, factors, tolerance=tolerance_of(c_mn, factors)))
        else:
            self._pending.append((place, number, reference_deviation(c_mn, *factors)))

    def check_again(self, place: str, seen: Seen, c_mn: torch.Tensor, factors: Factors, *, rows: CompiledRows) -> None:
        """The same for a product that is no more: `seen` is what a look at it found, `c` has been computed again."""
        again = rows.look(c_mn)
        if tuple(again) != tuple(seen):
            self._told(place, self.checked + 1 - self._begun, math.inf)
        self.check(place, c_mn, factors, rows=rows, seen=again)

    def look(self, place: str, x_mN: torch.Tensor, rows: CompiledRows | None) -> bool:
        """Whether something in the result of `place` stands out far, so that a check of another kind is worth its work."""
        return rows is None or not can_look(x_mN) or stands_out(rows.look(x_mN), 4 * STANDS_OUT)

    def limit(self, place: str, found: torch.Tensor, most: torch.Tensor) -> None:
        """Check that no element of `found` is above that of `most`, which includes what rounding allows."""
        self.checked += 1
        ratio = (found / most).nan_to_num(nan=math.inf).amax() if found.numel() else found.new_zeros(())
        self._pending.append((place, self.checked - self._begun, ratio))

    def _told(self, place: str, number: int, ratio: float) -> None:
        if not ratio <= 1.0:
            self._found.append(WrongProduct(place=place, number=number, ratio=ratio))


def tolerance_of(c_mn: torch.Tensor, factors: Sequence[Factors]) -> tuple[float, float, float]:
    """What rounding may do to a column sum of `c`: as a part of `sum |c|`, as a part of `sum |a| |b|`, and in itself (numbers too small to be normal)."""
    m, k = len(c_mn), max(a.shape[1] for a, _ in factors)
    wide = torch.finfo(torch.promote_types(c_mn.dtype, torch.float32))
    unit, gamma = torch.finfo(c_mn.dtype).eps, 2.0 * (m + k + 8) * wide.eps
    in_parts = c_mn.device.type != "cpu"  # devices may add parts of a sum in the narrow type
    gamma += unit * (len(factors) - 1 + in_parts)
    return unit, gamma, m * (k + 1.0) * len(factors) * wide.tiny


def reference_deviation(c_mn: torch.Tensor, *factors: Factors) -> torch.Tensor:
    """0-d: the largest distance of a column sum over what is allowed; inf where it is NaN. Plain operations, without a host synchronisation."""
    wide = torch.promote_types(c_mn.dtype, torch.float32)
    unit, gamma, tiny = tolerance_of(c_mn, factors)
    c = c_mn.detach().to(wide)
    off_n, allowed_n = c.sum(0), unit * c.abs().sum(0) + tiny
    for a_mk, b_kn in factors:
        a, b = a_mk.detach().to(wide), b_kn.detach().to(wide)
        off_n = off_n - a.sum(0) @ b
        allowed_n = allowed_n + gamma * (a.abs().sum(0) @ b.abs())
    return (off_n.abs() / allowed_n).nan_to_num(nan=math.inf, posinf=math.inf).amax()


def stands_out(seen: Seen | tuple[float, float], many: float = STANDS_OUT) -> bool:
    """Whether an element is above `many` times a typical one, or is not finite."""
    largest, mean_square = seen
    return not largest * largest <= many * many * mean_square


def stands_alone(x_mN: torch.Tensor, seen: Seen, rows: CompiledRows) -> bool:
    """Whether an element stands out of the matrix and of its row, or is not finite."""
    return stands_out(seen) and stands_out((seen[0], rows.beside(x_mN, seen)), BESIDE)


def can_look(x_mN: torch.Tensor) -> bool:
    """Whether the compiled kernels can look at such a matrix."""
    return x_mN.dtype in CompiledRows.TYPES and x_mN.device.type == "cpu" and x_mN.stride(1) == 1


class _CheckedLinear(torch.autograd.Function):
    """`x w^T + bias` whose three products are checked."""

    @staticmethod
    def forward(
        ctx: Any, sums: ProductSums, place: str, x_TH: torch.Tensor, w_OH: torch.Tensor, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        y_TO = x_TH @ w_OH.T
        sums.check(f"{place} forward", y_TO, (x_TH, w_OH.T))
        ctx.save_for_backward(x_TH, w_OH)
        ctx.sums, ctx.place = sums, place
        return y_TO if bias_O is None else y_TO + bias_O

    @staticmethod
    def backward(ctx: Any, dy_TO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TH, w_OH = ctx.saved_tensors
        dx_TH = dw_OH = None
        if ctx.needs_input_grad[2]:
            dx_TH = dy_TO @ w_OH
            ctx.sums.check(f"{ctx.place} input gradient", dx_TH, (dy_TO, w_OH))
        if ctx.needs_input_grad[3]:
            dw_OH = dy_TO.T @ x_TH
            ctx.sums.check(f"{ctx.place} weight gradient", dw_OH, (dy_TO.T, x_TH))
        return None, None, dx_TH, dw_OH, dy_TO.sum(0) if ctx.needs_input_grad[4] else None


def checked_linear(
    sums: ProductSums, x: torch.Tensor, w_OH: torch.Tensor, bias_O: torch.Tensor | None = None, *, place: str = "linear"
) -> torch.Tensor:
    """`F.linear`, checked; any leading dims."""
    out: torch.Tensor = _CheckedLinear.apply(sums, place, x.reshape(-1, x.shape[-1]), w_OH, bias_O)
    return out.view(*x.shape[:-1], w_OH.shape[0])
