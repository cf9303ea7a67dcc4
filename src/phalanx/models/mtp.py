"""Multi-token prediction in training (arXiv 2412.19437 section 2.2): block d of D predicts, at position i, token i + d + 2 (d from 0).

    x = join [token_norm(embedding of token i + d + 1); hidden_norm(what is known before)]      h = norm(block(x))      logits = head(h)

Known before is the output of the final norm, or of the block before. Embedding and head are the model's own; both get gradients from here. The
blocks sit on the stage of the head and do not run in validation and generation, which need the next token only.

Must never change: a label is a token of the same document as the position that predicts it; which token is ahead depends on the whole
sequence, not on the part of it that a rank holds.

Legend: B sequences, S positions of this cp rank in each, T rows of this rank, H hidden.
"""

from __future__ import annotations

import torch

from phalanx.kernels.ops.cross_entropy import IGNORE
from phalanx.models.block import Block
from phalanx.models.context import ModelContext, TokenBatch
from phalanx.models.layers import Linear, RMSNorm
from phalanx.models.parallel import SequenceParallel


class MtpBlock(Block):
    """A block of the model with what comes before and after it."""

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__(ctx, layer)
        at = f"layers.{layer}."
        self.token_norm = RMSNorm(ctx, at + "token_norm")
        self.hidden_norm = RMSNorm(ctx, at + "hidden_norm")
        self.join = Linear(ctx, at + "join")
        self.norm = RMSNorm(ctx, at + "norm")
        self.lookup = SequenceParallel(ctx, "embedding", layer)
        self.loss = SequenceParallel(ctx, "loss", layer)
        self.further = layer - ctx.spec.num_layers + 1
        """Positions between a token and the one that is looked up for it."""

    def enter(self, hidden_TH: torch.Tensor, token_TH: torch.Tensor) -> torch.Tensor:
        """(T, H) that the block works on. Replicated weights on a rank's own rows: nothing is communicated."""
        return self.join(torch.cat((self.token_norm(token_TH), self.hidden_norm(hidden_TH)), dim=-1))


def tokens_ahead(batch: TokenBatch, further: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S) the token `further` places on, and the one after it as label (-100 past the end of the document)."""
    whole = batch if batch.whole is None else batch.whole
    length = whole.tokens_BS.shape[1]
    columns_S = batch.columns_S
    if columns_S is None:
        columns_S = torch.arange(length, device=whole.tokens_BS.device)
    there_S = (columns_S + further).clamp(max=length - 1)
    # positions count up inside a document and start again in the next: only there is the one `further` places on larger by as much
    same_BS = whole.positions_BS[:, there_S] == whole.positions_BS[:, columns_S] + further
    return whole.tokens_BS[:, there_S], whole.labels_BS[:, there_S].masked_fill(~same_BS, IGNORE)
