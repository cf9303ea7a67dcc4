"""The expert feed-forward network over rows sorted by slot: one SwiGLU MLP per slot, each over its own rows.

Must never change: the row weight multiplies the activation *before* the second projection (in exact arithmetic; the fast path scales that
projection's rows, which is the same), so that expert outputs need not be kept for the backward pass. Legal because the projection has
no bias (arXiv 2504.14960).

Four implementations: `reference` (autograd over plain operations); on a CPU, slots as pieces of work for the lanes; elsewhere
`F.grouped_mm` where it can (bf16, rows of a multiple of 16 bytes), the reference where it cannot.

What makes the CPU path fast (figures in docs/performance.md): row counts are rounded up to one of eight sizes an octave, because oneDNN
generates code for every new shape of a bf16 product (4 to 10 ms, ten times the product itself) and routing makes new counts at every
step; buffers have rows that are no power of two bytes apart; the backward pass of a slot runs start to end in one thread, in scratch
memory that is used again for the next slot.

Legend: M rows, H hidden, e local slots, f local expert width, P rows of the padded buffers, m rows of a piece (padded).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from phalanx.kernels.choice import Impl
from phalanx.kernels.lanes import SERIAL, Lanes
from phalanx.kernels.shapes import padded_rows, spaced
from phalanx.kernels.swiglu import reference_swiglu, swiglu

MAX_PIECE = 1024
"""Rows of one piece of work: more neither helps a product nor fits a cache, and one overfull expert must not occupy one lane alone."""
DOT_ROWS = 16
"""Row products are taken as the diagonals of small square products, which accumulate in fp32 without a temporary."""


def expert_ffn(
    x_MH: torch.Tensor,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    counts: Sequence[int],
    *,
    row_weights_M: torch.Tensor | None = None,
    recompute: bool = False,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> torch.Tensor:
    """`w2 (row_weight * silu(w_gate x) * (w_up x))`, (M, H), in the type of `x_MH`.

    `counts` (host integers, one per slot, sum M) says how many consecutive rows belong to each slot; zeros are fine.
    `row_weights_M` may be of a wider type than `x_MH`; its gradient comes back in that type. With `recompute` the backward pass
    computes the first projection again instead of keeping it (CPU path and reference path alike).
    """
    if impl == "reference":
        return _reference(x_MH, w13_e2fH, w2_eHf, counts, row_weights_M)
    if x_MH.device.type == "cpu":
        out: torch.Tensor = _CpuExpertFfn.apply(x_MH, w13_e2fH, w2_eHf, row_weights_M, tuple(counts), recompute, lanes)
        return out
    if x_MH.dtype == torch.bfloat16 and w13_e2fH.shape[-1] % 8 == 0 and w2_eHf.shape[-1] % 8 == 0:
        return _grouped_mm(x_MH, w13_e2fH, w2_eHf, counts, row_weights_M)
    return _reference(x_MH, w13_e2fH, w2_eHf, counts, row_weights_M)


def _reference(
    x_MH: torch.Tensor,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    counts: Sequence[int],
    row_weights_M: torch.Tensor | None,
) -> torch.Tensor:
    rows = torch.split(x_MH, list(counts))
    weights = [None] * len(counts) if row_weights_M is None else torch.split(row_weights_M, list(counts))
    out = [
        reference_swiglu(torch.einsum("mh,gfh->mgf", x, w13), weight) @ w2.T
        for x, w13, w2, weight in zip(rows, w13_e2fH, w2_eHf, weights, strict=True)
    ]
    return torch.cat(out)


def _grouped_mm(
    x_MH: torch.Tensor,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    counts: Sequence[int],
    row_weights_M: torch.Tensor | None,
) -> torch.Tensor:
    offsets = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32).to(x_MH.device, non_blocking=True)
    gate_up_M2f = F.grouped_mm(x_MH.contiguous(), w13_e2fH.flatten(1, 2).transpose(1, 2), offs=offsets)
    h_Mf = swiglu(gate_up_M2f.view(len(x_MH), 2, -1), row_weights_M=row_weights_M)
    y_MH = F.grouped_mm(h_Mf, w2_eHf.transpose(1, 2), offs=offsets)
    out: torch.Tensor = _Contiguous.apply(y_MH)
    return out


class _Contiguous(torch.autograd.Function):
    """Hands a contiguous gradient on: grouped_mm's backward refuses an expanded one (that of `sum`)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.contiguous()


