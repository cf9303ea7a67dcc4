"""Which box of which logical tensor each rank holds: parameters, and the optimizer state under ZeRO-1.

A *box* is the rectangular part `[offset, offset + size)` of a logical tensor in every dim. Checkpoints, verification and (later)
resharding speak of logical tensors and boxes only, so that any mapping can be compared with, or turned into, any other.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from phalanx.core.errors import PlanError, Problem
from phalanx.core.messages import message
from phalanx.plan.layout.holders import ExpertState, HolderBlock, HolderPlan, Run, plan_holders
from phalanx.plan.layout.shard_copies import Keepers, copies_of, keepers_of
from phalanx.plan.mapping import GRADIENT_RULES, AnyFolding, AnyPlacement, GradientRule, Stage
from phalanx.plan.model import ModelSpec, ParamSpec, parameters


@message
@dataclass(frozen=True)
class Box:
    """Part of a tensor: `offsets[d] <= index[d] < offsets[d] + sizes[d]`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))

    def intersection(self, other: Box) -> Box | None:
        """What both have of their tensor, None for nothing."""
        if self.offsets == other.offsets and self.sizes == other.sizes:  # so it is mostly where a plan is made
            return self if min(self.sizes, default=1) > 0 else None
        offsets, sizes = [], []
        for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True):
            start = max(a, b)
            size = min(a + m, b + n) - start
            if size <= 0:
                return None
            offsets.append(start)
            sizes.append(size)
        return Box(tuple(offsets), tuple(sizes))

    def contains(self, other: Box) -> bool:
        """Whether `other` lies in it altogether."""
        return all(
            a <= b and b + n <= a + m
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )

    def shifted(self, by: Sequence[int]) -> Box:
        return Box(tuple(o + b for o, b in zip(self.offsets, by, strict=True)), self.sizes)


@dataclass(frozen=True)
class Piece:
    """A box of a logical tensor, and where it lies in the holder's local tensor (`local` has the same sizes)."""

    box: Box
    local: Box


@dataclass(frozen=True)
class LocalParam:
    """What one rank holds of one parameter: the local shape and the boxes that fill it.

    A dense parameter is one piece. An expert parameter is one piece per run of consecutive experts among those that are held.
    """

    param: ParamSpec
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def _split(shape: list[int], offsets: list[int], dim: int | None, index: int, count: int, name: str) -> None:
    if dim is None or count == 1:
        return
    if shape[dim] % count:
        raise ValueError(f"{name}: dim {dim} of size {shape[dim]} cannot be split over {count} ranks")
    shape[dim] //= count
    offsets[dim] += index * shape[dim]


def expert_layers(spec: ModelSpec, stages: Sequence[Stage]) -> tuple[int, ...]:
    """Those layers of `stages` that have experts, ascending."""
    return tuple(sorted({p.layer for p in stage_params(spec, stages) if p.family == "expert" and p.layer is not None}))


def stage_params(spec: ModelSpec, stages: Sequence[Stage]) -> tuple[ParamSpec, ...]:
    """The parameters that `stages` (those of one rank, or one of them) need, in forward order.

    The embedding is needed by the first stage of the model, norm, head and multi-token prediction by the last; a tied embedding, or one
    that multi-token prediction uses, by both.
    """
    layers = {layer for stage in stages for layer in stage.layers}
    first, last = any(stage.has_embedding for stage in stages), any(stage.has_head for stage in stages)

    def needed(param: ParamSpec) -> bool:
        if param.layer is not None and param.layer < spec.num_layers:
            return param.layer in layers
        if param.name == "embedding.weight":
            return first or (last and spec.table_at_both_ends)
        return last

    return tuple(p for p in parameters(spec) if needed(p))


def local_param(param: ParamSpec, folding: AnyFolding, placement: AnyPlacement, rank: int) -> LocalParam:
    """Boxes of `param` on `rank`; `placement` is that of the rank's stage. Raises `ValueError` where a dim does not divide (callers check legality first)."""
    return local_params([param], folding, placement, rank)[0]


def local_params(
    params: Iterable[ParamSpec], folding: AnyFolding, placement: AnyPlacement, rank: int
) -> list[LocalParam]:
    """`local_param` of each. Layers are alike: what they hold is found once."""
    out: list[LocalParam] = []
    alike: dict[tuple[object, ...], LocalParam] = {}
    for param in params:
        experts = None
        if param.ep_dim is not None:
            layer = placement.of_layer(param.layer)
            experts = layer.local_experts(edp=folding.coord(rank, "edp"), ep=folding.coord(rank, "ep"))
        key = param.shape, param.tp_dim, param.etp_dim, param.ep_dim, experts
        first = alike.get(key)
        if first is None:
            out.append(_local_param(param, folding, rank, experts))
            alike[key] = out[-1]
        else:
            out.append(LocalParam(param, first.shape, first.pieces))
    return out


