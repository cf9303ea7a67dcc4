"""The expert feed-forward network of exact mode: products whose bits do not depend on who computes them, or beside what.

The rows of an expert come from several sources, and which sources meet on a rank follows from the number of ranks. So here a product never has
rows of two sources: each source's rows of an expert, in the source's own order, are cut into *chunks* of `chunk_rows`, and every
product of the forward and the backward pass is over one chunk. What a chunk is (its rows, hence its shape, hence the code path of the matrix
library) follows from the micro-batch alone. Chunks need no padding to a common size for that: only that none of them is cut or
joined by anything but the micro-batch.

The gradient of an expert's weight is a sum over chunks that different ranks compute: each chunk's part is added in fixed point
(`kernels/cpu/fixed_point.py`), and autograd is told of none.

Must never change: a chunk's results depend on its rows, its weights and their gradients alone; all chunks of a slot are added by one lane.

Legend: M rows, H hidden, e local slots, f local expert width, P sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.fixed_point import FixedSum
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.ops.grouped import GroupedCall, SlotRows
from phalanx.kernels.ops.swiglu import reference_swiglu

Into = tuple[FixedSum | None, FixedSum | None]
ALIGNMENT = 64
"""Bytes. A matrix library may take another path for operands that begin elsewhere."""


def chunks_of(counts_eP: Sequence[Sequence[int]], chunk_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the chunks, in order of their rows, and the slot of each. `counts_eP`: rows of each slot by source."""
    sizes, slots = [], []
    for slot, counts_P in enumerate(counts_eP):
        for count in counts_P:
            whole, rest = divmod(count, chunk_rows)
            here = [chunk_rows] * whole + ([rest] if rest else [])
            sizes += here
            slots += [slot] * len(here)
    return tuple(sizes), tuple(slots)


