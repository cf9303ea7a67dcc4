"""Lost hosts -> how training goes on: new mapping, new placement, what moves, or "go back to the checkpoint".

Decides, from what runs and who lives (dead hosts left out, joined ones added), one of

- `go_on`: every state has a living holder; says which device takes which rank, where experts live now, and what each host fetches from whom;
- `checkpoint`: some state has none; names all of it. The mapping and placement are planned all the same, to be filled from the checkpoint;
- `wait`: fewer hosts live than the job may run on, or no mapping fits them; says for what.

Pure: every survivor makes the same plan from the same facts and compares a hash. Must never change: state without a living holder is never made up, and a
device is idle only with a reason.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, NamedTuple

from numpy.typing import ArrayLike

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.mapping import Folding, assign_stages, to_dict
from phalanx.plan.placement import (
    Effort,
    Fleet,
    Migration,
    patched_placement,
    plan_migration,
    plan_placement,
    read_loads,
    replica_counts,
)
from phalanx.plan.recovery.devices import Limits, choose_folding, is_exact, place_devices, usable_devices
from phalanx.plan.recovery.state import (
    WHOLE,
    DenseCopy,
    Device,
    JobState,
    Span,
    StageExperts,
    dense_copies,
    merged_holdings,
    stage_fleet,
)

Action = Literal["go_on", "checkpoint", "wait"]


class DenseFetch(NamedTuple):
    """A part of a named piece of dense state that a device gets from another."""

    name: str
    part: Span
    src: int
    dst: int


@dataclass(frozen=True, kw_only=True)
class StageRecovery:
    """Experts of one stage: where they live now, and what travels."""

    layers: tuple[int, ...]
    migration: Migration


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """How training goes on after `lost` hosts."""

    action: Action
    lost: tuple[int, ...]
    old: Folding
    new: Folding | None
    devices: tuple[Device, ...]
    """Of rank 0, 1, 2, ... of the new mapping."""
    idle: tuple[Device, ...]
    stages: tuple[StageRecovery, ...]
    dense: tuple[DenseFetch, ...]
    """Empty where `reshard`: then all dense state goes through a reshard plan."""
    missing: tuple[str, ...]
    """State that nobody holds any more, by name."""
    exact: bool
    """tp, cp and etp are as before: results stay bitwise those of an undisturbed run."""
    reshard: bool
    """tp or the stages changed: pieces of dense state are cut differently now."""
    reason: str = ""
    """Why devices are idle, or the mapping is another."""
    notes: tuple[str, ...] = ()
    """What else was decided that nobody asked for."""

    @property
    def num_expert_copies(self) -> int:
        return sum(len(s.migration.fetches) for s in self.stages)

    def job(self, before: JobState) -> JobState:
        """What runs once this plan is carried out."""
        if self.new is None:
            raise PlanError(
                [Problem(where="recovery", value=self.action, rule="has no mapping to run")], subject="recovery"
            )
        stages = tuple(StageExperts(layers=s.layers, placement=s.migration.new) for s in self.stages)
        return JobState(
            folding=self.new,
            devices=self.devices,
            stages=stages,
            slots_per_rank=before.slots_per_rank,
            floor=before.floor,
            zero=before.zero,
        )

    def check(self) -> None:
        """Raise `PlanError` with all problems."""
        raise_if(_problems(self), PlanError, subject="recovery plan")

    def to_json(self) -> str:
        return json.dumps(
            {
                "action": self.action,
                "lost": self.lost,
                "old": to_dict(self.old),
                "new": None if self.new is None else to_dict(self.new),
                "devices": self.devices,
                "idle": self.idle,
                "stages": [[s.layers, json.loads(s.migration.to_json())] for s in self.stages],
                "dense": [[f.name, str(f.part.start), str(f.part.stop), f.src, f.dst] for f in self.dense],
                "missing": self.missing,
                "exact": self.exact,
                "reshard": self.reshard,
                "reason": self.reason,
                "notes": self.notes,
            },
            sort_keys=True,
        )

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def explain(self) -> str:
        """What a person wants to know, in a few lines."""
        hosts = f"hosts {', '.join(map(str, self.lost))} are lost" if self.lost else "no host is lost"
        words = {
            "go_on": "training goes on",
            "checkpoint": "go back to the checkpoint",
            "wait": "wait for hosts",
        }
        lines = [f"{hosts}: {words[self.action]}"]
        if self.new is not None:
            kind = "results stay bitwise the same" if self.exact else "results stay the same within rounding"
            lines.append(f"  mapping {self.old.label()} -> {self.new.label()} on {self.new.world} devices; {kind}")
        if self.idle:
            lines.append(f"  idle: devices {', '.join(str(d.id) for d in self.idle)}")
        lines += [f"  {note}" for note in (self.reason, *self.notes) if note]
        if self.action == "checkpoint":
            shown = ", ".join(self.missing[:8]) + (
                f" and {len(self.missing) - 8} more" if len(self.missing) > 8 else ""
            )
            lines.append(f"  lost for good: {shown}")
        elif self.new is not None:
            dense = "all dense state is cut anew" if self.reshard else f"{len(self.dense)} pieces of dense state"
            lines.append(f"  moves: {self.num_expert_copies} expert states, {dense}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What else decides how training goes on."""

    loads: ArrayLike | None = None
    """Tokens of each expert, a row for each expert layer of the model; None: all alike."""
    layers: tuple[tuple[int, ...], ...] | None = None
    """Expert layers of each new stage; None: as before, or by cost where pp changes."""
    fleet: Fleet | None = None
    """Racks and failure rates of hosts, by name."""
    min_hosts: int = 1
    """With fewer hosts the job waits."""
    place: Literal["best", "mend"] = "best"
    """Experts are placed anew as well as can be, or (`mend`, wherever it can be done) only those below the floor get new holders,
    which is over sooner; the rest can follow in the background."""
    effort: Effort | None = None


