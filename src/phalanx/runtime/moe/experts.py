"""Dispatch -> experts -> combine for one MoE layer on one rank: the typed contract between the three, and their order.

Decides nothing. What overlaps with what (a later plan) is carried out here; the order below is the plain one, each step after the other.

Legend: T tokens, K experts of a token, H hidden, e experts held here, f width of an expert on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cpu.deferred import DeferredGradients
from phalanx.kernels.cpu.exact_experts import exact_expert_ffn
from phalanx.kernels.cpu.fixed_point import FixedSums
from phalanx.kernels.cpu.grouped import expert_ffn
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.runtime.comm import traced
from phalanx.runtime.moe.dispatch import Dispatcher


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The different experts in this rank's slots: `etp` slices of `w13` (gate and up projection) and of `w2` (back)."""

    w13_e2fH: torch.Tensor
    w2_eHf: torch.Tensor


def run_experts(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    *,
    experts: ExpertWeights,
    dispatcher: Dispatcher,
    kernels: Impl = "fast",
    lanes: Lanes = SERIAL,
    later: DeferredGradients | None = None,
    recompute: bool = False,
    token_index_T: torch.Tensor | None = None,
    part_T: torch.Tensor | None = None,
    op_prefix: str = "",
    sums: FixedSums | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H) weighted sum over each token's experts, and the 0-d number of its pairs that were dropped. Collective over `ep_etp`.

    `token_index_T` and `part_T`: see `Dispatcher.dispatch`.

    Gradients: tokens and weights get the sum over their copies; slots the sum over all rows that they served, which is the
    expert-parallel group's whole share, so that `edp` completes it (`expert` in `plan/mapping/folding.py`), or with replicas the sum over holders. With `later` those of the slots are
    put off. With `sums` every product is over rows of one source alone, and the gradients of the slots go to `sums` and nowhere else
    (`kernels/cpu/exact_experts.py`).
    """
    sent = dispatcher.dispatch(
        x_TH, weights_TK, experts_TK, token_index_T=token_index_T, part_T=part_T, op_prefix=op_prefix
    )
    ffn = partial(expert_ffn, recompute=recompute, impl=kernels, lanes=lanes, later=later)

    def compute(rows_MH: torch.Tensor, weights_M: torch.Tensor) -> torch.Tensor:
        if sums is not None:
            counts_eP = sent.state.plan.expert_source_counts(ep=dispatcher.ep.index)
            into = sums.of(experts.w13_e2fH), sums.of(experts.w2_eHf)
            weights = experts.w13_e2fH.detach(), experts.w2_eHf.detach()
            options: dict[str, Any] = {
                "chunk_rows": sums.chunk_rows,
                "recompute": recompute,
                "impl": kernels,
                "lanes": lanes,
            }
            return exact_expert_ffn(rows_MH, *weights, counts_eP, row_weights_M=weights_M, into=into, **options)
        return ffn(rows_MH, experts.w13_e2fH, experts.w2_eHf, sent.counts, row_weights_M=weights_M)

    rows_MH = traced(dispatcher.comms, op_prefix + "experts", compute, sent.rows_MH, sent.weights_M)
    return dispatcher.combine(rows_MH, sent.state), sent.dropped
