"""Everything that one rank does in one step, as an ordered list of operations with ids.

Decides the names by which a real run and a prediction are compared, id by id. Must never change: ids are unique within the step
of a rank, and an operation that a run records carries the id that stands here.

    mb3.L2.fwd.dispatch.rows     micro-batch 3 (its global number in the step), layer 2, forward, all-to-all of rows
    mb3.L2.bwd.dispatch.rows     the same exchange carrying gradients back
    mb3.L2.re.dispatch.rows      the same exchange again, where the layer is recomputed before its backward pass
    mb3.L2.count.dispatch.rows   the same in a pass that only counts (balance over a global batch of several micro-batches)
    mb3.L2.fwd.attention.ring.1  the first hop of keys over cp
    mb3.fwd.loss                 no layer: embedding, loss
    mb3.fwd.boundary1            from stage 1 to stage 2, on both ranks
    mb3.bwd.weights1             gradients of the matrices of stage 1, where the schedule defers them
    gradient/expert/edp          of the step: reduction of a gradient family over an axis; also `vote`, `publish/expert`, ...

Passes and transfers are in the order of the pipeline's plan (`plan/pipeline/comm.py`), transfers where they start. Reductions of gradients are listed
where they have ended at the latest, behind the last pass, and say with what they start. `layers.py` lowers a pass, `experts.py` routed experts by each way of overlap, `context.py` attention over cp,
`ops.py` holds the operations themselves, `work.py` says how much they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.core.hashed import Hashed
from phalanx.plan.layout import ExpertState, FlatLayout, flat_layouts, publication, stage_params
from phalanx.plan.mapping import AnyFolding, AnyPlacement, LayerPlacements, plain_placement
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import DispatchSpec
from phalanx.plan.pipeline import AHEAD, Pipeline, PipelinePlan, Run, Send, Transfer, plain_pipeline
from phalanx.plan.pipeline.boundary import EdgePlan
from phalanx.plan.pipeline.schedule import Action, Edge
from phalanx.plan.program.context import Context, CpMethod
from phalanx.plan.program.experts import Reach
from phalanx.plan.program.layers import Layers
from phalanx.plan.program.ops import At, Kind, Op, Phase, boundary_id, compute, exchange, gradient_id, op_id
from phalanx.plan.program.work import Counting, Sizes

__all__ = [
    "Kind",
    "Op",
    "Phase",
    "Sizes",
    "StepOptions",
    "StepProgram",
    "boundary_id",
    "gradient_id",
    "op_id",
    "step_program",
]


@dataclass(frozen=True, kw_only=True)
class StepProgram(Hashed):
    """The operations of `rank` in one step, in order."""

    rank: int
    ops: tuple[Op, ...]

    @cached_property
    def by_id(self) -> dict[str, Op]:
        return {op.id: op for op in self.ops}

    @property
    def collectives(self) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.kind == "collective")

    def check(self) -> None:
        """Raise `PlanError` with all problems: ids that occur twice, collectives without an axis, messages to nobody."""
        raise_if(_problems(self), PlanError, subject="program")

    def explain(self) -> str:
        """One line for each operation."""
        rows = [f"rank {self.rank}: {len(self.ops)} operations, {len(self.collectives)} of them collectives"]
        return "\n".join([*rows, *(f"  {op.lane:<8}{op.id:<40}{_way(op)}".rstrip() for op in self.ops)])


def _way(op: Op) -> str:
    """`exchange over cp, to 1, from 3`: positions on the axis."""
    if not op.axis:
        return ""
    ends = [f"{word} {place}" for word, place in (("to", op.sends_to), ("from", op.receives_from)) if place is not None]
    return ", ".join([f"{op.collective} over {op.axis}", *ends])


def _problems(program: StepProgram) -> list[Problem]:
    problems = []
    seen: set[str] = set()
    for op in program.ops:
        late = {*op.needs, *op.streams, *filter(None, [op.posted_after])} - seen
        if late:
            rule = f"waits for {min(late)}, which does not precede it"
            problems.append(Problem(where="program.ops", value=op.id, rule=rule))
        if op.id in seen:
            problems.append(Problem(where="program.ops", value=op.id, rule="an id occurs once in a step"))
        seen.add(op.id)
        if {bool(op.axis), bool(op.collective)} != {op.kind == "collective"}:
            rule = "a collective, and nothing else, has an axis and a kind"
            problems.append(Problem(where="program.ops", value=op.id, rule=rule))
        if (op.sends_to is not None or op.receives_from is not None) != (op.collective == "exchange"):
            rule = "an exchange, and nothing else, goes to single ranks or comes from them"
            problems.append(Problem(where="program.ops", value=op.id, rule=rule))
    return problems


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """How a step is run; the defaults are those of a run that says nothing."""

    num_microbatches: int = 1
    """Number of micro-batches on each data-parallel rank."""
    recompute: Literal["none", "selective", "full"] = "none"
    cp_method: CpMethod = "ring"
    zero: int = 1
    bucket_elements: int = 0
    """Elements of a gradient bucket; 0: a family is not divided."""
    pipeline: Pipeline | None = None
    """None: everything on one stage, or 1F1B over the pipeline ranks of the folding."""
    placement: AnyPlacement | None = None
    """Where the experts of the rank's stage are; None: plain."""
    expert_state: ExpertState = "whole"
    shard_holders: int = 1
    """Hosts that keep each shard of the optimizer state, each rank standing for one."""
    edges: Mapping[Edge, EdgePlan] | None = None
    """How activations cross between stages with foldings of their own (`plan/pipeline/boundary/stage_edges.py`); None: from rank to rank."""
    ahead: int = AHEAD
    """Passes before its place at which a receive is posted: 0 on devices."""
    sizes: Sizes | None = None
    """Sizes of a micro-batch: then every operation says how much it is (`work.py`). The ids need none."""


