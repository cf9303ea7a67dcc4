"""Master weights and moments of what this rank keeps, and the parameters that are rounded from them.

Carries out `plan.layout.flat_layouts`: per gradient family one flat buffer in the compute type, of which the modules' parameters become
views, and one shard (the whole buffer with `zero = 0`) of master weight, first and second moment in fp32 (fp64 for fp64; moments in bf16 where the recipe says so). Where shards have several
keepers, copies of others' shards come after it.

    commit    the optimizer reads reduced gradient segments, updates master and moments, rounds into the flat buffer; alone
    publish   all-gather of the shards over the group that shards the family: every parameter is again the rounded master. Where shards have several
              keepers, messages to those that have not rounded them themselves (`plan/layout/shard_copies.py: publication`).
              Experts with replicas whose state is sharded over their holders: each part goes to the other holders

Where masters and moments are to come from elsewhere they get their memory bucket by bucket (`make_room`), as they come.

Must never change: parameters equal the rounded master weights of all shards after `publish`; masters are never rounded
below fp32; each element of a logical tensor has exactly one `primary` holder; all keepers of a shard have the same bits of it.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch

from phalanx.plan.layout import Box, FlatLayout, FlatPiece, publication
from phalanx.runtime.comm import Axis, Collectives, Groups, Message
from phalanx.runtime.processes import in_huge_pages
from phalanx.runtime.state.boxes import BoxTensor
from phalanx.runtime.state.holders import HolderSums
from phalanx.runtime.state.sums import StateSums

_TAG = 8
"""Tag of messages of published parameters, so that they meet one another only."""


@dataclass(frozen=True, eq=False)
class DecayRun:
    """Elements `[start, stop)` of what is kept, in one shard, that share one answer to "does weight decay apply?"."""

    start: int
    stop: int
    decay: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class FamilyState:
    """One family. `master`, `exp_avg`, `exp_avg_sq` (kept_length,) are what this rank keeps, `flat` (length,) all parameters of it."""

    layout: FlatLayout
    flat: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    runs: tuple[DecayRun, ...]
    rounded: torch.Tensor | None = None
    """Where the shard is no range of `flat`: its parameters, which `publish` takes to their places."""

    @property
    def published(self) -> torch.Tensor:
        """This rank's own shard of the parameters, in the compute type."""
        return self._kept_parts()[0] if self.rounded is None else self.rounded

    def rounded_part(self, start: int, stop: int) -> torch.Tensor:
        """Where the elements `[start, stop)` of what is kept go, all of one run, in the compute type."""
        if self.rounded is not None:
            return self.rounded[start:stop]
        at = 0
        for part in self._kept_parts():
            if start < at + len(part):
                return part[start - at : stop - at]
            at += len(part)
        raise IndexError(f"elements [{start}, {stop}) of {at}")

    @property
    def rounded_whole(self) -> torch.Tensor:
        """Where all that is kept goes, in the compute type: the places of `run_table`."""
        return self.flat if self.rounded is None else self.rounded

    @cached_property
    def run_table(self) -> torch.Tensor:
        """(R, 4) int64 beside the state: of each run its first element, its end, whether it decays, and its place in `rounded_whole` less that in what is kept."""
        ends = list(accumulate(stop - first for first, stop in self.layout.kept_runs))
        shifts = [stop - end for (_, stop), end in zip(self.layout.kept_runs, ends, strict=True)]
        rows = [
            (run.start, run.stop, int(run.decay), 0 if self.rounded is not None else shifts[bisect(ends, run.start)])
            for run in self.runs
        ]
        table = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
        return table.to(self.master.device, non_blocking=True)

    @cached_property
    def pieces(self) -> tuple[tuple[FlatPiece, int, bool], ...]:
        """Pieces of what is kept, the same for masters and both moments: boxes of parameters, where each begins, and whether it is
        this rank that writes it."""
        return tuple(
            (piece, at, is_writer)
            for start, stop, is_writer in _written(self.layout)
            for piece, at in self.layout.kept_pieces(start, stop)
        )

    def has_any(self, names: Container[str] | None) -> bool:
        """Whether any of these parameters (None: all there are) lies in it."""
        return names is None or any(local.param.name in names for local in self.layout.params)

    def with_room(self) -> FamilyState:
        """The same, with memory for masters and moments, all zeros."""

        def room(kind: torch.Tensor) -> torch.Tensor:
            return in_huge_pages(torch.empty_like(kind, device=self.flat.device)).zero_()

        return replace(self, master=room(self.master), exp_avg=room(self.exp_avg), exp_avg_sq=room(self.exp_avg_sq))

    def round_masters(self) -> None:
        """Parameters of all that is kept, from the masters."""
        parts = self._kept_parts() if self.rounded is None else [self.rounded]
        for part, master in zip(parts, self.master.split([len(part) for part in parts]), strict=True):
            part.copy_(master)

    def _kept_parts(self) -> list[torch.Tensor]:
        return [self.flat[first:stop] for first, stop in self.layout.kept_runs]

    def parts(self, kind: str) -> list[torch.Tensor]:
        """What an update reads of the masters or moments: all but padding."""
        whole: torch.Tensor = getattr(self, kind)
        return [whole[run.start : run.stop] for run in self.runs]

    def runs_in(self, start: int, stop: int) -> Iterator[DecayRun]:
        """The parts of the decay runs that lie in `[start, stop)` of what is kept."""
        for run in self.runs:
            lo, hi = max(run.start, start), min(run.stop, stop)
            if lo < hi:
                yield DecayRun(lo, hi, run.decay)


