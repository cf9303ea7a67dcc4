"""Leads from the gradients that autograd makes to the reduced gradient of each logical parameter.

Carries out `plan.layout.flat_layouts` (which parameter lies where in a family's flat buffer, how it is sharded) and the rules in it
(`plan.mapping.folding.GRADIENT_RULES`: which groups add up which family). Decides nothing, holds no divisor: every reduction is a sum.

    backward of micro-batch 0     hook copies each gradient into the family's flat buffer, param.grad is freed at once
    backward of micro-batch 1..   hook adds it
    on devices                    products write and add most of them themselves (`kernels/device/weight_sums.py`); the hook counts
    pass_begins, pass_ends        with `zero = 2`: what is collected between them is reduced at once, into shards (`sharded_gradients.py`)
    final(names)                  else: the next gradient of these parameters is their last: a buffer that is then complete starts its
                                  reduction at once, while the backward pass goes on
    reduce()                      parameters without a gradient read zero; sum over each group of the rule: the one that shards the
                                  optimizer state reduce-scatters, the others all-reduce; what was started is waited for.
                                  Experts with replicas are summed over their holders, each element by one of them
                                  (`runtime/state/holders.py`). Where others keep a copy of this rank's shard, an all-reduce gives
                                  each what it keeps, or the sum goes on to them (`plan/layout/shard_copies.py`: sums_whole)
    square_sum()                  this rank's share of the squared global norm, every logical element counted once

A family that has nothing to add up (one micro-batch, groups of one rank) is *borrowed*: its gradients stay the tensors that
autograd
made, in their own type, and go to the optimizer without a copy. That is every family of a run on one rank, and the experts
wherever edp = 1.
In exact mode none is: all gradients are added up in fixed point (`_Fixed`), and the sums become numbers again after the last
reduction.

Must never change: parameters and optimizer state are not touched here, so a step can be abandoned after any line of this file.
Reductions start
in one fixed order on all ranks (an expert without tokens makes one rank's buffer complete late), which is why a buffer waits for
those before it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from phalanx.kernels.cpu.fixed_point import FixedSum, FixedSums, fixed_read, fixed_squares, limit
from phalanx.kernels.cpu.lanes import SERIAL, Lanes
from phalanx.kernels.device import WeightSum, WeightSums
from phalanx.kernels.native import CompiledRows
from phalanx.kernels.ops.square_sum import square_sums
from phalanx.plan.layout import FlatLayout, HolderPlan, sums_whole
from phalanx.plan.program import gradient_id
from phalanx.runtime.comm import Collectives, Exchange, Groups
from phalanx.runtime.state.boxes import BoxTensor, Segment
from phalanx.runtime.state.holders import HolderSums
from phalanx.runtime.state.shard_copies import ShardCopies
from phalanx.runtime.state.shard_totals import ShardTotals
from phalanx.runtime.state.sharded_gradients import Rooms, ShardedSums, evidence_of

NORM_BITS = 52
"""Binary places with which fixed-point gradients stay below 2^10, as their squares want them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReducedGradients:
    """What the optimizer gets: for each family, segments that cover what this rank keeps (padding at the end of its shard may be left out)."""

    layouts: Mapping[str, FlatLayout]
    segments: Mapping[str, tuple[Segment, ...]]

    def square_sum(self, groups: Groups, *, lanes: Lanes = SERIAL) -> torch.Tensor:
        """0-d fp64: summed over the world, it is the squared norm of the whole gradient.

        The ranks along `rule.replicas` hold the same elements, so each counts `1/replicas` of them; a shard has no replica along the
        group that shards it. Of an expert with replicas each holder counts the part that it completes.
        """
        terms = []
        for family, layout in self.layouts.items():
            total = square_sums(_counted(layout, self.segments[family]), lanes=lanes)
            terms.append(total / _num_replicas(layout, groups))
        return torch.stack(terms).sum()

    def squares(self, groups: Groups, *, scale: float, lanes: Lanes = SERIAL) -> tuple[int, int, int]:
        """The squares of this rank's share of the gradient times `scale`, in three integers (`fixed_squares`).

        Added up over the world they are those of the whole gradient: of the ranks that hold the same elements the first one counts them, and of an
        expert with replicas each holder the part that it completes.
        """
        found = [(0, 0, 0)]
        for family, layout in self.layouts.items():
            if _is_first(layout, groups):
                counted = _counted(layout, self.segments[family])
                found += [fixed_squares(part, scale=scale, lanes=lanes) for part in counted]
        a, b, c = (sum(part[i] for part in found) for i in range(3))
        return a, b, c

    def boxes(self) -> list[BoxTensor]:
        """The reduced gradients as boxes of logical tensors called `gradient/<param>` (`primary` is not decided here: False)."""
        out = []
        for family, layout in self.layouts.items():
            for segment in self.segments[family]:
                for piece, place in layout.kept_pieces(segment.start, segment.start + segment.tensor.numel()):
                    at = place - segment.start
                    part = segment.tensor[at : at + piece.box.num_elements].view(piece.box.sizes)
                    name = f"gradient/{piece.param.name}"
                    out.append(BoxTensor(name, piece.param.shape, piece.box, part, primary=False))
        return out


