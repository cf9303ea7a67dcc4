"""Experts with replicas that move while training runs: loads are watched, and between two steps `plan/placement/rebalancing.py` decides.

    committed   the counts of a step go into the average of loads; the same numbers on all ranks
    between     a step before it is due: gather what was measured ─ the first rank has the decision made during the next step (`runtime/checkpoint/helper_process.py`)
                due: that decision (made now where there is none for this placement)
    mend        at once: modules and buffers for the new placement ─ dense state copied, experts' state moved ─ checksums
    balance     alongside the next step, where that is possible: experts' state travels (`train/placement/incoming.py`), its gradients follow before the step is decided (`reduced`), its update
                goes with the commit (`applied`); then modules and buffers ─ state copied ─ checksums
    adopt       the prepared parts take the place of the old ones

Decides nothing. Must never change: until `adopt` what the trainer has stays as it is, so that whoever is lost before costs another attempt and nothing else; a decision rests on the loads of
the step before the last, whenever it is made; all ranks call `between` after the same steps, and those who adopt do it for the same step (an elastic run: with the commit of that step).

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phalanx.core.config import Recipe
from phalanx.core.events import ExpertsMoved
from phalanx.core.messages import message
from phalanx.core.samples import num_rounds
from phalanx.plan.layout import STATE_KINDS, Box
from phalanx.plan.mapping import Folding, LayerPlacements
from phalanx.plan.model import ModelSpec, parameters
from phalanx.plan.placement import (
    Costs,
    Replacement,
    StageNow,
    coming_moves,
    hosts_of_placement,
    placement_of_hosts,
    plan_replacement,
    smoothed_loads,
)
from phalanx.plan.placement.search import Floats, Migration
from phalanx.plan.recovery import REPLACE_ID, expert_moves, expert_order
from phalanx.plan.reshard import Move
from phalanx.runtime.checkpoint import HelperProcess
from phalanx.runtime.comm import Axis
from phalanx.runtime.reshard import Resharder
from phalanx.runtime.state import ShardedState, shard_views
from phalanx.train import NOWHERE, MoveRecorder, NewPlacement, Recorder, Where, assemble
from phalanx.train.placement.expert_figures import PastMoves, placement_in_use, seconds_of_a_row
from phalanx.train.placement.incoming import IncomingExperts
from phalanx.train.placement.state_transfer import checksums, compare, move_state
from phalanx.train.setup import Rank, make_context
from phalanx.train.step import ReducedStep, StepParts

SOON = 10
"""A decision follows a change of members after this part of the interval."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Way:
    """How a decision is to be carried out."""

    where: Where
    recorder: Recorder | None
    beside: bool
    """A step, where that can be."""

    def record(self, parts: StepParts, relocation: _Relocation) -> MoveRecorder | None:
        """Records its moves, where the next step is recorded."""
        if self.recorder is None:
            return None
        return self.recorder.moves(
            relocation.step, lambda: expert_order(_folding(parts), relocation.before, relocation.after)
        )


