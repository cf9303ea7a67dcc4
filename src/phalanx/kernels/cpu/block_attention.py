"""Attention of some queries over some keys, block by block: what context parallelism is made of.

A rank has the queries of its part of a sequence and gets the keys of the others in turn. `attend` adds the keys of some blocks
(`plan/mapping/zigzag.py`) to what is known of a query: the softmax-weighted mean of the values seen so far, and the log of the sum of the weights'
numerators. Two such results over different keys merge exactly (arXiv 2310.01889; the rescaling is that of arXiv 1805.02867):

    lse = log(exp(lse_1) + exp(lse_2))        out = out_1 + sigmoid(lse_2 - lse_1) (out_2 - out_1)

`attend_backward` needs the log-sum-exp over all keys, and then has the gradients of any block for itself: they are plain sums.

Fast on a CPU: forward torch's flash kernel, backward batched products over tiles of a fixed grid (`block_tiles.py`). On a GPU the flash
kernels of torch, forward and backward, for 16-bit types. Everything else, and `impl = "reference"`, is the plain version below, which
takes queries in chunks so that a score matrix never has more than `CHUNK` rows.

Must never change: sums over keys and over blocks are in fp32 for 16-bit types, else in the type itself; blocks are added in the
order given, so results are the same bits every time.

Legend: B sequences, L queries and M keys of a sequence, A query heads, G key/value heads (A a multiple of G), D head dim; lower case
where a block, or some of the heads, are meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.block_tiles import backward_by_tiles
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.plan.mapping import AttentionBlock

Blocks = tuple[tuple[AttentionBlock, ...], ...]
"""Blocks of each sequence."""
CHUNK = 1024
"""Queries whose scores the plain version holds at once."""

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_gpu = torch.ops.aten._scaled_dot_product_flash_attention
_flash_gpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

_Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], tuple[torch.Tensor, torch.Tensor]]
"""Queries (b, l, a, D), keys and values (b, m, g, D), causal or not -> output (b, l, a, D) and log-sum-exp (b, a, l)."""


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Type of sums."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, eq=False)
class PartialAttention:
    """Attention over the keys seen so far; the wide type. A query that has seen none: 0 and -inf."""

    out_BLAD: torch.Tensor
    lse_BAL: torch.Tensor

    @staticmethod
    def empty(q_BLAD: torch.Tensor) -> PartialAttention:
        batch, length, heads, _ = q_BLAD.shape
        wide = wide_type(q_BLAD.dtype)
        out_BLAD = torch.zeros_like(q_BLAD, dtype=wide, memory_format=torch.contiguous_format)
        return PartialAttention(out_BLAD, q_BLAD.new_full((batch, heads, length), -math.inf, dtype=wide))

    def merge(self, at: _At, out_blaD: torch.Tensor, lse_bal: torch.Tensor) -> None:
        """Add the keys of another result for the queries `at`.

        The shares of both are `sigmoid(lse_bal - old)` and one minus that, so that they sum to one whatever is rounded. Taken from the
        log-sum-exp of both, they miss it by its rounding, and the gradients of keys, which are differences from that mean, show it.
        """
        old_bal = self.lse_BAL[at.sequences, at.heads, at.queries]
        new_bal = lse_bal.to(old_bal.dtype)
        share_bla1 = torch.sigmoid(new_bal - old_bal).transpose(1, 2).unsqueeze(-1)
        out_blaD = out_blaD.to(old_bal.dtype)
        self.out_BLAD[at.sequences, at.queries, at.heads].lerp_(out_blaD, share_bla1)
        old_bal.copy_(torch.logaddexp(old_bal, new_bal))


@dataclass(frozen=True, eq=False)
class SavedAttention:
    """What the backward pass needs of the whole forward pass."""

    out_BLAD: torch.Tensor
    lse_BAL: torch.Tensor
    d_out_BLAD: torch.Tensor
    delta_BAL: torch.Tensor
    """Sum over D of `out * d_out`."""

    @staticmethod
    def of(out_BLAD: torch.Tensor, lse_BAL: torch.Tensor, d_out_BLAD: torch.Tensor) -> SavedAttention:
        delta_BLA = (out_BLAD.to(lse_BAL.dtype) * d_out_BLAD).sum(-1)
        return SavedAttention(out_BLAD, lse_BAL, d_out_BLAD, delta_BLA.transpose(1, 2))


@dataclass(frozen=True)
class _Task:
    """Work for one lane: key/value heads `[first, last)`, and the query heads that share them, of some sequences with the same blocks."""

    sequences: slice
    first: int
    last: int
    blocks: tuple[AttentionBlock, ...]


@dataclass(frozen=True)
class _At:
    """Where a block of a task lies."""

    sequences: slice
    queries: slice
    keys: slice
    heads: slice
    kv: slice


def _at(task: _Task, block: AttentionBlock, *, group: int) -> _At:
    return _At(
        task.sequences,
        slice(block.q_start, block.q_stop),
        slice(block.k_start, block.k_stop),
        slice(task.first * group, task.last * group),
        slice(task.first, task.last),
    )


def _tasks(blocks: Blocks, k_BMGD: torch.Tensor) -> list[_Task]:
    """On a CPU about eight pieces for the lanes; on a GPU as few launches as the documents allow. Decided by shapes and blocks alone."""
    batch, num_kv = len(blocks), k_BMGD.shape[2]
    if k_BMGD.device.type != "cpu":
        if all(row == blocks[0] for row in blocks):
            return [_Task(slice(0, batch), 0, num_kv, blocks[0])]
        return [_Task(slice(b, b + 1), 0, num_kv, row) for b, row in enumerate(blocks)]
    parts = max(1, min(num_kv, -(-8 // batch)))
    while num_kv % parts:
        parts -= 1
    step = num_kv // parts
    return [
        _Task(slice(b, b + 1), i * step, (i + 1) * step, row)
        for b, row in enumerate(blocks)
        for i in range(parts)
        if row
    ]


def attend(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: Blocks,
    partial: PartialAttention,
    *,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> None:
    """Add to `partial` the keys that the queries see in `blocks`; `qkv` are (B, L, A, D) and twice (B, M, G, D)."""
    q_BLAD, k_BMGD, v_BMGD = qkv
    group = q_BLAD.shape[2] // k_BMGD.shape[2]
    forward = _forward_for(q_BLAD, impl)

    def run(task: _Task, lane: int) -> None:
        for block in task.blocks:
            at = _at(task, block, group=group)
            q = q_BLAD[at.sequences, at.queries, at.heads]
            k, v = (x[at.sequences, at.keys, at.kv] for x in (k_BMGD, v_BMGD))
            partial.merge(at, *forward(q, k, v, block.causal))

    lanes.run(run, _tasks(blocks, k_BMGD))


def attend_backward(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    blocks: Blocks,
    known: SavedAttention,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    impl: Impl = "fast",
    lanes: Lanes = SERIAL,
) -> None:
    """Add to `grads` (of q, k and v, in the wide type) what the pairs in `blocks` contribute."""
    q_BLAD, k_BMGD, _ = qkv
    group = q_BLAD.shape[2] // k_BMGD.shape[2]

    def tiles(task: _Task, lane: int) -> None:
        b, kv = task.sequences.start, slice(task.first, task.last)
        heads = slice(task.first * group, task.last * group)
        backward_by_tiles(
            tuple(x[b, :, h] for x, h in zip(qkv, (heads, kv, kv), strict=True)),
            (known.lse_BAL[b, heads], known.delta_BAL[b, heads], known.d_out_BLAD[b, :, heads]),
            tuple(x[b, :, h] for x, h in zip(grads, (heads, kv, kv), strict=True)),
            task.blocks,
        )

    def by_block(task: _Task, lane: int) -> None:
        backward = _gpu_backward if _flash_on_gpu(q_BLAD) and impl == "fast" else _plain_backward
        for block in task.blocks:
            backward(qkv, _at(task, block, group=group), known, grads, block.causal)

    on_cpu = q_BLAD.device.type == "cpu" and impl == "fast"
    lanes.run(tiles if on_cpu else by_block, _tasks(blocks, k_BMGD))


def _forward_for(q_BLAD: torch.Tensor, impl: Impl) -> _Forward:
    if impl == "reference":
        return _plain_forward
    if q_BLAD.device.type == "cpu":
        return _cpu_forward
    return _gpu_forward if _flash_on_gpu(q_BLAD) else _plain_forward


# ---- torch's flash kernels -----------------------------------------------------------------------------------------------------


def _cpu_forward(
    q_blaD: torch.Tensor, k_bmgD: torch.Tensor, v_bmgD: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _flash_cpu(*(x.transpose(1, 2) for x in (q_blaD, k_bmgD, v_bmgD)), 0.0, causal)
    return out.transpose(1, 2), lse


def _flash_on_gpu(q_BLAD: torch.Tensor) -> bool:
    """Whether torch's flash kernels take these: 16-bit types, heads of a multiple of 8 up to 256."""
    half = q_BLAD.dtype in (torch.bfloat16, torch.float16)
    return q_BLAD.device.type == "cuda" and half and q_BLAD.shape[-1] % 8 == 0 and q_BLAD.shape[-1] <= 256


