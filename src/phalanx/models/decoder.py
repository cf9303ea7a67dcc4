"""The language model: embedding, blocks, final norm, last projection and loss; all of it, or the pipeline stages of one rank.

Must never change: parameter names and local shapes are those of `plan.model.parameters` and `plan.layout.local_param`.

Legend: T rows of this rank, N rows of its cp part, H hidden, V rows of the vocabulary on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain, repeat

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from phalanx.kernels.choice import Impl
from phalanx.kernels.ops.cross_entropy import VocabShard, linear_cross_entropy
from phalanx.kernels.ops.rope import RopeTable, rope_table
from phalanx.models.block import Block
from phalanx.models.context import ForwardInfo, ModelContext, RoutingStats, TokenBatch
from phalanx.models.layers import Linear, RMSNorm, initialise, new_parameter
from phalanx.models.mlp import Mlp
from phalanx.models.moe import Experts
from phalanx.models.mtp import MtpBlock, tokens_ahead
from phalanx.models.parallel import Embedding, SequenceParallel
from phalanx.plan.mapping import Stage
from phalanx.runtime.moe import KnownCounts


@dataclass(frozen=True, eq=False)
class DecoderOutput:
    """What one stage puts out: `hidden_TH`, after the final norm on the stage that predicts; `routing` of its MoE layers, first to last.

    `moe_layers[i]` is the number of `routing[i]` among all MoE layers of the model.
    """

    hidden_TH: torch.Tensor
    routing: tuple[RoutingStats, ...]
    moe_layers: tuple[int, ...]
    mtp_TH: tuple[torch.Tensor, ...] = ()
    """What the blocks of multi-token prediction put out, on the stage that predicts and in training alone."""


_BlockOutput = tuple[torch.Tensor, torch.Tensor, RoutingStats | None]


class Weight(nn.Module):
    """A lone matrix (the head)."""

    def __init__(self, ctx: ModelContext, name: str) -> None:
        super().__init__()
        self.weight = new_parameter(ctx, f"{name}.weight")


def _matrices(model: nn.Module) -> frozenset[str]:
    """Names of the weights that are applied with `DeferredGradients`: the matrices of all layers."""
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
        needs_table = any(stage.has_embedding for stage in self.stages) or (has_head and spec.table_at_both_ends)
        self.embedding = Embedding(ctx, "embedding") if needs_table else None
        blocks: dict[str, nn.Module] = {str(i): Block(ctx, i) for stage in self.stages for i in stage.layers}
        further = {str(i): MtpBlock(ctx, i) for i in spec.mtp_blocks if has_head}
        self.layers = nn.ModuleDict(blocks | further)
        self.norm = RMSNorm(ctx, "norm") if has_head else None
        self.head = Weight(ctx, "head") if has_head and not spec.tied_embeddings else None
        self.sequence = SequenceParallel(ctx, "loss", None)
        self.impl: Impl = ctx.kernels
        self.lanes = ctx.lanes
        self.recompute_blocks = ctx.recompute == "full"
        self.deferred = _matrices(self) if ctx.later is not None else frozenset()
        """Parameters whose gradients go to `ctx.later`."""
        if ctx.drawn:
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
        if batch.is_empty:
            return self._run_empty(stage, x_TH, batch, info)
        spec = self.spec
        table = self._rope_table(batch.positions_BS)
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
        layers, further = list(stage.layers), list[torch.Tensor]()
        if stage.has_head and info.phase != "eval":
            further, more = self._predict_further(x_TH, table, batch, info)
            layers, routing = [*layers, *spec.mtp_blocks], [*routing, *more]
        moe = tuple(spec.moe_layers.index(i) for i in layers if i in spec.moe_layers)
        return DecoderOutput(x_TH, tuple(routing), moe, tuple(further))

    def _rope_table(self, positions_BS: torch.Tensor) -> RopeTable:
        spec = self.spec
        return rope_table(
            positions_BS, head_dim=spec.rotary_dim, theta=spec.rope_theta, dtype=self.dtype, yarn=spec.yarn
        )

    def _run_empty(
        self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo
    ) -> DecoderOutput:
        """A stage for a micro-batch that is not there: its experts serve others, and what crosses to other stages are zeros.

        On the stage that predicts nothing comes out: (0, H).
        """
        spec, rows = self.spec, batch.num_tokens // self.sequence.axis.size
        if x_TH is None:
            x_TH = torch.zeros((0, spec.hidden), dtype=self.dtype, device=self.device)
            x_TH.requires_grad_(torch.is_grad_enabled())
        x_0H, routing = x_TH[:0], []
        further = spec.mtp_blocks if stage.has_head and info.phase != "eval" else ()
        layers, table = [*stage.layers, *further], self._rope_table(batch.positions_BS[:1, :1])
        for layer in layers:
            x_0H, delta_0H, stats = self._run_block(self.layers[str(layer)], x_0H, None, table, info, batch)
            x_0H = x_0H + delta_0H
            routing += [stats] if stats is not None else []
        moe = tuple(spec.moe_layers.index(i) for i in layers if i in spec.moe_layers)
        out_TH = x_0H if stage.has_head else F.pad(x_0H, (0, 0, 0, rows))
        return DecoderOutput(out_TH, tuple(routing), moe)

    def _predict_further(
        self, x_TH: torch.Tensor, table: RopeTable, batch: TokenBatch, info: ForwardInfo
    ) -> tuple[list[torch.Tensor], list[RoutingStats]]:
        """What each block of multi-token prediction puts out, and its routing."""
        hidden, routing = [], []
        for layer in self.spec.mtp_blocks:
            block = self.layers[str(layer)]
            assert isinstance(block, MtpBlock) and self.embedding is not None  # on every stage with a head
            tokens_BS, _ = tokens_ahead(batch, block.further)
            token_TH = self.embedding(tokens_BS, info, sequence=block.lookup)
            into_TH = block.enter(x_TH, token_TH)
            out_TH, delta_TH, stats = self._run_block(block, into_TH, None, table, info, batch)
            x_TH = block.norm.after(out_TH, delta_TH)[1]
            hidden.append(x_TH)
            routing += [stats] if stats is not None else []
        return hidden, routing

    def cross_entropy_sum(self, hidden_TH: torch.Tensor, batch: TokenBatch, info: ForwardInfo) -> torch.Tensor:
        """0-d sum of the token losses of this cp part, in nats: the same on all tp ranks, each with its share of the gradient."""
        if batch.is_empty:
            return hidden_TH.sum(dtype=torch.promote_types(hidden_TH.dtype, torch.float32))
        return self._cross_entropy(hidden_TH, batch.labels_BS, info, self.sequence)

    def mtp_cross_entropy_sum(self, output: DecoderOutput, batch: TokenBatch, info: ForwardInfo) -> torch.Tensor:
        """The same for the tokens after the next one, all blocks of multi-token prediction together."""
        sums = []
        for layer, hidden_TH in zip(self.spec.mtp_blocks, output.mtp_TH, strict=True):
            block = self.layers[str(layer)]
            assert isinstance(block, MtpBlock)
            _, labels_BS = tokens_ahead(batch, block.further)
            sums.append(self._cross_entropy(hidden_TH, labels_BS, info, block.loss))
        return torch.stack(sums).sum()

    def _cross_entropy(
        self, hidden_TH: torch.Tensor, labels_BS: torch.Tensor, info: ForwardInfo, sequence: SequenceParallel
    ) -> torch.Tensor:
        axis, weight_VH = sequence.axis, self.head_weight
        hidden_NH = sequence.gather(hidden_TH, info, num_sequences=labels_BS.shape[0])

        def all_shares(x: torch.Tensor) -> torch.Tensor:
            gathered = sequence.comms.all_gather(x, axis, op_id=sequence.id("shares", info))
            return gathered.view(axis.size, *x.shape)

        rows = weight_VH.shape[0]
        shard = VocabShard(axis.index * rows, axis.size * rows, all_shares) if axis.size > 1 else None

        def loss(hidden_NH: torch.Tensor) -> torch.Tensor:
            return linear_cross_entropy(
                hidden_NH, weight_VH, labels_BS.flatten(), shard=shard, impl=self.impl, lanes=self.lanes
            )

        return sequence.told("", info, loss, hidden_NH)

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

        info = replace(info, known=KnownCounts())
        infos = chain((info,), repeat(replace(info, phase="re")))

        def run(x_TH: torch.Tensor) -> _BlockOutput:
            out: _BlockOutput = block(x_TH, None, table=table, info=next(infos), batch=batch)
            return out

        if delta_TH is not None:
            x_TH = x_TH + delta_TH  # one tensor to keep, not two
        again: _BlockOutput = checkpoint(run, x_TH, use_reentrant=False, preserve_rng_state=False)
        return again
