"""Wrong groups and wrong parts of a step, for the planted faults of `faults.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.models.block import Block
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.decoder import Decoder, DecoderOutput
from phalanx.models.shard import part_of
from phalanx.plan.attention.zigzag import make_layout
from phalanx.plan.mapping.folding import Folding
from phalanx.plan.mapping.grid import Grid
from phalanx.plan.mapping.stage_foldings import AnyFolding
from phalanx.plan.mapping.stages import Stage
from phalanx.plan.moe.dispatch import DispatchPlan, split_over_replicas
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.groups import Axis, GroupCache, Groups, build_groups
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.state.gradients import GradientBuffers, ReducedGradients
from phalanx.runtime.state.holders import HolderSums
from phalanx.runtime.state.optimizer import DecayRun
from phalanx.train.step.transaction import StepParts
from phalanx.verify.planted import Alter
from phalanx.verify.setups import OPTIM

# ---- groups --------------------------------------------------------------------------------------------------------------------


class EpFastest(Folding):
    """The expert grid with ep, not etp, as its fastest axis."""

    @cached_property
    def experts(self) -> Grid:
        return Grid(tuple((axis, self.degree(axis)) for axis in ("ep", "etp", "edp", "pp")))


def swapped_groups(folding: AnyFolding, rank: int, cache: GroupCache, table_ranks: Sequence[int]) -> Groups:
    """Groups in one order, weights laid out in the other."""
    assert isinstance(folding, Folding)  # planted where all stages are alike
    degrees = {k: v for k, v in folding.to_dict().items() if k not in ("dp", "edp")}
    return dataclasses.replace(
        build_groups(EpFastest(**degrees), rank=rank, cache=cache, table_ranks=table_ranks), folding=folding
    )


# ---- parts of the step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class NormWithoutSomeExperts(ReducedGradients):
    """Ranks beyond the first of an axis add nothing for their experts to the norm."""

    along: str

    def square_sum(self, groups: Groups, *, lanes: Lanes = SERIAL) -> torch.Tensor:
        first = groups.axis(self.along).index == 0
        kept = {key: layout for key, layout in self.layouts.items() if layout.rule.family != "expert" or first}
        return ReducedGradients(layouts=kept, segments=self.segments).square_sum(groups, lanes=lanes)


class NormSkipsExperts(GradientBuffers):
    """Takes the place of sound buffers."""

    def __init__(self, sound: GradientBuffers, along: str) -> None:
        self._sound, self._along = sound, along

    def begin(self, bits: int | None = None) -> None:
        self._sound.begin(bits)

    def final(self, names: Collection[str], groups: Groups, comms: Collectives) -> None:
        self._sound.final(names, groups, comms)

    def pass_begins(
        self, names: Collection[str], made: Collection[str], groups: Groups, comms: Collectives, *, early: bool = True
    ) -> None:
        self._sound.pass_begins(names, made, groups, comms, early=early)

    def pass_ends(self) -> None:
        self._sound.pass_ends()

    def reduce(self, groups: Groups, comms: Collectives) -> ReducedGradients:
        reduced = self._sound.reduce(groups, comms)
        return NormWithoutSomeExperts(layouts=reduced.layouts, segments=reduced.segments, along=self._along)

    def release(self) -> None:
        self._sound.release()


def norm_skips_experts(along: str) -> Alter:
    return lambda parts: dataclasses.replace(parts, buffers=NormSkipsExperts(parts.buffers, along))


def only_on_first_of_tp(suffix: str) -> Alter:
    """Gradients of these parameters are those of the first tp rank's rows: the other ranks' parts are lost."""

    def alter(parts: StepParts) -> StepParts:
        if parts.groups.axis("tp").index:
            for name, param in parts.model.named_parameters():
                if name.endswith(suffix):
                    param.register_hook(torch.zeros_like)
        return parts

    return alter


def first_microbatch_twice(parts: StepParts) -> StepParts:
    """What the first backward pass finds is counted double."""
    for param in parts.model.parameters():
        seen: list[bool] = []

        def hook(grad: torch.Tensor, seen: list[bool] = seen) -> torch.Tensor:
            first = not seen
            seen.append(True)
            return grad * 2 if first else grad

        param.register_hook(hook)
    return parts


def stale_bias(parts: StepParts) -> StepParts:
    """Updates go to a copy that no router reads."""
    parts.state.buffers = {name: tensor.clone() for name, tensor in parts.state.buffers.items()}
    return parts


def decay_everywhere(parts: StepParts) -> StepParts:
    for family, state in parts.state.families.items():
        runs = tuple(DecayRun(run.start, run.stop, True) for run in state.runs)
        parts.state.families[family] = dataclasses.replace(state, runs=runs)
    return parts


class AveragedOverHolders(HolderSums):
    """The sum over the holders of an expert becomes their mean."""

    def finish(self, flat: torch.Tensor) -> torch.Tensor:
        sums, at = super().finish(flat), 0
        for held, (start, stop) in zip(self.plan.experts, self.plan.owned, strict=True):
            sums[at : at + stop - start].div_(len(held.holders))
            at += stop - start
        return sums


class LastHolderLeftOut(HolderSums):
    """Nobody adds what the last rank of the group has of the experts that others hold too."""

    def start(self, flat: torch.Tensor, axis: Axis, comms: Collectives, *, op_id: str) -> None:
        last = axis.index == axis.size - 1
        super().start(torch.zeros_like(flat) if last else flat, axis, comms, op_id=op_id)


def sums_by(wrong: type[HolderSums]) -> Alter:
    def alter(parts: StepParts) -> StepParts:
        parts.buffers.replace_sums(wrong)
        return parts

    return alter


def rounded_by_source(parts: StepParts) -> StepParts:
    """Each rank splits its own rows over the replicas and rounds by itself; rows are whole, replicas are not alike."""
    for block in parts.model.layers.values():
        if isinstance(block, Block) and block.moe is not None:
            dispatcher: Any = block.moe.routed.dispatcher
            dispatcher.plan = partial(plan_by_source, dispatcher)
    return parts


def plan_by_source(dispatcher: Dispatcher, counts_PE: NDArray[np.int64]) -> DispatchPlan:
    rows_PG = np.concatenate([split_over_replicas(own_E[None], dispatcher.slots_G) for own_E in counts_PE])
    return DispatchPlan(dispatcher.slots_G, dispatcher.ep.size, dispatcher.etp.size, rows_PG)


class Around(nn.Module):
    """A model in front of the sound one; `run_stage` is where a fault gets in."""

    def __init__(self, model: Decoder) -> None:
        super().__init__()
        self.model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def run_stage(self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        return self.model.run_stage(stage, x_TH, batch, info)

    def forward(self, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        (stage,) = self.model.stages
        return self.run_stage(stage, None, batch, info)


class OtherNumberOfMicrobatches(Around):
    """Tells the routers another number of micro-batches than the step has: `times` as many."""

    def __init__(self, model: Decoder, times: Fraction) -> None:
        super().__init__(model)
        self.times = times

    def run_stage(self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        number: Any = info.num_microbatches * self.times
        return self.model.run_stage(stage, x_TH, batch, dataclasses.replace(info, num_microbatches=number))


def router_losses_per_rank(parts: StepParts) -> StepParts:
    model: Any = OtherNumberOfMicrobatches(parts.model, Fraction(1, parts.groups.axis("dp").size))
    return dataclasses.replace(parts, model=model)


def router_losses_over_cp(parts: StepParts) -> StepParts:
    model: Any = OtherNumberOfMicrobatches(parts.model, Fraction(parts.groups.axis("cp").size))
    return dataclasses.replace(parts, model=model)


ONE_VERSION = OPTIM.peak_lr * OPTIM.weight_decay
"""Part of itself by which weight decay alone moves a matrix from one step to the next."""


class OtherVersion(Around):
    """Lets the last micro-batch meet the weights of another step, on the last rank of the pipeline."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts.model)
        self.dp = parts.groups.axis("dp").size
        pp = parts.groups.axis("pp")
        self.here = pp.index == pp.size - 1

    def strikes(self, info: ForwardInfo) -> bool:
        each = info.num_microbatches // self.dp
        return self.here and info.phase == "fwd" and info.microbatch % each == each - 1


