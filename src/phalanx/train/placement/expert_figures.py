"""What a rank knows of its experts, for the next decision about them: where its stage has them, what a row of one takes, and what past moves have taken."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from phalanx.kernels.ops.grouped import expert_ffn
from phalanx.models import MoE
from phalanx.plan.mapping import LayerPlacements, Placement
from phalanx.runtime.comm import synchronize
from phalanx.train.step import StepParts

TIMED_ROWS = 128
TRIES = 3


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


BYTES_PER_S = 1e9
"""Bytes per second of a move for which all stand still, until one was measured."""
BESIDE_BYTES_PER_S = 3 * BYTES_PER_S
"""Bytes per second of a move that overlaps a step: training stands still for the gradients alone, a third as much as the state."""
LAST = 5
"""Moves whose figures are kept."""
MEMORY = 10
"""Decisions for which they are."""


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

    def took(self, *, rebuild_s: float, bytes_per_s: float | None, beside: bool = False) -> None:
        """A move is done. `bytes_per_s`: state that came to a rank, by the seconds for which training stood still for it; None: nothing came to any rank. `beside`: it overlapped a step."""
        past = _Past(at=self._decisions, rebuild_s=rebuild_s, bytes_per_s=bytes_per_s, beside=beside)
        self._moves = [*self._moves, past][-LAST:]

    @property
    def rebuild_s(self) -> float:
        """Seconds to build modules and buffers; 0 where nothing is known."""
        return min((m.rebuild_s for m in self._moves), default=0.0)

    def bytes_per_s(self, *, beside: bool) -> float:
        """Bytes per second of state, in moves of that way."""
        found = [m.bytes_per_s for m in self._moves if m.bytes_per_s is not None and m.beside == beside]
        return max(found, default=BESIDE_BYTES_PER_S if beside else BYTES_PER_S)


@dataclass(frozen=True, kw_only=True)
class _Past:
    at: int
    rebuild_s: float
    bytes_per_s: float | None
    beside: bool
