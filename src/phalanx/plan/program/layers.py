"""One micro-batch through the layers of one pipeline stage, forward and backward, as operations in the order of a run.

Decides nothing: it says what `models/` does. Must never change: groups of one rank communicate nothing, so their collectives do not exist;
between attention (up to `attention.scatter`) and experts (from `dispatch.counts` on) there is no collective but the router's own sum of counts for
its balancing loss.

The operations of context parallelism do not mirror their forward pass, and are in `context.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from phalanx.plan.mapping import Stage
from phalanx.plan.model import ModelSpec
from phalanx.plan.moe import DispatchSpec
from phalanx.plan.program.context import Context
from phalanx.plan.program.experts import Reach, moe_operations
from phalanx.plan.program.ops import At, Op, Phase, compute, mirrored


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
    slots: int
    """Experts, or replicas of them, that a rank holds of a layer."""

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
        """Operations of the loss: with a vocabulary that is split over tp, each group of chunks exchanges three numbers a token;
        here: one group."""
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
        """Operations from the output of attention to the end of the layer."""
        yield compute("attention.out", at)
        yield from self.reach.at(at, "attention.scatter", "reduce_scatter_rows", "tp")
        if at.layer not in self.spec.moe_layers:
            yield from self._split_by_tp("mlp", at)
            return
        yield compute("router", at)
        yield from self._balance(at)
        shared = tuple(self._split_by_tp("shared", at)) if self.spec.shared_ffn else ()
        yield from self.experts(at, beside=shared)

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

    def experts(self, at: At, *, beside: Sequence[Op] = ()) -> Iterator[Op]:
        """Routed experts by the way that `dispatch.overlap` names, and the shared expert beside them."""
        return moe_operations(self.reach, self.dispatch, at, beside, slots=self.slots)
