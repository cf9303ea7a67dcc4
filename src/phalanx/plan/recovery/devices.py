"""Decides after a loss: the mapping that the surviving devices can run, and which device takes which rank.

Decides both. The mapping keeps tp, cp and etp (then results stay bitwise what they were) and pp, and uses as many devices as make
whole groups of them. Where nothing with these degrees fits the survivors, the nearest legal mapping of the same axes is taken. With replicas,
ep is what is left: one expert-parallel group of all ranks of a stage. Without, ep is such that every expert is on enough hosts, which take ranks in turn.

Devices keep their coordinates where they can: a *block* (the tp x cp ranks of one data-parallel coordinate, or as many as share an
expert) that lost nobody
stays whole in its stage; surplus blocks fill other stages, loose devices of broken ones make new ones. Must never change: what is
idle is named with its reason, and no device is idle without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from phalanx.plan.mapping import DEGREES, Folding, fit_problems, legal_foldings
from phalanx.plan.model import ModelSpec


class Device(NamedTuple):
    """One accelerator (or core) by a number that stays with it, and the name of its host."""

    id: int
    host: int


StateKind = Literal["edp", "dp_cp"]
"""Experts or dense tensors, by the groups of ranks that hold the same part of them."""
EXACT = ("tp", "cp", "etp")
"""Degrees on which the order of sums inside a layer depends."""


@dataclass(frozen=True, kw_only=True)
class FoldingChoice:
    """A mapping for so many devices."""

    folding: Folding
    idle: int
    reason: str
    """Why devices are idle, or the degrees changed; empty where all is used as before."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a mapping must obey."""

    spec: ModelSpec
    seq_len: int
    num_samples: int
    """Samples of a step: a data-parallel rank without one would have nothing to do."""
    replicated: bool = True
    """Experts have replicas over the whole stage; else ep divides the experts."""
    slots_per_rank: int | None = None
    """Replicas that an ep rank has room for; None: as many as it takes."""
    cp_method: str = "ring"
    floor: int = 1
    """Hosts that hold each expert where experts have no replicas, as far as there are as many."""
    hosts: Sequence[int] = ()
    """That of each rank; empty: each rank stands for a host."""
    runs: Callable[[Folding], bool] | None = None
    """Whether the rest of the run can do with a mapping (its pipeline, say)."""
    room: Callable[[Folding], bool] | None = None
    """Whether a rank has room for a mapping's state. Where not, devices are left idle rather."""


def choose_folding(old: Folding, num_devices: int, limits: Limits) -> FoldingChoice | None:
    """The mapping to continue with; None where not even one device makes a legal one."""
    best = _same_degrees(old, num_devices, limits)
    if best is not None:
        return FoldingChoice(
            folding=best, idle=num_devices - best.world, reason=_why_idle(best, old, num_devices, limits)
        )
    near = _nearest(old, num_devices, limits)
    if near is None:
        return None
    changed = [
        f"{a} {old.degree(a)} -> {near.degree(a)}" for a in DEGREES if a != "ep" and near.degree(a) != old.degree(a)
    ]
    reason = f"no mapping with the degrees before fits {num_devices} devices: {', '.join(changed)}"
    if near.world < num_devices:
        reason += f"; {near.world} of {num_devices} devices make whole groups"
    return FoldingChoice(folding=near, idle=num_devices - near.world, reason=reason)


