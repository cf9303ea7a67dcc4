"""Code that oneDNN and torch generate while training runs, generated before the first tensor of the run exists.

On a CPU every new shape of a bf16 product costs 1 to 10 ms and half a megabyte that stays (docs/explanation/memory.md), and so does every new
document length in torch's attention. Routing and packing bring new ones for hundreds of steps, and what stays lies between the tensors of
a step, so that the heap falls to pieces and grows: the default run took 850 MiB a rank, a third of it holes. Asked for at the
start, the same code lies together at the bottom of the heap, and a step's memory is the same from the second step to the last.

Must never change: no result depends on it. Does nothing where nothing is generated (other types, devices, processors that do not multiply bf16, the
reference kernels).
"""

from __future__ import annotations

import threading

import torch

from phalanx.core.processor import Processor
from phalanx.kernels.cpu.lanes import Lanes
from phalanx.kernels.cpu.shapes import padded_rows
from phalanx.kernels.ops.attention import causal_attention
from phalanx.kernels.ops.grouped import MAX_PIECE, expert_ffn
from phalanx.models import ModelContext
from phalanx.plan.mapping import AnyFolding
from phalanx.plan.moe import capacity

LONGEST = 512
"""Documents up to this length are met in advance. Longer ones are rare, and torch's kernels repeat from 1,200 on."""


def warm_kernels(
    ctx: ModelContext, *, micro_batch: int, seq_len: int, processor: Processor, folding: AnyFolding | None = None
) -> None:
    """Run the kernels whose shapes vary once at each shape. No communication; about a second. `folding`: that of the run, where `ctx` has not got it."""
    if (
        not processor.multiplies_bf16
        or ctx.dtype != torch.bfloat16
        or ctx.device.type != "cpu"
        or ctx.kernels != "fast"
    ):
        return
    if ctx.spec.moe_layers:
        own = None if folding is None else folding.of_rank(0)
        sources = None if own is None else own.ep * own.etp
        etp = ctx.groups.axis("etp").size if own is None else own.etp
        _warm_experts(ctx, expert_sizes(ctx, num_tokens=micro_batch * seq_len, sources=sources), etp=etp)
    width = ctx.spec.head_dim if ctx.spec.mla is None else max(ctx.spec.head_dim, ctx.spec.mla.value_dim)
    _warm_attention(width, range(1, min(seq_len, LONGEST) + 1), ctx.lanes)


def expert_sizes(ctx: ModelContext, *, num_tokens: int, sources: int | None = None) -> tuple[int, ...]:
    """Row counts that a piece of one expert can have, largest first; none where routing does not change it. `sources`: ranks that rows
    come from; None: those of `ctx`."""
    if ctx.dispatch.is_static:
        return ()
    rows = num_tokens
    if ctx.dispatch.policy == "drop":
        rows = capacity(ctx.dispatch, num_tokens=num_tokens, top_k=ctx.spec.top_k, num_experts=ctx.spec.num_experts)
    most = min(rows * (sources or ctx.groups.axis("ep_etp").size), MAX_PIECE)
    return tuple(sorted({padded_rows(n, ctx.dtype) for n in range(1, most + 1)}, reverse=True))


def _warm_experts(ctx: ModelContext, sizes: tuple[int, ...], *, etp: int) -> None:
    """One expert of this rank's width, forward and backward."""
    hidden, width = ctx.spec.hidden, ctx.spec.expert_ffn // etp
    x_MH = torch.zeros(max(sizes, default=0), hidden, dtype=ctx.dtype)
    w13_e2fH = torch.zeros(1, 2, width, hidden, dtype=ctx.dtype, requires_grad=True)
    w2_eHf = torch.zeros(1, hidden, width, dtype=ctx.dtype, requires_grad=True)
    for size in sizes:
        rows_mH = x_MH[:size].requires_grad_()
        weights_m = torch.ones(size, requires_grad=True)
        y_mH = expert_ffn(rows_mH, w13_e2fH, w2_eHf, [size], row_weights_M=weights_m, lanes=ctx.lanes)
        torch.autograd.grad(y_mH, [rows_mH, w13_e2fH, w2_eHf, weights_m], torch.zeros_like(y_mH))


def _warm_attention(head_dim: int, lengths: range, lanes: Lanes) -> None:
    """Torch keeps attention's code per thread: every lane meets every length once."""
    everyone = threading.Barrier(lanes.count)

    def run(item: int, lane: int) -> None:
        everyone.wait()  # so that each lane takes one item
        x_BSAD = torch.zeros(1, lengths.stop, 1, head_dim, dtype=torch.bfloat16)
        for n in lengths:
            rows = x_BSAD[:, :n]
            causal_attention(rows, rows, rows, ((n,),))

    lanes.run(run, range(lanes.count))
