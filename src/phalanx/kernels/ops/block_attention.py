"""Attention of some queries over some keys, block by block: what context parallelism is made of.

A rank has the queries of its part of a sequence and gets the keys of the others in turn. `attend` adds the keys of some blocks
(`plan/attention/zigzag.py`) to what is known of a query: the softmax-weighted mean of the values seen so far, and the log of the sum of the weights'
numerators. Two such results over different keys merge exactly (arXiv 2310.01889; the rescaling is that of arXiv 1805.02867):

    lse = log(exp(lse_1) + exp(lse_2))        out = out_1 + sigmoid(lse_2 - lse_1) (out_2 - out_1)

`attend_backward` needs the log-sum-exp over all keys, and then has the gradients of any block for itself: they are plain sums.

Fast on a CPU: forward torch's flash kernel, backward batched products over tiles of a fixed grid. On a GPU the flash
kernels of torch, forward and backward, for 16-bit types. Everything else, and `impl = "reference"`, is the plain version below, which
takes queries in chunks so that a score matrix never has more than `CHUNK` rows.

The tiled products, and the columns that carry `-lse` and `-delta` into them, are those of `attention.py`, and as there no query is scaled. Here queries and keys are different tokens, documents cut the rectangles
anywhere, and oneDNN generates code for every new shape of a product. So the plane of queries and keys is laid out in tiles of `TILE` x `TILE`; a tile that is seen whole is computed as
it is, together with its neighbours, and one that is seen in part with a bias that hides the rest.

Must never change: sums over keys and over blocks are in fp32 for 16-bit types, else in the type itself; blocks are added in the
order given, and strips are visited in the order in which `strips` lists them, so results are the same bits every time.

Legend: B sequences, L queries and M keys of a sequence, A query heads, G key/value heads (A a multiple of G), D head dim; lower case
where a block, or some of the heads, are meant; p = a / g, X = D + correction columns, q and k queries and keys of a strip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.ops.attention import with_columns
from phalanx.plan.attention import AttentionBlock

TILE = 256
MAX_QUERIES = 2048
"""Most queries of a strip; a multiple of TILE."""


class Strip(NamedTuple):
    """Queries [q_start, q_stop) against keys [k_start, k_stop). `seen` are blocks relative to the strip, clipped to it; empty: all is seen."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    seen: tuple[tuple[int, int, int, int, int | None], ...]
    """(first query, behind the last, first key, behind the last, diagonal): query i sees key j of it where i - j >= diagonal (None: always)."""