def _gpu_forward(
    q_blaD: torch.Tensor, k_bmgD: torch.Tensor, v_bmgD: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    found = _flash_gpu(*(x.transpose(1, 2) for x in (q_blaD, k_bmgD, v_bmgD)), 0.0, causal)
    return found[0].transpose(1, 2), found[1]


def _gpu_backward(
    qkv: tuple[torch.Tensor, ...], at: _At, known: SavedAttention, grads: tuple[torch.Tensor, ...], causal: bool
) -> None:
    """The flash kernel works out delta from the whole output, so that its gradients are this block's parts of the whole."""
    q, k, v = _at_block(qkv, at)
    d_out, out = (x[at.sequences, at.queries, at.heads] for x in (known.d_out_BLAD, known.out_BLAD))
    lse = known.lse_BAL[at.sequences, at.heads, at.queries].contiguous()
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # random state of a dropout that there is not
    parts = _flash_gpu_backward(
        *(x.transpose(1, 2) for x in (d_out, q, k, v, out)),
        lse, None, None, q.shape[1], k.shape[1], 0.0, causal, unused, unused,
    )  # fmt: skip
    for grad, part in zip(_at_block(grads, at), parts, strict=True):
        grad.add_(part.transpose(1, 2))


# ---- the plain version -----------------------------------------------------------------------------------------------------------


def _plain_forward(
    q_blaD: torch.Tensor, k_bmgD: torch.Tensor, v_bmgD: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    group, (k, v) = q_blaD.shape[2] // k_bmgD.shape[2], _wide(k_bmgD, v_bmgD)
    outs, sums = [], []
    for start in range(0, q_blaD.shape[1], CHUNK):
        q_bcaD = q_blaD[:, start : start + CHUNK].to(k.dtype)
        scores_bacm = _scores(q_bcaD, k, group, start=start if causal else None)
        sums.append(scores_bacm.logsumexp(-1))
        outs.append(torch.einsum("bacm,bmad->bcad", scores_bacm.softmax(-1), v.repeat_interleave(group, dim=2)))
    return torch.cat(outs, dim=1), torch.cat(sums, dim=2)


def _plain_backward(
    qkv: tuple[torch.Tensor, ...], at: _At, known: SavedAttention, grads: tuple[torch.Tensor, ...], causal: bool
) -> None:
    q, k, v = _wide(*_at_block(qkv, at))
    dq, dk, dv = _at_block(grads, at)
    d_out = known.d_out_BLAD[at.sequences, at.queries, at.heads].to(q.dtype)
    lse, delta = (x[at.sequences, at.heads, at.queries] for x in (known.lse_BAL, known.delta_BAL))
    group, scale = q.shape[2] // k.shape[2], 1 / math.sqrt(q.shape[-1])
    for start in range(0, q.shape[1], CHUNK):
        rows = slice(start, start + CHUNK)
        q_bcaD, do_bcaD = q[:, rows], d_out[:, rows]
        p_bacm = (_scores(q_bcaD, k, group, start=start if causal else None) - lse[:, :, rows, None]).exp()
        dp_bacm = torch.einsum("bcad,bmad->bacm", do_bcaD, v.repeat_interleave(group, dim=2))
        ds_bacm = p_bacm * (dp_bacm - delta[:, :, rows, None]) * scale
        dq[:, rows].add_(torch.einsum("bacm,bmad->bcad", ds_bacm, k.repeat_interleave(group, dim=2)))
        dk.add_(_sum_group(torch.einsum("bacm,bcad->bmad", ds_bacm, q_bcaD), group))
        dv.add_(_sum_group(torch.einsum("bacm,bcad->bmad", p_bacm, do_bcaD), group))


def _scores(q_bcaD: torch.Tensor, k_bmgD: torch.Tensor, group: int, *, start: int | None) -> torch.Tensor:
    """(b, a, c, m) scaled scores, -inf where query `start + i` of a causal block comes before the key."""
    keys = k_bmgD.repeat_interleave(group, dim=2)
    scores_bacm = torch.einsum("bcad,bmad->bacm", q_bcaD, keys) / math.sqrt(q_bcaD.shape[-1])
    if start is None:
        return scores_bacm
    query_c1 = torch.arange(start, start + q_bcaD.shape[1], device=keys.device).unsqueeze(1)
    return scores_bacm.masked_fill(query_c1 < torch.arange(keys.shape[1], device=keys.device), -math.inf)


def _sum_group(x_bmaD: torch.Tensor, group: int) -> torch.Tensor:
    """Sum over the query heads that share a key/value head."""
    return x_bmaD.unflatten(2, (-1, group)).sum(3)


def _at_block(tensors: tuple[torch.Tensor, ...], at: _At) -> list[torch.Tensor]:
    """The parts of q, k, v (or of their gradients) that a block is about."""
    q, k, v = tensors
    return [q[at.sequences, at.queries, at.heads], k[at.sequences, at.keys, at.kv], v[at.sequences, at.keys, at.kv]]


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.to(wide_type(x.dtype)) for x in tensors]
