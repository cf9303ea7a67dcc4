"""Planted faults, as arguments: altered rule tables, collectives, groups, parts of a step. The product code is not touched.

Each is what a framework did wrong, or could. `phalanx verify --plant NAME` must find it, and tells which ones a comparison of losses would
have let through: most do not move the loss of the step (reference/folding.md, section 4.2). `needs` says in which cases the
fault exists at all: dividing by edp changes nothing where edp is 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from phalanx.core.errors import ConfigError, Problem, nearest
from phalanx.kernels.lanes import SERIAL, Lanes
from phalanx.models.block import Block
from phalanx.models.context import ForwardInfo, TokenBatch
from phalanx.models.decoder import Decoder, DecoderOutput
from phalanx.models.shard import part_of
from phalanx.plan.dispatch import DispatchPlan, split_over_replicas
from phalanx.plan.folding import GRADIENT_RULES, Folding, GradientRule, to_dict
from phalanx.plan.grid import Grid
from phalanx.plan.stage_foldings import AnyFolding
from phalanx.plan.stages import Stage
from phalanx.plan.zigzag import make_layout
from phalanx.runtime.collectives import Collectives, ReduceOp
from phalanx.runtime.dispatch import Dispatcher
from phalanx.runtime.exchange import Exchange, Message
from phalanx.runtime.gradients import GradientBuffers, ReducedGradients
from phalanx.runtime.groups import Axis, GroupCache, Groups, build_groups
from phalanx.runtime.holders import HolderSums
from phalanx.runtime.optimizer_state import DecayRun
from phalanx.train.step import StepParts
from phalanx.verify.faults_overlap import (
    ChunkRouterDetached,
    ColumnsExchanged,
    PartOverwritten,
    RouterOfPartLost,
    RowsOfPassBefore,
    SumsMisplaced,
    TileBeforeRows,
    own_rows_twice,
)
from phalanx.verify.setups import OPTIM, Case

Rules = Mapping[str, GradientRule]
Alter = Callable[[StepParts], StepParts]


def _groups(folding: AnyFolding, rank: int, cache: GroupCache, table_ranks: Sequence[int]) -> Groups:
    return build_groups(folding, rank=rank, cache=cache, table_ranks=table_ranks)


def _same(parts: StepParts) -> StepParts:
    return parts


def _anywhere(case: Case) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, eq=False)
class Fault:
    """One thing done wrong. Whatever is not set is done right."""

    name: str
    summary: str
    needs: Callable[[Case], bool] = _anywhere
    rules: Rules = field(default_factory=lambda: GRADIENT_RULES)
    groups: Callable[[AnyFolding, int, GroupCache, Sequence[int]], Groups] = _groups
    comms: type[Collectives] = Collectives
    alter: Alter = _same
    cut: Callable[[TokenBatch, AnyFolding, int], TokenBatch] = part_of


PER_FAULT = 2
"""Cases that each fault is planted in, of those in which it exists."""
PLANT_TIMEOUT_S = 15.0
"""Longest wait of a collective beside a fault."""

HEALTHY = Fault(name="", summary="nothing is wrong")


# ---- rule tables ---------------------------------------------------------------------------------------------------------------


def _rules(family: str, **changes: Any) -> Rules:
    return {**GRADIENT_RULES, family: dataclasses.replace(GRADIENT_RULES[family], **changes)}


_NORM_COUNTS_REPLICAS = {family: dataclasses.replace(rule, replicas=()) for family, rule in GRADIENT_RULES.items()}


# ---- collectives ---------------------------------------------------------------------------------------------------------------


class _ExpertsDivided(Collectives):
    """The sum of expert gradients becomes a mean over edp."""

    def _divide(self, x: torch.Tensor, axis: Axis, op_id: str) -> None:
        if op_id.startswith("gradient/expert") and op_id.endswith("/edp"):
            x.div_(axis.size)

    def start_all_reduce(self, x: torch.Tensor, axis: Axis, *, op_id: str = "") -> Exchange:
        self._divide(x, axis, op_id)
        return super().start_all_reduce(x, axis, op_id=op_id)

    def start_reduce_scatter(
        self, x_flat: torch.Tensor, axis: Axis, *, op_id: str = ""
    ) -> tuple[torch.Tensor, Exchange]:
        self._divide(x_flat, axis, op_id)
        return super().start_reduce_scatter(x_flat, axis, op_id=op_id)


class _LocalBalance(Collectives):
    """Counts for the balancing loss stay those of the rank."""

    def all_reduce(self, x: torch.Tensor, axis: Axis, *, op: ReduceOp = "sum", op_id: str = "") -> torch.Tensor:
        if op_id.endswith("router.balance") or op_id == "balance_counts":
            return x
        return super().all_reduce(x, axis, op=op, op_id=op_id)


class _LocalValidTokens(Collectives):
    """Each rank divides by its own number of labels, times the number of ranks."""

    def all_reduce(self, x: torch.Tensor, axis: Axis, *, op: ReduceOp = "sum", op_id: str = "") -> torch.Tensor:
        if op_id == "valid_tokens":
            return x * axis.size
        return super().all_reduce(x, axis, op=op, op_id=op_id)


class _LocalBiasCounts(Collectives):
    """The expert bias follows the counts of the own rank: they are the tail of the vote."""

    NUM_FIGURES = 7
    """Behind them come times, which are for people."""

    def all_reduce(self, x: torch.Tensor, axis: Axis, *, op: ReduceOp = "sum", op_id: str = "") -> torch.Tensor:
        own = x.clone()
        out = super().all_reduce(x, axis, op=op, op_id=op_id)
        if op_id == "vote":
            out[self.NUM_FIGURES :] = own[self.NUM_FIGURES :]
        return out


class _ClippedBeforeReduction(Collectives):
    """Each rank clips its own gradients, then they are summed."""

    LIMIT = 0.05

    def _clip(self, x: torch.Tensor, op_id: str) -> None:
        if op_id.startswith("gradient/"):
            x.mul_((self.LIMIT / x.norm().clamp(min=1e-30)).clamp(max=1.0))

    def start_all_reduce(self, x: torch.Tensor, axis: Axis, *, op_id: str = "") -> Exchange:
        self._clip(x, op_id)
        return super().start_all_reduce(x, axis, op_id=op_id)

    def start_reduce_scatter(
        self, x_flat: torch.Tensor, axis: Axis, *, op_id: str = ""
    ) -> tuple[torch.Tensor, Exchange]:
        self._clip(x_flat, op_id)
        return super().start_reduce_scatter(x_flat, axis, op_id=op_id)


class _NothingPublished(Collectives):
    """Each rank keeps its own shard of the new parameters, and the old values of the others'."""

    def all_gather(
        self, shard: torch.Tensor, axis: Axis, *, out: torch.Tensor | None = None, op_id: str = ""
    ) -> torch.Tensor:
        voted = ("all_reduce", "world") in self.counters  # the starting state was published before, soundly
        if op_id.startswith("publish/") and out is not None and voted:
            return out
        return super().all_gather(shard, axis, out=out, op_id=op_id)


