"""Who holds what of a running job: devices on hosts, experts by stage, dense state by coordinate.

Which ranks keep a copy of each shard of the optimizer state is decided in `plan/layout/shard_copies.py`. Must never change: the same job gives the same holders on
every rank. `plan/recovery/recovery.py` asks these tables what a loss destroys.

Names of dense state: `weights tp0 pp1` is what all ranks of that coordinate hold alike; `moments tp0 pp1` are cut over the dp x cp group (ZeRO-1) or whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.layout import shard_holders
from phalanx.plan.mapping import Folding
from phalanx.plan.placement import Fleet, HostPlacement


class Device(NamedTuple):
    """One accelerator (or core) by a number that stays with it, and the name of its host."""

    id: int
    host: int


class Span(NamedTuple):
    """The part [start, stop) of a whole, as fractions of it."""

    start: Fraction
    stop: Fraction


WHOLE = Span(Fraction(0), Fraction(1))


@dataclass(frozen=True, kw_only=True)
class StageExperts:
    """Experts of one pipeline rank: `placement` is over its hosts, with a layer for each of `layers`."""

    layers: tuple[int, ...]
    """Layers of the model that have experts."""
    placement: HostPlacement


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What runs. `stages` is empty for a model without experts."""

    folding: Folding
    devices: tuple[Device, ...]
    """Of rank 0, 1, 2, ..."""
    stages: tuple[StageExperts, ...] = ()
    slots_per_rank: int = 1
    """Expert replicas that an ep rank has room for, in each layer."""
    floor: int = 2
    zero: int = 1
    """1: moments of dense parameters are cut over dp x cp; 0: whole on every rank."""

    @property
    def hosts(self) -> tuple[int, ...]:
        return tuple(sorted({d.host for d in self.devices}))

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        raise_if(_problems(self), PlanError, subject="the running job")


def _problems(job: JobState) -> list[Problem]:
    problems = []
    if len(job.devices) != job.folding.world:
        rule = f"one for each of the {job.folding.world} ranks"
        problems.append(Problem(where="devices", value=len(job.devices), rule=rule))
    if len({d.id for d in job.devices}) != len(job.devices):
        problems.append(Problem(where="devices", value=[d.id for d in job.devices], rule="numbers of devices differ"))
    for name, least in (("floor", 1), ("slots_per_rank", 1)):
        if getattr(job, name) < least:
            problems.append(Problem(where=name, value=getattr(job, name), rule=f"is at least {least}"))
    if job.zero not in (0, 1):
        problems.append(Problem(where="zero", value=job.zero, rule="is 0 or 1"))
    if len(job.stages) not in (0, job.folding.pp):
        problems.append(Problem(where="stages", value=len(job.stages), rule=f"one for each of pp {job.folding.pp}"))
    return problems or _stage_problems(job)


def _stage_problems(job: JobState) -> list[Problem]:
    problems = []
    for pp, stage in enumerate(job.stages):
        ranks = stage_hosts(job.folding, job.devices, pp)
        here, names = sorted({host for _, host in ranks}), sorted(stage.placement.fleet.host_names)
        if here != names:
            rule = f"the hosts of that stage are {here}"
            problems.append(Problem(where=f"stages[{pp}].placement", value=names, rule=rule))
        if len(stage.layers) != stage.placement.num_layers:
            rule = f"needs a layer for each of {list(stage.layers)}"
            problems.append(Problem(where=f"stages[{pp}].placement", value=stage.placement.num_layers, rule=rule))
    return problems


