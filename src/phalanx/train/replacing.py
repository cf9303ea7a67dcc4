"""Experts with replicas that move while training runs: loads are watched, and between two steps `plan/replacement.py` decides.

    committed   the counts of a step go into the average of loads; the same numbers on all ranks
    between     a step before it is due: gather what was measured ─ the first rank has the decision made beside the next step (`runtime/aside.py`)
    prepare     due? ─ that decision (made now where there is none for this placement) ─ modules and buffers for the new placement ─ dense state copied, experts' state moved ─ checksums
    adopt       the prepared parts take the place of the old ones

Decides nothing. Must never change: until `adopt` what the trainer has stays as it is, so that whoever is lost before costs another attempt and nothing else; a decision rests on the loads of
the step before the last, whenever it is made; all ranks call `between` after the same steps, and those who adopt do it for the same step (a run that heals itself: with the commit of that step).

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from phalanx.core.config import Recipe
from phalanx.core.events import ExpertsMoved
from phalanx.core.samples import num_rounds
from phalanx.kernels.grouped import expert_ffn
from phalanx.models.moe import MoE
from phalanx.plan.folding import Folding
from phalanx.plan.layout import Box
from phalanx.plan.migration import Migration
from phalanx.plan.model import ModelSpec, parameters
from phalanx.plan.move_order import REPLACE_ID, expert_moves, expert_order
from phalanx.plan.placement import LayerPlacements, Placement
from phalanx.plan.replacement import (
    Costs,
    Replacement,
    StageNow,
    hosts_of_placement,
    placement_of_hosts,
    plan_replacement,
    smoothed_loads,
)
from phalanx.plan.replicas import Floats
from phalanx.plan.state_layout import STATE_KINDS
from phalanx.runtime.aside import Aside
from phalanx.runtime.devices import synchronize
from phalanx.runtime.optimizer_state import ShardedState
from phalanx.runtime.resharder import Resharder
from phalanx.runtime.shard_views import shard_views
from phalanx.train.assemble import assemble
from phalanx.train.heal_state import checksums, compare, move_state
from phalanx.train.recording import MoveRecorder, Recorder
from phalanx.train.setup import Rank, make_context
from phalanx.train.step import StepParts

BYTES_PER_S = 1e9
"""Of a move, until one was measured."""
LAST = 5
"""Moves whose figures are kept."""
MEMORY = 10
"""Decisions for which they are."""
SOON = 10
"""A decision follows a change of members after this part of the interval."""
TIMED_ROWS = 128
TRIES = 3


@dataclass(frozen=True)
class Where:
    """Of all ranks of the mapping, for copies of shards: `hosts` (None: each stands for one) and `racks` (empty: not known)."""

    hosts: Sequence[int] | None = None
    racks: Sequence[int] = ()


NOWHERE = Where()


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A new placement, filled with the state after `step` steps and not in use yet."""

    parts: StepParts
    placements: tuple[LayerPlacements, ...]
    """Of each pipeline stage."""
    event: ExpertsMoved


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
    """Of its stage."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Asked:
    """What a decision rests on, the same on all ranks."""

    step: int
    """It follows this one."""
    parts: StepParts
    """As long as these are in use: their placement, on their members."""
    before: Mapping[int, LayerPlacements]
    """By stage."""
    stages: list[StageNow]
    costs: Costs


class PastMoves:
    """What moves have taken on this rank. A busy moment is no property of the machine: the quickest of the last few counts, and each of them for some decisions only,
    so that one slow move cannot keep experts where they are for good. A machine whose moves are all slow pays for one that is not worth it in `MEMORY` decisions."""

    def __init__(self) -> None:
        self._moves: list[_Past] = []
        """The oldest first."""
        self._decisions = 0

    def decided(self) -> None:
        """A decision is being made."""
        self._decisions += 1
        self._moves = [m for m in self._moves[-LAST:] if self._decisions - m.at < MEMORY]

    def took(self, *, rebuild_s: float, bytes_per_s: float | None) -> None:
        """A move is done; None: nothing came to any rank in it."""
        self._moves = [*self._moves, _Past(at=self._decisions, rebuild_s=rebuild_s, bytes_per_s=bytes_per_s)][-LAST:]

    @property
    def rebuild_s(self) -> float:
        """To build modules and buffers; 0 where nothing is known."""
        return min((m.rebuild_s for m in self._moves), default=0.0)

    @property
    def bytes_per_s(self) -> float:
        """Of state."""
        return max((m.bytes_per_s for m in self._moves if m.bytes_per_s is not None), default=BYTES_PER_S)


@dataclass(frozen=True, kw_only=True)
class _Past:
    at: int
    rebuild_s: float
    bytes_per_s: float | None


class Replacing:
    """One rank's side of it, for a whole run: it outlives the parts of a step."""

    def __init__(self, recipe: Recipe, spec: ModelSpec) -> None:
        config = recipe.resilience
        self.interval = config.steps_between_placements() if spec.moe_layers else 0
        self.floor, self.spec, self.limit = config.f, spec, _most_of_mean(recipe)
        self.seen = 0
        """Steps in `loads`."""
        self.loads: Floats | None = None
        self.earlier: Floats | None = None
        """`loads` without the last step."""
        self.again = 0
        """A further step after which to decide."""
        self.moves = PastMoves()
        self._asked: _Asked | None = None
        self._is_warm = False
        """Whether the process beside was started in this generation."""
        self._aside = Aside(["phalanx.plan.replacement", "scipy.optimize"])

    def committed(self, counts_LE: NDArray[np.int64]) -> None:
        """Tokens that chose each expert in a committed step, before dropping."""
        if not self.interval:
            return
        counts = np.asarray(counts_LE, dtype=np.float64)
        if self.limit is not None:  # rows that are dropped are no work
            counts = np.minimum(counts, self.limit * counts.mean(1, keepdims=True))
        self.earlier, self.loads = self.loads, smoothed_loads(self.loads, counts, interval=self.interval)
        self.seen += 1

    def formed(self, step: int) -> None:
        """Members were lost or came after `step` steps, and experts lie as was quickest: balance follows soon, when training goes on again."""
        self.again = step + max(1, self.interval // SOON) if step else 0
        self._asked, self._is_warm = None, False
        self._aside.drop()

    def due(self, step: int) -> bool:
        """Whether a decision follows step `step`: the same on all ranks."""
        return bool(self.interval) and step > 0 and (step % self.interval == 0 or step == self.again)

    def between(
        self, parts: StepParts, rank: Rank, *, step: int, where: Where = NOWHERE, recorder: Recorder | None = None
    ) -> Prepared | None:
        """What is due after `step` steps, and what has to be known for the step after. Collective. Returns and raises as `prepare`."""
        if self.interval and rank.peers.rank == 0 and not self._is_warm:
            self._aside.start()
            self._is_warm = True
        found = self.prepare(parts, rank, step=step, where=where, recorder=recorder) if self.due(step) else None
        if found is None and self.due(step + 1):
            self._asked = self._ask(parts, rank, step=step + 1, ahead=True)
            if self._asked is not None and rank.peers.rank == 0:
                self._aside.begin(plan_replacement, self._asked.stages, self._asked.costs, **self._bounds)
        return found

    def prepare(
        self, parts: StepParts, rank: Rank, *, step: int, where: Where = NOWHERE, recorder: Recorder | None = None
    ) -> Prepared | None:
        """A new placement with the state after `step` steps, or None: the present one stays. Collective. `where` as `parts` were made with.

        Raises `PeerError` where a rank is lost, `RunError` on all ranks where copies differ; `parts` are as they were in any case.
        """
        asked, self._asked = self._asked, None
        if asked is None or asked.step != step or asked.parts is not parts:  # the same on all ranks
            asked = self._ask(parts, rank, step=step, ahead=False)
        if asked is None:
            return None
        self.moves.decided()
        stages, costs = asked.stages, asked.costs
        # By one rank for all: they stand still meanwhile, and on a machine of few processors they would make the same decision in turns.
        decision = rank.peers.first(lambda: self._aside.answer(plan_replacement, stages, costs, **self._bounds))
        if decision.action == "keep":
            return None
        before = dict(sorted(asked.before.items()))
        return self._carry_out(decision, before, parts, rank, step=step, where=where, recorder=recorder)

    @property
    def _bounds(self) -> dict[str, int]:
        return {"floor": self.floor, "interval": self.interval}

    def _ask(self, parts: StepParts, rank: Rank, *, step: int, ahead: bool) -> _Asked | None:
        """What to decide on after step `step`, from the loads of the steps before it; None where nobody has any. `ahead`: that step is still to come. Collective."""
        told, folding = rank.peers.gather(self._told(parts)), _folding(parts)
        best = max(told, key=lambda t: t.seen)  # a rank that came later has seen less
        if best.loads is None:
            return None
        self.seen, self.loads, self.earlier = best.seen, best.loads, best.earlier
        loads = best.loads if ahead or best.earlier is None else best.earlier
        before = {folding.coord(r, "pp"): told[r].placement for r in range(folding.world)}
        stages = [_stage(before[i], loads, self.spec) for i in sorted(before) if before[i].layers]
        return _Asked(step=step, parts=parts, before=before, stages=stages, costs=self._costs(parts, told))

    def _told(self, parts: StepParts) -> _Told:
        return _Told(
            seen=self.seen,
            loads=self.loads,
            earlier=self.earlier,
            row_s=seconds_of_a_row(parts),
            bytes_per_s=self.moves.bytes_per_s,
            rebuild_s=self.moves.rebuild_s,
            placement=placement_in_use(parts),
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

    def _carry_out(
        self,
        decision: Replacement,
        before: Mapping[int, LayerPlacements],
        parts: StepParts,
        rank: Rank,
        *,
        step: int,
        where: Where,
        recorder: Recorder | None,
    ) -> Prepared:
        begin_s = time.perf_counter()
        migrations = iter(decision.migrations)
        after = {stage: _after(placed, migrations) for stage, placed in before.items()}
        own = parts.groups.folding.coord(parts.groups.rank, "pp")
        new = _rebuilt(parts, rank, self.spec, after[own], where=where)
        built_s = time.perf_counter() - begin_s
        begin_s = time.perf_counter()
        record = (
            None if recorder is None else recorder.moves(step, lambda: expert_order(_folding(parts), before, after))
        )
        received, checked = _take_over(new, parts, rank, before, after, record=record)
        moved_s = time.perf_counter() - begin_s
        most = max(rank.peers.gather(received))
        self.moves.took(rebuild_s=built_s, bytes_per_s=most / moved_s if most else None)
        event = ExpertsMoved(
            step=step,
            why=decision.action,
            experts=decision.num_copies,
            moved_bytes=received,
            built_s=built_s,
            moved_s=moved_s,
            checked=checked,
            before=decision.before,
            after=decision.after,
            gain_s=decision.gain_s,
            cost_s=decision.cost_s,
        )
        return Prepared(parts=new, placements=tuple(after[stage] for stage in sorted(after)), event=event)


# ---- what is known ---------------------------------------------------------------------------------------------------


def _most_of_mean(recipe: Recipe) -> float | None:
    """Rows that an expert takes at most, over those of the mean expert; None where nothing is dropped."""
    config = recipe.dispatch
    return config.capacity_factor if config.policy == "drop" else None


def _expert_bytes(spec: ModelSpec, parts: StepParts) -> int:
    """Of the state of one expert of one layer on a rank."""
    names = _expert_names(spec)
    elements = sum(
        math.prod(p.shape[1:]) for p in parameters(spec) if p.name in names and p.layer == spec.moe_layers[0]
    )
    each = max(family.master.itemsize for family in parts.state.families.values())
    return elements // parts.groups.folding.of_rank(parts.groups.rank).etp * each * len(STATE_KINDS)


def placement_in_use(parts: StepParts) -> LayerPlacements:
    """The placement of the rank's stage, as its dispatchers have it."""
    found = {}
    for module in parts.model.modules():
        if isinstance(module, MoE):
            d = module.routed.dispatcher
            width = len(d.slots_G) // d.ep.size
            slots = tuple(d.slots_G[i * width : (i + 1) * width] for i in range(d.ep.size))
            found[module.layer] = Placement(
                num_experts=d.num_experts, slots=(slots,), hosts=tuple(d.host_of_ep), racks=tuple(d.rack_of_ep)
            )
    return LayerPlacements(layers=dict(sorted(found.items())))


def seconds_of_a_row(parts: StepParts) -> float:
    """Forward and backward pass of one row of an expert on this rank, the quickest of a few tries; 0 where it holds no expert."""
    module = next((m for m in parts.model.modules() if isinstance(m, MoE)), None)
    if module is None:
        return 0.0
    w13, w2 = (w[:1].detach().clone().requires_grad_() for w in (module.experts.w13, module.experts.w2))
    x = torch.full((TIMED_ROWS, w13.shape[-1]), 0.01, dtype=w13.dtype, device=w13.device, requires_grad=True)
    best = math.inf
    for _ in range(TRIES):
        begin_s = _now(x.device)
        with torch.enable_grad():
            y = expert_ffn(x, w13, w2, (TIMED_ROWS,), impl=parts.kernels, lanes=parts.lanes)
            torch.autograd.grad(y, (x, w13, w2), torch.ones_like(y))
        best = min(best, _now(x.device) - begin_s)
    return best / TIMED_ROWS


def _now(device: torch.device) -> float:
    synchronize(device)  # SYNC: between steps, once for each try
    return time.perf_counter()


def _stage(placed: LayerPlacements, loads: Floats, spec: ModelSpec) -> StageNow:
    layers, on_hosts = hosts_of_placement(placed)
    rows = [spec.moe_layers.index(layer) for layer in layers]
    slots = placed.layers[layers[0]].slots_per_rank
    return StageNow(layers=layers, placement=on_hosts, loads=loads[rows], slots_per_rank=slots)


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
    return assemble(
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


def _take_over(
    new: StepParts,
    old: StepParts,
    rank: Rank,
    before: Mapping[int, LayerPlacements],
    after: Mapping[int, LayerPlacements],
    *,
    record: MoveRecorder | None,
) -> tuple[int, int]:
    """Fill the state of `new`; (bytes that came, pieces whose checksums all agree on). Collective.

    Raises `RunError` on all ranks where somebody holds other bits than somebody else did.
    """
    families = new.state.families
    for key, family in families.items():
        if family.layout.rule.family != "expert":
            for kind in ShardedState.KINDS:
                getattr(family, kind).copy_(getattr(old.state.families[key], kind))
    for name, tensor in new.state.buffers.items():
        tensor.copy_(old.state.buffers[name])
    size = max(family.master.itemsize for family in families.values())
    stages = new.pipeline.stages
    moves = expert_moves(new.spec, _folding(new), stages, before=before, after=after, itemsize=size)
    resharder, received = Resharder(new.comms, new.groups.axis("world")), 0
    for kind in ShardedState.KINDS:
        have, want = (shard_views(state, kind) for state in (old.state, new.state))
        received += move_state(resharder, moves, have, want, op_id=f"{REPLACE_ID}/{kind}", record=record)
    new.state.restore(new.comms)
    new.comms.complete(rank.device)
    told = rank.peers.gather([_sums_of_experts(parts) for parts in (old, new)])
    return received, compare([sums for pair in told for sums in pair])


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