class _CopyWithoutGradient(Collectives):
    """What comes for a copy of another's shard is taken for zero. Sums travel apart, as over a transport with a reduce-scatter of its own."""

    def scatters(self, x: torch.Tensor) -> bool:
        return True

    def start_exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], axis: Axis, *, op_id: str = ""
    ) -> Exchange:
        exchange = super().start_exchange(sends, receives, axis, op_id=op_id)
        if not op_id.endswith("/copies"):
            return exchange

        def finish() -> None:
            exchange.wait()
            for message in receives:
                message.tensor.zero_()

        return Exchange(finish)


class _WrongCombineSplits(Collectives):
    """On the way back rows are cut at the sizes of the next rank."""

    def all_to_all_rows(
        self,
        x: torch.Tensor,
        *,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        axis: Axis,
        op_id: str = "",
    ) -> torch.Tensor:
        if axis.group is None or not op_id.endswith("combine.rows"):
            return super().all_to_all_rows(x, in_splits=in_splits, out_splits=out_splits, axis=axis, op_id=op_id)
        wrong = [*in_splits[1:], in_splits[0]]
        told = self.gather_objects(wrong, axis)
        arriving = [sends[axis.index] for sends in told]
        y = super().all_to_all_rows(x, in_splits=wrong, out_splits=arriving, axis=axis, op_id=op_id)
        missing = sum(out_splits) - len(y)
        return F.pad(y, (0, 0, 0, missing)) if missing >= 0 else y[: sum(out_splits)]


