"""Gradients of one layout, added up in shards (ZeRO-2, arXiv 1910.02054): each micro-batch's are reduced as its backward pass makes them.

    collect    into a buffer as large as the layout, which there is while it is filled and reduced only (`Rooms`)
    start      reduce-scatter over the group that shards the layout, when a pass has made all that it makes of it
    settle     wait, and add this rank's shard (and the copies that it keeps of others') to what earlier passes have left
    finish     sum of the shards over the other groups of the rule

For one buffer's reduction a micro-batch instead of a step it saves the whole buffers of gradients, 4 bytes a parameter. Sums are the same numbers in another order.

Must never change: a gradient is counted once; parameters and optimizer state are not touched here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from phalanx.kernels.native import CompiledRows
from phalanx.plan.layout import FlatLayout, sums_whole
from phalanx.plan.program import gradient_id
from phalanx.runtime.comm import Collectives, Exchange, Groups
from phalanx.runtime.state.boxes import Segment
from phalanx.runtime.state.shard_totals import ShardTotals

KEPT_ROOMS = 2


def evidence_of(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """0-d tensors, one for each part: not finite where anything in it is not (no host sync)."""
    if not parts or parts[0].device.type == "cpu":
        return [part.sum() for part in parts]  # five times as fast there
    return list(torch._foreach_norm(list(parts), 1))  # in few launches


class Rooms:
    """Memory for buffers that are filled one after the other. On a CPU a few that were given back are kept, for new memory would have to be mapped; on a device torch's
    allocator does the same."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._free: list[torch.Tensor] = []

    def take(self, length: int, device: torch.device) -> torch.Tensor:
        """`length` elements of whatever values: the smallest of the rooms that are large enough, or a new one."""
        fitting = [i for i, room in enumerate(self._free) if len(room) >= length]
        if not fitting:
            return torch.empty(length, dtype=self.dtype, device=device)
        return self._free.pop(min(fitting, key=lambda i: len(self._free[i])))

    def give(self, room: torch.Tensor) -> None:
        if room.device.type == "cpu":
            self._free = [*self._free[-KEPT_ROOMS + 1 :], room]


