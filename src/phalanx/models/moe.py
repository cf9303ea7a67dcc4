"""The mixture-of-experts layer: router, routed experts, and the shared expert that every token meets.

Decides nothing beyond their order. Must never change: nothing is communicated between attention and this layer; the rows of `x_TH`
are the tokens that this rank holds anyway.

Legend: T tokens of this rank, H hidden.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from phalanx.models.context import ForwardInfo, ModelContext, RoutingStats, TokenBatch
from phalanx.models.layers import new_parameter
from phalanx.models.mlp import SharedExpert
from phalanx.models.recompute import Needed
from phalanx.models.router import Router
from phalanx.plan.program import op_id
from phalanx.runtime.comm import traced
from phalanx.runtime.moe import Dispatcher, ExpertWeights, MoeCall, RoutedExperts, routed_experts


class Experts(nn.Module):
    """The routed experts that this rank holds (`etp` slices), each once, in however many slots it is."""

    def __init__(self, ctx: ModelContext, name: str) -> None:
        super().__init__()
        self.w13 = new_parameter(ctx, f"{name}.w13")
        self.w2 = new_parameter(ctx, f"{name}.w2")


class MoE(nn.Module):
    """`y = sum_k weight_k * expert_k(x) + shared(x)` for each token."""

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        at = f"layers.{layer}.moe."
        self.router = Router(ctx, layer)
        self.experts = Experts(ctx, at + "experts")
        self.shared = SharedExpert(ctx, layer) if ctx.spec.shared_ffn else None
        dispatcher = Dispatcher(
            ctx.dispatch,
            placement=ctx.placement.of_layer(layer),
            groups=ctx.groups,
            comms=ctx.comms,
            top_k=ctx.spec.top_k,
            kernels=ctx.kernels,
            lanes=ctx.lanes,
            unit_rows=1 if ctx.sums is None else ctx.sums.chunk_rows,
        )
        self.routed: RoutedExperts = routed_experts(
            dispatcher,
            kernels=ctx.kernels,
            lanes=ctx.lanes,
            tuner=ctx.tuner,
            fused=ctx.fused,
            sums=ctx.sums,
            host_of_rank=ctx.host_of_rank,
            shared_ffn=ctx.spec.shared_ffn,
            micro_tokens=ctx.micro_tokens,
        )
        self.layer, self.later, self.weight_sums = layer, ctx.later, ctx.weight_sums
        self.recompute = ctx.recompute == "selective"

    def forward(self, x_TH: torch.Tensor, info: ForwardInfo, batch: TokenBatch) -> tuple[torch.Tensor, RoutingStats]:
        """(T, H) -> (T, H) and this micro-batch's router losses and counts. Collective over `ep_etp`."""
        if batch.is_empty:
            return self._for_others(x_TH, info)
        prefix, text = op_id("", microbatch=info.microbatch, layer=self.layer, phase=info.phase), batch.text
        route = partial(
            self.router, info=info, num_sequences=batch.num_sequences, token_index_T=batch.token_index_T, text=text
        )
        routing = traced(self.routed.dispatcher.comms, prefix + "router", route, x_TH)
        shared = self.shared
        call = MoeCall(
            x_TH=x_TH,
            weights_TK=routing.weights_TK,
            experts_TK=routing.experts_TK,
            experts=ExpertWeights(self.experts.w13, self.experts.w2),
            later=self.later,
            weight_sums=self.weight_sums,
            recompute=self.recompute,
            known=info.known,
            counts_E=routing.counts_E,
            token_index_T=batch.token_index_T,
            is_text_T=None if text is None else text.is_text_T,
            part_T=batch.part_T,
            op_prefix=prefix,
            beside=None if shared is None else lambda: shared(x_TH, info, batch),
        )
        y_TH, dropped = self.routed(call)
        if text is not None and not self.routed.dispatcher.sends_padding:
            dropped = dropped - self.router.top_k * (~text.is_text_T).sum()  # padding was not there to be dropped
        stats = RoutingStats(
            aux_loss=routing.aux_loss,
            z_loss=routing.z_loss,
            counts_E=routing.counts_E,
            balance_counts_E=routing.balance_counts_E,
            dropped=dropped,
            entropy_sum=routing.entropy_sum,
        )
        return y_TH, stats

    def _for_others(self, x_TH: torch.Tensor, info: ForwardInfo) -> tuple[torch.Tensor, RoutingStats]:
        """This rank's part in the others' pass, without a token of its own: `x_TH` has no rows, nor has what comes out.

        The weights hang on `x`, so that every exchange of a backward pass finds this rank as well.
        """
        router = self.router
        balance_E = router.no_counts(x_TH, info)
        weights_TK = x_TH.sum(-1, keepdim=True, dtype=router.wide(x_TH)).expand(-1, router.top_k)
        experts_TK = torch.zeros(weights_TK.shape, dtype=torch.int64, device=x_TH.device)
        call = MoeCall(
            x_TH=x_TH,
            weights_TK=weights_TK,
            experts_TK=experts_TK,
            experts=ExpertWeights(self.experts.w13, self.experts.w2),
            later=self.later,
            weight_sums=self.weight_sums,
            recompute=self.recompute,
            known=info.known,
            op_prefix=op_id("", microbatch=info.microbatch, layer=self.layer, phase=info.phase),
        )
        y_TH, dropped = self.routed(call)
        if self.shared is not None:  # that of the others is behind the last message, also when a layer runs again
            y_TH = Needed.apply(y_TH)
        nothing = weights_TK.new_zeros(())
        return y_TH, RoutingStats(nothing, nothing, balance_E, balance_E, dropped, nothing)
