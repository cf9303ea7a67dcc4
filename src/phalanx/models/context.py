"""What modules need besides their input, and what they return besides their output.

Legend: B sequences, S sequence length, T = B*S tokens of this rank's micro-batch, H hidden, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch

from phalanx.kernels.cpu.fixed_point import FixedSums
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.device import WeightSums
from phalanx.kernels.ops.deferred import DeferredGradients
from phalanx.plan.layout import ExpertState
from phalanx.plan.mapping import AnyPlacement, Stage, StagePlan, assign_stages
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import DispatchSpec
from phalanx.plan.program import Phase
from phalanx.runtime.comm import Collectives, Groups
from phalanx.runtime.moe import FusedMemory, KnownCounts, Tuner


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelContext:
    """Fixed for the life of a model; built by the trainer (or a test) and handed to every module."""

    spec: ModelSpec
    dispatch: DispatchSpec
    placement: AnyPlacement
    groups: Groups
    comms: Collectives
    dtype: torch.dtype
    """Type of parameters and activations."""
    device: torch.device
    kernels: Literal["fast", "reference"] = "fast"
    recompute: Literal["none", "selective", "full"] = "none"
    cp_method: Literal["ring", "all_gather", "ulysses"] = "ring"
    seed: int = 0
    drawn: bool = True
    """Weights get their initial values; False: whatever is in the memory, for a model whose state comes from elsewhere before it is read."""
    lanes: Lanes = SERIAL
    """Threads among which CPU kernels divide their work; results do not depend on it."""
    pipeline: StagePlan | None = None
    """Which rank of the pipeline holds which layers; None: all of them are here."""
    tuner: Tuner = field(default_factory=Tuner)
    """What overlap costs here, found out where `dispatch.overlap = "auto"`."""
    fused: FusedMemory = field(default_factory=FusedMemory)
    """Memory that the ranks write into for each other where `dispatch.overlap = "fused"`."""
    micro_tokens: int = 0
    """Tokens of this rank in a micro-batch of training, 0 where that is not known: what overlap costs is found out for these alone."""
    host_of_rank: tuple[int, ...] = ()
    """Host of each rank of the run; (): not known, each may be one."""
    expert_state: ExpertState = "whole"
    """What each holder of an expert with replicas keeps of its optimizer state."""
    later: DeferredGradients | None = None
    """Where backward passes leave the weight gradients of matrices, if the schedule defers them."""
    sums: FixedSums | None = None
    """Exact mode: experts compute unit by unit and add the gradients of their weights up here (`kernels/ops/exact_experts.py`)."""
    weight_sums: WeightSums | None = None
    """Where products add up gradients of weights themselves, on devices (`kernels/device/weight_sums.py`)."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """This rank's virtual stages, first to last."""
        if self.pipeline is None:
            return assign_stages(self.spec, (0,), seq_len=1).stages
        return self.pipeline.of_rank(self.groups.folding.coord(self.groups.rank, "pp"))