# ---- CPU ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Rows `[start, stop)` of one slot; in the padded buffers they begin at `at` and are `size` long."""

    slot: int
    start: int
    stop: int
    at: int
    size: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.start

    @property
    def padded(self) -> slice:
        return slice(self.at, self.at + self.size)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)


def _pieces(counts: Sequence[int], dtype: torch.dtype) -> list[_Piece]:
    """Slots cut into pieces of at most MAX_PIECE rows, by the counts alone: no result depends on the number of lanes."""
    out: list[_Piece] = []
    start = at = 0
    for slot, count in enumerate(counts):
        num = -(-count // MAX_PIECE)
        for i in range(num):
            first, last = start + count * i // num, start + count * (i + 1) // num
            size = padded_rows(last - first, dtype)
            out.append(_Piece(slot, first, last, at, size))
            at += size
        start += count
    return out


class _Scratch:
    """What one lane needs for one piece; allocated by the caller's thread, used again for every piece."""

    def __init__(self, like: torch.Tensor, rows: int, hidden: int, width: int, *, backward: bool, keep: bool) -> None:
        self.x_mH = spaced(rows, hidden, like)
        self.h_mf = like.new_empty(rows, width)
        self.y_mH = spaced(rows, hidden, like)
        self.dy_mH = spaced(rows, hidden, like) if backward else None
        self.dh_mf = like.new_empty(rows, width) if backward else None
        self.t_mf = spaced(rows, width, like) if backward else None
        self.d_gate_up_m2f = spaced(rows, 2 * width, like) if backward else None
        self.gate_up_m2f = None if keep else spaced(rows, 2 * width, like)
        self.silu_mf = None if keep else spaced(rows, width, like)


class _CpuExpertFfn(torch.autograd.Function):
    """Keeps the rows, both projections' input side (`gate_up`, silu(gate)) unless `recompute`, and the weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MH: torch.Tensor,
        w13_e2fH: torch.Tensor,
        w2_eHf: torch.Tensor,
        row_weights_M: torch.Tensor | None,
        counts: tuple[int, ...],
        recompute: bool,
        lanes: Lanes,
    ) -> torch.Tensor:
        work = _Work(x_MH, w13_e2fH, w2_eHf, row_weights_M, counts)
        ctx.kept = keep = not recompute and any(ctx.needs_input_grad)
        gate_up_P2f, silu_Pf = work.kept_buffers() if keep else (None, None)
        y_MH = torch.empty_like(x_MH, memory_format=torch.contiguous_format)
        scratch = work.scratch(lanes, backward=False, keep=keep)
        lanes.run(lambda p, i: work.forward(p, scratch[i], gate_up_P2f, silu_Pf, y_MH), work.largest_first)
        ctx.save_for_backward(x_MH, w13_e2fH, w2_eHf, row_weights_M, gate_up_P2f, silu_Pf)
        ctx.counts, ctx.lanes = counts, lanes
        return y_MH

    @staticmethod
    def backward(ctx: Any, dy_MH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MH, w13_e2fH, w2_eHf, row_weights_M, gate_up_P2f, silu_Pf = ctx.saved_tensors
        work = _Work(x_MH, w13_e2fH, w2_eHf, row_weights_M, ctx.counts)
        grads = _Grads(work, weights=ctx.needs_input_grad[1], row_weights=ctx.needs_input_grad[3])
        scratch = work.scratch(ctx.lanes, backward=True, keep=ctx.kept)
        ctx.lanes.run(lambda p, i: work.backward(p, scratch[i], gate_up_P2f, silu_Pf, dy_MH, grads), work.largest_first)
        grads.finish(ctx.lanes)
        return grads.x_MH, grads.w13, grads.w2_eHf, grads.row_weights_M, None, None, None


class _Work:
    """One call: the operands, and what is done with a piece of them."""

    def __init__(
        self,
        x_MH: torch.Tensor,
        w13_e2fH: torch.Tensor,
        w2_eHf: torch.Tensor,
        row_weights_M: torch.Tensor | None,
        counts: tuple[int, ...],
    ) -> None:
        self.x_MH, self.w2_eHf = x_MH, w2_eHf
        self.w13_shape = w13_e2fH.shape
        self.w13_eFH = w13_e2fH.flatten(1, 2)
        self.width = w2_eHf.shape[-1]
        self.pieces = _pieces(counts, x_MH.dtype)
        self.largest_first = sorted(self.pieces, key=lambda p: -p.size)
        self.row_weights_M = row_weights_M
        self.scale_M1 = None if row_weights_M is None else row_weights_M.to(x_MH.dtype).unsqueeze(-1)

    def kept_buffers(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = sum(p.size for p in self.pieces)
        return spaced(rows, 2 * self.width, self.x_MH), spaced(rows, self.width, self.x_MH)

    def scratch(self, lanes: Lanes, *, backward: bool, keep: bool) -> list[_Scratch]:
        rows = max((p.size for p in self.pieces), default=0)
        hidden = self.x_MH.shape[1]
        count = min(lanes.count, len(self.pieces))
        return [_Scratch(self.x_MH, rows, hidden, self.width, backward=backward, keep=keep) for _ in range(count)]

    def _first_half(
        self, p: _Piece, s: _Scratch, gate_up_P2f: torch.Tensor | None, silu_Pf: torch.Tensor | None, *, fresh: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Padded rows of the piece, gate_up and silu(gate): computed (`fresh`) into the kept buffers or scratch, or found there."""
        x_mH = _fill(s.x_mH, self.x_MH, p)
        if gate_up_P2f is None or silu_Pf is None:
            assert s.gate_up_m2f is not None and s.silu_mf is not None  # `keep` decides both
            gate_up_m2f, silu_mf, fresh = s.gate_up_m2f[: p.size], s.silu_mf[: p.size], True
        else:
            gate_up_m2f, silu_mf = gate_up_P2f[p.padded], silu_Pf[p.padded]
        if fresh:
            torch.mm(x_mH, self.w13_eFH[p.slot].T, out=gate_up_m2f)
            torch.ops.aten.silu.out(gate_up_m2f[:, : self.width], out=silu_mf)
        return x_mH, gate_up_m2f, silu_mf

    def forward(
        self,
        p: _Piece,
        s: _Scratch,
        gate_up_P2f: torch.Tensor | None,
        silu_Pf: torch.Tensor | None,
        y_MH: torch.Tensor,
    ) -> None:
        _, gate_up_m2f, silu_mf = self._first_half(p, s, gate_up_P2f, silu_Pf, fresh=True)
        h_mf = torch.mul(silu_mf, gate_up_m2f[:, self.width :], out=s.h_mf[: p.size])
        y_mH = torch.mm(h_mf, self.w2_eHf[p.slot].T, out=s.y_mH[: p.size])[: p.num_rows]
        if self.scale_M1 is None:
            y_MH[p.rows].copy_(y_mH)
        else:
            torch.mul(y_mH, self.scale_M1[p.rows], out=y_MH[p.rows])

    def backward(
        self,
        p: _Piece,
        s: _Scratch,
        gate_up_P2f: torch.Tensor | None,
        silu_Pf: torch.Tensor | None,
        dy_MH: torch.Tensor,
        grads: _Grads,
    ) -> None:
        assert s.dy_mH is not None and s.dh_mf is not None and s.t_mf is not None and s.d_gate_up_m2f is not None
        m, f = p.size, self.width
        x_mH, gate_up_m2f, silu_mf = self._first_half(p, s, gate_up_P2f, silu_Pf, fresh=False)
        gate_mf, up_mf = gate_up_m2f[:, :f], gate_up_m2f[:, f:]
        dy_mH = _fill(s.dy_mH, dy_MH, p)
        h_mf = torch.mul(silu_mf, up_mf, out=s.h_mf[:m])
        dh_mf = torch.mm(dy_mH, self.w2_eHf[p.slot], out=s.dh_mf[:m])
        if self.scale_M1 is not None:
            if grads.row_weights_M is not None:
                grads.row_weights_M[p.rows].copy_(_row_dots(dh_mf, h_mf)[: p.num_rows])
            dh_mf[: p.num_rows].mul_(self.scale_M1[p.rows])
            dy_mH[: p.num_rows].mul_(self.scale_M1[p.rows])
        d_gate_up_m2f = s.d_gate_up_m2f[:m]
        torch.mul(dh_mf, silu_mf, out=d_gate_up_m2f[:, f:])
        t_mf = torch.mul(dh_mf, up_mf, out=s.t_mf[:m])
        torch.ops.aten.silu_backward.grad_input(t_mf, gate_mf, grad_input=d_gate_up_m2f[:, :f])
        if grads.weights:
            torch.mm(dy_mH.T, h_mf, out=grads.w2_of(p))
            torch.mm(d_gate_up_m2f.T, x_mH, out=grads.w13_of(p))
        dx_mH = torch.mm(d_gate_up_m2f, self.w13_eFH[p.slot], out=s.y_mH[:m])
        grads.x_MH[p.rows].copy_(dx_mH[: p.num_rows])


class _Grads:
    """Where gradients go. A slot of several pieces gets one partial weight gradient each, added up in their order at the end."""

    def __init__(self, work: _Work, *, weights: bool, row_weights: bool) -> None:
        like = work.x_MH
        self.x_MH = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.weights = weights
        weight = work.row_weights_M
        self.row_weights_M = torch.empty_like(weight) if row_weights and weight is not None else None
        self._w13_eFH = torch.empty(work.w13_eFH.shape, dtype=like.dtype) if weights else None
        self.w2_eHf = torch.empty(work.w2_eHf.shape, dtype=like.dtype) if weights else None
        self.w13 = None if self._w13_eFH is None else self._w13_eFH.view(work.w13_shape)
        self._partial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_slot: dict[int, list[_Piece]] = {}
        for p in work.pieces:
            self._of_slot.setdefault(p.slot, []).append(p)
        self._slots = range(work.w2_eHf.shape[0])
        if self._w13_eFH is not None and self.w2_eHf is not None:
            for pieces in self._of_slot.values():
                for p in pieces[1:]:
                    self._partial[p.start] = (
                        torch.empty_like(self._w13_eFH[p.slot]),
                        torch.empty_like(self.w2_eHf[p.slot]),
                    )

    def w13_of(self, p: _Piece) -> torch.Tensor:
        assert self._w13_eFH is not None
        return self._partial[p.start][0] if p.start in self._partial else self._w13_eFH[p.slot]

    def w2_of(self, p: _Piece) -> torch.Tensor:
        assert self.w2_eHf is not None
        return self._partial[p.start][1] if p.start in self._partial else self.w2_eHf[p.slot]

    def finish(self, lanes: Lanes) -> None:
        """Zero the slots without rows, add up the partial gradients of the others."""
        if self.weights:
            lanes.run(lambda slot, _: self._finish_slot(slot), self._slots)

    def _finish_slot(self, slot: int) -> None:
        assert self._w13_eFH is not None and self.w2_eHf is not None
        pieces = self._of_slot.get(slot, [])
        for i, whole in enumerate((self._w13_eFH[slot], self.w2_eHf[slot])):
            if not pieces:
                whole.zero_()
            elif len(pieces) > 1:
                total = whole.to(torch.promote_types(whole.dtype, torch.float32))
                for p in pieces[1:]:
                    total = total + self._partial[p.start][i]
                whole.copy_(total)


def _fill(target: torch.Tensor, source_MH: torch.Tensor, p: _Piece) -> torch.Tensor:
    """The piece's rows at the top of `target`, zeros below, so that padding adds nothing to any product."""
    target[: p.num_rows].copy_(source_MH[p.rows])
    target[p.num_rows : p.size].zero_()
    return target[: p.size]


def _row_dots(a_mf: torch.Tensor, b_mf: torch.Tensor) -> torch.Tensor:
    """(m,) dot products of equal rows."""
    if a_mf.dtype != torch.bfloat16 or a_mf.shape[0] % DOT_ROWS:
        return (a_mf * b_mf).sum(-1)
    a, b = (x.view(-1, DOT_ROWS, x.shape[-1]) for x in (a_mf, b_mf))
    return torch.bmm(a, b.transpose(1, 2)).diagonal(dim1=1, dim2=2).reshape(-1)