def step_program(
    folding: AnyFolding, spec: ModelSpec, dispatch: DispatchSpec, *, rank: int, options: StepOptions | None = None
) -> StepProgram:
    """The program of `rank` for one step; micro-batches are numbered over all data-parallel ranks.

    Raises `PlanError` for a rank that there is not, or a pipeline of another number of ranks.
    """
    options = options if options is not None else StepOptions()
    problems = []
    if not 0 <= rank < folding.world:
        hint = f"nearest legal: {min(max(rank, 0), folding.world - 1)}"
        problems.append(Problem(where="rank", value=rank, rule=f"is one of {folding.world}", hint=hint))
    if options.pipeline is not None and options.pipeline.pp != folding.pp:
        rule = f"is not the {options.pipeline.pp} ranks that the pipeline was planned for"
        problems.append(Problem(where="folding.pp", value=folding.pp, rule=rule))
    raise_if(problems, PlanError, subject="program")
    lowering = _lowering(folding, spec, dispatch, rank, options)
    ops = _reduced_early(_home(list(lowering.step())), lowering.completed_by)
    if options.sizes is not None:
        counting = lowering.counting(options.sizes)
        ops = (counting.counted(op) for op in ops)
    return StepProgram(rank=rank, ops=tuple(ops))


def _reduced_early(ops: Iterator[Op], completed_by: Callable[[str, Sequence[Op]], str]) -> Iterator[Op]:
    """A buffer's reduction starts over its first axis when the last of its gradients is there, beside what is left of the backward pass."""
    before: list[Op] = []
    started = set[str]()
    for op in ops:
        key = op.id.rsplit("/", 1)[0]
        if not op.id.startswith("gradient/"):
            before.append(op)
        elif key not in started:
            started.add(key)
            op = replace(op, posted_after=completed_by(key.removeprefix("gradient/"), before))
        yield op


def _home(ops: list[Op]) -> Iterator[Op]:
    """Gradients of keys come home while the last of attention is computed: what follows that waits for them."""
    coming = ""
    for before, op in zip([None, *ops], ops, strict=False):
        ends = before is not None and before.id.endswith("attention.core.home")
        yield replace(op, needs=(*op.needs, coming)) if ends else op
        coming = op.id if op.id.endswith("attention.ring.home") else coming


def _lowering(
    folding: AnyFolding, spec: ModelSpec, dispatch: DispatchSpec, rank: int, options: StepOptions
) -> _Lowering:
    pipeline = options.pipeline if options.pipeline is not None else plain_pipeline(spec, pp=folding.pp)
    table = next(g for g in folding.embedding_groups(pipeline.stages.table_ranks) if rank in g)
    reach = Reach(folding=folding, rank=rank, shares_table=table)
    layers = Layers(
        reach=reach,
        spec=spec,
        dispatch=dispatch,
        context=Context(method=options.cp_method, size=folding.of_rank(rank).cp, index=folding.coord(rank, "cp")),
        recompute=options.recompute,
        counts_first=_counts_first(spec, options.num_microbatches),
        slots=_slots(_placed(folding, spec, rank, options.placement)),
    )
    return _Lowering(reach, layers, spec, options, pipeline)