@dataclass(frozen=True, eq=False)
class Text:
    """What of a micro-batch is text, where padding stands behind it: the rest counts in no loss and takes no expert's room."""

    is_text_T: torch.Tensor
    """bool, of the rows that this rank holds between the layers."""
    tokens: int
    """Of the whole micro-batch."""
    tokens_B: torch.Tensor
    """int64: of each sequence that this rank has rows of, all its ranks together; 1 at least, so that it divides."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """One micro-batch: whole, as the loader gives it, or a rank's part of it (`models/shard.py`).

    `tokens_BS`, `labels_BS` (-100: not predicted) and `positions_BS` (from 0 in each document) are int64 on the model's device: all of the
    sequences, or the positions of one cp rank, in its order. `segments[b]` are the lengths of the documents packed in the whole sequence b,
    plain integers on the host.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor
    segments: tuple[tuple[int, ...], ...]
    token_index_T: torch.Tensor | None = None
    """int64 place in the whole micro-batch (b * S + s) of each row that this rank holds between the layers; None: they are all here."""
    whole: TokenBatch | None = None
    """The micro-batch that this is a part of; None: this is all of it."""
    columns_S: torch.Tensor | None = None
    """int64 places in its whole sequence of a part's positions; None: they are all here."""
    part_T: torch.Tensor | None = None
    """int64: which rank would hold each row. Only where one rank stands in for several: rows are then dropped part by part."""
    is_empty: bool = False
    """There is no micro-batch, only the shape of one: this rank takes part in what others do together and computes nothing."""
    padding: tuple[int, ...] = ()
    """Tokens behind the text of each sequence of the whole micro-batch, also of those that other ranks share; (): none has any."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this cp part."""
        return self.tokens_BS.numel()

    @property
    def num_sequences(self) -> int:
        return self.tokens_BS.shape[0]

    @cached_property
    def text(self) -> Text | None:
        """None where all of the whole micro-batch is text: the same on all ranks that share it."""
        if not any(self.padding):
            return None
        whole_BS = self.tokens_BS if self.whole is None else self.whole.tokens_BS
        length, device = whole_BS.shape[1], whole_BS.device
        index_T = self.token_index_T
        if index_T is None:
            index_T = torch.arange(whole_BS.numel(), device=device)
        lengths = [length - padding for padding in self.padding]
        tokens_B = torch.tensor(lengths).to(device, non_blocking=True)
        sequence_T = index_T // length
        is_text_T = index_T - length * sequence_T < tokens_B[sequence_T]
        own_B = tokens_B[sequence_T.view(self.num_sequences, -1)[:, 0]]
        return Text(is_text_T, sum(lengths), own_B.clamp(min=1))

    def on(self, device: torch.device) -> TokenBatch:
        """A whole micro-batch with its tensors on `device`."""
        tokens_BS, labels_BS, positions_BS = (x.to(device) for x in (self.tokens_BS, self.labels_BS, self.positions_BS))
        part_T = None if self.part_T is None else self.part_T.to(device)
        return replace(self, tokens_BS=tokens_BS, labels_BS=labels_BS, positions_BS=positions_BS, part_T=part_T)


@dataclass(frozen=True, kw_only=True, eq=False)
class ForwardInfo:
    """What varies from one forward pass to the next and is not data.

    `num_microbatches` counts the micro-batches of the whole step over all data-parallel ranks, so that router losses, which are
    means over micro-batches, come out as sums of `1/num_microbatches` shares. `balance_counts_LE` (moe layers x E, any float
    dtype) are the global batch's counts (`router.counts_of_text`) where `aux_scope = "global_batch"` needs more than one pass to know them.
    """

    step: int = 0
    microbatch: int = 0
    """Global index of this micro-batch in the step."""
    phase: Phase = "fwd"
    """Names this pass in the ids of its operations (`plan/program/step.py`); changes nothing else."""
    num_microbatches: int = 1
    rounds: int | None = None
    """Micro-batches of each data-parallel rank, empty ones included; None: `num_microbatches` over these ranks."""
    balance_counts_LE: torch.Tensor | None = None
    known: KnownCounts | None = None
    """Of a block that runs again in the backward pass: what its first run has read on the host, which the second need not wait for."""


@dataclass(frozen=True, eq=False)
class RoutingStats:
    """What one MoE layer says about one micro-batch, local to this rank.

    `aux_loss` and `z_loss` are this rank's shares of the step's router losses, coefficients included: their sum over ranks and
    micro-batches is the term of the objective, so they are simply added to it. The rest carries no gradient.
    """

    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    counts_E: torch.Tensor
    """int64 tokens of text that chose each expert, before dropping."""
    balance_counts_E: torch.Tensor
    """int64 tokens of text that would choose each expert without bias and group limits: what the balancing loss counts."""
    dropped: torch.Tensor
    """int64 0-d: (token, expert) pairs that were dropped."""
    entropy_sum: torch.Tensor
    """0-d: sum over tokens of text of the entropy of the router's distribution, nats."""