def _counted(layout: FlatLayout, segments: Sequence[Segment]) -> list[torch.Tensor]:
    """What of a family's segments this rank counts in the norm: a copy of another's shard is not."""
    if layout.held_whole is None:
        return [s.tensor for s in segments if s.start < layout.shard_length]
    (whole,) = segments
    return [whole.tensor[start:stop] for start, stop in layout.held_whole.owned]


def _is_first(layout: FlatLayout, groups: Groups) -> bool:
    """Whether this rank is the first of those that hold the same elements."""
    return all(groups.axis(name).index == 0 for name in _copied_along(layout))


def _num_replicas(layout: FlatLayout, groups: Groups) -> int:
    return math.prod(groups.axis(name).size for name in _copied_along(layout))


def _copied_along(layout: FlatLayout) -> list[str]:
    """Axes whose ranks hold the same elements: a shard has no copy along the group that shards it."""
    return [n for n in layout.rule.replicas if layout.num_shards == 1 or n != layout.rule.shard_over]


def borrowable(layouts: Mapping[str, FlatLayout], groups: Groups, *, num_microbatches: int) -> frozenset[str]:
    """Families whose gradients need neither accumulation (over this rank's micro-batches) nor reduction."""
    if num_microbatches > 1:
        return frozenset()
    return frozenset(
        family
        for family, layout in layouts.items()
        if layout.num_shards == 1
        and layout.holders is None
        and all(groups.axis(name).size == 1 for name in layout.rule.sum_over)
    )