class ShardedState:
    """Optimizer state of one rank. Taking it over makes `params` views of flat buffers (same values).

    `dtype` of masters, `moments` of both moments (None: the same). `has_room` False: neither has memory yet, nor do `params` have values. `buffers` are untrained tensors that belong to the run's state (the expert bias), replicated on all ranks, by logical name.
    """

    KINDS = ("master", "exp_avg", "exp_avg_sq")
    """What the optimizer keeps of each parameter."""

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        layouts: Mapping[str, FlatLayout],
        *,
        groups: Groups,
        buffers: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        moments: torch.dtype | None = None,
        has_room: bool = True,
    ) -> None:
        self.groups = groups
        self.buffers = dict(buffers)
        self.families = {
            family: _take_over(params, layout, dtype, moments or dtype, has_room=has_room)
            for family, layout in layouts.items()
        }
        self.sums: StateSums | None = None
        """Where the state is checked for bits that change at rest."""
        self.is_published = True
        """Whether every parameter is the rounded master; not between an update and `publish`."""

    def make_room(self, names: Container[str] | None = None) -> None:
        """Memory for the buckets with masters and moments of these parameters (None: all) that have none yet."""
        for key, family in self.families.items():
            if family.master.is_meta and family.has_any(names):
                self.families[key] = family.with_room()

    def item_bytes(self, kind: str) -> int:
        """Bytes of an element of a kind of state."""
        some: torch.Tensor = getattr(next(iter(self.families.values())), kind)
        return some.element_size()

    def publish(self, comms: Collectives) -> None:
        """Gather every shard of the parameters. Collective; each rank has rounded its own shard into `published` before."""
        self.is_published = False
        for family, state in self.families.items():
            if state.rounded is not None and state.layout.scattered is not None:
                sums, axis = HolderSums(state.layout.scattered), self.groups.step_axis("ep")
                sums.send_back(state.rounded, state.flat, axis, comms, op_id=f"publish/{family}")
            elif state.layout.num_shards > 1:
                axis = self.groups.step_axis(state.layout.rule.shard_over)
                _publish_shards(state, axis, comms, op_id=f"publish/{family}")
        self.is_published = True
        if self.sums is not None:
            kept = {name: x.layout.kept_runs for name, x in self.families.items() if x.rounded is None}
            self.sums.published(self.read_in_a_step(), kept)

    def read_in_a_step(self) -> dict[str, torch.Tensor]:
        """All that forward and backward passes read, by name: the parameters of each family in one, and the buffers."""
        return {name: state.flat for name, state in self.families.items()} | self.buffers

    def restore(self, comms: Collectives) -> None:
        """Rounds the masters and publishes them, after `boxes()` were filled from a checkpoint."""
        if self.sums is not None:
            self.sums.forget()
        for state in self.families.values():
            state.round_masters()
        self.look_at_rest()
        self.publish(comms)

    def look_at_rest(self) -> None:
        """Compare masters and moments with what was written last, where state is checked: `sums` has what it finds. Reads all of them."""
        if self.sums is None:
            return
        for name, state in self.families.items():
            self.sums.at_rest(name, {kind: state.parts(kind) for kind in self.KINDS})

    def boxes(self, names: Container[str] | None = None) -> list[BoxTensor]:
        """Everything a checkpoint holds, as views: `master/`, `exp_avg/`, `exp_avg_sq/` + parameter, `buffer/` + name. `names`: no buckets without any of these."""
        out = []
        for state in self.families.values():
            if not state.has_any(names):
                continue
            primary = self._is_primary(state.layout)
            for kind in self.KINDS:
                out += _shard_boxes(state, kind, primary=primary)
        first = self.groups.axis("tp_dp_cp").index == 0
        for name, tensor in self.buffers.items():
            shape = tuple(tensor.shape)
            out.append(BoxTensor(f"buffer/{name}", shape, Box((0,) * len(shape), shape), tensor, primary=first))
        return out

    def _is_primary(self, layout: FlatLayout) -> bool:
        """Whether this rank writes: of the ranks along the rule's replicas the first one does; shards of one group differ, so all
        of them do."""
        rule = layout.rule
        groups = [name for name in rule.replicas if layout.num_shards == 1 or name != rule.shard_over]
        return all(self.groups.axis(name).index == 0 for name in groups)


