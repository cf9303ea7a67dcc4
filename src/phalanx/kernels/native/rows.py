"""Compiled elementwise kernels (`rows.cpp`) as functions of tensors; each does in one pass what its caller would do in several.

`compiled_rows()` is what lanes may carry (`Lanes(rows=...)`); a kernel whose lanes have none uses torch operations. Calls run without the
interpreter lock. The functions check nothing: tensors are of one type (bf16, fp32, fp64), in the host's memory, their last dim dense, and
what is said to be contiguous is; callers ask first (`can_take`, `has_adamw`, `can_take_labels`), for a wrong guess overwrites memory. `wide` is
fp32, for fp64 fp64.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from phalanx.kernels.native.build import library

NAMES = {torch.bfloat16: "bf16", torch.float32: "float", torch.float64: "double"}
_P, _N, _D, _I = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int
SIGNATURES = {
    "swiglu_forward": (_P, _N, _P, _N, _N, _N, _P),
    "swiglu_backward": (_P, _N, _P, _N, _P, _N, _P, _N, _P, _N, _N, _P),
    "scale_rows": (_P, _N, _P, _N, _P, _N, _N, _N, _P),
    "norm_forward": (_P, _P, _P, _P, _D, _P, _P, _N, _N),
    "norm_backward": (_P, _P, _P, _P, _P, _P, _P, _N, _N),
    "rope": (_P, _P, _P, _D, _P, _N, _N, _N),
    "square_sum": (_P, _N),
    "cross_entropy": (_P, _N, _P, _P, _P, _N, _N, _N, _P),
    "sum_rows": (_P, _P, _N, _P, _P, _N, _N, _N),
    "fixed_add": (_P, _P, _N, _D),
    "fixed_read": (_P, _P, _N, _D),
    "fixed_squares": (_P, _N, _D, _P),
    "collect": (_P, _P, _N, _I),
    "word_sum": (_P, _N, _N),
    "look": (_P, _N, _N, _N, _P),
    "beside": (_P, _N, _N, _N, _D),
    "product_sums": (_P, _N, _I, _P, _N, _I, _N, _N, _N, _P, _P, _P),
    "deviation": (_P, _N, _N, _N, _P, _P, _D, _D, _D, _P),
}
Seen = ctypes.Array[ctypes.c_double]
"""What a look at a matrix finds: its largest magnitude, and the mean square of every eighth row."""
ADD_PARTS = (_P, _N, _N, _N, _P, _P, _P)
ADAMW = (_P, _P, _P, _P, _P, _N, *(_D,) * 8, _P)
ADAMW_TYPES = (("bf16", "bf16"), ("float", "bf16"), ("float", "float"), ("double", "double"))


@functools.cache
def compiled_rows() -> CompiledRows | None:
    """The compiled kernels, or None where they cannot be had."""
    found = library()
    return None if found is None else CompiledRows(found)


class CompiledRows:
    """The functions of one compiled library."""

    TYPES = frozenset(NAMES)

    def __init__(self, compiled: ctypes.CDLL) -> None:
        self.name = Path(compiled._name).name
        """Says from what and for which processor it was compiled: the same name, the same results."""
        self._of: dict[tuple[str, torch.dtype], Any] = {}
        for dtype, name in NAMES.items():
            for function, kinds in SIGNATURES.items():
                self._of[function, dtype] = _declared(compiled, f"{function}_{name}", kinds)
        self._adamw = {types: _declared(compiled, "adamw_{}_{}".format(*types), ADAMW) for types in ADAMW_TYPES}
        self._add_parts = {
            dtype: _declared(compiled, f"add_parts_{NAMES[dtype]}", ADD_PARTS)
            for dtype in (torch.float32, torch.float64)
        }
        for dtype in NAMES:
            self._of["square_sum", dtype].restype = _D
            self._of["fixed_add", dtype].restype = _D
            self._of["collect", dtype].restype = ctypes.c_uint32
            self._of["word_sum", dtype].restype = ctypes.c_uint32
            self._of["deviation", dtype].restype = _D
            self._of["beside", dtype].restype = _D

    @staticmethod
    def can_take(*tensors: torch.Tensor | None) -> bool:
        """Whether these are of one type that there are functions for (fp16 is none), in the host's memory."""
        given = [t for t in tensors if t is not None]
        kinds = {(t.dtype, t.device.type) for t in given}
        return len(kinds) == 1 and given[0].dtype in NAMES and given[0].device.type == "cpu"

    @staticmethod
    def can_take_labels(labels: torch.Tensor) -> bool:
        """Whether labels are int64 and dense. None may be above the vocabulary: a row is written at the place that its label says."""
        return labels.dtype == torch.int64 and labels.is_contiguous() and labels.device.type == "cpu"

    def swiglu_forward(self, gate_up_mF: torch.Tensor, h_mf: torch.Tensor, *, seen: Seen | None = None) -> None:
        """`h = silu(gate) * up`; the first half of `gate_up` is the gate. `seen`: gets a look at `gate_up`."""
        call = self._of["swiglu_forward", h_mf.dtype]
        call(gate_up_mF.data_ptr(), gate_up_mF.stride(0), h_mf.data_ptr(), h_mf.stride(0), *h_mf.shape, seen)

    def swiglu_backward(
        self,
        gate_up_mF: torch.Tensor,
        dh_mf: torch.Tensor,
        h_mf: torch.Tensor,
        d_gate_up_mF: torch.Tensor,
        dots_m: torch.Tensor | None,
        *,
        seen: Seen | None = None,
    ) -> None:
        """`h` again, the gradient of gate and up, and the wide product of each row of `dh` with its row of `h`. `seen`: gets a look at `dh`."""
        each = (x for t in (gate_up_mF, dh_mf, h_mf, d_gate_up_mF) for x in (t.data_ptr(), t.stride(0)))
        self._of["swiglu_backward", h_mf.dtype](*each, _pointer(dots_m), *h_mf.shape, seen)

    def scale_rows(
        self, x_rN: torch.Tensor, by_r1: torch.Tensor | None, out_rN: torch.Tensor, *, seen: Seen | None = None
    ) -> None:
        """`out = by * x` (`x` where `by` is None), rows dense. `seen`: gets a look at `x`."""
        by = (_pointer(by_r1), 0 if by_r1 is None else by_r1.stride(0))
        call = self._of["scale_rows", x_rN.dtype]
        call(x_rN.data_ptr(), x_rN.stride(0), *by, out_rN.data_ptr(), out_rN.stride(0), *out_rN.shape, seen)

    def norm_forward(
        self,
        x_rH: torch.Tensor,
        delta_rH: torch.Tensor | None,
        stream_rH: torch.Tensor,
        weight_H: torch.Tensor,
        eps: float,
        scale_r1: torch.Tensor,
        out_rH: torch.Tensor,
    ) -> None:
        """`stream = x + delta` (left alone where delta is None) and its norm; all contiguous, `weight` and `scale` wide."""
        pointers = [_pointer(t) for t in (x_rH, delta_rH, stream_rH, weight_H)]
        rest = (scale_r1.data_ptr(), out_rH.data_ptr(), *x_rH.shape)
        self._of["norm_forward", x_rH.dtype](*pointers, eps, *rest)

    def norm_backward(
        self,
        x_rH: torch.Tensor,
        scale_r1: torch.Tensor,
        weight_H: torch.Tensor,
        dy_rH: torch.Tensor,
        d_stream_rH: torch.Tensor | None,
        dx_rH: torch.Tensor,
        dw_H: torch.Tensor,
    ) -> None:
        """The stream's gradient; adds to the wide `dw`. All contiguous."""
        tensors = (x_rH, scale_r1, weight_H, dy_rH, d_stream_rH, dx_rH, dw_H)
        self._of["norm_backward", x_rH.dtype](*(_pointer(t) for t in tensors), *x_rH.shape)

    def rope(
        self, x_rAD: torch.Tensor, cos_rN: torch.Tensor, sin_rN: torch.Tensor, sign: float, out_rAD: torch.Tensor
    ) -> None:
        """Heads turned by their tokens' angles (wide); all contiguous."""
        rows, heads, dim = x_rAD.shape
        angles = cos_rN.data_ptr(), sin_rN.data_ptr()
        self._of["rope", x_rAD.dtype](x_rAD.data_ptr(), *angles, sign, out_rAD.data_ptr(), rows, heads, dim // 2)

    def square_sum(self, x_N: torch.Tensor) -> float:
        """Sum of the squares of a contiguous tensor."""
        return float(self._of["square_sum", x_N.dtype](x_N.data_ptr(), x_N.numel()))

    def cross_entropy(
        self,
        logits_cV: torch.Tensor,
        labels_c: torch.Tensor,
        losses_c: torch.Tensor,
        *,
        gradient: bool,
        seen: Seen | None = None,
    ) -> None:
        """Wide `losses`, 0 where the int64 label is negative; with `gradient` the logits become their gradient. `seen`: gets a look at the logits before."""
        rows, width = logits_cV.shape
        scratch_V = losses_c.new_empty(width)
        others = labels_c.data_ptr(), losses_c.data_ptr(), scratch_V.data_ptr()
        call = self._of["cross_entropy", logits_cV.dtype]
        call(logits_cV.data_ptr(), logits_cV.stride(0), *others, rows, width, int(gradient), seen)

    def sum_rows(self, y_MH: torch.Tensor, places_Kt: torch.Tensor, out_tH: torch.Tensor) -> None:
        """`out[t] = sum over k of y[places[k, t]]`, in the wide type, nothing for a place of -1; `y` and `out` contiguous."""
        copies, tokens = places_Kt.shape
        scratch_H = out_tH.new_empty(out_tH.shape[1], dtype=torch.promote_types(out_tH.dtype, torch.float32))
        where = places_Kt.data_ptr(), places_Kt.stride(0)
        call = self._of["sum_rows", y_MH.dtype]
        call(y_MH.data_ptr(), *where, out_tH.data_ptr(), scratch_H.data_ptr(), copies, tokens, out_tH.shape[1])

    def fixed_add(self, x_N: torch.Tensor, total_N: torch.Tensor, scale: float) -> float:
        """`total += round(scale * x)`, int64, both contiguous; the largest magnitude of `x`, inf where one is not finite."""
        return float(self._of["fixed_add", x_N.dtype](x_N.data_ptr(), total_N.data_ptr(), x_N.numel(), scale))

    def fixed_read(self, total_N: torch.Tensor, out_N: torch.Tensor, unit: float) -> None:
        """`out = total * unit`, both contiguous."""
        self._of["fixed_read", out_N.dtype](total_N.data_ptr(), out_N.data_ptr(), total_N.numel(), unit)

    def fixed_squares(self, x_N: torch.Tensor, scale: float) -> tuple[int, int, int]:
        """Squares of contiguous `scale * x` in units of 2^-20, 2^-52 and 2^-84 (`kernels/cpu/fixed_point.py`)."""
        sums = (_N * 3)()
        self._of["fixed_squares", x_N.dtype](x_N.data_ptr(), x_N.numel(), scale, ctypes.addressof(sums))
        return sums[0], sums[1], sums[2]

    def adamw(
        self,
        state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        grad: torch.Tensor,
        out: torch.Tensor | None,
        *,
        numbers: tuple[float, ...],
        sums: torch.Tensor | None = None,
    ) -> None:
        """One step on contiguous (master, first moment, second moment). `numbers`: scale, lr, beta1, beta2, eps, weight decay,
        1 - beta1^t, 1 - beta2^t. `sums` (7,) int32: the word sums of the three before and after, and of `out`, are added to it."""
        call = self._adamw[self.types_of(state[0], grad, out)]
        master, average, square = (t.data_ptr() for t in state)
        call(master, grad.data_ptr(), average, square, _pointer(out), grad.numel(), *numbers, _pointer(sums))

    def word_sum(self, x_N: torch.Tensor, phase: int = 0) -> int:
        """Sum of the 32-bit words of a contiguous tensor that begins in byte `phase` of one, modulo 2^32."""
        return int(self._of["word_sum", x_N.dtype](x_N.data_ptr(), x_N.numel(), phase))

    def collect(self, x_N: torch.Tensor, total_N: torch.Tensor, *, add: bool) -> int:
        """`total = x`, or with `add` `total += x`, both contiguous, `total` wide; its word sum afterwards."""
        call = self._of["collect", x_N.dtype]
        return int(call(x_N.data_ptr(), total_N.data_ptr(), total_N.numel(), int(add)))

    def look(self, x_rN: torch.Tensor) -> Seen:
        """The largest magnitude (not finite where an element is not), and the mean square of every eighth row. Rows are dense."""
        seen, (rows, width) = not_seen(), x_rN.shape
        self._of["look", x_rN.dtype](x_rN.data_ptr(), x_rN.stride(0), rows, width, seen)
        return seen

    def beside(self, x_rN: torch.Tensor, seen: Seen) -> float:
        """The mean square of what stands in one row with the largest element, which a look has found. Rows are dense."""
        return float(self._of["beside", x_rN.dtype](x_rN.data_ptr(), x_rN.stride(0), *x_rN.shape, seen[0]))

    def deviation(
        self,
        c_mn: torch.Tensor,
        factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
        *,
        tolerance: tuple[float, float, float],
    ) -> float:
        """Distance of the column sums of `c` from those of the sum of products over what `tolerance` (of `|c|`, of `|a| |b|`, of anything) allows; factors may be transposed views."""
        (m, n), most = c_mn.shape, max(a.shape[1] for a, _ in factors)
        numbers = torch.zeros(4 * n + 2 * most, dtype=torch.promote_types(c_mn.dtype, torch.float32))
        want, bound, scratch = (numbers[at:].data_ptr() for at in (0, n, 2 * n))
        for a_mk, b_kn in factors:
            pairs = [
                (t.data_ptr(), *((t.stride(0), 0) if t.stride(1) == 1 else (t.stride(1), 1))) for t in (a_mk, b_kn)
            ]
            self._of["product_sums", c_mn.dtype](*pairs[0], *pairs[1], *a_mk.shape, n, want, bound, scratch)
        call = self._of["deviation", c_mn.dtype]
        return float(call(c_mn.data_ptr(), c_mn.stride(0), m, n, want, bound, *tolerance, scratch))

    def has_add_parts(self, x: torch.Tensor) -> bool:
        return x.dtype in self._add_parts and x.device.type == "cpu"

    def add_parts(self, parts_PN: torch.Tensor, mine: int, own_N: torch.Tensor, out_N: torch.Tensor) -> list[int]:
        """`out`, the sum of contiguous parts in their order, of which number `mine` is `own`; the word sums of the parts, and of `out`."""
        sums_P = torch.empty(len(parts_PN) + 1, dtype=torch.int32)
        pointers = (own_N.data_ptr(), out_N.data_ptr(), sums_P.data_ptr())
        self._add_parts[out_N.dtype](parts_PN.data_ptr(), *parts_PN.shape, mine, *pointers)
        return [n % 2**32 for n in sums_P.tolist()]

    def has_adamw(
        self, state: tuple[torch.Tensor, torch.Tensor, torch.Tensor], grad: torch.Tensor, out: torch.Tensor | None
    ) -> bool:
        """Whether there is a function for these types: the state is of the wide type of the result."""
        master = state[0]
        everything = [*state, grad, *([] if out is None else [out])]
        if not all(t.dtype in NAMES and t.device.type == "cpu" and t.is_contiguous() for t in everything):
            return False
        wide = torch.promote_types((master if out is None else out).dtype, torch.float32)
        return all(t.dtype == wide for t in state) and self.types_of(master, grad, out) in self._adamw

    @staticmethod
    def types_of(master: torch.Tensor, grad: torch.Tensor, out: torch.Tensor | None) -> tuple[str, str]:
        return NAMES[grad.dtype], NAMES.get((master if out is None else out).dtype, "")


def not_seen() -> Seen:
    """Room for a look."""
    return (_D * 2)()


def _declared(compiled: ctypes.CDLL, name: str, kinds: tuple[Any, ...]) -> Any:
    function = getattr(compiled, name)
    function.argtypes, function.restype = kinds, None
    return function


def _pointer(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
