"""Operations with the shapes of real models, on fake tensors of a GPU: forward as models call them, backward as autograd would (which fake devices lack)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from phalanx.kernels.device.adamw import AdamRule, RunTable, fused_adamw
from phalanx.kernels.device.cross_entropy import LossWork, losses_and_gradients, scaled
from phalanx.kernels.device.norm import norm_backward, norm_forward
from phalanx.kernels.device.rope import normed_turn_backward, turn
from phalanx.kernels.device.router import RouterRule, choice_backward, fused_choice
from phalanx.kernels.device.sorting import ends_of_groups, sort_keys, zero_empty_groups
from phalanx.kernels.device.sums import device_checksums
from phalanx.kernels.device.swiglu import swiglu_backward
from phalanx.kernels.device.three_parts import wide_product_backward
from phalanx.kernels.ops.adamw import adamw_
from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.kernels.ops.permute import combine_rows, gather_rows
from phalanx.kernels.ops.rope import HeadNorms, RopeTable, apply_rope
from phalanx.kernels.ops.square_sum import square_sums
from phalanx.kernels.ops.swiglu import swiglu

DTYPES = (torch.bfloat16, torch.float32)
TOKENS, HIDDEN = 4096, 2048
"""A micro-batch of Qwen3-30B-A3B."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def experts(dtype: torch.dtype, width: int) -> None:
    gate_up, weights = empty(8 * TOKENS, 2, width, dtype=dtype), empty(8 * TOKENS)
    y = swiglu(gate_up, row_weights_M=weights)
    swiglu_backward(gate_up, weights, y)
    swiglu_backward(gate_up, weights, y, d_gate_up_M2F=gate_up, y_MF=y)


def permute(dtype: torch.dtype) -> None:
    x, token_of_row = empty(TOKENS, HIDDEN, dtype=dtype), empty(8 * TOKENS, dtype=torch.int64)
    rows_of_token = empty(TOKENS, 8, dtype=torch.int64)
    rows = gather_rows(x, token_of_row, rows_of_token_TK=rows_of_token)
    combine_rows(rows, rows_of_token, token_of_row_M=token_of_row)