@lru_cache(maxsize=256)
def strips(blocks: tuple[AttentionBlock, ...], num_queries: int, num_keys: int) -> tuple[Strip, ...]:
    """The tiles that blocks of one sequence touch, keys first; whole ones that lie side by side as one strip."""
    touched: dict[tuple[int, int], list[AttentionBlock]] = {}
    for block in blocks:
        for key in range(block.k_start // TILE, -(-block.k_stop // TILE)):
            for query in range(_first_tile(block, key), -(-block.q_stop // TILE)):
                touched.setdefault((key, query), []).append(block)
    out: list[Strip] = []
    for (key, query), seen in sorted(touched.items()):
        q_start, k_start = query * TILE, key * TILE
        q_stop, k_stop = min(q_start + TILE, num_queries), min(k_start + TILE, num_keys)
        clipped = tuple(_clip(b, q_start, q_stop, k_start, k_stop) for b in seen)
        whole = any(
            c[:2] == (0, q_stop - q_start) and c[2:4] == (0, k_stop - k_start) and c[4] is None for c in clipped
        )
        if not whole:
            out.append(Strip(q_start, q_stop, k_start, k_stop, clipped))
            continue
        last = out[-1] if out else None
        joins = last is not None and not last.seen and last.k_start == k_start and last.q_stop == q_start
        if last is not None and joins and q_stop - last.q_start <= MAX_QUERIES:
            out[-1] = last._replace(q_stop=q_stop)
        else:
            out.append(Strip(q_start, q_stop, k_start, k_stop, ()))
    return tuple(out)


def _first_tile(block: AttentionBlock, key_tile: int) -> int:
    """The first tile of queries that sees a key of the tile."""
    first = block.q_start
    if block.causal:
        first += max(0, key_tile * TILE - block.k_start)
    return first // TILE


def _clip(
    block: AttentionBlock, q_start: int, q_stop: int, k_start: int, k_stop: int
) -> tuple[int, int, int, int, int | None]:
    """What a block lets the tile see, relative to the tile."""
    q0, q1 = max(block.q_start, q_start) - q_start, min(block.q_stop, q_stop) - q_start
    k0, k1 = max(block.k_start, k_start) - k_start, min(block.k_stop, k_stop) - k_start
    diagonal = (block.q_start - q_start) - (block.k_start - k_start)  # query i sees key j where i - j >= diagonal
    cut = block.causal and q0 - (k1 - 1) < diagonal
    return q0, q1, k0, k1, diagonal if cut else None


def _bias(strip: Strip, dtype: torch.dtype) -> torch.Tensor:
    """(keys, queries): 0 where the query sees the key, else -inf."""
    visible_kq = np.zeros((strip.k_stop - strip.k_start, strip.q_stop - strip.q_start), dtype=bool)
    for q0, q1, k0, k1, diagonal in strip.seen:
        part = visible_kq[k0:k1, q0:q1]
        part |= True if diagonal is None else np.arange(q0, q1) - np.arange(k0, k1)[:, None] >= diagonal
    return torch.zeros(visible_kq.shape, dtype=dtype).masked_fill_(torch.from_numpy(~visible_kq), -math.inf)


def _with_biases(plan: Sequence[Strip], dtype: torch.dtype) -> Iterator[tuple[Strip, torch.Tensor | None]]:
    """Strips that see the same part of themselves share a bias: on a diagonal nearly all do."""
    made: dict[object, torch.Tensor] = {}
    for strip in plan:
        key = (strip.seen, strip.q_stop - strip.q_start, strip.k_stop - strip.k_start)
        if strip.seen and key not in made:
            made[key] = _bias(strip, dtype)
        yield strip, made[key] if strip.seen else None


def backward_by_tiles(
    qkv: tuple[torch.Tensor, ...],
    known: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor, ...],
    blocks: tuple[AttentionBlock, ...],
) -> None:
    """Add to `grads` (wide) what `blocks` contribute: some heads of one sequence.

    `qkv` (l, a, D) and twice (m, g, D); `known` log-sum-exp and delta (a, l), gradient of the output (l, a, D).
    """
    q_laD, k_mgD, v_mgD = qkv
    lse_al, delta_al, d_out_laD = known
    dim, wide, scale = q_laD.shape[-1], lse_al.dtype, 1 / math.sqrt(q_laD.shape[-1])
    k_gmX, v_gmX = with_columns(k_mgD, None), with_columns(v_mgD, None)
    shape = (k_mgD.shape[1], -1, q_laD.shape[0], k_gmX.shape[-1])
    q_gplX = with_columns(q_laD, lse_al / scale).view(shape)
    do_gplX = with_columns(d_out_laD, delta_al).view(shape)
    dq_gplX = torch.zeros(q_gplX.shape, dtype=wide)
    dk_gmD, dv_gmX = (torch.zeros((*k_gmX.shape[:2], width), dtype=wide) for width in (dim, k_gmX.shape[2]))
    plan = strips(blocks, q_laD.shape[0], k_mgD.shape[0])
    for strip, bias_kq in _with_biases(plan, q_laD.dtype):
        queries, keys = slice(strip.q_start, strip.q_stop), slice(strip.k_start, strip.k_stop)
        q_gqX, do_gqX = (x[:, :, queries].flatten(1, 2) for x in (q_gplX, do_gplX))
        k_gkX = k_gmX[:, keys]
        p_gkq = k_gkX.new_empty((*k_gkX.shape[:2], q_gqX.shape[1]))
        p_gkq.baddbmm_(k_gkX, q_gqX.transpose(1, 2), beta=0, alpha=scale)
        if bias_kq is not None:
            p_gkq.unflatten(2, (q_gplX.shape[1], -1)).add_(bias_kq.unsqueeze(1))
        p_gkq.exp_()
        dv_gmX[:, keys].add_(torch.bmm(p_gkq, do_gqX))
        ds_gkq = torch.bmm(v_gmX[:, keys], do_gqX.transpose(1, 2)).mul_(p_gkq)
        dk_gmD[:, keys].add_(torch.bmm(ds_gkq, q_gqX[..., :dim]))
        part_gqX = torch.bmm(ds_gkq.transpose(1, 2), k_gkX)
        dq_gplX[:, :, queries].add_(part_gqX.view(*q_gplX.shape[:2], -1, q_gplX.shape[-1]))
    for grad, found, factor in (
        (grads[0], dq_gplX.flatten(0, 1), scale),
        (grads[1], dk_gmD, scale),
        (grads[2], dv_gmX, 1.0),
    ):
        grad.add_(found[..., :dim].transpose(0, 1), alpha=factor)


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
    """Divides attention into tasks: about eight pieces for the lanes of a CPU; on a GPU as few launches as the documents allow.
    Decided by shapes and blocks alone."""
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
