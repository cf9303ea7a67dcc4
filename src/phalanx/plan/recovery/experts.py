"""Where experts with replicas live in a new generation, from what its members hold of them.

Decides the placement of each pipeline stage. It is the present one: members that come fill their slots with the experts that have the fewest holders or the
most work, nobody else gets any for their sake; then the fewest slots are changed so that experts below the floor have new holders as far as slots allow
(`plan/placement/search/front.py: patched_placement`). Where single copies that change places bring every expert into several racks, they do (`parted_placement`). Where the floor
cannot be held so, it is the best one (`plan/placement/search/plan.py`), its hosts named so that the fewest experts travel (`plan/placement/search/migration.py`). The search takes seconds for many hosts, and
every member makes it while the run stands still: never only for racks, of which one may be too small for ever (what can be had then, and at which load, `plan/placement/rebalancing.py` weighs between steps). Must never change: every expert has a slot in every layer, whoever is gone; what a host holds already is known from the reports alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phalanx.plan.mapping import Folding, LayerPlacements
from phalanx.plan.placement.search import (
    Floats,
    HostPlacement,
    HostPool,
    ReplicaCounts,
    parted_placement,
    patched_placement,
    plan_migration,
    plan_placement,
    replica_counts,
)
from phalanx.plan.recovery.state_descriptor import Fact

Held = Mapping[int, Sequence[tuple[int, ...]]]
"""Layer -> experts in the slots of each group of ranks that share slots, on one host."""


@dataclass(frozen=True, kw_only=True)
class ReplicaTerms:
    """What a run wants of replicas."""

    num_experts: int
    slots_per_rank: int
    floor: int
    loads: Floats
    """(L, E) tokens, a row for each layer with experts."""
    layers: tuple[int, ...]
    """Layers of the model that have experts: the rows of `loads`."""


def place_experts(
    asked: ReplicaTerms,
    layers: Sequence[int],
    host_of_ep: Sequence[int],
    held: Mapping[int, Held],
    *,
    rack_of: Mapping[int, int] | None = None,
) -> tuple[LayerPlacements, tuple[str, ...]]:
    """The placement of `layers` over the ep ranks of a stage, which are on `host_of_ep`, and other decisions, for the log.

    `held`: what each host of the generation has, by its number; empty where none has any. `rack_of` each host; empty: not known.
    """
    if not layers:
        return LayerPlacements(), ()
    names = tuple(dict.fromkeys(host_of_ep))
    pool = HostPool(
        slots=tuple(asked.slots_per_rank * host_of_ep.count(name) for name in names),
        names=names,
        racks=tuple(rack_of[name] for name in names) if rack_of else (),
    )
    table = np.stack([asked.loads[asked.layers.index(layer)] for layer in layers])
    counts = replica_counts(table, pool, floor=asked.floor)
    placed = _placed(counts, pool, table, _present(asked, layers, held))
    made = LayerPlacements(
        layers={layer: placed.layer_placement(i, host_of_ep=host_of_ep) for i, layer in enumerate(layers)}
    )
    made.check()
    return made, counts.notes


def num_with_replicas(placed: LayerPlacements, host_of_ep: Sequence[int]) -> int:
    """Hosts that hold the same expert, of the one that the fewest hold."""
    found = []
    for placement in placed.layers.values():
        (ranks,) = placement.slots
        on = [set[int]() for _ in range(placement.num_experts)]
        for host, held in zip(host_of_ep, ranks, strict=True):
            for expert in held:
                on[expert].add(host)
        found.append(min(map(len, on)))
    return min(found)


def _placed(counts: ReplicaCounts, pool: HostPool, loads: Floats, present: HostPlacement | None) -> HostPlacement:
    if present is None:
        return plan_placement(counts, pool, loads)
    mended = patched_placement(_filled(present, pool, loads, floor=counts.floor), pool, floor=counts.floor)
    if mended is not None:
        parted = parted_placement(mended, floor=counts.floor)
        return mended if parted.num_in_one_rack(counts.floor) else parted
    return plan_migration(present, plan_placement(counts, pool, loads), rename=True).new


def _filled(present: HostPlacement, pool: HostPool, loads: Floats, *, floor: int) -> HostPlacement:
    """The placement with the free slots of the hosts of `pool` filled, each with the expert that needs it most: all slots of those that come, and of layers that were another stage's."""
    names = present.pool.host_names
    room = dict(zip(pool.host_names, pool.slots, strict=True))
    new = {name: slots for name, slots in room.items() if name not in names}
    stay = [i for i, name in enumerate(names) if name in room]
    rows = []
    for layer, hosts in enumerate(present.slots):
        row = dict(zip(names, hosts, strict=True)) | dict.fromkeys(new, ())
        copies = present.copies[layer][:, stay].sum(1)
        holders = (present.copies[layer][:, stay] > 0).sum(1)
        for name, slots in room.items():
            held = list(row[name])
            for _ in range(slots - len(held)):
                work = loads[layer] / np.maximum(copies, 1)
                expert = min(
                    range(present.num_experts), key=lambda e: (e in held, min(int(holders[e]), floor), -work[e], e)
                )
                holders[expert] += expert not in held
                copies[expert] += 1
                held.append(expert)
            row[name] = (*row[name], *sorted(held[len(row[name]) :]))
        rows.append(tuple(row.values()))
    both = HostPool(slots=(*present.pool.slots, *new.values()), names=(*names, *new))
    return HostPlacement(num_experts=present.num_experts, pool=both, slots=tuple(rows), floor=1)


def _present(asked: ReplicaTerms, layers: Sequence[int], held: Mapping[int, Held]) -> HostPlacement | None:
    """What hosts that have some of `layers` now have of each; None where no host has any. (Not checked: experts may be missing.)"""
    hosts = tuple(host for host in held if any(held[host].get(layer) for layer in layers))
    if not hosts:
        return None
    rows = tuple(tuple(sum(held[host].get(layer, ()), ()) for host in hosts) for layer in layers)
    slots = tuple(max(len(row[i]) for row in rows) for i in range(len(hosts)))
    return HostPlacement(num_experts=asked.num_experts, pool=HostPool(slots=slots, names=hosts), slots=rows, floor=1)


def held_by_host(facts: Sequence[Fact], host_of: Mapping[str, int]) -> dict[int, Held]:
    """What the members of each host have in their slots. The slices of one expert on several members count once."""
    groups: dict[int, dict[tuple[Folding, int, int], tuple[tuple[int, tuple[int, ...]], ...]]] = {}
    for fact in facts:
        if fact.descriptor is not None and fact.descriptor.slots:
            at = fact.descriptor
            key = at.folding, at.folding.coord(at.rank, "ep"), at.folding.coord(at.rank, "pp")
            groups.setdefault(host_of[fact.uid], {}).setdefault(key, at.slots)
    out: dict[int, Held] = {}
    for host, found in sorted(groups.items()):
        layers: dict[int, list[tuple[int, ...]]] = {}
        for slots in found.values():
            for layer, experts in slots:
                layers.setdefault(layer, []).append(experts)
        out[host] = layers
    return out