def loss(dtype: torch.dtype, vocab: int, *, programs: bool, ranks: int = 1, chunk: int | None = None) -> None:
    hidden, weight = empty(TOKENS, HIDDEN, dtype=dtype), empty(vocab // ranks, HIDDEN, dtype=dtype)
    gather = (lambda x: x.new_empty(ranks, *x.shape)) if ranks > 1 else None
    how = LossWork(ignore=IGNORE, gather=gather, programs=programs, chunk=chunk)
    value, *gradients = losses_and_gradients(hidden, weight, empty(TOKENS, dtype=torch.int64), how, needs=(True, True))
    for gradient in gradients:
        scaled(gradient, value, programs=programs)


def rope(dtype: torch.dtype, heads: int, keys: int, dim: int) -> None:
    q, k = empty(1, TOKENS, heads, dim, dtype=dtype), empty(1, TOKENS, keys, dim, dtype=dtype)
    table = RopeTable(empty(1, TOKENS, dim // 2), empty(1, TOKENS, dim // 2))
    turned = apply_rope(q, k, table=table)
    turn(*turned, table.cos_BSN, table.sin_BSN, back=True)


def normed_rope(dtype: torch.dtype, heads: int, keys: int, dim: int) -> None:
    q, k = empty(1, TOKENS, heads, dim, dtype=dtype), empty(1, TOKENS, keys, dim, dtype=dtype)
    table, weights = RopeTable(empty(1, TOKENS, dim // 2), empty(1, TOKENS, dim // 2)), 2 * [empty(dim, dtype=dtype)]
    turned = apply_rope(q, k, table=table, norms=HeadNorms(*weights, 1e-6))  # type: ignore[call-arg]
    normed_turn_backward((q, k), (weights[0], weights[1]), 1e-6, (table.cos_BSN, table.sin_BSN), turned)


def norm(dtype: torch.dtype, rows: int, width: int) -> None:
    x, delta, weight = empty(rows, width, dtype=dtype), empty(rows, width, dtype=dtype), empty(width, dtype=dtype)
    stream, y, scale = norm_forward(x, delta, weight, 1e-6)
    norm_backward(stream, scale, weight, y, stream)
    _, y, scale = norm_forward(x, None, weight, 1e-6)
    norm_backward(x, scale, weight, y, None)


def route(experts: int, *, grouped: bool, padded: bool = False) -> None:
    rule = RouterRule(
        top_k=8, sigmoid=grouped, after_topk=False, renormalize=True, scale=1.0, tiny=1e-20, groups=8 if grouped else 1,
        groups_kept=4 if grouped else 1, group_best=2, counts_free=grouped,
    )  # fmt: skip
    logits = empty(TOKENS, experts)
    is_text_T = empty(TOKENS, dtype=torch.bool) if padded else None
    choice = fused_choice(logits, rule, sequences=1, bias_E=empty(experts) if grouped else None, is_text_T=is_text_T)
    grads = choice.weights_TK, choice.probs_SE, choice.squares
    choice_backward(logits, choice.experts_TK, rule, 1, grads, is_text_T)


def logits_backward(experts: int) -> None:
    x, w = (empty(rows, HIDDEN, dtype=torch.bfloat16) for rows in (TOKENS, experts))
    wide_product_backward(empty(TOKENS, experts), x, w)


def sort(experts: int) -> None:
    sort_keys(empty(8 * TOKENS, dtype=torch.int64), experts)
    ends = ends_of_groups(empty(8, experts, dtype=torch.int64), 0, experts // 8)
    zero_empty_groups(ends, *(empty(experts // 8, HIDDEN, width, dtype=torch.bfloat16) for width in (1536, 768)))


def adamw(dtype: torch.dtype) -> None:
    size, rule = 48 * TOKENS * HIDDEN, AdamRule(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=7)
    state = (empty(size), empty(size), empty(size))
    grad, out = empty(size // 2, dtype=dtype), empty(2 * size, dtype=torch.bfloat16)
    table = RunTable(runs_R4=empty(194, 4, dtype=torch.int64), start=size // 4)
    fused_adamw(state, grad, out, rule, scale=0.5, table=table)
    narrow = empty(size, dtype=torch.bfloat16)
    fused_adamw((state[0], narrow, narrow), grad, out, rule, scale=0.5, table=table)
    adamw_(empty(1000), empty(1000, dtype=dtype), empty(1000), empty(1000), scale=empty(), **vars(rule))


def sums(dtype: torch.dtype) -> None:
    tensors = [empty(48 * TOKENS * HIDDEN, dtype=dtype), empty(HIDDEN, dtype=dtype)]
    square_sums(tensors)
    device_checksums(tensors)


def calls() -> dict[str, Callable[[], object]]:
    """Each is called once, under fake tensors."""
    found: dict[str, Callable[[], object]] = {}
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        found[f"permute {name}"] = partial(permute, dtype)
        found[f"adamw {name}"] = partial(adamw, dtype)
        found[f"sums {name}"] = partial(sums, dtype)
        found[f"rope {name}"] = partial(rope, dtype, 32, 4, 128)
        found[f"rope of normed heads {name}"] = partial(normed_rope, dtype, 32, 4, 128)
        found[f"rope of wide normed heads {name}"] = partial(normed_rope, dtype, 64, 8, 256)
        found[f"rope of a latent {name}"] = partial(rope, dtype, 128, 1, 64)
        for rows, width in ((TOKENS, HIDDEN), (32 * TOKENS, 128), (TOKENS, 7168)):
            found[f"norm {width} {name}"] = partial(norm, dtype, rows, width)
        found[f"loss in chunks {name}"] = partial(loss, dtype, 151_936, programs=True, chunk=TOKENS // 4)
        for vocab in (151_936, 32_000):
            found[f"loss {vocab} {name}"] = partial(loss, dtype, vocab, programs=True)
            found[f"plain loss {vocab} {name}"] = partial(loss, dtype, vocab, programs=False)
        found[f"loss of a shard {name}"] = partial(loss, dtype, 151_936, programs=True, ranks=8)
        found[f"plain loss of a shard {name}"] = partial(loss, dtype, 151_936, programs=False, ranks=8)
        for count in (8, 128, 256):
            found[f"route {count} {name}"] = partial(route, count, grouped=count == 256)
            found[f"route {count} with padding {name}"] = partial(route, count, grouped=count == 256, padded=True)
            found[f"logits {count} {name}"] = partial(logits_backward, count)
            found[f"sort {count} {name}"] = partial(sort, count)
        found |= {f"swiglu {width} {name}": partial(experts, dtype, width) for width in (768, 14336)}
    return found
