"""What members of a new generation run, and what moves between them so that each holds what its new rank needs.

Decides, from the members and the state that each holds (`plan/recovery/state_descriptor.py`):

    mapping    `RecoveryPlanner.choose`: that of the recipe as far as it fits the number of members, else the nearest of the same axes (`plan/recovery/devices.py`)
    ranks      `plan/recovery/ranks.py`: as few bytes travel as can be; who makes no whole group is idle
    experts    with replicas: `plan/recovery/experts.py`
    moves      of parameters, optimizer state and buffers, the source put together member by member, so that it does not matter whether all come from one
               generation; idle members are sources like others
    waves      which pieces move together: once all members have a wave, those that held it before let go of it, so that no rank needs memory for its state twice
    missing    state without a holder

Must never change: all members make the same plan from the same facts, in whatever order these arrive; state without a holder is named and never made up; pieces of
state have one order, whatever the mapping, so that a member that was cut off in a move can say how far it came by a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from phalanx.core.config import PipelineConfig
from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.layout import Box, Held, StateLayouts, TensorLayout, expert_layers, is_covered
from phalanx.plan.mapping import Folding, LayerPlacements, StagePlan, fit_problems
from phalanx.plan.model import ModelSpec
from phalanx.plan.pipeline import make_pipeline, pipeline_problems
from phalanx.plan.placement.search import Floats
from phalanx.plan.recovery.devices import (
    Device,
    FoldingChoice,
    Limits,
    choose_folding,
    is_exact,
    num_holding,
    usable_devices,
)
from phalanx.plan.recovery.experts import ReplicaTerms, held_by_host, num_with_replicas, place_experts
from phalanx.plan.recovery.generation import GenerationPlan, without_holder
from phalanx.plan.recovery.memory import StateRoom, bytes_on_hosts, state_bytes
from phalanx.plan.recovery.ranks import rank_members
from phalanx.plan.recovery.state_descriptor import Fact, Kind, StateDescriptor, domains_of, machines_of, racks_of
from phalanx.plan.reshard import Move

BUFFER_BYTES = 4
"""Bytes of an element of a buffer (the expert bias), which is fp32 in every run."""

LEAST_WAVE = 64 << 20
"""Bytes that a rank sends, keeps or receives in a wave at least: to compare plans and to wait for the last message costs more than small states themselves."""
WAVES = 16
"""Waves of a large state: a rank holds a sixteenth of its state twice."""

Ints = NDArray[np.int64]

_State = Mapping[str, tuple[tuple[Held, ...], tuple[int, ...]]]
"""State of one rank: name -> (boxes, shape of the local tensor)."""


@dataclass(frozen=True, kw_only=True)
class RecoveryPlanner:
    """What stays the same over all generations of a run."""

    spec: ModelSpec
    base: Folding
    """Folding of the run on as many ranks as its recipe names."""
    seq_len: int
    floor: int
    """Hosts that hold every part of the state, as far as there are as many; members of a single machine count as hosts."""
    per_host: int = 1
    """Members of each of several hosts, for what is asked before it is known who they are; 1: all are on one machine, or hosts of their own."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    cp_method: str = "ring"
    state_bytes: int = 4
    """Bytes of a master weight."""
    moment_bytes: int = 4
    """Bytes of an element of a moment."""
    zero: int = 0
    """1: optimizer state is cut over dp x cp and edp, and each shard has `floor` holders."""
    bucket_elements: int = 0
    """Elements of a gradient bucket, which decides where shards begin."""
    slots_per_rank: int | None = None
    """Replicas that an ep rank has room for in each layer; None: experts have no replicas."""
    loads: Floats | None = None
    """(L, E), or (1, E) for all layers; None: all experts alike."""
    room: StateRoom = field(default_factory=StateRoom)
    """What state may take of a rank's memory."""
    _bytes: dict[Folding, float] = field(default_factory=dict, init=False, compare=False, repr=False)
    _layouts: dict[Folding, StateLayouts] = field(default_factory=dict, init=False, compare=False, repr=False)
    _held: dict[Kind, _State] = field(default_factory=dict, init=False, compare=False, repr=False)
    _alike: dict[tuple[Held, ...], tuple[Held, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    """Equal boxes are one object, so that layouts of parameters that are held alike become one, and are cut, compared and hashed once."""

    @property
    def _slots(self) -> int | None:
        """Slots of an ep rank, where there are experts that have replicas."""
        return self.slots_per_rank if self.spec.moe_layers else None

    # ---- the mapping

    def choose(self, size: int) -> FoldingChoice:
        """The mapping of so many members, and why some are idle. Raises `PlanError` where there is none."""
        found = choose_folding(self.base, size, self._limits([i // self.per_host for i in range(size)]))
        if found is None:
            raise self._no_mapping(size, f"at least {self.least()}")
        return found

    def _no_mapping(self, size: int, hint: str) -> PlanError:
        rule = f"are no valid parallelism: no valid mapping has the axes of {self.base.label()}"
        return PlanError.of("members", size, rule, hint, subject="the run")

    def _choice_of(self, facts: Sequence[Fact]) -> FoldingChoice:
        """Slices of an expert stay on one machine, so each machine counts whole groups of them; of fewer slices only where there is no other way."""
        machines, base = machines_of(facts), self.base
        devices = [Device(i, machines.index(fact.machine)) for i, fact in enumerate(facts)]
        host_of = domains_of(facts)
        for etp in (d for d in range(base.etp, 0, -1) if base.etp % d == 0):
            hosts = [host_of[facts[device.id].uid] for device in usable_devices(devices, etp)]
            usable = len(hosts)
            choice = choose_folding(replace(base, etp=etp), usable, self._limits(hosts))
            if choice is not None:
                return _with_etp(
                    choice, base.etp, etp, idle=len(facts) - choice.folding.world, alone=len(facts) - usable
                )
        together = f", {base.etp} of them on a machine" if base.etp > 1 else ""
        raise self._no_mapping(len(facts), f"at least {self.least()}{together}")

    def folding(self, size: int) -> Folding:
        """The mapping of so many members."""
        return self.choose(size).folding

    def least(self) -> int:
        """The fewest members that can continue: with so many, and with any more, there is a mapping."""
        few, enough = 1, self.base.world
        while few < enough:  # a mapping of so many is one of any more, with the others idle
            size = (few + enough) // 2
            if choose_folding(self.base, size, self._limits(range(size))) is None:
                few = size + 1
            else:
                enough = size
        return enough

    def _limits(self, hosts: Sequence[int]) -> Limits:
        """`hosts`: that of each member."""
        return Limits(
            spec=self.spec,
            seq_len=self.seq_len,
            num_samples=len(hosts),  # a member without a micro-batch serves others' tokens
            replicated=self._slots is not None,
            slots_per_rank=self._slots,
            cp_method=self.cp_method,
            floor=self.floor,
            hosts=hosts if len(set(hosts)) > 1 else (),
            runs=lambda folding: not pipeline_problems(self.pipeline, self.spec, pp=folding.pp),
            room=None if math.isinf(self.room.limit) else self._has_room,
        )

    def _has_room(self, folding: Folding) -> bool:
        legal = not pipeline_problems(self.pipeline, self.spec, pp=folding.pp)
        return legal and self.bytes_of(folding) <= self.room.limit

    def bytes_of(self, folding: Folding) -> float:
        """Parameters, gradients and optimizer state of the fullest rank of a mapping."""
        if folding not in self._bytes:
            self._bytes[folding] = state_bytes(
                self.spec, folding, self.stages(folding), self.room, slots=self._slots, holders=self.floor if self.zero else None
            )  # fmt: skip
        return self._bytes[folding]

    def bytes_of_ranks(self, folding: Folding, hosts: Sequence[int], *, racks: Sequence[int] = ()) -> list[float]:
        """The same of each rank, those of `hosts` in `racks` (empty: nothing is known of them): copies of shards are where hosts are. Of the fullest one for all where state is not sharded."""
        if not self.zero:
            return [self.bytes_of(folding)] * folding.world
        return bytes_on_hosts(
            self.spec, folding, self.stages(folding), self.room, slots=self._slots, holders=self.floor, hosts=hosts, racks=racks,
        )  # fmt: skip

    def room_problems(self) -> list[Problem]:
        """Whether the run's own mapping has room for its state."""
        needed = self.bytes_of(self.base) / 1e9
        if needed * 1e9 <= self.room.limit:
            return []
        rule = f"the fullest rank of {self.base.label()} holds {needed:.3g} GB of parameters, gradients and optimizer state"
        hint = f"use {_rounded_up(needed):g}, or leave it out"
        return [Problem(where="resilience.state_gb", value=self.room.limit / 1e9, rule=rule, hint=hint)]

    def stages(self, folding: Folding) -> StagePlan:
        """Which layers each pipeline rank has."""
        return make_pipeline(self.pipeline, self.spec, pp=folding.pp, seq_len=self.seq_len).stages

    # ---- what is held

    @cached_property
    def order(self) -> dict[str, int]:
        """Number of each piece of state: buffers, then parameters family by family, so that what lies in one buffer moves together."""
        layouts = self._layout(self.base)
        names = [*sorted(layouts.buffers()), *sorted(layouts.params, key=lambda name: layouts.params[name].family)]
        return {name: number for number, name in enumerate(names)}

    def holds(self, descriptor: StateDescriptor) -> _State:
        """What a member keeps of each parameter's optimizer state, and so of the parameter."""
        if descriptor.moved is not None:
            newer = self.holds(descriptor.newest)
            older = {} if descriptor.rest is None else self.holds(descriptor.rest)
            has_moved = {name for name, number in self.order.items() if number < descriptor.moved}
            return {n: s for n, s in newer.items() if n in has_moved} | {
                n: s for n, s in older.items() if n not in has_moved
            }
        kind = descriptor.kind(sharded=self.zero > 0)
        if kind not in self._held:
            layouts = self._layout(descriptor.folding)
            placed = descriptor.placement(self.spec.num_experts)
            if placed is not None:
                layouts = replace(layouts, placement=lambda _: placed)
            found = layouts.shards_of(
                descriptor.rank, zero=self.zero, bucket_elements=self.bucket_elements,
                holders=self.floor, hosts=descriptor.hosts or None, racks=descriptor.racks,
            )  # fmt: skip
            kept = ((name, boxes, shape) for name, (boxes, shape) in found.items() if boxes)
            self._held[kind] = found | {name: (self._alike.setdefault(h, h), shape) for name, h, shape in kept}
        return self._held[kind]

    def _layout(self, folding: Folding) -> StateLayouts:
        if folding not in self._layouts:
            self._layouts[folding] = StateLayouts(spec=self.spec, folding=folding, stages=self.stages(folding))
        return self._layouts[folding]

    def missing(self, descriptors: Sequence[StateDescriptor]) -> tuple[str, ...]:
        """Parameters of which members that stand so do not hold all together."""
        shapes = self._layout(self.base).params
        held = [self.holds(descriptor) for descriptor in descriptors]
        return tuple(
            name
            for name, param in shapes.items()
            if not is_covered(param.shape, (h.box for of in held for h in of.get(name, ((), ()))[0]))
        )

    # ---- the plan

    def plan(self, facts: Sequence[Fact]) -> GenerationPlan:
        """Plan for the members of a new generation, in any order. Raises `PlanError` where they are too few for any mapping, or where one says that it holds what no rank of this run can."""
        facts = sorted(facts, key=lambda fact: fact.order)
        self._check(facts)
        host_of, rack_of = domains_of(facts), racks_of(facts)
        choice, ranked, idle = self._ranked(facts, host_of, rack_of)
        new, members = choice.folding, (*ranked, *idle)
        if len({fact.machine for fact in ranked}) == 1:  # each stands for a host, though there is an idle one elsewhere
            host_of, rack_of = {fact.uid: number for number, fact in enumerate(members)}, {}
        hosts = tuple(host_of[fact.uid] for fact in ranked)
        placement, notes = self._placement(new, hosts, facts, host_of, rack_of)
        made = GenerationPlan(
            folding=new, members=members, placement=placement, hosts=hosts, moment_bytes=self.moment_bytes,
            racks=tuple(rack_of[host] for host in hosts) if rack_of else (), params=(), buffers=(), missing=(),
            exact=is_exact(new, self.base) and new.pp == self.base.pp, reason=choice.reason, notes=notes,
        )  # fmt: skip
        held_by = self._held_by(made)
        made = replace(made, holders=min(self.floor, *held_by.values()))
        if len(facts) > 1:
            texts = (
                f"parts of the {name} have {holders} of the {self.floor} holders that resilience.f asks for, until more members come"
                for name, holders in held_by.items()
                if holders < self.floor and not (name == "experts" and placement)
            )
            made = replace(made, notes=(*notes, *texts))
        params, buffers = self._params(made), self._buffers(made)
        moves = (*params, *buffers)
        return replace(
            made, params=params, buffers=buffers, waves=self._waves(moves, new), missing=without_holder(moves)
        )

    def _held_by(self, plan: GenerationPlan) -> dict[str, int]:
        """Hosts that hold the same part of each kind of state, at least."""
        new, found = plan.folding, {"dense tensors": num_holding("dp_cp", plan.folding, plan.hosts)}
        if self.spec.moe_layers and not plan.placement:
            found["experts"] = num_holding("edp", new, plan.hosts)
        if plan.placement:
            per_stage = new.world // new.pp
            stages = (plan.hosts[first : first + per_stage : new.etp] for first in range(0, new.world, per_stage))
            few = [num_with_replicas(of, hosts) for of, hosts in zip(plan.placement, stages, strict=True) if of.layers]
            found["experts"] = min(few)
        return found

    def _ranked(
        self, facts: Sequence[Fact], host_of: Mapping[str, int], rack_of: Mapping[int, int]
    ) -> tuple[FoldingChoice, Sequence[Fact], Sequence[Fact]]:
        """The mapping, the member of each of its ranks, and idle members: those too that would have no room for the copies which the hosts of others leave them. Where nobody else could do without them, they have ranks all the same."""
        first, left, out = None, list(facts), list[Fact]()
        while True:
            try:
                choice = self._choice_of(left)
            except PlanError:
                if first is None:
                    raise
                choice, ranked, idle = first
                text = f"the state of {', '.join(f.uid for f in out)} needs more room than resilience.state_gb, and the others alone make no mapping"
                return replace(choice, reason="; ".join(filter(None, (choice.reason, text)))), ranked, idle
            lacks = self._lacks(choice.folding)
            ranked, idle = rank_members(left, choice.folding, lacks, host_of=host_of, floor=self.floor)
            full = self._full_hosts(choice.folding, [host_of[fact.uid] for fact in ranked], rack_of)
            if not full:
                text = f"copies of state that other hosts leave {', '.join(f.uid for f in out)} need more room than resilience.state_gb"
                reason = "; ".join(filter(None, (choice.reason, text if out else "")))
                return replace(choice, idle=choice.idle + len(out), reason=reason), ranked, (*idle, *out)
            first = first or (choice, ranked, idle)
            out += [fact for fact in left if host_of[fact.uid] in full]
            left = [fact for fact in left if host_of[fact.uid] not in full]

    def _full_hosts(self, new: Folding, hosts: Sequence[int], rack_of: Mapping[int, int]) -> set[int]:
        """Hosts with a rank that has no room for its state. Copies of shards are where the hosts are, and `choose` knows only how many ranks there are."""
        if not self.zero or math.isinf(self.room.limit):
            return set()
        racks = [rack_of[host] for host in hosts] if rack_of else []
        alone = len(set(hosts)) == 1  # each stands for a host, as in `plan`
        found = self.bytes_of_ranks(new, range(len(hosts)) if alone else hosts, racks=() if alone else racks)
        return {host for host, taken in zip(hosts, found, strict=True) if taken > self.room.limit}

    def _check(self, facts: Sequence[Fact]) -> None:
        """Reports come from outside."""
        legal: dict[Folding, list[Problem]] = {}
        layers: dict[tuple[Folding, int], list[int]] = {}
        for fact in facts:
            for at in () if fact.descriptor is None else fact.descriptor.parts:
                if at.folding not in legal:
                    legal[at.folding] = self._folding_problems(at.folding)
                raise_if(legal[at.folding], PlanError, subject=f"what {fact.uid} reports of its state")
                stage = at.folding, at.folding.coord(at.rank, "pp")
                if at.slots and stage not in layers:
                    layers[stage] = self._expert_layers(*stage)
                experts = {expert for _, held in at.slots for expert in held}
                if at.slots and ([n for n, _ in at.slots] != layers[stage] or not experts <= self._experts):
                    rule = f"are of layers {layers[stage]}, of experts 0 to {self.spec.num_experts - 1}"
                    problem = Problem(where="state_descriptor.slots", value=at.slots, rule=rule)
                    raise PlanError([problem], subject=f"what {fact.uid} reports of its state")

    @cached_property
    def _experts(self) -> frozenset[int]:
        return frozenset(range(self.spec.num_experts))

    def _folding_problems(self, folding: Folding) -> list[Problem]:
        """Why the run can never have had a mapping."""
        plain = folding if self.slots_per_rank is None else replace(folding, ep=1)
        found = fit_problems(plain, self.spec, seq_len=self.seq_len, cp_method=self.cp_method)
        return found + pipeline_problems(self.pipeline, self.spec, pp=folding.pp)

    def _expert_layers(self, folding: Folding, pp: int) -> list[int]:
        """Layers with experts of a pipeline rank."""
        return list(expert_layers(self.spec, self.stages(folding).of_rank(pp)))

    def _waves(self, moves: Sequence[Move], new: Folding) -> tuple[tuple[str, ...], ...]:
        """Pieces in their order, cut where a rank would send, keep or receive too much at once."""
        each, sizes = self.state_bytes + 2 * self.moment_bytes, dict[int, int]()
        for layout in (side for move in moves for side in (move.src, move.dst)):
            if id(layout) not in sizes:
                sizes[id(layout)] = each * max((sum(h.box.num_elements for h in of) for of in layout.held), default=0)
        bytes_of = {move.name: max(sizes[id(move.src)], sizes[id(move.dst)]) for move in moves}
        limit = max(LEAST_WAVE, sum(bytes_of.values()) // (WAVES * new.pp))
        waves, room = [list[str]()], limit
        for name in sorted(bytes_of, key=self.order.__getitem__):
            room -= bytes_of[name]
            if room < 0 and waves[-1]:
                waves.append([])
                room = limit - bytes_of[name]
            waves[-1].append(name)
        return tuple(map(tuple, waves))

    def _lacks(self, new: Folding) -> _Lacking:
        """Dense tensors without a holder, where experts have replicas: those follow the members."""
        experts = {name for name, param in self._layout(new).params.items() if param.ep_dim is not None}
        return _Lacking(self, new, left_out=frozenset(experts if self.slots_per_rank is not None else ()))

    def _placement(
        self,
        new: Folding,
        hosts: Sequence[int],
        facts: Sequence[Fact],
        host_of: Mapping[str, int],
        rack_of: Mapping[int, int],
    ) -> tuple[tuple[LayerPlacements, ...], tuple[str, ...]]:
        if self._slots is None:
            return (), ()
        shape = (len(self.spec.moe_layers), self.spec.num_experts)
        asked = ReplicaTerms(
            num_experts=self.spec.num_experts, slots_per_rank=self._slots, floor=self.floor,
            loads=np.ones(shape) if self.loads is None else np.broadcast_to(self.loads, shape).copy(),
            layers=tuple(self.spec.moe_layers),
        )  # fmt: skip
        per_stage = new.world // new.pp
        held, made, notes = held_by_host(facts, host_of), [], list[str]()
        for pp in range(new.pp):
            first = pp * per_stage
            placed, said = place_experts(
                asked, self._expert_layers(new, pp), hosts[first : first + per_stage : new.etp], held, rack_of=rack_of
            )
            made.append(placed)
            notes += said
        return tuple(made), tuple(dict.fromkeys(notes))

    def _params(self, plan: GenerationPlan) -> tuple[Move, ...]:
        sources = [(i, self.holds(f.descriptor)) for i, f in enumerate(plan.members) if f.descriptor is not None]
        targets = [(rank, self.holds(plan.state_descriptor(rank))) for rank in range(plan.folding.world)]
        made: _Made = {}
        return tuple(
            Move(
                name=name,
                itemsize=self.state_bytes,
                src=_layout_of(name, param.shape, sources, made),
                dst=_layout_of(name, param.shape, targets, made),
            )
            for name, param in self._layout(plan.folding).params.items()
        )

    def _buffers(self, plan: GenerationPlan) -> tuple[Move, ...]:
        """Whole on every rank that has the layer."""
        out = []
        of_folding: dict[Folding, Mapping[str, TensorLayout]] = {}
        for name, target in self._layout(plan.folding).buffers().items():
            ranks, held, shapes = [], [], []
            for i, fact in enumerate(plan.members):
                stands = None if fact.descriptor is None else fact.descriptor.of(self.order[name])
                if stands is None:
                    continue
                if stands.folding not in of_folding:
                    of_folding[stands.folding] = self._layout(stands.folding).buffers()
                of = of_folding[stands.folding][name]
                if stands.rank in of.ranks:
                    at = of.ranks.index(stands.rank)
                    ranks.append(i)
                    held.append(of.held[at])
                    shapes.append(of.local_shapes[at])
            src = TensorLayout(shape=target.shape, ranks=tuple(ranks), held=tuple(held), local_shapes=tuple(shapes))
            out.append(Move(name=name, itemsize=BUFFER_BYTES, src=src, dst=target))
        return tuple(out)


def _with_etp(choice: FoldingChoice, before: int, etp: int, *, idle: int, alone: int) -> FoldingChoice:
    """The choice for machines of which some have `alone` members that share experts with no others there."""
    reasons = []
    if etp < before:
        reasons.append(f"too few machines have {before} members to share experts: etp {before} -> {etp} at most")
    reasons.append(choice.reason)
    if alone:
        reasons.append(
            f"experts are shared by {etp} members of a machine, which {alone} of the members cannot be part of"
        )
    return replace(choice, idle=idle, reason="; ".join(filter(None, reasons)))


class _Lacking:
    """Elements that members lack of what ranks hold; members and ranks of one kind are worked out once."""

    def __init__(self, planner: RecoveryPlanner, new: Folding, *, left_out: frozenset[str]) -> None:
        self._of, self._new, self._left_out = planner, new, left_out

    def __call__(self, facts: Sequence[Fact]) -> Ints:
        """(members, ranks of the new mapping)."""
        stand = [None if fact.descriptor is None else replace(fact.descriptor.newest, slots=()) for fact in facts]
        have, row_of = self._kinds(stand)
        want, column_of = self._kinds([StateDescriptor(folding=self._new, rank=r) for r in range(self._new.world)])
        wanted, common = np.zeros(len(want), np.int64), np.zeros((len(have), len(want)), np.int64)
        held = _by_name(have)
        for name, (needers, low, high) in _by_name(want).items():
            np.add.at(wanted, needers, (high - low).prod(axis=1))
            if name in held:
                holders, start, stop = held[name]
                sizes = np.minimum(stop[:, None], high) - np.maximum(start[:, None], low)
                # boxes of one holder do not overlap
                np.add.at(common, (holders[:, None], needers), sizes.clip(min=0).prod(axis=2))
        return (wanted - common)[row_of][:, column_of]

    def _kinds(self, descriptors: Sequence[StateDescriptor | None]) -> tuple[list[_Dense], list[int]]:
        """What each kind holds, and the kind of each."""
        numbers: dict[Kind | None, int] = {}
        found: list[_Dense] = []
        kind_of = []
        for at in descriptors:
            number = numbers.setdefault(None if at is None else at.kind(sharded=self._of.zero > 0), len(numbers))
            if number == len(found):
                found.append({} if at is None else self._dense(at))
            kind_of.append(number)
        return found, kind_of

    def _dense(self, descriptor: StateDescriptor) -> _Dense:
        """Standings without slots have the experts of plain parallelism, which count where there are no replicas."""
        if self._left_out:  # ep, which then need not divide the experts, cuts nothing of the rest
            descriptor = replace(descriptor, folding=replace(descriptor.folding, ep=1))
        held = self._of.holds(descriptor).items()
        return {name: boxes for name, (boxes, _) in held if boxes and name not in self._left_out}


_Dense = Mapping[str, tuple[Held, ...]]


def _by_name(states: Sequence[_Dense]) -> dict[str, tuple[Ints, Ints, Ints]]:
    """Name -> number of the state (n,), begin and end (n, dims) of each box of it."""
    found: dict[str, list[tuple[int, Box]]] = {}
    for number, state in enumerate(states):
        for name, boxes in state.items():
            found.setdefault(name, []).extend((number, one.box) for one in boxes)
    out = {}
    for name, pairs in found.items():
        low = np.array([box.offsets for _, box in pairs], np.int64)
        out[name] = np.array([n for n, _ in pairs]), low, low + np.array([box.sizes for _, box in pairs], np.int64)
    return out


_Made = dict[tuple[object, ...], TensorLayout]
"""Layouts by shape, ranks, identity of their boxes (`RecoveryPlanner._alike` keeps them) and local shapes."""


def _layout_of(name: str, shape: tuple[int, ...], states: Sequence[tuple[int, _State]], made: _Made) -> TensorLayout:
    """What ranks hold of one parameter; one that was made already where another parameter is held alike."""
    found = [(rank, *state[name]) for rank, state in states if name in state]
    key = (shape, *((rank, id(held), local) for rank, held, local in found))
    if key not in made:
        made[key] = TensorLayout(
            shape=shape,
            ranks=tuple(rank for rank, _, _ in found),
            held=tuple(held for _, held, _ in found),
            local_shapes=tuple(local for _, _, local in found),
        )
    return made[key]


def _rounded_up(gb: float) -> float:
    """The number rounded up to two digits."""
    step = 10.0 ** (math.floor(math.log10(gb)) - 1)
    return float(f"{math.ceil(gb / step) * step:.2g}")
