"""Whether the experts of a run should lie elsewhere from now on: keep the present placement, or take a new one, decided between steps.

Decides from what experts were asked for lately (`smoothed_loads`), where they are, and what rows and bytes cost. Within a layer all ranks wait for the busiest one,
so a placement's time is the sum over the layers of a stage of the busiest rank's rows, times the seconds of a row. Moving costs once; the gain comes back every step until the
next decision. So:

    mend       some expert is on fewer hosts than `floor` asks for, and more are possible: always, whatever it costs, and with the fewest states that do it, for they travel at once.
               Even loads are for a later decision
    balance    what is saved until the next decision is `MARGIN` times what moving costs, and at least `LEAST_GAIN` of the time of the experts
    keep       otherwise. Both bounds are hysteresis: loads that only tremble never pay

Must never change: a pure function, so ranks that are given the same numbers decide alike (what was measured must be agreed upon before); no expert gets on fewer hosts than it is on, but for
what it has beyond the floor.

That loads decide again every so many steps is of arXiv 2407.04656 (200 there); whether it pays is left open there.

Shapes: L layers of a stage, E experts, N hosts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.core.messages import message
from phalanx.core.units import format_bytes
from phalanx.plan.mapping import LayerPlacements, Placement
from phalanx.plan.placement.search import (
    Effort,
    Floats,
    HostPlacement,
    HostPool,
    Migration,
    apart_placement,
    max_over_mean,
    patched_placement,
    plan_migration,
    plan_placement,
    read_loads,
    replica_counts,
    smoothed,
)

Action = Literal["keep", "balance", "mend"]
MARGIN = 2.0
"""Saved seconds for each second of moving: loads may change again before the next decision."""
LEAST_GAIN = 0.05
"""Least gain, as a share of the busiest rank's time with experts."""
NEARLY = 0.9
"""Share of the most that is saved until the next decision; among placements that reach it the safest is taken."""
WINDOWS = 4
"""Time constants of the average of loads between two decisions."""


