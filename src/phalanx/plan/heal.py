"""What members of a new generation run, and what moves between them so that each holds what its new rank needs.

Decides, from how many members there are and where the state of each stands, the mapping (`Healing.folding`, a function of the number alone), the moves of
parameters, optimizer state and buffers, and what nobody holds any more. Only `dp` and `ep` follow the members; tp, cp, pp and etp are 1 (the rules of a
recipe ask for it); optimizer state is whole at every holder (`optim.zero = 0`), or in shards of which each has as many holders as experts do.

A member says where its state stands as (size, rank): it is that of rank `rank` of the mapping on `size` ranks. So members that come from different
generations, because one was over before all had entered it, need no case of their own: a source layout is put together member by member.

Must never change: all members make the same plan from the same places; state without a holder is named and never made up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from phalanx.core.errors import PlanError, Problem
from phalanx.plan.box_cells import is_covered
from phalanx.plan.folding import Folding
from phalanx.plan.model import ModelSpec
from phalanx.plan.recovery_devices import Limits, is_legal
from phalanx.plan.reshard_types import Move
from phalanx.plan.stage_foldings import AnyFolding
from phalanx.plan.stages import StagePlan
from phalanx.plan.state_layout import StateLayouts
from phalanx.plan.tensor_layout import TensorLayout, whole_layout

BUFFER_BYTES = 4
"""Of an element of a buffer (the expert bias), which is fp32 in every run."""


class Place(NamedTuple):
    """Where a member's state stands: it is what rank `rank` of the run's mapping on `size` ranks holds."""

    size: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class HealPlan:
    """What one new generation does before it steps."""

    folding: Folding
    params: tuple[Move, ...]
    """One for each parameter, the same for master weights and both moments."""
    buffers: tuple[Move, ...]
    missing: tuple[str, ...]
    """Parameters of which some part has no holder. Empty: training can go on."""

    def explain(self) -> str:
        """In a line."""
        if self.missing:
            shown = ", ".join(self.missing[:4]) + (
                f" and {len(self.missing) - 4} more" if len(self.missing) > 4 else ""
            )
            return f"{self.folding.label()}: nobody holds all of {shown}"
        return f"{self.folding.label()}: every part has a holder"


@dataclass(frozen=True, kw_only=True)
class Healing:
    """What stays the same over all generations of a run."""

    spec: ModelSpec
    base: Folding
    """Of the run on as many ranks as its recipe names."""
    stages: StagePlan
    seq_len: int
    floor: int
    """Holders that every expert has, as far as there are members."""
    state_bytes: int = 4
    """Of an element of optimizer state."""
    zero: int = 0
    """1: optimizer state is cut over dp x cp and edp, and each shard has `floor` holders."""
    bucket_elements: int = 0
    """Of a gradient bucket, which decides where shards begin."""
    _layouts: dict[int, StateLayouts] = field(default_factory=dict, init=False, compare=False, repr=False)
    _held: dict[int, Mapping[str, TensorLayout]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def folding(self, size: int) -> Folding:
        """The mapping on `size` ranks: `ep` next to that of the recipe (in doublings) of those that leave every expert `floor` holders."""
        limits = Limits(spec=self.spec, seq_len=self.seq_len, num_samples=size, replicated=False)
        made = [replace(self.base, world=size, ep=ep) for ep in _divisors(size)]
        fit = [f for f in made if is_legal(f, limits) and f.edp >= min(self.floor, size)]
        if not fit:
            rule = "no mapping of dp and ep fits so many members"
            raise PlanError(
                [Problem(where="members", value=size, rule=rule, hint="use another number of ranks")], subject="the run"
            )
        return min(fit, key=lambda f: (abs(math.log2(f.ep / self.base.ep)), f.ep))

    def state(self, size: int) -> Mapping[str, TensorLayout]:
        """What each rank of the mapping on `size` ranks keeps of each parameter's optimizer state, and so of the parameter."""
        if size not in self._held:
            self._layouts[size] = StateLayouts(spec=self.spec, folding=self.folding(size), stages=self.stages)
            self._held[size] = self._layouts[size].shards(
                zero=self.zero, bucket_elements=self.bucket_elements, holders=self.floor
            )
        return self._held[size]

    def plan(self, places: Sequence[Place | None]) -> HealPlan:
        """For members whose state stands at `places` (None: it has none), in the order of their new ranks."""
        target = self.state(len(places))
        moves = [
            Move(name=name, itemsize=self.state_bytes, src=self._source(name, layout, places), dst=layout)
            for name, layout in target.items()
        ]
        holders = [rank for rank, place in enumerate(places) if place is not None]
        buffers = [
            Move(name=name, itemsize=BUFFER_BYTES, src=whole_layout(layout.shape, holders), dst=layout)
            for name, layout in self._layouts[len(places)].buffers().items()
        ]
        missing = tuple(m.name for m in moves if not is_covered(m.src.shape, (h.box for of in m.src.held for h in of)))
        return HealPlan(folding=self.folding(len(places)), params=tuple(moves), buffers=tuple(buffers), missing=missing)

    def _source(self, name: str, target: TensorLayout, places: Sequence[Place | None]) -> TensorLayout:
        """What the members hold of a parameter, by their new ranks."""
        ranks, held, shapes = [], [], []
        for rank, place in enumerate(places):
            if place is None:
                continue
            before = self.state(place.size)[name]
            if place.rank in before.ranks:
                at = before.ranks.index(place.rank)
                ranks.append(rank)
                held.append(before.held[at])
                shapes.append(before.local_shapes[at])
        return TensorLayout(shape=target.shape, ranks=tuple(ranks), held=tuple(held), local_shapes=tuple(shapes))


def heal_problems(folding: AnyFolding, *, floor: int) -> list[Problem]:
    """Whether every expert of a run that is to heal itself has `floor` holders to begin with."""
    if not isinstance(folding, Folding) or folding.ep == 1 or folding.edp >= floor:
        return []
    ways = [ep for ep in _divisors(folding.ep) if folding.world // ep >= floor]
    hint = f"use folding.ep = {max(ways)}" if ways else "use more ranks"
    rule = f"leaves every expert on {folding.edp} of the ranks, and with resilience.heal = true it needs {floor} (resilience.f)"
    return [Problem(where="folding.ep", value=folding.ep, rule=rule, hint=hint)]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