def stage_hosts(folding: Folding, devices: Sequence[Device], pp: int) -> list[tuple[int, int]]:
    """(device, host) of every ep rank of a stage, in order; of an etp group the first stands for all.

    Raises `PlanError` where an etp group lies on several hosts: then a slot would die with either.
    """
    per_stage = folding.world // folding.pp
    first = pp * per_stage
    groups = [devices[r : r + folding.etp] for r in range(first, first + per_stage, folding.etp)]
    wide = [[d.id for d in group] for group in groups if len({d.host for d in group}) > 1]
    if wide:
        rule = f"the etp {folding.etp} ranks that share the slices of an expert are on one host"
        problem = Problem(where="devices", value=wide[0], rule=rule, hint="etp must divide the ranks of a host")
        raise PlanError([problem], subject="the running job")
    return [(group[0].id, group[0].host) for group in groups]


def stage_fleet(
    folding: Folding, devices: Sequence[Device], pp: int, *, slots_per_rank: int, like: Fleet | None = None
) -> Fleet:
    """The hosts of a stage with their slots; racks and failure rates as in `like`, where it knows all of the hosts."""
    hosts = [host for _, host in stage_hosts(folding, devices, pp)]
    names = tuple(sorted(set(hosts)))
    known = {} if like is None else {name: i for i, name in enumerate(like.host_names)}
    told = like is not None and all(name in known for name in names)
    return Fleet(
        slots=tuple(hosts.count(name) * slots_per_rank for name in names),
        racks=tuple(like.racks[known[n]] for n in names) if like is not None and told and like.racks else (),
        failure=tuple(like.failure[known[n]] for n in names) if like is not None and told and like.failure else (),
        names=names,
    )


class DenseCopy(NamedTuple):
    """A device that holds a part of a named piece of dense state."""

    name: str
    part: Span
    device: int


def dense_copies(folding: Folding, devices: Sequence[Device], *, floor: int, zero: int) -> list[DenseCopy]:
    """All copies of all dense state, weights first."""
    out = []
    for rank, device in enumerate(devices):
        where = f"tp{folding.coord(rank, 'tp')} pp{folding.coord(rank, 'pp')}"
        out.append(DenseCopy(f"weights {where}", WHOLE, device.id))
        if not zero:
            out.append(DenseCopy(f"moments {where}", WHOLE, device.id))
    if not zero:
        return sorted(out, key=lambda c: c.name.startswith("moments"))
    for group in folding.groups("dp_cp"):
        where = f"tp{folding.coord(group[0], 'tp')} pp{folding.coord(group[0], 'pp')}"
        holders = shard_holders(tuple(devices[r].host for r in group), floor=floor)
        for shard, members in enumerate(holders):
            part = Span(Fraction(shard, len(group)), Fraction(shard + 1, len(group)))
            out += [DenseCopy(f"moments {where}", part, devices[group[m]].id) for m in members]
    return out


def thin_state(job: JobState) -> list[str]:
    """Dense state that fewer than `floor` hosts hold: a mapping whose dp x cp groups lie on too few hosts."""
    host_of = {d.id: d.host for d in job.devices}
    hosts: dict[tuple[str, Span], set[int]] = {}
    for name, part, device in dense_copies(job.folding, job.devices, floor=job.floor, zero=job.zero):
        hosts.setdefault((name, part), set()).add(host_of[device])
    return [f"{name} [{part.start}, {part.stop})" for (name, part), held in hosts.items() if len(held) < job.floor]


def merged_holdings(stages: Sequence[StageExperts], layers: Collection[int]) -> HostPlacement:
    """What all hosts hold of the experts of `layers`, whatever stage they were in: slots of hosts that hold none of a layer are empty."""
    names = tuple(sorted({name for stage in stages for name in stage.placement.fleet.host_names}))
    rows = []
    for layer in layers:
        stage = next(s for s in stages if layer in s.layers)
        held = dict(
            zip(stage.placement.fleet.host_names, stage.placement.slots[stage.layers.index(layer)], strict=True)
        )
        rows.append(tuple(held.get(name, ()) for name in names))
    slots = tuple(max(1, int(np.max([len(row[n]) for row in rows]))) for n in range(len(names)))
    fleet = Fleet(slots=slots, names=names)
    return HostPlacement(num_experts=stages[0].placement.num_experts, fleet=fleet, slots=tuple(rows))
