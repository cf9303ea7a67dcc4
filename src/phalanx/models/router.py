"""The router: which experts each token goes to, with which weights, and the losses that keep the choice balanced.

Must never change: the result for a token depends on that token's logits, the expert bias and nothing else; equal scores go to the
lowest expert id. Logits and scores are fp32 at least (fp64 in fp64).

Losses come out as this rank's shares: their sum over all ranks and micro-batches of a step is the term of the objective, so no
mapping changes it and gradients are plain sums (`dense_replicated` in `plan/mapping/folding.py`). Tokens are those of text: padding counts
in no loss, nor in what moves the expert bias and is reported, and is sent to no expert (`runtime/moe/dispatch.py`). With f = how often each expert was chosen (before
dropping, without bias and group limits; no gradient) and p = softmax of the logits (for `sigmoid`: the scores divided by their sum):

    micro_batch   mean over micro-batches of   coef * E / (K T^2) * sum_i f_i * sum_x p_i(x)     (T tokens of the micro-batch)
    sequence      mean over sequences of the same, with the tokens of one sequence
    global_batch  the same, with all tokens of the step
    z-loss        mean over micro-batches of   coef * mean over tokens of logsumexp(logits)^2

Without padding the last is the mean over all tokens of the step.

Sources: arXiv 2101.03961 section 2.2 (balance loss), 2202.08906 (z-loss), 2408.15664 (expert bias), 2412.19437 (groups, sequence-wise loss).

Legend: T local tokens, B (of a choice S) sequences, H hidden, E experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.core.errors import RunError
from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.cpu.shapes import cache_blocks
from phalanx.kernels.device import Choice, RouterRule, fused_choice, runs_programs, wide_product_backward
from phalanx.models.context import ForwardInfo, ModelContext, Text
from phalanx.models.layers import new_parameter
from phalanx.plan.model import RouterSpec
from phalanx.plan.moe import forced_experts
from phalanx.plan.program import op_id
from phalanx.runtime.moe import count_keys

TINY = 1e-20
"""Added to a sum that divides, as the published models do."""


@dataclass(frozen=True, eq=False)
class Routing:
    """What the router decided for the tokens of this rank. `weights_TK` carries the gradient of the main loss."""

    experts_TK: torch.Tensor
    """int64, best first."""
    weights_TK: torch.Tensor
    """fp32 or wider."""
    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    counts_E: torch.Tensor
    balance_counts_E: torch.Tensor
    entropy_sum: torch.Tensor


class Router(nn.Module):
    """Replicated on every rank; each routes its own tokens."""

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        self.weight = new_parameter(ctx, f"layers.{layer}.moe.router.weight")
        self.spec = ctx.spec.router
        self.num_experts, self.top_k = ctx.spec.num_experts, ctx.spec.top_k
        self.layer, self.moe_index = layer, ctx.spec.moe_layers.index(layer)
        self.groups, self.comms, self.seed, self.lanes = ctx.groups, ctx.comms, ctx.seed, ctx.lanes
        self.impl: Impl = ctx.kernels
        self.expert_bias: torch.Tensor | None
        bias = torch.zeros(self.num_experts, dtype=torch.float32, device=ctx.device) if self.spec.bias_rate else None
        self.register_buffer("expert_bias", bias)
        self.rule = self._rule()
        self.no_loss = torch.zeros((), dtype=torch.promote_types(ctx.dtype, torch.float32), device=ctx.device)
        """Of losses that are not asked for; nobody writes to it."""

    def forward(
        self,
        x_TH: torch.Tensor,
        info: ForwardInfo,
        *,
        num_sequences: int,
        token_index_T: torch.Tensor | None = None,
        text: Text | None = None,
    ) -> Routing:
        """Route `x_TH`, whose rows are `num_sequences` sequences (or equal parts of them), one after the other.

        `token_index_T`: place of each row in the micro-batch (None: they are all here, in order). `text`: which rows count (None: all).
        """
        logits_TE = router_logits(x_TH, self.weight, impl=self.impl, lanes=self.lanes)
        apart = num_sequences if self.spec.aux_loss and self.spec.aux_scope == "sequence" else 1
        is_text_T = None if text is None else text.is_text_T
        if self.impl == "fast" and self.spec.force == "none" and runs_programs(logits_TE):
            choice = fused_choice(logits_TE, self.rule, sequences=apart, bias_E=self.expert_bias, is_text_T=is_text_T)
        else:
            choice = self._plain_choice(logits_TE, info, token_index_T, sequences=apart, is_text_T=is_text_T)
        counts_E = _over_sequences(choice.counts_SE)
        balance_E = counts_E if choice.free_counts_SE is choice.counts_SE else _over_sequences(choice.free_counts_SE)
        tokens = len(logits_TE) * self.groups.axis("micro").size if text is None else text.tokens
        return Routing(
            experts_TK=choice.experts_TK,
            weights_TK=choice.weights_TK,
            aux_loss=self._aux_loss(choice, len(logits_TE), balance_E, info, text=text),
            z_loss=self._z_loss(choice.squares, tokens, info),
            counts_E=counts_E,
            balance_counts_E=balance_E,
            entropy_sum=choice.entropy_sum,
        )

    def _rule(self) -> RouterRule:
        spec, limited = self.spec, self.spec.num_groups > 1 and self.spec.group_topk < self.spec.num_groups
        is_free = self.expert_bias is None and spec.num_groups == 1
        return RouterRule(
            top_k=self.top_k,
            sigmoid=spec.score == "sigmoid",
            after_topk=spec.softmax_order == "after_topk",
            renormalize=spec.renormalize,
            scale=spec.scale,
            tiny=TINY,
            groups=spec.num_groups if limited else 1,
            groups_kept=spec.group_topk if limited else 1,
            group_best=_best_of_group(spec, self.top_k, self.num_experts // spec.num_groups),
            counts_free=bool(spec.aux_loss) and not is_free and spec.force == "none",
        )

    def _plain_choice(
        self,
        logits_TE: torch.Tensor,
        info: ForwardInfo,
        token_index_T: torch.Tensor | None,
        *,
        sequences: int,
        is_text_T: torch.Tensor | None = None,
    ) -> Choice:
        scores_TE = torch.sigmoid(logits_TE) if self.spec.score == "sigmoid" else torch.softmax(logits_TE, -1)
        with torch.no_grad():
            experts_TK = self._choose(logits_TE, scores_TE, info, token_index_T)
            free_SE = counts_SE = self._count(experts_TK, sequences, is_text_T)
            if self.rule.counts_free:
                free_SE = self._count(largest(scores_TE, self.top_k), sequences, is_text_T)
        weights_TK = routing_weights(logits_TE, scores_TE, experts_TK, self.spec)
        probs_TE = scores_TE
        if self.spec.score == "sigmoid":
            probs_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + TINY)
        probs_TE = _of_text(probs_TE, is_text_T)
        with torch.no_grad():
            entropy_sum = torch.special.entr(probs_TE).sum()
        none = logits_TE.new_zeros(())
        return Choice(
            experts_TK=experts_TK,
            weights_TK=weights_TK,
            counts_SE=counts_SE,
            free_counts_SE=free_SE,
            probs_SE=_sums(probs_TE, sequences) if self.spec.aux_loss else none,
            squares=_of_text(torch.logsumexp(logits_TE, -1).square(), is_text_T).sum() if self.spec.z_loss else none,
            entropy_sum=entropy_sum,
        )

    def _count(self, experts_TK: torch.Tensor, sequences: int, is_text_T: torch.Tensor | None = None) -> torch.Tensor:
        """(S, E) int64 pairs of each sequence, of its text alone where that is told."""
        if sequences == 1 and is_text_T is None:
            return count_keys(experts_TK.flatten(), self.num_experts).unsqueeze(0)
        rows = torch.arange(sequences, device=experts_TK.device).repeat_interleave(experts_TK.shape[0] // sequences)
        shifted_TK = experts_TK + self.num_experts * rows.unsqueeze(1)
        every = sequences * self.num_experts
        if is_text_T is None:
            return count_keys(shifted_TK.flatten(), every).view(sequences, -1)
        shifted_TK = torch.where(is_text_T.unsqueeze(1), shifted_TK, every)  # padding behind the last
        return count_keys(shifted_TK.flatten(), every + 1)[:-1].view(sequences, -1)

    @staticmethod
    def wide(x_TH: torch.Tensor) -> torch.dtype:
        """Wide type in which logits and weights are computed."""
        return torch.promote_types(x_TH.dtype, torch.float32)

    def no_counts(self, x_TH: torch.Tensor, info: ForwardInfo) -> torch.Tensor:
        """(E,) zeros: what a rank without a micro-batch adds to the counts that ranks add up."""
        none_E = torch.zeros(self.num_experts, dtype=torch.int64, device=x_TH.device)
        if self.spec.aux_loss and self.spec.aux_scope == "global_batch":
            self._global_counts(none_E, info, tokens=1)
        return none_E

    def _choose(
        self, logits_TE: torch.Tensor, scores_TE: torch.Tensor, info: ForwardInfo, index_T: torch.Tensor | None
    ) -> torch.Tensor:
        if self.spec.force != "none":
            return self._forced(logits_TE, info, index_T)
        by_logits = self.spec.score == "softmax" and self.spec.softmax_order == "after_topk"
        return choose_experts(
            logits_TE if by_logits else scores_TE, top_k=self.top_k, spec=self.spec, bias_E=self.expert_bias
        )

    def _forced(self, logits_TE: torch.Tensor, info: ForwardInfo, index_T: torch.Tensor | None) -> torch.Tensor:
        """A workload in place of the choice; each rank takes its tokens' places in the micro-batch."""
        axis, n = self.groups.axis("micro"), logits_TE.shape[0]
        assert self.spec.force != "none"
        experts = forced_experts(
            self.spec.force,
            num_tokens=n * axis.size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            seed=self.seed,
            step=info.step,
            layer=self.layer,
            skew=self.spec.force_skew,
        )
        chosen_NK = torch.from_numpy(experts).to(logits_TE.device, non_blocking=True)
        return chosen_NK if index_T is None else chosen_NK[index_T]

    # ---- losses --------------------------------------------------------------------------------------------------------

    def _aux_loss(
        self, choice: Choice, num_tokens: int, balance_E: torch.Tensor, info: ForwardInfo, *, text: Text | None
    ) -> torch.Tensor:
        spec, axis = self.spec, self.groups.axis("micro")
        if not spec.aux_loss:
            return self.no_loss
        tokens = max(num_tokens * axis.size, 1)
        factor = spec.aux_loss * self.num_experts / self.top_k
        if spec.aux_scope == "global_batch":
            tokens *= info.num_microbatches
            counts_E = self._global_counts(balance_E, info, tokens=tokens)
            return factor / tokens**2 * _dot(counts_E, choice.probs_SE[0])
        if spec.aux_scope == "micro_batch":
            counts_E = self.comms.all_reduce(balance_E.clone(), axis, op_id=self._id(info, "balance"))
            tokens = tokens if text is None else max(text.tokens, 1)
            return factor / (tokens**2 * info.num_microbatches) * _dot(counts_E, choice.probs_SE[0])
        num_sequences = len(choice.free_counts_SE)
        axis, shares = self.groups.axis("tp_cp"), axis.size // self.groups.axis("tp_cp").size
        per_sequence = max(tokens // (num_sequences * shares), 1)
        counts_SE = self.comms.all_reduce(choice.free_counts_SE.clone(), axis, op_id=self._id(info, "balance"))
        every = num_sequences * shares * info.num_microbatches
        if text is not None:
            squares_S1 = text.tokens_B.to(choice.probs_SE.dtype).square().unsqueeze(1)
            return factor / every * _dot(counts_SE, choice.probs_SE / squares_S1)
        return factor / (per_sequence**2 * every) * _dot(counts_SE, choice.probs_SE)

    def _global_counts(self, balance_E: torch.Tensor, info: ForwardInfo, *, tokens: int) -> torch.Tensor:
        """`counts_of_text` of the whole step's `tokens`: handed in, or (one micro-batch a rank) summed here, or unknown in the pass that finds them."""
        if info.balance_counts_LE is not None:
            return info.balance_counts_LE[self.moe_index]
        if info.num_microbatches == self.groups.folding.replicas if info.rounds is None else info.rounds == 1:
            counts_E = self.comms.all_reduce(
                balance_E.clone(), self.groups.axis("tp_dp_cp"), op_id=self._id(info, "balance")
            )
            return counts_of_text(counts_E, pairs=tokens * self.top_k)
        if torch.is_grad_enabled():
            raise RunError(
                "router.aux_scope = global_batch with several micro-batches a rank needs the step's counts before the "
                "forward pass (ForwardInfo.balance_counts_LE)"
            )
        return torch.zeros_like(balance_E)

    def _z_loss(self, squares: torch.Tensor, tokens: int, info: ForwardInfo) -> torch.Tensor:
        """`tokens`: of the whole micro-batch."""
        if not self.spec.z_loss:
            return self.no_loss
        return self.spec.z_loss / max(tokens * info.num_microbatches, 1) * squares

    def _id(self, info: ForwardInfo, what: str) -> str:
        return op_id(f"router.{what}", microbatch=info.microbatch, layer=self.layer, phase=info.phase)


# ---- the choice, as functions ----------------------------------------------------------------------------------------------


def choose_experts(
    scores_TE: torch.Tensor, *, top_k: int, spec: RouterSpec, bias_E: torch.Tensor | None = None
) -> torch.Tensor:
    """(T, K) experts with the largest scores (bias added for the choice only), within the best groups where they are limited."""
    if bias_E is not None:
        scores_TE = scores_TE + bias_E
    if spec.num_groups > 1 and spec.group_topk < spec.num_groups:
        scores_TE = scores_TE.masked_fill(~_allowed(scores_TE, top_k=top_k, spec=spec), -torch.inf)
    return largest(scores_TE, top_k)


def _allowed(scores_TE: torch.Tensor, *, top_k: int, spec: RouterSpec) -> torch.Tensor:
    """(T, E) whether the expert's group is among the token's best `group_topk`."""
    grouped_TGe = scores_TE.unflatten(-1, (spec.num_groups, -1))
    best = _best_of_group(spec, top_k, grouped_TGe.shape[-1])
    group_scores_TG = grouped_TGe.topk(best, dim=-1).values.sum(-1)
    chosen_Tg = largest(group_scores_TG, spec.group_topk)
    allowed_TG = torch.zeros_like(group_scores_TG, dtype=torch.bool).scatter_(-1, chosen_Tg, True)
    return allowed_TG.repeat_interleave(grouped_TGe.shape[-1], dim=-1)


def _best_of_group(spec: RouterSpec, top_k: int, size: int) -> int:
    """So many of a group's scores count for it."""
    return min({"top2": 2, "max": 1, "sum_topk": max(top_k // spec.group_topk, 1)}[spec.group_score], size)


def largest(scores_TE: torch.Tensor, k: int) -> torch.Tensor:
    """(T, k) indices of the largest scores, best first, the lowest index first among equals.

    `torch.topk` leaves the order of equals open; the index that `torch.max` returns is documented to be the first.
    """
    if scores_TE.device.type != "cpu":  # one launch for 2k
        return torch.sort(scores_TE, dim=-1, descending=True, stable=True).indices[:, :k].contiguous()
    found = [scores_TE.max(-1).indices]
    left_TE = scores_TE
    for _ in range(k - 1):
        left_TE = left_TE.scatter(-1, found[-1].unsqueeze(-1), -torch.inf)
        found.append(left_TE.max(-1).indices)
    return torch.stack(found, -1)


def routing_weights(
    logits_TE: torch.Tensor, scores_TE: torch.Tensor, experts_TK: torch.Tensor, spec: RouterSpec
) -> torch.Tensor:
    """(T, K) weights of the chosen experts, from the unbiased scores.

    A single chosen weight is never divided by itself (Megatron-LM does the same): that would cut the router's gradient.
    """
    if spec.softmax_order == "after_topk":
        weights_TK = torch.softmax(logits_TE.gather(-1, experts_TK), -1)
    else:
        weights_TK = scores_TE.gather(-1, experts_TK)
        if spec.renormalize and experts_TK.shape[-1] > 1:
            weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + TINY)
    return weights_TK * spec.scale if spec.scale != 1.0 else weights_TK


def counts_of_text(counts_E: torch.Tensor, *, pairs: int) -> torch.Tensor:
    """(..., E) fp64 counts of a whole step, by which a loss that divides by all tokens squared is one of text alone.

    No rank knows how many tokens of others are padding, but all know how many pairs of text were counted, of `pairs` that there are. Where
    all are text nothing changes, to the last bit.
    """
    counts_E = counts_E.to(torch.float64)
    of_text = counts_E.sum(-1, keepdim=True).clamp(min=1.0)
    share = of_text / torch.full_like(
        of_text, pairs
    )  # a tensor: devices multiply by the inverse of a number, which is not exact
    return counts_E / share.square()


def update_expert_bias(bias_E: torch.Tensor, counts_E: torch.Tensor, rate: float) -> None:
    """Updates in place `bias += rate * sign(mean - count)` (arXiv 2408.15664, algorithm 1).

    `counts_E` (integers) counts the text of the whole step: all micro-batches, summed over tp_dp_cp. Compared in integers, so exact.
    """
    counts_E = counts_E.to(torch.int64)
    bias_E.add_(torch.sign(counts_E.sum() - counts_E * counts_E.numel()).to(bias_E.dtype), alpha=rate)


def _of_text(x_T: torch.Tensor, is_text_T: torch.Tensor | None) -> torch.Tensor:
    """(T, ...) with zeros in the rows of padding."""
    if is_text_T is None:
        return x_T
    return torch.where(is_text_T if x_T.dim() == 1 else is_text_T.unsqueeze(1), x_T, 0.0)


def _sums(probs_TE: torch.Tensor, sequences: int) -> torch.Tensor:
    """(S, E)."""
    return probs_TE.sum(0, keepdim=True) if sequences == 1 else probs_TE.unflatten(0, (sequences, -1)).sum(1)


def _over_sequences(counts_SE: torch.Tensor) -> torch.Tensor:
    return counts_SE[0] if len(counts_SE) == 1 else counts_SE.sum(0)


def _dot(counts: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    return (counts.detach().to(probs.dtype) * probs).sum()


def router_logits(
    x_TH: torch.Tensor, w_EH: torch.Tensor, *, impl: Impl = "fast", lanes: Lanes = SERIAL
) -> torch.Tensor:
    """(T, E) `x w^T` in fp32 at least, keeping only the narrow `x` for the backward pass."""
    out: torch.Tensor = _Logits.apply(x_TH, w_EH, impl, lanes)
    return out


class _Logits(torch.autograd.Function):
    """Block by block, so that the wide copy of a block never leaves the cache of the core that makes it. Blocks depend on the shape alone."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, w_EH: torch.Tensor, impl: Impl, lanes: Lanes) -> torch.Tensor:
        ctx.save_for_backward(x_TH, w_EH)
        ctx.lanes = lanes
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        is_narrow = x_TH.dtype == w_EH.dtype == torch.bfloat16  # whose products are exact in fp32
        on_tensor_cores = x_TH.is_cuda and is_narrow and lanes.sums is None
        ctx.in_parts = on_tensor_cores and impl == "fast" and runs_programs(x_TH)
        if on_tensor_cores:
            return torch.mm(x_TH, w_EH.T, out_dtype=torch.float32)
        w_HE = w_EH.to(wide).T
        logits_TE = x_TH.new_empty((x_TH.shape[0], w_EH.shape[0]), dtype=wide)

        def block(rows: slice, _: int) -> None:
            x_rH, logits_rE = x_TH[rows].to(wide), logits_TE[rows]
            torch.mm(x_rH, w_HE, out=logits_rE)
            lanes.check("router forward", logits_rE, (x_rH, w_HE))

        lanes.run(block, _blocks(x_TH))
        return logits_TE

    @staticmethod
    def backward(ctx: Any, grad_TE: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TH, w_EH = ctx.saved_tensors
        if ctx.in_parts:
            return *wide_product_backward(grad_TE, x_TH, w_EH), None, None
        wide, blocks = grad_TE.dtype, _blocks(x_TH)
        wide_EH = w_EH.to(wide)
        if len(blocks) == 1:
            wide_TH, grad_x_TH = x_TH.to(wide), grad_TE @ wide_EH
            grad_w_EH = grad_TE.T @ wide_TH
            ctx.lanes.check("router input gradient", grad_x_TH, (grad_TE, wide_EH))
            ctx.lanes.check("router weight gradient", grad_w_EH, (grad_TE.T, wide_TH))
            return grad_x_TH.to(x_TH.dtype), grad_w_EH.to(w_EH.dtype), None, None
        grad_x_TH = torch.empty_like(x_TH)
        partial_nEH = wide_EH.new_empty((len(blocks), *w_EH.shape))

        def block(numbered: tuple[int, slice], _: int) -> None:
            i, rows = numbered
            x_rH, grad_rE, partial_EH = x_TH[rows].to(wide), grad_TE[rows], partial_nEH[i]
            grad_x_rH = grad_rE @ wide_EH
            ctx.lanes.check("router input gradient", grad_x_rH, (grad_rE, wide_EH))
            grad_x_TH[rows] = grad_x_rH
            torch.mm(grad_rE.T, x_rH, out=partial_EH)
            ctx.lanes.check("router weight gradient", partial_EH, (grad_rE.T, x_rH))

        ctx.lanes.run(block, list(enumerate(blocks)))
        return grad_x_TH, partial_nEH.sum(0).to(w_EH.dtype), None, None


def _blocks(x_TH: torch.Tensor) -> list[slice]:
    """All rows at once where there is no cache to keep them in."""
    return cache_blocks(*x_TH.shape) if x_TH.device.type == "cpu" else [slice(0, x_TH.shape[0])]
