"""The methods that `phalanx bench layer` compares, each a value of `dispatch.overlap`, and collectives that send nothing.

Each idea is switched on alone, on top of what it cannot do without: blocks and parts hide nothing in serial order.
"""

from __future__ import annotations

from typing import Any

import torch

from phalanx.plan.moe.overlap.settings import parse_overlap
from phalanx.runtime.comm.collectives import Collectives
from phalanx.runtime.comm.exchange import Exchange, Message
from phalanx.runtime.comm.groups import Axis

SERIAL, AUTO = "serial", "auto"
COARSE = ("coarse:2", "coarse:4", "coarse:8")
OURS = {
    "tiles": "tiles:rows=pairs",
    "dedup": "tiles:rows=tokens",
    "own first": "tiles:order=own_first,rows=pairs",
    "blocks": "tiles:order=own_first,blocks=2,rows=pairs",
    "parts": "tiles:parts=4,order=own_first,rows=pairs",
    "arrival": "tiles:parts=4,order=arrival,own_before=0.5,rows=pairs",
    "all 2": "tiles:parts=2,order=arrival,own_before=0.5,blocks=2,rows=tokens",
    "all 4": "tiles:parts=4,order=arrival,own_before=0.5,blocks=2,rows=tokens",
}
"""Name -> what a recipe writes. `tiles` is serial order by canonical tiles; `all N` everything at once, in N parts."""
METHODS = (SERIAL, *COARSE, *OURS, AUTO)


def overlap_of(method: str) -> str:
    """`dispatch.overlap` of a recipe whose layer is this method."""
    return OURS.get(method, method)


def sends_tokens(method: str) -> bool | None:
    """Whether a token of one of our methods goes to a rank once; None: as the batch's bytes say."""
    return parse_overlap(overlap_of(method)).per_token


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
        self, op: str, x: torch.Tensor, axis: Axis, in_splits: Any, out_splits: Any, op_id: str, *, tag: int = 0
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
