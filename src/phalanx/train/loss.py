"""The objective, and what a step reports of it.

    objective of a rank = sum of its token losses / valid tokens of the whole step + its shares of the router losses

Summed over ranks and micro-batches this is the mean cross-entropy per valid token plus the router losses, so every gradient reduction is a
plain sum (`plan/folding.py`). Must never change: no rank divides by a number that it counted alone.

Legend: T tokens of a micro-batch, H hidden, V vocabulary, L MoE layers, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phalanx.kernels.choice import Impl
from phalanx.kernels.cross_entropy import IGNORE, linear_cross_entropy
from phalanx.kernels.lanes import SERIAL, Lanes
from phalanx.models.context import TokenBatch
from phalanx.models.decoder import DecoderOutput


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """What one micro-batch of one rank adds to each figure of the step; plain sums over ranks and micro-batches make the figure.

    All are 0-d but `counts_LE`, and carry no gradient.
    """

    cross_entropy: torch.Tensor
    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    counts_LE: torch.Tensor
    """(L, E) int64 tokens that chose each expert, before dropping."""
    dropped: torch.Tensor
    entropy_sum: torch.Tensor


def num_valid(batches: Sequence[TokenBatch]) -> torch.Tensor:
    """0-d int64: tokens of these micro-batches that have a label."""
    return torch.stack([(b.labels_BS != IGNORE).sum() for b in batches]).sum()


def cross_entropy_sum(
    output: DecoderOutput, head_weight_VH: torch.Tensor, batch: TokenBatch, *, impl: Impl, lanes: Lanes = SERIAL
) -> torch.Tensor:
    """0-d sum of the token losses of a micro-batch, in nats."""
    return linear_cross_entropy(output.hidden_TH, head_weight_VH, batch.labels_BS.flatten(), impl=impl, lanes=lanes)


def objective(
    output: DecoderOutput,
    head_weight_VH: torch.Tensor,
    batch: TokenBatch,
    *,
    valid_tokens: torch.Tensor,
    impl: Impl,
    lanes: Lanes = SERIAL,
) -> tuple[torch.Tensor, Share]:
    """This rank's share of the step's objective, to be differentiated, and its parts. `valid_tokens`: 0-d, of the whole step."""
    cross_entropy = cross_entropy_sum(output, head_weight_VH, batch, impl=impl, lanes=lanes) / valid_tokens.clamp(min=1)
    aux_loss = _total(cross_entropy, [r.aux_loss for r in output.routing])
    z_loss = _total(cross_entropy, [r.z_loss for r in output.routing])
    share = Share(
        cross_entropy=cross_entropy.detach(),
        aux_loss=aux_loss.detach(),
        z_loss=z_loss.detach(),
        counts_LE=counts_of(output),
        dropped=_total(batch.labels_BS.new_zeros(()), [r.dropped for r in output.routing]),
        entropy_sum=_total(cross_entropy.detach(), [r.entropy_sum.detach() for r in output.routing]),
    )
    return cross_entropy + aux_loss + z_loss, share


def counts_of(output: DecoderOutput) -> torch.Tensor:
    """(L, E) int64 tokens of this micro-batch that chose each expert; (0, 0) without MoE layers."""
    if not output.routing:
        return torch.zeros((0, 0), dtype=torch.int64, device=output.hidden_TH.device)
    return torch.stack([r.counts_E for r in output.routing])


def _total(like: torch.Tensor, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([t.to(like.dtype) for t in terms]).sum() if terms else torch.zeros_like(like)
