"""The choice of experts and its gradient, a few tokens of one sequence in each program.

Legend: R rows (tokens) of a program, E experts, K experts of a token, G groups. Tiles are as wide as the next power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_of_largest(x_RE, col_1E, last):
    """Column of each row's largest number, the lowest among equals; `last` in a row that holds no number."""
    is_largest_RE = x_RE == tl.max(x_RE, axis=1)[:, None]
    return tl.minimum(tl.min(tl.where(is_largest_RE, col_1E, last), axis=1), last)


@triton.jit
def allowed_columns(
    x_RE, col_1E, num_experts,
    GROUPS: tl.constexpr, BEST: tl.constexpr, GROUPS_KEPT: tl.constexpr, ROWS: tl.constexpr, G2: tl.constexpr,
):  # fmt: skip
    """Whether a column is in one of the best groups, by the sum of a group's `BEST` largest numbers."""
    wide = num_experts // GROUPS
    group_1E, group_1G = col_1E // wide, tl.arange(0, G2)[None, :]
    score_RG = tl.zeros((ROWS, G2), dtype=x_RE.dtype) - float("inf")
    for group in tl.static_range(GROUPS):
        own_RE = tl.where(group_1E == group, x_RE, -float("inf"))
        sum_R = tl.zeros((ROWS,), dtype=x_RE.dtype)
        for _ in tl.static_range(BEST):
            at_R = first_of_largest(own_RE, col_1E, num_experts - 1)
            sum_R += tl.max(own_RE, axis=1)
            own_RE = tl.where(col_1E == at_R[:, None], -float("inf"), own_RE)
        score_RG = tl.where(group_1G == group, sum_R[:, None], score_RG)
    allowed_RE = x_RE != x_RE
    for _ in tl.static_range(GROUPS_KEPT):
        best_R = first_of_largest(score_RG, group_1G, GROUPS - 1)
        allowed_RE = allowed_RE | (group_1E == best_R[:, None])
        score_RG = tl.where(group_1G == best_R[:, None], -float("inf"), score_RG)
    return allowed_RE


