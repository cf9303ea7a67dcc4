"""Who holds what: the ranks of a run by pipeline stage, the experts of every layer on each, and what is lost with a rank or with its host.

Decides how the label in an event log (`dp8|ep4.edp2`, `tp1/tp2.ep2`) becomes a folding again, and when what a log says of layers, experts and members is believed; what cannot be gives nothing,
for logs are hostile input. A *copy* of an expert is what the ranks of one etp group hold of it together: it is lost with any of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from phalanx.core.errors import PhalanxError, printable
from phalanx.core.events import StatePlaced
from phalanx.plan.mapping import AnyFolding, Folding, parse_stages

MOST_RANKS = 4096
MOST_ROWS = 512
MOST_EXPERTS = 16384
MOST_LAYERS = 4096
MOST_NAMED = 8
"""Experts that are named of those that are lost."""
ATTENTION, EXPERTS = ("tp", "cp", "dp"), ("etp", "ep", "edp")
AXES = (*ATTENTION, "pp", *EXPERTS)


def read_label(label: Any) -> AnyFolding | None:
    """The folding that a label names; None where it names none that can be."""
    if not isinstance(label, str) or len(label) > 400:
        return None
    try:
        if "/" in label:
            staged = parse_stages(label.split("/"))
            return staged if staged.world <= MOST_RANKS else None
        left, bar, right = label.partition("|")
        degrees = {**_degrees(left), **_degrees(right)} if bar else {}
        if not bar or not set(degrees) <= set(AXES):
            return None
        world = degrees.get("tp", 1) * degrees.get("cp", 1) * degrees.get("dp", 1) * degrees.get("pp", 1)
        if not 1 <= world <= MOST_RANKS:
            return None
        folding = Folding(world=world, **{k: v for k, v in degrees.items() if k in ("tp", "cp", "pp", "ep", "etp")})
        folding.check()
        return folding
    except (PhalanxError, ValueError):
        return None


def _degrees(text: str) -> dict[str, int]:
    found = re.findall(r"([a-z]{2,3})(\d{1,5})(?:\.|$)", text)
    return {axis: int(degree) for axis, degree in found}


Slots = tuple[tuple[int, ...], ...]
"""Expert in each slot of each ep rank of a stage."""


@dataclass(frozen=True, kw_only=True)
class LayerHoldings:
    """Experts of a layer, or of all layers of a stage where the log does not tell them."""

    name: str
    stage: int
    slots: Slots

    @cached_property
    def copies(self) -> Counter[int]:
        """Expert -> ep ranks that hold it."""
        return Counter(expert for held in self.slots for expert in set(held))


@dataclass(frozen=True, kw_only=True)
class Holdings:
    """Who holds what."""

    folding: AnyFolding
    layers: tuple[LayerHoldings, ...] = ()
    blocks: tuple[tuple[int, ...], ...] = ()
    """Layers of each stage; empty: not told."""
    experts: int = 0
    told: StatePlaced | None = None

    @cached_property
    def coords(self) -> list[tuple[int, int, int]]:
        """(stage, edp, ep) of each rank."""
        f = self.folding
        return [(f.coord(r, "pp"), f.coord(r, "edp"), f.coord(r, "ep")) for r in range(f.world)]

    def lost_with(self, ranks: Collection[int]) -> dict[str, Any]:
        """What is left of the experts without these ranks: `fewer` have fewer copies, `lost` none, over all layers; the first of those by name."""
        gone = {self.coords[rank] for rank in ranks}
        fewer = lost = 0
        named: list[list[Any]] = []
        for alike in self._alike:
            layer = alike[0]
            here = [(edp, ep) for stage, edp, ep in gone if stage == layer.stage]
            if not here:
                continue
            hit = Counter(expert for _, ep in here for expert in set(layer.slots[ep]))
            edp = self.folding.of_rank(self.first_ranks[layer.stage]).edp
            dead = sorted(expert for expert, count in hit.items() if count == edp * layer.copies[expert])
            fewer, lost = fewer + len(alike) * (len(hit) - len(dead)), lost + len(alike) * len(dead)
            named += [[each.name, expert] for each in alike for expert in dead[:MOST_NAMED]][: MOST_NAMED - len(named)]
        return {"ranks": sorted(ranks), "fewer": fewer, "lost": lost, "named": named, "dense": self._dense(ranks)}

    @cached_property
    def _alike(self) -> list[list[LayerHoldings]]:
        """Layers that are placed alike, together."""
        found: dict[tuple[int, Slots], list[LayerHoldings]] = {}
        for layer in self.layers:
            found.setdefault((layer.stage, layer.slots), []).append(layer)
        return list(found.values())

    def _dense(self, ranks: Collection[int]) -> bool:
        """Whether some rank that is left has the part of attention of each of them."""
        gone = Counter(self._part(rank) for rank in ranks)
        return all(count < self._parts[part] for part, count in gone.items())

    @cached_property
    def _parts(self) -> Counter[tuple[int, int]]:
        """Part of attention -> ranks that have it."""
        return Counter(map(self._part, range(self.folding.world)))

    def _part(self, rank: int) -> tuple[int, int]:
        return self.coords[rank][0], self.folding.coord(rank, "tp")

    @cached_property
    def first_ranks(self) -> list[int]:
        """Of each stage, whose ranks follow one another."""
        stages = [stage for stage, _, _ in self.coords]
        return [stages.index(stage) for stage in range(self.folding.pp)]


def in_order(label: Any, *, layers: int, experts: int) -> Holdings | None:
    """What a log says that tells no more than a label: ranks, and the experts of `layers` layers in order (`experts` 0: they are in none). None where the label names no folding."""
    folding = read_label(label)
    if folding is None:
        return None
    names = [(f"layer {i}", 0) for i in range(layers)]
    if folding.pp > 1 or not names:  # which stage has a layer is not told
        names = [
            (f"a layer of stage {stage}" if folding.pp > 1 else "every layer", stage) for stage in range(folding.pp)
        ]
    made = [LayerHoldings(name=name, stage=stage, slots=_share(folding, stage, experts)) for name, stage in names]
    return Holdings(folding=folding, layers=tuple(layer for layer in made if layer.slots), experts=experts)


def _share(folding: AnyFolding, stage: int, experts: int) -> Slots:
    """Each ep rank has as many, in order."""
    ep = _of_stage(folding, stage).ep
    each = experts // ep if experts % ep == 0 else 0
    return tuple(tuple(range(p * each, (p + 1) * each)) for p in range(ep)) if each else ()


def _of_stage(folding: AnyFolding, stage: int) -> Folding:
    return folding if isinstance(folding, Folding) else folding.stages[stage]


def as_told(told: StatePlaced) -> Holdings | None:
    """What an event says; None where that cannot be."""
    folding = read_label(told.folding)
    stage_of = {layer: stage for stage, layers in enumerate(told.layers) for layer in layers}
    if folding is None or len(told.layers) != folding.pp or not set(told.expert_layers) <= set(stage_of):
        return None
    many = max(len(told.expert_layers), *map(len, told.layers)) > MOST_LAYERS or not 0 <= told.experts <= MOST_EXPERTS
    if many or len(told.hosts) not in (0, folding.world):
        return None
    placed = {layer: slots for layers, slots in told.slots for layer in layers}
    plain = [_share(folding, stage, told.experts) for stage in range(folding.pp)]
    found = []
    for layer in told.expert_layers:
        stage = stage_of[layer]
        slots = placed.get(layer, ()) if told.slots_per_rank else plain[stage]
        if slots and not (len(slots) == _of_stage(folding, stage).ep and _are_experts(slots, told.experts)):
            return None
        if slots:
            found.append(LayerHoldings(name=f"layer {layer}", stage=stage, slots=slots))
    return Holdings(folding=folding, layers=tuple(found), blocks=told.layers, experts=told.experts, told=told)


def _are_experts(slots: Slots, experts: int) -> bool:
    return all(0 <= expert < experts for held in slots for expert in held)


def who_holds(found: Holdings | None) -> dict[str, Any]:
    """The same for the page: its first `MOST_ROWS` ranks, and for each of them what is lost with it."""
    if found is None:
        return {"ranks": [], "stages": [], "left_out": 0, "layers": [], "tables": [], "members": []}
    folding, told = found.folding, found.told
    shown = range(min(folding.world, MOST_ROWS))
    tables = list(dict.fromkeys(layer.slots for layer in found.layers))
    numbers = {slots: number for number, slots in enumerate(tables)}
    members = [printable(uid[:80]) for uid in told.members[: MOST_ROWS + 64]] if told else []
    hosts = told.hosts if told else ()
    together = _together(hosts)
    return {
        "stages": [_stage(found, stage) for stage in range(folding.pp)],
        "ranks": [[rank, *found.coords[rank], *(folding.coord(rank, a) for a in (*ATTENTION, "etp"))] for rank in shown],
        "left_out": folding.world - len(shown), "world": folding.world, "experts": found.experts,
        "layers": [[layer.name, layer.stage, numbers[layer.slots]] for layer in found.layers], "tables": tables,
        "replicas": told.slots_per_rank if told else 0, "members": members, "idle": members[folding.world :],
        "size": len(told.members) if told else 0, "minimum": told.minimum if told else 0, "holders": told.holders if told else 0,
        "hosts": list(hosts[: len(shown)]), "alone": [found.lost_with([rank]) for rank in shown],
        "with_host": {str(host): found.lost_with(ranks) for host, ranks in together.items() if ranks[0] < len(shown)},
    }  # fmt: skip


def _together(hosts: Sequence[int]) -> dict[int, list[int]]:
    """Host -> its ranks, of hosts with several."""
    found: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return {host: ranks for host, ranks in found.items() if len(ranks) > 1}


def _stage(found: Holdings, stage: int) -> dict[str, Any]:
    of = _of_stage(found.folding, stage)
    degrees = {axis: of.degree(axis) for axis in (*ATTENTION, *EXPERTS)}
    blocks = _spans(found.blocks[stage]) if found.blocks else None
    return {"first": found.first_ranks[stage], "ranks": of.world // of.pp, "degrees": degrees, "layers": blocks}


def _spans(numbers: Sequence[int]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8."""
    spans: list[list[int]] = []
    for number in sorted(set(numbers)):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans[:40])
