"""Everything that one rank does in one step, as an ordered list of operations with ids.

Decides the names by which a real run and a prediction are compared, id by id. Must never change: ids are unique within the step
of a rank, and an operation that a run records carries the id that stands here (`runtime/` and `models/` build theirs with `op_id`).

    mb3.L2.fwd.dispatch.rows     micro-batch 3 (its global number in the step), layer 2, forward, all-to-all of rows
    mb3.L2.bwd.dispatch.rows     the same exchange carrying gradients back
    mb3.L2.re.dispatch.rows      the same exchange again, where the layer is recomputed before its backward pass
    mb3.L2.count.dispatch.rows   the same in a pass that only counts (balance over a global batch of several micro-batches)
    mb3.fwd.loss                 no layer: embedding, loss
    gradient/expert/edp          of the step: reduction of a gradient family over an axis; also `vote`, `publish/expert`, ...

This is the order of a program without overlap; `plan/overlap.py` and `plan/schedule.py` will reorder and divide it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Literal

from phalanx.core.errors import PlanError, Problem, raise_if
from phalanx.plan.dispatch import DispatchSpec
from phalanx.plan.folding import Folding, GradientRule
from phalanx.plan.layout import flat_layouts
from phalanx.plan.model import ModelSpec, parameters
from phalanx.plan.placement import plain_placement

Phase = Literal["fwd", "bwd", "re", "count", "eval"]
Kind = Literal["compute", "collective", "host"]


def op_id(name: str, *, microbatch: int | None = None, layer: int | None = None, phase: Phase | None = None) -> str:
    """Id of an operation: `mb{microbatch}.L{layer}.{phase}.{name}`, parts that are None left out."""
    parts = (
        None if microbatch is None else f"mb{microbatch}",
        None if layer is None else f"L{layer}",
        phase,
        name,
    )
    return ".".join(part for part in parts if part is not None)


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operation of one rank. A collective names its axis (a key of `folding.GROUP_AXES`) and its kind in `collective`."""

    id: str
    kind: Kind
    lane: Literal["compute", "comm", "host"]
    microbatch: int | None = None
    layer: int | None = None
    phase: Phase | None = None
    axis: str = ""
    collective: str = ""