class GradientBuffers:
    """Collects the gradients of `params` (by logical name), laid out by `layouts`, in buffers of `dtype`.

    Communication: for each layout one reduce-scatter (or all-reduce) over each group of its rule, in `reduce` or, after `final`, during the
    backward pass; of experts with replicas one exchange over ep in its place, and, where holders keep the whole state, one back; where shards have
    copies, an all-reduce in place of the reduce-scatter, or messages of a shard to each of their keepers. With `fixed`
    gradients are added in fixed point, here and between ranks, so that no sum depends on who adds what (`kernels/cpu/fixed_point.py`; up to
    `summands` for an element); experts add theirs by `fixed`, and all reductions wait for `reduce`.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        layouts: Mapping[str, FlatLayout],
        *,
        dtype: torch.dtype,
        borrowed: Collection[str] = (),
        fixed: FixedSums | None = None,
        summands: int = 1,
        lanes: Lanes = SERIAL,
        summed: bool = False,
        zero: int = 1,
        weight_sums: WeightSums | None = None,
    ) -> None:
        """`summed`: messages are checked, so that the word sums of what is collected are of use. `zero`: 2 adds up in shards, where a layout has several. `weight_sums`: for products
        that add gradients themselves, of experts without replicas and all else."""
        rows = lanes.rows if summed else None
        self.layouts = dict(layouts)
        self.bits, self._summands = NORM_BITS, summands
        self._fixed = (
            [] if fixed is None else [_Fixed(key, layout, params, dtype, lanes) for key, layout in layouts.items()]
        )
        in_shards = {
            key: layout for key, layout in layouts.items() if zero == 2 and fixed is None and layout.adds_in_shards
        }
        rooms = Rooms(dtype)
        self._sharded = {key: ShardedSums(key, layout, params, rooms, rows) for key, layout in in_shards.items()}
        self._parts: dict[str, _Flat | _Borrowed | ShardedSums] = {part.key: part for part in self._fixed} or {
            key: _Borrowed(layout, params) if key in borrowed else _Flat(key, layout, params, dtype, rows)
            for key, layout in layouts.items()
            if key not in in_shards
        }
        self._parts |= self._sharded
        self._awaited: list[ShardedSums] = []
        self._under_way: list[ShardedSums] = []
        self._may_order = False
        if fixed is not None:
            fixed.take((params[name], total) for part in self._fixed for name, total in part.by_name())
        self._in_order = _backward_order(self._parts, list(params))
        self._final: set[str] = set()
        self._reach: tuple[Groups, Collectives] | None = None
        places = [(key, i) for key, part in self._parts.items() for i in range(len(part.layout.params))]
        by_products = {} if weight_sums is None else {at: s for at in places if (s := self._sum_at(*at)) is not None}
        named = {(key, i): params[self._parts[key].layout.params[i].param.name] for key, i in places}
        if weight_sums is not None:
            weight_sums.take((named[at], each) for at, each in by_products.items())
        self._nodes = {at: torch.autograd.graph.get_gradient_edge(named[at]).node for at in by_products}
        self._hooks = [self._collect_into(named[at], *at, node=self._nodes.get(at)) for at in places]

    def replace_sums(self, made: Callable[[HolderPlan], HolderSums]) -> None:
        """Let something else add up the gradients of experts with replicas. `phalanx verify` plants faults so."""
        for part in self._parts.values():
            if isinstance(part, _Flat) and part.layout.holders is not None:
                part.sums_of_holders = made(part.layout.holders)

    @property
    def borrowed(self) -> frozenset[str]:
        return frozenset(name for name, part in self._parts.items() if isinstance(part, _Borrowed))

    @property
    def top(self) -> float:
        """Fixed point: the largest magnitude of any gradient of this rank; inf where one is not finite."""
        return max((total.top for part in self._fixed for total in part.totals), default=0.0)

    @property
    def limit(self) -> float:
        """Fixed point: below this `top` no sum can have overflowed."""
        return limit(self.bits, self._summands)

    def begin(self, bits: int | None = None) -> None:
        """Forget whatever an earlier step (finished or not) left behind. `bits`: binary places of fixed-point sums from now on."""
        self._final, self._reach = set(), None
        self._awaited, self._under_way = [], []
        self.bits = self.bits if bits is None else bits
        for part in self._parts.values():
            part.begin()
        for fixed in self._fixed:
            fixed.set_places(self.bits)

    def final(self, names: Collection[str], groups: Groups, comms: Collectives) -> None:
        """Say that the next gradient of each of these parameters is its last of the step. All ranks of a stage say it at the same point."""
        if self._fixed or self._sharded:
            return  # of fixed point it is known at the end whether a sum had room; what is sharded is reduced pass by pass, and all else at the end
        self._final |= set(names)
        self._reach = groups, comms

    def pass_begins(
        self, names: Collection[str], made: Collection[str], groups: Groups, comms: Collectives, *, early: bool = True
    ) -> None:
        """A backward pass begins, which makes a gradient of each of `made`, and after which none of `names` is owed any of its micro-batch. All ranks of a stage say it at
        the same point. `early`: reductions may start within it."""
        self._reach, self._may_order = (groups, comms), early
        while self._under_way:  # of an earlier pass, which all ranks end without this one
            self._under_way.pop(0).settle()
        self._awaited = [
            part for part in self._in_order if isinstance(part, ShardedSums) and part.awaits(names, made, early=early)
        ]
        self._start_awaited()

    def pass_ends(self) -> None:
        """It has ended: what is not complete never will be, as of experts that saw no token."""
        for part in self._awaited:
            part.missing = 0
        self._start_awaited()

    def _settle_what_is_there(self) -> None:
        """So that a buffer or two are alive, and not one for each layout. On a CPU nothing is waited for within a pass: another rank may start a reduction at its end alone, and may
        need rows of this one until then. On a device a wait orders what comes after it, and where ranks are alike they start theirs at the same places."""
        while self._under_way:
            part, orders = self._under_way[0], self._may_order and self._under_way[0].device.type != "cpu"
            if not (len(self._under_way) > 1 if orders else part.is_there):
                return
            self._under_way.pop(0).settle()

    def _start_awaited(self) -> None:
        while self._awaited and self._awaited[0].missing <= 0:
            assert self._reach is not None  # given with the names
            part = self._awaited.pop(0)
            part.start(*self._reach)
            self._under_way.append(part)
            self._settle_what_is_there()

    def reduce(self, groups: Groups, comms: Collectives) -> ReducedGradients:
        """Sum over the groups of each layout's rule. Collective; the collected gradients may be overwritten."""
        for part in self._in_order:
            if not (isinstance(part, ShardedSums) and part.is_reduced):
                part.start(groups, comms)
        segments: dict[str, tuple[Segment, ...]] = {}
        coming: dict[str, ShardCopies] = {}
        for key, layout in self.layouts.items():
            segments[key] = self._parts[key].finish(groups, comms)
            if layout.keepers and not sums_whole(layout.keepers, scatters=comms.scatters(segments[key][0].tensor)):
                own = segments[key][0].tensor
                coming[key] = ShardCopies(layout, own, groups, comms, op_id=gradient_id(key, "copies"))
        for key, copies in coming.items():
            length = self.layouts[key].shard_length
            segments[key] = segments[key][:1] + tuple(
                Segment(i * length, x) for i, x in enumerate(copies.wait(), start=1)
            )
        return ReducedGradients(layouts=self.layouts, segments=segments)

    def non_finite(self) -> tuple[str, ...]:
        """Names of parameters whose gradient on this rank, before reduction, holds a NaN or an infinity. Reads every element."""
        return tuple(name for part in self._parts.values() for name in part.non_finite())

    def release(self) -> None:
        """Free borrowed gradients, once the optimizer has read them."""
        for part in self._parts.values():
            part.release()

    def close(self) -> None:
        """Stop collecting."""
        for hook in self._hooks:
            hook.remove()

    def _sum_at(self, key: str, index: int) -> WeightSum | None:
        """For products that add a gradient themselves; None where something must see each gradient by itself."""
        part = self._parts[key]
        if isinstance(part, _Borrowed) or part.known is not None:
            return None
        if isinstance(part, _Flat) and part.sums_of_holders is not None:
            return None
        return WeightSum(partial(part.begin_sum, index))

    def _collect_into(
        self, param: torch.Tensor, key: str, index: int, *, node: torch.autograd.graph.Node | None
    ) -> torch.utils.hooks.RemovableHandle:
        """The hook holds no buffers: Python's collector does not see what hooks of a tensor hold, so parameters and buffers would keep each other alive for ever.

        `node`: what would set the gradient. It is reached once in a backward pass, behind all uses of the parameter, with a gradient or without one, when torch 2.11 does not call
        the other hook.
        """
        found, of = weakref.ref(self), weakref.ref(param)

        def hook(*_: object) -> None:
            buffers, param = found(), of()
            if buffers is not None and param is not None:
                buffers._collect(param, key, index)

        return param.register_post_accumulate_grad_hook(hook) if node is None else node.register_hook(hook)

    def _collect(self, param: torch.Tensor, key: str, index: int) -> None:
        part = self._parts[key]
        name = part.layout.params[index].param.name
        if param.grad is not None:  # else products have added it, or there is none
            part.collect(index, param.grad)
            param.grad = None
        if name in self._final:
            self._final.remove(name)
            part.missing -= 1
            self._start_complete_ones()
        elif self._awaited and isinstance(part, ShardedSums):
            part.missing -= 1
            self._start_awaited()

    def _start_complete_ones(self) -> None:
        assert self._reach is not None  # given with the names
        for part in self._in_order:
            if part.missing > 0:
                return
            part.start(*self._reach)