def _local_param(param: ParamSpec, folding: AnyFolding, rank: int, experts: Sequence[int] | None) -> LocalParam:
    shape, offsets = list(param.shape), [0] * len(param.shape)
    stage = folding.of_rank(rank)
    _split(shape, offsets, param.tp_dim, folding.coord(rank, "tp"), stage.tp, param.name)
    _split(shape, offsets, param.etp_dim, folding.coord(rank, "etp"), stage.etp, param.name)
    dim = param.ep_dim
    if dim is None or experts is None:
        box = Box(tuple(offsets), tuple(shape))
        return LocalParam(param, tuple(shape), (Piece(box, Box((0,) * len(shape), tuple(shape))),))
    pieces = []
    for slot, expert, count in _runs(experts):
        sizes = tuple(count if d == dim else s for d, s in enumerate(shape))
        box = Box(tuple(expert if d == dim else o for d, o in enumerate(offsets)), sizes)
        local = Box(tuple(slot if d == dim else 0 for d in range(len(shape))), sizes)
        pieces.append(Piece(box, local))
    shape[dim] = len(experts)
    return LocalParam(param, tuple(shape), tuple(pieces))


def _runs(held: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first slot, first expert, length) of each run of consecutive experts."""
    start = 0
    for i in range(1, len(held) + 1):
        if i == len(held) or held[i] != held[i - 1] + 1:
            yield start, held[start], i - start
            start = i


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[tuple[Box, int]]:
    """The elements `[start, stop)` of a row-major tensor as boxes, each with the flat index of its first element.

    At most `2 * dims - 1` boxes; they come in flat order and each is contiguous in memory.
    """
    if start >= stop:
        return []
    if not shape:
        return [(Box((), ()), 0)]
    if len(shape) == 1:
        return [(Box((start,), (stop - start,)), start)]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        return _in_row(shape, start // row, start, stop, row)
    out = _in_row(shape, start // row, start, first * row, row) if start < first * row else []
    if first < last:
        out.append((Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])), first * row))
    if last * row < stop:
        out += _in_row(shape, last, last * row, stop, row)
    return out


def _in_row(shape: Sequence[int], index: int, start: int, stop: int, row: int) -> list[tuple[Box, int]]:
    base = index * row
    return [
        (Box((index, *box.offsets), (1, *box.sizes)), base + flat)
        for box, flat in boxes_of_range(shape[1:], start - base, stop - base)
    ]


@dataclass(frozen=True)
class FlatPiece:
    """A contiguous run of a flat buffer and the box of the logical tensor that it is."""

    param: ParamSpec
    box: Box
    start: int
    """Index of its first element in the flat buffer."""

    @property
    def stop(self) -> int:
        return self.start + self.box.num_elements


@dataclass(frozen=True)
class FlatLayout:
    """One gradient family of one rank, laid end to end in a flat buffer that is padded to `num_shards` equal shards."""

    rule: GradientRule
    params: tuple[LocalParam, ...]
    starts: tuple[int, ...]
    """Index of each parameter's first element in the buffer."""
    num_shards: int
    shard_index: int
    length: int
    """Elements of the buffer, padding included; a multiple of `num_shards`."""
    holders: HolderPlan | None = None
    """Experts with replicas: besides what the rule says, holders of an expert add up its gradients. Such a buffer is one shard for the rule."""
    keepers: Keepers = ()
    """Members of the group that shards the buffer, by shard: who keeps it, its owner first. Empty: its owner alone."""

    @property
    def adds_in_shards(self) -> bool:
        """Whether a rank can add up less than the whole buffer: experts with replicas are summed over their holders instead."""
        return self.num_shards > 1 and self.holders is None and self.rule.sum_over[-1:] == (self.rule.shard_over,)

    @property
    def scattered(self) -> HolderPlan | None:
        """The plan, where this rank's shard is not a range of the buffer but the parts of experts that it completes."""
        return self.holders if self.holders is not None and self.holders.state == "sharded" else None

    @property
    def held_whole(self) -> HolderPlan | None:
        """The plan, where every holder of an expert keeps all of its state."""
        return self.holders if self.holders is not None and self.holders.state == "whole" else None

    @property
    def shard_length(self) -> int:
        """Elements of the shard that this rank owns: it counts and writes them. What it keeps besides are copies (`kept_length`)."""
        if self.scattered is not None:
            return self.scattered.owned_elements
        return self.length // self.num_shards

    def shard_range(self, index: int | None = None) -> tuple[int, int]:
        """[start, stop) of a shard, this rank's by default. Raises `ValueError` where a shard is no range of the buffer."""
        if self.scattered is not None:
            raise ValueError("the state of experts is sharded over their holders: the shard is no range of the buffer")
        i = self.shard_index if index is None else index
        return i * self.shard_length, (i + 1) * self.shard_length

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """Shards of others that this rank keeps too."""
        return copies_of(self.keepers)[self.shard_index] if self.keepers else ()

    @property
    def kept_length(self) -> int:
        """Elements of which this rank keeps master weights and moments: its own shard, then its copies of others."""
        return self.shard_length * (1 + len(self.copies))

    @property
    def kept_runs(self) -> tuple[Run, ...]:
        """Ranges of the buffer that, one after the other, are what this rank keeps."""
        if self.scattered is not None:
            return self.scattered.owned
        return tuple(self.shard_range(i) for i in (self.shard_index, *self.copies))

    @property
    def written_elements(self) -> int:
        """Number of elements of this rank's shard that it writes into a checkpoint if it writes the family at all: of a whole
        expert only one holder does."""
        if self.held_whole is None:
            return self.shard_length
        return sum(held.run[1] - held.run[0] for held in self.held_whole.experts if held.is_writer)

    def kept_pieces(self, start: int, stop: int) -> list[tuple[FlatPiece, int]]:
        """Logical boxes of the elements `[start, stop)` of what this rank keeps, each with its place there."""
        out, at = [], 0
        for first, last in self.kept_runs:
            lo, hi = max(start, at), min(stop, at + last - first)
            if lo < hi:
                out += [(p, p.start - first + at) for p in self.pieces(lo - at + first, hi - at + first)]
            at += last - first
        return out

    def pieces(self, start: int, stop: int) -> list[FlatPiece]:
        """Logical boxes that the buffer range `[start, stop)` consists of, padding left out."""
        out: list[FlatPiece] = []
        for i in range(max(0, bisect_right(self.starts, start) - 1), bisect_left(self.starts, stop)):
            local, begin = self.params[i], self.starts[i]
            lo, hi = max(start, begin), min(stop, begin + local.num_elements)
            if lo < hi:
                out += _flat_pieces(local, begin, lo - begin, hi - begin)
        return out


