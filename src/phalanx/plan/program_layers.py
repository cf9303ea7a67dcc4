"""One micro-batch through the layers of one pipeline stage, forward and backward, as operations in the order of a run.

Decides nothing: it says what `models/` does. Must never change: groups of one rank communicate nothing, so their collectives do not exist;
between attention (up to `attention.scatter`) and experts (from `dispatch.counts` on) there is no collective but the router's own sum of counts for
its balancing loss.

The operations of context parallelism do not mirror their forward pass, and are in `program_context.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.dispatch import DispatchSpec
from phalanx.plan.model import ModelSpec
from phalanx.plan.program_context import Context
from phalanx.plan.program_ops import At, Op, Phase, compute, host, mirrored
from phalanx.plan.stage_foldings import AnyFolding
from phalanx.plan.stages import Stage


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The groups of one rank. `shares_table` are the ranks that have the same part of the embedding's table."""

    folding: AnyFolding
    rank: int
    shares_table: tuple[int, ...]

    def size(self, axis: str) -> int:
        if axis == "embedding":
            return len(self.shares_table)
        return len(self.folding.group_of(self.rank, axis))

    def collective(self, id: str, kind: str, axis: str) -> Iterator[Op]:
        """Nothing, where the rank is alone on the axis."""
        if self.size(axis) > 1:
            yield Op(id=id, kind="collective", lane="comm", axis=axis, collective=kind)

    def at(self, at: At, name: str, kind: str, axis: str) -> Iterator[Op]:
        """The same of one layer and micro-batch."""
        for op in self.collective(at.id(name), kind, axis):
            yield dataclasses.replace(op, **at._asdict())


