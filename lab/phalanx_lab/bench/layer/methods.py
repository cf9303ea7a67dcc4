"""The methods that `phalanx bench layer` compares: schedules of ours by name, and collectives that send nothing.

Each idea is switched on alone, on top of what it cannot do without: blocks and parts hide nothing in serial order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from phalanx.plan.moe.overlap.types import TileSchedule
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Exchange, Message
from phalanx.runtime.comm.groups import Axis
from phalanx.runtime.moe.dispatch import Dispatcher
from phalanx.runtime.moe.experts import ExpertWeights
from phalanx.runtime.moe.overlap import run_overlapped

SERIAL = "serial"
COARSE = ("coarse:2", "coarse:4", "coarse:8")


@dataclass(frozen=True)
class Ours:
    schedule: TileSchedule
    per_token: bool = False
    """A token goes to a rank once, not once for each of its experts there."""


OURS = {
    "tiles": Ours(TileSchedule()),
    "dedup": Ours(TileSchedule(), per_token=True),
    "own first": Ours(TileSchedule(order="own_first")),
    "blocks": Ours(TileSchedule(order="own_first", blocks=4)),
    "parts": Ours(TileSchedule(order="own_first", parts=4)),
    "arrival": Ours(TileSchedule(order="arrival", own_before=0.5, parts=4)),
    "all 2": Ours(TileSchedule(order="arrival", own_before=0.5, parts=2, blocks=2), per_token=True),
    "all 4": Ours(TileSchedule(order="arrival", own_before=0.5, parts=4, blocks=2), per_token=True),
}
"""Name -> schedule. `tiles` is serial order by canonical tiles; `all N` everything at once, in N parts."""
METHODS = (SERIAL, *COARSE, *OURS)


def run_ours(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor,
    experts_TK: torch.Tensor,
    *,
    experts: ExpertWeights,
    dispatcher: Dispatcher,
    method: Ours,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`run_experts` by one of our schedules."""
    return run_overlapped(
        x_TH,
        weights_TK,
        experts_TK,
        experts=experts,
        dispatcher=dispatcher,
        schedule=method.schedule,
        per_token=method.per_token,
        **more,
    )


_KEPT = "dispatch.weights"
"""Messages of our layer that do travel: which entry each row takes, a few kilobytes."""


class Inside(Collectives):
    """Exchanges that send nothing: what would be received is copied from what would be sent, repeated or cut to the right size.

    Sizes must be right for that, so small tables of counts, which decide them, are gathered once and remembered by their shape.
    """

    def __init__(self, real: Collectives) -> None:
        super().__init__(timeout_s=real.timeout_s)
        self._real = real
        self._tables: dict[tuple[Any, ...], torch.Tensor] = {}

    def all_gather(
        self, shard: torch.Tensor, axis: Axis, *, out: torch.Tensor | None = None, op_id: str = ""
    ) -> torch.Tensor:
        key = (axis.name, tuple(shard.shape), shard.dtype)
        if key not in self._tables:
            self._tables[key] = self._real.all_gather(shard, axis, op_id=op_id)
        table = self._tables[key]
        return table if out is None else out.copy_(table)

    def start_send(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        if op_id.endswith(_KEPT):
            return self._real.start_send(message, axis, op_id=op_id)
        return Exchange(lambda: None)

    def start_receive(self, message: Message, axis: Axis, *, op_id: str = "") -> Exchange:
        if op_id.endswith(_KEPT):
            return self._real.start_receive(message, axis, op_id=op_id)
        message.tensor.fill_(1)
        return Exchange(lambda: None)

    def _start_exchange(
        self, op: str, x: torch.Tensor, axis: Axis, in_splits: Any, out_splits: Any, op_id: str
    ) -> tuple[torch.Tensor, Exchange]:
        out = x.new_empty((sum(out_splits), *x.shape[1:]))
        _fill(out, x)
        return out, Exchange(lambda: None)


def _fill(out: torch.Tensor, x: torch.Tensor) -> None:
    """Copy rows of `x` over `out`, from the beginning again where they do not suffice."""
    done = 0
    while done < len(out) and len(x):
        rows = min(len(x), len(out) - done)
        out[done : done + rows].copy_(x[:rows])
        done += rows