def _flat_pieces(local: LocalParam, begin: int, lo: int, hi: int) -> list[FlatPiece]:
    """Boxes of elements [lo, hi) of one local parameter whose flat buffer starts at `begin`.

    Pieces of a local parameter differ in dim 0 only (slots), so each is a contiguous run of it.
    """
    out = []
    row = math.prod(local.shape[1:])
    for piece in local.pieces:
        first = piece.local.offsets[0] * row if local.shape else 0
        size = piece.local.num_elements
        a, b = max(lo, first), min(hi, first + size)
        for box, flat in boxes_of_range(piece.local.sizes, a - first, b - first) if a < b else []:
            out.append(FlatPiece(local.param, box.shifted(piece.box.offsets), begin + first + flat))
    return out


SHARD_MULTIPLE = 64
"""Shards are padded to this many elements, so that every shard starts on a cache line and a vector boundary."""


def flat_layouts(
    params: Sequence[ParamSpec],
    folding: AnyFolding,
    placement: AnyPlacement,
    rank: int,
    *,
    zero: int = 1,
    rules: Mapping[str, GradientRule] | None = None,
    bucket_elements: int = 0,
    expert_state: ExpertState = "whole",
    holders: int = 1,
    hosts: Sequence[int] | None = None,
    racks: Sequence[int] = (),
) -> dict[str, FlatLayout]:
    """Flat layouts of `params` (those of the rank's stages, in forward order) as `rank` holds them. With `zero = 0` each buffer is one shard.

    A family is one layout, called by its name, or (`bucket_elements` > 0) several of at least so many elements each, called `family.0`,
    `family.1`, ... from the last parameters to the first: the order in which a backward pass completes their gradients.

    `holders`: hosts that keep each shard, as far as its group has as many (`plan/layout/shard_copies.py`); `hosts` says where the ranks of the folding are,
    None that each stands for a host, `racks` in which racks (empty: nothing is known). `expert_state` counts where experts have replicas, which needs one expert-parallel group of all ranks of a stage: raises `PlanError` else.
    """
    found = flat_buffers(params, folding, placement, rank, rules=rules, bucket_elements=bucket_elements)
    return cut_buffers(
        found, folding, placement, rank, zero=zero, expert_state=expert_state, holders=holders, hosts=hosts, racks=racks
    )