def _publish_shards(state: FamilyState, axis: Axis, comms: Collectives, *, op_id: str) -> None:
    """Each shard of the parameters to the members of the axis that do not keep it. Collective."""
    layout, flat = state.layout, state.flat
    parcels = publication(layout.keepers, layout.shard_index)
    if parcels is None:
        comms.all_gather(state.published, axis, out=flat, op_id=op_id)
        return
    sends = [Message(state.published, member, _TAG) for member in parcels.sends]
    receives = []
    for shard in parcels.receives:
        first, stop = layout.shard_range(shard)
        receives.append(Message(flat[first:stop], shard, _TAG))
    comms.start_exchange(sends, receives, axis, op_id=op_id).wait()


def _take_over(
    params: Mapping[str, torch.Tensor], layout: FlatLayout, dtype: torch.dtype, moments: torch.dtype, *, has_room: bool
) -> FamilyState:
    some = params[layout.params[0].param.name]
    flat = in_huge_pages(torch.zeros(layout.length, dtype=some.dtype, device=some.device))
    for local, start in zip(layout.params, layout.starts, strict=True):
        param = params[local.param.name]
        view = flat[start : start + local.num_elements].view(local.shape)
        if has_room:
            view.copy_(param.detach())
        param.data = view
    rounded = None
    if layout.scattered is not None:
        rounded = torch.cat([flat[start:stop] for start, stop in layout.kept_runs])
    where = some.device if has_room else torch.device("meta")
    master = in_huge_pages(torch.empty(layout.kept_length, dtype=dtype, device=where))
    at = 0
    for start, stop in layout.kept_runs if has_room else ():
        master[at : at + stop - start].copy_(flat[start:stop])
        at += stop - start
    return FamilyState(
        layout=layout,
        flat=flat,
        master=master,
        exp_avg=in_huge_pages(torch.zeros_like(master, dtype=moments)),
        exp_avg_sq=in_huge_pages(torch.zeros_like(master, dtype=moments)),
        runs=_decay_runs(layout),
        rounded=rounded,
    )


def _decay_runs(layout: FlatLayout) -> tuple[DecayRun, ...]:
    """Neighbouring parameters of one shard with the same answer, merged; padding belongs to no run. So a copy has the runs of its owner, and the same bits.

    Experts with replicas are a run each, or each part of one: where an expert lies differs between its holders, and an update that began elsewhere
    would round the last few elements of a vector otherwise.
    """
    runs: list[DecayRun] = []
    at, alone = 0, layout.holders is not None
    for first, stop in _ranges(layout):
        begin = len(runs)
        for local, start in zip(layout.params, layout.starts, strict=True):
            lo, hi = max(start, first) - first + at, min(start + local.num_elements, stop) - first + at
            if lo >= hi:
                continue
            if len(runs) > begin and not alone and runs[-1].decay == local.param.decay and runs[-1].stop == lo:
                lo = runs.pop().start
            runs.append(DecayRun(lo, hi, local.param.decay))
        at += stop - first
    return tuple(runs)


def _ranges(layout: FlatLayout) -> Sequence[tuple[int, int]]:
    """Ranges of the buffer that, one after the other, are kept: expert by expert where they have replicas."""
    if layout.held_whole is None:
        return layout.kept_runs
    return [held.run for held in layout.held_whole.experts]


def _shard_boxes(state: FamilyState, kind: str, *, primary: bool) -> list[BoxTensor]:
    out, kept = [], getattr(state, kind)
    for piece, at, is_writer in state.pieces:
        part = kept[at : at + piece.box.num_elements].view(piece.box.sizes)
        name, writes = f"{kind}/{piece.param.name}", primary and is_writer
        out.append(BoxTensor(name, piece.param.shape, piece.box, part, primary=writes))
    return out


def _written(layout: FlatLayout) -> list[tuple[int, int, bool]]:
    """Ranges of what is kept, and whether this rank is the one that writes them: of a shard its owner is, of an expert that several hold whole one of them."""
    if layout.held_whole is None:
        return [(0, layout.shard_length, True), (layout.shard_length, layout.kept_length, False)]
    return [(*held.run, held.is_writer) for held in layout.held_whole.experts]