@message
@dataclass(frozen=True, kw_only=True)
class _Told:
    """What one rank knows, for all."""

    seen: int
    loads: Floats | None
    earlier: Floats | None
    row_s: float
    bytes_per_s: float
    rebuild_s: float
    placement: LayerPlacements
    """Placement of its stage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Asked:
    """What a decision rests on, the same on all ranks."""

    step: int
    """It follows this one."""
    parts: StepParts
    """Parts whose placement, on their members, holds as long as these are in use."""
    before: Mapping[int, LayerPlacements]
    """Placements before, by stage."""
    stages: list[StageNow]
    costs: Costs


@dataclass(frozen=True, kw_only=True, eq=False)
class _Relocation:
    """A decision that is being carried out."""

    decision: Replacement
    step: int
    """The decision followed this one."""
    before: Mapping[int, LayerPlacements]
    after: Mapping[int, LayerPlacements]
    """Placements after, by stage."""

    @property
    def placements(self) -> tuple[LayerPlacements, ...]:
        """Placements of each pipeline stage."""
        return tuple(self.after[stage] for stage in sorted(self.after))

    @property
    def can_overlap(self) -> bool:
        """Below `f` nothing waits for a step. Experts that lie in order, once each, are updated together (`plan/layout/parameters.py`): not as those that come are."""
        return self.decision.action == "balance" and not any(p.layers and p.is_plain for p in self.before.values())

    def event(self, *, step: int, moved_bytes: int, built_s: float, moved_s: float, checked: int) -> ExpertsMoved:
        """That it was carried out with the state after `step` steps."""
        made = self.decision
        return ExpertsMoved(
            step=step,
            why=made.action,
            experts=made.num_copies,
            moved_bytes=moved_bytes,
            built_s=built_s,
            moved_s=moved_s,
            checked=checked,
            before=made.before,
            after=made.after,
            gain_s=made.gain_s,
            cost_s=made.cost_s,
        )


class Rebalancer:
    """One rank's side of it, for a whole run: it outlives the parts of a step."""

    def __init__(self, recipe: Recipe, spec: ModelSpec) -> None:
        config = recipe.resilience
        self.interval = recipe.steps_between_placements() if spec.moe_layers else 0
        self.floor, self.spec, self.limit = config.f, spec, _most_of_mean(recipe)
        self.steps = recipe.train.steps
        self.seen = 0
        """Steps in `loads`."""
        self.loads: Floats | None = None
        self.earlier: Floats | None = None
        """`loads` without the last step."""
        self.again = 0
        """A further step after which to decide."""
        self.moves = PastMoves()
        self.beside = config.move_beside and recipe.launch.device != "cuda"
        """Whether moves overlap a step where they can."""
        self._relocation: tuple[_Relocation, IncomingExperts] | None = None
        """Relocation under way, or there and not in use yet."""
        self._asked: _Asked | None = None
        self._is_warm = False
        """Whether the helper process was started in this generation."""
        self._helper = HelperProcess(["phalanx.plan.placement.rebalancing", "scipy.optimize"])

    def placements(self, parts: StepParts, rank: Rank) -> list[LayerPlacements]:
        """Placements of each pipeline stage, where experts have replicas; else none. Collective."""
        if rank.recipe.resilience.slots_per_rank is None:
            return []
        return list(_by_stage(_folding(parts), rank.peers.gather(placement_in_use(parts))).values())

    def committed(self, counts_LE: NDArray[np.int64]) -> None:
        """Tokens that chose each expert in a committed step, before dropping."""
        if not self.interval:
            return
        if self._relocation is not None:
            self._relocation[1].tell()
        counts = np.asarray(counts_LE, dtype=np.float64)
        if self.limit is not None:  # rows that are dropped are no work
            counts = np.minimum(counts, self.limit * counts.mean(1, keepdims=True))
        self.earlier, self.loads = self.loads, smoothed_loads(self.loads, counts, interval=self.interval)
        self.seen += 1

    def formed(self, step: int) -> None:
        """Members were lost or came after `step` steps, and experts lie as was quickest: balance follows soon, when training goes on again."""
        self.again = step + max(1, self.interval // SOON) if step else 0
        self._is_warm = False
        self._helper.drop()
        self.drop()

    def drop(self) -> None:
        """What is under way to others is of no use any more; nothing that is held has changed."""
        if self._relocation is not None:
            self._relocation[1].drop()
        self._relocation = self._asked = None

    def due(self, step: int) -> bool:
        """Whether a decision follows step `step`: the same on all ranks."""
        is_time = bool(self.interval) and step > 0 and (step % self.interval == 0 or step == self.again)
        return (
            is_time and step + 2 <= self.steps
        )  # one step that the move overlaps, and one to compute in the new place

    def between(
        self,
        parts: StepParts,
        rank: Rank,
        *,
        step: int,
        where: Where = NOWHERE,
        recorder: Recorder | None = None,
        others_idle: bool = False,
    ) -> NewPlacement | None:
        """What is due after `step` steps, and what has to be known for the step after. Collective. `where` as `parts` were made with.

        Returns a new placement with the state after `step` steps, or None: the present one stays, at least for this step. Raises `PeerError` where a rank is lost, `RunError` on all
        ranks where copies differ; `parts` are as they were in any case. `others_idle`: some ranks are not of the mapping and take no part here, so no group can be made.
        """
        if self.interval and rank.peers.rank == 0 and not self._is_warm:
            self._helper.start()
            self._is_warm = True
        way = _Way(where=where, recorder=recorder, beside=self.beside and not others_idle)
        if self._relocation is not None:
            (relocation, coming), self._relocation = self._relocation, None
            if coming.parts.state is parts.state and relocation.step + 1 == step and coming.is_updated:
                return self._finish(relocation, coming, parts, rank, where=where)
        found = self._prepare(parts, rank, way, step=step) if self.due(step) else None
        if found is None and self._relocation is None and self.due(step + 1):
            self._asked = self._ask(parts, rank, step=step + 1, ahead=True, beside=way.beside)
            if self._asked is not None and rank.peers.rank == 0:
                self._helper.begin(plan_replacement, self._asked.stages, self._asked.costs, **self._bounds)
        return found

    # -- alongside a step (`train/step_hook.py`)

    def reduced(self, parts: StepParts, step: ReducedStep) -> None:
        """What comes to this rank is there, gradients too. Collective. Raises `PeerError` where a rank is lost."""
        if self._relocation is not None:
            self._relocation[1].complete(step.gradients)

    def applied(self, parts: StepParts, step: ReducedStep) -> None:
        """What came is as new as what is held."""
        if self._relocation is not None:
            self._relocation[1].update(parts, step)
            if parts.state.sums is not None:
                parts.state.sums.forget()

    # -- a decision

    def _prepare(self, parts: StepParts, rank: Rank, way: _Way, *, step: int) -> NewPlacement | None:
        """Decide after `step` steps, and begin to carry it out. Collective."""
        asked, self._asked = self._asked, None
        if asked is None or asked.step != step or asked.parts is not parts:  # the same on all ranks
            asked = self._ask(parts, rank, step=step, ahead=False, beside=way.beside)
        if asked is None:
            return None
        self.moves.decided()
        stages, costs = asked.stages, asked.costs
        # By one rank for all: they stand still meanwhile, and on a machine of few processors they would make the same decision in turns.
        decision = rank.peers.first(lambda: self._helper.answer(plan_replacement, stages, costs, **self._bounds))
        if decision.action == "keep":
            return None
        if decision.action == "mend":  # even loads follow soon
            self.again = step + max(1, self.interval // SOON)
        before, migrations = dict(sorted(asked.before.items())), iter(decision.migrations)
        after = {stage: _after(placed, migrations) for stage, placed in before.items()}
        relocation = _Relocation(decision=decision, step=step, before=before, after=after)
        record = way.record(parts, relocation)
        begin_s = time.perf_counter()
        coming = self._start(relocation, parts, rank) if way.beside and relocation.can_overlap else None
        if coming is None:
            return self._carry_out(relocation, parts, rank, where=way.where, record=record)
        coming.begin(record)
        coming.waited_s = time.perf_counter() - begin_s
        self._relocation = relocation, coming
        return None

    @property
    def _bounds(self) -> dict[str, int]:
        return {"floor": self.floor, "interval": self.interval}

    def _ask(self, parts: StepParts, rank: Rank, *, step: int, ahead: bool, beside: bool) -> _Asked | None:
        """What to decide on after step `step`, from the loads of the steps before it; None where no rank has any. `ahead`: that step is still to come. `beside`: a move would go so, if the
        present placement lets it. Collective."""
        told, folding = rank.peers.gather(self._told(parts, beside)), _folding(parts)
        best = max(told, key=lambda t: t.seen)  # a rank that came later has seen less
        if best.loads is None:
            return None
        self.seen, self.loads, self.earlier = best.seen, best.loads, best.earlier
        loads = best.loads if ahead or best.earlier is None else best.earlier
        before = _by_stage(folding, [t.placement for t in told])
        stages = [_stage(before[i], loads, self.spec) for i in sorted(before) if before[i].layers]
        return _Asked(step=step, parts=parts, before=before, stages=stages, costs=self._costs(parts, told))

    def _told(self, parts: StepParts, beside: bool) -> _Told:
        placement = placement_in_use(parts)
        return _Told(
            seen=self.seen,
            loads=self.loads,
            earlier=self.earlier,
            row_s=seconds_of_a_row(parts),
            bytes_per_s=self.moves.bytes_per_s(beside=beside and not (placement.layers and placement.is_plain)),
            rebuild_s=self.moves.rebuild_s,
            placement=placement,
        )

    def _costs(self, parts: StepParts, told: Sequence[_Told]) -> Costs:
        """One figure for all: the middle rank's row, the slowest way, the longest rebuilding."""
        rows = sorted(t.row_s for t in told if t.row_s > 0)
        return Costs(
            row_s=rows[len(rows) // 2],
            bytes_per_s=min(t.bytes_per_s for t in told),
            rebuild_s=max(t.rebuild_s for t in told),
            expert_bytes=_expert_bytes(self.spec, parts),
        )

    def _start(self, relocation: _Relocation, parts: StepParts, rank: Rank) -> IncomingExperts | None:
        """None where nothing comes to any rank. Collective."""
        moves = _moves_of(relocation, parts)
        if not coming_moves(moves) or parts.groups.axis("world").group is None:
            return None
        ranks, world = tuple(range(parts.groups.folding.world)), parts.groups.axis("world")
        rank.peers.gather(None)  # each has planned by itself, and who makes a group waits for a few seconds only
        return IncomingExperts(
            parts, moves, Axis("beside", ranks, world.index, rank.cache.get(ranks, purpose="beside"))
        )

    def _finish(
        self, relocation: _Relocation, coming: IncomingExperts, parts: StepParts, rank: Rank, *, where: Where
    ) -> NewPlacement:
        """The state has arrived alongside the last step, and is as new as what is held. Collective."""
        begin_s = time.perf_counter()
        new = self._rebuilt(relocation, parts, rank, where)
        built_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        coming.fill(new.state, parts.state)
        checked = _take_over(new, parts, rank)
        moved_s = time.perf_counter() - begin_s + coming.waited_s
        most = max(rank.peers.gather(coming.beside_bytes))
        self.moves.took(rebuild_s=built_s, bytes_per_s=most / moved_s if most else None, beside=True)
        event = relocation.event(
            step=relocation.step + 1,
            moved_bytes=coming.received_bytes,
            built_s=built_s,
            moved_s=moved_s,
            checked=checked,
        )
        event = dataclasses.replace(event, beside_bytes=coming.beside_bytes, beside_s=coming.beside_s)
        return NewPlacement(parts=new, placements=relocation.placements, event=event)

    def _carry_out(
        self, relocation: _Relocation, parts: StepParts, rank: Rank, *, where: Where, record: MoveRecorder | None
    ) -> NewPlacement:
        """All of it while training stands still. Collective."""
        begin_s = time.perf_counter()
        new = self._rebuilt(relocation, parts, rank, where)
        built_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        received = _move_experts(new, parts, _moves_of(relocation, parts), record=record)
        checked = _take_over(new, parts, rank)
        moved_s = time.perf_counter() - begin_s
        most = max(rank.peers.gather(received))
        self.moves.took(rebuild_s=built_s, bytes_per_s=most / moved_s if most else None)
        event = relocation.event(
            step=relocation.step, moved_bytes=received, built_s=built_s, moved_s=moved_s, checked=checked
        )
        return NewPlacement(parts=new, placements=relocation.placements, event=event)

    def _rebuilt(self, relocation: _Relocation, parts: StepParts, rank: Rank, where: Where) -> StepParts:
        own = parts.groups.folding.coord(parts.groups.rank, "pp")
        return _rebuilt(parts, rank, self.spec, relocation.after[own], where=where)


# ---- what is known ---------------------------------------------------------------------------------------------------


def _most_of_mean(recipe: Recipe) -> float | None:
    """Rows that an expert takes at most, over those of the mean expert; None where nothing is dropped."""
    config = recipe.dispatch
    return config.capacity_factor if config.policy == "drop" else None


def _expert_bytes(spec: ModelSpec, parts: StepParts) -> int:
    """Bytes of the state of one expert of one layer on a rank."""
    names = _expert_names(spec)
    elements = sum(
        math.prod(p.shape[1:]) for p in parameters(spec) if p.name in names and p.layer == spec.moe_layers[0]
    )
    each = sum(map(parts.state.item_bytes, STATE_KINDS))
    return elements // parts.groups.folding.of_rank(parts.groups.rank).etp * each


def _stage(placed: LayerPlacements, loads: Floats, spec: ModelSpec) -> StageNow:
    layers, on_hosts = hosts_of_placement(placed)
    rows = [spec.moe_layers.index(layer) for layer in layers]
    slots = placed.layers[layers[0]].slots_per_rank
    return StageNow(layers=layers, placement=on_hosts, loads=loads[rows], slots_per_rank=slots)


def _by_stage(folding: Folding, told: Sequence[LayerPlacements]) -> dict[int, LayerPlacements]:
    """Of what each rank says of its stage."""
    return {folding.coord(rank, "pp"): placed for rank, placed in enumerate(told)}


def _after(placed: LayerPlacements, migrations: Iterator[Migration]) -> LayerPlacements:
    """The next migration, where the stage has experts."""
    if not placed.layers:
        return placed
    return placement_of_hosts(tuple(sorted(placed.layers)), next(migrations).new, placed)


# ---- what is done ----------------------------------------------------------------------------------------------------


def _rebuilt(parts: StepParts, rank: Rank, spec: ModelSpec, placement: LayerPlacements, *, where: Where) -> StepParts:
    """Modules, buffers and empty state for another placement, over the groups and counters that there are. Collective."""
    train = rank.recipe.train
    ctx = make_context(rank, spec, parts.groups.folding, parts.pipeline, placement)
    made = assemble(
        dataclasses.replace(ctx, groups=parts.groups, comms=parts.comms, drawn=False),
        optim=rank.recipe.optim,
        num_microbatches=num_rounds(train.global_batch // train.micro_batch, owners=parts.groups.folding.replicas),
        pipeline=parts.pipeline,
        samples=parts.samples,
        exact=parts.exact,
        holders=rank.recipe.resilience.shard_holders,
        hosts=where.hosts,
        racks=where.racks,
    )
    made.state.make_room()
    return made


def _moves_of(relocation: _Relocation, parts: StepParts) -> list[Move]:
    """Moves of one kind of state."""
    size = max(family.master.itemsize for family in parts.state.families.values())
    return expert_moves(
        parts.spec,
        _folding(parts),
        parts.pipeline.stages,
        before=relocation.before,
        after=relocation.after,
        itemsize=size,
    )


def _move_experts(new: StepParts, old: StepParts, moves: Sequence[Move], *, record: MoveRecorder | None) -> int:
    """Experts' state from where it is; the bytes that came. Collective."""
    resharder, received = Resharder(new.comms, new.groups.axis("world")), 0
    for kind in ShardedState.KINDS:
        have, want = (shard_views(state, kind) for state in (old.state, new.state))
        of_kind = [replace(move, itemsize=new.state.item_bytes(kind)) for move in moves]
        received += move_state(resharder, of_kind, have, want, op_id=f"{REPLACE_ID}/{kind}", record=record)
    return received


def _take_over(new: StepParts, old: StepParts, rank: Rank) -> int:
    """Fill the state of `new`, whose experts are there; the pieces whose checksums all agree on. Collective.

    Raises `RunError` on all ranks where somebody holds other bits than somebody else did.
    """
    for key, family in new.state.families.items():
        if family.layout.rule.family != "expert":
            for kind in ShardedState.KINDS:
                getattr(family, kind).copy_(getattr(old.state.families[key], kind))
    for name, tensor in new.state.buffers.items():
        tensor.copy_(old.state.buffers[name])
    new.state.restore(new.comms)
    new.comms.complete(rank.device)
    told = rank.peers.gather([_sums_of_experts(parts) for parts in (old, new)])
    return compare([sums for pair in told for sums in pair])


def _folding(parts: StepParts) -> Folding:
    """Stages with foldings of their own have no replicas."""
    assert isinstance(parts.groups.folding, Folding)
    return parts.groups.folding


def _expert_names(spec: ModelSpec) -> frozenset[str]:
    """Parameters whose first dim is the experts."""
    return frozenset(param.name for param in parameters(spec) if param.ep_dim == 0)


def _sums_of_experts(parts: StepParts) -> Mapping[Any, int]:
    """Checksums of what the rank holds of the experts, each by itself."""
    names = _expert_names(parts.spec)
    boxes = [held for held in parts.state.boxes() if held.name.split("/", 1)[1] in names]
    cut: dict[str, dict[Box, None]] = {name: {} for name in names}
    for held in boxes:
        (first, *rest), (many, *sizes) = held.box.offsets, held.box.sizes
        for expert in range(first, first + many):
            cut[held.name.split("/", 1)[1]][Box((expert, *rest), (1, *sizes))] = None
    return checksums(boxes, cut={name: list(found) for name, found in cut.items()})
