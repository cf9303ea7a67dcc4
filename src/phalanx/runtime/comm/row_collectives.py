"""Collectives of rows that gradients flow through: each is an autograd function whose backward pass is the collective that carries gradients back.

Gradients are sums over the ranks that received a copy, never means. `runtime/comm/collectives.py` applies them, and does what they ask for on raw tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from phalanx.runtime.comm.exchange import Exchange
from phalanx.runtime.comm.groups import Axis


class RawRows(Protocol):
    """What these ask for: the collectives of `runtime/comm/collectives.py` as they are without autograd."""

    def all_reduce(self, x: torch.Tensor, axis: Axis, *, op_id: str = "") -> torch.Tensor: ...

    def gather_rows_raw(self, x: torch.Tensor, axis: Axis, sizes: Sequence[int], op_id: str) -> torch.Tensor: ...

    def scatter_rows_raw(self, x: torch.Tensor, axis: Axis, sizes: Sequence[int], op_id: str) -> torch.Tensor: ...

    def all_to_all_raw(
        self, x: torch.Tensor, axis: Axis, in_splits: Sequence[int], out_splits: Sequence[int], op_id: str
    ) -> torch.Tensor: ...

    def start_all_to_all_raw(
        self, x: torch.Tensor, axis: Axis, in_splits: Sequence[int], out_splits: Sequence[int], op_id: str
    ) -> tuple[torch.Tensor, Exchange]: ...


def backward_id(op_id: str) -> str:
    """Id of the collective that carries the gradient of `op_id`."""
    return op_id.replace(".fwd.", ".bwd.") if ".fwd." in op_id else (op_id and op_id + ".bwd")


class AllToAllRows(torch.autograd.Function):
    """Gradient: the same exchange with the splits swapped."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        comms: RawRows,
        axis: Axis,
        in_splits: tuple[int, ...],
        out_splits: tuple[int, ...],
        op_id: str,
    ) -> torch.Tensor:
        ctx.comms, ctx.axis, ctx.splits, ctx.op_id = comms, axis, (in_splits, out_splits), op_id
        return comms.all_to_all_raw(x, axis, in_splits, out_splits, op_id)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        in_splits, out_splits = ctx.splits
        back = ctx.comms.all_to_all_raw(grad, ctx.axis, out_splits, in_splits, backward_id(ctx.op_id))
        return back, None, None, None, None, None


class RowsUnderWay:
    """Rows of other ranks on their way here (`Collectives.start_all_to_all_rows`)."""

    def __init__(self, token: torch.Tensor, trip: RowExchange | None = None) -> None:
        self._token, self._trip = token, trip

    def wait(self) -> torch.Tensor:
        """(N, ...) the rows, once. Raises `PeerError`."""
        if self._trip is None:  # an axis of one rank: they have been here all the time
            return self._token
        out: torch.Tensor = WaitRows.apply(self._token, self._trip)
        return out


class RowExchange:
    """What start and wait of one exchange share, forward and backward."""

    def __init__(
        self, comms: RawRows, axis: Axis, in_splits: tuple[int, ...], out_splits: tuple[int, ...], op_id: str
    ) -> None:
        self.comms, self.axis, self.in_splits, self.out_splits, self.op_id = comms, axis, in_splits, out_splits, op_id
        self._under_way: tuple[torch.Tensor, Exchange] | None = None

    def go(self, x: torch.Tensor) -> None:
        self._under_way = self.comms.start_all_to_all_raw(x, self.axis, self.in_splits, self.out_splits, self.op_id)

    def come_back(self, grad: torch.Tensor) -> None:
        self._under_way = self.comms.start_all_to_all_raw(
            grad, self.axis, self.out_splits, self.in_splits, backward_id(self.op_id)
        )

    def arrive(self) -> torch.Tensor:
        if self._under_way is None:
            raise ValueError(
                f"exchange [{self.op_id}] over {self.axis.name} is not under way, or was waited for already"
            )
        (out, exchange), self._under_way = self._under_way, None
        exchange.wait()
        return out


class StartRows(torch.autograd.Function):
    """Rows leave; what autograd sees in their place until they are waited for is an empty tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, trip: RowExchange) -> torch.Tensor:
        ctx.trip = trip
        trip.go(x)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        return ctx.trip.arrive(), None


class WaitRows(torch.autograd.Function):
    """Rows arrive. Gradient: it leaves, and arrives where the rows had left."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, trip: RowExchange) -> torch.Tensor:
        ctx.trip = trip
        return trip.arrive()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ctx.trip.come_back(grad)
        return grad.new_empty(0), None


class AllGatherRows(torch.autograd.Function):
    """Gradient: the copies' gradients, summed and scattered back."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comms: RawRows, axis: Axis, sizes: tuple[int, ...], op_id: str
    ) -> torch.Tensor:
        ctx.comms, ctx.axis, ctx.sizes, ctx.op_id = comms, axis, sizes, op_id
        return comms.gather_rows_raw(x, axis, sizes, op_id)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        back = ctx.comms.scatter_rows_raw(grad, ctx.axis, ctx.sizes, backward_id(ctx.op_id))
        return back, None, None, None, None


class ReduceScatterRows(torch.autograd.Function):
    """Gradient: the gradients of the shares, gathered by all."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, comms: RawRows, axis: Axis, sizes: tuple[int, ...], op_id: str
    ) -> torch.Tensor:
        ctx.comms, ctx.axis, ctx.sizes, ctx.op_id = comms, axis, sizes, op_id
        return comms.scatter_rows_raw(x, axis, sizes, op_id)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        back = ctx.comms.gather_rows_raw(grad, ctx.axis, ctx.sizes, backward_id(ctx.op_id))
        return back, None, None, None, None


class AllReduceSum(torch.autograd.Function):
    """Every rank uses the whole sum, so a rank's part gets the sum of what all of them say of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, comms: RawRows, axis: Axis, op_id: str) -> torch.Tensor:
        ctx.comms, ctx.axis, ctx.op_id = comms, axis, op_id
        return comms.all_reduce(x.detach().clone(), axis, op_id=op_id)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        back = ctx.comms.all_reduce(grad.contiguous().clone(), ctx.axis, op_id=backward_id(ctx.op_id))
        return back, None, None, None