def _backward_order(
    parts: Mapping[str, _Flat | _Borrowed | ShardedSums], names: Sequence[str]
) -> list[_Flat | ShardedSums]:
    """Buffers that can reduce early, those that a backward pass completes first at the front: by the place of their first parameter."""
    place = {name: i for i, name in enumerate(names)}
    flat = [part for part in parts.values() if not isinstance(part, _Borrowed)]
    return sorted(flat, key=lambda part: -place[part.layout.params[0].param.name])


class _Flat:
    """A layout in one flat buffer, which there is from the first step on: a new generation of an elastic run needs the memory for its state before."""

    def __init__(
        self,
        key: str,
        layout: FlatLayout,
        params: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        rows: CompiledRows | None = None,
    ) -> None:
        """`rows`: compiled kernels that sum the words of what is collected."""
        self.key, self.layout, self.item = key, layout, dtype
        self.device = params[layout.params[0].param.name].device
        self.sums_of_holders = HolderSums(layout.holders) if layout.holders is not None else None
        with_totals = rows is not None and layout.num_shards > 1 and layout.holders is None
        self.known = ShardTotals(layout, dtype, rows) if with_totals and rows is not None else None
        self._forget()

    @cached_property
    def flat(self) -> torch.Tensor:
        return torch.zeros(self.layout.length, dtype=self.item, device=self.device)

    @cached_property
    def views(self) -> list[torch.Tensor]:
        return [
            self.flat[start : start + local.num_elements].view(local.shape)
            for local, start in zip(self.layout.params, self.layout.starts, strict=True)
        ]

    def begin(self) -> None:
        self._forget()
        _ = self.views  # all at once, as in every later step

    def _forget(self) -> None:
        self.seen = [False] * len(self.layout.params)
        if self.known is not None:
            self.known.begin()
        if self.sums_of_holders is not None:
            self.sums_of_holders.begin()
        self.missing = len(self.seen)
        """Parameters whose last gradient of the step is not there."""
        self.evidence: dict[int, torch.Tensor] = {}
        """Sums of what was collected of parameters, by their place in the layout, where a reduction overwrites it."""
        self.started: Exchange | None = None
        self.shard: torch.Tensor | None = None

    def collect(self, index: int, grad: torch.Tensor) -> None:
        if self.known is not None and self.known.collect(index, grad, self.flat, add=self.seen[index]):
            pass
        elif self.seen[index]:
            self.views[index].add_(grad)
        else:
            self.views[index].copy_(grad)
        self.seen[index] = True

    def begin_sum(self, index: int) -> tuple[torch.Tensor, bool]:
        """Where a gradient is added up, for who adds to it now, and whether something is in it."""
        begun, self.seen[index] = self.seen[index], True
        return self.views[index], begun

    def start(self, groups: Groups, comms: Collectives) -> None:
        """Start the reduction over the first group that has something to add up; only the last one shards. Once a step."""
        if self.started is not None:
            return
        for seen, view in zip(self.seen, self.views, strict=True):
            if not seen:  # no expert here saw a token, or the parameter is unused: its gradient is zero
                view.zero_()
        if self.sums_of_holders is not None:
            if self.layout.scattered is None:
                self._keep_evidence()
            self.sums_of_holders.start(self.flat, groups.step_axis("ep"), comms, op_id=gradient_id(self.key, "holders"))
        first = next(iter(self._groups(groups)), None)
        self.started = Exchange(lambda: None) if first is None else self._sum_over(first, groups, comms)

    def finish(self, groups: Groups, comms: Collectives) -> tuple[Segment, ...]:
        """Wait for what was started, and sum over the groups that are left."""
        assert self.started is not None  # `reduce` starts all
        self.started.wait()
        if self.sums_of_holders is not None:
            return (Segment(0, self._over_holders(self.sums_of_holders, groups, comms)),)
        for name in self._groups(groups)[1:]:
            self._sum_over(name, groups, comms).wait()
        if self.shard is not None:
            return (Segment(0, self.shard),)
        length, runs = self.layout.shard_length, self.layout.kept_runs
        return tuple(Segment(i * length, self.flat[first:stop]) for i, (first, stop) in enumerate(runs))

    def _over_holders(self, sums: HolderSums, groups: Groups, comms: Collectives) -> torch.Tensor:
        """This rank's shard: the parts that it completes, or all that it holds, with the same bits on all holders."""
        shard = sums.finish(self.flat)
        if self.layout.scattered is not None:
            return shard
        sums.send_back(shard, self.flat, groups.step_axis("ep"), comms, op_id=gradient_id(self.key, "back"))
        return self.flat

    def _groups(self, groups: Groups) -> list[str]:
        return [name for name in self.layout.rule.sum_over if groups.axis(name).size > 1]

    def _sum_over(self, name: str, groups: Groups, comms: Collectives) -> Exchange:
        rule, axis, op_id = self.layout.rule, groups.step_axis(name), gradient_id(self.key, name)
        shards = name == rule.shard_over and name == rule.sum_over[-1] and self.layout.num_shards > 1
        scatters = comms.scatters(self.flat)
        known = None
        if self.known is not None and shards and name == self._groups(groups)[0]:
            known = self.known.of_shards(self.seen)
        if shards and not sums_whole(self.layout.keepers, scatters=scatters):
            self._keep_evidence(*(self.layout.shard_range() if scatters else ()))
            self.shard, exchange = comms.start_reduce_scatter(self.flat, axis, op_id=op_id, totals=known)
            return exchange
        self._keep_evidence()
        return comms.start_all_reduce(self.flat, axis, op_id=op_id, totals=known)

    def _keep_evidence(self, start: int = 0, stop: int | None = None) -> None:
        """Notes, before a reduction overwrites this part of the buffer and spreads a NaN to all ranks, which of its parameters have one here (no host sync)."""
        places = enumerate(zip(self.layout.params, self.layout.starts, strict=True))
        stop = self.layout.length if stop is None else stop
        new = [i for i, (p, at) in places if at < stop and start < at + p.num_elements and i not in self.evidence]
        self.evidence |= dict(zip(new, evidence_of([self.views[i] for i in new]), strict=True))

    def non_finite(self) -> list[str]:
        self._keep_evidence()  # of what nothing has overwritten
        pairs = ((local.param.name, self.evidence[i]) for i, local in enumerate(self.layout.params))
        return [name for name, found in pairs if not torch.isfinite(found)]  # SYNC: of a step that is given up

    def release(self) -> None:
        pass


