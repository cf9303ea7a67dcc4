"""Sums over the holders of experts with replicas, and results back to them: the executor of `plan/layout/holders.py`.

Decides nothing. Must never change: copies are added in the order of ranks, own one included, by the one rank that completes an element; what goes back is
that sum itself, so all holders have its bits.

    start     the parts of this rank's buffer that others complete leave for them, while the backward pass goes on
    finish    the parts that this rank completes, summed
    send_back them (or whatever was made of them), to all who hold them
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from phalanx.plan.layout import HolderPlan, Run
from phalanx.runtime.comm import Axis, Collectives, Exchange


class HolderSums:
    """One flat buffer's sums of one step after the other. Where no expert has two holders nothing is sent, and the sum is what is there."""

    def __init__(self, plan: HolderPlan) -> None:
        self.plan = plan
        self._at = _places(plan)
        self._coming: tuple[torch.Tensor, Exchange] | None = None

    def begin(self) -> None:
        """Forget what an earlier step left."""
        self._coming = None

    def start(self, flat: torch.Tensor, axis: Axis, comms: Collectives, *, op_id: str) -> None:
        """Post what others complete. `flat` is not to be written before `finish`. Collective over the ep axis, as `finish` is not."""
        if self.plan.travels and axis.size > 1:
            self._coming = _exchange(flat, self.plan.gives, self.plan.takes, axis, comms, op_id)

    def finish(self, flat: torch.Tensor) -> torch.Tensor:
        """(owned,) sums of what this rank completes, a new tensor."""
        if self._coming is None:
            return _picked(flat, self.plan.owned)
        arrived, exchange = self._coming
        exchange.wait()
        self._coming = None
        by_rank = arrived.split([_length(runs) for runs in self.plan.takes])
        sums = flat.new_zeros(self.plan.owned_elements)
        for rank, part in enumerate(by_rank):
            if rank == self.plan.index:
                sums.add_(_picked(flat, self.plan.owned))
                continue
            for run, piece in zip(self.plan.takes[rank], _cut(part, self.plan.takes[rank]), strict=True):
                at = self._at[run]
                sums[at : at + len(piece)].add_(piece)
        return sums

    def send_back(self, shard: torch.Tensor, flat: torch.Tensor, axis: Axis, comms: Collectives, *, op_id: str) -> None:
        """Put `shard` (owned,) into `flat` on this rank and on all others that hold it; theirs come into `flat` too. Collective over the ep axis."""
        for run, piece in zip(self.plan.owned, _cut(shard, self.plan.owned), strict=True):
            flat[slice(*run)].copy_(piece)
        if not (self.plan.travels and axis.size > 1):
            return
        arrived, exchange = _exchange(flat, self.plan.takes, self.plan.gives, axis, comms, op_id)
        exchange.wait()
        for runs, part in zip(self.plan.gives, arrived.split([_length(r) for r in self.plan.gives]), strict=True):
            for run, piece in zip(runs, _cut(part, runs), strict=True):
                flat[slice(*run)].copy_(piece)


def _exchange(
    flat: torch.Tensor,
    sends: Sequence[Sequence[Run]],
    receives: Sequence[Sequence[Run]],
    axis: Axis,
    comms: Collectives,
    op_id: str,
) -> tuple[torch.Tensor, Exchange]:
    """Runs of `flat`, by rank that they go to; what arrives is as long as the runs that come, by rank."""
    rows = _picked(flat, [run for runs in sends for run in runs])
    splits = [[_length(runs) for runs in of_rank] for of_rank in (sends, receives)]
    return comms.start_all_to_all_apart(rows, axis, *splits, op_id=op_id)


def _places(plan: HolderPlan) -> dict[Run, int]:
    """Where in this rank's shard each run lies that it completes."""
    out, at = {}, 0
    for run in plan.owned:
        out[run] = at
        at += run[1] - run[0]
    return out


def _picked(flat: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """The runs one after the other, copied."""
    return torch.cat([flat[start:stop] for start, stop in runs]) if runs else flat.new_empty(0)


def _cut(part: torch.Tensor, runs: Sequence[Run]) -> tuple[torch.Tensor, ...]:
    return part.split([stop - start for start, stop in runs])


def _length(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)
