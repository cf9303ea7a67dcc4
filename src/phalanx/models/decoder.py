"""The language model: embedding, blocks, final norm, and the weight of the last projection (applied with the loss).

Must never change: parameter names and local shapes are those of `plan.model.parameters` and `plan.layout.local_param`.

Legend: B sequences, S sequence length, T = B*S, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.core.errors import ConfigError, Problem, raise_if
from phalanx.kernels.choice import Impl
from phalanx.kernels.embedding import embed
from phalanx.kernels.rope import RopeTable, rope_table
from phalanx.models.block import Block
from phalanx.models.context import ForwardInfo, ModelContext, RoutingStats, TokenBatch
from phalanx.models.layers import RMSNorm, initialise, new_parameter


@dataclass(frozen=True, eq=False)
class DecoderOutput:
    """`hidden_TH` after the final norm; `routing` of the MoE layers, first to last."""

    hidden_TH: torch.Tensor
    routing: tuple[RoutingStats, ...]


_BlockOutput = tuple[torch.Tensor, torch.Tensor, RoutingStats | None]


class Weight(nn.Module):
    """A lone matrix (embedding or head)."""

    def __init__(self, ctx: ModelContext, name: str) -> None:
        super().__init__()
        self.weight = new_parameter(ctx, f"{name}.weight")


class Decoder(nn.Module):
    """A decoder with this rank's part of every parameter, initialised. Raises `ConfigError` for what it cannot run."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        raise_if(_problems(ctx), ConfigError, subject="model")
        spec = ctx.spec
        self.embedding = Weight(ctx, "embedding")
        self.layers = nn.ModuleList(Block(ctx, layer) for layer in range(spec.num_layers))
        self.norm = RMSNorm(ctx, "norm")
        self.head = None if spec.tied_embeddings else Weight(ctx, "head")
        self.spec = spec
        self.dtype = ctx.dtype
        self.impl: Impl = ctx.kernels
        self.lanes = ctx.lanes
        self.recompute_blocks = ctx.recompute == "full"
        initialise(self.named_parameters(), ctx)

    @property
    def head_weight(self) -> nn.Parameter:
        """(V, H) weight of the last projection: the embedding's, where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        spec = self.spec
        table = rope_table(batch.positions_BS, head_dim=spec.head_dim, theta=spec.rope_theta, dtype=self.dtype)
        x_TH = embed(batch.tokens_BS.flatten(), self.embedding.weight, impl=self.impl, lanes=self.lanes)
        delta_TH: torch.Tensor | None = None
        routing = []
        for block in self.layers:
            x_TH, delta_TH, stats = self._run_block(block, x_TH, delta_TH, table, info, batch)
            if stats is not None:
                routing.append(stats)
        return DecoderOutput(self.norm.after(x_TH, delta_TH)[1], tuple(routing))

    def _run_block(
        self,
        block: nn.Module,
        x_TH: torch.Tensor,
        delta_TH: torch.Tensor | None,
        table: RopeTable,
        info: ForwardInfo,
        batch: TokenBatch,
    ) -> _BlockOutput:
        """One block, kept or (recompute = full) run again in the backward pass.

        Router statistics are results of the first run; the second run's are thrown away with it, so nothing is counted twice.
        """
        if not (self.recompute_blocks and torch.is_grad_enabled()):
            result: _BlockOutput = block(x_TH, delta_TH, table=table, info=info, batch=batch)
            return result

        infos = chain((info,), repeat(replace(info, phase="re")))

        def run(x_TH: torch.Tensor) -> _BlockOutput:
            out: _BlockOutput = block(x_TH, None, table=table, info=next(infos), batch=batch)
            return out

        if delta_TH is not None:
            x_TH = x_TH + delta_TH  # one tensor to keep, not two
        again: _BlockOutput = checkpoint(run, x_TH, use_reentrant=False, preserve_rng_state=False)
        return again


def _problems(ctx: ModelContext) -> list[Problem]:
    f = ctx.groups.folding
    later = [
        Problem(where=f"folding.{axis}", value=f.degree(axis), rule="is not implemented yet", hint="use 1")
        for axis in ("tp", "cp", "pp")
        if f.degree(axis) > 1
    ]
    if ctx.spec.mla is not None:
        hint = "choose a preset without it"
        later.append(
            Problem(
                where="model.preset",
                value=ctx.spec.name,
                rule="multi-head latent attention is not implemented yet",
                hint=hint,
            )
        )
    return later