@dataclass(frozen=True)
class _Layer:
    """One layer in forward order. `core` is attention itself, with what it sends over cp."""

    before: tuple[Op, ...]
    core: tuple[Op, ...]
    after: tuple[Op, ...]


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The model's operations on one rank."""

    reach: Reach
    spec: ModelSpec
    dispatch: DispatchSpec
    context: Context
    recompute: str
    counts_first: bool
    """Whether the balancing loss has the counts of the whole step before the first forward pass."""

    def forward(self, stage: Stage, mb: int, phase: Phase) -> Iterator[Op]:
        """A stage's forward pass, in training (`fwd`) with its loss."""
        if stage.has_embedding:
            yield from self._embedding(At(mb, None, phase))
        for layer in stage.layers:
            yield from self._in_order(At(mb, layer, phase))
        for layer in self._further(stage):
            yield from self._embedding(At(mb, layer, phase))
            yield from self._in_order(At(mb, layer, phase))
        if stage.has_head and phase == "fwd":
            yield from self._loss(mb, phase)

    def backward(self, stage: Stage, mb: int) -> Iterator[Op]:
        """A stage's backward pass, or the half of it that makes the gradient of its input: the other half sends nothing."""
        if stage.has_head:
            yield from mirrored(self._loss(mb, "bwd"))
        for layer in reversed(self._further(stage)):
            yield from self._layer_backward(mb, layer)
            yield from mirrored(self._embedding(At(mb, layer, "bwd")))
        for layer in reversed(stage.layers):
            yield from self._layer_backward(mb, layer)
        if stage.has_embedding:
            yield from mirrored(self._embedding(At(mb, None, "bwd")))

    def _further(self, stage: Stage) -> Sequence[int]:
        """Blocks of multi-token prediction: on the stage of the head."""
        return self.spec.mtp_blocks if stage.has_head else ()

    def _embedding(self, at: At) -> Iterator[Op]:
        yield compute("embedding", at)
        yield from self.reach.at(at, "embedding.scatter", "reduce_scatter_rows", "tp")

    def _loss(self, mb: int, phase: Phase) -> Iterator[Op]:
        """With a vocabulary that is split over tp, each group of chunks exchanges three numbers a token; here: one group."""
        for layer in (None, *self.spec.mtp_blocks):
            at = At(mb, layer, phase)
            yield from self.reach.at(at, "loss.gather", "all_gather_rows", "tp")
            yield from self.reach.at(at, "loss.shares", "all_gather", "tp")
            yield compute("loss", at)

    # ---- one layer -------------------------------------------------------------------------------------------------------

    def _in_order(self, at: At) -> Iterator[Op]:
        layer = self._layer(at)
        yield from (*layer.before, *layer.core, *layer.after)

    def _layer_backward(self, mb: int, number: int) -> Iterator[Op]:
        layer, again = (self._layer(At(mb, number, phase)) for phase in ("bwd", "re"))
        ends = len(layer.after)
        if self.recompute == "full":
            ends -= self._not_run_again(layer.after)
            yield from mirrored(layer.after[ends:])
            yield from (*again.before, *again.core, *again.after[:ends])
        yield from mirrored(layer.after[:ends])
        yield from self.context.backward(At(mb, number, "bwd"), again=self.recompute == "selective")
        yield from mirrored(layer.before)

    def _not_run_again(self, ops: Sequence[Op]) -> int:
        """Operations at the end of a recomputed layer whose gradient needs nothing that was kept: it is taken before the layer is run again,
        and the second run ends before them."""
        last = ops[-1].id
        return int(last.endswith(".mlp.scatter") or (last.endswith(".shared.scatter") and not self.spec.shared_gate))

    def _layer(self, at: At) -> _Layer:
        return _Layer(tuple(self._projections(at)), tuple(self.context.forward(at)), tuple(self._rest(at)))

    def _projections(self, at: At) -> Iterator[Op]:
        yield from self.reach.at(at, "attention.gather", "all_gather_rows", "tp")
        if self.spec.qk_norm == "hidden":
            yield from self.reach.at(at, "attention.q_norm", "all_reduce", "tp")
            yield from self.reach.at(at, "attention.k_norm", "all_reduce", "tp")
        if self.spec.mla is None and self.reach.size("tp") > self.spec.num_kv_heads:
            yield from self.reach.at(at, "attention.kv", "all_to_all_rows", "tp")
        yield compute("attention.projections", at)

    def _rest(self, at: At) -> Iterator[Op]:
        """From the output of attention to the end of the layer."""
        yield compute("attention.out", at)
        yield from self.reach.at(at, "attention.scatter", "reduce_scatter_rows", "tp")
        if at.layer not in self.spec.moe_layers:
            yield from self._split_by_tp("mlp", at)
            return
        yield compute("router", at)
        yield from self._balance(at)
        yield from self._dispatch(at)
        yield compute("experts", at)
        yield from self._combine(at)
        if self.spec.shared_ffn:
            yield from self._split_by_tp("shared", at)

    def _split_by_tp(self, name: str, at: At) -> Iterator[Op]:
        """Rows are gathered, each rank computes its width, partial sums are scattered."""
        yield from self.reach.at(at, f"{name}.gather", "all_gather_rows", "tp")
        yield compute(name, at)
        yield from self.reach.at(at, f"{name}.scatter", "reduce_scatter_rows", "tp")

    def _balance(self, at: At) -> Iterator[Op]:
        """Counts for the balancing loss, summed over the tokens that it is about."""
        router = self.spec.router
        if not router.aux_loss or at.phase == "count":
            return
        if router.aux_scope != "global_batch":
            yield from self.reach.at(at, "router.balance", "all_reduce", "tp_cp")
        elif not self.counts_first:
            yield from self.reach.at(at, "router.balance", "all_reduce", "tp_dp_cp")

    # ---- experts ---------------------------------------------------------------------------------------------------------

    @property
    def _gathers(self) -> bool:
        return self.dispatch.transport == "all_gather" and self.reach.size("ep_etp") > 1

    def _dispatch(self, at: At) -> Iterator[Op]:
        spec = self.dispatch
        if spec.policy == "drop" and spec.drop_scope == "full_sequence":
            yield from self.reach.at(at, "dispatch.full_experts", "all_gather", "tp_cp")
            yield from self.reach.at(at, "dispatch.full_weights", "all_gather", "tp_cp")
        if not spec.is_static:
            yield from self.reach.at(at, "dispatch.counts", "all_gather", "ep_etp")
            yield host("dispatch.sizes", at)
        if self._gathers:
            for name in ("rows", "weights", "pairs"):
                yield from self.reach.at(at, f"dispatch.{name}", "all_gather_rows", "ep_etp")
            yield compute("dispatch.permute", at)
            return
        yield compute("dispatch.permute", at)
        for name in ("rows", "weights"):
            yield from self.reach.at(at, f"dispatch.{name}", "all_to_all_rows", "ep")
            yield from self.reach.at(at, f"dispatch.{name}_etp", "all_gather_rows", "etp")
        yield compute("dispatch.sort", at)

    def _combine(self, at: At) -> Iterator[Op]:
        if self._gathers:
            yield compute("combine.sum", at)
            yield from self.reach.at(at, "combine.rows", "reduce_scatter_rows", "ep_etp")
            return
        yield compute("combine.sort", at)
        yield from self.reach.at(at, "combine.rows_etp", "reduce_scatter_rows", "etp")
        yield from self.reach.at(at, "combine.rows", "all_to_all_rows", "ep")
        yield compute("combine.sum", at)
