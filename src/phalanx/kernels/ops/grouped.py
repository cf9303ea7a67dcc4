"""The expert feed-forward network over rows sorted by slot: one SwiGLU MLP per slot, each over its own rows.

Must never change: the row weight multiplies the activation *before* the second projection (in exact arithmetic; the fast path scales that
projection's rows, which is the same), so that expert outputs need not be kept for the backward pass. Legal because the projection has
no bias (arXiv 2504.14960).

Four implementations: `reference` (autograd over plain operations); on a CPU, slots as pieces of work for the lanes; elsewhere
grouped products (`grouped_mm.py`) where they can be (bf16, rows of a multiple of 16 bytes), the reference where they cannot.

What makes the CPU path fast (figures in docs/explanation/cpu-performance.md): row counts are rounded up to one of eight sizes an octave, because oneDNN
generates code for every new shape of a bf16 product (4 to 10 ms, ten times the product itself) and routing makes new counts at every
step; buffers have rows that are no power of two bytes apart; the backward pass of a slot runs start to end in one thread, in scratch
memory that is used again for the next slot.

Legend: M rows, H hidden, e local slots, f local expert width, P rows of the padded buffers, m rows of a piece (padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.checked_pieces import checked_backward, checked_forward
from phalanx.kernels.cpu.expert_pieces import (
    BLOCK_ROWS,
    BackwardScratch,
    Scratch,
    backward_piece,
    backward_scratch,
    first_projection,
    forward_piece,
    forward_scratch,
    gradient_of_h,
    gradients_of_piece,
    second_projection,
)
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.products import ProductSums, checked_linear
from phalanx.kernels.cpu.scripted import scripted
from phalanx.kernels.cpu.shapes import padded_rows, spaced
from phalanx.kernels.device import WeightSums, sums_of_experts
from phalanx.kernels.native import CompiledRows
from phalanx.kernels.ops.deferred import DeferredGradients, Target, later_linear, target_of
from phalanx.kernels.ops.grouped_mm import can_group, grouped_ffn
from phalanx.kernels.ops.swiglu import reference_swiglu

MAX_PIECE = 2048
"""Rows of one piece of work: more does not help a product, and one overfull expert must not occupy one lane alone."""


def expert_ffn(
    x_MH: torch.Tensor,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    counts: Sequence[int] | None,
    *,
    row_weights_M: torch.Tensor | None = None,
    ends_e: torch.Tensor | None = None,
    recompute: bool = False,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
    later: DeferredGradients | None = None,
    weight_sums: WeightSums | None = None,
) -> torch.Tensor:
    """`w2 (row_weight * silu(w_gate x) * (w_up x))`, (M, H), in the type of `x_MH`.

    `counts` (host integers, one per slot, sum M) says how many consecutive rows belong to each slot; zeros are fine. `ends_e`: their running sums, int32, on a device that has them;
    where `counts` is None the only ones that know, which the host waits for where products are not grouped.
    `row_weights_M` may be of a wider type than `x_MH`; its gradient comes back in that type. With `recompute` the backward pass
    computes the first projection again instead of keeping it (the reference lets autograd keep what it likes). With `later` the gradients of the
    weights are put off; until then `h` and the gradient of the first projection are kept, so that nothing is computed twice. With `weight_sums` those of large experts are added there,
    by their products, where these are grouped otherwise.
    """
    target = target_of([w13_e2fH, w2_eHf], x_MH, later)
    if target is None:
        later = None
    w13, w2 = (w13_e2fH, w2_eHf) if target is None else (w13_e2fH.detach(), w2_eHf.detach())
    on_device = x_MH.device.type != "cpu" or weight_sums is not None
    if impl == "fast" and on_device and can_group(x_MH, w13, w2) and lanes.sums is None:
        into = () if target is not None or counts is None else sums_of_experts(weight_sums, w13, w2)
        return grouped_ffn(
            x_MH, w13, w2, counts,
            row_weights_M=row_weights_M, ends_e=ends_e, recompute=recompute, target=target, into=into,
        )  # fmt: skip
    counts = counts_of(ends_e) if counts is None else counts
    if impl == "fast" and x_MH.device.type == "cpu":
        out: torch.Tensor = _CpuExpertFfn.apply(x_MH, w13, w2, row_weights_M, tuple(counts), recompute, lanes, target)
        return out
    return _reference(x_MH, w13_e2fH, w2_eHf, counts, row_weights_M, later, lanes.sums)


def counts_of(ends_e: torch.Tensor | None) -> list[int]:
    """Rows of each group, by where they end."""
    assert ends_e is not None  # where counts are not given
    return np.diff(ends_e.numpy(force=True), prepend=0).tolist()  # SYNC: products of one slot after the other


def _reference(
    x_MH: torch.Tensor,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    counts: Sequence[int],
    row_weights_M: torch.Tensor | None,
    later: DeferredGradients | None,
    sums: ProductSums | None = None,
) -> torch.Tensor:
    rows = torch.split(x_MH, list(counts))
    weights = [None] * len(counts) if row_weights_M is None else torch.split(row_weights_M, list(counts))
    if later is None and sums is not None:
        slots = zip(rows, w13_e2fH, w2_eHf, weights, strict=True)
        return torch.cat([_checked_slot(x, w13, w2, weight, sums) for x, w13, w2, weight in slots])
    if later is not None:
        return torch.cat(
            [
                _reference_slot_later(x, w13, w2, weight, later)
                for x, w13, w2, weight in zip(rows, w13_e2fH, w2_eHf, weights, strict=True)
            ]
        )
    out = [
        reference_swiglu(torch.einsum("mh,gfh->mgf", x, w13), weight) @ w2.T
        for x, w13, w2, weight in zip(rows, w13_e2fH, w2_eHf, weights, strict=True)
    ]
    return torch.cat(out)


def _checked_slot(
    x_mH: torch.Tensor, w13_2fH: torch.Tensor, w2_Hf: torch.Tensor, weight_m: torch.Tensor | None, sums: ProductSums
) -> torch.Tensor:
    """The same plain operations, each product checked."""
    gate_up_mF = checked_linear(sums, x_mH, w13_2fH.flatten(0, 1), place="experts, first projection,")
    h_mf = reference_swiglu(gate_up_mF.view(len(x_mH), *w13_2fH.shape[:2]), weight_m)
    return checked_linear(sums, h_mf, w2_Hf, place="experts, second projection,")


def _reference_slot_later(
    x_mH: torch.Tensor,
    w13_2fH: torch.Tensor,
    w2_Hf: torch.Tensor,
    weight_m: torch.Tensor | None,
    later: DeferredGradients,
) -> torch.Tensor:
    """The same plain operations, each product with its weight gradient put off."""
    gate_up_m2f = later_linear(x_mH, w13_2fH.flatten(0, 1), None, later).view(len(x_mH), *w13_2fH.shape[:2])
    return later_linear(reference_swiglu(gate_up_m2f, weight_m), w2_Hf, None, later)


# ---- CPU ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotRows:
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


def _pieces(counts: Sequence[int], dtype: torch.dtype, slots: Sequence[int] | None = None) -> list[SlotRows]:
    """Slots cut into pieces of at most MAX_PIECE rows, by the counts alone: no result depends on the number of lanes.

    `slots`: whose rows each count counts (None: one count a slot, in order).
    """
    out: list[SlotRows] = []
    start = at = 0
    for slot, count in zip(range(len(counts)) if slots is None else slots, counts, strict=True):
        num = -(-count // MAX_PIECE)
        for i in range(num):
            first, last = start + count * i // num, start + count * (i + 1) // num
            size = padded_rows(last - first, dtype)
            out.append(SlotRows(slot, first, last, at, size))
            at += size
        start += count
    return out


Scratches = tuple[Scratch, BackwardScratch]


class Grads(Protocol):
    """Where the gradients of a piece go."""

    x_MH: torch.Tensor
    row_weights_M: torch.Tensor | None
    weights: bool

    def w13_of(self, p: SlotRows) -> torch.Tensor: ...

    def w2_of(self, p: SlotRows) -> torch.Tensor: ...


class _CpuExpertFfn(torch.autograd.Function):
    """Keeps the rows, the weights and, unless `recompute`, the first projection's output."""

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
        target: Target | None,
    ) -> torch.Tensor:
        work = GroupedCall(x_MH, w13_e2fH, w2_eHf, row_weights_M, counts)
        if not recompute and any(ctx.needs_input_grad):
            work.keep()
        y_MH = work.forward_all(lanes)
        ctx.save_for_backward(x_MH, w13_e2fH, w2_eHf, row_weights_M, work.gate_up_P2f)
        ctx.counts, ctx.lanes, ctx.target = counts, lanes, target
        return y_MH

    @staticmethod
    def backward(ctx: Any, dy_MH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MH, w13_e2fH, w2_eHf, row_weights_M, gate_up_P2f = ctx.saved_tensors
        lanes, native = ctx.lanes, ctx.lanes.rows_for(x_MH, dy_MH)
        work = GroupedCall(x_MH, w13_e2fH, w2_eHf, row_weights_M, ctx.counts, gate_up_P2f=gate_up_P2f)
        grads = _Grads(work, weights=any(ctx.needs_input_grad[1:3]), row_weights=ctx.needs_input_grad[3])
        scratch = work.scratches(lanes)
        kept = None if ctx.target is None else _Kept(work, dy_MH)
        lanes.run(
            lambda p, lane: work.backward(p, *scratch[lane], dy_MH, grads, kept, native, lanes), work.largest_first
        )
        grads.finish(lanes)
        if kept is not None:
            work.gate_up_P2f = None  # has served
            ctx.target.put(lambda: kept.weight_gradients(lanes))
        return grads.x_MH, grads.w13, grads.w2_eHf, grads.row_weights_M, None, None, None, None


class GroupedCall:
    """One call: the operands, and what is done with a piece of them."""

    def __init__(
        self,
        x_MH: torch.Tensor,
        w13_e2fH: torch.Tensor,
        w2_eHf: torch.Tensor,
        row_weights_M: torch.Tensor | None,
        counts: tuple[int, ...],
        slots: tuple[int, ...] | None = None,
        gate_up_P2f: torch.Tensor | None = None,
    ) -> None:
        self.x_MH, self.w2_eHf, self.gate_up_P2f = x_MH, w2_eHf, gate_up_P2f
        self.w13_shape = w13_e2fH.shape
        self.w13_eFH = w13_e2fH.flatten(1, 2)
        self.width = w2_eHf.shape[-1]
        self.pieces = _pieces(counts, x_MH.dtype, slots)
        self.largest_first = sorted(self.pieces, key=lambda p: -p.size)
        self.row_weights_M = row_weights_M
        self.scale_M1 = None if row_weights_M is None else row_weights_M.to(x_MH.dtype).unsqueeze(-1)

    def forward_all(self, lanes: Lanes) -> torch.Tensor:
        """(M, H) the results of all pieces."""
        y_MH = torch.empty_like(self.x_MH, memory_format=torch.contiguous_format)
        scratch, native = [forward_scratch(*self.scratch_shape) for _ in range(lanes.count)], lanes.rows_for(self.x_MH)
        lanes.run(lambda p, lane: self.forward(p, scratch[lane], y_MH, native, lanes), self.largest_first)
        return y_MH

    def scratches(self, lanes: Lanes) -> list[Scratches]:
        """Room for the backward pass of each lane."""
        shape = self.scratch_shape
        return [(forward_scratch(*shape), backward_scratch(*shape)) for _ in range(lanes.count)]

    def keep(self) -> None:
        """Make room for the first projection of all pieces."""
        self.gate_up_P2f = spaced(sum(p.size for p in self.pieces), 2 * self.width, self.x_MH)

    @property
    def scratch_shape(self) -> tuple[torch.Tensor, int, int]:
        return self.x_MH, max((p.size for p in self.pieces), default=0), self.width

    def _gate_up(self, p: SlotRows, s: Scratch) -> torch.Tensor:
        """Where the piece's first projection goes: into the kept buffer where there is one."""
        return s.gate_up_mF[: p.size] if self.gate_up_P2f is None else self.gate_up_P2f[p.padded]

    def forward(
        self, p: SlotRows, s: Scratch, y_MH: torch.Tensor, native: CompiledRows | None, lanes: Lanes = SERIAL
    ) -> None:
        scale_r1 = None if self.scale_M1 is None else self.scale_M1[p.rows]
        weights = self.w13_eFH[p.slot], self.w2_eHf[p.slot]
        x_rH, y_rH, gate_up_mF = self.x_MH[p.rows], y_MH[p.rows], self._gate_up(p, s)
        if lanes.sums is not None:
            checked_forward((x_rH, *weights, gate_up_mF), scale_r1, y_rH, s, native, lanes)
            return
        if native is None:
            scripted(forward_piece)(x_rH, *weights, scale_r1, gate_up_mF, y_rH, s, BLOCK_ROWS)
            return
        h_mf = s.h_mf[: p.size]
        scripted(first_projection)(x_rH, weights[0], gate_up_mF, s)
        native.swiglu_forward(gate_up_mF, h_mf)
        scripted(second_projection)(h_mf, weights[1], scale_r1, y_rH, s)

    def backward(
        self,
        p: SlotRows,
        s: Scratch,
        t: BackwardScratch,
        dy_MH: torch.Tensor,
        grads: Grads,
        kept: _Kept | None = None,
        native: CompiledRows | None = None,
        lanes: Lanes = SERIAL,
    ) -> None:
        if self.gate_up_P2f is None:
            s.x_mH[: p.num_rows].copy_(self.x_MH[p.rows])
            s.x_mH[p.num_rows : p.size].zero_()
            gate_up_mF = torch.mm(s.x_mH[: p.size], self.w13_eFH[p.slot].T, out=s.gate_up_mF[: p.size])
            lanes.check("experts, first projection, again", gate_up_mF, (s.x_mH[: p.size], self.w13_eFH[p.slot].T))
        operands = [self.x_MH[p.rows], dy_MH[p.rows], self.w13_eFH[p.slot], self.w2_eHf[p.slot], self._gate_up(p, s)]
        scale_r1 = None if self.scale_M1 is None else self.scale_M1[p.rows]
        dx_rH, d_weights = grads.x_MH[p.rows], [grads.w13_of(p), grads.w2_of(p)] if grads.weights else []
        d_scale_r = None if grads.row_weights_M is None else grads.row_weights_M[p.rows]
        if lanes.sums is not None:
            checked_backward(operands, scale_r1, dx_rH, d_scale_r, d_weights, s, t, lanes)
        elif native is None:
            scripted(backward_piece)(operands, scale_r1, dx_rH, d_scale_r, d_weights, s, t, BLOCK_ROWS)
        else:
            h_mf, dh_mf, d_gate_up_mF = s.h_mf[: p.size], t.dh_mf[: p.size], t.d_gate_up_mF[: p.size]
            dots_m = t.dots_m[: p.size]
            scripted(gradient_of_h)(operands, scale_r1, s, t)
            native.swiglu_backward(operands[4], dh_mf, h_mf, d_gate_up_mF, dots_m)
            scripted(gradients_of_piece)(operands, scale_r1, dots_m, dx_rH, d_scale_r, d_weights, s, t)
        if kept is not None:
            kept.h_Pf[p.padded].copy_(s.h_mf[: p.size])
            kept.d_gate_up_P2f[p.padded].copy_(t.d_gate_up_mF[: p.size])


class _Grads:
    """Where gradients go. A slot of several pieces gets one partial weight gradient each, added up in their order at the end."""

    def __init__(self, work: GroupedCall, *, weights: bool, row_weights: bool) -> None:
        like = work.x_MH
        self.x_MH = torch.empty_like(like, memory_format=torch.contiguous_format)
        self.weights = weights
        weight = work.row_weights_M
        self.row_weights_M = torch.empty_like(weight) if row_weights and weight is not None else None
        self._w13_eFH = torch.empty(work.w13_eFH.shape, dtype=like.dtype) if weights else None
        self.w2_eHf = torch.empty(work.w2_eHf.shape, dtype=like.dtype) if weights else None
        self.w13 = None if self._w13_eFH is None else self._w13_eFH.view(work.w13_shape)
        self._partial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._of_slot: dict[int, list[SlotRows]] = {}
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

    def w13_of(self, p: SlotRows) -> torch.Tensor:
        assert self._w13_eFH is not None
        return self._partial[p.start][0] if p.start in self._partial else self._w13_eFH[p.slot]

    def w2_of(self, p: SlotRows) -> torch.Tensor:
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
            for p in pieces[1:]:
                whole.add_(self._partial[p.start][i])


class _Kept:
    """What the products of the weight gradients need, from the backward pass that put them off."""

    def __init__(self, work: GroupedCall, dy_MH: torch.Tensor) -> None:
        rows = sum(p.size for p in work.pieces)
        self.work, self.dy_MH = work, dy_MH
        self.h_Pf = spaced(rows, work.width, work.x_MH)
        self.d_gate_up_P2f = spaced(rows, 2 * work.width, work.x_MH)

    def weight_gradients(self, lanes: Lanes) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of `w13` and `w2`: the very products of a backward pass that does all at once."""
        work = self.work
        grads = _Grads(work, weights=True, row_weights=False)
        scratch = [forward_scratch(*work.scratch_shape) for _ in range(lanes.count)]
        lanes.run(lambda p, lane: self._piece(p, scratch[lane], grads, lanes), work.largest_first)
        grads.finish(lanes)
        assert grads.w13 is not None and grads.w2_eHf is not None  # asked for
        return grads.w13, grads.w2_eHf

    def _piece(self, p: SlotRows, s: Scratch, grads: _Grads, lanes: Lanes) -> None:
        dy_mH = _fill(s.y_mH, self.dy_MH, p)
        if self.work.scale_M1 is not None:
            dy_mH[: p.num_rows].mul_(self.work.scale_M1[p.rows])
        h_mf, d_gate_up_mF, x_mH = self.h_Pf[p.padded], self.d_gate_up_P2f[p.padded], _fill(s.x_mH, self.work.x_MH, p)
        torch.mm(dy_mH.T, h_mf, out=grads.w2_of(p))
        lanes.check("experts, second projection, weight gradient", grads.w2_of(p), (dy_mH.T, h_mf))
        torch.mm(d_gate_up_mF.T, x_mH, out=grads.w13_of(p))
        lanes.check("experts, first projection, weight gradient", grads.w13_of(p), (d_gate_up_mF.T, x_mH))


def _fill(target: torch.Tensor, source_MH: torch.Tensor, p: SlotRows) -> torch.Tensor:
    """The piece's rows at the top of `target`, zeros below, so that padding adds nothing to any product."""
    target[: p.num_rows].copy_(source_MH[p.rows])
    target[p.num_rows : p.size].zero_()
    return target[: p.size]