@dataclass(frozen=True)
class FlatBuffer:
    """Parameters of one gradient family end to end, before they are cut into shards: the same on all ranks that hold the same of them."""

    rule: GradientRule
    params: tuple[LocalParam, ...]
    starts: tuple[int, ...]
    num_elements: int
    slotted: bool
    """Of experts with replicas."""


def flat_buffers(
    params: Sequence[ParamSpec],
    folding: AnyFolding,
    placement: AnyPlacement,
    rank: int,
    *,
    rules: Mapping[str, GradientRule] | None = None,
    bucket_elements: int = 0,
) -> dict[str, FlatBuffer]:
    """What `flat_layouts` cuts, under the same names. Raises `PlanError` likewise."""
    rules = GRADIENT_RULES if rules is None else rules
    replicated = not placement.is_plain
    if replicated and folding.of_rank(rank).edp > 1:
        text = "experts with replicas have one expert-parallel group of all ranks of a stage"
        problem = Problem(
            where="folding.ep", value=folding.of_rank(rank).ep, rule=text, hint="ep is what etp and pp leave"
        )
        raise PlanError([problem], subject="placement")
    out = {}
    for family, rule in rules.items():
        locals_ = local_params((p for p in params if p.family == family), folding, placement, rank)
        slotted = replicated and family == "expert"

        def size(local: LocalParam, slotted: bool = slotted) -> int:
            """The same on all ranks that reduce together: they hold different numbers of experts in as many slots."""
            return _slot_elements(local, placement) if slotted else local.num_elements

        buckets = _buckets(locals_, bucket_elements, size)
        for i, bucket in enumerate(buckets):
            starts = [0, *itertools.accumulate(local.num_elements for local in bucket)]
            name = family if len(buckets) == 1 else f"{family}.{i}"
            out[name] = FlatBuffer(rule, tuple(bucket), tuple(starts[:-1]), starts[-1], slotted)
    return out


def cut_buffers(
    buffers: Mapping[str, FlatBuffer],
    folding: AnyFolding,
    placement: AnyPlacement,
    rank: int,
    *,
    zero: int,
    expert_state: ExpertState,
    holders: int,
    hosts: Sequence[int] | None,
    racks: Sequence[int],
) -> dict[str, FlatLayout]:
    """`flat_layouts` of `buffers`, which may come from another rank that holds the same parts of the same parameters."""
    out = {}
    for name, flat in buffers.items():
        group = folding.group_of(rank, flat.rule.shard_over) if zero and not flat.slotted else (rank,)
        unit = len(group) * SHARD_MULTIPLE
        made = FlatLayout(
            rule=flat.rule,
            params=flat.params,
            starts=flat.starts,
            num_shards=len(group),
            shard_index=group.index(rank),
            length=-(-flat.num_elements // unit) * unit,
            keepers=keepers_of(group, holders=holders, hosts=hosts, racks=racks),
        )
        if flat.slotted:
            made = replace(made, holders=_holders(made, folding, placement, rank, expert_state))
        out[name] = made
    return out


def _slot_elements(local: LocalParam, placement: AnyPlacement) -> int:
    assert local.param.ep_dim is not None
    row = local.num_elements // local.shape[local.param.ep_dim]
    return row * placement.of_layer(local.param.layer).slots_per_rank


def _holders(
    layout: FlatLayout, folding: AnyFolding, placement: AnyPlacement, rank: int, state: ExpertState
) -> HolderPlan:
    blocks = [
        HolderBlock(placement.of_layer(local.param.layer), start, math.prod(local.shape[1:]))
        for local, start in zip(layout.params, layout.starts, strict=True)
    ]
    return plan_holders(blocks, ep=folding.coord(rank, "ep"), size=folding.of_rank(rank).ep, state=state)


def _buckets(locals_: Sequence[LocalParam], least: int, size: Callable[[LocalParam], int]) -> list[list[LocalParam]]:
    """Runs of parameters, the last run first; within a run in forward order. Too small a rest joins the run before it."""
    if not locals_:
        return []
    buckets: list[list[LocalParam]] = [[]]
    for local in reversed(locals_):
        if least and sum(map(size, buckets[-1])) >= least:
            buckets.append([])
        buckets[-1].insert(0, local)
    if len(buckets) > 1 and sum(map(size, buckets[-1])) < least // 2:
        rest = buckets.pop()
        buckets[-1] = rest + buckets[-1]
    return buckets
