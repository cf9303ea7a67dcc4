"""Causal attention inside documents: a token sees the earlier tokens of its own document and nothing else.

Fast on a CPU: the forward pass is torch's flash kernel, document by document. Its backward kernel is three times slower than the
matrix products in it and generates code anew for every document length, so the backward pass is done here, from batched
products over blocks of keys (arXiv 2307.08691, Algorithm 2, with whole rows of queries):

    P^T = exp(r (K Q^T - lse / r))    dV = P^T dO    dS^T = P^T * (V dO^T - delta)    dK = r dS^T Q    dQ = r dS K    r = 1 / sqrt(D)

Both subtractions happen inside the products, where sums are fp32: `-lse / r` and `-delta`, split into two bf16 numbers, are extra columns of Q
and dO that meet columns of ones in K and V. `r` multiplies sums before they are rounded. It must not multiply Q: where it is no power of
two, Q would be rounded once more, its scores would not be those that `lse` is of, and rows of P would not add up to one. Blocks have the same
shapes whatever the documents are.

Legend: B sequences, S sequence length, A query heads, G key/value heads (A a multiple of G), D head dim, T = B*S; k keys of a block,
q queries that can see some of them, X = D + columns that hold a correction.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.checked_attention import check_backward, check_forward
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.scripted import scripted
from phalanx.kernels.device import device_attention

Segments = Sequence[Sequence[int]]
"""Lengths of the documents packed in each sequence, host integers that sum to S."""
KEY_BLOCK = 256
"""Keys of a block of the backward pass; queries are rounded to this as well."""
CORRECTION = 16
"""Extra columns: two are used, sixteen keep rows a multiple of 32 bytes."""


def causal_attention(
    q_BSAD: torch.Tensor,
    k_BSGD: torch.Tensor,
    v_BSGD: torch.Tensor,
    segments: Segments,
    *,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> torch.Tensor:
    """Softmax(q k^T / sqrt(D)) v over the keys that each query may see; (B, S, A, D). On a device values may have another width than keys."""
    if impl == "reference":
        return _reference(q_BSAD, k_BSGD, v_BSGD, segments)
    if q_BSAD.device.type == "cpu":
        out: torch.Tensor = _CpuAttention.apply(q_BSAD, k_BSGD, v_BSGD, segments, lanes)
        return out
    return device_attention(q_BSAD, k_BSGD, v_BSGD, segments)


def segment_ids(segments: Segments, *, device: torch.device) -> torch.Tensor:
    """(B, S) number of the document that each token belongs to."""
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(list(row))) for row in segments]
    return torch.stack(rows).to(device)


def _reference(q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, segments: Segments) -> torch.Tensor:
    wide = torch.promote_types(q_BSAD.dtype, torch.float32)
    repeat = q_BSAD.shape[2] // k_BSGD.shape[2]
    ids_BS = segment_ids(segments, device=q_BSAD.device)
    length = ids_BS.shape[1]
    causal_SS = torch.ones(length, length, dtype=torch.bool, device=q_BSAD.device).tril()
    visible_BSS = causal_SS & (ids_BS.unsqueeze(2) == ids_BS.unsqueeze(1))
    q = q_BSAD.to(wide)
    k = k_BSGD.to(wide).repeat_interleave(repeat, dim=2)
    v = v_BSGD.to(wide).repeat_interleave(repeat, dim=2)
    scores_BASS = torch.einsum("bsad,btad->bast", q, k) / math.sqrt(q.shape[-1])
    scores_BASS = scores_BASS.masked_fill(~visible_BSS.unsqueeze(1), float("-inf"))
    return torch.einsum("bast,btad->bsad", scores_BASS.softmax(-1), v).to(q_BSAD.dtype)


# ---- CPU ---------------------------------------------------------------------------------------------------------------------

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True)
class _Task:
    """Heads `[first, last)` of the key/value heads, and the query heads that share them, in one sequence."""

    sequence: int
    first: int
    last: int


def _tasks(num_sequences: int, num_kv_heads: int) -> list[_Task]:
    """Pieces of work: about eight, so that few lanes are busy to the end. Decided by the shapes alone."""
    parts = max(1, min(num_kv_heads, -(-8 // num_sequences)))
    while num_kv_heads % parts:
        parts -= 1
    step = num_kv_heads // parts
    return [_Task(b, i * step, (i + 1) * step) for b in range(num_sequences) for i in range(parts)]


class _CpuAttention(torch.autograd.Function):
    """Keeps q, k, v, the output and one log-sum-exp per query."""

    @staticmethod
    def forward(
        ctx: Any, q_BSAD: torch.Tensor, k_BSGD: torch.Tensor, v_BSGD: torch.Tensor, segments: Segments, lanes: Lanes
    ) -> torch.Tensor:
        num_sequences, length, num_heads, _ = q_BSAD.shape
        num_kv = k_BSGD.shape[2]
        out_BSAD = torch.empty_like(q_BSAD, memory_format=torch.contiguous_format)
        wide = torch.promote_types(q_BSAD.dtype, torch.float32)
        lse_BAS = torch.empty((num_sequences, num_heads, length), dtype=wide)

        def run(task: _Task, lane: int) -> None:
            per = num_heads // num_kv
            heads, kv = slice(task.first * per, task.last * per), slice(task.first, task.last)
            start, b = 0, task.sequence
            for size in filter(None, segments[b]):  # torch's kernel divides by the length of a document
                rows = slice(start, start + size)
                parts = (q_BSAD[b, rows, heads], k_BSGD[b, rows, kv], v_BSGD[b, rows, kv])
                out, lse = _flash(*(x.transpose(0, 1).unsqueeze(0) for x in parts), 0.0, True)
                out_BSAD[b, rows, heads].copy_(out[0].transpose(0, 1))
                lse_BAS[b, heads, rows].copy_(lse[0])
                start += size

        lanes.run(run, _tasks(num_sequences, num_kv))
        if lanes.sums is not None and lanes.sums.look("attention forward", _matrix(out_BSAD), lanes.rows):
            check_forward(lanes.sums, v_BSGD, out_BSAD)
        ctx.save_for_backward(q_BSAD, k_BSGD, v_BSGD, out_BSAD, lse_BAS)
        ctx.segments, ctx.lanes = segments, lanes
        return out_BSAD

    @staticmethod
    def backward(ctx: Any, d_out_BSAD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_BSAD, k_BSGD, v_BSGD, out_BSAD, lse_BAS = ctx.saved_tensors
        grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q_BSAD, k_BSGD, v_BSGD))
        num_sequences, length, num_heads, _ = q_BSAD.shape
        num_kv = k_BSGD.shape[2]
        causal_kk = _causal_bias(min(KEY_BLOCK, length), q_BSAD.dtype)
        work = scripted(_backward_heads)
        blocks = [_blocks(lengths, causal_kk) for lengths in ctx.segments]

        def run(task: _Task, lane: int) -> None:
            per, b = num_heads // num_kv, task.sequence
            heads, kv = slice(task.first * per, task.last * per), slice(task.first, task.last)
            work(
                [q_BSAD[b, :, heads], k_BSGD[b, :, kv], v_BSGD[b, :, kv]],
                [out_BSAD[b, :, heads], lse_BAS[b, heads], d_out_BSAD[b, :, heads]],
                [grads[0][b, :, heads], grads[1][b, :, kv], grads[2][b, :, kv]],
                [(block.start, block.stop, block.end) for block in blocks[b]],
                [block.bias_kq for block in blocks[b]],
                CORRECTION,
            )

        ctx.lanes.run(run, _tasks(num_sequences, num_kv))
        sums = ctx.lanes.sums
        if sums is not None and any(sums.look("attention gradients", _matrix(x), ctx.lanes.rows) for x in grads):
            check_backward(sums, q_BSAD, k_BSGD, d_out_BSAD, grads)
        return (*grads, None, None)


def _matrix(x_BSAD: torch.Tensor) -> torch.Tensor:
    """(B*S, A*D)."""
    return x_BSAD.flatten(2).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class _Block:
    """Keys `[start, stop)` and the queries `[start, end)` behind which nobody sees them."""

    start: int
    stop: int
    end: int
    bias_kq: torch.Tensor
    """0 where a key (row) is visible to a query (column), else -inf; columns that it does not have are visible."""


def _blocks(lengths: Sequence[int], causal_kk: torch.Tensor) -> list[_Block]:
    """Key blocks of one sequence. A block's queries end with the last document that has keys in it, rounded up to whole blocks."""
    ends = list(itertools.accumulate(lengths))
    total = ends[-1]
    ids_S = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(list(lengths))) if len(ends) > 1 else None
    blocks = []
    for start in range(0, total, KEY_BLOCK):
        stop = min(start + KEY_BLOCK, total)
        first, last = bisect.bisect_right(ends, start), bisect.bisect_right(ends, stop - 1)
        end = min(total, -(-ends[last] // KEY_BLOCK) * KEY_BLOCK)
        bias_kq = causal_kk[: stop - start, : stop - start]
        if ids_S is not None and (first != last or ends[last] < end):
            hidden_kq = ids_S[start:stop].unsqueeze(1) != ids_S[start:end]
            causal_kq = bias_kq
            bias_kq = torch.zeros(hidden_kq.shape, dtype=causal_kk.dtype).masked_fill_(hidden_kq, -math.inf)
            bias_kq[:, : stop - start] += causal_kq
        blocks.append(_Block(start, stop, end, bias_kq))
    return blocks


def _causal_bias(size: int, dtype: torch.dtype) -> torch.Tensor:
    """(keys, queries): -inf where the query comes before the key."""
    return torch.full((size, size), -math.inf, dtype=dtype).tril_(-1)


def _backward_heads(
    qkv: list[torch.Tensor],
    forward: list[torch.Tensor],
    grads: list[torch.Tensor],
    bounds: list[tuple[int, int, int]],
    biases: list[torch.Tensor],
    columns: int,
) -> None:
    """Gradients of some heads of one sequence: `qkv` (S, a, D) and (S, g, D), `forward` out, lse (a, S) and d_out, into `grads`.

    Query heads that share a key/value head stand side by side in the products, so that their sum is taken there, in fp32.
    """
    q_SaD, k_SgD, v_SgD = qkv[0], qkv[1], qkv[2]
    out_SaD, lse_aS, d_out_SaD = forward[0], forward[1], forward[2]
    length, dim, num_kv, wide = q_SaD.shape[0], q_SaD.shape[2], k_SgD.shape[1], lse_aS.dtype
    per = q_SaD.shape[1] // num_kv
    width, scale = dim + columns, 1 / math.sqrt(dim)
    delta_aS = (out_SaD.to(wide) * d_out_SaD.to(wide)).sum(-1).t()
    k_gSX, v_gSX = _with_ones(k_SgD, columns), _with_ones(v_SgD, columns)
    q_gpSX = _with_columns(q_SaD, lse_aS / scale, columns).view(num_kv, per, length, width)
    do_gpSX = _with_columns(d_out_SaD, delta_aS, columns).view(num_kv, per, length, width)
    most = 0
    for start, stop, end in bounds:
        most = max(most, (stop - start) * (end - start))
    scratch = torch.empty([2, num_kv * per * most], dtype=q_SaD.dtype)
    dq_gDpS = torch.empty([num_kv, dim, per, length], dtype=wide)
    seen = 0
    for i, (start, stop, end) in enumerate(bounds):
        k_gkX, bias_kq = k_gSX[:, start:stop], biases[i]
        q_gqX = q_gpSX[:, :, start:end].flatten(1, 2)
        do_gqX = do_gpSX[:, :, start:end].flatten(1, 2)
        shape = [num_kv, stop - start, q_gqX.shape[1]]
        p_gkq = scratch[0, : shape[0] * shape[1] * shape[2]].view(shape)
        ds_gkq = scratch[1, : shape[0] * shape[1] * shape[2]].view(shape)
        p_gkq.baddbmm_(k_gkX, q_gqX.transpose(1, 2), beta=0, alpha=scale)
        p_gkq.view(num_kv, stop - start, per, -1)[..., : bias_kq.shape[1]].add_(bias_kq.unsqueeze(1))
        p_gkq.exp_()
        grads[2][start:stop].copy_(torch.bmm(p_gkq, do_gqX[..., :dim]).transpose(0, 1))
        torch.bmm(v_gSX[:, start:stop], do_gqX.transpose(1, 2), out=ds_gkq)
        ds_gkq.mul_(p_gkq)
        dk_gkD = k_gkX.new_empty((num_kv, stop - start, dim)).baddbmm_(ds_gkq, q_gqX[..., :dim], beta=0, alpha=scale)
        grads[1][start:stop].copy_(dk_gkD.transpose(0, 1))
        part_gDpq = torch.bmm(k_gkX[..., :dim].transpose(1, 2), ds_gkq).view(num_kv, dim, per, -1)
        seen = max(seen, start)
        dq_gDpS[..., start:seen].add_(part_gDpq[..., : seen - start].to(wide))
        dq_gDpS[..., seen:end].copy_(part_gDpq[..., seen - start :])
        seen = end
    dq_gDpS.mul_(scale)
    for g in range(num_kv):
        for h in range(per):
            grads[0][:, g * per + h].copy_(dq_gDpS[g, :, h].to(q_SaD.dtype).t())


def with_columns(x_SgD: torch.Tensor, minus_gS: torch.Tensor | None) -> torch.Tensor:
    """(g, S, X): heads first, and two more columns: ones, or two numbers that add up to `-minus` as closely as the type allows."""
    if minus_gS is None:
        return _with_ones(x_SgD, CORRECTION)
    return _with_columns(x_SgD, minus_gS, CORRECTION)


def _with_ones(x_SgD: torch.Tensor, columns: int) -> torch.Tensor:
    dim = x_SgD.shape[2]
    out_gSX = torch.empty([x_SgD.shape[1], x_SgD.shape[0], dim + columns], dtype=x_SgD.dtype)
    out_gSX[:, :, :dim].copy_(x_SgD.transpose(0, 1))
    out_gSX[:, :, dim : dim + 2].fill_(1.0)
    out_gSX[:, :, dim + 2 :].zero_()
    return out_gSX


def _with_columns(x_SgD: torch.Tensor, minus_gS: torch.Tensor, columns: int) -> torch.Tensor:
    """(g, S, X): heads first, and two more columns: two numbers that add up to `-minus` as closely as the type allows."""
    dim = x_SgD.shape[2]
    out_gSX = torch.empty([x_SgD.shape[1], x_SgD.shape[0], dim + columns], dtype=x_SgD.dtype)
    out_gSX[:, :, :dim].copy_(x_SgD.transpose(0, 1))
    high_gS = minus_gS.neg().to(x_SgD.dtype)
    out_gSX[:, :, dim].copy_(high_gS)
    out_gSX[:, :, dim + 1].copy_(-minus_gS - high_gS)
    out_gSX[:, :, dim + 2 :].zero_()
    return out_gSX