@dataclass(frozen=True, kw_only=True)
class StepProgram:
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
        """Raise `PlanError` with all problems: ids that occur twice, collectives without an axis."""
        raise_if(_problems(self), PlanError, subject="program")

    def to_json(self) -> str:
        return json.dumps({"rank": self.rank, "ops": [asdict(op) for op in self.ops]}, sort_keys=True)

    @property
    def hash(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def explain(self) -> str:
        """One line for each operation."""
        rows = [f"rank {self.rank}: {len(self.ops)} operations, {len(self.collectives)} of them collectives"]
        for op in self.ops:
            rows.append(f"  {op.lane:<8}{op.id:<40}{f'{op.collective} over {op.axis}' if op.axis else ''}".rstrip())
        return "\n".join(rows)


def _problems(program: StepProgram) -> list[Problem]:
    problems = []
    seen: set[str] = set()
    for op in program.ops:
        if op.id in seen:
            problems.append(Problem(where="program.ops", value=op.id, rule="an id occurs once in a step"))
        seen.add(op.id)
        if {bool(op.axis), bool(op.collective)} != {op.kind == "collective"}:
            rule = "a collective, and nothing else, has an axis and a kind"
            problems.append(Problem(where="program.ops", value=op.id, rule=rule))
    return problems


def step_program(
    folding: Folding,
    spec: ModelSpec,
    dispatch: DispatchSpec,
    *,
    rank: int,
    num_microbatches: int,
    recompute: Literal["none", "selective", "full"] = "none",
    zero: int = 1,
    bucket_elements: int = 0,
) -> StepProgram:
    """The program of `rank` for a step of `num_microbatches` micro-batches on each data-parallel rank (numbered over all ranks).

    Raises `PlanError` for cp or pp above 1, whose layers are not lowered yet.
    """
    later = [axis for axis in ("cp", "pp") if folding.degree(axis) > 1]
    problems = [
        Problem(
            where=f"folding.{axis}", value=folding.degree(axis), rule="is not lowered to a program yet", hint="use 1"
        )
        for axis in later
    ]
    raise_if(problems, PlanError, subject="program")
    lower = _Lowering(
        folding,
        spec,
        dispatch,
        rank=rank,
        num_microbatches=num_microbatches,
        recompute=recompute,
        zero=zero,
        bucket_elements=bucket_elements,
    )
    first = folding.coord(rank, "dp") * num_microbatches
    return StepProgram(rank=rank, ops=tuple(lower.step(range(first, first + num_microbatches))))


@dataclass(frozen=True)
class _Lowering:
    """Turns one step into operations. Groups of one rank communicate nothing, so their collectives do not exist."""

    folding: Folding
    spec: ModelSpec
    dispatch: DispatchSpec
    num_microbatches: int
    rank: int
    recompute: str
    zero: int
    bucket_elements: int

    def size(self, axis: str) -> int:
        return len(self.folding.group_of(0, axis))

    def step(self, microbatches: range) -> Iterator[Op]:
        yield from self._collective(op_id("valid_tokens"), "all_reduce", "dp_cp")
        if self._counts_first():
            for mb in microbatches:
                yield from self._forward(mb, "count")
            yield from self._collective(op_id("balance_counts"), "all_reduce", "tp_dp_cp")
        for mb in microbatches:
            yield from self._forward(mb, "fwd")
            yield from self._loss(mb, "fwd")
            yield from _mirrored(self._loss(mb, "bwd"))
            yield from self._backward(mb)
        yield from self._reduce()
        yield Op(id="norm", kind="compute", lane="compute")
        yield from self._collective("vote", "all_reduce", "world")
        yield Op(id="vote.outcome", kind="host", lane="host")
        yield Op(id="commit", kind="compute", lane="compute")
        yield from self._publish()

    def _counts_first(self) -> bool:
        """Whether the balancing loss needs the counts of the whole step before its first forward pass."""
        router = self.spec.router
        balanced = bool(router.aux_loss) and router.aux_scope == "global_batch" and bool(self.spec.moe_layers)
        return balanced and self.num_microbatches > 1

    # ---- one micro-batch -------------------------------------------------------------------------------------------------

    def _forward(self, mb: int, phase: Phase) -> Iterator[Op]:
        yield from self._embedding(mb, None, phase)
        for layer in self._blocks():
            if layer in self.spec.mtp_blocks:
                yield from self._embedding(mb, layer, phase)
            yield from self._layer(mb, layer, phase)

    def _blocks(self) -> range:
        return range(self.spec.num_layers + self.spec.mtp_layers)

    def _embedding(self, mb: int, layer: int | None, phase: Phase) -> Iterator[Op]:
        yield _compute("embedding", mb, layer, phase)
        yield from self._layer_collective("embedding.scatter", "reduce_scatter_rows", "tp", (mb, layer, phase))

    def _loss(self, mb: int, phase: Phase) -> Iterator[Op]:
        """With a vocabulary that is split over tp, each group of chunks exchanges three numbers a token; here: one group."""
        for layer in (None, *self.spec.mtp_blocks):
            yield from self._layer_collective("loss.gather", "all_gather_rows", "tp", (mb, layer, phase))
            yield from self._layer_collective("loss.shares", "all_gather", "tp", (mb, layer, phase))
            yield _compute("loss", mb, layer, phase)

    def _backward(self, mb: int) -> Iterator[Op]:
        for layer in reversed(self._blocks()):
            forward = list(self._layer(mb, layer, "bwd"))
            if self.recompute == "full":
                kept = self._not_run_again(forward)
                yield from _mirrored(forward[len(forward) - kept :])
                forward = forward[: len(forward) - kept]
                yield from list(self._layer(mb, layer, "re"))[: len(forward)]
            yield from _mirrored(forward)
            if layer in self.spec.mtp_blocks:
                yield from _mirrored(self._embedding(mb, layer, "bwd"))
        yield from _mirrored(self._embedding(mb, None, "bwd"))

    def _not_run_again(self, layer: Sequence[Op]) -> int:
        """Operations at the end of a recomputed layer whose gradient needs nothing that was kept: it is taken before the layer is run again,
        and the second run ends before them."""
        last = layer[-1].id
        return int(last.endswith(".mlp.scatter") or (last.endswith(".shared.scatter") and not self.spec.shared_gate))

    def _layer(self, mb: int, layer: int, phase: Phase) -> Iterator[Op]:
        """One layer in forward order, its ids of `phase`."""
        yield from self._attention(mb, layer, phase)
        if layer not in self.spec.moe_layers:
            yield from self._split_by_tp("mlp", mb, layer, phase)
            return
        yield _compute("router", mb, layer, phase)
        yield from self._balance(mb, layer, phase)
        yield from self._dispatch(mb, layer, phase)
        yield _compute("experts", mb, layer, phase)
        yield from self._combine(mb, layer, phase)
        if self.spec.shared_ffn:
            yield from self._split_by_tp("shared", mb, layer, phase)

    def _attention(self, mb: int, layer: int, phase: Phase) -> Iterator[Op]:
        at = (mb, layer, phase)
        yield from self._layer_collective("attention.gather", "all_gather_rows", "tp", at)
        if self.spec.qk_norm == "hidden":
            yield from self._layer_collective("attention.q_norm", "all_reduce", "tp", at)
            yield from self._layer_collective("attention.k_norm", "all_reduce", "tp", at)
        if self.spec.mla is None and self.folding.tp > self.spec.num_kv_heads:
            yield from self._layer_collective("attention.kv", "all_to_all_rows", "tp", at)
        yield _compute("attention", *at)
        yield from self._layer_collective("attention.scatter", "reduce_scatter_rows", "tp", at)

    def _split_by_tp(self, name: str, mb: int, layer: int, phase: Phase) -> Iterator[Op]:
        """Rows are gathered, each rank computes its width, partial sums are scattered."""
        at = (mb, layer, phase)
        yield from self._layer_collective(f"{name}.gather", "all_gather_rows", "tp", at)
        yield _compute(name, *at)
        yield from self._layer_collective(f"{name}.scatter", "reduce_scatter_rows", "tp", at)

    def _balance(self, mb: int, layer: int, phase: Phase) -> Iterator[Op]:
        """Counts for the balancing loss, summed over the tokens that it is about."""
        router = self.spec.router
        if not router.aux_loss or phase == "count":
            return
        if router.aux_scope != "global_batch":
            yield from self._layer_collective("router.balance", "all_reduce", "tp_cp", (mb, layer, phase))
        elif not self._counts_first():
            yield from self._layer_collective("router.balance", "all_reduce", "tp_dp_cp", (mb, layer, phase))

    def _dispatch(self, mb: int, layer: int, phase: Phase) -> Iterator[Op]:
        at, spec = (mb, layer, phase), self.dispatch
        if spec.policy == "drop" and spec.drop_scope == "full_sequence":
            yield from self._layer_collective("dispatch.full_experts", "all_gather", "tp_cp", at)
            yield from self._layer_collective("dispatch.full_weights", "all_gather", "tp_cp", at)
        if not spec.is_static:
            yield from self._layer_collective("dispatch.counts", "all_gather", "ep_etp", at)
            yield Op(
                id=op_id("dispatch.sizes", microbatch=mb, layer=layer, phase=phase),
                kind="host",
                lane="host",
                microbatch=mb,
                layer=layer,
                phase=phase,
            )
        if spec.transport == "all_gather" and self.size("ep_etp") > 1:
            for name in ("rows", "weights", "pairs"):
                yield from self._layer_collective(f"dispatch.{name}", "all_gather_rows", "ep_etp", at)
            yield _compute("dispatch.permute", *at)
            return
        yield _compute("dispatch.permute", *at)
        for name in ("rows", "weights"):
            yield from self._layer_collective(f"dispatch.{name}", "all_to_all_rows", "ep", at)
            yield from self._layer_collective(f"dispatch.{name}_etp", "all_gather_rows", "etp", at)
        yield _compute("dispatch.sort", *at)

    def _combine(self, mb: int, layer: int, phase: Phase) -> Iterator[Op]:
        at = (mb, layer, phase)
        if self.dispatch.transport == "all_gather" and self.size("ep_etp") > 1:
            yield _compute("combine.sum", *at)
            yield from self._layer_collective("combine.rows", "reduce_scatter_rows", "ep_etp", at)
            return
        yield _compute("combine.sort", *at)
        yield from self._layer_collective("combine.rows_etp", "reduce_scatter_rows", "etp", at)
        yield from self._layer_collective("combine.rows", "all_to_all_rows", "ep", at)
        yield _compute("combine.sum", *at)

    # ---- the end of the step ---------------------------------------------------------------------------------------------

    def _keys(self) -> Iterator[tuple[str, GradientRule]]:
        """Flat layouts of the rank, by name, with the rule of each."""
        placement = plain_placement(max(1, self.spec.num_experts), self.folding)
        layouts = flat_layouts(
            parameters(self.spec), self.folding, placement, self.rank, bucket_elements=self.bucket_elements
        )
        yield from ((key, layout.rule) for key, layout in layouts.items())

    def _reduce(self) -> Iterator[Op]:
        for key, rule in self._keys():
            for axis in rule.sum_over:
                shards = self.zero and axis == rule.shard_over and axis == rule.sum_over[-1]
                collective = "reduce_scatter" if shards else "all_reduce"
                yield from self._collective(gradient_id(key, axis), collective, axis)

    def _publish(self) -> Iterator[Op]:
        for key, rule in self._keys() if self.zero else ():
            yield from self._collective(f"publish/{key}", "all_gather", rule.shard_over)

    def _layer_collective(
        self, name: str, collective: str, axis: str, at: tuple[int, int | None, Phase]
    ) -> Iterator[Op]:
        mb, layer, phase = at
        for op in self._collective(op_id(name, microbatch=mb, layer=layer, phase=phase), collective, axis):
            yield dataclasses.replace(op, microbatch=mb, layer=layer, phase=phase)

    def _collective(self, id: str, collective: str, axis: str) -> Iterator[Op]:
        if self.size(axis) > 1:
            yield Op(id=id, kind="collective", lane="comm", axis=axis, collective=collective)


def gradient_id(key: str, axis: str) -> str:
    """Id of the reduction of a flat layout (a key of `plan.layout.flat_layouts`) over an axis."""
    return f"gradient/{key}/{axis}"


def _compute(name: str, mb: int, layer: int | None, phase: Phase) -> Op:
    return Op(
        id=op_id(name, microbatch=mb, layer=layer, phase=phase),
        kind="compute",
        lane="compute",
        microbatch=mb,
        layer=layer,
        phase=phase,
    )


_MIRROR = {"all_gather_rows": "reduce_scatter_rows", "reduce_scatter_rows": "all_gather_rows"}
"""What carries the gradient of a collective, where it is another one."""

_FORWARD_ONLY = (
    "router.balance",
    "dispatch.full_experts",
    "dispatch.full_weights",
    "dispatch.counts",
    "dispatch.sizes",
    "dispatch.pairs",
    "loss.shares",
)
"""Integers and decisions: they have no gradient."""


def _mirrored(ops: Iterable[Op]) -> Iterator[Op]:
    """The backward pass of operations that are listed in forward order."""
    for op in reversed(list(ops)):
        if _is_differentiable(op):
            yield dataclasses.replace(op, collective=_MIRROR.get(op.collective, op.collective))


def _is_differentiable(op: Op) -> bool:
    return not op.id.endswith(_FORWARD_ONLY)