class ShardedSums:
    """The gradients of one layout; `missing`: those that the pass under way still has to make."""

    def __init__(
        self,
        key: str,
        layout: FlatLayout,
        params: Mapping[str, torch.Tensor],
        rooms: Rooms,
        rows: CompiledRows | None = None,
    ) -> None:
        """`rows`: compiled kernels that sum the words of what is collected."""
        self.key, self.layout, self.rooms = key, layout, rooms
        self.device = params[layout.params[0].param.name].device
        self.known = ShardTotals(layout, rooms.dtype, rows) if rows is not None else None
        self._names = frozenset(local.param.name for local in layout.params)
        self._total: torch.Tensor | None = None
        self._room: torch.Tensor | None = None
        self._started: Exchange | None = None
        self._forget()

    def begin(self) -> None:
        """Forget an earlier step. A room that somebody may still write to is left to him."""
        self._forget()
        if self._total is None and not self.layout.keepers:  # at once, as in every later step
            self._total = torch.empty(self.layout.shard_length, dtype=self.rooms.dtype, device=self.device)

    def _forget(self) -> None:
        if self._room is not None and self._started is None:
            self.rooms.give(self._room)
        self.missing, self._cycles = 0, 0
        self._room = self._started = None
        self._arrived: list[torch.Tensor] = []
        self._evidence: list[torch.Tensor] | None = None

    @property
    def is_reduced(self) -> bool:
        """Whether all that was collected in this step is."""
        return self._started is not None or (self._cycles > 0 and self._room is None)

    @property
    def is_there(self) -> bool:
        """Whether `settle` would not wait."""
        return self._started is None or self._started.is_there

    def awaits(self, names: Collection[str], made: Collection[str], *, early: bool) -> bool:
        """Whether a pass is the last of its micro-batch for any of these gradients; how many of them it makes is what is missing, and its end if it is not `early`."""
        self.missing = len(self._names.intersection(made)) + (not early)
        return not self._names.isdisjoint(names)

    def collect(self, index: int, grad: torch.Tensor) -> None:
        """Add a gradient of the pass under way."""
        if self._room is None or self._started is not None:
            self._open()
        flat, seen = self._flat, self._seen[index]
        if not (self.known is not None and self.known.collect(index, grad, flat, add=seen)):
            view = self._view(index)
            view.add_(grad) if seen else view.copy_(grad)
        self._seen[index] = True

    def begin_sum(self, index: int) -> tuple[torch.Tensor, bool]:
        """Where a gradient of the pass under way is added up, for who adds to it now, and whether something is in it."""
        if self._room is None or self._started is not None:
            self._open()
        begun, self._seen[index] = self._seen[index], True
        return self._view(index), begun

    def start(self, groups: Groups, comms: Collectives) -> None:
        """Start the reduction of what was collected; what was not is zero."""
        if self._room is None or self._started is not None:
            self._open()
        for index, seen in enumerate(self._seen):
            if not seen:
                self._view(index).zero_()
        layout, axis, flat = self.layout, groups.step_axis(self.layout.rule.shard_over), self._flat
        flat[layout.starts[-1] + layout.params[-1].num_elements :].zero_()
        self._keep_evidence()
        totals = None if self.known is None else self.known.of_shards(self._seen)
        op_id = gradient_id(self.key, layout.rule.shard_over)
        if sums_whole(layout.keepers, scatters=comms.scatters(flat)):
            self._started = comms.start_all_reduce(flat, axis, op_id=op_id, totals=totals)
            self._arrived = [flat[first:stop] for first, stop in layout.kept_runs]
        else:
            shard, self._started = comms.start_reduce_scatter(flat, axis, op_id=op_id, totals=totals)
            self._arrived = [shard]

    def settle(self) -> None:
        """Add what was started, if anything was, to what earlier passes have left."""
        if self._started is None or self._room is None:
            return
        self._started.wait()
        length = self.layout.shard_length
        if self._total is None or len(self._total) != len(self._arrived) * length:
            self._total = self._room.new_empty(len(self._arrived) * length)
        for total, part in zip(self._total.split(length), self._arrived, strict=True):
            total.add_(part) if self._cycles else total.copy_(part)
        self._cycles += 1
        self.rooms.give(self._room)
        self._room, self._started, self._arrived = None, None, []

    def finish(self, groups: Groups, comms: Collectives) -> tuple[Segment, ...]:
        """The sum over all groups of the rule. Collective."""
        self.settle()
        assert self._total is not None  # `reduce` starts all that no pass has started
        for name in self.layout.rule.sum_over:
            if name != self.layout.rule.shard_over and groups.axis(name).size > 1:
                comms.start_all_reduce(self._total, groups.step_axis(name), op_id=gradient_id(self.key, name)).wait()
        length = self.layout.shard_length
        return tuple(Segment(i * length, part) for i, part in enumerate(self._total.split(length)))

    def non_finite(self) -> list[str]:
        """Parameters of which a micro-batch of this rank made a NaN or an infinity."""
        found = (
            [] if self._evidence is None else torch.stack(self._evidence).isfinite().tolist()
        )  # SYNC: of a step that is given up
        return [p.param.name for p, finite in zip(self.layout.params, found, strict=bool(found)) if not finite]

    def release(self) -> None:
        pass

    @property
    def _flat(self) -> torch.Tensor:
        assert self._room is not None
        return self._room[: self.layout.length]

    def _view(self, index: int) -> torch.Tensor:
        local, start = self.layout.params[index], self.layout.starts[index]
        return self._flat[start : start + local.num_elements].view(local.shape)

    def _open(self) -> None:
        """Begin a buffer, with the last one's sum taken."""
        self.settle()
        self._room, self._seen = self.rooms.take(self.layout.length, self.device), [False] * len(self.layout.params)
        if self.known is not None:
            self.known.begin()

    def _keep_evidence(self) -> None:
        """Notes, before a reduction spreads a NaN to all ranks, which parameters have one here (no host sync)."""
        found = evidence_of([self._view(i) for i in range(len(self.layout.params))])
        self._evidence = (
            found if self._evidence is None else [a + b for a, b in zip(self._evidence, found, strict=True)]
        )