def plan_recovery(job: JobState, alive: Sequence[Device], limits: Limits, terms: Terms | None = None) -> RecoveryPlan:
    """How to go on with the devices that live. Raises `PlanError` where the facts contradict each other."""
    terms = terms or Terms()
    job.check()
    raise_if(_alive_problems(job, alive), PlanError, subject="recovery")
    lost = tuple(host for host in job.hosts if host not in {d.host for d in alive})
    hosts = sorted({d.host for d in alive})
    usable = usable_devices(alive, job.folding.etp)
    roomy = replace(limits, slots_per_rank=job.slots_per_rank) if job.stages else limits
    choice = choose_folding(job.folding, usable, roomy) if len(hosts) >= terms.min_hosts else None
    if choice is None:
        return _waiting(job, lost, hosts, terms.min_hosts, usable)
    new = choice.folding
    devices, idle = place_devices(job.folding, job.devices, alive, new)
    layers = _stage_layers(job, new, terms.layers, limits)
    stages, notes = _stages(job, new, devices, alive, layers, terms)
    here = {d.id for d in alive}
    reshard = (new.tp, new.pp) != (job.folding.tp, job.folding.pp)
    before = dense_copies(job.folding, job.devices, floor=job.floor, zero=job.zero)
    dense, gone = ((), _gone(before, here)) if reshard else _dense_fetches(job, before, here, new, devices)
    missing = (*gone, *(f"layer {s.layers[layer]} expert {e}" for s in stages for layer, e in s.migration.lost))
    made = RecoveryPlan(
        action="checkpoint" if missing else "go_on",
        lost=lost,
        old=job.folding,
        new=new,
        devices=devices,
        idle=idle,
        stages=stages,
        dense=dense,
        missing=missing,
        exact=is_exact(new, job.folding),
        reshard=reshard,
        reason=_reason(choice.reason, len(alive) - usable, job.folding.etp),
        notes=tuple(notes),
    )
    made.check()
    return made


def _reason(reason: str, single: int, etp: int) -> str:
    parts = [reason] if reason else []
    if single:
        parts.append(f"{single} devices have no {etp - 1} others on their host to share experts with (etp {etp})")
    return "; ".join(parts)