class _RowLost(Collectives):
    """The first row that a rank sends to the experts arrives as zeros."""

    def all_to_all_rows(
        self,
        x: torch.Tensor,
        *,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        axis: Axis,
        op_id: str = "",
    ) -> torch.Tensor:
        if op_id.endswith("dispatch.rows") and len(x):
            keep = torch.ones(len(x), 1, dtype=x.dtype)
            keep[0] = 0
            x = x * keep
        return super().all_to_all_rows(x, in_splits=in_splits, out_splits=out_splits, axis=axis, op_id=op_id)


class _RouterDetached(Collectives):
    """Routing weights travel without their gradient."""

    def all_to_all_rows(
        self,
        x: torch.Tensor,
        *,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        axis: Axis,
        op_id: str = "",
    ) -> torch.Tensor:
        y = super().all_to_all_rows(x, in_splits=in_splits, out_splits=out_splits, axis=axis, op_id=op_id)
        return y.detach() if op_id.endswith("dispatch.weights") else y


class _SlicesNotSummed(Collectives):
    """A token gets the part that its own slice of the expert computed, not the sum over etp."""

    def reduce_scatter_rows(
        self, x: torch.Tensor, *, sizes: Sequence[int], axis: Axis, op_id: str = ""
    ) -> torch.Tensor:
        if axis.size > 1 and op_id.endswith("combine.rows_etp"):
            return x.split(list(sizes))[axis.index]
        return super().reduce_scatter_rows(x, sizes=sizes, axis=axis, op_id=op_id)


# ---- groups --------------------------------------------------------------------------------------------------------------------


class _EpFastest(Folding):
    """The expert grid with ep, not etp, as its fastest axis."""

    @cached_property
    def experts(self) -> Grid:
        return Grid(tuple((axis, self.degree(axis)) for axis in ("ep", "etp", "edp", "pp")))


def _swapped_groups(folding: AnyFolding, rank: int, cache: GroupCache, table_ranks: Sequence[int]) -> Groups:
    """Groups in one order, weights laid out in the other."""
    assert isinstance(folding, Folding)  # planted where all stages are alike
    degrees = {k: v for k, v in to_dict(folding).items() if k not in ("dp", "edp")}
    return dataclasses.replace(
        build_groups(_EpFastest(**degrees), rank=rank, cache=cache, table_ranks=table_ranks), folding=folding
    )


# ---- parts of the step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class _NormWithoutSomeExperts(ReducedGradients):
    """Ranks beyond the first of an axis add nothing for their experts to the norm."""

    along: str

    def square_sum(self, groups: Groups, *, lanes: Lanes = SERIAL) -> torch.Tensor:
        first = groups.axis(self.along).index == 0
        kept = {key: layout for key, layout in self.layouts.items() if layout.rule.family != "expert" or first}
        return ReducedGradients(layouts=kept, segments=self.segments).square_sum(groups, lanes=lanes)