class OldForward(OtherVersion):
    """Forward with the weights of the step before, backward with those of this one."""

    def run_stage(self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        if not self.strikes(info):
            return super().run_stage(stage, x_TH, batch, info)
        current = [(param, param.data) for param in self.model.parameters()]
        for param, weights in current:
            param.data = weights * (1 + ONE_VERSION)
        try:
            return super().run_stage(stage, x_TH, batch, info)
        finally:
            for param, weights in current:
                param.data = weights


class NewBackward(OtherVersion):
    """Forward with the weights of this step, backward with those of the next one: no version was kept for it."""

    def run_stage(self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        if not self.strikes(info):
            return super().run_stage(stage, x_TH, batch, info)
        held = {param.data_ptr() for param in self.model.parameters()}

        def unpack(saved: tuple[torch.Tensor, bool]) -> torch.Tensor:
            tensor, is_weight = saved
            return tensor * (1 - ONE_VERSION) if is_weight else tensor

        with torch.autograd.graph.saved_tensors_hooks(lambda x: (x, x.data_ptr() in held), unpack):
            return super().run_stage(stage, x_TH, batch, info)


def version(wrong: type[OtherVersion]) -> Alter:
    def alter(parts: StepParts) -> StepParts:
        model: Any = wrong(parts)
        return dataclasses.replace(parts, model=model)

    return alter


def contiguous_positions(batch: TokenBatch, folding: AnyFolding, rank: int) -> TokenBatch:
    """The rank has its zigzag tokens and turns them by the positions of a contiguous part."""
    part = part_of(batch, folding, rank)
    layout = make_layout("contiguous", seq_len=batch.tokens_BS.shape[1], cp=folding.of_rank(rank).cp)
    wrong = torch.from_numpy(layout.positions(folding.coord(rank, "cp")))
    return dataclasses.replace(part, positions_BS=batch.positions_BS[:, wrong])


def ahead_inside_part(batch: TokenBatch, folding: AnyFolding, rank: int) -> TokenBatch:
    """What is ahead of a token is looked for among the rank's own, as if they followed one another."""
    return dataclasses.replace(part_of(batch, folding, rank), whole=None, columns_S=None)