def _alive_problems(job: JobState, alive: Sequence[Device]) -> list[Problem]:
    problems = []
    if len({d.id for d in alive}) != len(alive):
        problems.append(Problem(where="alive", value=sorted(d.id for d in alive), rule="each device is there once"))
    host_of = {d.id: d.host for d in job.devices}
    moved = [d for d in alive if host_of.get(d.id, d.host) != d.host]
    if moved:
        rule = f"device {moved[0].id} is on host {host_of[moved[0].id]}"
        problems.append(Problem(where="alive", value=tuple(moved[0]), rule=rule, hint="give a new device a new number"))
    return problems


def _waiting(
    job: JobState, lost: tuple[int, ...], hosts: Sequence[int], min_hosts: int, num_devices: int
) -> RecoveryPlan:
    if len(hosts) < min_hosts:
        gone = ", ".join(map(str, lost))
        note = f"{len(hosts)} hosts live, the job runs on {min_hosts} or more; waiting for {min_hosts - len(hosts)} of {gone or 'others'}"
    else:
        note = f"no legal mapping of the axes in use fits {num_devices} devices; waiting for more"
        experts = job.stages[0].placement.num_experts if job.stages else 0
        slots = num_devices // (job.folding.etp * job.folding.pp) * job.slots_per_rank
        if slots < experts:
            note = (
                f"{experts} experts need a slot each, {num_devices} devices have {slots} for a stage; waiting for more"
            )
    return RecoveryPlan(
        action="wait", lost=lost, old=job.folding, new=None, devices=(), idle=(), stages=(), dense=(), missing=(),
        exact=False, reshard=False, reason=note,
    )  # fmt: skip


def _stage_layers(
    job: JobState, new: Folding, layers: Sequence[Sequence[int]] | None, limits: Limits
) -> list[tuple[int, ...]]:
    """Expert layers of each new stage: as given, as before, or as the model is divided by cost where pp changes."""
    if not job.stages:
        return []
    mine = [stage.layers for stage in job.stages]
    if layers is not None:
        wanted = [tuple(part) for part in layers]
    elif new.pp == len(mine):
        wanted = mine
    else:
        wanted = [s.moe_layers for s in assign_stages(limits.spec, range(new.pp), seq_len=limits.seq_len).stages]
    if (
        len(wanted) != new.pp
        or not all(wanted)
        or sorted(x for w in wanted for x in w) != sorted(x for m in mine for x in m)
    ):
        rule = f"some expert layers for each of pp {new.pp} stages, together those of the stages before"
        problem = Problem(where="layers", value=wanted, rule=rule, hint="say which layers each stage has")
        raise PlanError([problem], subject="recovery")
    return wanted


def _stages(
    job: JobState,
    new: Folding,
    devices: Sequence[Device],
    alive: Sequence[Device],
    layers: Sequence[tuple[int, ...]],
    terms: Terms,
) -> tuple[tuple[StageRecovery, ...], list[str]]:
    """Placement and migration of each stage, and what was decided that nobody asked for."""
    every = sorted(x for part in layers for x in part)
    out, notes = [], []
    for pp, part in enumerate(layers):
        held = merged_holdings(job.stages, part)
        table = read_loads(
            [[0.0] * held.num_experts] * len(part) if terms.loads is None else _rows(terms.loads, every, part)
        )
        here = stage_fleet(new, devices, pp, slots_per_rank=job.slots_per_rank, like=terms.fleet)
        counts = replica_counts(table, here, floor=job.floor)
        notes += [
            f"stage {pp}: {note}" if len(layers) > 1 else note
            for note in counts.notes
            if "without any load" not in note
        ]
        mended = patched_placement(held, here, floor=counts.floor) if terms.place == "mend" else None
        placed = mended or plan_placement(counts, here, table, effort=terms.effort)
        migration = plan_migration(held, placed, rename=True, alive={d.host for d in alive})
        out.append(StageRecovery(layers=part, migration=migration))
    return tuple(out), notes


