"""Dispatch -> experts -> combine for one MoE layer on one rank: the typed contract between the three, and their order.

Decides nothing. What overlaps with what (a later plan) is carried out here; the order below is the plain one, each step after the other.

Legend: T tokens, K experts of a token, H hidden, e experts held here, f width of an expert on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.fixed_point import FixedSums
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.device import WeightSums
from phalanx.kernels.ops.deferred import DeferredGradients
from phalanx.kernels.ops.exact_experts import exact_expert_ffn
from phalanx.kernels.ops.grouped import expert_ffn
from phalanx.runtime.comm import traced
from phalanx.runtime.moe.dispatch import Dispatched, Dispatcher, KnownCounts


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The different experts in this rank's slots: `etp` slices of `w13` (gate and up projection) and of `w2` (back)."""

    w13_e2fH: torch.Tensor
    w2_eHf: torch.Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class MoeCall:
    """One pass of one MoE layer on one rank: what its way through the experts is given, whichever it is."""

    x_TH: torch.Tensor
    weights_TK: torch.Tensor
    experts_TK: torch.Tensor
    """The experts of each token."""
    experts: ExpertWeights
    later: DeferredGradients | None = None
    """Takes the gradients of the slots, where they are deferred."""
    weight_sums: WeightSums | None = None
    """Where the gradients of large experts are added by their products."""
    recompute: bool = False
    """The backward pass computes activations again that are not kept."""
    known: KnownCounts | None = None
    """See `Dispatcher.dispatch`."""
    counts_E: torch.Tensor | None = None
    """int64 pairs of each expert, where they are known."""
    token_index_T: torch.Tensor | None = None
    is_text_T: torch.Tensor | None = None
    part_T: torch.Tensor | None = None
    """All three: see `Dispatcher.dispatch`."""
    op_prefix: str = ""
    beside: Callable[[], torch.Tensor] | None = None
    """A shared expert, (T, H): its result is added to that of the routed ones."""

    def kept_TK(self, dispatcher: Dispatcher) -> torch.Tensor | None:
        """Of all ways that ask before they dispatch: see `Dispatcher.kept`."""
        return dispatcher.kept(
            self.weights_TK,
            self.experts_TK,
            token_index_T=self.token_index_T,
            is_text_T=self.is_text_T,
            part_T=self.part_T,
            op_prefix=self.op_prefix,
        )

    def with_shared(self, y_TH: torch.Tensor) -> torch.Tensor:
        """The result of the routed experts plus that of the shared one, which is computed now."""
        return y_TH if self.beside is None else y_TH + self.beside()


def run_experts(
    call: MoeCall, *, dispatcher: Dispatcher, kernels: Impl = "fast", lanes: Lanes = SERIAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H) weighted sum over each token's experts, and the 0-d number of its pairs that were dropped. Collective over `ep_etp`.

    Gradients: tokens and weights get the sum over their copies; slots the sum over all rows that they served, which is the
    expert-parallel group's whole share, so that `edp` completes it (`expert` in `plan/mapping/folding.py`), or with replicas the sum over holders. With `call.later` those of
    the slots are deferred.
    """

    def compute(rows_MH: torch.Tensor, weights_M: torch.Tensor, sent: Dispatched) -> torch.Tensor:
        return rows_of_experts(
            rows_MH, weights_M, call=call, counts=sent.counts, ends_e=sent.ends_e, kernels=kernels, lanes=lanes
        )

    y_TH, dropped = _in_turn(call, dispatcher, compute, needs_counts=False)
    return call.with_shared(y_TH), dropped  # rows that were sent are gone by now


def rows_of_experts(
    rows_MH: torch.Tensor,
    weights_M: torch.Tensor,
    *,
    call: MoeCall,
    counts: Sequence[int] | None,
    ends_e: torch.Tensor | None = None,
    kernels: Impl,
    lanes: Lanes,
) -> torch.Tensor:
    """(M, H) weighted results of rows that lie expert by expert, `counts` of each. Both: as of `expert_ffn`."""
    return expert_ffn(
        rows_MH,
        call.experts.w13_e2fH,
        call.experts.w2_eHf,
        counts,
        row_weights_M=weights_M,
        ends_e=ends_e,
        recompute=call.recompute,
        impl=kernels,
        lanes=lanes,
        later=call.later,
        weight_sums=call.weight_sums,
    )


def run_exact(
    call: MoeCall, *, dispatcher: Dispatcher, sums: FixedSums, kernels: Impl = "fast", lanes: Lanes = SERIAL
) -> tuple[torch.Tensor, torch.Tensor]:
    """`run_experts` with every product over rows of one source alone; the gradients of the slots go to `sums` and nowhere else (`kernels/ops/exact_experts.py`)."""
    held = call.experts

    def compute(rows_MH: torch.Tensor, weights_M: torch.Tensor, sent: Dispatched) -> torch.Tensor:
        assert sent.state.plan is not None  # exact mode takes no whole tokens
        return exact_expert_ffn(
            rows_MH,
            held.w13_e2fH.detach(),
            held.w2_eHf.detach(),
            sent.state.plan.expert_source_counts(ep=dispatcher.ep.index),
            row_weights_M=weights_M,
            into=(sums.of(held.w13_e2fH), sums.of(held.w2_eHf)),
            chunk_rows=sums.chunk_rows,
            recompute=call.recompute,
            impl=kernels,
            lanes=lanes,
        )

    y_TH, dropped = _in_turn(call, dispatcher, compute, needs_counts=True)
    return call.with_shared(y_TH), dropped


def _in_turn(
    call: MoeCall,
    dispatcher: Dispatcher,
    compute: Callable[[torch.Tensor, torch.Tensor, Dispatched], torch.Tensor],
    *,
    needs_counts: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dispatch, experts, combine."""
    sent = dispatcher.dispatch(
        call.x_TH,
        call.weights_TK,
        call.experts_TK,
        token_index_T=call.token_index_T,
        is_text_T=call.is_text_T,
        part_T=call.part_T,
        op_prefix=call.op_prefix,
        known=call.known,
        counts_E=call.counts_E,
        needs_counts=needs_counts,
    )

    def experts(rows_MH: torch.Tensor, weights_M: torch.Tensor) -> torch.Tensor:
        return compute(rows_MH, weights_M, sent)

    rows_MH = traced(dispatcher.comms, call.op_prefix + "experts", experts, sent.rows_MH, sent.weights_M)
    return dispatcher.combine(rows_MH, sent.state), sent.dropped