def exact_expert_ffn(
    x_MH: torch.Tensor,
    w13_e2fH: torch.Tensor,
    w2_eHf: torch.Tensor,
    counts_eP: Sequence[Sequence[int]],
    *,
    chunk_rows: int,
    into: Into,
    row_weights_M: torch.Tensor,
    recompute: bool = False,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> torch.Tensor:
    """What `expert_ffn` computes, chunk by chunk. `counts_eP` (host integers, sum M): rows of each slot by source, slots and in them sources in order.

    The backward pass adds the gradients of `w13` and `w2` to `into`; both weights are constants to autograd.
    """
    sizes, slots = chunks_of(counts_eP, chunk_rows)
    if impl == "fast" and x_MH.device.type == "cpu":
        out: torch.Tensor = _CpuChunks.apply(
            x_MH, _aligned(w13_e2fH), _aligned(w2_eHf), row_weights_M, (sizes, slots), into, recompute, lanes
        )
        return out
    plain: torch.Tensor = _PlainChunks.apply(x_MH, w13_e2fH, w2_eHf, row_weights_M, (sizes, slots), into)
    return plain


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """The weight, or a copy of it, such that every slot begins on a cache line, whichever slots lie before it."""
    size, unit = weight[0].numel(), ALIGNMENT // weight.element_size()
    if weight.data_ptr() % ALIGNMENT == 0 and (size % unit == 0 or len(weight) == 1):
        return weight
    room = weight.new_empty(len(weight), -(-size // unit) * unit)
    return room[:, :size].copy_(weight.flatten(1)).view(weight.shape)


class _CpuChunks(torch.autograd.Function):
    """The pieces of work of `kernels/ops/grouped.py`, each a chunk; in the backward pass a lane takes all chunks of a slot."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MH: torch.Tensor,
        w13_e2fH: torch.Tensor,
        w2_eHf: torch.Tensor,
        row_weights_M: torch.Tensor,
        chunks: tuple[tuple[int, ...], tuple[int, ...]],
        into: Into,
        recompute: bool,
        lanes: Lanes,
    ) -> torch.Tensor:
        work = GroupedCall(x_MH, w13_e2fH, w2_eHf, row_weights_M, *chunks)
        if not recompute and any(ctx.needs_input_grad):
            work.keep()
        y_MH = work.forward_all(lanes)
        ctx.save_for_backward(x_MH, w13_e2fH, w2_eHf, row_weights_M, work.gate_up_P2f)
        ctx.chunks, ctx.into, ctx.lanes = chunks, into, lanes
        return y_MH

    @staticmethod
    def backward(ctx: Any, dy_MH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MH, w13_e2fH, w2_eHf, row_weights_M, gate_up_P2f = ctx.saved_tensors
        lanes, native = ctx.lanes, ctx.lanes.rows_for(x_MH, dy_MH)
        sizes, slots = ctx.chunks
        work = GroupedCall(x_MH, w13_e2fH, w2_eHf, row_weights_M, sizes, slots, gate_up_P2f)
        dx_MH = torch.empty_like(x_MH, memory_format=torch.contiguous_format)
        d_weights_M = torch.empty_like(row_weights_M)
        of_lane = [_LaneGrads(work, dx_MH, d_weights_M) for _ in range(lanes.count)]
        scratch = work.scratches(lanes)
        sum13, sum2 = ctx.into

        def run(pieces: list[SlotRows], lane: int) -> None:
            grads = of_lane[lane]
            for p in pieces:
                work.backward(p, *scratch[lane], dy_MH, grads, None, native, lanes)
                if sum13 is not None and sum2 is not None:
                    sum13.add_slot(p.slot, grads.w13_FH, lanes=_one(lanes))
                    sum2.add_slot(p.slot, grads.w2_Hf, lanes=_one(lanes))

        lanes.run(run, _by_slot(work.pieces))
        return dx_MH, None, None, d_weights_M, None, None, None, None


def _one(lanes: Lanes) -> Lanes:
    """What a lane itself may use."""
    return lanes if lanes.count == 1 else Lanes(1, rows=lanes.rows, sums=lanes.sums)


def _by_slot(pieces: Sequence[SlotRows]) -> list[list[SlotRows]]:
    """The pieces of each slot, the fullest slot first."""
    of: dict[int, list[SlotRows]] = {}
    for p in pieces:
        of.setdefault(p.slot, []).append(p)
    return sorted(of.values(), key=lambda found: -sum(p.size for p in found))


class _LaneGrads:
    """Where a lane's gradients go: of the rows to their places, of the weights to scratch that the next chunk overwrites."""

    def __init__(self, work: GroupedCall, dx_MH: torch.Tensor, d_weights_M: torch.Tensor) -> None:
        self.x_MH, self.weights = dx_MH, True
        self.row_weights_M: torch.Tensor | None = d_weights_M
        self.w13_FH = torch.empty_like(work.w13_eFH[0])
        self.w2_Hf = torch.empty_like(work.w2_eHf[0])

    def w13_of(self, p: SlotRows) -> torch.Tensor:
        return self.w13_FH

    def w2_of(self, p: SlotRows) -> torch.Tensor:
        return self.w2_Hf


class _PlainChunks(torch.autograd.Function):
    """The same by plain operations and autograd, chunk after chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        x_MH: torch.Tensor,
        w13_e2fH: torch.Tensor,
        w2_eHf: torch.Tensor,
        row_weights_M: torch.Tensor,
        chunks: tuple[tuple[int, ...], tuple[int, ...]],
        into: Into,
    ) -> torch.Tensor:
        ctx.save_for_backward(x_MH, w13_e2fH, w2_eHf, row_weights_M)
        ctx.chunks, ctx.into = chunks, into
        y_MH = torch.empty_like(x_MH)
        for rows, slot in _rows_of(*chunks):
            y_MH[rows] = _chunk(x_MH[rows].clone(), w13_e2fH[slot], w2_eHf[slot], row_weights_M[rows])
        return y_MH

    @staticmethod
    def backward(ctx: Any, dy_MH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_MH, w13_e2fH, w2_eHf, row_weights_M = ctx.saved_tensors
        dx_MH, d_weights_M = torch.empty_like(x_MH), torch.empty_like(row_weights_M)
        sum13, sum2 = ctx.into
        for rows, slot in _rows_of(*ctx.chunks):
            with torch.enable_grad():
                given = [x_MH[rows], w13_e2fH[slot], w2_eHf[slot], row_weights_M[rows]]
                leaves = [t.detach().clone().requires_grad_() for t in given]
                found = torch.autograd.grad(_chunk(*leaves), leaves, dy_MH[rows].clone())
            dx_MH[rows], d_weights_M[rows] = found[0], found[3]
            if sum13 is not None and sum2 is not None:
                sum13.add_slot(slot, found[1].contiguous(), impl="reference")
                sum2.add_slot(slot, found[2].contiguous(), impl="reference")
        return dx_MH, None, None, d_weights_M, None, None


def _rows_of(sizes: Sequence[int], slots: Sequence[int]) -> list[tuple[slice, int]]:
    return [(slice(stop - size, stop), slot) for stop, size, slot in zip(accumulate(sizes), sizes, slots, strict=True)]


def _chunk(x: torch.Tensor, w13_2fH: torch.Tensor, w2_Hf: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return reference_swiglu(torch.einsum("mh,gfh->mgf", x, w13_2fH), weight) @ w2_Hf.T
