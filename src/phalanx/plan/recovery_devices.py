"""After a loss: the mapping that the surviving devices can run, and which device takes which rank.

Decides both. The mapping keeps tp, cp and etp (then results stay bitwise what they were) and pp, and uses as many devices as make whole groups of them. `fits`
(a memory estimate, say) lets it also change pp, where that uses more devices. Where nothing with these degrees fits the survivors, the nearest legal mapping of
the same axes is taken. With replicas, ep is what is left: one expert-parallel group of all ranks of a stage.

Devices keep their coordinates where they can: a *cell* (the tp x cp ranks of one data-parallel coordinate) that lost nobody stays whole in its stage; surplus
cells fill other stages, loose devices of broken cells make new ones. Must never change: what is idle is named with its reason, and nobody is idle without.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from phalanx.plan.folding import DEGREES, Folding, fit_problems, legal_foldings
from phalanx.plan.model import ModelSpec
from phalanx.plan.recovery_state import Device

EXACT = ("tp", "cp", "etp")
"""Degrees on which the order of sums inside a layer depends."""


@dataclass(frozen=True, kw_only=True)
class Choice:
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
    cp_method: str = "ring"
    fits: Callable[[Folding], bool] | None = None


def choose_folding(old: Folding, num_devices: int, limits: Limits) -> Choice | None:
    """The mapping to go on with; None where not even one device makes a legal one."""
    best = max(_same_degrees(old, num_devices, limits), key=lambda f: (f.world, -_distance(f, old)), default=None)
    if best is not None:
        return Choice(folding=best, idle=num_devices - best.world, reason=_why_idle(best, old, num_devices, limits))
    near = _nearest(old, num_devices, limits)
    if near is None:
        return None
    changed = [
        f"{a} {old.degree(a)} -> {near.degree(a)}" for a in DEGREES if a != "ep" and near.degree(a) != old.degree(a)
    ]
    reason = f"no mapping with the degrees before fits {num_devices} devices: {', '.join(changed)}"
    if near.world < num_devices:
        reason += f"; {near.world} of {num_devices} devices make whole groups"
    return Choice(folding=near, idle=num_devices - near.world, reason=reason)


def is_exact(new: Folding, old: Folding) -> bool:
    """Whether results stay bitwise those of the mapping before."""
    return all(new.degree(axis) == old.degree(axis) for axis in EXACT)


def _same_degrees(old: Folding, num_devices: int, limits: Limits) -> list[Folding]:
    """For each pp that may be used, the largest legal mapping with tp, cp and etp as they are."""
    pps = [old.pp]
    if limits.fits is not None and old.pp > 1:
        pps = sorted(range(1, limits.spec.num_layers + 1), key=lambda pp: (abs(pp - old.pp), pp))
    out = []
    for pp in pps:
        unit = pp * math.lcm(old.tp * old.cp, old.etp)
        for world in range(num_devices - num_devices % unit, 0, -unit):
            made = _with_experts(replace(old, world=world, pp=pp), old, limits)
            if made is not None and is_legal(made, limits):
                out.append(made)
                break
    return out


def _with_experts(folding: Folding, old: Folding, limits: Limits) -> Folding | None:
    """`ep` for this world: all of a stage where experts have replicas, else the nearest that divides the experts."""
    blocks = folding.world // (folding.etp * folding.pp)
    if not limits.spec.moe_layers:
        return replace(folding, ep=1)
    if limits.replicated:
        return replace(folding, ep=blocks)
    legal = [d for d in range(1, blocks + 1) if blocks % d == 0 and limits.spec.num_experts % d == 0]
    return replace(folding, ep=min(legal, key=lambda d: (abs(math.log2(d / old.ep)), d)))


def is_legal(folding: Folding, limits: Limits) -> bool:
    """For model, sequence and samples. A replicated `ep` need not divide the experts: slots are not theirs by number."""
    plain = replace(folding, ep=1) if limits.replicated else folding
    if fit_problems(plain, limits.spec, seq_len=limits.seq_len, cp_method=limits.cp_method):
        return False
    if folding.dp > limits.num_samples:
        return False
    return limits.fits is None or limits.fits(folding)


def _nearest(old: Folding, num_devices: int, limits: Limits) -> Folding | None:
    """The largest world first; then the fewest doublings away. Only axes that were in use may be."""
    axes = tuple(axis for axis in DEGREES if old.degree(axis) > 1)
    for world in range(num_devices, 0, -1):
        found: dict[Folding, None] = {}
        for folding in legal_foldings(
            world, limits.spec, seq_len=limits.seq_len, axes=axes, cp_method=limits.cp_method
        ):
            made = _with_experts(folding, old, limits)
            if made is not None and is_legal(made, limits):
                found[made] = None
        if found:
            return min(found, key=lambda f: (_distance(f, old), [f.degree(a) for a in DEGREES]))
    return None


def _distance(folding: Folding, old: Folding) -> float:
    """In doublings of the degrees that a person chose."""
    degrees = [axis for axis in DEGREES if axis != "ep"]
    return round(sum(abs(math.log2(folding.degree(a) / old.degree(a))) for a in degrees), 6)


def _why_idle(folding: Folding, old: Folding, num_devices: int, limits: Limits) -> str:
    parts = []
    if folding.pp != old.pp:
        parts.append(f"pp {old.pp} -> {folding.pp}, to use {folding.world} devices")
    if folding.world < num_devices:
        shown = [f"{a} {folding.degree(a)}" for a in ("tp", "cp", "etp", "pp") if folding.degree(a) > 1]
        unit = folding.pp * math.lcm(folding.tp * folding.cp, folding.etp)
        whole = num_devices - num_devices % unit
        if whole > folding.world and whole // (folding.tp * folding.cp * folding.pp) > limits.num_samples:
            parts.append(f"a step has {limits.num_samples} samples, so dp {folding.dp} is the most that all have work")
        else:
            parts.append(
                f"{' x '.join(shown) or 'the mapping'} needs a multiple of {unit} devices, {num_devices} are left"
            )
    return "; ".join(parts)


# ---- which device takes which rank ----------------------------------------------------------------------------------------------


@dataclass
class _Pools:
    """Devices not yet placed: whole cells by stage, and single ones with the stage they were in (-1: new here)."""

    cells: dict[int, list[tuple[Device, ...]]]
    loose: list[tuple[int, Device]]


def place_devices(
    old: Folding, before: Sequence[Device], alive: Sequence[Device], new: Folding
) -> tuple[tuple[Device, ...], tuple[Device, ...]]:
    """(device of rank 0, 1, ..., idle devices). `alive` may contain devices that had no rank before."""
    pools = _pools(old, before, alive, keep=(old.tp, old.cp) == (new.tp, new.cp), stages=new.pp)
    width, per_stage = new.tp * new.cp, new.dp
    stages: list[list[tuple[Device, ...]]] = []
    for pp in range(new.pp):
        own = pools.cells.get(pp, [])
        stages.append(own[:per_stage])
        pools.cells[pp] = own[per_stage:]
    for cells in stages:
        surplus = [(pp, cell) for pp in sorted(pools.cells) for cell in pools.cells[pp]]
        for pp, cell in surplus[: per_stage - len(cells)]:
            cells.append(cell)
            pools.cells[pp].remove(cell)
    for pp, cells in enumerate(stages):
        while len(cells) < per_stage:
            cells.append(_made_cell(pools, pp, width))
    order = [d for cells in stages for cell in sorted(cells, key=lambda c: (c[0].host, c[0].id)) for d in cell]
    placed = set(order)
    return tuple(order), tuple(d for d in alive if d not in placed)


def _pools(old: Folding, before: Sequence[Device], alive: Sequence[Device], *, keep: bool, stages: int) -> _Pools:
    living = set(alive)
    width, per_stage = old.tp * old.cp, old.world // old.pp
    pools = _Pools(cells={}, loose=[])
    for first in range(0, old.world, width):
        cell, stage = tuple(before[first : first + width]), first // per_stage
        if keep and stage < stages and living.issuperset(cell):
            pools.cells.setdefault(stage, []).append(cell)
        else:
            pools.loose += [(stage, d) for d in cell if d in living]
    known = set(before)
    pools.loose += [(-1, d) for d in alive if d not in known]
    return pools


def _made_cell(pools: _Pools, stage: int, width: int) -> tuple[Device, ...]:
    """A cell of loose devices: of one host where one has enough of them, those of this stage first. Breaks up a surplus cell where none are left."""
    while len(pools.loose) < width:
        pp = max((p for p in pools.cells if pools.cells[p]), key=lambda p: len(pools.cells[p]))
        pools.loose += [(pp, d) for d in pools.cells[pp].pop()]
    hosts = [d.host for _, d in pools.loose]

    def key(entry: tuple[int, Device]) -> tuple[bool, int, int, bool, int]:
        before, device = entry
        enough = hosts.count(device.host) >= width
        strangers = sum(1 for s, d in pools.loose if d.host == device.host and s != stage)
        return not enough, strangers, device.host, before != stage, device.id

    pools.loose.sort(key=key)
    taken, pools.loose = pools.loose[:width], pools.loose[width:]
    return tuple(d for _, d in sorted(taken, key=lambda entry: entry[1].id))
