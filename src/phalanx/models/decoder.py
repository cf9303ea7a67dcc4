"""The language model: embedding, blocks, final norm, last projection and loss; all of it, or the pipeline stages of one rank.

Must never change: parameter names and local shapes are those of `plan.model.parameters` and `plan.layout.local_param`.

Legend: T rows of this rank, N rows of its cp part, H hidden, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.kernels.choice import Impl
from phalanx.kernels.cross_entropy import VocabShard, linear_cross_entropy
from phalanx.kernels.rope import RopeTable, rope_table
from phalanx.models.block import Block
from phalanx.models.context import ForwardInfo, ModelContext, RoutingStats, TokenBatch
from phalanx.models.layers import Linear, RMSNorm, initialise, new_parameter
from phalanx.models.mlp import Mlp
from phalanx.models.moe import Experts
from phalanx.models.parallel import Embedding, SequenceParallel
from phalanx.plan.stages import Stage


@dataclass(frozen=True, eq=False)
class DecoderOutput:
    """What one stage puts out: `hidden_TH`, after the final norm on the stage that predicts; `routing` of its MoE layers, first to last.

    `moe_layers[i]` is the number of `routing[i]` among all MoE layers of the model.
    """

    hidden_TH: torch.Tensor
    routing: tuple[RoutingStats, ...]
    moe_layers: tuple[int, ...]


_BlockOutput = tuple[torch.Tensor, torch.Tensor, RoutingStats | None]


class Weight(nn.Module):
    """A lone matrix (the head)."""

    def __init__(self, ctx: ModelContext, name: str) -> None:
        super().__init__()
        self.weight = new_parameter(ctx, f"{name}.weight")


def _matrices(model: nn.Module) -> frozenset[str]:
    """Names of the weights that are applied with a `Later`: the matrices of all layers."""
    kinds = {Linear: ("weight",), Mlp: ("w13", "w2"), Experts: ("w13", "w2")}
    return frozenset(
        f"{path}.{name}"
        for path, module in model.named_modules()
        for kind, names in kinds.items()
        if isinstance(module, kind)
        for name in names
    )


class Decoder(nn.Module):
    """This rank's stages of a decoder, with its part of every parameter, initialised."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        spec = ctx.spec
        self.spec, self.stages, self.dtype = spec, ctx.stages, ctx.dtype
        has_head = any(stage.has_head for stage in self.stages)
        needs_table = any(stage.has_embedding for stage in self.stages) or (has_head and spec.tied_embeddings)
        self.embedding = Embedding(ctx, "embedding") if needs_table else None
        self.layers = nn.ModuleDict({str(i): Block(ctx, i) for stage in self.stages for i in stage.layers})
        self.norm = RMSNorm(ctx, "norm") if has_head else None
        self.head = Weight(ctx, "head") if has_head and not spec.tied_embeddings else None
        self.sequence = SequenceParallel(ctx, "loss", None)
        self.impl: Impl = ctx.kernels
        self.lanes = ctx.lanes
        self.recompute_blocks = ctx.recompute == "full"
        self.put_off = _matrices(self) if ctx.later is not None else frozenset()
        """Parameters whose gradients go to `ctx.later`."""
        initialise(self.named_parameters(), ctx)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def head_weight(self) -> nn.Parameter:
        """(V, H) weight of the last projection, this rank's rows of it: the embedding's, where they are tied."""
        module = self.embedding if self.head is None else self.head
        assert module is not None  # asked on a stage that predicts
        return module.weight

    def forward(self, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        """The whole model, where it is all on this rank."""
        (stage,) = self.stages
        return self.run_stage(stage, None, batch, info)

    def run_stage(self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        """One stage; `x_TH` is what the one before it put out (None for the first)."""
        spec = self.spec
        table = rope_table(
            batch.positions_BS, head_dim=spec.rotary_dim, theta=spec.rope_theta, dtype=self.dtype, yarn=spec.yarn
        )
        if x_TH is None:
            assert stage.has_embedding and self.embedding is not None  # every other stage gets an input
            x_TH = self.embedding(batch.tokens_BS, info)
        delta_TH: torch.Tensor | None = None
        routing = []
        for layer in stage.layers:
            x_TH, delta_TH, stats = self._run_block(self.layers[str(layer)], x_TH, delta_TH, table, info, batch)
            if stats is not None:
                routing.append(stats)
        if stage.has_head:
            assert self.norm is not None
            x_TH = self.norm.after(x_TH, delta_TH)[1]
        elif delta_TH is not None:
            x_TH = x_TH + delta_TH
        assert x_TH is not None
        moe = tuple(spec.moe_layers.index(i) for i in stage.layers if i in spec.moe_layers)
        return DecoderOutput(x_TH, tuple(routing), moe)

    def cross_entropy_sum(self, hidden_TH: torch.Tensor, batch: TokenBatch, info: ForwardInfo) -> torch.Tensor:
        """0-d sum of the token losses of this cp part, in nats: the same on all tp ranks, each with its share of the gradient."""
        axis, weight_VH = self.sequence.axis, self.head_weight
        hidden_NH = self.sequence.gather(hidden_TH, info, num_sequences=batch.num_sequences)
        shard = None
        if axis.size > 1:
            shard = VocabShard(axis.index * weight_VH.shape[0], lambda x: self._all_shares(x, info))
        return linear_cross_entropy(
            hidden_NH, weight_VH, batch.labels_BS.flatten(), shard=shard, impl=self.impl, lanes=self.lanes
        )

    def _all_shares(self, x: torch.Tensor, info: ForwardInfo) -> torch.Tensor:
        gathered = self.sequence.comms.all_gather(x, self.sequence.axis, op_id=self.sequence.id("shares", info))
        return gathered.view(self.sequence.axis.size, *x.shape)

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