class _NormSkipsExperts(GradientBuffers):
    """Takes the place of sound buffers."""

    def __init__(self, sound: GradientBuffers, along: str) -> None:
        self._sound, self._along = sound, along

    def begin(self, bits: int | None = None) -> None:
        self._sound.begin(bits)

    def final(self, names: Collection[str], groups: Groups, comms: Collectives) -> None:
        self._sound.final(names, groups, comms)

    def reduce(self, groups: Groups, comms: Collectives) -> ReducedGradients:
        reduced = self._sound.reduce(groups, comms)
        return _NormWithoutSomeExperts(layouts=reduced.layouts, segments=reduced.segments, along=self._along)

    def release(self) -> None:
        self._sound.release()


def _norm_skips_experts(along: str) -> Alter:
    return lambda parts: dataclasses.replace(parts, buffers=_NormSkipsExperts(parts.buffers, along))


def _only_on_first_of_tp(suffix: str) -> Alter:
    """Gradients of these parameters are those of the first tp rank's rows: the other ranks' parts are lost."""

    def alter(parts: StepParts) -> StepParts:
        if parts.groups.axis("tp").index:
            for name, param in parts.model.named_parameters():
                if name.endswith(suffix):
                    param.register_hook(torch.zeros_like)
        return parts

    return alter


def _first_microbatch_twice(parts: StepParts) -> StepParts:
    """What the first backward pass finds is counted double."""
    for param in parts.model.parameters():
        seen: list[bool] = []

        def hook(grad: torch.Tensor, seen: list[bool] = seen) -> torch.Tensor:
            first = not seen
            seen.append(True)
            return grad * 2 if first else grad

        param.register_hook(hook)
    return parts


def _stale_bias(parts: StepParts) -> StepParts:
    """Updates go to a copy that no router reads."""
    parts.state.buffers = {name: tensor.clone() for name, tensor in parts.state.buffers.items()}
    return parts


def _decay_everywhere(parts: StepParts) -> StepParts:
    for family, state in parts.state.families.items():
        runs = tuple(DecayRun(run.start, run.stop, True) for run in state.runs)
        parts.state.families[family] = dataclasses.replace(state, runs=runs)
    return parts


class _AveragedOverHolders(HolderSums):
    """The sum over the holders of an expert becomes their mean."""

    def finish(self, flat: torch.Tensor) -> torch.Tensor:
        sums, at = super().finish(flat), 0
        for held, (start, stop) in zip(self.plan.experts, self.plan.owned, strict=True):
            sums[at : at + stop - start].div_(len(held.holders))
            at += stop - start
        return sums


class _LastHolderLeftOut(HolderSums):
    """Nobody adds what the last rank of the group has of the experts that others hold too."""

    def start(self, flat: torch.Tensor, axis: Axis, comms: Collectives, *, op_id: str) -> None:
        last = axis.index == axis.size - 1
        super().start(torch.zeros_like(flat) if last else flat, axis, comms, op_id=op_id)


def _sums_by(wrong: type[HolderSums]) -> Alter:
    def alter(parts: StepParts) -> StepParts:
        parts.buffers.replace_sums(wrong)
        return parts

    return alter


def _rounded_by_source(parts: StepParts) -> StepParts:
    """Each rank splits its own rows over the replicas and rounds by itself; rows are whole, replicas are not alike."""
    for block in parts.model.layers.values():
        if isinstance(block, Block) and block.moe is not None:
            dispatcher: Any = block.moe.routed.dispatcher
            dispatcher.plan = partial(_plan_by_source, dispatcher)
    return parts


def _plan_by_source(dispatcher: Dispatcher, counts_PE: NDArray[np.int64]) -> DispatchPlan:
    rows_PG = np.concatenate([split_over_replicas(own_E[None], dispatcher.slots_G) for own_E in counts_PE])
    return DispatchPlan(dispatcher.slots_G, dispatcher.ep.size, dispatcher.etp.size, rows_PG)


class _Around(nn.Module):
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


