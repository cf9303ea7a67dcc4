"""Who adds up what of the gradients of experts with replicas: each element in one place, in one order.

An expert of m holders (ranks of one expert-parallel group) is cut into m parts of equal size, to `PART_MULTIPLE` elements. Holder number j, counted by rank, *completes* part j: it
gets that part from all other holders, adds the m of them by rank, and (`whole`) sends the sum back to them. So a sum has the same bits on all holders, whatever
they are; each rank sends and receives what a ring over the holders would; and all experts of a buffer travel in one exchange over the group
that dispatches anyway: there is no process group for an expert or for a set of holders, however many sets there are.

Must never change: the parts of a block that two ranks hold come in the same order on both (blocks in order, experts ascending), so a message needs no
header; every element of an expert has one completer among its holders.

The gradient is a sum, over all holders and nobody else; its normaliser is that of the whole step (`plan/mapping/folding.py: GRADIENT_RULES`), so nothing is
divided. Whoever keeps the optimizer state (all holders, or each for the parts that it completes) is a choice: `ExpertState`.

A *run* is a range `[start, stop)` of the flat buffer of this rank; other ranks have the same elements elsewhere in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from phalanx.plan.mapping import Placement

ExpertState = Literal["whole", "sharded"]
"""What a holder keeps of the master weights and moments of its experts: all of it, or the parts that it completes."""

Run = tuple[int, int]

PART_MULTIPLE = 64
"""Elements in whose multiples an expert is cut: vectors of an elementwise kernel that begins with the expert, or with a part of it, hold the same elements,
so that its last few, which no vector holds, are rounded alike whoever computes them."""


@dataclass(frozen=True)
class HolderBlock:
    """One parameter in the flat buffer: `placement` of its layer, `start` of its first element here, `row` elements of one expert."""

    placement: Placement
    start: int
    row: int


@dataclass(frozen=True)
class HeldExpert:
    """An expert of one block on this rank."""

    block: int
    """Number of its block in the buffer."""
    expert: int
    run: Run
    holders: tuple[int, ...]
    """Places on the ep axis, ascending."""
    is_writer: bool
    """Whether this rank, among all holders, writes it into a checkpoint, where all of them have it whole."""


@dataclass(frozen=True, kw_only=True)
class HolderPlan:
    """This rank's part of the sums of one flat buffer."""

    index: int
    """Index of this rank on the ep axis."""
    size: int
    experts: tuple[HeldExpert, ...]
    """Experts held, in the order of the buffer."""
    travels: bool
    """Some expert of the buffer has several holders: the same answer on all ranks of the axis."""
    state: ExpertState = "whole"

    @property
    def gives(self) -> tuple[tuple[Run, ...], ...]:
        """What each rank of the axis completes of what is held here."""
        return self._exchanged[0]

    @property
    def takes(self) -> tuple[tuple[Run, ...], ...]:
        """What this rank completes of what is held there too, by rank of the axis."""
        return self._exchanged[1]

    @cached_property
    def _exchanged(self) -> tuple[tuple[tuple[Run, ...], ...], tuple[tuple[Run, ...], ...]]:
        """Made for those who sum: to know what is held, no peer is looked at."""
        gives: list[list[Run]] = [[] for _ in range(self.size)]
        takes: list[list[Run]] = [[] for _ in range(self.size)]
        for held in sorted(self.experts, key=lambda held: (held.block, held.expert)):
            for peer in held.holders:
                if peer != self.index:
                    gives[peer].append(_part(held.run, held.holders, peer))
                    takes[peer].append(_part(held.run, held.holders, self.index))
        return tuple(map(_without_empty, gives)), tuple(map(_without_empty, takes))

    @cached_property
    def owned(self) -> tuple[Run, ...]:
        """What this rank completes, in the order of the buffer."""
        return tuple(_part(held.run, held.holders, self.index) for held in self.experts)

    @property
    def owned_elements(self) -> int:
        return sum(stop - start for start, stop in self.owned)

    @property
    def sent_elements(self) -> int:
        """That leave this rank, for the sums alone. `whole` sends as many again as it takes in."""
        return _length(self.gives)

    @property
    def received_elements(self) -> int:
        return _length(self.takes)


def plan_holders(blocks: Sequence[HolderBlock], *, ep: int, size: int, state: ExpertState = "whole") -> HolderPlan:
    """The plan of rank `ep` of `size`, whose buffer has `blocks` one after the other. With replicas there is one expert-parallel group."""
    experts: list[HeldExpert] = []
    travels = False
    for number, block in enumerate(blocks):
        holders = _holders(block.placement)
        travels = travels or any(len(by) > 1 for by in holders.values())
        for i, expert in enumerate(block.placement.local_experts(edp=0, ep=ep)):
            start, by = block.start + i * block.row, holders[expert]
            experts.append(HeldExpert(number, expert, (start, start + block.row), by, by[expert % len(by)] == ep))
    return HolderPlan(index=ep, size=size, experts=tuple(experts), travels=travels, state=state)


@lru_cache(maxsize=256)
def _holders(placement: Placement) -> dict[int, tuple[int, ...]]:
    """Expert -> ranks of the group that hold it, ascending."""
    found: dict[int, list[int]] = {}
    for ep, slots in enumerate(placement.slots[0]):
        for expert in dict.fromkeys(slots):
            found.setdefault(expert, []).append(ep)
    return {expert: tuple(ranks) for expert, ranks in found.items()}


def _part(run: Run, holders: Sequence[int], rank: int) -> Run:
    """The part of an expert that lies at `run` which `rank` completes."""
    length, j = run[1] - run[0], holders.index(rank)
    units = -(-length // PART_MULTIPLE)

    def bound(part: int) -> int:
        return run[0] + min(length, units * part // len(holders) * PART_MULTIPLE)

    return bound(j), bound(j + 1)


def _without_empty(runs: Sequence[Run]) -> tuple[Run, ...]:
    """An expert of fewer elements than holders has empty parts."""
    return tuple(run for run in runs if run[0] < run[1])


def _length(by_rank: Sequence[Sequence[Run]]) -> int:
    return sum(stop - start for runs in by_rank for start, stop in runs)