def _placed(folding: AnyFolding, spec: ModelSpec, rank: int, placement: AnyPlacement | None) -> AnyPlacement:
    """Where the experts of the rank's stage are."""
    return placement or plain_placement(max(1, spec.num_experts), folding.of_rank(rank))


def _slots(placement: AnyPlacement) -> int:
    """Slots of a rank: in all layers as many."""
    one = next(iter(placement.layers.values()), None) if isinstance(placement, LayerPlacements) else placement
    return 0 if one is None else one.slots_per_rank


def _counts_first(spec: ModelSpec, num_microbatches: int) -> bool:
    """Whether the balancing loss needs the counts of the whole step before its first forward pass."""
    balanced = bool(spec.router.aux_loss) and spec.router.aux_scope == "global_batch" and bool(spec.moe_layers)
    return balanced and num_microbatches > 1


@dataclass(frozen=True)
class _Lowering:
    """Turns one step into operations."""

    reach: Reach
    layers: Layers
    spec: ModelSpec
    options: StepOptions
    pipeline: Pipeline

    def step(self) -> Iterator[Op]:
        each = self.options.num_microbatches
        yield from self.reach.collective(op_id("valid_tokens"), "all_reduce", "dp_cp")
        if self.layers.counts_first:
            yield from self._passes(self.pipeline.forward_plan(each), "count")
            yield from self.reach.collective(op_id("balance_counts"), "all_reduce", "tp_dp_cp")
        yield from self._passes(self.pipeline.plan(each), "fwd")
        yield from self._reduce()
        yield Op(id="norm", kind="compute", lane="compute")
        yield from self.reach.collective("vote", "all_reduce", "world")
        yield Op(id="vote.outcome", kind="host", lane="host")
        yield Op(id="commit", kind="compute", lane="compute")
        yield from self._publish()

    @property
    def _pipeline_rank(self) -> int:
        return self.reach.folding.coord(self.reach.rank, "pp")

    def _passes(self, plan: PipelinePlan, phase: Phase) -> Iterator[Op]:
        """This rank's passes and transfers, whose forward passes are called `phase`."""
        for op in plan.posted(self._pipeline_rank, ahead=self.options.ahead):
            if isinstance(op, Run):
                yield from self._waiting(op, phase)
            else:
                yield from self._transfer(op.transfer, phase, sends=isinstance(op, Send))

    def _waiting(self, run: Run, phase: Phase) -> Iterator[Op]:
        """A pass, whose first operation waits for what other ranks send it."""
        needed = tuple(
            boundary_id(transfer, microbatch=self._number(transfer.microbatch), phase=phase)
            for transfer in run.takes
            if not transfer.is_local and self._peers(transfer, sends=False)
        )
        for i, op in enumerate(self._pass(run.action, phase)):
            yield op if i else replace(op, needs=op.needs + needed)

    def _pass(self, action: Action, phase: Phase) -> Iterator[Op]:
        stage, mb = self.pipeline.stages.stages[action.stage], self._number(action.microbatch)
        if action.kind == "F":
            yield from self.layers.forward(stage, mb, phase)
        elif action.kind == "W":
            yield compute(f"weights{action.stage}", At(mb, None, "bwd"))
        else:
            yield from self.layers.backward(stage, mb)

    def _transfer(self, transfer: Transfer, phase: Phase, *, sends: bool) -> Iterator[Op]:
        """One exchange, with every rank of the other stage that this one sends to or hears from; none where others do it all."""
        at = At(self._number(transfer.microbatch), None, phase if transfer.direction == "forward" else "bwd")
        id = boundary_id(transfer, microbatch=at.microbatch, phase=phase)
        peers = self._peers(transfer, sends=sends)
        if peers:
            op = exchange(id, "pp", at, **{"to" if sends else "source": peers[0]})
            yield replace(op, peers=peers, beside=True, sent_bytes=self._crossing(transfer) if sends else 0.0)

    def _crossing(self, transfer: Transfer) -> float:
        """Bytes that the rank sends by the plan of an edge between stages with foldings of their own."""
        if self.options.edges is None or self.options.sizes is None:
            return 0.0
        route = self.options.edges[transfer.edge].routes(transfer.direction)[self.reach.rank]
        elements = sum(box.num_elements for leg in route.sends for box in leg.parts)
        return float(elements * self.options.sizes.itemsize)

    def _peers(self, transfer: Transfer, *, sends: bool) -> tuple[int, ...]:
        """Positions on the axis `pp` of those at the other end."""
        if self.options.edges is None:
            return (transfer.dst_rank if sends else transfer.src_rank,)
        route = self.options.edges[transfer.edge].routes(transfer.direction)[self.reach.rank]
        ranks = self.reach.folding.group_of(self.reach.rank, "pp")
        return tuple(ranks.index(leg.peer) for leg in (route.sends if sends else route.receives))

    def _number(self, microbatch: int) -> int:
        """Number of a micro-batch of this rank, in the step."""
        return self.reach.folding.replica_of(self.reach.rank) * self.options.num_microbatches + microbatch

    # ---- the end of the step ---------------------------------------------------------------------------------------------

    @cached_property
    def _layouts(self) -> dict[str, FlatLayout]:
        """Flat layouts of the rank, by name."""
        folding, rank = self.reach.folding, self.reach.rank
        return flat_layouts(
            stage_params(self.spec, self.pipeline.stages.of_rank(self._pipeline_rank)),
            folding,
            _placed(folding, self.spec, rank, self.options.placement),
            rank,
            zero=self.options.zero,
            bucket_elements=self.options.bucket_elements,
            expert_state=self.options.expert_state,
            holders=self.options.shard_holders,
        )

    def completed_by(self, key: str, ops: Sequence[Op]) -> str:
        """The operation of the passes with which the gradients of a buffer are complete: of experts their products in the layer that comes last; of what
        only layers have, the end of the last layer; of all else the end of the passes, where weight gradients may be put off till then."""
        params = [held.param for held in self._layouts[key].params]
        layers = {param.layer for param in params}
        held = [op for op in reversed(ops) if not op.beside]
        if self.pipeline.splits_backward or None in layers:
            return held[0].id
        name = "experts" if all(param.family == "expert" for param in params) else ""
        of_them = (op for op in held if op.phase == "bwd" and op.layer in layers and op.kind == "compute")
        return next((op.id for op in of_them if name in op.id), held[0].id)

    def counting(self, sizes: Sizes) -> Counting:
        """What says how much the operations are."""
        stages = self.pipeline.stages.stages
        return Counting(
            folding=self.reach.folding,
            spec=self.spec,
            dispatch=self.layers.dispatch,
            rank=self.reach.rank,
            sizes=sizes,
            layouts=self._layouts,
            splits_backward=self.pipeline.splits_backward,
            layers_of_stage={
                number: (*stage.layers, *((None, *self.spec.mtp_blocks) if stage.has_head else ()))
                for number, stage in enumerate(stages)
            },
        )

    def _reduce(self) -> Iterator[Op]:
        for key, layout in self._layouts.items():
            rule = layout.rule
            if layout.holders is not None and layout.holders.travels:
                yield from self.reach.collective(gradient_id(key, "holders"), "all_to_all_rows", "ep")
                if layout.scattered is None:
                    yield from self.reach.collective(gradient_id(key, "back"), "all_to_all_rows", "ep")
            for axis in rule.sum_over:
                shards = self.options.zero and axis == rule.shard_over and axis == rule.sum_over[-1]
                collective = "reduce_scatter" if shards else "all_reduce"
                yield from self.reach.collective(gradient_id(key, axis), collective, axis)

    def _publish(self) -> Iterator[Op]:
        for key, layout in self._layouts.items():
            if layout.scattered is not None and layout.scattered.travels:
                yield from self.reach.collective(f"publish/{key}", "all_to_all_rows", "ep")
            elif layout.holders is None and self.options.zero:
                parcels = publication(layout.keepers, layout.shard_index)
                if parcels is None:
                    yield from self.reach.collective(f"publish/{key}", "all_gather", layout.rule.shard_over)
                elif parcels.sends or parcels.receives:  # else all have rounded them themselves
                    yield from self.reach.collective(f"publish/{key}", "all_to_all_rows", layout.rule.shard_over)