def _rows(loads: ArrayLike, every: Sequence[int], part: Sequence[int]) -> list[list[float]]:
    table = read_loads(loads)
    if len(table) != len(every):
        rule = f"a row for each of the {len(every)} expert layers"
        raise PlanError([Problem(where="loads.shape", value=table.shape, rule=rule)], subject="recovery")
    return [table[every.index(layer)].tolist() for layer in part]


# ---- dense state ------------------------------------------------------------------------------------------------------------------


def _gone(copies: Sequence[DenseCopy], alive: Collection[int]) -> tuple[str, ...]:
    """Parts that no living device holds."""
    held = {(c.name, c.part) for c in copies if c.device in alive}
    dead = dict.fromkeys((c.name, c.part) for c in copies if (c.name, c.part) not in held)
    return tuple(_named(name, part) for name, part in dead)


def _named(name: str, part: Span) -> str:
    return name if part == WHOLE else f"{name} [{part.start}, {part.stop})"


def _dense_fetches(
    job: JobState, before: Sequence[DenseCopy], alive: set[int], new: Folding, devices: Sequence[Device]
) -> tuple[tuple[DenseFetch, ...], tuple[str, ...]]:
    """What each device needs of its new shards and does not hold; sources in turn, so that none sends much more than the others."""
    sources: dict[str, list[DenseCopy]] = {}
    for copy in before:
        if copy.device in alive:
            sources.setdefault(copy.name, []).append(copy)
    sent: dict[int, Fraction] = {}
    out: list[DenseFetch] = []
    for name, part, device in dense_copies(new, devices, floor=job.floor, zero=job.zero):
        mine = [c.part for c in sources.get(name, ()) if c.device == device]
        for need in _without(part, mine):
            out += _from_sources(name, need, device, sources.get(name, ()), sent)
    return tuple(out), _gone(before, alive)


def _without(part: Span, held: Sequence[Span]) -> list[Span]:
    """What is left of `part` when the parts `held` are taken out."""
    left = [part]
    for have in held:
        cut = [(Span(s.start, min(s.stop, have.start)), Span(max(s.start, have.stop), s.stop)) for s in left]
        left = [s for pair in cut for s in pair if s.start < s.stop]
    return left


def _from_sources(
    name: str, need: Span, dst: int, sources: Sequence[DenseCopy], sent: dict[int, Fraction]
) -> list[DenseFetch]:
    """Pieces of `need`, each from the holder that has sent least. A part without a holder is left out: it is named as lost elsewhere."""
    cuts = sorted({need.start, need.stop, *(x for c in sources for x in c.part if need.start < x < need.stop)})
    out = []
    for start, stop in itertools.pairwise(cuts):
        holders = [c.device for c in sources if c.part.start <= start and stop <= c.part.stop]
        if holders:
            src = min(holders, key=lambda d: (sent.get(d, Fraction(0)), d))
            sent[src] = sent.get(src, Fraction(0)) + (stop - start)
            out.append(DenseFetch(name, Span(start, stop), src, dst))
    return out


def _problems(plan: RecoveryPlan) -> list[Problem]:
    problems: list[Problem] = []
    if plan.action == "wait":
        return problems
    assert plan.new is not None  # only `wait` has none
    used = [d.id for d in plan.devices]
    if len(used) != plan.new.world or len(set(used)) != len(used):
        rule = f"a device of its own for each of the {plan.new.world} ranks"
        problems.append(Problem(where="recovery.devices", value=used, rule=rule))
    both = sorted({d.id for d in plan.idle} & set(used))
    if both:
        problems.append(Problem(where="recovery.idle", value=both, rule="has no rank"))
    if plan.idle and not plan.reason:
        problems.append(Problem(where="recovery.idle", value=[d.id for d in plan.idle], rule="is idle for a reason"))
    if bool(plan.missing) != (plan.action == "checkpoint"):
        problems.append(Problem(where="recovery.action", value=plan.action, rule="goes back where state is lost"))
    dead = [f.src for f in plan.dense if f.src not in {d.id for d in (*plan.devices, *plan.idle)}]
    if dead:
        problems.append(Problem(where="recovery.dense", value=dead, rule="a source lives"))
    return problems