@triton.jit
def choose(
    logits, bias, is_text, experts, weights, counts, free_counts, parts, per_sequence, num_experts, scale, tiny,
    SIGMOID: tl.constexpr, AFTER: tl.constexpr, RENORM: tl.constexpr, BIASED: tl.constexpr, FREE: tl.constexpr, MASKED: tl.constexpr,
    GROUPS: tl.constexpr, BEST: tl.constexpr, GROUPS_KEPT: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, E2: tl.constexpr, K2: tl.constexpr, G2: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, sequences). `parts` (sequences, blocks, E + 2): sums over rows of the probabilities, of their entropy, of `logsumexp(logits)^2`. Masked, only rows of text count."""
    block, sequence = tl.program_id(0), tl.program_id(1)
    row_R, col_1E, k_1K = block * ROWS + tl.arange(0, ROWS), tl.arange(0, E2)[None, :], tl.arange(0, K2)[None, :]
    here_R, is_col_1E, last = row_R < per_sequence, col_1E < num_experts, num_experts - 1
    token_R = sequence.to(tl.int64) * per_sequence + row_R
    at_RE = logits + token_R[:, None] * num_experts + col_1E
    x_RE = tl.load(at_RE, mask=here_R[:, None] & is_col_1E, other=0.0).to(WIDE)
    x_RE = tl.where(is_col_1E, x_RE, -float("inf"))
    largest_R = tl.max(x_RE, axis=1)
    exp_RE = tl.exp(x_RE - largest_R[:, None])
    sum_R = tl.sum(exp_RE, axis=1)
    log_sum_R = largest_R + tl.log(sum_R)
    if SIGMOID:
        score_RE = tl.where(is_col_1E, 1.0 / (1.0 + tl.exp(-x_RE)), 0.0)
        prob_RE = score_RE / (tl.sum(score_RE, axis=1) + tiny)[:, None]
    else:
        score_RE = exp_RE / sum_R[:, None]
        prob_RE = score_RE
    value_RE, rank_RE = score_RE, score_RE
    if AFTER:
        value_RE = x_RE
        if not SIGMOID:
            rank_RE = x_RE
    rank_RE = tl.where(is_col_1E, rank_RE, -float("inf"))
    if BIASED:
        rank_RE += tl.load(bias + col_1E, mask=is_col_1E, other=0.0).to(WIDE)
    if GROUPS_KEPT < GROUPS:
        allowed_RE = allowed_columns(rank_RE, col_1E, num_experts, GROUPS, BEST, GROUPS_KEPT, ROWS, G2)
        rank_RE = tl.where(allowed_RE, rank_RE, -float("inf"))
    chosen_RK = tl.zeros((ROWS, K2), dtype=WIDE)
    hits_RE = tl.zeros((ROWS, E2), dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        expert_R = first_of_largest(rank_RE, col_1E, last)
        tl.store(experts + token_R * TOP_K + k, expert_R.to(tl.int64), mask=here_R)
        is_it_RE = col_1E == expert_R[:, None]
        chosen_RK = tl.where(k_1K == k, tl.sum(tl.where(is_it_RE, value_RE, 0.0), axis=1)[:, None], chosen_RK)
        hits_RE += is_it_RE.to(tl.int32)
        rank_RE = tl.where(is_it_RE, -float("inf"), rank_RE)
    if AFTER:
        chosen_RK = tl.where(k_1K < TOP_K, chosen_RK, -float("inf"))
        chosen_RK = tl.exp(chosen_RK - tl.max(chosen_RK, axis=1)[:, None])
        chosen_RK = chosen_RK / tl.sum(chosen_RK, axis=1)[:, None]
    if RENORM:
        chosen_RK = chosen_RK / (tl.sum(chosen_RK, axis=1) + tiny)[:, None]
    chosen_RK = tl.where((log_sum_R == log_sum_R)[:, None], chosen_RK, float("nan"))
    tl.store(weights + token_R[:, None] * TOP_K + k_1K, chosen_RK * scale, mask=here_R[:, None] & (k_1K < TOP_K))
    if MASKED:
        here_R = here_R & (tl.load(is_text + token_R, mask=here_R, other=0) != 0)
    hits_1E = tl.sum(tl.where(here_R[:, None], hits_RE, 0), axis=0)[None, :]
    tl.atomic_add(counts + sequence * num_experts + col_1E, hits_1E.to(tl.int64), mask=is_col_1E & (hits_1E > 0))
    if FREE:
        rank_RE = tl.where(is_col_1E, score_RE, -float("inf"))
        hits_RE = tl.zeros((ROWS, E2), dtype=tl.int32)
        for _ in tl.static_range(TOP_K):
            is_it_RE = col_1E == first_of_largest(rank_RE, col_1E, last)[:, None]
            hits_RE += is_it_RE.to(tl.int32)
            rank_RE = tl.where(is_it_RE, -float("inf"), rank_RE)
        hits_1E = tl.sum(tl.where(here_R[:, None], hits_RE, 0), axis=0)[None, :]
        tl.atomic_add(
            free_counts + sequence * num_experts + col_1E, hits_1E.to(tl.int64), mask=is_col_1E & (hits_1E > 0)
        )
    own = parts + (sequence.to(tl.int64) * tl.num_programs(0) + block) * (num_experts + 2)
    prob_RE = tl.where(here_R[:, None], prob_RE, 0.0)
    tl.store(own + col_1E, tl.sum(prob_RE, axis=0)[None, :], mask=is_col_1E)
    entropy_RE = tl.where(prob_RE > 0.0, -prob_RE * tl.log(tl.where(prob_RE > 0.0, prob_RE, 1.0)), prob_RE)
    tl.store(own + num_experts, tl.sum(entropy_RE))
    tl.store(own + num_experts + 1, tl.sum(tl.where(here_R, log_sum_R * log_sum_R, 0.0)))


@triton.jit
def choose_backward(
    logits, experts, d_weights, d_probs, d_squares, is_text, d_logits, per_sequence, num_experts, scale, tiny,
    SIGMOID: tl.constexpr, AFTER: tl.constexpr, RENORM: tl.constexpr, WEIGHTS: tl.constexpr, PROBS: tl.constexpr, SQUARES: tl.constexpr,
    MASKED: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, E2: tl.constexpr, K2: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, sequences). From gradients of the weights, of each sequence's sums of probabilities, and of the sum of squares."""
    sequence, row_R = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col_1E, k_1K = tl.arange(0, E2)[None, :], tl.arange(0, K2)[None, :]
    here_R1, is_col_1E = (row_R < per_sequence)[:, None], col_1E < num_experts
    token_R1 = (sequence.to(tl.int64) * per_sequence + row_R)[:, None]
    x_RE = tl.load(logits + token_R1 * num_experts + col_1E, mask=here_R1 & is_col_1E, other=0.0).to(WIDE)
    x_RE = tl.where(is_col_1E, x_RE, -float("inf"))
    largest_R = tl.max(x_RE, axis=1)
    exp_RE = tl.exp(x_RE - largest_R[:, None])
    sum_R = tl.sum(exp_RE, axis=1)
    soft_RE = exp_RE / sum_R[:, None]
    score_RE = soft_RE
    if SIGMOID:
        score_RE = tl.where(is_col_1E, 1.0 / (1.0 + tl.exp(-x_RE)), 0.0)
    value_RE = score_RE
    if AFTER:
        value_RE = x_RE
    d_value_RE = tl.zeros((ROWS, E2), dtype=WIDE)
    if WEIGHTS:
        chosen_RK = tl.zeros((ROWS, K2), dtype=WIDE)
        for k in tl.static_range(TOP_K):
            is_it_RE = col_1E == tl.load(experts + token_R1 * TOP_K + k, mask=here_R1, other=0)
            chosen_RK = tl.where(k_1K == k, tl.sum(tl.where(is_it_RE, value_RE, 0.0), axis=1)[:, None], chosen_RK)
        d_RK = tl.load(d_weights + token_R1 * TOP_K + k_1K, mask=here_R1 & (k_1K < TOP_K), other=0.0).to(WIDE) * scale
        if AFTER:
            chosen_RK = tl.where(k_1K < TOP_K, chosen_RK, -float("inf"))
            chosen_RK = tl.exp(chosen_RK - tl.max(chosen_RK, axis=1)[:, None])
            chosen_RK = chosen_RK / tl.sum(chosen_RK, axis=1)[:, None]
            d_RK = chosen_RK * (d_RK - tl.sum(chosen_RK * d_RK, axis=1)[:, None])
        if RENORM:
            all_R = tl.sum(chosen_RK, axis=1) + tiny
            d_RK = (d_RK - (tl.sum(chosen_RK * d_RK, axis=1) / all_R)[:, None]) / all_R[:, None]
        for k in tl.static_range(TOP_K):
            is_it_RE = col_1E == tl.load(experts + token_R1 * TOP_K + k, mask=here_R1, other=0)
            d_value_RE += tl.where(is_it_RE, tl.sum(tl.where(k_1K == k, d_RK, 0.0), axis=1)[:, None], 0.0)
    d_x_RE = tl.zeros((ROWS, E2), dtype=WIDE)
    d_score_RE = d_value_RE
    if AFTER:
        d_x_RE = d_value_RE
        d_score_RE = tl.zeros((ROWS, E2), dtype=WIDE)
    if PROBS:
        d_1E = tl.load(d_probs + sequence * num_experts + col_1E, mask=is_col_1E, other=0.0).to(WIDE)
        if MASKED:
            is_text_R1 = tl.load(is_text + token_R1, mask=here_R1, other=0) != 0
            d_1E = tl.where(is_text_R1, d_1E, 0.0)  # of each row now
        if SIGMOID:
            all_R1 = (tl.sum(score_RE, axis=1) + tiny)[:, None]
            d_score_RE += (d_1E - tl.sum(d_1E * score_RE, axis=1)[:, None] / all_R1) / all_R1
        else:
            d_score_RE += d_1E
    if SIGMOID:
        d_x_RE += d_score_RE * score_RE * (1.0 - score_RE)
    else:
        d_x_RE += soft_RE * (d_score_RE - tl.sum(soft_RE * d_score_RE, axis=1)[:, None])
    if SQUARES:
        d_log_sum_R1 = (2.0 * tl.load(d_squares).to(WIDE) * (largest_R + tl.log(sum_R)))[:, None]
        if MASKED:
            d_log_sum_R1 = tl.where(tl.load(is_text + token_R1, mask=here_R1, other=0) != 0, d_log_sum_R1, 0.0)
        d_x_RE += soft_RE * d_log_sum_R1
    tl.store(d_logits + token_R1 * num_experts + col_1E, d_x_RE, mask=here_R1 & is_col_1E)
