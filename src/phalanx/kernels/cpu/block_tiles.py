"""Gradients of attention blocks on a CPU, from batched products over tiles of a fixed grid.

The products and the columns that carry `-lse` and `-delta` into them are those of `attention.py`. Here queries and keys are different
tokens, documents cut the rectangles anywhere, and oneDNN generates code for every new shape of a product. So the plane of queries and keys
is laid out in tiles of `TILE` x `TILE`; a tile that is seen whole is computed as it is, together with its neighbours, and one that is seen in
part with a bias that hides the rest.

Must never change: strips are visited in the order in which `strips` lists them, so sums have the same bits every time.

Legend: l queries and m keys of one sequence, a query heads, g key/value heads, p = a / g, D head dim, X = D + correction columns; q and k
queries and keys of a strip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from phalanx.kernels.cpu.attention import with_columns
from phalanx.plan.mapping import AttentionBlock

TILE = 256
MAX_QUERIES = 2048
"""Of a strip; a multiple of TILE."""


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
    q_gplX = with_columns(q_laD * scale, lse_al).view(shape)
    # a scaled query is rounded to its narrow type: good enough for a score, but gradients of keys would be sums of rounded queries
    plain_q_gplD = q_laD.transpose(0, 1).contiguous().view(*shape[:3], dim)
    do_gplX = with_columns(d_out_laD, delta_al).view(shape)
    dq_gplX = torch.zeros(q_gplX.shape, dtype=wide)
    dk_gmD, dv_gmX = (torch.zeros((*k_gmX.shape[:2], width), dtype=wide) for width in (dim, k_gmX.shape[2]))
    plan = strips(blocks, q_laD.shape[0], k_mgD.shape[0])
    for strip, bias_kq in _with_biases(plan, q_laD.dtype):
        queries, keys = slice(strip.q_start, strip.q_stop), slice(strip.k_start, strip.k_stop)
        q_gqX, do_gqX = (x[:, :, queries].flatten(1, 2) for x in (q_gplX, do_gplX))
        k_gkX = k_gmX[:, keys]
        p_gkq = torch.bmm(k_gkX, q_gqX.transpose(1, 2))
        if bias_kq is not None:
            p_gkq.unflatten(2, (q_gplX.shape[1], -1)).add_(bias_kq.unsqueeze(1))
        p_gkq.exp_()
        dv_gmX[:, keys].add_(torch.bmm(p_gkq, do_gqX))
        ds_gkq = torch.bmm(v_gmX[:, keys], do_gqX.transpose(1, 2)).mul_(p_gkq)
        dk_gmD[:, keys].add_(torch.bmm(ds_gkq, plain_q_gplD[:, :, queries].flatten(1, 2)))
        part_gqX = torch.bmm(ds_gkq.transpose(1, 2), k_gkX)
        dq_gplX[:, :, queries].add_(part_gqX.view(*q_gplX.shape[:2], -1, q_gplX.shape[-1]))
    for grad, found, factor in (
        (grads[0], dq_gplX.flatten(0, 1), scale),
        (grads[1], dk_gmD, scale),
        (grads[2], dv_gmX, 1.0),
    ):
        grad.add_(found[..., :dim].transpose(0, 1), alpha=factor)
