"""Wrong collectives, for the planted faults of `faults.py`: what is not summed, summed twice, lost or misdirected on its way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from phalanx.runtime.comm.collectives import Collectives, ReduceOp
from phalanx.runtime.comm.exchange import Exchange, Message
from phalanx.runtime.comm.groups import Axis


class ExpertsDivided(Collectives):
    """The sum of expert gradients becomes a mean over edp."""

    def _divide(self, x: torch.Tensor, axis: Axis, op_id: str) -> None:
        if op_id.startswith("gradient/expert") and op_id.endswith("/edp"):
            x.div_(axis.size)

    def start_all_reduce(
        self, x: torch.Tensor, axis: Axis, *, op_id: str = "", totals: Sequence[int] | None = None
    ) -> Exchange:
        self._divide(x, axis, op_id)
        return super().start_all_reduce(x, axis, op_id=op_id)

    def start_reduce_scatter(
        self, x_flat: torch.Tensor, axis: Axis, *, op_id: str = "", totals: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, Exchange]:
        self._divide(x_flat, axis, op_id)
        return super().start_reduce_scatter(x_flat, axis, op_id=op_id)


class LocalBalance(Collectives):
    """Counts for the balancing loss stay those of the rank."""

    def all_reduce(self, x: torch.Tensor, axis: Axis, *, op: ReduceOp = "sum", op_id: str = "") -> torch.Tensor:
        if op_id.endswith("router.balance") or op_id == "balance_counts":
            return x
        return super().all_reduce(x, axis, op=op, op_id=op_id)


class LocalValidTokens(Collectives):
    """Each rank divides by its own number of labels, times the number of ranks."""

    def all_reduce(self, x: torch.Tensor, axis: Axis, *, op: ReduceOp = "sum", op_id: str = "") -> torch.Tensor:
        if op_id == "valid_tokens":
            return x * axis.size
        return super().all_reduce(x, axis, op=op, op_id=op_id)


class LocalBiasCounts(Collectives):
    """The expert bias follows the counts of the own rank: they are the tail of the vote."""

    NUM_FIGURES = 7
    """Behind them come times, which are for people."""

    def all_reduce(self, x: torch.Tensor, axis: Axis, *, op: ReduceOp = "sum", op_id: str = "") -> torch.Tensor:
        own = x.clone()
        out = super().all_reduce(x, axis, op=op, op_id=op_id)
        if op_id == "vote":
            out[self.NUM_FIGURES :] = own[self.NUM_FIGURES :]
        return out


class ClippedBeforeReduction(Collectives):
    """Each rank clips its own gradients, then they are summed."""

    LIMIT = 0.05

    def _clip(self, x: torch.Tensor, op_id: str) -> None:
        if op_id.startswith("gradient/"):
            x.mul_((self.LIMIT / x.norm().clamp(min=1e-30)).clamp(max=1.0))

    def start_all_reduce(
        self, x: torch.Tensor, axis: Axis, *, op_id: str = "", totals: Sequence[int] | None = None
    ) -> Exchange:
        self._clip(x, op_id)
        return super().start_all_reduce(x, axis, op_id=op_id)

    def start_reduce_scatter(
        self, x_flat: torch.Tensor, axis: Axis, *, op_id: str = "", totals: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, Exchange]:
        self._clip(x_flat, op_id)
        return super().start_reduce_scatter(x_flat, axis, op_id=op_id)


class NothingPublished(Collectives):
    """Each rank keeps its own shard of the new parameters, and the old values of the others'."""

    def all_gather(
        self, shard: torch.Tensor, axis: Axis, *, out: torch.Tensor | None = None, op_id: str = ""
    ) -> torch.Tensor:
        voted = ("all_reduce", "world") in self.counters  # the starting state was published before, soundly
        if op_id.startswith("publish/") and out is not None and voted:
            return out
        return super().all_gather(shard, axis, out=out, op_id=op_id)


class CopyWithoutGradient(Collectives):
    """What comes for a copy of another's shard is taken for zero. Sums travel apart, as over a transport with a reduce-scatter of its own."""

    def scatters(self, x: torch.Tensor) -> bool:
        return True

    def start_exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], axis: Axis, *, op_id: str = ""
    ) -> Exchange:
        exchange = super().start_exchange(sends, receives, axis, op_id=op_id)
        if not op_id.endswith("/copies"):
            return exchange

        def finish() -> None:
            exchange.wait()
            for message in receives:
                message.tensor.zero_()

        return Exchange(finish)


class WrongCombineSplits(Collectives):
    """Cuts rows on the way back at the sizes of the next rank."""

    def all_to_all_rows(
        self,
        x: torch.Tensor,
        *,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        axis: Axis,
        op_id: str = "",
    ) -> torch.Tensor:
        if axis.group is None or not op_id.endswith("combine.rows"):
            return super().all_to_all_rows(x, in_splits=in_splits, out_splits=out_splits, axis=axis, op_id=op_id)
        wrong = [*in_splits[1:], in_splits[0]]
        told = self.gather_objects(wrong, axis)
        arriving = [sends[axis.index] for sends in told]
        y = super().all_to_all_rows(x, in_splits=wrong, out_splits=arriving, axis=axis, op_id=op_id)
        missing = sum(out_splits) - len(y)
        return F.pad(y, (0, 0, 0, missing)) if missing >= 0 else y[: sum(out_splits)]


class RowLost(Collectives):
    """The first row that a rank sends to the experts arrives as zeros."""

    def all_to_all_rows(
        self,
        x: torch.Tensor,
        *,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        axis: Axis,
        op_id: str = "",
    ) -> torch.Tensor:
        if op_id.endswith("dispatch.rows") and len(x):
            keep = torch.ones(len(x), 1, dtype=x.dtype)
            keep[0] = 0
            x = x * keep
        return super().all_to_all_rows(x, in_splits=in_splits, out_splits=out_splits, axis=axis, op_id=op_id)


class RouterDetached(Collectives):
    """Routing weights travel without their gradient."""

    def all_to_all_rows(
        self,
        x: torch.Tensor,
        *,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        axis: Axis,
        op_id: str = "",
    ) -> torch.Tensor:
        y = super().all_to_all_rows(x, in_splits=in_splits, out_splits=out_splits, axis=axis, op_id=op_id)
        return y.detach() if op_id.endswith("dispatch.weights") else y


class SlicesNotSummed(Collectives):
    """A token gets the part that its own slice of the expert computed, not the sum over etp."""

    def reduce_scatter_rows(
        self, x: torch.Tensor, *, sizes: Sequence[int], axis: Axis, op_id: str = ""
    ) -> torch.Tensor:
        if axis.size > 1 and op_id.endswith("combine.rows_etp"):
            return x.split(list(sizes))[axis.index]
        return super().reduce_scatter_rows(x, sizes=sizes, axis=axis, op_id=op_id)
