"""The objective, and what a step reports of it.

    objective of a rank = sum of its token losses / valid tokens of the whole step + its shares of the router losses
                          + mtp_weight / D * sum of its losses of the D blocks of multi-token prediction / valid tokens

Summed over ranks and micro-batches this is the mean cross-entropy per valid token plus the router losses, so every gradient reduction is a
plain sum (`plan/mapping/folding.py`). Must never change: no rank divides by a number that it counted alone.

Legend: T tokens of a micro-batch, H hidden, V vocabulary, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models import Decoder, DecoderOutput, ForwardInfo, TokenBatch
from phalanx.plan.mapping import Stage
from phalanx.plan.model import ModelSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class LossShare:
    """What one micro-batch of one rank adds to each figure of the step; plain sums over ranks and micro-batches make the figure.

    All are 0-d but `counts_LE`, and carry no gradient.
    """

    cross_entropy: torch.Tensor
    mtp_loss: torch.Tensor
    """Loss of the tokens after the next one: mean over the blocks that predict them, without its weight."""
    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    counts_LE: torch.Tensor
    """(L, E) int64 tokens that chose each expert, before dropping."""
    dropped: torch.Tensor
    entropy_sum: torch.Tensor


def num_valid(batches: Sequence[TokenBatch]) -> torch.Tensor:
    """0-d int64: tokens of these micro-batches that have a label."""
    return torch.stack([(b.labels_BS != IGNORE).sum() for b in batches]).sum()


def objective(
    model: Decoder,
    output: DecoderOutput,
    batch: TokenBatch,
    info: ForwardInfo,
    *,
    stage: Stage,
    valid_tokens: torch.Tensor,
) -> tuple[torch.Tensor, LossShare]:
    """What a stage adds to this rank's share of the objective, to be differentiated, and its parts.

    `valid_tokens`: 0-d, of the whole step. All tp ranks of a cp part get the same cross-entropy, each with its share of the gradient; the
    first one reports it.
    """
    cross_entropy = output.hidden_TH.new_zeros((), dtype=torch.promote_types(output.hidden_TH.dtype, torch.float32))
    mtp_loss, first = cross_entropy, float(model.sequence.axis.index == 0)
    if stage.has_head:
        cross_entropy = model.cross_entropy_sum(output.hidden_TH, batch, info) / valid_tokens.clamp(min=1)
    if output.mtp_TH:
        blocks = len(output.mtp_TH)
        mtp_loss = model.mtp_cross_entropy_sum(output, batch, info) / (blocks * valid_tokens.clamp(min=1))
    reported = cross_entropy.detach() * first
    aux_loss = _total(cross_entropy, [r.aux_loss for r in output.routing])
    z_loss = _total(cross_entropy, [r.z_loss for r in output.routing])
    share = LossShare(
        cross_entropy=reported,
        mtp_loss=mtp_loss.detach() * first,
        aux_loss=aux_loss.detach(),
        z_loss=z_loss.detach(),
        counts_LE=counts_of(output, model.spec),
        dropped=_total(batch.labels_BS.new_zeros(()), [r.dropped for r in output.routing]),
        entropy_sum=_total(reported, [r.entropy_sum.detach() for r in output.routing]),
    )
    total = cross_entropy + aux_loss + z_loss
    return (total + model.spec.mtp_weight * mtp_loss if output.mtp_TH else total), share


def counts_of(output: DecoderOutput, spec: ModelSpec) -> torch.Tensor:
    """(L, E) int64 tokens of this micro-batch that chose each expert; zeros for the layers of other stages."""
    shape = (len(spec.moe_layers), spec.num_experts if spec.moe_layers else 0)
    counts_LE = torch.zeros(shape, dtype=torch.int64, device=output.hidden_TH.device)
    for i, stats in zip(output.moe_layers, output.routing, strict=True):
        counts_LE[i] = stats.counts_E
    return counts_LE


def _total(like: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.to(like.dtype) for t in terms]).sum() if terms else torch.zeros_like(like)