class _OtherNumberOfMicrobatches(_Around):
    """Tells the routers another number of micro-batches than the step has: `times` as many."""

    def __init__(self, model: Decoder, times: Fraction) -> None:
        super().__init__(model)
        self.times = times

    def run_stage(self, stage: Stage, x_TH: torch.Tensor | None, batch: TokenBatch, info: ForwardInfo) -> DecoderOutput:
        number: Any = info.num_microbatches * self.times
        return self.model.run_stage(stage, x_TH, batch, dataclasses.replace(info, num_microbatches=number))


def _router_losses_per_rank(parts: StepParts) -> StepParts:
    model: Any = _OtherNumberOfMicrobatches(parts.model, Fraction(1, parts.groups.axis("dp").size))
    return dataclasses.replace(parts, model=model)


def _router_losses_over_cp(parts: StepParts) -> StepParts:
    model: Any = _OtherNumberOfMicrobatches(parts.model, Fraction(parts.groups.axis("cp").size))
    return dataclasses.replace(parts, model=model)


ONE_VERSION = OPTIM.lr * OPTIM.weight_decay
"""By what part of itself weight decay alone moves a matrix from one step to the next."""


class _OtherVersion(_Around):
    """On the last rank of the pipeline, the last micro-batch meets the weights of another step."""

    def __init__(self, parts: StepParts) -> None:
        super().__init__(parts.model)
        self.dp = parts.groups.axis("dp").size
        pp = parts.groups.axis("pp")
        self.here = pp.index == pp.size - 1

    def strikes(self, info: ForwardInfo) -> bool:
        each = info.num_microbatches // self.dp
        return self.here and info.phase == "fwd" and info.microbatch % each == each - 1


class _OldForward(_OtherVersion):
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


class _NewBackward(_OtherVersion):
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


def _version(wrong: type[_OtherVersion]) -> Alter:
    def alter(parts: StepParts) -> StepParts:
        model: Any = wrong(parts)
        return dataclasses.replace(parts, model=model)

    return alter


def _contiguous_positions(batch: TokenBatch, folding: AnyFolding, rank: int) -> TokenBatch:
    """The rank has its zigzag tokens and turns them by the positions of a contiguous part."""
    part = part_of(batch, folding, rank)
    layout = make_layout("contiguous", seq_len=batch.tokens_BS.shape[1], cp=folding.of_rank(rank).cp)
    wrong = torch.from_numpy(layout.positions(folding.coord(rank, "cp")))
    return dataclasses.replace(part, positions_BS=batch.positions_BS[:, wrong])


def _ahead_inside_part(batch: TokenBatch, folding: AnyFolding, rank: int) -> TokenBatch:
    """What is ahead of a token is looked for among the rank's own, as if they followed one another."""
    return dataclasses.replace(part_of(batch, folding, rank), whole=None, columns_S=None)


# ---- where a fault exists ------------------------------------------------------------------------------------------------------


def _over(*axes: str) -> Callable[[Case], bool]:
    """All of these axes are larger than one."""
    return lambda case: all(_degrees(case).degree(axis) > 1 for axis in axes)


def _degrees(case: Case) -> Folding:
    """Faults are planted where all stages are alike."""
    return case.folding if isinstance(case.folding, Folding) else Folding(world=1)


def _replicated(case: Case) -> bool:
    return case.setup.replicas is not None


def _and(*conditions: Callable[[Case], bool]) -> Callable[[Case], bool]:
    return lambda case: all(holds(case) for holds in conditions)


def _experts_replicated_less(case: Case) -> bool:
    return _degrees(case).edp < _degrees(case).dp


def _global_aux(case: Case) -> bool:
    return case.setup.spec.router.aux_loss > 0 and case.setup.spec.router.aux_scope == "global_batch"


def _router_loss(case: Case) -> bool:
    router = case.setup.spec.router
    return not _global_aux(case) and (router.z_loss > 0 or router.aux_loss > 0)


