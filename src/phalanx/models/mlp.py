"""SwiGLU MLPs that every token meets: of a dense layer, and alongside the routed experts. Split over tp along their width.

Legend: T rows of this rank, N rows of its cp part, H hidden, F width on this rank.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.kernels.choice import Impl
from phalanx.kernels.ops.linear import linear
from phalanx.kernels.ops.swiglu import swiglu
from phalanx.models.context import ForwardInfo, ModelContext, TokenBatch
from phalanx.models.layers import new_parameter
from phalanx.models.parallel import SequenceParallel


class Mlp(nn.Module):
    """`w2 (silu(w13[0] x) * (w13[1] x))` of a dense layer."""

    def __init__(self, ctx: ModelContext, layer: int, *, name: str = "mlp", op: str = "mlp") -> None:
        super().__init__()
        self.w13 = new_parameter(ctx, f"layers.{layer}.{name}.w13")
        self.w2 = new_parameter(ctx, f"layers.{layer}.{name}.w2")
        self.sequence = SequenceParallel(ctx, op, layer)
        self.impl: Impl = ctx.kernels
        self.lanes, self.later, self.weight_sums = ctx.lanes, ctx.later, ctx.weight_sums
        self.is_last = ctx.recompute == "full"
        """Whether its second product is the last one of what a backward pass runs again: see `Linear`."""

    def forward(self, x_TH: torch.Tensor, info: ForwardInfo, batch: TokenBatch) -> torch.Tensor:
        """(T, H) -> (T, H)."""
        x_NH = self.sequence.gather(x_TH, info, num_sequences=batch.num_sequences)
        y_NH = self.sequence.told("", info, self._compute, x_NH)
        return self.sequence.scatter(y_NH, info, num_sequences=batch.num_sequences)

    def _compute(self, x_NH: torch.Tensor) -> torch.Tensor:
        project = partial(linear, impl=self.impl, lanes=self.lanes, later=self.later)
        gate_up_NF = project(x_NH, self.w13.flatten(0, 1), weight_sums=self.weight_sums)
        h_NF = swiglu(gate_up_NF.view(-1, *self.w13.shape[:2]), impl=self.impl, lanes=self.lanes)
        return project(h_NF, self.w2, weight_sums=None if self.is_last else self.weight_sums)


class SharedExpert(Mlp):
    """Expert that every token passes in addition to the routed experts; with a gate its output is multiplied by sigmoid(x . gate)
    (Qwen2-MoE)."""

    def __init__(self, ctx: ModelContext, layer: int) -> None:
        super().__init__(ctx, layer, name="moe.shared", op="shared")
        self.gate = new_parameter(ctx, f"layers.{layer}.moe.shared.gate") if ctx.spec.shared_gate else None

    def forward(self, x_TH: torch.Tensor, info: ForwardInfo, batch: TokenBatch) -> torch.Tensor:
        y_TH = super().forward(x_TH, info, batch)
        if self.gate is None:
            return y_TH
        wide = torch.promote_types(x_TH.dtype, torch.float32)
        return y_TH * torch.sigmoid(F.linear(x_TH, self.gate).to(wide)).to(y_TH.dtype)