class _Fixed(_Flat):
    """A layout in one flat buffer of fixed-point sums."""

    def __init__(
        self, key: str, layout: FlatLayout, params: Mapping[str, torch.Tensor], dtype: torch.dtype, lanes: Lanes
    ) -> None:
        super().__init__(key, layout, params, torch.int64)
        self.dtype, self.lanes = dtype, lanes
        self.begin()
        self.totals = [FixedSum(view) for view in self.views]

    def by_name(self) -> list[tuple[str, FixedSum]]:
        return [(local.param.name, total) for local, total in zip(self.layout.params, self.totals, strict=True)]

    def begin(self) -> None:
        super().begin()
        self.flat.zero_()
        self.seen = [True] * len(self.seen)

    def set_places(self, bits: int) -> None:
        self.bits = bits
        for total in self.totals:
            total.begin(bits)

    def collect(self, index: int, grad: torch.Tensor) -> None:
        self.totals[index].add(grad.contiguous(), lanes=self.lanes)

    def finish(self, groups: Groups, comms: Collectives) -> tuple[Segment, ...]:
        return tuple(
            Segment(s.start, fixed_read(s.tensor, bits=self.bits, dtype=self.dtype, lanes=self.lanes))
            for s in super().finish(groups, comms)
        )

    def _keep_evidence(self, start: int = 0, stop: int | None = None) -> None:
        pass  # the largest magnitudes are evidence

    def non_finite(self) -> list[str]:
        return [name for name, total in self.by_name() if not math.isfinite(total.top)]


