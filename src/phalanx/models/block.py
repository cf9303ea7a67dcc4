"""One block: `x + attention(norm(x))`, then `x + experts(norm(x))` (a dense MLP in the first layers).

The last addition is left to whoever norms the sum next (the following block, the final norm), which does both in one pass over memory.

Legend: T tokens of this rank, H hidden.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from phalanx.kernels.ops.rope import RopeTable
from phalanx.models.attention import Attention
from phalanx.models.context import ForwardInfo, ModelContext, RoutingStats, TokenBatch
from phalanx.models.latent import LatentAttention
from phalanx.models.layers import RMSNorm
from phalanx.models.mlp import Mlp
from phalanx.models.moe import MoE
from phalanx.models.recompute import normed_again


class Block(nn.Module):
    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__()
        at = f"layers.{layer}."
        self.attention_norm = RMSNorm(ctx, at + "attention_norm")
        self.attention = Attention(ctx, layer) if ctx.spec.mla is None else LatentAttention(ctx, layer)
        self.ffn_norm = RMSNorm(ctx, at + "ffn_norm")
        self.recomputes = ctx.recompute == "selective"
        self.moe: MoE | None = None
        self.mlp: Mlp | None = None
        if layer in ctx.spec.moe_layers:
            self.moe = MoE(ctx, layer)
        else:
            self.mlp = Mlp(ctx, layer)

    def forward(
        self,
        x_TH: torch.Tensor,
        delta_TH: torch.Tensor | None,
        *,
        table: RopeTable,
        info: ForwardInfo,
        batch: TokenBatch,
    ) -> tuple[torch.Tensor, torch.Tensor, RoutingStats | None]:
        """The residual stream as two summands, (T, H) each, in and out, and what the router says; None in a dense block.

        Of an empty micro-batch there are no rows, and only the experts, who serve others too, are asked.
        """
        if batch.is_empty:
            y_TH, stats = (torch.zeros_like(x_TH), None) if self.moe is None else self.moe(x_TH, info, batch)
            return x_TH, y_TH, stats
        x_TH, h_TH = self.attention_norm.after(x_TH, delta_TH)
        with self._again(h_TH, self.attention_norm, x_TH):
            a_TH = self.attention(h_TH, table=table, info=info, batch=batch)
        del h_TH
        x_TH, h_TH = self.ffn_norm.after(x_TH, a_TH)
        with self._again(h_TH, self.ffn_norm, x_TH):
            if self.moe is not None:
                y_TH, stats = self.moe(h_TH, info, batch)
                return x_TH, y_TH, stats
            assert self.mlp is not None  # one of the two, by construction
            return x_TH, self.mlp(h_TH, info, batch), None

    def _again(self, y_TH: torch.Tensor, norm: RMSNorm, x_TH: torch.Tensor) -> AbstractContextManager[None]:
        """With selective recomputation on a device what is normed is made again; on a CPU it would cost more time than it saves memory."""
        if self.recomputes and x_TH.device.type != "cpu" and torch.is_grad_enabled():
            return normed_again(y_TH, norm, x_TH)
        return nullcontext()