def _local_aux(case: Case) -> bool:
    router = case.setup.spec.router
    return router.aux_loss > 0 and router.aux_scope != "global_batch"


def _shared_microbatch(case: Case) -> bool:
    return _degrees(case).tp * _degrees(case).cp > 1


def _predicts_further(case: Case) -> bool:
    return case.setup.spec.mtp_layers > 0


def _bias(case: Case) -> bool:
    return case.setup.spec.router.bias_rate > 0


def _all_to_all(case: Case) -> bool:
    """Rows travel by the collective that these faults change."""
    dispatch = case.setup.dispatch
    return dispatch.transport == "all_to_all" and dispatch.overlap == "serial"


def _tiles(case: Case) -> bool:
    """Rows travel tile by tile, to and from other ranks."""
    return case.setup.dispatch.overlap in ("tiles", "fine", "auto") and _sends_rows(case)


def _chunks(case: Case) -> bool:
    return case.setup.dispatch.overlap.startswith("coarse") and _sends_rows(case)


def _sends_rows(case: Case) -> bool:
    return _degrees(case).ep * _degrees(case).etp > 1 and case.setup.dispatch.transport == "all_to_all"


def _dropless(case: Case) -> bool:
    """Where rows are dropped, wrong weights would drop others."""
    return case.setup.dispatch.policy == "dropless"


def _dropless_serial(case: Case) -> bool:
    dispatch = case.setup.dispatch
    return dispatch.policy == "dropless" and dispatch.overlap == "serial"


def _static_rows(case: Case) -> bool:
    return case.setup.dispatch.is_static


def _uneven_rows(case: Case) -> bool:
    return not _static_rows(case)


def _recomputes_nothing(case: Case) -> bool:
    return case.setup.recompute == "none"


def _has_copies(case: Case) -> bool:
    return case.setup.holders > 1


def _zero(level: int) -> Callable[[Case], bool]:
    return lambda case: case.setup.zero == level


def _accumulates(case: Case) -> bool:
    return case.setup.accumulation > 1