class _Borrowed:
    """A family whose gradients are used as autograd made them."""

    def __init__(self, layout: FlatLayout, params: Mapping[str, torch.Tensor]) -> None:
        self.layout = layout
        self.params = [params[local.param.name] for local in layout.params]
        self.grads: list[torch.Tensor | None] = [None] * len(layout.params)
        self.missing = len(layout.params)

    def begin(self) -> None:
        self.grads = [None] * len(self.layout.params)
        self.missing = len(self.grads)

    def collect(self, index: int, grad: torch.Tensor) -> None:
        if self.grads[index] is not None:
            raise ValueError(
                f"a second micro-batch for the borrowed gradient of {self.layout.params[index].param.name}"
            )
        self.grads[index] = grad.contiguous()

    def finish(self, groups: Groups, comms: Collectives) -> tuple[Segment, ...]:
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, self.grads, strict=True)]
        return tuple(Segment(start, grad.view(-1)) for start, grad in zip(self.layout.starts, grads, strict=True))

    def non_finite(self) -> list[str]:
        return [
            p.param.name
            for p, grad in zip(self.layout.params, self.grads, strict=True)
            if grad is not None and not torch.isfinite(grad.sum())  # SYNC: of a step that is given up
        ]

    def release(self) -> None:
        self.begin()