@dataclass(frozen=True, kw_only=True)
class StageNow:
    """Experts of one pipeline stage."""

    layers: tuple[int, ...]
    placement: HostPlacement
    loads: Floats
    """(L, E) rows of a step, over all ranks."""
    slots_per_rank: int

    def busiest_rows(self, placement: HostPlacement) -> float:
        """Rows of the busiest rank, summed over the layers; the ranks of a host share its rows evenly."""
        per_slot = placement.loads(self.loads) / np.asarray(placement.pool.slots)
        return float(per_slot.max(1).sum()) * self.slots_per_rank


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What was measured; the same on all ranks."""

    row_s: float
    """Seconds of one row of one expert on a rank, forward and backward."""
    bytes_per_s: float
    """Bytes per second of state that a host gets or gives, in the time for which training stands still for it."""
    rebuild_s: float
    """Seconds to make groups, modules and buffers anew, whatever moves."""
    expert_bytes: int
    """Bytes of the state of one expert: master weights and both moments."""


@message
@dataclass(frozen=True, kw_only=True)
class Replacement(Hashed):
    """A decision. `migrations` has one for each stage with experts, none where `action` is keep; gain and cost are then those of the best that was found."""

    action: Action
    migrations: tuple[Migration, ...]
    before: float
    """Rows of the busiest rank over the mean, over the layers of all stages."""
    after: float
    """Predicted, for the same loads."""
    gain_s: float
    """Seconds of a step that are gained."""
    cost_s: float
    interval: int
    expert_bytes: int

    @property
    def num_copies(self) -> int:
        return sum(m.num_copies for m in self.migrations)

    @property
    def moved_bytes(self) -> int:
        return self.num_copies * self.expert_bytes

    def explain(self) -> str:
        """Says it in a line."""
        words = {
            "keep": "the placement stays",
            "balance": "experts move, for even loads",
            "mend": "experts move, for some are on too few hosts",
        }
        if self.action == "keep":
            return f"{words['keep']}: busiest rank / mean {self.before:.2f}; moving would save {self.gain_s:.3g} s a step and cost {self.cost_s:.3g} s"
        return (
            f"{words[self.action]}: {self.num_copies} states = {format_bytes(self.moved_bytes)}, {self.cost_s:.3g} s expected; "
            f"busiest rank / mean {self.before:.2f} -> {self.after:.2f} predicted, {self.gain_s:.3g} s a step"
        )

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        for migration in self.migrations:
            migration.check()
        raise_if(_problems(self), PlanError, subject="replacement")

    def to_dict(self) -> dict[str, Any]:
        fields = {n: getattr(self, n) for n in ("action", "before", "after", "gain_s", "cost_s", "interval")}
        return {**fields, "migrations": [m.to_dict() for m in self.migrations]}


def smoothed_loads(before: ArrayLike | None, counts_LE: ArrayLike, *, interval: int) -> Floats:
    """Exponential mean over committed steps, of which `WINDOWS` time constants fit between two decisions."""
    return smoothed(before, counts_LE, weight=min(1.0, WINDOWS / interval))


def plan_replacement(
    stages: Sequence[StageNow], costs: Costs, *, floor: int, interval: int, effort: Effort | None = None
) -> Replacement:
    """The decision for `interval` steps to come. Raises `PlanError` where numbers make no sense."""
    raise_if(_bad_numbers(stages, costs, floor, interval), PlanError, subject="replacement")
    mends = any(_below(stage, floor) for stage in stages)
    choices = [list(c) for c in zip(*(_choices(stage, floor, effort) for stage in stages), strict=True)]
    if not stages:
        return _kept(stages, costs, interval)
    in_one_rack = [sum(m.new.num_in_one_rack(floor) for m in choice) for choice in choices]
    alone_now = sum(stage.placement.num_in_one_rack(floor) for stage in stages)
    mends |= min(in_one_rack) < alone_now
    if not mends and min(in_one_rack) > alone_now:
        return _kept(stages, costs, interval)
    found = [
        _joint("mend" if mends else "balance", stages, choice, costs, interval)
        for choice, alone in zip(choices, in_one_rack, strict=True)
        if alone == min(in_one_rack)
    ]
    best = _least(found) if mends else _best(found)
    if not mends and not _pays(best, _time(stages, [s.placement for s in stages], costs)):
        return _kept(stages, costs, interval, best.gain_s, best.cost_s)
    best.check()
    return best


def _pays(made: Replacement, before_s: float) -> bool:
    return made.gain_s * made.interval >= MARGIN * made.cost_s and made.gain_s > LEAST_GAIN * before_s


def _kept(
    stages: Sequence[StageNow], costs: Costs, interval: int, gain_s: float = 0.0, cost_s: float = 0.0
) -> Replacement:
    level = _imbalance(stages, [s.placement for s in stages])
    return Replacement(
        action="keep",
        migrations=(),
        before=level,
        after=level,
        gain_s=gain_s,
        cost_s=cost_s,
        interval=interval,
        expert_bytes=costs.expert_bytes,
    )


def _choices(stage: StageNow, floor: int, effort: Effort | None) -> list[Migration]:
    """Ways for one stage, as many for each, in one order: the safest placement and the most level one, each with the hosts named so that little travels and with
    experts renamed too; and the fewest changes that hold the floor."""
    pool = stage.placement.pool
    counts = replica_counts(stage.loads, pool, floor=floor)
    safest = plan_placement(counts, pool, stage.loads, effort=effort)
    mended = patched_placement(stage.placement, pool, floor=counts.floor)
    plans = (safest, apart_placement("least_loaded", stage.loads, counts, pool) or safest)
    ways = [plan_migration(stage.placement, plan, rename=rename) for plan in plans for rename in (False, True)]
    return [*ways, plan_migration(stage.placement, safest if mended is None else mended)]


def _worth(made: Replacement) -> float:
    return made.gain_s * made.interval - made.cost_s


def _best(found: Sequence[Replacement]) -> Replacement:
    """The one, of those that are worth most, or nearly, whose losses beyond the floor are fatal least often, then the one that
    moves least."""
    most = max(map(_worth, found))
    near = [made for made in found if _worth(made) >= most - (1 - NEARLY) * abs(most)]
    return min(near, key=lambda made: (_losses(made), made.num_copies, -_worth(made)))


def _least(found: Sequence[Replacement]) -> Replacement:
    """The one that moves least; of those the one whose losses are fatal least often, then the one that is worth most."""
    return min(found, key=lambda made: (made.num_copies, _losses(made), -_worth(made)))


def _losses(made: Replacement) -> tuple[float, ...]:
    """Fatal part of the losses of k = 0, 1, 2, ... hosts, the worst stage."""
    return max(tuple(float(1 - c.low) for c in m.new.certificate.chances) for m in made.migrations)


def _joint(
    action: Action, stages: Sequence[StageNow], migrations: Sequence[Migration], costs: Costs, interval: int
) -> Replacement:
    now, new = [s.placement for s in stages], [m.new for m in migrations]
    before_s, after_s = (_time(stages, plans, costs) for plans in (now, new))
    return Replacement(
        action=action,
        migrations=tuple(migrations),
        before=_imbalance(stages, now),
        after=_imbalance(stages, new),
        gain_s=before_s - after_s,
        cost_s=costs.rebuild_s + _transfer_s(migrations, costs),
        interval=interval,
        expert_bytes=costs.expert_bytes,
    )


def _time(stages: Sequence[StageNow], plans: Sequence[HostPlacement], costs: Costs) -> float:
    """Time of the slowest stage, which the others wait for."""
    rows = [stage.busiest_rows(plan) for stage, plan in zip(stages, plans, strict=True)]
    return max(rows, default=0.0) * costs.row_s


def _imbalance(stages: Sequence[StageNow], plans: Sequence[HostPlacement]) -> float:
    """Busiest rank over mean, the layers of all stages by their loads."""
    totals = [float(s.loads.sum()) / s.placement.pool.num_slots for s in stages]
    found = [max_over_mean(p.loads(s.loads), p.pool.slots) for s, p in zip(stages, plans, strict=True)]
    whole = math.fsum(totals)
    return math.fsum(t * f for t, f in zip(totals, found, strict=True)) / whole if whole else 1.0


def _transfer_s(migrations: Sequence[Migration], costs: Costs) -> float:
    """Stages move at the same time; in each the host that gets or gives most is the last."""
    most = 0
    for migration in migrations:
        gets = Counter(fetch.dst for fetch in migration.fetches)
        most = max(most, *gets.values(), *migration.sends().values(), 0)
    return most * costs.expert_bytes / costs.bytes_per_s


def _below(stage: StageNow, floor: int) -> bool:
    """Whether some expert is on fewer hosts than the floor that these hosts can hold."""
    wanted = min(floor, stage.placement.pool.max_floor(stage.placement.num_experts))
    return bool(((stage.placement.copies > 0).sum(2) < wanted).any())


def _bad_numbers(stages: Sequence[StageNow], costs: Costs, floor: int, interval: int) -> list[Problem]:
    problems = []
    for i, stage in enumerate(stages):
        shape, loads = (len(stage.layers), stage.placement.num_experts), read_loads(stage.loads)
        if loads.shape != shape or stage.placement.num_layers != len(stage.layers):
            rule = f"must be a row for each of its {shape[0]} layers, of {shape[1]} experts"
            problems.append(Problem(where=f"stages[{i}].loads", value=loads.shape, rule=rule))
    for name in ("row_s", "bytes_per_s"):
        if not 0 < getattr(costs, name) < float("inf"):
            problems.append(Problem(where=f"costs.{name}", value=getattr(costs, name), rule="must be above 0"))
    for name, value in (("floor", floor), ("interval", interval)):
        if value < 1:
            problems.append(Problem(where=name, value=value, rule="must be at least 1"))
    return problems


def _problems(made: Replacement) -> list[Problem]:
    """What moving must not do: take an expert from hosts that its guarantee needs, or lose it."""
    problems = []
    for i, migration in enumerate(made.migrations):
        held, will = ((plan.copies > 0).sum(2) for plan in (migration.old, migration.new))
        worse = np.argwhere(will < np.minimum(held, migration.new.floor))
        if len(worse):
            rule = f"(layer, expert) stays on as many hosts as it is on, up to {migration.new.floor}"
            problems.append(Problem(where=f"replacement.stages[{i}]", value=worse[:4].tolist(), rule=rule))
        if migration.lost:
            rule = "(layer, expert) has a holder"
            problems.append(Problem(where=f"replacement.stages[{i}].lost", value=migration.lost, rule=rule))
    return problems


# ---- between a run's placement and that of its hosts ----------------------------------------------------------------------------------


def hosts_of_placement(placement: LayerPlacements) -> tuple[tuple[int, ...], HostPlacement]:
    """(layers, their placement on hosts) of one stage, whose ep ranks are one group."""
    layers = tuple(sorted(placement.layers))
    some = placement.layers[layers[0]]
    host_of_ep = some.hosts or tuple(range(len(some.slots[0])))
    names = tuple(dict.fromkeys(host_of_ep))
    rack_of = dict(zip(host_of_ep, some.racks, strict=True)) if some.racks else {}
    pool = HostPool(
        slots=tuple(some.slots_per_rank * host_of_ep.count(name) for name in names),
        names=names,
        racks=tuple(rack_of[name] for name in names) if rack_of else (),
    )
    slots = tuple(_by_host(placement.layers[layer], host_of_ep, names) for layer in layers)
    made = HostPlacement(num_experts=some.num_experts, pool=pool, slots=slots)
    made.check()
    return layers, made


def _by_host(placement: Placement, host_of_ep: Sequence[int], names: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    ranks = list(zip(host_of_ep, placement.slots[0], strict=True))
    return tuple(tuple(e for host, held in ranks if host == name for e in held) for name in names)


def placement_of_hosts(layers: Sequence[int], made: HostPlacement, before: LayerPlacements) -> LayerPlacements:
    """The other way round: over the same ep ranks as `before`, each in the place of its host."""
    some = before.layers[layers[0]]
    host_of_ep = some.hosts or tuple(range(len(some.slots[0])))
    out = LayerPlacements(
        layers={layer: made.layer_placement(i, host_of_ep=host_of_ep) for i, layer in enumerate(layers)}
    )
    out.check()
    return out