FAULTS: tuple[Fault, ...] = (
    Fault(
        name="experts-divided-by-edp",
        summary="expert gradients averaged over edp instead of summed (DeepSpeed #5618, pytorch #160285)",
        needs=_over("edp"),
        comms=_ExpertsDivided,
    ),
    Fault(
        name="no-edp-reduction",
        summary="expert gradients not summed over edp",
        needs=_over("edp"),
        rules=_rules("expert", sum_over=()),
    ),
    Fault(
        name="experts-over-dp-cp",
        summary="experts reduced over the dense parameters' group (Megatron-LM #5916)",
        needs=_experts_replicated_less,
        rules=_rules("expert", sum_over=("dp_cp",)),
    ),
    Fault(
        name="replicas-averaged",
        summary="gradients of an expert averaged over its holders instead of summed",
        needs=_replicated,
        alter=_sums_by(_AveragedOverHolders),
    ),
    Fault(
        name="holder-left-out",
        summary="one holder's share of the gradients of its experts is in no sum",
        needs=_replicated,
        alter=_sums_by(_LastHolderLeftOut),
    ),
    Fault(
        name="replicas-rounded-by-rank",
        summary="each rank splits its own tokens over the replicas of an expert and rounds by itself",
        needs=_and(_replicated, _dropless_serial),
        alter=_rounded_by_source,
    ),
    Fault(
        name="replicated-not-reduced",
        summary="norms and router not summed over dp",
        needs=_over("dp"),
        rules=_rules("dense_replicated", sum_over=("tp",)),
    ),
    Fault(
        name="aux-counts-not-reduced",
        summary="balancing loss over the global batch sees the own rank's counts only",
        needs=_and(_global_aux, _over("dp")),
        comms=_LocalBalance,
    ),
    Fault(
        name="router-losses-per-rank",
        summary="router losses divided by the own micro-batches, not by those of the step",
        needs=_and(_router_loss, _over("dp")),
        alter=_router_losses_per_rank,
    ),
    Fault(
        name="norm-skips-experts",
        summary="gradient norm without the experts of some ranks (Megatron-LM #5916)",
        needs=_over("ep"),
        alter=_norm_skips_experts("ep"),
    ),
    Fault(
        name="norm-skips-experts-of-tp",
        summary="gradient norm without the experts of ranks beyond the first of tp (Megatron-LM #5916)",
        needs=_over("tp"),
        alter=_norm_skips_experts("tp"),
    ),
    Fault(
        name="router-not-summed-over-tp",
        summary="router gradients of the first tp rank's rows only (torchtitan #1878)",
        needs=_over("tp"),
        alter=_only_on_first_of_tp("router.weight"),
    ),
    Fault(
        name="norms-not-summed-over-tp",
        summary="norm gradients of the first tp rank's rows only: the sum that sequence parallelism needs is missing",
        needs=_over("tp"),
        alter=_only_on_first_of_tp("norm.weight"),
    ),
    Fault(
        name="aux-not-scaled-by-cp",
        summary="router losses divided by cp once too often",
        needs=_and(_router_loss, _over("cp")),
        alter=_router_losses_over_cp,
    ),
    Fault(
        name="aux-counts-of-own-part",
        summary="balancing loss of a micro-batch sees the rank's part of it only, not all of tp x cp",
        needs=_and(_local_aux, _shared_microbatch),
        comms=_LocalBalance,
    ),
    Fault(
        name="contiguous-positions",
        summary="zigzag tokens turned by the positions of a contiguous part",
        needs=_over("cp"),
        cut=_contiguous_positions,
    ),
    Fault(
        name="further-tokens-of-part",
        summary="multi-token prediction takes the tokens ahead from the rank's part of the sequence",
        needs=_and(_predicts_further, _over("cp")),
        cut=_ahead_inside_part,
    ),
    Fault(
        name="norm-counts-replicas",
        summary="gradient norm counts every holder of an element",
        needs=_and(_zero(0), _over("dp")),
        rules=_NORM_COUNTS_REPLICAS,
    ),
    Fault(
        name="clip-before-reduction",
        summary="each rank clips its own gradients before they are summed",
        needs=_over("dp"),
        comms=_ClippedBeforeReduction,
    ),
    Fault(
        name="valid-tokens-per-rank",
        summary="loss divided by the rank's own labels: a mean of means",
        needs=_over("dp"),
        comms=_LocalValidTokens,
    ),
    Fault(
        name="accumulation-counted-twice",
        summary="the first micro-batch is added twice",
        needs=_accumulates,
        alter=_first_microbatch_twice,
    ),
    Fault(
        name="old-weights-forward",
        summary="a stage runs a micro-batch forward with the weights of the step before: pipeline weight version off by one",
        needs=_over("pp"),
        alter=_version(_OldForward),
    ),
    Fault(
        name="new-weights-backward",
        summary="a stage runs a micro-batch backward with the weights of the next step: pipeline weight version off by one",
        needs=_and(_over("pp"), _recomputes_nothing),
        alter=_version(_NewBackward),
    ),
    Fault(
        name="swapped-ep-etp",
        summary="groups with ep fastest, weights with etp fastest",
        needs=_and(
            _over("ep", "etp"), _static_rows
        ),  # where sizes depend on the routing, the ranks would disagree and end
        groups=_swapped_groups,
    ),
    Fault(
        name="combine-splits",
        summary="rows go back with the split sizes of the next rank",
        needs=_and(_over("ep"), _all_to_all, _uneven_rows),
        comms=_WrongCombineSplits,
    ),
    Fault(
        name="dropped-row",
        summary="one token's row is lost on its way to the experts",
        needs=_and(_over("ep"), _all_to_all),
        comms=_RowLost,
    ),
    Fault(
        name="router-detached",
        summary="the gradient of routing weights is cut by the exchange (Automodel #2995)",
        needs=_and(_over("ep"), _all_to_all),
        comms=_RouterDetached,
    ),
    Fault(
        name="etp-not-summed",
        summary="partial outputs of etp slices not added up",
        needs=_and(_over("etp"), _all_to_all),
        comms=_SlicesNotSummed,
    ),
    Fault(
        name="tile-before-rows",
        summary="overlap: tiles of a part are computed before its rows are there",
        needs=_tiles,
        comms=TileBeforeRows,
    ),
    Fault(
        name="columns-exchanged",
        summary="overlap: one block of columns goes back in the place of another",
        needs=_tiles,
        comms=ColumnsExchanged,
    ),
    Fault(
        name="sums-misplaced",
        summary="overlap: partial sums are added to the token behind the one that they belong to",
        needs=_tiles,
        comms=SumsMisplaced,
    ),
    Fault(
        name="part-overwritten",
        summary="overlap: the gradient of weights misses rows of a part, overwritten before it is taken",
        needs=_tiles,
        comms=PartOverwritten,
    ),
    Fault(
        name="router-of-part-lost",
        summary="overlap: gradients of routing weights of a part are lost",
        needs=_tiles,
        comms=RouterOfPartLost,
    ),
    Fault(
        name="rows-of-pass-before",
        summary="overlap: a receive buffer is read with the rows of the pass before",
        needs=_tiles,
        comms=RowsOfPassBefore,
    ),
    Fault(
        name="own-rows-twice",
        summary="overlap: a rank's own rows are counted twice",
        needs=_and(_over("ep"), _tiles, _dropless),
        alter=own_rows_twice,
    ),
    Fault(
        name="chunk-router-detached",
        summary="overlap: the gradient of routing weights of one chunk is cut",
        needs=_and(_chunks, _uneven_rows),
        comms=ChunkRouterDetached,
    ),
    Fault(
        name="stale-bias",
        summary="the expert bias that routers read is never updated",
        needs=_bias,
        alter=_stale_bias,
    ),
    Fault(
        name="bias-from-own-counts",
        summary="the expert bias follows the own rank's counts, so that replicas of the router drift apart",
        needs=_and(_bias, _over("dp")),
        comms=_LocalBiasCounts,
    ),
    Fault(
        name="shards-not-published",
        summary="ranks compute on with old parameters of other ranks' shards",
        needs=_and(_zero(1), _over("dp")),
        comms=_NothingPublished,
    ),
    Fault(
        name="copy-without-gradient",
        summary="holders of another rank's shard update their copies without its gradient",
        needs=_and(_has_copies, _over("dp")),
        comms=_CopyWithoutGradient,
    ),
    Fault(
        name="decay-on-norms",
        summary="weight decay applied to norms and biases",
        alter=_decay_everywhere,
    ),
)


def fault_named(name: str) -> Fault:
    """The fault of that name. Raises `ConfigError` naming the nearest ones."""
    found = {fault.name: fault for fault in FAULTS}
    if name not in found:
        hint = nearest(name, [*found, "all"])
        raise ConfigError(
            [Problem(where="--plant", value=name, rule="is not a known fault", hint=hint)], subject="arguments"
        )
    return found[name]


def cases_with(fault: Fault, cases: Sequence[Case], *, ranks: int) -> list[Case]:
    """The first cases in which the fault exists. Raises `ConfigError` where there is none."""
    found = [case for case in cases if fault.needs(case)][:PER_FAULT]
    if not found:
        rule = f"this fault ({fault.summary}) exists in no mapping of {ranks} rank{'s' if ranks > 1 else ''}"
        problem = Problem(where="--plant", value=fault.name, rule=rule, hint="try --ranks 4")
        raise ConfigError([problem], subject="arguments")
    return found
