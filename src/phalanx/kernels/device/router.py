"""What a router makes of its logits: the choice of experts, their weights and the sums that its losses need, in one launch forward and one backward.

Formulas: `models/router.py`, whose plain operations are the reference. Kept for the backward pass: logits and choice.

Legend: T tokens, E experts, K experts of a token, S sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from phalanx.kernels.device.launch import launch, wide_of

TILE = 2048
"""Numbers that a program holds of each array."""


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """How experts are chosen and weighted."""

    top_k: int
    sigmoid: bool
    after_topk: bool
    renormalize: bool
    scale: float
    tiny: float
    groups: int
    """1: experts are not grouped."""
    groups_kept: int
    group_best: int
    """A group's score is the sum of so many of its largest."""
    counts_free: bool
    """The balance loss counts another choice: that by the scores alone."""


@dataclass(frozen=True, eq=False)
class Choice:
    """What came of it. Gradients flow through the weights, the probabilities and the squares."""

    experts_TK: torch.Tensor
    """int64, best first, the lowest expert first among equals."""
    weights_TK: torch.Tensor
    counts_SE: torch.Tensor
    """int64: pairs of text; here and in all that follows padding is left out."""
    free_counts_SE: torch.Tensor
    """Those of the choice that the balance loss counts."""
    probs_SE: torch.Tensor
    """Sums of each sequence's probabilities."""
    squares: torch.Tensor
    """0-d: sum of `logsumexp(logits)^2`."""
    entropy_sum: torch.Tensor
    """0-d."""


def fused_choice(
    logits_TE: torch.Tensor,
    rule: RouterRule,
    *,
    sequences: int,
    bias_E: torch.Tensor | None,
    is_text_T: torch.Tensor | None = None,
) -> Choice:
    """From fp32 (or fp64) logits, whose rows are `sequences` sequences of one length one after the other. `is_text_T`: bool; None: all are."""
    if logits_TE.dtype == torch.float64 and rule.scale != 1.0:  # programs take numbers in fp32
        choice = Choice(*_Choose.apply(logits_TE, replace(rule, scale=1.0), sequences, bias_E, is_text_T))
        return replace(choice, weights_TK=choice.weights_TK * rule.scale)
    return Choice(*_Choose.apply(logits_TE, rule, sequences, bias_E, is_text_T))


def _tile(num_experts: int, top_k: int) -> dict[str, int]:
    wide = max(16, 1 << (num_experts - 1).bit_length())
    return {"ROWS": max(1, min(64, TILE // wide)), "E2": wide, "K2": 1 << (top_k - 1).bit_length()}


def _settings(rule: RouterRule) -> dict[str, bool]:
    renormalize = rule.renormalize and not rule.after_topk and rule.top_k > 1
    return {"SIGMOID": rule.sigmoid, "AFTER": rule.after_topk, "RENORM": renormalize}


def choice_backward(
    logits_TE: torch.Tensor,
    experts_TK: torch.Tensor,
    rule: RouterRule,
    sequences: int,
    grads: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    is_text_T: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the logits from those of the weights, the probabilities and the squares."""
    d_weights_TK, d_probs_SE, d_squares = grads
    tokens, experts = logits_TE.shape
    d_logits_TE = torch.empty_like(logits_TE)
    if tokens:
        from phalanx.kernels.device.programs import router as programs

        tile, per_sequence = _tile(experts, rule.top_k), tokens // sequences
        some = logits_TE  # stands where nothing is
        launch(
            programs.choose_backward, (-(-per_sequence // tile["ROWS"]), sequences),
            logits_TE, experts_TK, some if d_weights_TK is None else d_weights_TK.contiguous(),
            some if d_probs_SE is None else d_probs_SE.contiguous(), some if d_squares is None else d_squares,
            some if is_text_T is None else is_text_T, d_logits_TE, per_sequence, experts, rule.scale, rule.tiny,
            **_settings(rule), WEIGHTS=d_weights_TK is not None, PROBS=d_probs_SE is not None, SQUARES=d_squares is not None,
            MASKED=is_text_T is not None, TOP_K=rule.top_k, **tile, WIDE=wide_of(logits_TE.dtype), num_warps=4,
        )  # fmt: skip
    return d_logits_TE


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: torch.Tensor,
        rule: RouterRule,
        sequences: int,
        bias_E: torch.Tensor | None,
        is_text_T: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.rule, ctx.sequences = rule, sequences
        logits_TE = logits_TE.contiguous()
        (tokens, experts), top_k, tile = logits_TE.shape, rule.top_k, _tile(logits_TE.shape[1], rule.top_k)
        blocks = -(-(tokens // sequences) // tile["ROWS"])
        experts_TK = torch.empty((tokens, top_k), dtype=torch.int64, device=logits_TE.device)
        weights_TK = logits_TE.new_empty(tokens, top_k)
        wanted = (1 + rule.counts_free, sequences, experts)
        counts = torch.zeros(wanted, dtype=torch.int64, device=logits_TE.device).unbind()
        counts_SE, free_SE = counts if rule.counts_free else 2 * counts
        parts_SbX = logits_TE.new_empty(sequences, blocks, experts + 2)
        if tokens:
            from phalanx.kernels.device.programs import router as programs

            launch(
                programs.choose, (blocks, sequences),
                logits_TE, logits_TE if bias_E is None else bias_E, logits_TE if is_text_T is None else is_text_T,
                experts_TK, weights_TK, counts_SE, free_SE, parts_SbX,
                tokens // sequences, experts, rule.scale, rule.tiny,
                **_settings(rule), BIASED=bias_E is not None, FREE=rule.counts_free, MASKED=is_text_T is not None,
                GROUPS=rule.groups, BEST=rule.group_best, GROUPS_KEPT=rule.groups_kept, TOP_K=top_k,
                **tile, G2=1 << (rule.groups - 1).bit_length(), WIDE=wide_of(logits_TE.dtype), num_warps=4,
            )  # fmt: skip
        sums_SX = parts_SbX.sum(1)
        ctx.save_for_backward(logits_TE, experts_TK, is_text_T)
        probs_SE, rest_S2 = sums_SX.split((experts, 2), 1)
        entropy_sum, squares = (rest_S2.squeeze(0) if sequences == 1 else rest_S2.sum(0)).unbind()
        ctx.mark_non_differentiable(experts_TK, counts_SE, free_SE, entropy_sum)
        return experts_TK, weights_TK, counts_SE, free_SE, probs_SE, squares, entropy_sum

    @staticmethod
    def backward(
        ctx: Any,
        _experts: Any,
        d_weights_TK: torch.Tensor | None,
        _counts: Any,
        _free: Any,
        d_probs_SE: torch.Tensor | None,
        d_squares: torch.Tensor | None,
        _entropy: Any,
    ) -> tuple[torch.Tensor | None, None, None, None, None]:
        logits_TE, experts_TK, is_text_T = ctx.saved_tensors
        grads = (d_weights_TK, d_probs_SE, d_squares)
        d_logits_TE = choice_backward(logits_TE, experts_TK, ctx.rule, ctx.sequences, grads, is_text_T)
        return d_logits_TE, None, None, None, None
