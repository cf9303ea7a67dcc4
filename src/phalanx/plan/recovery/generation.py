"""What a new generation runs, and what moves between its members: the plan that all of them make from the same facts (`plan/recovery/planner.py`).

Must never change: pieces of state have one order, whatever the mapping, so that a member that was cut off in a move can say how far it came by a number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from phalanx.plan.layout import Box, Held, TensorLayout, cells_without, is_covered
from phalanx.plan.mapping import AnyPlacement, Folding, LayerPlacements
from phalanx.plan.placement import of_all_kinds
from phalanx.plan.recovery.state_descriptor import Fact, StateDescriptor, machines_of, slots_of
from phalanx.plan.reshard import Move


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """What one new generation does before it steps."""

    folding: Folding
    members: tuple[Fact, ...]
    """Members in the order of their ranks: those of the mapping, then those that are idle."""
    placement: tuple[LayerPlacements, ...]
    """Placement of each pipeline stage, where experts have replicas; else empty."""
    hosts: tuple[int, ...]
    """Failure domain of each rank of the mapping."""
    racks: tuple[int, ...] = ()
    """Rack of each rank; empty: nothing is known of racks."""
    params: tuple[Move, ...]
    """One for each parameter, the same for master weights and both moments."""
    moment_bytes: int = 4
    """Bytes of an element of a moment."""
    buffers: tuple[Move, ...]
    waves: tuple[tuple[str, ...], ...] = ()
    """Parameters and buffers that move together, wave by wave, in the order of `RecoveryPlanner.order`."""
    missing: tuple[str, ...]
    """Parameters and buffers of which some part has no holder. Empty: training can continue."""
    exact: bool
    """tp, cp, etp and pp are those of the recipe: in exact mode not a bit changes."""
    holders: int = 1
    """Hosts that hold every part of the state, up to as many as are asked for."""
    reason: str = ""
    """Why members are idle, or degrees changed."""
    notes: tuple[str, ...] = ()
    """Other decisions, for the log."""

    @property
    def uids(self) -> tuple[str, ...]:
        """Members' uids in the order of their ranks."""
        return tuple(fact.uid for fact in self.members)

    @property
    def idle(self) -> tuple[str, ...]:
        return self.uids[self.folding.world :]

    def placement_of(self, rank: int) -> AnyPlacement | None:
        """That of the stage of a rank of the mapping; None: experts have no replicas."""
        return self.placement[self.folding.coord(rank, "pp")] if self.placement else None

    def state_descriptor(self, rank: int) -> StateDescriptor:
        """Where a rank of the mapping stands once this plan is carried out."""
        placed = self.placement_of(rank)
        slots = () if placed is None else slots_of(placed, self.folding, rank)
        return StateDescriptor(folding=self.folding, rank=rank, slots=slots, hosts=self.hosts, racks=self.racks)

    @property
    def moves(self) -> list[Move]:
        """Moves of all state: master weights and both moments under `KIND/NAME`, then buffers."""
        return [*of_all_kinds(self.params, moment_bytes=self.moment_bytes), *self.buffers]

    def moves_of(self, wave: int) -> list[Move]:
        """Those of `moves` that are of one wave."""
        names = {*self.waves[wave]}
        params, buffers = ([move for move in moves if move.name in names] for moves in (self.params, self.buffers))
        return [*of_all_kinds(params, moment_bytes=self.moment_bytes), *buffers]

    def descriptor_after(self, rank: int, waves: int, before: StateDescriptor | None) -> StateDescriptor | None:
        """Where a rank of the mapping stands once so many waves have come. `before`: where it stood."""
        moved = sum(map(len, self.waves[:waves]))
        if not moved:
            return before
        made = self.state_descriptor(rank)
        while before is not None and before.moved is not None and before.moved <= moved:
            before = before.rest
        return made if waves == len(self.waves) else replace(made, moved=moved, rest=before)

    @cached_property
    def hash(self) -> str:
        """Hash of all that was decided, and from what."""
        return self._hash_with(
            members=[[f.uid, f.machine, _state_dict(f)] for f in self.members],
            sources=[_boxes(m.name, m.src) for m in (*self.params, *self.buffers)],
        )

    @cached_property
    def decision(self) -> str:
        """Hash of what was decided, whatever the members are called: a prediction and a run that make the same plan have the
        same."""
        machines = machines_of(self.members)
        return self._hash_with(
            members=[[machines.index(f.machine), _state_dict(f)] for f in self.members],
            moves=[_boxes(m.name, side) for m in (*self.params, *self.buffers) for side in (m.src, m.dst)],
        )

    def _hash_with(self, **more: Any) -> str:
        stages = [[[layer, of.to_dict()] for layer, of in sorted(s.layers.items())] for s in self.placement]
        decided = {
            "folding": asdict(self.folding),
            "stages": stages,
            "hosts": self.hosts,
            "racks": self.racks,
            "missing": self.missing,
            **more,
        }
        return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]

    def explain(self) -> str:
        """Says it in a line."""
        if self.missing:
            more = f" and {len(self.missing) - 4} more" if len(self.missing) > 4 else ""
            return f"{self.folding.label()}: no member holds all of {', '.join(self.missing[:4])}{more}"
        return f"{self.folding.label()}: every part has a holder"

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a person should know beside."""
        head = f"{', '.join(self.idle)} {'is' if len(self.idle) == 1 else 'are'} idle: " if self.idle else ""
        return tuple(text for text in (head + self.reason, *self.notes) if text)

    def without(self, wrong: Iterable[tuple[int, str, Box]]) -> GenerationPlan:
        """The same where boxes (member by its rank, name, box) are no sources, because they are damaged."""
        holes: dict[str, list[tuple[int, Box]]] = {}
        for rank, name, box in wrong:
            holes.setdefault(name, []).append((rank, box))
        if not holes:
            return self
        params, buffers = (
            tuple(_with_holes(move, holes.get(move.name, ())) for move in moves)
            for moves in (self.params, self.buffers)
        )
        return replace(self, params=params, buffers=buffers, missing=without_holder((*params, *buffers)))


def _state_dict(fact: Fact) -> dict[str, Any] | None:
    return None if fact.descriptor is None else fact.descriptor.to_dict()


def _boxes(name: str, layout: TensorLayout) -> list[Any]:
    return [name, [[list(h.box.offsets), list(h.box.sizes)] for of in layout.held for h in of]]


def without_holder(moves: Sequence[Move]) -> tuple[str, ...]:
    """Names of what no member holds whole."""
    return tuple(m.name for m in moves if not is_covered(m.src.shape, (h.box for held in m.src.held for h in held)))


def _with_holes(move: Move, holes: Sequence[tuple[int, Box]]) -> Move:
    """A move whose source lacks boxes of some ranks."""
    held = list(move.src.held)
    for rank, hole in holes:
        if rank not in move.src.ranks:
            continue
        at = move.src.ranks.index(rank)
        held[at] = tuple(Held(part, h.place(part).offsets) for h in held[at] for part in cells_without(h.box, hole))
    return replace(move, src=replace(move.src, held=tuple(held)))
