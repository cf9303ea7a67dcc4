"""Which expert lives in which slot of which rank.

A *slot* holds one replica of one expert (its `etp` slices lie on the ranks of one etp group). A placement lists, for every
coordinate (edp, ep) of the expert grid, the logical expert in each of its slots. Plain expert parallelism is the placement in which
each expert has exactly one replica per expert-parallel group; replicated experts (arXiv 2407.04656) are just another placement.

Several slots of one rank may hold the same expert: that is one copy of the weights, which serves so many shares of the expert's rows. What a rank
holds (`local_experts`) are therefore its different experts, and the slots of an expert stand beside each other wherever slots are counted (`group_slots`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.messages import message
from phalanx.plan.mapping.folding import Folding


@message
@dataclass(frozen=True, kw_only=True)
class Placement(Hashed):
    """`slots[edp][ep]` = experts held there, in slot order. Every (edp, ep) has the same number of slots."""

    num_experts: int
    slots: tuple[tuple[tuple[int, ...], ...], ...]
    hosts: tuple[int, ...] = ()
    """Host of each ep rank, for whom it is dear to send rows elsewhere; empty: each rank has its own."""
    racks: tuple[int, ...] = ()
    """Rack of each ep rank; empty: nothing is known of racks."""

    def of_layer(self, layer: int | None) -> Placement:
        """Returns this placement, whatever the layer."""
        return self

    @property
    def slots_per_rank(self) -> int:
        return len(self.slots[0][0])

    @cached_property
    def is_plain(self) -> bool:
        """Each expert once per expert-parallel group, in order: slot index == expert id."""
        order = tuple(range(self.num_experts))
        return all(tuple(e for rank in group for e in rank) == order for group in self.slots)

    def local_experts(self, *, edp: int, ep: int) -> tuple[int, ...]:
        """The different experts of a rank, in the order in which it holds their weights: that of their first slots."""
        return tuple(dict.fromkeys(self.slots[edp][ep]))

    @cached_property
    def _group_slots(self) -> NDArray[np.int64]:
        """(edp, ep * slots_per_rank): expert of each slot of an expert-parallel group, rank-major, slots of an expert on a rank together."""
        return np.array(
            [[e for rank in group for e in sorted(rank, key=rank.index)] for group in self.slots], dtype=np.int64
        )

    def group_slots(self, edp: int) -> NDArray[np.int64]:
        """(ep * slots_per_rank,) expert of every slot in expert-parallel group `edp`, rank-major, slots of an expert on a rank together."""
        row: NDArray[np.int64] = self._group_slots[edp]
        return row

    def holders(self, expert: int) -> tuple[tuple[int, int], ...]:
        """(edp, ep) coordinates that hold `expert`, each once."""
        return tuple((d, p) for d, group in enumerate(self.slots) for p, held in enumerate(group) if expert in held)

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        raise_if(_problems(self), PlanError, subject="placement")

    def to_dict(self) -> dict[str, Any]:
        """Plain data; hosts and racks only where they are known."""
        where = {name: known for name, known in (("hosts", self.hosts), ("racks", self.racks)) if known}
        return {"num_experts": self.num_experts, "slots": self.slots, **where}

    def explain(self) -> str:
        kind = "plain" if self.is_plain else "replicated"
        ep = len(self.slots[0])
        return (
            f"{kind} placement: {self.num_experts} experts, {self.slots_per_rank} slots on each of {ep} ep ranks, "
            f"{len(self.slots)} expert-parallel groups"
        )


@message
@dataclass(frozen=True, kw_only=True)
class LayerPlacements(Hashed):
    """A placement for each layer with experts that some rank of a pipeline stage holds, over the same ranks with the same number of slots."""

    layers: Mapping[int, Placement] = field(default_factory=dict)

    def of_layer(self, layer: int | None) -> Placement:
        """Raises `KeyError` for a layer that has none."""
        assert layer is not None  # only parameters of layers have a place on the expert grid
        return self.layers[layer]

    @cached_property
    def is_plain(self) -> bool:
        return all(placement.is_plain for placement in self.layers.values())

    def to_dict(self) -> dict[str, Any]:
        return {str(layer): placement.to_dict() for layer, placement in self.layers.items()}

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        problems = [problem for placement in self.layers.values() for problem in _problems(placement)]
        shapes = {(len(p.slots), len(p.slots[0]), p.slots_per_rank) for p in self.layers.values() if not problems}
        if len(shapes) > 1:
            rule = "every layer has as many groups, ranks and slots as the others"
            problems.append(Problem(where="placement.slots", value=sorted(shapes), rule=rule))
        raise_if(problems, PlanError, subject="placement")

    def explain(self) -> str:
        """One line for each layer."""
        return "\n".join(f"layer {layer}: {placement.explain()}" for layer, placement in self.layers.items())


AnyPlacement = Placement | LayerPlacements
"""The same for all layers, or one for each."""


def _problems(placement: Placement) -> list[Problem]:
    problems = []
    widths = {len(held) for group in placement.slots for held in group}
    if len(widths) != 1:
        problems.append(
            Problem(where="placement.slots", value=sorted(widths), rule="every rank has the same number of slots")
        )
    sizes = [len(group) for group in placement.slots]
    if len(set(sizes)) > 1:
        problems.append(Problem(where="placement.slots", value=sizes, rule="every group has the same number of ranks"))
    for d, group in enumerate(placement.slots):
        held = {e for rank in group for e in rank}
        missing = sorted(set(range(placement.num_experts)) - held)
        unknown = sorted(held - set(range(placement.num_experts)))
        if missing:
            problems.append(
                Problem(
                    where=f"placement.slots[{d}]",
                    value=missing,
                    rule="each expert needs a replica in every expert-parallel group",
                    hint="give these experts a slot",
                )
            )
        if unknown:
            problems.append(
                Problem(
                    where=f"placement.slots[{d}]", value=unknown, rule=f"experts are 0 ... {placement.num_experts - 1}"
                )
            )
    ranks = len(placement.slots[0]) if placement.slots else 0
    if len(placement.hosts) not in (0, ranks):
        rule = f"needs a host for each of the {ranks} ep ranks, or none at all"
        problems.append(Problem(where="placement.hosts", value=len(placement.hosts), rule=rule))
    if len(placement.racks) not in (0, len(placement.hosts)):
        rule = f"needs a rack for each of the {len(placement.hosts)} ep ranks whose hosts are known, or none at all"
        problems.append(Problem(where="placement.racks", value=len(placement.racks), rule=rule))
    return problems


@lru_cache(maxsize=64)
def plain_placement(num_experts: int, folding: Folding) -> Placement:
    """Expert `j` in slot `j` of every expert-parallel group: rank ep holds experts [ep*E/EP, (ep+1)*E/EP)."""
    if num_experts % folding.ep:
        legal = max(d for d in range(1, folding.ep + 1) if num_experts % d == 0)
        problem = Problem(
            where="folding.ep",
            value=folding.ep,
            rule=f"ep must divide the {num_experts} experts",
            hint=f"try ep = {legal}",
        )
        raise PlanError([problem], subject="placement")
    width = num_experts // folding.ep
    group = tuple(tuple(range(p * width, (p + 1) * width)) for p in range(folding.ep))
    return Placement(num_experts=num_experts, slots=(group,) * folding.edp)