def usable_devices(alive: Sequence[Device], etp: int) -> list[Device]:
    """Devices that can be part of a mapping, those of a host together: the slices of an expert stay on one host, so a host counts whole groups of `etp`."""
    of_host: dict[int, list[Device]] = {}
    for device in alive:
        of_host.setdefault(device.host, []).append(device)
    return [device for _, of in sorted(of_host.items()) for device in of[: len(of) // etp * etp]]


def num_holding(state: StateKind, folding: Folding, hosts: Sequence[int]) -> int:
    """Hosts (of each rank of the mapping) that hold the same part of the state, of the part that the fewest hold."""
    within = folding.ep * folding.etp if state == "edp" else folding.tp
    table = np.sort(np.reshape(hosts[: folding.world], (folding.pp, -1, within)), axis=1)
    return 1 + int((np.diff(table, axis=1) != 0).sum(axis=1).min())


def is_exact(new: Folding, old: Folding) -> bool:
    """Whether results stay bitwise those of the mapping before."""
    return all(new.degree(axis) == old.degree(axis) for axis in EXACT)


def _same_degrees(old: Folding, num_devices: int, limits: Limits) -> Folding | None:
    """The largest legal mapping with tp, cp, etp and pp as they are."""
    unit = old.pp * math.lcm(old.tp * old.cp, old.etp)
    for world in range(num_devices - num_devices % unit, 0, -unit):
        made = _with_experts(replace(old, world=world), old, limits)
        if is_legal(made, limits):
            return made
    return None


def _with_experts(folding: Folding, old: Folding, limits: Limits) -> Folding:
    """`ep` for this world: all of a stage where experts have replicas, else the nearest that divides the experts."""
    blocks = folding.world // (folding.etp * folding.pp)
    if not limits.spec.moe_layers:
        return replace(folding, ep=1)
    if limits.replicated:
        return replace(folding, ep=blocks)
    hosts = limits.hosts or range(folding.world)
    ranks = min(limits.floor, blocks)  # one may be lost alone, too
    holding = {
        d: num_holding("edp", replace(folding, ep=d), hosts)
        for d in range(1, blocks // ranks + 1)
        if blocks % d == 0 and limits.spec.num_experts % d == 0
    }
    legal = [d for d, found in holding.items() if found >= min(limits.floor, holding[1])]
    room = limits.room or (lambda _: True)
    return replace(
        folding, ep=min(legal, key=lambda d: (not room(replace(folding, ep=d)), abs(math.log2(d / old.ep)), d))
    )


def is_legal(folding: Folding, limits: Limits) -> bool:
    """Whether it is legal for model, sequence and samples. A replicated `ep` need not divide the experts: slots are not theirs by
    number."""
    plain = replace(folding, ep=1) if limits.replicated else folding
    if fit_problems(plain, limits.spec, seq_len=limits.seq_len, cp_method=limits.cp_method):
        return False
    if folding.dp > limits.num_samples:
        return False
    slots = folding.ep * limits.slots_per_rank if limits.replicated and limits.slots_per_rank else None
    if slots is not None and limits.spec.moe_layers and slots < limits.spec.num_experts:
        return False
    if limits.runs is not None and not limits.runs(folding):
        return False
    return limits.room is None or limits.room(folding)


def _nearest(old: Folding, num_devices: int, limits: Limits) -> Folding | None:
    """The largest world first; then the fewest doublings away. Only axes that were in use may be."""
    axes = tuple(axis for axis in DEGREES if old.degree(axis) > 1)
    for world in range(num_devices, 0, -1):
        found: dict[Folding, None] = {}
        for folding in legal_foldings(
            world, limits.spec, seq_len=limits.seq_len, axes=axes, cp_method=limits.cp_method
        ):
            made = _with_experts(folding, old, limits)
            if old.etp % made.etp == 0 and is_legal(made, limits):
                found[made] = None
        if found:
            return min(found, key=lambda f: (_distance(f, old), [f.degree(a) for a in DEGREES]))
    return None


def _distance(folding: Folding, old: Folding) -> float:
    """Distance in doublings of the degrees that a person chose."""
    degrees = [axis for axis in DEGREES if axis != "ep"]
    return round(math.fsum(abs(math.log2(folding.degree(a) / old.degree(a))) for a in degrees), 6)


def _why_idle(folding: Folding, old: Folding, num_devices: int, limits: Limits) -> str:
    parts = []
    if folding.world < num_devices:
        shown = [f"{a} {folding.degree(a)}" for a in ("tp", "cp", "etp", "pp") if folding.degree(a) > 1]
        unit = folding.pp * math.lcm(folding.tp * folding.cp, folding.etp)
        whole = num_devices - num_devices % unit
        if whole > folding.world and limits.room is not None and _roomless(folding, old, num_devices, limits):
            parts.append(
                f"with more than {folding.world} of the {num_devices} devices a rank has no room for its state"
            )
        elif whole > folding.world and whole // (folding.tp * folding.cp * folding.pp) > limits.num_samples:
            parts.append(f"a step has {limits.num_samples} samples, so dp {folding.dp} is the most that all have work")
        else:
            parts.append(
                f"{' x '.join(shown) or 'the mapping'} needs a multiple of {unit} devices, {num_devices} are left"
            )
    return "; ".join(parts)


def _roomless(folding: Folding, old: Folding, num_devices: int, limits: Limits) -> bool:
    """Whether more devices would be used if it were not for the memory."""
    more = _same_degrees(old, num_devices, replace(limits, room=None))
    return more is not None and more.world > folding.world


# ---- which device takes which rank ----------------------------------------------------------------------------------------------


@dataclass
class _Pools:
    """Devices not yet placed: whole blocks by stage, and single ones with the stage they were in (-1: new here)."""

    blocks: dict[int, list[tuple[Device, ...]]]
    loose: list[tuple[int, Device]]


def place_devices(
    old: Folding, before: Sequence[Device], alive: Sequence[Device], new: Folding
) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
    """(device of rank 0, 1, ..., idle devices). `alive` may contain devices that had no rank before.

    Works in blocks of lcm(tp x cp, etp) ranks: whole cells, and whole groups that share experts.
    """
    pools = _pools(old, before, alive, new)
    width = _width(new)
    per_stage = new.world // (new.pp * width)
    stages: list[list[tuple[Device, ...]]] = []
    for pp in range(new.pp):
        own = pools.blocks.get(pp, [])
        stages.append(own[:per_stage])
        pools.blocks[pp] = own[per_stage:]
    for blocks in stages:
        surplus = [(pp, block) for pp in sorted(pools.blocks) for block in pools.blocks[pp]]
        for pp, block in surplus[: per_stage - len(blocks)]:
            blocks.append(block)
            pools.blocks[pp].remove(block)
    for pp, blocks in enumerate(stages):
        while len(blocks) < per_stage:
            blocks.append(_made_block(pools, pp, width, new.etp))
    order = [d for blocks in stages for block in sorted(blocks, key=lambda b: (b[0].host, b[0].id)) for d in block]
    placed = set(order)
    return tuple(order), tuple(d for d in alive if d not in placed)


def _width(folding: Folding) -> int:
    return math.lcm(folding.tp * folding.cp, folding.etp)


def _pools(old: Folding, before: Sequence[Device], alive: Sequence[Device], new: Folding) -> _Pools:
    keep = (old.tp, old.cp, old.etp) == (new.tp, new.cp, new.etp)
    living = set(alive)
    width, per_stage = _width(old), old.world // old.pp
    pools = _Pools(blocks={}, loose=[])
    for first in range(0, old.world, width):
        block, stage = tuple(before[first : first + width]), first // per_stage
        if keep and stage < new.pp and living.issuperset(block) and _can_share(block, new.etp):
            pools.blocks.setdefault(stage, []).append(block)
        else:
            pools.loose += [(stage, d) for d in block if d in living]
    known = set(before)
    pools.loose += [(-1, d) for d in alive if d not in known]
    return pools


def _can_share(block: Sequence[Device], etp: int) -> bool:
    """Whether slices of an expert stay on one host. Members that stand in different generations of one mapping may say that they had ranks that never were together."""
    return all(len({d.host for d in block[i : i + etp]}) == 1 for i in range(0, len(block), etp))


def _made_block(pools: _Pools, stage: int, width: int, etp: int) -> tuple[Device, ...]:
    """A block of loose devices, `etp` of a host at a time: of one host where one has enough, those of this stage first.

    Breaks up a surplus block where too few are left.
    """
    chunks = _chunks(pools.loose, stage, width, etp)
    while len(chunks) * etp < width:
        pp = max((p for p in pools.blocks if pools.blocks[p]), key=lambda p: len(pools.blocks[p]))
        pools.loose += [(pp, d) for d in pools.blocks[pp].pop()]
        chunks = _chunks(pools.loose, stage, width, etp)
    taken = [d for chunk in chunks[: width // etp] for d in chunk]
    pools.loose = [entry for entry in pools.loose if entry[1] not in taken]
    return tuple(taken)


def _chunks(loose: Sequence[tuple[int, Device]], stage: int, width: int, etp: int) -> list[list[Device]]:
    """Groups of `etp` loose devices of one host, the best for `stage` first."""
    hosts: dict[int, list[tuple[bool, int, Device]]] = {}
    for before, device in loose:
        hosts.setdefault(device.host, []).append((before != stage, device.id, device))

    def rank(host: int) -> tuple[bool, int, int]:
        here = sorted(hosts[host])[:width]
        return len(here) < width, sum(stranger for stranger, _, _ in here), host

    out = []
    for host in sorted(hosts, key=rank):
        mine = [device for _, _, device in sorted(hosts[host])]
        out += [mine[i : i + etp] for i in range(0, len(mine) - etp + 1, etp)]
    return out
