"""What could go wrong inside an overlapped MoE layer, as collectives and parts that do it: for the planted faults of `faults.py`.

Messages of the tile executor are told by the ends of their ids (`runtime/moe/overlap.py`): forward, `dispatch.rows` are entries on their way to the
experts and `combine.rows` partial sums on their way back; backward it is the other way round, as each exchange has the id of the one whose gradient it carries.
`dispatch.weights` are tables of what rows weigh, and backward the gradients of those weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from phalanx.models.moe import MoE
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Exchange, Message
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.comm.row_collectives import RowsUnderWay
from phalanx.runtime.moe.experts import MoeCall
from phalanx.runtime.moe.routed import RoutedExperts
from phalanx.train.step.transaction import StepParts


def _goes(op_id: str) -> bool:
    """Entries, or gradients of the output, on their way to the experts."""
    return ("combine.rows" if _is_backward(op_id) else "dispatch.rows") in op_id


def _returns(op_id: str) -> bool:
    """Partial sums on their way back."""
    return ("dispatch.rows" if _is_backward(op_id) else "combine.rows") in op_id


def _tells_dots(op_id: str) -> bool:
    """Gradients of routing weights."""
    return _is_backward(op_id) and "dispatch.weights" in op_id


def _is_backward(op_id: str) -> bool:
    return "bwd" in op_id


class _Altered(Collectives):
    """Receives whose result is tampered with once it is there. The program knows of no change: versions of tensors stay what they were."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._remembered: dict[Any, torch.Tensor] = {}

    def _then(self, exchange: Exchange, what: Callable[[], None]) -> Exchange:
        def finish() -> None:
            exchange.wait()
            what()

        return Exchange(finish)


class TileBeforeRows(_Altered):
    """Rows get into their place one message too late: tiles of the part are computed on zeros."""

    def start_receive(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        if not _goes(op_id):
            return super().start_receive(message, axis, op_id=op_id)
        place, come = message.tensor.data.zero_(), torch.empty_like(message.tensor)

        def late() -> None:
            if self._remembered:
                self._remembered["place"].copy_(self._remembered["rows"])
            self._remembered = {"place": place, "rows": come}

        exchange = super().start_receive(dataclasses.replace(message, tensor=come), axis, op_id=op_id)
        return self._then(exchange, late)


class ColumnsExchanged(Collectives):
    """The left half of the columns goes back where the right one belongs: one block in the place of another."""

    def start_send(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        if _returns(op_id):
            wrong = message.tensor.roll(message.tensor.shape[1] // 2, 1)
            message = dataclasses.replace(message, tensor=wrong)
        return super().start_send(message, axis, op_id=op_id)


class SumsMisplaced(_Altered):
    """Partial sums of each message are taken for those of the next token."""

    def start_receive(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        exchange, sums = super().start_receive(message, axis, op_id=op_id), message.tensor.data
        if not _returns(op_id):
            return exchange
        return self._then(exchange, partial(_move_on, sums))


def _move_on(sums: torch.Tensor) -> None:
    sums.copy_(sums.roll(1, 0))


class PartOverwritten(_Altered):
    """Backward, the first rows that came from a rank are gone when gradients of weights are taken, but not before."""

    def start_receive(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        if _goes(op_id) and _is_backward(op_id):
            self._remembered.setdefault((op_id, message.peer), message.tensor.data)
        return super().start_receive(message, axis, op_id=op_id)

    def start_send(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        if _tells_dots(op_id):  # this is told when all tiles of the rank's rows are done
            rows = self._remembered.pop((op_id.replace("dispatch.weights", "combine.rows"), message.peer), None)
            if rows is not None:
                rows.zero_()
        return super().start_send(message, axis, op_id=op_id)


class RouterOfPartLost(_Altered):
    """Loses the first half of the gradients of routing weights that a rank sends."""

    def start_receive(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        exchange, dots = super().start_receive(message, axis, op_id=op_id), message.tensor.data
        if not _tells_dots(op_id):
            return exchange
        return self._then(exchange, partial(_lose_half, dots))


def _lose_half(dots: torch.Tensor) -> None:
    dots[: (len(dots) + 1) // 2] = 0


class RowsOfPassBefore(_Altered):
    """A receive buffer is read with what the same rank had sent for the layer (or pass) before."""

    def start_receive(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        exchange, rows = super().start_receive(message, axis, op_id=op_id), message.tensor.data
        if not _goes(op_id):
            return exchange

        def stale() -> None:
            key = axis.name, message.peer
            come, before = rows.clone(), self._remembered.get(key)
            if before is not None:
                rows[: len(before)] = before[: len(rows)]
            self._remembered[key] = come

        return self._then(exchange, stale)


class ChunkRouterDetached(Collectives):
    """`coarse:N`: routing weights of the second chunk travel without their gradient."""

    def start_all_to_all_rows(
        self,
        x: torch.Tensor,
        *,
        in_splits: Sequence[int],
        out_splits: Sequence[int],
        axis: Axis,
        op_id: str = "",
    ) -> RowsUnderWay:
        if op_id.endswith("dispatch.chunk1.weights"):
            x = x.detach()
        return super().start_all_to_all_rows(x, in_splits=in_splits, out_splits=out_splits, axis=axis, op_id=op_id)


class _OwnRowsTwice:
    """Routed experts that add what their own rank's experts gave to its own tokens once more."""

    def __init__(self, sound: RoutedExperts) -> None:
        self.sound, self.dispatcher = sound, sound.dispatcher

    def __call__(self, call: MoeCall) -> tuple[torch.Tensor, torch.Tensor]:
        ep, per_rank = self.dispatcher.ep, len(self.dispatcher.slots_G) // self.dispatcher.ep.size
        own_TK = torch.div(call.experts_TK, per_rank, rounding_mode="floor") == ep.index
        weights_TK = call.weights_TK * (1 + own_TK.to(call.weights_TK.dtype))
        return self.sound(dataclasses.replace(call, weights_TK=weights_TK))


def own_rows_twice(parts: StepParts) -> StepParts:
    """Counts own rows twice in every MoE layer."""
    for module in parts.model.modules():
        if isinstance(module, MoE):
            wrong: Any = _OwnRowsTwice(module.routed)
            module.routed = wrong
    return parts
